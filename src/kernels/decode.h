// Few rows: a vector lane is a feature, every K and V row is read once for all rows.
#pragma once

#include "../contract/decode.h"
#include "adjust.h"
#include "finish.h"
#include "storage.h"

namespace {
namespace MHA_ISA_NAMESPACE {

template <class T> constexpr ptrdiff_t padded(ptrdiff_t width) { return (width + lanes<T> - 1) / lanes<T> * lanes<T>; }

// Memory is asked for this far ahead of its use (bench.compare --cases decode, one thread: 4 KiB is 10% slower, 16 KiB
// ties).
constexpr ptrdiff_t prefetch_bytes = 8192, line_bytes = 64;

// From a row to the one that far ahead of it.  Each line is asked for where its counterpart is used: requests in a
// burst fill the line buffers, and the loads behind them wait.
MHA_INLINE ptrdiff_t bytes_ahead(ptrdiff_t stride, ptrdiff_t row_bytes) {
    return stride * (prefetch_bytes / (row_bytes + 1) + 1);
}

template <class S> MHA_INLINE void prefetch(const S *p, ptrdiff_t ahead) {
    __builtin_prefetch((const char *)p + ahead, 0, 3);
}

template <class T, class S>
void decode_pack_query(void *query, const char *const *row, ptrdiff_t n_row, ptrdiff_t width, double scale) {
    for (ptrdiff_t r = 0; r < n_row; r++)
        for (ptrdiff_t d = 0; d < width; d += lanes<T>) {
            const S *source = (const S *)row[r] + d;
            const vec<T> q = d + lanes<T> <= width ? load_stored<T>(source) : load_stored_first<T>(source, width - d);
            store((T *)query + r * padded<T>(width) + d, q * T(scale));
        }
}

// product[row][key], for N_ROW rows and N_KEY keys: their products, not yet summed over the lanes
template <class T, class S, int N_ROW, int N_KEY>
MHA_INLINE void dot_products(vec<T> *product, ptrdiff_t product_stride, const T *query, const S *const *key,
                             ptrdiff_t width, ptrdiff_t ahead) {
    constexpr ptrdiff_t line = line_bytes / sizeof(S) > lanes<T> ? line_bytes / sizeof(S) : lanes<T>;
    const ptrdiff_t query_stride = padded<T>(width);
    vec<T> sum[N_ROW][N_KEY] = {};
    auto fetch = [=](ptrdiff_t d) __attribute__((always_inline)) {
        MHA_UNROLL for (int j = 0; j < N_KEY; j++) prefetch(key[j] + d, ahead);
    };
    auto add = [&](ptrdiff_t d, auto load_key) __attribute__((always_inline)) {
        vec<T> k[N_KEY];
        MHA_UNROLL for (int j = 0; j < N_KEY; j++) k[j] = load_key(key[j] + d);
        MHA_UNROLL for (int r = 0; r < N_ROW; r++) {
            const vec<T> q = load(query + r * query_stride + d);
            MHA_UNROLL for (int j = 0; j < N_KEY; j++) sum[r][j] += q * k[j];
        }
    };
    auto whole = [](const S *p) __attribute__((always_inline)) { return load_stored<T>(p); };
    ptrdiff_t d = 0;
    for (; d + line <= width; d += line) {
        fetch(d);
        MHA_UNROLL for (ptrdiff_t x = 0; x < line; x += lanes<T>) add(d + x, whole);
    }
    if (d < width) fetch(d);
    for (; d + lanes<T> <= width; d += lanes<T>) add(d, whole);
    if (d < width)
        add(d, [=](const S *p) __attribute__((always_inline)) { return load_stored_first<T>(p, width - d); });
    MHA_UNROLL for (int r = 0; r < N_ROW; r++) {
        MHA_UNROLL for (int j = 0; j < N_KEY; j++) product[r * product_stride + j] = sum[r][j];
    }
}

template <class T, class S>
void decode_scores(void *score_, const void *query_, ptrdiff_t n_row, const char *key, ptrdiff_t key_stride,
                   ptrdiff_t n_key, ptrdiff_t width) {
    const T *query = (const T *)query_;
    const ptrdiff_t ahead = bytes_ahead(key_stride, width * ptrdiff_t(sizeof(S)));
    constexpr int most_rows = lanes<T> < 4 ? lanes<T> : 4;
    for (ptrdiff_t j = 0; j < n_key; j += lanes<T>) {
        // Past the end the last row stands in; its products are overwritten with -inf.
        const S *key_row[lanes<T>];
        for (int i = 0; i < lanes<T>; i++) key_row[i] = row_at<S>(key, key_stride, j + i < n_key ? j + i : n_key - 1);
        in_steps<most_rows>(n_row, [&](auto step, ptrdiff_t r) __attribute__((always_inline)) {
            // As many products as a vector has lanes are summed up together; at most four keys are read side by side.
            constexpr int rows = decltype(step)::value, keys = lanes<T> / rows, abreast = keys < 4 ? keys : 4;
            T *score = (T *)score_ + r * MHA_KEY_SPLIT + j;
            for (int k = 0; k < rows; k++) {
                vec<T> product[lanes<T>];
                for (int i = 0; i < keys; i += abreast)
                    dot_products<T, S, rows, abreast>(product + i, keys, query + r * padded<T>(width),
                                                      key_row + k * keys + i, width, r == 0 ? ahead : 0);
                T sum[lanes<T>];
                store(sum, row_sums<T>(product));
                MHA_UNROLL for (int i = 0; i < rows; i++)
                    memcpy(score + i * MHA_KEY_SPLIT + k * keys, sum + i * keys, keys * sizeof(T));
            }
        });
    }
    for (ptrdiff_t r = 0; r < n_row; r++)
        for (ptrdiff_t j = n_key; j < padded<T>(n_key); j++) ((T *)score_)[r * MHA_KEY_SPLIT + j] = -infinity<T>;
}

template <class T>
void decode_softmax(void *score_, void *maximum_, void *total_, ptrdiff_t n_row, ptrdiff_t n_key, double exp_scale_) {
    const T exp_scale = T(exp_scale_);
    for (ptrdiff_t r = 0; r < n_row; r++) {
        T *score = (T *)score_ + r * MHA_KEY_SPLIT;
        vec<T> highest = splat(-infinity<T>);
        for (ptrdiff_t j = 0; j < n_key; j += lanes<T>) highest = larger<T>(load(score + j), highest);
        T maximum = -infinity<T>;
        MHA_UNROLL for (int i = 0; i < lanes<T>; i++) maximum = highest[i] > maximum ? highest[i] : maximum;
        const vec<T> base = base_of<T>(splat(maximum));
        vec<T> total = {};
        for (ptrdiff_t j = 0; j < n_key; j += lanes<T>) {
            vec<T> weight = weight_of<T>(load(score + j), base, exp_scale);
            total += weight;
            store(score + j, weight);
        }
        ((T *)maximum_)[r] = maximum;
        ((T *)total_)[r] = lane_sum<T>(total);
    }
}

// Keys whose value rows are added up from zero before they join the sum: fewer roundings than one long sum, and near
// enough together that the rows are still in L1 for the next query rows and features.
constexpr ptrdiff_t keys_together = 32;

// sum[N_ROW][N_VECTOR vectors] += weights times n_key value rows
template <class T, class S, int N_ROW, int N_VECTOR, class Load>
MHA_INLINE void add_values(T *sum, ptrdiff_t sum_stride, const T *weight, const char *value, ptrdiff_t value_stride,
                           ptrdiff_t n_key, ptrdiff_t ahead, Load load_value) {
    vec<T> part[N_ROW][N_VECTOR] = {};
    for (ptrdiff_t j = 0; j < n_key; j++) {
        const S *v = row_at<S>(value, value_stride, j);
        MHA_UNROLL for (int byte = 0; byte < N_VECTOR * lanes<T> * int(sizeof(S)); byte += line_bytes)
            prefetch((const char *)v + byte, ahead);
        MHA_UNROLL for (int x = 0; x < N_VECTOR; x++) {
            vec<T> feature = load_value(v + x * lanes<T>);
            MHA_UNROLL for (int r = 0; r < N_ROW; r++) part[r][x] += weight[r * MHA_KEY_SPLIT + j] * feature;
        }
    }
    MHA_UNROLL for (int r = 0; r < N_ROW; r++) {
        MHA_UNROLL for (int x = 0; x < N_VECTOR; x++) {
            T *at = sum + r * sum_stride + x * lanes<T>;
            store(at, load(at) + part[r][x]);
        }
    }
}

template <class T, class S>
void decode_values(void *sum_, const void *weight_, ptrdiff_t n_row, const char *value, ptrdiff_t value_stride,
                   ptrdiff_t n_key, ptrdiff_t width) {
    constexpr int accumulators = MHA_ACCUMULATORS >= 16 ? 16 : 8;
    constexpr ptrdiff_t vector_bytes = lanes<T> * sizeof(S);
    const ptrdiff_t stride = padded<T>(width), n_full = width / lanes<T>, rest = width % lanes<T>;
    const ptrdiff_t ahead = bytes_ahead(value_stride, width * ptrdiff_t(sizeof(S)));
    memset(sum_, 0, n_row * stride * sizeof(T));
    for (ptrdiff_t j = 0; j < n_key; j += keys_together) {
        const ptrdiff_t n = n_key - j < keys_together ? n_key - j : keys_together;
        const char *block = value + j * value_stride;
        in_steps<4>(n_row, [&](auto step, ptrdiff_t r) __attribute__((always_inline)) {
            constexpr int rows = decltype(step)::value;
            T *sum = (T *)sum_ + r * stride;
            const T *weight = (const T *)weight_ + r * MHA_KEY_SPLIT + j;
            in_steps<accumulators / (rows < 2 ? 2 : rows)>(
                n_full, [&](auto vectors, ptrdiff_t x) __attribute__((always_inline)) {
                add_values<T, S, rows, decltype(vectors)::value>(
                    sum + x * lanes<T>, stride, weight, block + x * vector_bytes, value_stride, n, r == 0 ? ahead : 0,
                    [](const S *p) __attribute__((always_inline)) { return load_stored<T>(p); });
            });
            if (rest)
                add_values<T, S, rows, 1>(sum + n_full * lanes<T>, stride, weight, block + n_full * vector_bytes,
                                          value_stride, n, r == 0 ? ahead : 0,
                                          [=](const S *p)
                                              __attribute__((always_inline)) { return load_stored_first<T>(p, rest); });
        });
    }
}

// Adds in the same order as decode_values, so that an excluded value leaves no trace in the last bit either.
template <class T, class S>
void decode_values_guarded(void *sum_, const void *weight_, const void *visible_, ptrdiff_t n_row, const char *value,
                           ptrdiff_t value_stride, ptrdiff_t n_key, ptrdiff_t width) {
    memset(sum_, 0, n_row * padded<T>(width) * sizeof(T));
    for (ptrdiff_t r = 0; r < n_row; r++) {
        const T *weight = (const T *)weight_ + r * MHA_KEY_SPLIT, *visible = (const T *)visible_ + r * MHA_KEY_SPLIT;
        for (ptrdiff_t d = 0; d < width; d += lanes<T>) {
            vec<T> sum = {}, part = {};
            for (ptrdiff_t j = 0; j < n_key; j++) {
                const S *v = row_at<S>(value, value_stride, j) + d;
                if (visible[j] != -infinity<T>)
                    part += weight[j] * (width - d < lanes<T> ? load_stored_first<T>(v, width - d) : load_stored<T>(v));
                if (j % keys_together == keys_together - 1 || j == n_key - 1) {
                    sum += part;
                    part = vec<T>{};
                }
            }
            store((T *)sum_ + r * padded<T>(width) + d, sum);
        }
    }
}

// Partial results that are added up from zero before they join the sum: fewer roundings than one long sum.
constexpr ptrdiff_t partials_together = 16;

template <class T, class S>
int decode_combine(char *out, const void *sum, const void *maximum, const void *total, ptrdiff_t partial_stride,
                   ptrdiff_t n_partial, ptrdiff_t width, double exp_scale, void *work, const mha_finish *how) {
    T *factor = (T *)work;
    auto partial = [=](const void *first, ptrdiff_t i) { return row_at<T>((const char *)first, partial_stride, i); };
    constexpr T least_normal = sizeof(T) == 4 ? T(__FLT_MIN__) : T(__DBL_MIN__);
    double highest = minus_infinity, sum_total = 0;
    for (ptrdiff_t i = 0; i < n_partial; i++) highest = *partial(maximum, i) > highest ? *partial(maximum, i) : highest;
    const double base = base_of(highest);
    for (ptrdiff_t i = 0; i < n_partial; i++) {
        factor[i] = T(weight_of(double(*partial(maximum, i)), base, exp_scale));
        if (factor[i] < least_normal) factor[i] = 0;  // as in exp2_nonpositive
        sum_total += double(factor[i]) * *partial(total, i);
    }
    const T last_factor = finish_row<T>(highest, sum_total, 0, how);
    // Where no key has weight the output is 0, even if 0 * NaN got into the sums.
    const bool nothing = sum_total == 0 || switched_off(0, how);
    S *result = (S *)out;
    vec<T> all_zero = {};
    for (ptrdiff_t d = 0; d < width; d += lanes<T>) {
        vec<T> joined = {};
        for (ptrdiff_t first = 0; first < n_partial; first += partials_together) {
            vec<T> part = {};
            const ptrdiff_t end = first + partials_together < n_partial ? first + partials_together : n_partial;
            for (ptrdiff_t i = first; i < end; i++) part += load(partial(sum, i) + d) * factor[i];
            joined += part;
        }
        if (!nothing) all_zero += joined * T(0);
        joined = nothing ? vec<T>{} : joined * last_factor;
        if (d + lanes<T> <= width) store_stored<T>(result + d, joined);
        else store_stored_first<T>(result + d, joined, width - d);
    }
    return lane_sum<T>(all_zero) == T(0);
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
