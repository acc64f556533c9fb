/* Dropout: which weights are kept, by a generator that turns their places into random numbers. */
#pragma once

#include "tiles.h"

/* Weight (head, query, key) is kept where word key % 4 of Philox 4x32-10 at (key / 4, query, head, 0) is at least the
 * threshold of mha_dropped.  Heads count on through the batch entries. */
typedef struct {
    mha_dropped rule;
    uint32_t query[MHA_MAX_ROWS], head[MHA_MAX_ROWS]; /* of each row */
} mha_dropout;

typedef struct {
    /* The factor of each weight of a tile [key][row]: 0, or that of the rule. */
    void (*keep_tile)(void *keep, ptrdiff_t n_row, ptrdiff_t first_key, ptrdiff_t n_key, const mha_dropout *how);
    /* The same multiplied into the weights of a tile; and into those of one row. */
    void (*drop_tile)(void *weight, ptrdiff_t n_row, ptrdiff_t first_key, ptrdiff_t n_key, const mha_dropout *how);
    void (*drop_row)(void *weight, ptrdiff_t row, ptrdiff_t first_key, ptrdiff_t n_key, const mha_dropout *how);
} mha_dropout_kernels;
