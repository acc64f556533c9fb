/* Tiles of rows: a vector lane is a query row.  Scores are kept transposed, [key][row]: the maximum and the sum over keys
 * are vertical, a mask is a lane compare, K and V are read where they lie. */
#pragma once

#include "problem.h"

enum {
    MHA_KEY_BLOCK = 64, /* keys per block of a row tile (bench.compare: 32 is 2% slower, 128 7% on short_batch) */
    MHA_MAX_ROWS = 64   /* no table has a sub-tile with more rows than this */
};

/* What a piece of a mask holds; a combination of these bits.  Large: numbers but -inf that make no finite sum with every
 * finite score. */
enum { MHA_MASK_VISIBLE = 1, MHA_MASK_EXCLUDED = 2, MHA_MASK_LARGE = 4 };

/* What happens to a block of scores between the product and the softmax, in the order of the public contract. */
typedef struct {
    double score_scale;        /* 1 while scores stay raw */
    double softcap;            /* 0: none */
    const void *slope;         /* ALiBi slope per row, or NULL */
    const void *distance;      /* position of each row minus the block's first key */
    const void *bias;          /* mask of the block as numbers to add, -inf excludes; or NULL */
    ptrdiff_t bias_row_stride; /* tiles: 1 when bias is [key][row], 0 when it is [key], the same for all rows */
    int bias_harmless;         /* no MHA_MASK_LARGE in it, which saves work; 0 where that is not known */
    const void *first, *last;  /* visible keys [first, last) per row, counted from the block; or NULL: all */
} mha_adjust;

/* How the finished sum of a row becomes its output and log-sum-exp. */
typedef struct {
    double lse_scale;
    double out_scale;   /* what the sum is to be multiplied by beside all else */
    const double *sink; /* per row, or NULL */
    const double *gate; /* per row, or NULL */
    char *const *lse;   /* where each row's log-sum-exp goes, or NULL */
} mha_finish;

/* Rows that will be wanted soon, which a tile function prefetches while it computes, and others to go with them. */
typedef struct mha_prefetch {
    const char *data;
    ptrdiff_t stride, n_row, width;
    const struct mha_prefetch *then; /* or NULL */
} mha_prefetch;

/* The mask of a block of at most MHA_KEY_BLOCK keys as numbers to add, [key][row]; returns what it holds.  A bool mask is
 * written only where it holds both.  work: lanes * MHA_KEY_BLOCK elements. */
typedef int (*mha_mask_tile)(void *bias, void *work, const char *const *row, ptrdiff_t n_row, ptrdiff_t key_stride,
                             ptrdiff_t n_key, mha_storage storage);

typedef struct {
    /* One row of a mask likewise, always written. */
    int (*row)(void *bias, const char *row, ptrdiff_t key_stride, ptrdiff_t n_key, mha_storage storage);
    mha_mask_tile tile;
} mha_mask_kernels;

/* Key and value rows are of type T, in place or widened. */
typedef struct {
    void (*pack_query)(void *query, const char *const *row, ptrdiff_t n_row, ptrdiff_t width, double scale);
    /* Sum and total to 0, maximum to -inf, for n_row rows. */
    void (*begin)(void *sum, void *maximum, void *total, ptrdiff_t n_row, ptrdiff_t width);
    /* score = K Q^T for n_key keys; block_maximum[row] = maximum over them. */
    void (*scores)(void *score, void *block_maximum, const void *query, ptrdiff_t n_row, const char *key,
                   ptrdiff_t key_stride, ptrdiff_t n_key, ptrdiff_t width, const mha_prefetch *ahead);
    void (*adjust)(void *score, void *block_maximum, ptrdiff_t n_row, ptrdiff_t n_key, const mha_adjust *how);
    /* One step of the online softmax: score becomes weights, maximum and total move on, rescale is what the sums of
     * earlier blocks must be multiplied by. */
    void (*softmax)(void *score, const void *block_maximum, void *maximum, void *total, void *rescale, ptrdiff_t n_row,
                    ptrdiff_t n_key, double exp_scale);
    /* sum = sum * rescale + V^T weights. */
    void (*values)(void *sum, const void *rescale, const void *weight, ptrdiff_t n_row, const char *value,
                   ptrdiff_t value_stride, ptrdiff_t n_key, ptrdiff_t width, const mha_prefetch *ahead);
    /* The same where excluded keys hold Inf or NaN values: visible is -inf for (key, row) pairs to leave out. */
    void (*values_guarded)(void *sum, const void *rescale, const void *weight, const void *visible, ptrdiff_t n_row,
                           const char *value, ptrdiff_t value_stride, ptrdiff_t n_key, ptrdiff_t width);
    /* Returns the rows, as bits, whose sum is not finite. */
    uint64_t (*finish)(char *const *out, void *sum, const void *maximum, const void *total, ptrdiff_t n_row,
                       ptrdiff_t width, const mha_finish *how);
    /* Weights of a block of scores, given the final maximum and factor: out[row][key], contiguous keys. */
    void (*store_weights)(char *const *out, const void *score, const void *maximum, const void *factor, ptrdiff_t n_row,
                          ptrdiff_t n_key, double exp_scale);
    /* The factor of each row that finish() would multiply by; writes the log-sum-exp. */
    void (*finish_factors)(void *factor, const void *maximum, const void *total, ptrdiff_t n_row,
                           const mha_finish *how);
    /* Elements of an output row that are not finite take their second value. */
    void (*replace_not_finite)(char *out, const char *second, ptrdiff_t width);
    /* Whether all elements of some rows are finite. */
    int (*all_finite)(const char *value, ptrdiff_t value_stride, ptrdiff_t n_key, ptrdiff_t width);
} mha_tile_kernels;
