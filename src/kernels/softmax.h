// The one place that knows what a score weighs: 2**((score - base) * exp_scale), with the base the maximum of the row.
// Blocks come one after the other, so the maximum moves on and what was summed before is multiplied by the weight of the
// maximum before (online softmax: Milakov & Gimelshein 2018).
#pragma once

#include "elementary.h"

namespace {
namespace MHA_ISA_NAMESPACE {

template <class T> constexpr T infinity = T(__builtin_inf());

// A row that has seen no key yet has maximum -inf; -inf - -inf would be NaN, -inf - 0 gives weight 0.
template <class T> MHA_INLINE vec<T> base_of(vec<T> maximum) { return maximum == -infinity<T> ? vec<T>{} : maximum; }
inline double base_of(double maximum) { return maximum == -infinity<double> ? 0 : maximum; }

template <class T, class Scale> MHA_INLINE vec<T> weight_of(vec<T> score, vec<T> base, Scale exp_scale) {
    return exp2_nonpositive<T>((score - base) * exp_scale);
}
inline double weight_of(double score, double base, double exp_scale) {
    return __builtin_exp2((score - base) * exp_scale);
}

// Moves a running maximum on.  2**exponent is what earlier sums must be multiplied by.
template <class T> struct raised {
    vec<T> base, exponent;
};
template <class T, class Scale> MHA_INLINE raised<T> raise_maximum(T *maximum, vec<T> block_maximum, Scale exp_scale) {
    const vec<T> old = load(maximum), now = larger<T>(block_maximum, old), base = base_of<T>(now);
    store(maximum, now);
    return {base, (old - base) * exp_scale};
}

// With the softmax of a row known by its maximum and factor: an excluded key has weight 0 even in a row whose other
// weights are NaN.
template <class T> MHA_INLINE vec<T> known_weight(vec<T> score, vec<T> maximum, T exp_scale, vec<T> factor) {
    const vec<T> weight = weight_of<T>(score, base_of<T>(maximum), exp_scale) * factor;
    return score == -infinity<T> ? vec<T>{} : weight;
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
