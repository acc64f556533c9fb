// Tiles of rows on the matrix unit: while it multiplies for two blocks, the vector units do the softmax of a third.
//
//   step:     matrix unit                          vector units
//   ------------------------------------------------------------------------------------------------
//   first     scores of `next`  = K Q^T            weights of `now`, first half; sum of `last` += its product
//   then      product of `before` = V^T weights    weights of `now`, second half; maximum of `next`
//
// The unit runs beside the vector units only if their instructions are mixed finely, so each product of tiles is
// followed by a few vectors' worth of the other work.
#pragma once

#include "adjust.h"
#include "parts.h"

namespace {
namespace MHA_ISA_NAMESPACE {

constexpr ptrdiff_t matrix_rows = MHA_MATRIX_ROWS, row_bytes = matrix_rows * sizeof(float);

// Stores the block of 2 x 2 tiles that a product has left in tiles 0 ... 3.
MHA_INLINE void store_block(float *block) {
    store_tile<0>(block, row_bytes);
    store_tile<1>(block + tile_edge, row_bytes);
    store_tile<2>(block + tile_edge * matrix_rows, row_bytes);
    store_tile<3>(block + tile_edge * (matrix_rows + 1), row_bytes);
}

// Tile TILE of a block is at [TILE / 2][TILE % 2].  With FRESH it starts from zero, and what it held before goes to
// `pending` only now: a store waits for the products that lead to it, and here those are long done.
template <int SLOT, int TILE, bool FRESH, class Other>
MHA_INLINE void tile_product(float *pending, const Other &other) {
    if constexpr (FRESH) {
        store_tile<TILE>(pending + (TILE / 2 * matrix_rows + TILE % 2) * tile_edge, row_bytes);
        clear_tile<TILE>();
    }
    add_product<TILE, 4 + TILE / 2, 6 + TILE % 2>();
    barrier();
    other(number<SLOT>{});
    barrier();
}

template <int N_PRODUCT, int I, bool FRESH, class Other>
MHA_INLINE void products_from(const uint16_t *a, const uint16_t *b, float *pending, const Other &other) {
    if constexpr (I < N_PRODUCT) {
        constexpr part_pair part = products<N_PRODUCT>::at[I], previous = products<N_PRODUCT>::at[I ? I - 1 : 0];
        if constexpr (I == 0 || part.a != previous.a) {
            load_tile<4>(a + part.a * pair_numbers, 64);
            load_tile<5>(a + part.a * pair_numbers + tile_numbers, 64);
        }
        if constexpr (I == 0 || part.b != previous.b) {
            load_tile<6>(b + part.b * pair_numbers, 64);
            load_tile<7>(b + part.b * pair_numbers + tile_numbers, 64);
        }
        constexpr bool fresh = FRESH && I == 0;
        tile_product<4 * I, 0, fresh>(pending, other);
        tile_product<4 * I + 1, 1, fresh>(pending, other);
        tile_product<4 * I + 2, 2, fresh>(pending, other);
        tile_product<4 * I + 3, 3, fresh>(pending, other);
        products_from<N_PRODUCT, I + 1, FRESH>(a, b, pending, other);
    }
}

// Adds A B to the block in the tiles; other(number<slot>) is called 4 * N_PRODUCT times in between.
template <int N_PRODUCT, class Other>
MHA_INLINE void add_products(const uint16_t *a, const uint16_t *b, bool fresh, float *pending, const Other &other) {
    if (fresh) products_from<N_PRODUCT, 0, true>(a, b, pending, other);
    else products_from<N_PRODUCT, 0, false>(a, b, pending, other);
}

// The upper halves of two vectors of floats as pairs (even, odd).
MHA_INLINE vec<float> upper_halves(vec<float> even, vec<float> odd) {
    const __m512i upper_to_lower = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
    return (vec<float>)_mm512_mask_shuffle_epi8((__m512i)odd, 0x3333333333333333, (__m512i)even, upper_to_lower);
}
MHA_INLINE vec<float> upper_half(vec<float> v) {
    return (vec<float>)((float_bits)v & 0xffff0000);
}

// Weights of a block, unit by unit of two keys x 16 rows: 2**((score - base) * scale) in parts.  Three parts by
// truncation are exact; the last of fewer is rounded.
template <int N_PRODUCT> struct weighing {
    static constexpr int n_part = products<N_PRODUCT>::n_part;
    const float *score;
    uint16_t *weight;
    vec<float> base[2], scale, total[2];
    ptrdiff_t n_unit, done;

    MHA_INLINE void begin(mha_stage *stage, float exp_scale) {
        done = n_unit = 0;
        if (!stage) return;
        score = stage->score;
        weight = (uint16_t *)stage->weight;
        scale = splat(exp_scale);
        n_unit = stage->n_group * group_rows;
        MHA_UNROLL for (int half = 0; half < 2; half++) {
            float *maximum = stage->maximum + half * tile_edge;
            const vec<float> old = load(maximum), now = larger<float>(load(stage->peak + half * tile_edge), old);
            store(maximum, now);
            // as in the row tiles: no -inf - -inf
            base[half] = now == -infinity<float> ? vec<float>{} : now;
            store(stage->rescale + half * tile_edge, exp2_nonpositive<float>((old - base[half]) * scale));
            total[half] = vec<float>{};
        }
    }
    template <int HALF> MHA_INLINE void unit(ptrdiff_t pair) {
        const float *s = score + pair * 2 * matrix_rows + HALF * tile_edge;
        uint16_t *w = weight + pair / tile_edge * (n_part * pair_numbers) + HALF * tile_numbers + pair % tile_edge * tile_depth;
        vec<float> even = exp2_nonpositive<float>((load(s) - base[HALF]) * scale);
        vec<float> odd = exp2_nonpositive<float>((load(s + matrix_rows) - base[HALF]) * scale);
        if constexpr (n_part > 1) total[HALF] += even + odd;
        MHA_UNROLL for (int p = 0; p < n_part; p++) {
            if (p == n_part - 1 && n_part < 3) {
                const float_bits half_place = float_bits{} + 0x8000;
                even = (vec<float>)((float_bits)even + half_place);
                odd = (vec<float>)((float_bits)odd + half_place);
            }
            // The weights that are added up are those that are multiplied: their rounding then cancels in the mean.
            if constexpr (n_part == 1) total[HALF] += upper_half(even) + upper_half(odd);
            store((float *)(w + p * pair_numbers), upper_halves(even, odd));
            if (p + 1 < n_part) {
                even -= upper_half(even);
                odd -= upper_half(odd);
            }
        }
    }
    MHA_INLINE void finish(mha_stage *stage) {
        if (!stage) return;
        for (; done < n_unit; done += 2) {
            unit<0>(done / 2);
            unit<1>(done / 2);
        }
        MHA_UNROLL for (int half = 0; half < 2; half++) {
            float *sum = stage->total + half * tile_edge;
            store(sum, load(sum) * load(stage->rescale + half * tile_edge) + total[half]);
        }
    }
};

// sum = sum * rescale + product, feature by feature.
struct summing {
    float *sum;
    const float *product;
    vec<float> rescale[2];
    ptrdiff_t n, done;

