/* The backward pass.  Scores, weights and their gradients are tiles [key][row], as on the way forward.  In the products
 * that follow, a vector lane is a feature; their sums and terms are padded rows: whole vectors of elements of type T, the
 * last ones 0, one after the other. */
#pragma once

#include "tiles.h"

/* From a block of scores to weights and to the gradient of the scores. */
typedef struct {
    const mha_adjust *adjust; /* as on the way forward; NULL: nothing but the scale */
    double score_scale;       /* raw dot product -> natural logit, in place of that of `adjust` */
    const void *lse;          /* per row: log-sum-exp, natural logarithm */
    const void *delta;        /* per row: subtracted from the gradient of every weight */
    const void *gate;         /* per row: factor of the output; 0 lets nothing through, NaN neither */
    const void *keep;         /* [key][row]: factor of each weight (dropout), or NULL */
    double grad_scale;        /* of the gradient with respect to dot products */
    int of_logit;             /* with respect to the logits instead, behind the softcap */
} mha_backward;

typedef struct {
    /* delta[row] = dot(grad_out, out) - grad_lse, rows of S; grad_lse NULL: without.  Where silent, a row of out that is all
     * 0 makes the dot product 0, whatever grad_out holds. */
    void (*row_products)(char *const *delta, const char *const *grad_out, const char *const *out,
                         const char *const *grad_lse, const uint8_t *silent, ptrdiff_t n_row, ptrdiff_t width);
    /* Rows of S as padded rows. */
    void (*copy_rows)(void *block, const char *const *row, ptrdiff_t n_row, ptrdiff_t width);
    /* score: raw dot products -> weights times gate and keep.
     * grad: dot products of grad_out and values -> gradient; or NULL, where only the weights are wanted. */
    void (*differentiate)(void *score, void *grad, ptrdiff_t n_row, ptrdiff_t n_key, const mha_backward *how);
    /* sum[key][feature] += weight row[row][feature], over the rows; and sum[row][feature] += weight key[key][feature],
     * over the keys.  visible: NULL, or -inf for (key, row) pairs to leave out where rows or keys hold Inf or NaN. */
    void (*add_to_keys)(void *sum, const void *weight, const void *visible, const void *row, ptrdiff_t n_key,
                        ptrdiff_t n_row, ptrdiff_t width);
    void (*add_to_rows)(void *sum, const void *weight, const void *visible, const void *key, ptrdiff_t n_row,
                        ptrdiff_t n_key, ptrdiff_t width);
    /* Padded rows are added to rows of T elsewhere. */
    void (*add_rows)(char *const *out, const void *sum, ptrdiff_t n_row, ptrdiff_t width);
    /* n numbers of T that follow each other as S. */
    void (*store_numbers)(char *out, const void *number, ptrdiff_t n);

    /* sum[row] += the sum of a tile over its keys; distance as in mha_adjust, or NULL: each number times its distance. */
    void (*add_over_keys)(void *sum, const void *tile, const void *distance, ptrdiff_t n_row, ptrdiff_t n_key);
    /* sum[key] = the sum over all lanes. */
    void (*sum_over_rows)(void *sum, const void *tile, ptrdiff_t n_key);
    /* Adds a tile to another; what lies in lanes without a row is left out. */
    void (*add_tile)(void *sum, const void *tile, ptrdiff_t n_row, ptrdiff_t n_key);
    /* Rows of T from a tile. */
    void (*store_tile)(char *const *out, const void *tile, ptrdiff_t n_row, ptrdiff_t n_key);
} mha_backward_kernels;
