// Tiles of rows: a vector lane is a query row.  Scores [key][row] = K Q^T, sums [feature][row] = V^T weights.
#pragma once

#include "adjust.h"
#include "finish.h"
#include "storage.h"

namespace {
namespace MHA_ISA_NAMESPACE {

// Keys (or features) whose accumulators fit the registers beside `vectors` vectors of rows.
constexpr int keys_per_step(int vectors) { return MHA_ACCUMULATORS / vectors > 16 ? 16 : MHA_ACCUMULATORS / vectors; }

// rows -> [width][tile_rows], times scale.  Lanes without a row repeat the last one; nobody looks at their results.
template <class T, class S>
void pack_query(void *query_, const char *const *row, ptrdiff_t n_row, ptrdiff_t width, double scale_) {
    constexpr ptrdiff_t n_element = MHA_VECTOR_BYTES / sizeof(S);
    const T scale = T(scale_);
    for (ptrdiff_t r = 0; r < n_row; r += lanes<T>) {
        const S *source[lanes<T>];
        for (int i = 0; i < lanes<T>; i++) source[i] = (const S *)row[r + i < n_row ? r + i : n_row - 1];
        T *query = (T *)query_ + r;
        vec<T> square[lanes<T>];
        auto pack = [&](ptrdiff_t n) __attribute__((always_inline)) {
            MHA_UNROLL for (int i = 0; i < lanes<T>; i++) {
                if constexpr (sizeof(S) == 2) {
                    vec<T> first, second;
                    widen_pairs(square[i], first, second, S{});
                    if (2 * i < n) store(query + 2 * i * tile_rows<T>, first * scale);
                    if (2 * i + 1 < n) store(query + (2 * i + 1) * tile_rows<T>, second * scale);
                } else if (i < n) {
                    store(query + i * tile_rows<T>, square[i] * scale);
                }
            }
        };
        ptrdiff_t d = 0;
        for (; d + n_element <= width; d += n_element, query += n_element * tile_rows<T>) {
            load_transposed<T>(square,
                               [&](int i) __attribute__((always_inline)) { return (const T *)(source[i] + d); });
            pack(n_element);
        }
        if (d == width) continue;
        MHA_UNROLL for (int i = 0; i < lanes<T>; i++) square[i] = load_first<vec<T>>(source[i] + d, width - d);
        transpose<T>(square);
        pack(width - d);
    }
}

// What begins a run through the key blocks: no sum, no weight, no maximum.
template <class T, int ROWS>
void begin(void *sum, void *maximum, void *total, ptrdiff_t n_row, ptrdiff_t width) {
    for (ptrdiff_t r = 0; r < n_row; r += lanes<T>) {
        store((T *)maximum + r, splat(-infinity<T>));
        store((T *)total + r, vec<T>{});
        for (ptrdiff_t d = 0; d < width; d++) store((T *)sum + d * ROWS + r, vec<T>{});
    }
}

// Of all rows ahead, those whose turn is between steps `from` and `to` of `n_step`: evenly spread, so that the requests
// do not wait for each other.
MHA_INLINE void prefetch_share(const mha_prefetch *ahead, ptrdiff_t from, ptrdiff_t to, ptrdiff_t n_step) {
    for (; ahead; ahead = ahead->then)
        for (ptrdiff_t row = ahead->n_row * from / n_step; row < ahead->n_row * to / n_step; row++)
            for (ptrdiff_t byte = 0; byte < ahead->width; byte += 64)
                __builtin_prefetch(ahead->data + row * ahead->stride + byte, 0, 2);
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
void scores(void *score_, void *block_maximum_, const void *query_, ptrdiff_t n_row, const char *key,
            ptrdiff_t key_stride, ptrdiff_t n_key, ptrdiff_t width, const mha_prefetch *ahead) {
    T *score = (T *)score_, *block_maximum = (T *)block_maximum_;
    const T *query = (const T *)query_;
    with_vectors<T>(n_row, [=](auto vectors) __attribute__((always_inline)) {
        constexpr int n_vector = decltype(vectors)::value;
        vec<T> highest[n_vector];
        MHA_UNROLL for (int x = 0; x < n_vector; x++) highest[x] = splat(-infinity<T>);
        in_steps<keys_per_step(n_vector)>(n_key, [&](auto step, ptrdiff_t j) __attribute__((always_inline)) {
            constexpr int n_step = decltype(step)::value;
            prefetch_share(ahead, j, j + n_step, n_key);
            score_step<T, n_step, n_vector>(score + j * tile_rows<T>, highest, query, key + j * key_stride, key_stride,
                                            width);
        });
        MHA_UNROLL for (int x = 0; x < n_vector; x++) store(block_maximum + x * lanes<T>, highest[x]);
    });
}

template <class T>
void softmax(void *score_, const void *block_maximum_, void *maximum_, void *total_, void *rescale_, ptrdiff_t n_row,
             ptrdiff_t n_key, double exp_scale_) {
    T *score = (T *)score_, *maximum = (T *)maximum_, *total = (T *)total_, *rescale = (T *)rescale_;
    const T *block_maximum = (const T *)block_maximum_;
    const T exp_scale = T(exp_scale_);
    with_vectors<T>(n_row, [=](auto vectors) __attribute__((always_inline)) {
        constexpr int n_vector = decltype(vectors)::value;
        vec<T> base[n_vector], even[n_vector], odd[n_vector];  // two shorter sums: fewer roundings each
        MHA_UNROLL for (int x = 0; x < n_vector; x++) {
            const auto [now, exponent] =
                raise_maximum<T>(maximum + x * lanes<T>, load(block_maximum + x * lanes<T>), exp_scale);
            base[x] = now;
            store(rescale + x * lanes<T>, exp2_nonpositive<T>(exponent));
            even[x] = odd[x] = vec<T>{};
        }
        auto weigh = [&](ptrdiff_t j, vec<T>(&sum)[n_vector]) __attribute__((always_inline)) {
            MHA_UNROLL for (int x = 0; x < n_vector; x++) {
                T *at = score + j * tile_rows<T> + x * lanes<T>;
                vec<T> weight = weight_of<T>(load(at), base[x], exp_scale);
                sum[x] += weight;
                store(at, weight);
            }
        };
        ptrdiff_t j = 0;
        for (; j + 2 <= n_key; j += 2) weigh(j, even), weigh(j + 1, odd);
        if (j < n_key) weigh(j, even);
        MHA_UNROLL for (int x = 0; x < n_vector; x++) {
            T *at = total + x * lanes<T>;
            store(at, load(at) * load(rescale + x * lanes<T>) + (even[x] + odd[x]));
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
            T *at = sum + d * tile_rows<T> + x * lanes<T>;
            store(at, load(at) * factor + part[d][x]);
        }
    }
}

template <class T>
void values(void *sum_, const void *rescale_, const void *weight_, ptrdiff_t n_row, const char *value,
            ptrdiff_t value_stride, ptrdiff_t n_key, ptrdiff_t width, const mha_prefetch *ahead) {
    T *sum = (T *)sum_;
    const T *rescale = (const T *)rescale_, *weight = (const T *)weight_;
    with_vectors<T>(n_row, [=](auto vectors) __attribute__((always_inline)) {
        constexpr int n_vector = decltype(vectors)::value;
        in_steps<keys_per_step(n_vector)>(width, [&](auto step, ptrdiff_t d) __attribute__((always_inline)) {
            constexpr int n_step = decltype(step)::value;
            prefetch_share(ahead, d, d + n_step, width);
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
            T *at = sum + d * tile_rows<T> + r;
            store(at, load(at) * load(rescale + r) + part);
        }
    }
}

template <class T>
void finish_factors(void *factor_, const void *maximum_, const void *total_, ptrdiff_t n_row, const mha_finish *how) {
    T *factor = (T *)factor_;
    const T *maximum = (const T *)maximum_, *total = (const T *)total_;
    if (how->sink || how->gate || how->lse) {
        for (ptrdiff_t r = 0; r < n_row; r++) factor[r] = finish_row<T>(maximum[r], total[r], r, how);
        return;
    }
    for (ptrdiff_t r = 0; r < n_row; r += lanes<T>) {  // the same number, a vector at a time
        const vec<T> sum = load(total + r);
        store(factor + r, sum == T(0) ? vec<T>{} : T(how->out_scale) / sum);
    }
}

// Which rows of a sum hold Inf or NaN, as bits.
template <class T, int ROWS> uint64_t rows_not_finite(const T *sum, ptrdiff_t n_row, ptrdiff_t width) {
    uint64_t rows = 0;
    for (ptrdiff_t r = 0; r < n_row; r++) {
        T zero = 0;
        for (ptrdiff_t d = 0; d < width; d++) zero += sum[d * ROWS + r] * T(0);
        if (zero != T(0)) rows |= uint64_t(1) << r;
    }
    return rows;
}

// Rows of a finished sum in their places.  16-bit elements go in pairs, so that they are moved like T.
template <class T, class S, int ROWS>
uint64_t finish(char *const *out, void *sum_, const void *maximum, const void *total, ptrdiff_t n_row, ptrdiff_t width,
            const mha_finish *how) {
    constexpr bool paired = sizeof(S) < sizeof(T);
    T *sum = (T *)sum_;
    T factor[ROWS] = {};
    finish_factors<T>(factor, maximum, total, n_row, how);
    // Where no key has weight the output is 0, even if 0 * NaN got into the sum.
    for (ptrdiff_t r = 0; r < n_row; r++)
        if (switched_off(r, how) || ((const T *)total)[r] == 0)
            for (ptrdiff_t d = 0; d < width; d++) sum[d * ROWS + r] = 0;
    const ptrdiff_t n_line = paired ? (width + 1) / 2 : width;
    uint64_t not_finite = 0;
    vec<T> all_zero = {};  // 0 * x for all x: NaN as soon as one is not finite
    for (ptrdiff_t r = 0; r < n_row; r += lanes<T>) {
        T *line = sum + r;
        if constexpr (paired) {
            const vec<T> f = load(factor + r);
            vec<T> zero = {};
            for (ptrdiff_t d = 0; d < width; d += 2) {
                const vec<T> first = load(line + d * ROWS);
                const vec<T> second = d + 1 < width ? load(line + (d + 1) * ROWS) : vec<T>{};
                zero += first * T(0) + second * T(0);
                store(line + d / 2 * ROWS, narrow_pairs(first * f, second * f, S{}));
            }
            for (ptrdiff_t i = 0; i < lanes<T> && r + i < n_row; i++)
                if (zero[i] != T(0)) not_finite |= uint64_t(1) << (r + i);
        }
        vec<T> square[lanes<T>];
        auto write = [&](ptrdiff_t first) __attribute__((always_inline)) {
            MHA_UNROLL for (int i = 0; i < lanes<T>; i++) {
                if (r + i == n_row) break;
                if constexpr (!paired) {
                    all_zero += square[i] * T(0);
                    square[i] = square[i] * factor[r + i];
                }
                store_first((S *)out[r + i] + first, square[i], width - first);
            }
        };
        constexpr ptrdiff_t per_line = sizeof(T) / sizeof(S);
        ptrdiff_t d = 0;
        for (; d + lanes<T> <= n_line; d += lanes<T>) {
            load_transposed<T>(square, [&](int i) __attribute__((always_inline)) { return line + (d + i) * ROWS; });
            write(d * per_line);
        }
        if (d == n_line) continue;
        MHA_UNROLL for (int i = 0; i < lanes<T>; i++) {
            square[i] = d + i < n_line ? load(line + (d + i) * ROWS) : vec<T>{};
        }
        transpose<T>(square);
        write(d * per_line);
    }
    if (!paired && lane_sum<T>(all_zero) != T(0)) not_finite = rows_not_finite<T, ROWS>(sum, n_row, width);
    return not_finite;
}

template <class T, class S> void replace_not_finite(char *out_, const char *second_, ptrdiff_t width) {
    S *out = (S *)out_;
    const S *second = (const S *)second_;
    for (ptrdiff_t d = 0; d < width; d++)
        if (load_stored_first<T>(out + d, 1)[0] * T(0) != T(0)) out[d] = second[d];
}

// [lanes keys][lanes rows] -> n_row rows of n elements each, at out[row] + offset
template <class T, class S>
MHA_INLINE void store_rows(char *const *out, ptrdiff_t offset, vec<T> (&square)[lanes<T>], ptrdiff_t n_row,
                           ptrdiff_t n) {
    transpose<T>(square);
    MHA_UNROLL for (int i = 0; i < lanes<T>; i++) {
        if (i < n_row) store_stored_first<T>((S *)out[i] + offset, square[i], n);
    }
}

template <class T, class S>
void store_weights(char *const *out, const void *score_, const void *maximum_, const void *factor_, ptrdiff_t n_row,
                   ptrdiff_t n_key, double exp_scale_) {
    const T *score = (const T *)score_, *maximum = (const T *)maximum_, *factor = (const T *)factor_;
    const T exp_scale = T(exp_scale_);
    for (ptrdiff_t r = 0; r < n_row; r += lanes<T>) {
        for (ptrdiff_t j = 0; j < n_key; j += lanes<T>) {
            vec<T> square[lanes<T>];
            for (int i = 0; i < lanes<T>; i++) {
                const vec<T> s = j + i < n_key ? load(score + (j + i) * tile_rows<T> + r) : splat(-infinity<T>);
                square[i] = known_weight<T>(s, load(maximum + r), exp_scale, load(factor + r));
            }
            store_rows<T, S>(out + r, j, square, n_row - r, n_key - j);
        }
    }
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
