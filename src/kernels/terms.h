// Numbers as sums of bfloat16 terms, packed into tiles.
//
// The unit sums over 32 bfloat16 numbers, features of a head or keys, which lie in pairs in 32-bit lanes.  Their order is
// free as long as both operands have the same: lane i holds numbers i and i + 16, so that two vectors of floats become
// one of pairs by a single shuffle.
//
// A float32 number is the sum of three bfloat16 numbers (8 + 8 + 8 bits of significand), a float16 number that of two.
// With a = a1 + a2 + a3 and b = b1 + b2 + b3 the six products of terms down to 2**-16 of a1 b1 give a b to float32
// accuracy: a1b1, a1b2, a2b1, a2b2, a1b3, a3b1 (Henry, Tang & Heinecke 2019, "Leveraging the bfloat16 Artificial
// Intelligence Datatype For Higher-Precision Computations").  Three of them, without a2b2, a1b3 and a3b1, leave an
// error of about 2**-16.
#pragma once

#include "../contract/matrix.h"
#include "storage.h"
#include "tile_registers.h"

namespace {
namespace MHA_ISA_NAMESPACE {

// Which products make up one, and how many terms they need.  Each differs from the one before in one operand, so that
// only this one is loaded.  Blocks have as many keys as is fastest (bench.compare: for one product 256 is 6% slower
// than 512, and with 1024 the rms error grows by 0.4%; for six, 512 is 6% slower than 256).
struct term_product {
    int a, b;
};
template <int N_PRODUCT> struct products;
template <> struct products<1> {
    static constexpr int n_term = 1, block_keys = 512;
    static constexpr term_product at[] = {{0, 0}};
};
template <> struct products<3> {
    static constexpr int n_term = 2, block_keys = 256;
    static constexpr term_product at[] = {{1, 0}, {0, 0}, {0, 1}};
};
template <> struct products<6> {
    static constexpr int n_term = 3, block_keys = 256;
    static constexpr term_product at[] = {{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 0}, {0, 2}};
};

constexpr ptrdiff_t matrix_rows = MHA_MATRIX_ROWS, row_bytes = matrix_rows * sizeof(float);
constexpr int panel_keys = MHA_MATRIX_PANEL;  // of a 2 x 2 block of tiles
static_assert(panel_keys == 2 * tile_edge && matrix_rows == 2 * tile_edge, "two tiles each way");
constexpr int tile_numbers = tile_edge * tile_depth, term_numbers = 2 * tile_numbers;

// 2**60 is an exact factor that lifts the lower terms of small values above 2**-126, where the unit takes them for 0.
constexpr float value_unit = 0x1p60f;
// What the unit can take: products of terms stay finite, and Inf or NaN would meet the zeros of a number's lower terms.
// Keys, queries and values beyond are outliers: 0 here, they come in by themselves (outliers.h).
constexpr float largest_factor = 0x1p60f, largest_value = 0x1p50f;

// One product of bfloat16 inputs is the product itself: there are no outliers.
template <int N_PRODUCT> constexpr bool any_factor = N_PRODUCT == 1;

MHA_INLINE bool all_within(vec<float> v, float limit) {
    return _mm512_cmp_ps_mask(_mm512_abs_ps((__m512)v), _mm512_set1_ps(limit), _CMP_LE_OQ) == 0xffff;
}
MHA_INLINE vec<float> within(vec<float> v, float limit) {
    return (vec<float>)_mm512_maskz_mov_ps(
        _mm512_cmp_ps_mask(_mm512_abs_ps((__m512)v), _mm512_set1_ps(limit), _CMP_LE_OQ), (__m512)v);
}

// Up to a vector's worth of n elements, n <= 0 included.
template <class S> MHA_INLINE vec<float> load_some(const S *p, ptrdiff_t n) {
    return n >= lanes<float> ? load_stored<float>(p) : n > 0 ? load_stored_first<float>(p, n) : vec<float>{};
}

// The upper halves of two vectors of floats: the first in the lower half of each lane.
MHA_INLINE vec<float> upper_halves(vec<float> first, vec<float> second) {
    const __m512i upper_to_lower = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
    return (vec<float>)_mm512_mask_shuffle_epi8((__m512i)second, 0x3333333333333333, (__m512i)first, upper_to_lower);
}
MHA_INLINE vec<float> upper_half(vec<float> v) { return (vec<float>)((float_bits)v & 0xffff0000); }

// Half a unit in the last place of the upper half: cutting off the rest then rounds to nearest.
MHA_INLINE vec<float> plus_half_ulp(vec<float> v) { return (vec<float>)((float_bits)v + 0x8000); }

// Two vectors as pairs of terms.  All terms but the last of three, which is exact, are rounded to nearest.
template <int N_TERM> MHA_INLINE void split(vec<float> first, vec<float> second, vec<float> (&pair)[N_TERM]) {
    MHA_UNROLL for (int p = 0; p < N_TERM; p++) {
        const vec<float> a = p < 2 ? plus_half_ulp(first) : first, b = p < 2 ? plus_half_ulp(second) : second;
        pair[p] = upper_halves(a, b);
        if (p + 1 < N_TERM) {
            first -= upper_half(a);
            second -= upper_half(b);
        }
    }
}

MHA_INLINE ptrdiff_t chunks_of(ptrdiff_t width) { return (width + tile_depth - 1) / tile_depth; }

template <class S> bool row_within(const S *row, ptrdiff_t width, float limit) {
    bool all = true;
    for (ptrdiff_t d = 0; d < width; d += lanes<float>) all &= all_within(load_some(row + d, width - d), limit);
    return all;
}

// What packing a block or sub-tile reports; see mha_packed.
template <class S, int N_PRODUCT> struct packing_report {
    mha_packed so_far = {};

    // Whether a row can be packed.
    bool take(const S *row, ptrdiff_t width, ptrdiff_t panel) {
        if constexpr (any_factor<N_PRODUCT>) {
            vec<float> squares = {};
            for (ptrdiff_t d = 0; d < width; d += lanes<float>) {
                const vec<float> v = load_some(row + d, width - d);
                squares += v * v;
            }
            // An upper bound, whatever is lost: 2**-13 of it by rounding, and less than 2**-126 of each square by underflow.
            const float norm = _mm512_reduce_add_ps((__m512)squares) * (1 + 0x1p-13f) + 0x1p-116f;
            if (norm > so_far.square_norm[panel] || norm != norm) so_far.square_norm[panel] = norm;  // NaN stays
            return true;
        } else {
            if (row_within(row, width, largest_factor)) return true;
            so_far.has_outliers = 1;
            return false;
        }
    }
};

// Keys -> [panel of 32 keys][chunk of 32 features][term][key][pair of features].
template <class S, int N_PRODUCT>
mha_packed pack_keys(void *packed, const char *key, ptrdiff_t stride, ptrdiff_t n_key, ptrdiff_t width) {
    constexpr int n_term = products<N_PRODUCT>::n_term;
    const ptrdiff_t n_chunk = chunks_of(width);
    packing_report<S, N_PRODUCT> report;
    for (ptrdiff_t j = 0; j < (n_key + panel_keys - 1) / panel_keys * panel_keys; j++) {
        const S *row = row_at<S>(key, stride, j);
        const bool present = j < n_key && report.take(row, width, j / panel_keys);
        uint16_t *at =
            (uint16_t *)packed + j / panel_keys * n_chunk * n_term * term_numbers + j % panel_keys * tile_depth;
        for (ptrdiff_t c = 0; c < n_chunk; c++) {
            const ptrdiff_t d = c * tile_depth;
            vec<float> pair[n_term] = {};
            if (present)
                split<n_term>(load_some(row + d, width - d),
                              load_some(row + d + lanes<float>, width - d - lanes<float>), pair);
            MHA_UNROLL for (int p = 0; p < n_term; p++) store((float *)(at + (c * n_term + p) * term_numbers), pair[p]);
        }
    }
    return report.so_far;
}

// Two squares of numbers, turned over, as tiles of pairs; term p is at p * term_numbers.
template <int N_TERM>
MHA_INLINE void store_turned(uint16_t *at, vec<float> (&first)[tile_edge], vec<float> (&second)[tile_edge]) {
    if constexpr (N_TERM == 1) {  // one square to turn over instead of two
        vec<float> pair[tile_edge][1];
        MHA_UNROLL for (int i = 0; i < tile_edge; i++) split<1>(first[i], second[i], pair[i]);
        MHA_UNROLL for (int i = 0; i < tile_edge; i++) first[i] = pair[i][0];
        transpose<float>(first);
        MHA_UNROLL for (int i = 0; i < tile_edge; i++) store((float *)at + i * tile_edge, first[i]);
        return;
    }
    transpose<float>(first);
    transpose<float>(second);
    MHA_UNROLL for (int i = 0; i < tile_edge; i++) {
        vec<float> pair[N_TERM];
        split<N_TERM>(first[i], second[i], pair);
        MHA_UNROLL for (int p = 0; p < N_TERM; p++) store((float *)(at + p * term_numbers) + i * tile_edge, pair[p]);
    }
}

// Queries, times scale -> [chunk of 32 features][term][half of 16 rows][pair of features][row].
// Rows that are missing repeat the last one; nobody looks at their results.
template <class S, int N_PRODUCT>
mha_packed pack_queries(void *packed, const char *const *row, ptrdiff_t n_row, ptrdiff_t width, double scale) {
    constexpr int n_term = products<N_PRODUCT>::n_term;
    packing_report<S, N_PRODUCT> report;
    for (int half = 0; half < 2; half++) {
        const S *source[tile_edge];
        for (int r = 0; r < tile_edge; r++) {
            source[r] = (const S *)row[half * tile_edge + r < n_row ? half * tile_edge + r : n_row - 1];
            if (!report.take(source[r], width, 0)) source[r] = nullptr;
        }
        for (ptrdiff_t c = 0; c < chunks_of(width); c++) {
            const ptrdiff_t d = c * tile_depth;
            vec<float> first[tile_edge] = {}, second[tile_edge] = {};
            for (int r = 0; r < tile_edge; r++) {
                if (!source[r]) continue;
                first[r] = load_some(source[r] + d, width - d) * float(scale);
                second[r] = load_some(source[r] + d + lanes<float>, width - d - lanes<float>) * float(scale);
            }
            store_turned<n_term>((uint16_t *)packed + c * n_term * term_numbers + half * tile_numbers, first, second);
        }
    }
    return report.so_far;
}

// Values, times value_unit -> [chunk of 32 features][panel of 32 keys][term][feature][pair of keys], room for all panels
// of a block in each chunk.
template <class S, int N_PRODUCT>
mha_packed pack_values(void *packed, const char *value, ptrdiff_t stride, ptrdiff_t n_key, ptrdiff_t width) {
    constexpr int n_term = products<N_PRODUCT>::n_term, n_panel = products<N_PRODUCT>::block_keys / panel_keys;
    bool all = true;
    auto row = [&](ptrdiff_t j, ptrdiff_t d) __attribute__((always_inline)) {
        const vec<float> v = j < n_key ? load_some(row_at<S>(value, stride, j) + d, width - d) : vec<float>{};
        all &= all_within(v, largest_value);
        return within(v, largest_value) * value_unit;
    };
    for (ptrdiff_t panel = 0; panel * panel_keys < n_key; panel++) {
        for (ptrdiff_t d = 0; d < chunks_of(width) * tile_depth; d += tile_edge) {
            vec<float> first[tile_edge], second[tile_edge];
            for (int i = 0; i < tile_edge; i++) {
                first[i] = row(panel * panel_keys + i, d);
                second[i] = row(panel * panel_keys + tile_edge + i, d);
            }
            store_turned<n_term>((uint16_t *)packed + (d / tile_depth * n_panel + panel) * n_term * term_numbers +
                                     d / tile_edge % 2 * tile_numbers,
                                 first, second);
        }
    }
    return {!all, {}};
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
