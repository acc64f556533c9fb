// From a raw dot product to the logit that the softmax sees, in the order of the public contract:
// scale, softcap, ALiBi, mask, visible range.
#pragma once

#include "../contract/tiles.h"
#include "softmax.h"

namespace {
namespace MHA_ISA_NAMESPACE {

template <class T> constexpr T largest_finite = sizeof(T) == 4 ? T(__FLT_MAX__) : T(__DBL_MAX__);
// Added to a finite score, a number up to this size leaves it finite: it is less than half a unit in the last place of the largest.
template <class T> constexpr T harmless_bias = T(sizeof(T) == 4 ? 0x1p100 : 0x1p960);

template <class T> MHA_INLINE vec<T> soft_capped(vec<T> score, T softcap) {
    return softcap * hyperbolic_tangent<T>(score / softcap);
}

// Scales a score and adds a mask.  Only a mask (or score) of -inf excludes: a finite sum stays finite, however low, and
// an excluded key loses even a NaN score.
template <class T> MHA_INLINE vec<T> biased(vec<T> score, T scale, vec<T> bias) {
    const vec<T> sum = larger<T>(splat(-largest_finite<T>), multiply_add<T>(score, splat(scale), bias));
    return ((bias == -infinity<T>) | (score * scale == -infinity<T>)) ? splat(-infinity<T>) : sum;
}

// The same where the mask is harmless, so that the sum of a finite score and a finite bias needs no bound.
template <class T> MHA_INLINE vec<T> biased_harmlessly(vec<T> score, T scale, vec<T> bias) {
    const vec<T> sum = multiply_add<T>(score, splat(scale), bias);
    return bias == -infinity<T> ? splat(-infinity<T>) : sum;
}

template <class T> MHA_INLINE vec<T> in_range(vec<T> score, vec<T> key, vec<T> first, vec<T> last) {
    return ((key >= first) & (key < last)) ? score : splat(-infinity<T>);
}

// Replaces every score by change(score, key, row of the first lane), and takes the maximum over the keys anew.
// Lanes are rows; scores are [key][ROWS].
template <class T, int ROWS, class Change>
MHA_INLINE void change_scores(T *score, T *block_maximum, ptrdiff_t n_row, ptrdiff_t n_key, Change change) {
    with_vectors<T>(n_row, [&](auto vectors) __attribute__((always_inline)) {
        constexpr int n_vector = decltype(vectors)::value;
        vec<T> highest[n_vector];
        MHA_UNROLL for (int x = 0; x < n_vector; x++) highest[x] = splat(-infinity<T>);
        for (ptrdiff_t key = 0; key < n_key; key++) {
            MHA_UNROLL for (int x = 0; x < n_vector; x++) {
                T *at = score + key * ROWS + x * lanes<T>;
                const vec<T> s = change(load(at), key, x * lanes<T>);
                store(at, s);
                highest[x] = larger<T>(highest[x], s);
            }
        }
        MHA_UNROLL for (int x = 0; x < n_vector; x++) store(block_maximum + x * lanes<T>, highest[x]);
    });
}

template <class T, int ROWS>
void adjust(void *score_, void *block_maximum_, ptrdiff_t n_row, ptrdiff_t n_key, const mha_adjust *how) {
    T *score = (T *)score_, *block_maximum = (T *)block_maximum_;
    const T *slope = (const T *)how->slope, *distance = (const T *)how->distance, *bias = (const T *)how->bias;
    const T *first = (const T *)how->first, *last = (const T *)how->last;
    const T scale = T(how->score_scale), softcap = T(how->softcap);
    const bool shaped = softcap != 0 || slope, per_row = how->bias_row_stride;
    if (bias && per_row && how->bias_harmless && !shaped && !first) {
        change_scores<T, ROWS>(score, block_maximum, n_row, n_key,
                               [=](vec<T> s, ptrdiff_t key, int row) __attribute__((always_inline)) {
            return biased_harmlessly<T>(s, scale, load(bias + key * ROWS + row));
        });
        return;
    }
    change_scores<T, ROWS>(score, block_maximum, n_row, n_key,
                           [=](vec<T> s, ptrdiff_t key, int row) __attribute__((always_inline)) {
        if (shaped || !bias) s = s * scale;
        if (softcap != 0) s = soft_capped<T>(s, softcap);
        if (slope) s -= load(slope + row) * magnitude<T>(load(distance + row) - T(key));
        if (bias) s = biased<T>(s, shaped ? T(1) : scale, per_row ? load(bias + key * ROWS + row) : splat(bias[key]));
        if (first) s = in_range<T>(s, splat(T(key)), load(first + row), load(last + row));
        return s;
    });
}

// One row, lanes are keys.  The lanes past n_key become -inf.
template <class T> void decode_adjust(void *score_, ptrdiff_t n_key, const mha_adjust *how) {
    T *score = (T *)score_;
    const T *bias = (const T *)how->bias;
    const T scale = T(how->score_scale), softcap = T(how->softcap);
    const T first = how->first ? *(const T *)how->first : T(0);
    const T last = how->last ? *(const T *)how->last : T(n_key);
    const bool shaped = softcap != 0 || how->slope;
    for (ptrdiff_t key = 0; key < n_key; key += lanes<T>) {
        vec<T> number = lane_numbers<T>() + T(key), s = load(score + key);
        if (shaped || !bias) s = s * scale;
        if (softcap != 0) s = soft_capped<T>(s, softcap);
        if (how->slope) s -= *(const T *)how->slope * magnitude<T>(*(const T *)how->distance - number);
        if (bias) s = biased<T>(s, shaped ? T(1) : scale, load(bias + key));
        store(score + key, in_range<T>(s, number, splat(first), splat(last)));
    }
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
