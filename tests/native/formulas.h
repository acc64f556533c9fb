// Plain formulas that the checks of several domains compare with.
#pragma once

#include <math.h>

#include "check.h"

template <class T> void fill_scores(array<T> &score, noise &random, ptrdiff_t n_key, ptrdiff_t width) {
    for (ptrdiff_t i = 0; i < n_key * width; i++) put_number(score[i], random.normal() * 3);
}

// The logit that the softmax sees; `size` is what its rounding goes by.
template <class T> wide right_adjusted(wide s, const mha_adjust &how, wide slope, wide distance, wide bias, wide first,
                                       wide last, ptrdiff_t key, wide &size) {
    s *= how.score_scale;
    size = fabsl(s);
    if (how.softcap) s = how.softcap * tanhl(s / how.softcap), size += fabsl(how.softcap);
    if (how.slope) s -= slope * fabsl(distance - key), size += fabsl(slope * (distance - key));
    if (how.bias) {
        const wide least = sizeof(T) == 4 ? -wide(__FLT_MAX__) : -wide(__DBL_MAX__);
        if (bias == -infinite || s == -infinite) s = -infinite;
        else s = s + bias < least ? least : s + bias;
        if (isfinite(bias)) size += fabsl(bias);
    }
    if (how.first && !(key >= first && key < last)) s = -infinite;
    return s;
}

// Right factor and log-sum-exp of a row.
template <class T> wide right_factor(wide maximum, wide total, wide lse_scale, const double *sink, const double *gate,
                                     wide &lse) {
    const wide logit = maximum * lse_scale, top = sink && *sink > logit ? wide(*sink) : logit;
    const wide weight = sink ? expl(logit - top) : 1, all = total * weight + (sink ? expl(*sink - top) : 0);
    lse = (top == -infinite ? -infinite : top) + logl(all);
    if (total == 0 || (gate && *gate == 0)) return 0;
    return (gate ? wide(*gate) : 1) * weight / all;
}

struct row_ends {  // what finish() and its like are given
    std::vector<double> sink, gate;
    std::vector<char *> lse;
    mha_finish how = {};
};
template <class T> void describe_ends(row_ends &ends, array<T> &lse, noise &random, int options, ptrdiff_t n_row) {
    for (ptrdiff_t i = 0; i < n_row; i++) {
        ends.sink.push_back(random.normal() * 2), ends.gate.push_back(i % 3 == 1 ? 0 : random.normal());
        ends.lse.push_back((char *)&lse[i]);
    }
    ends.how.lse_scale = options & 8 ? 0.125 : 1;
    ends.how.out_scale = options & 16 ? 4 : 1;
    if (options & 1) ends.how.sink = ends.sink.data();
    if (options & 2) ends.how.gate = ends.gate.data();
    if (options & 4) ends.how.lse = ends.lse.data();
}
