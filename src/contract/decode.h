/* Few rows, as in decoding with a cache: a vector lane is a feature (and, for the softmax, a key).  Every K and V row is
 * read once for all rows, which is what decoding is bound by.
 * Packed layouts: query, sum [row][width padded to whole vectors]; score [row][MHA_KEY_SPLIT]. */
#pragma once

#include "tiles.h"

enum {
    /* Up to here a key/value head takes this path.  With 8 rows tiles take 1.4 to 2.8 times as long on AVX-512 and 1.1
     * times on AVX2; at width 64 tiles are ahead from 16 and from 12 rows on (8 heads, 1024 keys, 1 thread). */
    MHA_MAX_DECODE_ROWS = 8,
    MHA_KEY_SPLIT = 512 /* keys per task; fixed, so that results do not depend on threads */
};

/* Key and value rows are read as S. */
typedef struct {
    void (*pack_query)(void *query, const char *const *row, ptrdiff_t n_row, ptrdiff_t width, double scale);
    void (*scores)(void *score, const void *query, ptrdiff_t n_row, const char *key, ptrdiff_t key_stride,
                   ptrdiff_t n_key, ptrdiff_t width);
    /* One row of scores; slope, distance, first, last, bias of `how` are those of this row. */
    void (*adjust)(void *score, ptrdiff_t n_key, const mha_adjust *how);
    void (*softmax)(void *score, void *maximum, void *total, ptrdiff_t n_row, ptrdiff_t n_key, double exp_scale);
    void (*values)(void *sum, const void *weight, ptrdiff_t n_row, const char *value, ptrdiff_t value_stride,
                   ptrdiff_t n_key, ptrdiff_t width);
    void (*values_guarded)(void *sum, const void *weight, const void *visible, ptrdiff_t n_row, const char *value,
                           ptrdiff_t value_stride, ptrdiff_t n_key, ptrdiff_t width);
    /* Joins the partial results of one row in index order.  sum, maximum and total of partial result i lie at
     * i * partial_stride bytes from the given ones.  Returns whether their sum is finite. */
    int (*combine)(char *out, const void *sum, const void *maximum, const void *total, ptrdiff_t partial_stride,
                   ptrdiff_t n_partial, ptrdiff_t width, double exp_scale, void *work, const mha_finish *how);
    int (*all_finite)(const char *value, ptrdiff_t value_stride, ptrdiff_t n_key, ptrdiff_t width);
} mha_decode_kernels;
