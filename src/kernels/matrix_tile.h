// Tiles of rows on the matrix unit: while it multiplies for two blocks, the vector units do the softmax of a third.
//
//   step:     matrix unit                          vector units
//   ------------------------------------------------------------------------------------------------
//   first     scores of `in_scores`  = K Q^T          weights of `in_softmax`, first half; sum of `in_sum` += its product
//   then      product of `in_values` = V^T weights    weights of `in_softmax`, second half; maximum of `in_scores`
//
// The unit runs beside the vector units only if their instructions are mixed finely, so each product of tiles is
// followed by a few vectors' worth of the other work.
#pragma once

#include "adjust.h"
#include "short_scores.h"
#include "terms.h"

namespace {
namespace MHA_ISA_NAMESPACE {

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
        constexpr term_product term = products<N_PRODUCT>::at[I], previous = products<N_PRODUCT>::at[I ? I - 1 : 0];
        if constexpr (I == 0 || term.a != previous.a) {
            load_tile<4>(a + term.a * term_numbers, 64);
            load_tile<5>(a + term.a * term_numbers + tile_numbers, 64);
        }
        if constexpr (I == 0 || term.b != previous.b) {
            load_tile<6>(b + term.b * term_numbers, 64);
            load_tile<7>(b + term.b * term_numbers + tile_numbers, 64);
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

// Weights of a block, 2**((score - base) * scale) as terms, in units of two keys x 16 rows.  Unit u is pair u / 2 of
// keys, half u % 2 of the rows; the 32 units of a panel of keys follow each other.
template <int N_PRODUCT> struct weighing {
    static constexpr int n_term = products<N_PRODUCT>::n_term;
    const float *score;
    uint16_t *weight;
    vec<float> base[2], scale, total[2];
    ptrdiff_t n_unit, done;

    MHA_INLINE void begin(mha_matrix_item *item, float exp_scale) {
        done = n_unit = 0;
        if (!item) return;
        score = item->score;
        weight = (uint16_t *)item->weight;
        scale = splat(exp_scale);
        n_unit = item->n_panel * panel_keys;
        MHA_UNROLL for (int half = 0; half < 2; half++) {
            const auto [now, exponent] = raise_maximum<float>(item->maximum + half * tile_edge,
                                                              load(item->block_maximum + half * tile_edge), scale);
            base[half] = now;
            store(item->rescale + half * tile_edge, exp2_nonpositive<float>(exponent));
            total[half] = vec<float>{};
        }
    }
    // Unit U of those that begin with `done`, a multiple of their number, so that they are of one panel.
    template <int U> MHA_INLINE void unit() {
        constexpr int half = U % 2;
        const ptrdiff_t panel = done / panel_keys, pair = done % panel_keys / 2 + U / 2;
        const float *s = score + (panel * panel_keys + pair) * matrix_rows + half * tile_edge;
        uint16_t *w = weight + panel * (n_term * term_numbers) + half * tile_numbers + pair * tile_depth;
        vec<float> first = weight_of<float>(load(s), base[half], scale);
        vec<float> second = weight_of<float>(load(s + tile_edge * matrix_rows), base[half], scale);
        if constexpr (n_term > 1) total[half] += first + second;
        MHA_UNROLL for (int p = 0; p < n_term; p++) {
            // Three terms by cutting off are exact; the last of fewer is rounded.
            if (p == n_term - 1 && n_term < 3) {
                first = plus_half_ulp(first);
                second = plus_half_ulp(second);
            }
            // The weights that are added up are those that are multiplied: their rounding then cancels in the mean.
            if constexpr (n_term == 1) total[half] += upper_half(first) + upper_half(second);
            store((float *)(w + p * term_numbers), upper_halves(first, second));
            if (p + 1 < n_term) {
                first -= upper_half(first);
                second -= upper_half(second);
            }
        }
    }
    MHA_INLINE void finish(mha_matrix_item *item) {
        if (!item) return;
        for (; done < n_unit; done += 2) {
            unit<0>();
            unit<1>();
        }
        MHA_UNROLL for (int half = 0; half < 2; half++) {
            float *sum = item->total + half * tile_edge;
            store(sum, load(sum) * load(item->rescale + half * tile_edge) + total[half]);
        }
    }
};

// sum = sum * rescale + product, feature by feature.
struct summing {
    float *sum;
    const float *product;
    vec<float> rescale[2];
    ptrdiff_t n, done;

    MHA_INLINE void begin(const mha_matrix_item *item, const float *from, ptrdiff_t n_feature) {
        done = 0;
        n = item ? n_feature : 0;
        if (!item) return;
        sum = item->sum;
        product = from;
        MHA_UNROLL for (int half = 0; half < 2; half++) rescale[half] = load(item->rescale + half * tile_edge);
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
struct maximum_scan {
    const float *score;
    vec<float> highest[2];
    ptrdiff_t n, done;

    MHA_INLINE void begin(const mha_matrix_item *item) {
        done = 0;
        n = item && !item->adjusted ? item->n_panel * panel_keys : 0;
        if (!item) return;
        score = item->score;
        MHA_UNROLL for (int half = 0; half < 2; half++) highest[half] = splat(-infinity<float>);
    }
    MHA_INLINE void up_to(ptrdiff_t end) {
        for (end = end < n ? end : n; done < end; done++) {
            MHA_UNROLL for (int half = 0; half < 2; half++) {
                highest[half] = larger<float>(highest[half], load(score + done * matrix_rows + half * tile_edge));
            }
        }
    }
    MHA_INLINE void finish(mha_matrix_item *item) {
        if (n == 0) return;
        up_to(n);
        MHA_UNROLL for (int half = 0; half < 2; half++) store(item->block_maximum + half * tile_edge, highest[half]);
    }
};

template <bool SHORT, class A, class B> struct choice {
    typedef A type;
};
template <class A, class B> struct choice<true, A, B> {
    typedef B type;
};

// UNITS of the weighing are done beside each block product, where the scores are short only in the second half:
// in the first, the next scores are shortened.
template <int N_PRODUCT, int UNITS, bool NEXT_SHORT, bool NOW_SHORT> void step_of(mha_pipeline *pipe) {
    constexpr int n_term = products<N_PRODUCT>::n_term, n_slot = 4 * N_PRODUCT;
    constexpr ptrdiff_t block_numbers = n_term * term_numbers, n_line = block_numbers / tile_depth;
    mha_matrix_item *next = pipe->in_scores, *now = pipe->in_softmax, *before = pipe->in_values, *last = pipe->in_sum;
    const ptrdiff_t n_query_chunk = pipe->query_chunks, n_value_chunk = pipe->value_chunks;
    float *pending = pipe->pending;
    typename choice<NOW_SHORT, weighing<N_PRODUCT>, short_weighing>::type weights;
    typename choice<NEXT_SHORT, maximum_scan, shortening>::type scan;
    summing sums;
    weights.begin(now, float(pipe->exp_scale));
    sums.begin(last, pipe->product, n_value_chunk * tile_depth);
    if constexpr (NEXT_SHORT) scan.begin(next, pipe->passing, float(pipe->exp_scale));
    else scan.begin(next);

    auto multiply = [&](auto units, const uint16_t *a, const uint16_t *b, bool fresh, const auto &extra)
                        __attribute__((always_inline)) {
        constexpr int n_unit = decltype(units)::value;
        const bool weigh = n_unit > 0 && weights.done < weights.n_unit;
        add_products<N_PRODUCT>(a, b, fresh, pending, [&](auto slot) __attribute__((always_inline)) {
            constexpr int s = decltype(slot)::value, first = s * n_unit / n_slot, end = (s + 1) * n_unit / n_slot;
            // The next block's tiles follow this one's.
            MHA_UNROLL for (int line = s * n_line / n_slot; line < (s + 1) * n_line / n_slot; line++)
                __builtin_prefetch(a + block_numbers + line * tile_depth, 0, 3);
            if (weigh) units_of<first, end>(weights);
            if constexpr (s == n_slot - 1) extra();
        });
        if (weigh) weights.done += n_unit;
    };

    // The last block of `pending` reaches memory in the first product, so what reads it starts with the second.
    if (next) {
        const uint16_t *key = (const uint16_t *)next->key;
        const ptrdiff_t n_block = next->n_panel * n_query_chunk;
        const ptrdiff_t sums_per_block = n_block > 1 ? (sums.n + n_block - 2) / (n_block - 1) : 0;
        ptrdiff_t block = 0;
        for (ptrdiff_t g = 0; g < next->n_panel; g++) {
            for (ptrdiff_t c = 0; c < n_query_chunk; c++, block++)
                multiply(number<NOW_SHORT ? 0 : UNITS>{}, key + block * block_numbers,
                         (const uint16_t *)next->query + c * block_numbers, c == 0,
                         [&]() __attribute__((always_inline)) {
                    sums.up_to(block * sums_per_block);
                    // Group g - 1 is in memory by now.
                    if constexpr (NEXT_SHORT)
                        scan.up_to(g > 0 ? (g - 1) * panel_keys + (c + 1) * panel_keys / n_query_chunk : 0);
                });
            pending = NEXT_SHORT ? pipe->passing + g % MHA_MATRIX_PASSING * panel_keys * matrix_rows
                                 : next->score + g * panel_keys * matrix_rows;
        }
    } else {
        store_block(pending);
        pending = pipe->unused;
    }
    sums.up_to(sums.n);

    if (before) {
        const uint16_t *weight = (const uint16_t *)before->weight;
        const ptrdiff_t n_block = before->n_panel * n_value_chunk;
        const ptrdiff_t left = scan.n - scan.done, shortened = scan.done;
        const ptrdiff_t scan_per_block = n_block > 1 ? (left + n_block - 2) / (n_block - 1) : 0;
        ptrdiff_t block = 0;
        for (ptrdiff_t c = 0; c < n_value_chunk; c++) {
            const uint16_t *value =
                (const uint16_t *)before->value + c * (products<N_PRODUCT>::block_keys / panel_keys) * block_numbers;
            for (ptrdiff_t g = 0; g < before->n_panel; g++, block++)
                multiply(number<NOW_SHORT ? 2 * UNITS : UNITS>{}, value + g * block_numbers, weight + g * block_numbers,
                         g == 0,
                         [&]() __attribute__((always_inline)) { scan.up_to(shortened + block * scan_per_block); });
            pending = pipe->product + c * tile_depth * matrix_rows;
        }
    } else {
        store_block(pending);
        pending = pipe->unused;
    }
    weights.finish(now);
    scan.finish(next);
    pipe->pending = pending;
}

template <int N_PRODUCT, int UNITS> void step_with(mha_pipeline *pipe) {
    if constexpr (N_PRODUCT == 1) {
        const bool next_short = pipe->in_scores && pipe->in_scores->short_scores,
                   now_short = pipe->in_softmax && pipe->in_softmax->short_scores;
        if (next_short && now_short) return step_of<N_PRODUCT, UNITS, true, true>(pipe);
        if (next_short) return step_of<N_PRODUCT, UNITS, true, false>(pipe);
        if (now_short) return step_of<N_PRODUCT, UNITS, false, true>(pipe);
    }
    step_of<N_PRODUCT, UNITS, false, false>(pipe);
}

// A panel of keys has 32 units of weighing, and as many block products as there are chunks of features.
template <int N_PRODUCT> void step(mha_pipeline *pipe) {
    const ptrdiff_t n_chunk = pipe->query_chunks + pipe->value_chunks;
    if (n_chunk < 4) step_with<N_PRODUCT, 16>(pipe);
    else if (n_chunk < 8) step_with<N_PRODUCT, 8>(pipe);
    else if (n_chunk < 16) step_with<N_PRODUCT, 4>(pipe);
    else step_with<N_PRODUCT, 2>(pipe);
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
