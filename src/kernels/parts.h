// Numbers as sums of bfloat16 parts, packed into tiles.
//
// A float32 number is the sum of three bfloat16 numbers (8 + 8 + 8 bits of significand), a float16 number that of two.
// With a = a1 + a2 + a3 and b = b1 + b2 + b3 the six products of parts down to 2**-16 of a1 b1 give a b to float32
// accuracy: a1b1, a1b2, a2b1, a2b2, a1b3, a3b1 (Henry, Tang & Heinecke 2019, "Leveraging the bfloat16 Artificial
// Intelligence Datatype For Higher-Precision Computations").  Three of them, without a2b2, a1b3 and a3b1, leave an
// error of about 2**-16.
#pragma once

#include "../kernels.h"
#include "storage.h"
#include "tile_registers.h"

namespace {
namespace MHA_ISA_NAMESPACE {

// Which products make up one, and how many parts they need.  Each differs from the one before in one operand, so that
// only this one is loaded.
struct part_pair { int a, b; };
template <int N_PRODUCT> struct products;
template <> struct products<1> {
    static constexpr int n_part = 1;
    static constexpr part_pair at[] = {{0, 0}};
};
template <> struct products<3> {
    static constexpr int n_part = 2;
    static constexpr part_pair at[] = {{1, 0}, {0, 0}, {0, 1}};
};
template <> struct products<6> {
    static constexpr int n_part = 3;
    static constexpr part_pair at[] = {{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 0}, {0, 2}};
};

constexpr int group_rows = MHA_MATRIX_GROUP;  // of a 2 x 2 block of tiles
static_assert(group_rows == 2 * tile_edge && MHA_MATRIX_ROWS == 2 * tile_edge, "two tiles each way");
constexpr int tile_numbers = tile_edge * tile_depth, pair_numbers = 2 * tile_numbers;

// 2**60 is an exact factor that lifts the lower parts of small values above 2**-126, where the unit takes them for 0.
constexpr float value_unit = 0x1p60f;
// What the unit can take: products of parts stay finite, and Inf or NaN would meet the zeros of a number's lower parts.
// Keys, queries and values beyond are left out here and come in by themselves (see apart.h).
constexpr float largest_factor = 0x1p60f, largest_value = 0x1p50f;

// One product of bfloat16 inputs is the product itself: nothing to leave out.
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

template <int N_PART> MHA_INLINE void split(vec<float> v, half_bits (&part)[N_PART]) {
    MHA_UNROLL for (int i = 0; i < N_PART; i++) {
        part[i] = (half_bits)_mm512_cvtneps_pbh((__m512)v);
        if (i + 1 < N_PART) v -= widened(part[i], bfloat16{});
    }
}

template <class S> bool row_within(const S *row, ptrdiff_t width, float limit) {
    bool all = true;
    for (ptrdiff_t d = 0; d < width; d += lanes<float>) all &= all_within(load_some(row + d, width - d), limit);
    return all;
}

// Parts of 32 elements; part p of element i is half-word i of whole[p].
template <class S, int N_PART>
MHA_INLINE void split_chunk(const S *row, ptrdiff_t n, vec<float> scale, vec<float> (&whole)[N_PART]) {
    half_bits low[N_PART], high[N_PART];
    split<N_PART>(load_some(row, n) * scale, low);
    split<N_PART>(load_some(row + lanes<float>, n - lanes<float>) * scale, high);
    MHA_UNROLL for (int p = 0; p < N_PART; p++) {
        memcpy(&whole[p], &low[p], sizeof low[p]);
        memcpy((char *)&whole[p] + sizeof low[p], &high[p], sizeof high[p]);
    }
}

MHA_INLINE ptrdiff_t chunks_of(ptrdiff_t width) { return (width + tile_depth - 1) / tile_depth; }

// Keys -> [group of 32 keys][chunk of 32 features][part][key][feature].  Returns whether rows were left out.
template <class S, int N_PRODUCT>
int pack_keys(void *packed, const char *key, ptrdiff_t stride, ptrdiff_t n_key, ptrdiff_t width) {
    constexpr int n_part = products<N_PRODUCT>::n_part;
    const ptrdiff_t n_chunk = chunks_of(width);
    int left_out = 0;
    for (ptrdiff_t j = 0; j < (n_key + group_rows - 1) / group_rows * group_rows; j++) {
        const S *row = row_at<S>(key, stride, j);
        bool present = j < n_key;
        if (!any_factor<N_PRODUCT> && present && !row_within(row, width, largest_factor)) {
            present = false;
            left_out = 1;
        }
        uint16_t *place = (uint16_t *)packed + j / group_rows * n_chunk * n_part * pair_numbers + j % group_rows * tile_depth;
        for (ptrdiff_t c = 0; c < n_chunk; c++) {
            vec<float> whole[n_part] = {};
            if (present) split_chunk<S, n_part>(row + c * tile_depth, width - c * tile_depth, splat(1.0f), whole);
            MHA_UNROLL for (int p = 0; p < n_part; p++) store((float *)(place + (c * n_part + p) * pair_numbers), whole[p]);
        }
    }
    return left_out;
}

// Queries, times scale -> [chunk of 32 features][part][half of 16 rows][pair of features][row][feature of the pair].
// Rows that are missing repeat the last one; nobody looks at their results.  Returns whether rows were left out.
template <class S, int N_PRODUCT>
int pack_queries(void *packed, const char *const *row, ptrdiff_t n_row, ptrdiff_t width, double scale) {
    constexpr int n_part = products<N_PRODUCT>::n_part;
    const S *source[MHA_MATRIX_ROWS];
    int left_out = 0;
    for (int r = 0; r < MHA_MATRIX_ROWS; r++) {
        source[r] = (const S *)row[r < n_row ? r : n_row - 1];
        if (!any_factor<N_PRODUCT> && !row_within(source[r], width, largest_factor)) {
            source[r] = nullptr;
            left_out = 1;
        }
    }
    for (ptrdiff_t c = 0; c < chunks_of(width); c++) {
        for (int half = 0; half < 2; half++) {
            vec<float> square[n_part][tile_edge] = {};
            for (int r = 0; r < tile_edge; r++) {
                vec<float> whole[n_part] = {};
                const S *from = source[half * tile_edge + r];
                if (from) split_chunk<S, n_part>(from + c * tile_depth, width - c * tile_depth, splat(float(scale)), whole);
                MHA_UNROLL for (int p = 0; p < n_part; p++) square[p][r] = whole[p];
            }
            for (int p = 0; p < n_part; p++) {
                float *place = (float *)((uint16_t *)packed + (c * n_part + p) * pair_numbers + half * tile_numbers);
                transpose<float>(square[p]);
                MHA_UNROLL for (int i = 0; i < tile_edge; i++) store(place + i * tile_edge, square[p][i]);
            }
        }
    }
    return left_out;
}

// Values, times value_unit -> [chunk of 32 features][group of 32 keys][part][feature][key], room for all groups of a
// block in each chunk.  Returns whether elements were left out.
template <class S, int N_PRODUCT>
int pack_values(void *packed, const char *value, ptrdiff_t stride, ptrdiff_t n_key, ptrdiff_t width) {
    constexpr int n_part = products<N_PRODUCT>::n_part, n_group = MHA_MATRIX_KEYS / group_rows;
    bool all = true;
    auto element = [&](ptrdiff_t j, ptrdiff_t d, half_bits (&part)[n_part]) __attribute__((always_inline)) {
        const vec<float> v = j < n_key ? load_some(row_at<S>(value, stride, j) + d, width - d) : vec<float>{};
        all &= all_within(v, largest_value);
        split<n_part>(within(v, largest_value) * value_unit, part);
    };
    for (ptrdiff_t group = 0; group * group_rows < n_key; group++) {
        for (ptrdiff_t d = 0; d < chunks_of(width) * tile_depth; d += tile_edge) {
            vec<float> square[n_part][tile_edge];
            for (int i = 0; i < tile_edge; i++) {
                half_bits even[n_part], odd[n_part];
                element(group * group_rows + 2 * i, d, even);
                element(group * group_rows + 2 * i + 1, d, odd);
                MHA_UNROLL for (int p = 0; p < n_part; p++)
                    square[p][i] = (vec<float>)(__builtin_convertvector(even[p], float_bits) |
                                                __builtin_convertvector(odd[p], float_bits) << 16);
            }
            uint16_t *place = (uint16_t *)packed + (d / tile_depth * n_group + group) * n_part * pair_numbers +
                              d / tile_edge % 2 * tile_numbers;
            for (int p = 0; p < n_part; p++) {
                transpose<float>(square[p]);
                MHA_UNROLL for (int i = 0; i < tile_edge; i++) store((float *)(place + p * pair_numbers) + i * tile_edge, square[p][i]);
            }
        }
    }
    return !all;
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
