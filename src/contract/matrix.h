/* Tiles of rows on a matrix unit.
 *
 * Products of bfloat16 terms of numbers.  The unit works beside the vector units, so one function advances a pipeline:
 * it multiplies for two blocks of scores and does the softmax of a third. */
#pragma once

#include "tiles.h"

enum {
    MHA_MATRIX_ROWS = 32,       /* rows of a sub-tile */
    MHA_MATRIX_PANEL = 32,      /* keys are packed, and multiplied, in panels of this many */
    MHA_MATRIX_CHUNK = 32,      /* features likewise */
    MHA_MATRIX_MAX_PANELS = 16, /* in a block */
    MHA_MATRIX_PIECE = 256,     /* keys of an item with float32 scores, at most */
    /* Panels of float32 scores that wait to be shortened: one in the unit, one being stored, one being shortened. */
    MHA_MATRIX_PASSING = 3
};

/* What packing reports. */
typedef struct {
    int has_outliers; /* numbers that the unit cannot take: Inf, NaN, or too large a number */
    /* Largest square of a row's norm in each panel of keys, or of the queries: for short_scores. */
    float square_norm[MHA_MATRIX_MAX_PANELS];
} mha_packed;

/* One sub-tile against one key block: score, weight and sum are [key or feature][MHA_MATRIX_ROWS]. */
typedef struct {
    const char *query, *key, *value; /* packed; key and value from the first panel on */
    ptrdiff_t n_row, n_panel;
    int adjusted;     /* the loop adjusts the scores, and finds their maximum */
    int short_scores; /* they are not adjusted and so small that 16 bits hold them */
    float *score;
    char *weight;
    float *sum, *maximum, *total; /* of the sub-tile so far */
    float block_maximum[MHA_MATRIX_ROWS], rescale[MHA_MATRIX_ROWS];
} mha_matrix_item;

/* The items in the pipeline; NULL where there is none. */
typedef struct {
    mha_matrix_item *in_scores;  /* its scores are computed in this step */
    mha_matrix_item *in_softmax; /* its weights */
    mha_matrix_item *in_values;  /* its product of weights and values */
    mha_matrix_item *in_sum;     /* this product is added to its sum */
    float *product;
    float *pending; /* where what the unit still holds belongs; `unused` at the beginning */
    float *unused;  /* room for a panel of scores that nobody reads */
    float *passing; /* room for MHA_MATRIX_PASSING panels of scores */
    ptrdiff_t query_chunks, value_chunks;
    double exp_scale;
} mha_pipeline;

typedef struct {
    ptrdiff_t n_term;      /* terms of a number; packed it takes 2 * n_term bytes */
    ptrdiff_t block_keys;  /* keys per block, and so of an item with short scores at most */
    double most_short;     /* scores times exp_scale below this may be short; 0: none */
    ptrdiff_t min_rows;    /* with fewer rows per key/value head row tiles are faster */
    void (*acquire)(void); /* the unit, on every thread, before and after */
    void (*release)(void);
    /* Each packs whole panels and chunks, zeros beyond the end and in place of outliers. */
    mha_packed (*pack_queries)(void *packed, const char *const *row, ptrdiff_t n_row, ptrdiff_t width, double scale);
    mha_packed (*pack_keys)(void *packed, const char *key, ptrdiff_t stride, ptrdiff_t n_key, ptrdiff_t width);
    mha_packed (*pack_values)(void *packed, const char *value, ptrdiff_t stride, ptrdiff_t n_key, ptrdiff_t width);
    void (*step)(mha_pipeline *pipe);
    /* Computes the scores of queries and keys with outliers. */
    void (*repair_scores)(float *score, const char *const *query, ptrdiff_t n_row, double scale, const char *key,
                          ptrdiff_t stride, ptrdiff_t n_key, ptrdiff_t width);
    /* Adds the outliers among the values; visible as in values_guarded. */
    void (*add_outliers)(float *sum, const void *weight, const float *visible, const char *value, ptrdiff_t stride,
                         ptrdiff_t n_key, ptrdiff_t width);
    /* As in mha_tile_kernels and mha_mask_kernels, for MHA_MATRIX_ROWS rows. */
    void (*begin)(void *sum, void *maximum, void *total, ptrdiff_t n_row, ptrdiff_t width);
    void (*adjust)(void *score, void *block_maximum, ptrdiff_t n_row, ptrdiff_t n_key, const mha_adjust *how);
    mha_mask_tile mask_tile;
    uint64_t (*finish)(char *const *out, void *sum, const void *maximum, const void *total, ptrdiff_t n_row,
                       ptrdiff_t width, const mha_finish *how);
} mha_matrix_kernels;
