// Tiles of rows: a vector lane is a query row.  Scores [key][row] = K Q^T, sums [feature][row] = V^T weights.
#pragma once

#include "adjust.h"
#include "finish.h"
#include "storage.h"

namespace {
namespace MHA_ISA_NAMESPACE {

// Keys (or features) whose accumulators fit the registers beside `vectors` vectors of rows.
constexpr int keys_per_step(int vectors) {
    return MHA_ACCUMULATORS / vectors > 16 ? 16 : MHA_ACCUMULATORS / vectors;
}

// rows -> [width][tile_rows], times scale.  Lanes without a row repeat the last one; nobody looks at their results.
template <class T, class S>
void pack_query(void *query_, const char *const *row, ptrdiff_t n_row, ptrdiff_t width, double scale_) {
    T *query = (T *)query_;
    const T scale = T(scale_);
    for (ptrdiff_t r = 0; r < n_row; r += lanes<T>) {
        const S *source[lanes<T>];
        for (int i = 0; i < lanes<T>; i++) source[i] = (const S *)row[r + i < n_row ? r + i : n_row - 1];
        vec<T> square[lanes<T>];
        ptrdiff_t d = 0;
        for (; d + lanes<T> <= width; d += lanes<T>) {
            MHA_UNROLL for (int i = 0; i < lanes<T>; i++) square[i] = load_stored<T>(source[i] + d) * scale;
            transpose<T>(square);
            MHA_UNROLL for (int i = 0; i < lanes<T>; i++) store(query + (d + i) * tile_rows<T> + r, square[i]);
        }
        if (d == width) continue;
        for (int i = 0; i < lanes<T>; i++) square[i] = load_stored_first<T>(source[i] + d, width - d) * scale;
        transpose<T>(square);
        for (int i = 0; i < lanes<T> && d + i < width; i++) store(query + (d + i) * tile_rows<T> + r, square[i]);
    }
}

MHA_INLINE void prefetch_row(const mha_ahead *ahead, ptrdiff_t row) {
    const char *data = ahead->data + row * ahead->stride;
    for (ptrdiff_t byte = 0; byte < ahead->width; byte += 64) __builtin_prefetch(data + byte, 0, 2);
}

template <class T, int N_KEY, int VECTORS>
MHA_INLINE void score_step(T *score, vec<T> (&highest)[VECTORS], const T *query, const char *key, ptrdiff_t key_stride,
                           ptrdiff_t width) {
    vec<T> sum[N_KEY][VECTORS] = {};
    const T *key_row[N_KEY];
    MHA_UNROLL for (int j = 0; j < N_KEY; j++) key_row[j] = row_at<T>(key, key_stride, j);
    MHA_UNROLL_2 for (ptrdiff_t d = 0; d < width; d++) {
        vec<T> q[VECTORS];
        MHA_UNROLL for (int x = 0; x < VECTORS; x++) q[x] = load(query + d * tile_rows<T> + x * lanes<T>);
        MHA_UNROLL for (int j = 0; j < N_KEY; j++) {
            MHA_UNROLL for (int x = 0; x < VECTORS; x++) sum[j][x] += key_row[j][d] * q[x];
        }
    }
    MHA_UNROLL for (int j = 0; j < N_KEY; j++) {
        MHA_UNROLL for (int x = 0; x < VECTORS; x++) {
            store(score + j * tile_rows<T> + x * lanes<T>, sum[j][x]);
            highest[x] = larger<T>(highest[x], sum[j][x]);
        }
    }
}

template <class T>
void scores(void *score_, void *peak_, const void *query_, ptrdiff_t n_row, const char *key, ptrdiff_t key_stride,
            ptrdiff_t n_key, ptrdiff_t width, const mha_ahead *ahead) {
    T *score = (T *)score_, *peak = (T *)peak_;
    const T *query = (const T *)query_;
    with_vectors<T>(n_row, [=](auto vectors) __attribute__((always_inline)) {
        constexpr int n_vector = decltype(vectors)::value;
        vec<T> highest[n_vector];
        MHA_UNROLL for (int x = 0; x < n_vector; x++) highest[x] = splat(-infinity<T>);
        in_steps<keys_per_step(n_vector)>(n_key, [&](auto step, ptrdiff_t j) __attribute__((always_inline)) {
            constexpr int n_step = decltype(step)::value;
            if (ahead->data)
                for (ptrdiff_t i = j; i < j + n_step && i < ahead->n_row; i++) prefetch_row(ahead, i);
            score_step<T, n_step, n_vector>(score + j * tile_rows<T>, highest, query, key + j * key_stride, key_stride,
                                            width);
        });
        MHA_UNROLL for (int x = 0; x < n_vector; x++) store(peak + x * lanes<T>, highest[x]);
    });
}

// Online softmax (Milakov & Gimelshein 2018): rescale = 2**((old maximum - new maximum) * exp_scale).
template <class T>
void softmax(void *score_, const void *peak_, void *maximum_, void *total_, void *rescale_, ptrdiff_t n_row,
             ptrdiff_t n_key, double exp_scale_) {
    T *score = (T *)score_, *maximum = (T *)maximum_, *total = (T *)total_, *rescale = (T *)rescale_;
    const T *peak = (const T *)peak_;
    const T exp_scale = T(exp_scale_);
    with_vectors<T>(n_row, [=](auto vectors) __attribute__((always_inline)) {
        constexpr int n_vector = decltype(vectors)::value;
        vec<T> base[n_vector], even[n_vector], odd[n_vector];  // two shorter sums: fewer roundings each
        MHA_UNROLL for (int x = 0; x < n_vector; x++) {
            vec<T> old = load(maximum + x * lanes<T>), now = larger<T>(load(peak + x * lanes<T>), old);
            store(maximum + x * lanes<T>, now);
            // A row that has seen no key yet has maximum -inf; -inf - -inf would be NaN, -inf - 0 gives weight 0.
            base[x] = now == -infinity<T> ? vec<T>{} : now;
            store(rescale + x * lanes<T>, exp2_nonpositive<T>((old - base[x]) * exp_scale));
            even[x] = odd[x] = vec<T>{};
        }
        auto weigh = [&](ptrdiff_t j, vec<T> (&sum)[n_vector]) __attribute__((always_inline)) {
            MHA_UNROLL for (int x = 0; x < n_vector; x++) {
                T *place = score + j * tile_rows<T> + x * lanes<T>;
                vec<T> weight = exp2_nonpositive<T>((load(place) - base[x]) * exp_scale);
                sum[x] += weight;
                store(place, weight);
            }
        };
        ptrdiff_t j = 0;
        for (; j + 2 <= n_key; j += 2) weigh(j, even), weigh(j + 1, odd);
        if (j < n_key) weigh(j, even);
        MHA_UNROLL for (int x = 0; x < n_vector; x++) {
            T *place = total + x * lanes<T>;
            store(place, load(place) * load(rescale + x * lanes<T>) + (even[x] + odd[x]));
        }
    });
}

// The block's sum starts from zero and is added once: fewer roundings than adding key by key to a long sum.
template <class T, int N_FEATURE, int VECTORS>
MHA_INLINE void value_step(T *sum, const T *rescale, const T *weight, const char *value, ptrdiff_t value_stride,
                           ptrdiff_t n_key) {
    vec<T> part[N_FEATURE][VECTORS] = {};
    MHA_UNROLL_2 for (ptrdiff_t j = 0; j < n_key; j++) {
        vec<T> w[VECTORS];
        const T *v = row_at<T>(value, value_stride, j);
        MHA_UNROLL for (int x = 0; x < VECTORS; x++) w[x] = load(weight + j * tile_rows<T> + x * lanes<T>);
        MHA_UNROLL for (int d = 0; d < N_FEATURE; d++) {
            MHA_UNROLL for (int x = 0; x < VECTORS; x++) part[d][x] += v[d] * w[x];
        }
    }
    MHA_UNROLL for (int x = 0; x < VECTORS; x++) {
        vec<T> factor = load(rescale + x * lanes<T>);
        MHA_UNROLL for (int d = 0; d < N_FEATURE; d++) {
            T *place = sum + d * tile_rows<T> + x * lanes<T>;
            store(place, load(place) * factor + part[d][x]);
        }
    }
}

template <class T>
void values(void *sum_, const void *rescale_, const void *weight_, ptrdiff_t n_row, const char *value,
            ptrdiff_t value_stride, ptrdiff_t n_key, ptrdiff_t width, const mha_ahead *ahead) {
    T *sum = (T *)sum_;
    const T *rescale = (const T *)rescale_, *weight = (const T *)weight_;
    with_vectors<T>(n_row, [=](auto vectors) __attribute__((always_inline)) {
        constexpr int n_vector = decltype(vectors)::value;
        ptrdiff_t fetched = 0;
        in_steps<keys_per_step(n_vector)>(width, [&](auto step, ptrdiff_t d) __attribute__((always_inline)) {
            constexpr int n_step = decltype(step)::value;
            // The rows ahead are spread evenly over the steps.
            if (ahead->data)
                for (; fetched * width < ahead->n_row * (d + n_step); fetched++) prefetch_row(ahead, fetched);
            value_step<T, n_step, n_vector>(sum + d * tile_rows<T>, rescale, weight, value + d * ptrdiff_t(sizeof(T)),
                                            value_stride, n_key);
        });
    });
}

template <class T>
void values_guarded(void *sum_, const void *rescale_, const void *weight_, const void *visible_, ptrdiff_t n_row,
                    const char *value, ptrdiff_t value_stride, ptrdiff_t n_key, ptrdiff_t width) {
    T *sum = (T *)sum_;
    const T *rescale = (const T *)rescale_, *weight = (const T *)weight_, *visible = (const T *)visible_;
    for (ptrdiff_t d = 0; d < width; d++) {
        for (ptrdiff_t r = 0; r < n_row; r += lanes<T>) {
            vec<T> part = {};
            for (ptrdiff_t j = 0; j < n_key; j++) {
                // The factor is chosen, not the sum: Clang would split the multiply-add, and values() rounds only once.
                const vec<T> all = splat(row_at<T>(value, value_stride, j)[d]);
                const vec<T> v = load(visible + j * tile_rows<T> + r) == -infinity<T> ? vec<T>{} : all;
                part += v * load(weight + j * tile_rows<T> + r);
            }
            T *place = sum + d * tile_rows<T> + r;
            store(place, load(place) * load(rescale + r) + part);
        }
    }
}

template <class T>
void finish_factors(void *factor, const void *maximum, const void *total, ptrdiff_t n_row, const mha_finish *how) {
    for (ptrdiff_t r = 0; r < n_row; r++)
        ((T *)factor)[r] = finish_row<T>(((const T *)maximum)[r], ((const T *)total)[r], r, how);
}

// [lanes keys or features][lanes rows] -> n_row rows of n elements each, at out[row] + offset
template <class T, class S>
MHA_INLINE void store_rows(char *const *out, ptrdiff_t offset, vec<T> (&square)[lanes<T>], ptrdiff_t n_row, ptrdiff_t n) {
    transpose<T>(square);
    if (n_row >= lanes<T> && n >= lanes<T>) {
        MHA_UNROLL for (int i = 0; i < lanes<T>; i++) store_stored<T>((S *)out[i] + offset, square[i]);
    } else {
        for (int i = 0; i < lanes<T> && i < n_row; i++)
            store_stored_first<T>((S *)out[i] + offset, square[i], n < lanes<T> ? n : lanes<T>);
    }
}

template <class T, class S, int ROWS>
void finish(char *const *out, void *sum_, const void *maximum, const void *total, ptrdiff_t n_row, ptrdiff_t width,
            const mha_finish *how) {
    T *sum = (T *)sum_;
    T factor[ROWS] = {};
    finish_factors<T>(factor, maximum, total, n_row, how);
    // Where no key has weight the output is 0, even if 0 * NaN got into the sum.
    for (ptrdiff_t r = 0; r < n_row; r++)
        if (switched_off(r, how) || ((const T *)total)[r] == 0)
            for (ptrdiff_t d = 0; d < width; d++) sum[d * ROWS + r] = 0;
    for (ptrdiff_t r = 0; r < n_row; r += lanes<T>) {
        const vec<T> f = load(factor + r);
        for (ptrdiff_t d = 0; d < width; d += lanes<T>) {
            vec<T> square[lanes<T>];
            if (d + lanes<T> <= width) {
                MHA_UNROLL for (int i = 0; i < lanes<T>; i++) square[i] = load(sum + (d + i) * ROWS + r) * f;
            } else {
                for (int i = 0; i < lanes<T>; i++)
                    square[i] = d + i < width ? load(sum + (d + i) * ROWS + r) * f : vec<T>{};
            }
            store_rows<T, S>(out + r, d, square, n_row - r, width - d);
        }
    }
}

template <class T, class S>
void store_weights(char *const *out, const void *score_, const void *maximum_, const void *factor_, ptrdiff_t n_row,
                   ptrdiff_t n_key, double exp_scale_) {
    const T *score = (const T *)score_, *maximum = (const T *)maximum_, *factor = (const T *)factor_;
    const T exp_scale = T(exp_scale_);
    for (ptrdiff_t r = 0; r < n_row; r += lanes<T>) {
        const vec<T> highest = load(maximum + r), base = highest == -infinity<T> ? vec<T>{} : highest;
        for (ptrdiff_t j = 0; j < n_key; j += lanes<T>) {
            vec<T> square[lanes<T>];
            for (int i = 0; i < lanes<T>; i++) {
                const vec<T> s = j + i < n_key ? load(score + (j + i) * tile_rows<T> + r) : splat(-infinity<T>);
                // an excluded key has weight 0 even in a row whose other weights are NaN
                square[i] = s == -infinity<T> ? vec<T>{}
                                              : exp2_nonpositive<T>((s - base) * exp_scale) * load(factor + r);
            }
            store_rows<T, S>(out + r, j, square, n_row - r, n_key - j);
        }
    }
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
