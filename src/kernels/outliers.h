// What does not go through the matrix unit: a term of a number cannot be Inf or NaN (times a zero term it would be
// NaN), nor so large that products overflow.  Rare, so simple: each such number is taken by itself, and leaves no
// trace in results that do not depend on it.
#pragma once

#include "adjust.h"
#include "terms.h"

namespace {
namespace MHA_ISA_NAMESPACE {

template <class S> float dot_product(const S *a, const S *b, ptrdiff_t width) {
    vec<float> sum = {};
    for (ptrdiff_t d = 0; d < width; d += lanes<float>)
        sum += load_some(a + d, width - d) * load_some(b + d, width - d);
    return lane_sum<float>(sum);
}

template <class S>
void repair_scores(float *score, const char *const *query, ptrdiff_t n_row, double scale, const char *key,
                   ptrdiff_t stride, ptrdiff_t n_key, ptrdiff_t width) {
    bool query_within[MHA_MATRIX_ROWS];
    for (ptrdiff_t r = 0; r < n_row; r++) query_within[r] = row_within((const S *)query[r], width, largest_factor);
    for (ptrdiff_t j = 0; j < n_key; j++) {
        const S *row = row_at<S>(key, stride, j);
        const bool key_within = row_within(row, width, largest_factor);
        for (ptrdiff_t r = 0; r < n_row; r++)
            if (!key_within || !query_within[r])
                score[j * MHA_MATRIX_ROWS + r] = dot_product((const S *)query[r], row, width) * float(scale);
    }
}

// The weights of key j in rows 16 * half ... as they were split.
template <int N_TERM> MHA_INLINE vec<float> joined_weights(const uint16_t *weight, ptrdiff_t j, int half) {
    const uint16_t *at =
        weight + j / panel_keys * N_TERM * term_numbers + half * tile_numbers + j % tile_edge * tile_depth;
    vec<float> sum = {};
    MHA_UNROLL for (int p = N_TERM - 1; p >= 0; p--) {
        const float_bits pair = (float_bits)load((const float *)(at + p * term_numbers));
        sum += (vec<float>)(j / tile_edge % 2 ? pair & 0xffff0000 : pair << 16);
    }
    return sum;
}

template <class S, int N_TERM>
void add_outliers(float *sum, const void *weight, const float *visible, const char *value, ptrdiff_t stride,
                  ptrdiff_t n_key, ptrdiff_t width) {
    for (ptrdiff_t j = 0; j < n_key; j++) {
        for (ptrdiff_t d = 0; d < width; d += lanes<float>) {
            const vec<float> v = load_some(row_at<S>(value, stride, j) + d, width - d);
            if (all_within(v, largest_value)) continue;
            for (ptrdiff_t i = 0; i < lanes<float> && d + i < width; i++) {
                if (v[i] <= largest_value && v[i] >= -largest_value) continue;
                for (int half = 0; half < 2; half++) {
                    float *at = sum + (d + i) * MHA_MATRIX_ROWS + half * tile_edge;
                    vec<float> part = joined_weights<N_TERM>((const uint16_t *)weight, j, half) * v[i];
                    const vec<float> seen = load(visible + j * MHA_MATRIX_ROWS + half * tile_edge);
                    part = seen == -infinity<float> ? vec<float>{} : part;
                    store(at, load(at) + part);
                }
            }
        }
    }
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
