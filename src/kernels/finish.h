// From the running maximum and total of a row to the factor of its output and its log-sum-exp.
#pragma once

#include "../contract/tiles.h"
#include "vector.h"

namespace {
namespace MHA_ISA_NAMESPACE {

constexpr double minus_infinity = -__builtin_inf();

// A gate of exactly 0 switches the head off, whatever its values hold: 0 * NaN must not come out of it.
inline bool switched_off(ptrdiff_t row, const mha_finish *how) { return how->gate && how->gate[row] == 0; }

// Returns what the sum of weights times values must be multiplied by; writes the log-sum-exp where asked for.
// A sink is one more logit with no value: it takes part in the maximum and in the total (semantics of `sinks`).
template <class T>
inline T finish_row(double maximum, double total, ptrdiff_t row, const mha_finish *how) {
    const bool no_key = total == 0;
    double logit = maximum * how->lse_scale, weight = 1;
    if (how->sink) {
        double sink = how->sink[row], highest = logit > sink ? logit : sink;  // NaN in a sink stays
        if (highest > minus_infinity || highest != highest) {
            weight = __builtin_exp(logit - highest);
            total = total * weight + __builtin_exp(sink - highest);
            logit = highest;
        }
    }
    if (how->lse) {
        T lse = T(logit + __builtin_log(total));
        memcpy(how->lse[row], &lse, sizeof lse);
    }
    // Without a key the output is 0, whatever sink and gate are; so it is where the head is switched off.
    if (no_key || switched_off(row, how)) return T(0);
    return T((how->gate ? how->gate[row] : 1) * weight / total * how->out_scale);
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
