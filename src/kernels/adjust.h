// From a raw dot product to the logit that the softmax sees, in the order of the public contract:
// scale, softcap, ALiBi, mask, visible range.
#pragma once

#include "../kernels.h"
#include "elementary.h"

namespace {
namespace MHA_ISA_NAMESPACE {

template <class T> constexpr T infinity = T(__builtin_inf());
template <class T> constexpr T largest_finite = sizeof(T) == 4 ? T(__FLT_MAX__) : T(__DBL_MAX__);

template <class T> MHA_INLINE vec<T> soft_capped(vec<T> score, T softcap) {
    return softcap * hyperbolic_tangent<T>(score / softcap);
}

// Adds a mask.  Only a mask (or score) of -inf excludes: a finite sum stays finite, however low, and an excluded key
// loses even a NaN score.
template <class T> MHA_INLINE vec<T> biased(vec<T> score, vec<T> bias) {
    vec<T> sum = larger<T>(splat(-largest_finite<T>), score + bias);
    return ((bias == -infinity<T>) | (score == -infinity<T>)) ? splat(-infinity<T>) : sum;
}

template <class T> MHA_INLINE vec<T> in_range(vec<T> score, vec<T> key, vec<T> first, vec<T> last) {
    return ((key >= first) & (key < last)) ? score : splat(-infinity<T>);
}

// Lanes are rows; scores are [key][ROWS].
template <class T, int ROWS>
void adjust(void *score_, void *peak_, ptrdiff_t n_row, ptrdiff_t n_key, const mha_adjust *how) {
    T *score = (T *)score_, *peak = (T *)peak_;
    const T *slope = (const T *)how->slope, *distance = (const T *)how->distance, *bias = (const T *)how->bias;
    const T *first = (const T *)how->first, *last = (const T *)how->last;
    const T scale = T(how->score_scale), softcap = T(how->softcap);
    for (ptrdiff_t row = 0; row < n_row; row += lanes<T>) {
        vec<T> highest = splat(-infinity<T>);
        for (ptrdiff_t key = 0; key < n_key; key++) {
            T *place = score + key * ROWS + row;
            vec<T> s = load(place) * scale;
            if (softcap != 0) s = soft_capped<T>(s, softcap);
            if (slope) s -= load(slope + row) * magnitude<T>(load(distance + row) - T(key));
            if (bias)
                s = biased<T>(s, how->bias_row_stride ? load(bias + key * ROWS + row) : splat(bias[key]));
            if (first) s = in_range<T>(s, splat(T(key)), load(first + row), load(last + row));
            store(place, s);
            highest = larger<T>(highest, s);
        }
        store(peak + row, highest);
    }
}

// One row, lanes are keys.  The lanes past n_key become -inf.
template <class T> void few_adjust(void *score_, ptrdiff_t n_key, const mha_adjust *how) {
    T *score = (T *)score_;
    const T *bias = (const T *)how->bias;
    const T scale = T(how->score_scale), softcap = T(how->softcap);
    const T first = how->first ? *(const T *)how->first : T(0);
    const T last = how->last ? *(const T *)how->last : T(n_key);
    for (ptrdiff_t key = 0; key < n_key; key += lanes<T>) {
        vec<T> number = lane_numbers<T>() + T(key);
        vec<T> s = load(score + key) * scale;
        if (softcap != 0) s = soft_capped<T>(s, softcap);
        if (how->slope) s -= *(const T *)how->slope * magnitude<T>(*(const T *)how->distance - number);
        if (bias) s = biased<T>(s, load(bias + key));
        store(score + key, in_range<T>(s, number, splat(first), splat(last)));
    }
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