    MHA_INLINE void begin(const mha_stage *stage, const float *from, ptrdiff_t n_feature) {
        done = 0;
        n = stage ? n_feature : 0;
        if (!stage) return;
        sum = stage->sum;
        product = from;
        MHA_UNROLL for (int half = 0; half < 2; half++) rescale[half] = load(stage->rescale + half * tile_edge);
    }
    MHA_INLINE void up_to(ptrdiff_t end) {
        for (end = end < n ? end : n; done < end; done++) {
            MHA_UNROLL for (int half = 0; half < 2; half++) {
                const ptrdiff_t at = done * matrix_rows + half * tile_edge;
                store(sum + at, load(sum + at) * rescale[half] + load(product + at) * (1 / value_unit));
            }
        }
    }
};

// The maximum of a block's scores, key by key.
struct peaking {
    const float *score;
    vec<float> highest[2];
    ptrdiff_t n, done;

    MHA_INLINE void begin(const mha_stage *stage) {
        done = 0;
        n = stage && !stage->adjusted ? stage->n_group * group_rows : 0;
        if (!stage) return;
        score = stage->score;
        MHA_UNROLL for (int half = 0; half < 2; half++) highest[half] = splat(-infinity<float>);
    }
    MHA_INLINE void up_to(ptrdiff_t end) {
        for (end = end < n ? end : n; done < end; done++) {
            MHA_UNROLL for (int half = 0; half < 2; half++)
                highest[half] = larger<float>(highest[half], load(score + done * matrix_rows + half * tile_edge));
        }
    }
    MHA_INLINE void finish(mha_stage *stage) {
        if (n == 0) return;
        up_to(n);
        MHA_UNROLL for (int half = 0; half < 2; half++) store(stage->peak + half * tile_edge, highest[half]);
    }
};

// UNITS of the weighing are done beside each block product.
template <int N_PRODUCT, int UNITS> void step_of(mha_pipeline *pipe) {
    constexpr int n_part = products<N_PRODUCT>::n_part, n_slot = 4 * N_PRODUCT;
    constexpr ptrdiff_t block_numbers = n_part * pair_numbers, n_line = block_numbers / tile_depth;
    mha_stage *next = pipe->next, *now = pipe->now, *before = pipe->before, *last = pipe->last;
    const ptrdiff_t n_query_chunk = pipe->query_chunks, n_value_chunk = pipe->value_chunks;
    float *pending = pipe->pending;
    weighing<N_PRODUCT> weights;
    summing sums;
    peaking peaks;
    weights.begin(now, float(pipe->exp_scale));
    sums.begin(last, pipe->product, n_value_chunk * tile_depth);
    peaks.begin(next);

    // The last block of `pending` reaches memory in the first product, so what reads it starts with the second.
    auto multiply = [&](const uint16_t *a, const uint16_t *b, bool fresh, auto &extra, ptrdiff_t extra_end) __attribute__((always_inline)) {
        const bool weigh = weights.done < weights.n_unit;
        add_products<N_PRODUCT>(a, b, fresh, pending, [&](auto slot) __attribute__((always_inline)) {
            constexpr int s = decltype(slot)::value, first = s * UNITS / n_slot, end = (s + 1) * UNITS / n_slot;
            // The next block's tiles follow this one's.
            MHA_UNROLL for (int line = s * n_line / n_slot; line < (s + 1) * n_line / n_slot; line++)
                __builtin_prefetch(a + block_numbers + line * tile_depth, 0, 3);
            if (weigh) {
                MHA_UNROLL for (int u = first; u < end; u++) {
                    if (u % 2) weights.template unit<1>((weights.done + u) / 2);
                    else weights.template unit<0>((weights.done + u) / 2);
                }
            }
            if constexpr (s == n_slot - 1) extra.up_to(extra_end);
        });
        if (weigh) weights.done += UNITS;
    };

    if (next) {
        const uint16_t *key = (const uint16_t *)next->key;
        const ptrdiff_t n_block = next->n_group * n_query_chunk;
        const ptrdiff_t sums_per_block = n_block > 1 ? (sums.n + n_block - 2) / (n_block - 1) : 0;
        ptrdiff_t block = 0;
        for (ptrdiff_t g = 0; g < next->n_group; g++) {
            for (ptrdiff_t c = 0; c < n_query_chunk; c++, block++)
                multiply(key + block * block_numbers, (const uint16_t *)next->query + c * block_numbers, c == 0, sums,
                         block * sums_per_block);
            pending = next->score + g * group_rows * matrix_rows;
        }
    } else {
        store_block(pending);
        pending = pipe->unused;
    }
    sums.up_to(sums.n);

    if (before) {
        const uint16_t *weight = (const uint16_t *)before->weight;
        const ptrdiff_t n_block = before->n_group * n_value_chunk;
        const ptrdiff_t peaks_per_block = n_block > 1 ? (peaks.n + n_block - 2) / (n_block - 1) : 0;
        ptrdiff_t block = 0;
        for (ptrdiff_t c = 0; c < n_value_chunk; c++) {
            const uint16_t *value = (const uint16_t *)before->value + c * (MHA_MATRIX_KEYS / group_rows) * block_numbers;
            for (ptrdiff_t g = 0; g < before->n_group; g++, block++)
                multiply(value + g * block_numbers, weight + g * block_numbers, g == 0, peaks, block * peaks_per_block);
            pending = pipe->product + c * tile_depth * matrix_rows;
        }
    } else {
        store_block(pending);
        pending = pipe->unused;
    }
    weights.finish(now);
    peaks.finish(next);
    pipe->pending = pending;
}

// A block of one chunk each way has 32 units of weighing for two products, wider heads have more products.
template <int N_PRODUCT> void step(mha_pipeline *pipe) {
    const ptrdiff_t n_chunk = pipe->query_chunks + pipe->value_chunks;
    if (n_chunk < 4) step_of<N_PRODUCT, 16>(pipe);
    else if (n_chunk < 8) step_of<N_PRODUCT, 8>(pipe);
    else if (n_chunk < 16) step_of<N_PRODUCT, 4>(pipe);
    else step_of<N_PRODUCT, 2>(pipe);
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
