/* One call, as the loop sees it: operands, sizes, options.
 *
 * "Row" means a (query, query head) pair.  The query heads that read one key/value head are packed into common rows,
 * query major: row = query * packed_heads + head_in_pack.  Such a pack is a row head, and a (batch entry, row head) pair
 * has one number: batch_head = batch * n_row_head + row_head.  Where a row must not share its vector with other heads
 * (statistics), packed_heads is 1.
 *
 * Scores come in one of two units.  Without softcap, ALiBi or a float mask they stay raw dot products and the scale is
 * folded into the exponential.  With one of those they are natural logits.  Either way the weights are
 * 2**((score - maximum) * exp_scale). */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* How an element lies in memory. */
typedef enum { MHA_ABSENT, MHA_BOOL, MHA_FLOAT16, MHA_BFLOAT16, MHA_FLOAT32, MHA_FLOAT64 } mha_storage;

enum {
    MHA_QUERY,
    MHA_KEY,
    MHA_VALUE,
    MHA_OUT,
    MHA_MASK,
    MHA_LSE,
    /* Of the backward pass.  Delta and the sums are a number per row, like lse; the gradients are added to, and of the
     * arithmetic type, as those numbers are. */
    MHA_GRAD_OUT,
    MHA_GRAD_LSE,
    MHA_DELTA,
    MHA_GRAD_QUERY,
    MHA_GRAD_KEY,
    MHA_GRAD_VALUE,
    MHA_SLOPE_SUM,
    MHA_GATE_SUM,
    MHA_N_OPERAND
};

/* Where an operand lies, by byte strides.  A stride of 0 repeats; an element along the last axis is next to the one
 * before, but for the mask, which has a column stride. */
typedef struct {
    char *data;
    mha_storage storage; /* MHA_ABSENT: there is none */
    ptrdiff_t head_stride, row_stride, column_stride;
    const ptrdiff_t *batch_offset; /* of each batch entry */
} mha_operand;

/* Window bound that leaves every key visible. */
#define MHA_UNBOUNDED ((int64_t)1 << 61)

/* What statistics ask for beside those that are always taken. */
typedef struct {
    ptrdiff_t n_offset, n_set;
    const int64_t *offset;
    const uint8_t *key_set; /* (n_batch, n_set, n_key): 1 for members */
    const uint8_t *ignored; /* (n_batch, n_key), or NULL */
    double *received;       /* (n_batch, n_head, n_key), or NULL */
} mha_asked;

/* Which weights dropout drops (see dropout.h), and the factor of the others. */
typedef struct {
    uint32_t key[2], threshold;
    double factor; /* 0: no dropout */
} mha_dropped;

typedef struct {
    ptrdiff_t n_batch, n_head, n_kv_head, group_size, n_query, n_key, head_width, value_width;
    ptrdiff_t packed_heads, n_row_head; /* n_row_head * packed_heads = n_head */

    mha_operand operand[MHA_N_OPERAND];

    const int64_t *query_length;       /* n_batch numbers of queries, or NULL: all n_query */
    const int64_t *key_length;         /* n_batch valid lengths, or NULL: all n_key */
    const int64_t *query_index;        /* which query is row i of the output, n_query of them, or NULL: i */
    const int64_t *query_offset;       /* n_batch positions of query 0, or NULL: 0 */
    int64_t window_left, window_right; /* query at p sees keys p - left ... p + right */

    double query_scale;        /* applied to the query when it is packed: a sign, or 0 */
    double score_scale;        /* raw dot product -> natural logit */
    double exp_scale;          /* unit of the kept scores -> exponent of 2 */
    double lse_scale;          /* unit of the kept scores -> natural logit */
    int natural;               /* scores are kept as natural logits */
    double softcap;            /* 0: none */
    const double *alibi_slope; /* n_batch * n_head, or NULL */
    const double *sink;        /* n_head, or NULL */
    const double *gate;        /* n_batch * n_head, or NULL */
    mha_dropped dropped;
    double grad_scale; /* backward pass: of the gradient of a dot product, by that of its logit */
    mha_asked asked;
} mha_problem;
