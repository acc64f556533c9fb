// The backward pass.  Scores and their gradients are tiles [key][row], as on the way forward: a lane is a query row.  In
// the three products that follow, a lane is a feature, and sums are padded rows.
#pragma once

#include "../contract/backward.h"
#include "adjust.h"
#include "storage.h"

namespace {
namespace MHA_ISA_NAMESPACE {

template <class T> constexpr ptrdiff_t padded_to_vectors(ptrdiff_t width) {
    return (width + lanes<T> - 1) / lanes<T> * lanes<T>;
}

template <class T, class S>
void row_products(char *const *delta, const char *const *grad_out, const char *const *out, const char *const *grad_lse,
                  const uint8_t *silent, ptrdiff_t n_row, ptrdiff_t width) {
    for (ptrdiff_t r = 0; r < n_row; r++) {
        const S *g = (const S *)grad_out[r], *o = (const S *)out[r];
        vec<T> sum[2] = {}, not_0 = {};
        auto add = [&](ptrdiff_t i, vec<T> a, vec<T> b) __attribute__((always_inline)) {
            sum[i] += a * b;
            not_0 = b == T(0) ? not_0 : splat(T(1));
        };
        ptrdiff_t d = 0, i = 0;
        for (; d + lanes<T> <= width; d += lanes<T>, i ^= 1) add(i, load_stored<T>(g + d), load_stored<T>(o + d));
        if (d < width) add(i, load_stored_first<T>(g + d, width - d), load_stored_first<T>(o + d, width - d));
        const T product = silent[r] && lane_sum<T>(not_0) == 0 ? T(0) : lane_sum<T>(sum[0] + sum[1]);
        *(T *)delta[r] = grad_lse ? product - *(const T *)grad_lse[r] : product;
    }
}

template <class T, class S>
void copy_rows(void *block, const char *const *row, ptrdiff_t n_row, ptrdiff_t width) {
    T *line = (T *)block;
    for (ptrdiff_t r = 0; r < n_row; r++, line += padded_to_vectors<T>(width)) {
        const S *source = (const S *)row[r];
        ptrdiff_t d = 0;
        for (; d + lanes<T> <= width; d += lanes<T>) store(line + d, load_stored<T>(source + d));
        if (d < width) store(line + d, load_stored_first<T>(source + d, width - d));
    }
}

// ---- weights and the gradient of scores ----

template <class T> struct weighed {
    vec<T> weight, grad;
};

// What one row brings along.
template <class T> struct backward_row {
    vec<T> lse, delta, gate;

    MHA_INLINE backward_row(const mha_backward *how, ptrdiff_t row)
        : lse(load((const T *)how->lse + row)),
          delta(load((const T *)how->delta + row)),
          gate(load((const T *)how->gate + row)) {}

    // A weight is at most 1: rounding must not lift it above, least of all where the logits are huge.
    MHA_INLINE vec<T> weight_of(vec<T> logit) const {
        const vec<T> exponent = (logit - lse) * T(1.44269504088896340736);
        return exp2_nonpositive<T>(exponent > T(0) ? vec<T>{} : exponent);
    }
    // grad: of the row's output times the value, before the gate.
    MHA_INLINE weighed<T> differentiated(vec<T> weight, vec<T> grad, T scale) const {
        const auto off = gate == T(0);
        const vec<T> grad_of_weight = off ? -delta : grad * gate - delta;
        return {off ? vec<T>{} : weight * gate, weight * grad_of_weight * scale};
    }
};

// The plain case: nothing is added to the scores, excluded or dropped.
template <class T, bool WANTS_GRAD>
void differentiate_plainly(T *score, T *grad, ptrdiff_t n_row, ptrdiff_t n_key, const mha_backward *how) {
    const vec<T> scale = splat(T(how->score_scale));
    const T grad_scale = T(how->grad_scale);
    for (ptrdiff_t r = 0; r < n_row; r += lanes<T>) {
        const backward_row<T> row(how, r);
        MHA_UNROLL_2 for (ptrdiff_t at = r; at < n_key * tile_rows<T>; at += tile_rows<T>) {
            // The product is rounded before lse is subtracted, as lse was when it was stored.
            const vec<T> weight = row.weight_of(multiply_add<T>(load(score + at), scale, vec<T>{}));
            const weighed<T> w = row.differentiated(weight, WANTS_GRAD ? load(grad + at) : vec<T>{}, grad_scale);
            store(score + at, w.weight);
            if (WANTS_GRAD) store(grad + at, w.grad);
        }
    }
}

// Derivative of tanh, accurate also where it is nearly 0: with u = exp(-2|x|) it is 4u / (1 + u)^2.
template <class T> MHA_INLINE vec<T> tangent_slope(vec<T> x) {
    constexpr T two_log2_e = T(2.885390081777926814720);
    const vec<T> u = exp2_nonpositive<T>(magnitude<T>(x) * -two_log2_e), sum = T(1) + u;
    return T(4) * u / (sum * sum);
}

// A score on its way to the logit, and how the logit moves with the dot product.
template <class T> struct adjusted_score {
    vec<T> logit, slope;
};

template <class T>
MHA_INLINE adjusted_score<T> adjusted(vec<T> s, ptrdiff_t key, ptrdiff_t row, const mha_adjust *how, T scale) {
    const T softcap = T(how->softcap);
    const bool shaped = softcap != 0 || how->slope;
    vec<T> slope = splat(T(1));
    if (shaped || !how->bias) s = multiply_add<T>(s, splat(scale), vec<T>{});
    if (softcap != 0) {
        slope = tangent_slope<T>(s / softcap);
        s = soft_capped<T>(s, softcap);
    }
    if (how->slope)
        s -= load((const T *)how->slope + row) * magnitude<T>(load((const T *)how->distance + row) - T(key));
    if (how->bias) {
        const T *bias = (const T *)how->bias;
        s = biased<T>(s, shaped ? T(1) : scale,
                      how->bias_row_stride ? load(bias + key * tile_rows<T> + row) : splat(bias[key]));
    }
    if (how->first)
        s = in_range<T>(s, splat(T(key)), load((const T *)how->first + row), load((const T *)how->last + row));
    return {s, slope};
}

template <class T>
void differentiate_adjusted(T *score, T *grad, ptrdiff_t n_row, ptrdiff_t n_key, const mha_backward *how) {
    static constexpr mha_adjust nothing = {};
    const mha_adjust *adjust = how->adjust ? how->adjust : &nothing;
    const T scale = T(how->score_scale);
    for (ptrdiff_t r = 0; r < n_row; r += lanes<T>) {
        const backward_row<T> row(how, r);
        for (ptrdiff_t j = 0; j < n_key; j++) {
            const ptrdiff_t at = j * tile_rows<T> + r;
            const adjusted_score<T> s = adjusted<T>(load(score + at), j, r, adjust, scale);
            const vec<T> keep = how->keep ? load((const T *)how->keep + at) : splat(T(1));
            const weighed<T> w = row.differentiated(row.weight_of(s.logit), grad ? load(grad + at) * keep : vec<T>{},
                                                    T(how->grad_scale));
            // An excluded pair leaves nothing, even in a row whose numbers are NaN.
            const auto excluded = s.logit == -infinity<T>;
            store(score + at, excluded ? vec<T>{} : w.weight * keep);
            if (grad) store(grad + at, excluded ? vec<T>{} : how->of_logit ? w.grad : w.grad * s.slope);
        }
    }
}

template <class T>
void differentiate(void *score, void *grad, ptrdiff_t n_row, ptrdiff_t n_key, const mha_backward *how) {
    if (how->adjust || how->keep) differentiate_adjusted<T>((T *)score, (T *)grad, n_row, n_key, how);
    else if (grad) differentiate_plainly<T, true>((T *)score, (T *)grad, n_row, n_key, how);
    else differentiate_plainly<T, false>((T *)score, (T *)grad, n_row, n_key, how);
}

// ---- products over rows or keys ----

// Vectors of features side by side in the registers, with as many sums as fit beside them and one number of the weights.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int feature_vectors = 4;
#else
constexpr int feature_vectors = 2;
#endif

// Sums over rows for each key, or over keys for each row: where the weights of neighbouring sums and terms lie.
template <class T> struct over_rows {
    static constexpr ptrdiff_t sum_step = tile_rows<T>, term_step = 1;
};
template <class T> struct over_keys {
    static constexpr ptrdiff_t sum_step = 1, term_step = tile_rows<T>;
};

// The block's sum starts from zero and is added once, as in value_step.
template <class T, class Order, int N_SUM, int VECTORS>
MHA_INLINE void product_step(T *sum, const T *weight, const T *term, ptrdiff_t row_length, ptrdiff_t n_term) {
    vec<T> part[N_SUM][VECTORS] = {};
    for (ptrdiff_t c = 0; c < n_term; c++) {
        vec<T> x[VECTORS];
        MHA_UNROLL for (int v = 0; v < VECTORS; v++) x[v] = load(term + c * row_length + v * lanes<T>);
        MHA_UNROLL for (int i = 0; i < N_SUM; i++) {
            MHA_UNROLL for (int v = 0; v < VECTORS; v++) part[i][v] +=
                weight[i * Order::sum_step + c * Order::term_step] * x[v];
        }
    }
    MHA_UNROLL for (int i = 0; i < N_SUM; i++) {
        MHA_UNROLL for (int v = 0; v < VECTORS; v++) {
            T *place = sum + i * row_length + v * lanes<T>;
            store(place, load(place) + part[i][v]);
        }
    }
}

template <class T, class Order>
MHA_INLINE void add_product(T *sum, const T *weight, const T *term, ptrdiff_t n_sum, ptrdiff_t n_term,
                            ptrdiff_t width) {
    const ptrdiff_t row_length = padded_to_vectors<T>(width);
    in_steps<feature_vectors>(row_length / lanes<T>, [&](auto vectors, ptrdiff_t v) __attribute__((always_inline)) {
        constexpr int n_vector = decltype(vectors)::value, fit = MHA_ACCUMULATORS / n_vector;
        in_steps<(fit > 16 ? 16 : fit)>(n_sum, [&](auto step, ptrdiff_t i) __attribute__((always_inline)) {
            product_step<T, Order, decltype(step)::value, n_vector>(sum + i * row_length + v * lanes<T>,
                                                                    weight + i * Order::sum_step, term + v * lanes<T>,
                                                                    row_length, n_term);
        });
    });
}

template <class T, class Order>
void add_product_guarded(T *sum, const T *weight, const T *visible, const T *term, ptrdiff_t n_sum, ptrdiff_t n_term,
                         ptrdiff_t width) {
    const ptrdiff_t row_length = padded_to_vectors<T>(width);
    for (ptrdiff_t i = 0; i < n_sum; i++) {
        for (ptrdiff_t d = 0; d < row_length; d += lanes<T>) {
            vec<T> part = {};
            for (ptrdiff_t c = 0; c < n_term; c++) {
                const ptrdiff_t at = i * Order::sum_step + c * Order::term_step;
                if (visible[at] != -infinity<T>) part += weight[at] * load(term + c * row_length + d);
            }
            T *place = sum + i * row_length + d;
            store(place, load(place) + part);
        }
    }
}

template <class T, class Order>
void add_visible_product(void *sum, const void *weight, const void *visible, const void *term, ptrdiff_t n_sum,
                         ptrdiff_t n_term, ptrdiff_t width) {
    if (visible)
        add_product_guarded<T, Order>((T *)sum, (const T *)weight, (const T *)visible, (const T *)term, n_sum, n_term,
                                      width);
    else add_product<T, Order>((T *)sum, (const T *)weight, (const T *)term, n_sum, n_term, width);
}

template <class T> void add_rows(char *const *out, const void *sum, ptrdiff_t n_row, ptrdiff_t width) {
    const T *line = (const T *)sum;
    for (ptrdiff_t r = 0; r < n_row; r++, line += padded_to_vectors<T>(width)) {
        T *place = (T *)out[r];
        ptrdiff_t d = 0;
        for (; d + lanes<T> <= width; d += lanes<T>) store(place + d, load(place + d) + load(line + d));
        if (d < width) store_first(place + d, load_first<vec<T>>(place + d, width - d) + load(line + d), width - d);
    }
}

template <class T, class S> void store_numbers(char *out, const void *number, ptrdiff_t n) {
    const T *from = (const T *)number;
    S *to = (S *)out;
    ptrdiff_t i = 0;
    for (; i + lanes<T> <= n; i += lanes<T>) store_stored<T>(to + i, load(from + i));
    if (i < n) store_stored_first<T>(to + i, load_first<vec<T>>(from + i, n - i), n - i);
}

// ---- sums of a tile ----

template <class T>
void add_over_keys(void *sum_, const void *grad_, const void *distance_, ptrdiff_t n_row, ptrdiff_t n_key) {
    const T *grad = (const T *)grad_, *distance = (const T *)distance_;
    for (ptrdiff_t r = 0; r < n_row; r += lanes<T>) {
        vec<T> sum = {};
        for (ptrdiff_t j = 0; j < n_key; j++) {
            const vec<T> g = load(grad + j * tile_rows<T> + r);
            sum += distance ? g * magnitude<T>(load(distance + r) - T(j)) : g;
        }
        T *place = (T *)sum_ + r;
        store(place, load(place) + sum);
    }
}

template <class T> void sum_over_rows(void *sum, const void *tile_, ptrdiff_t n_key) {
    const T *tile = (const T *)tile_;
    for (ptrdiff_t j = 0; j < n_key; j++) {
        vec<T> row_sum = {};
        for (ptrdiff_t r = 0; r < tile_rows<T>; r += lanes<T>) row_sum += load(tile + j * tile_rows<T> + r);
        ((T *)sum)[j] = lane_sum<T>(row_sum);
    }
}

template <class T> void add_tile(void *sum, const void *grad, ptrdiff_t n_row, ptrdiff_t n_key) {
    for (ptrdiff_t r = 0; r < n_row; r += lanes<T>) {
        const auto is_row = lane_numbers<T>() < T(n_row - r);
        for (ptrdiff_t j = 0; j < n_key; j++) {
            T *place = (T *)sum + j * tile_rows<T> + r;
            const vec<T> g = load((const T *)grad + j * tile_rows<T> + r);
            store(place, load(place) + (is_row ? g : vec<T>{}));
        }
    }
}

template <class T> void store_tile(char *const *out, const void *tile_, ptrdiff_t n_row, ptrdiff_t n_key) {
    const T *tile = (const T *)tile_;
    for (ptrdiff_t r = 0; r < n_row; r += lanes<T>) {
        for (ptrdiff_t j = 0; j < n_key; j += lanes<T>) {
            vec<T> square[lanes<T>];
            for (int i = 0; i < lanes<T>; i++)
                square[i] = j + i < n_key ? load(tile + (j + i) * tile_rows<T> + r) : vec<T>{};
            transpose<T>(square);
            for (int i = 0; i < lanes<T> && r + i < n_row; i++) store_first((T *)out[r + i] + j, square[i], n_key - j);
        }
    }
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
