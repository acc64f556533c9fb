/* The contract between the fused loop (_core.pyx) and the hardware (kernels/).
 *
 * One call of attention() is described by one mha_problem.  The loop cuts it into tasks and each task into
 * key blocks, and calls the tile functions of one mha_kernels table for everything that touches numbers.
 * There is one table per instruction set and element type; dispatch.c picks the instruction set.
 *
 * Two shapes of work:
 *
 *   tiles of rows    A vector lane is a query row.  Scores are kept transposed, [key][row]: the maximum and the sum
 *                    over keys are vertical, a mask is a lane compare, K and V are read where they lie.
 *   few rows         A vector lane is a feature (and, for the softmax, a key).  Every K and V row is read once for
 *                    all rows, which is what decoding with a cache is bound by.
 *
 * "Row" means a (query, query head) pair of one key/value head, query major: row = query * group + head_in_group.
 *
 * Scores come in one of two units.  Without softcap, ALiBi or a float mask they stay raw dot products and the
 * scale is folded into the exponential.  With one of those they are natural logits.  Either way the weights are
 * 2**((score - maximum) * exp_scale).
 */
#ifndef MHA_KERNELS_H
#define MHA_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MHA_KEY_BLOCK = 64, /* keys per block of a row tile (bench.compare: 32 is 2% slower, 128 7% on short_batch) */
    MHA_MAX_ROWS = 64,  /* no table has a sub-tile with more rows than this */
    /* Up to here a key/value head takes the few-rows path.  With 8 rows tiles take 1.4 to 2.8 times as long on AVX-512
     * and 1.1 times on AVX2; at width 64 tiles are ahead from 16 and from 12 rows on (8 heads, 1024 keys, 1 thread). */
    MHA_MAX_DECODE_ROWS = 8,
    MHA_KEY_SPLIT = 512 /* keys per task of the few-rows path; fixed, so that results do not depend on threads */
};

/* Element types of query, key, value and output. */
typedef enum { MHA_ELEMENT_FLOAT32, MHA_ELEMENT_FLOAT64, MHA_ELEMENT_FLOAT16, MHA_ELEMENT_BFLOAT16 } mha_element;

/* Element types that a mask can have. */
typedef enum { MHA_NO_MASK, MHA_BOOL, MHA_FLOAT16, MHA_BFLOAT16, MHA_FLOAT32, MHA_FLOAT64 } mha_mask_type;

/* What a piece of a mask holds; a combination of these bits.  Large: numbers but -inf that make no finite sum with every
 * finite score. */
enum { MHA_MASK_VISIBLE = 1, MHA_MASK_EXCLUDED = 2, MHA_MASK_LARGE = 4 };

/* A view of one operand: heads and rows by byte strides; its batch entries by offsets in the problem. */
typedef struct {
    char *data;
    ptrdiff_t head_stride, row_stride;
} mha_operand;

/* What goes into the output: weights times values; the weights, (n_query, n_key); or a row of measurements per query:
 * mha_measured, then the mass at each offset, then that of each key set, all float64. */
typedef enum { MHA_ATTENTION, MHA_WEIGHTS, MHA_STATISTICS } mha_mode;
enum { MHA_ENTROPY, MHA_CONFIDENCE, MHA_DISTANCE, MHA_TOP_KEY, MHA_MAXIMUM, MHA_FACTOR, MHA_N_MEASURED };

enum { MHA_QUERY, MHA_KEY, MHA_VALUE, MHA_OUT, MHA_MASK, MHA_LSE, MHA_N_OPERAND };

typedef struct {
    ptrdiff_t n_batch, n_head, n_kv_head, group_size, n_query, n_key, head_width, value_width;

    mha_operand operand[MHA_N_OPERAND];           /* data NULL: absent */
    const ptrdiff_t *batch_offset[MHA_N_OPERAND]; /* byte offset of each batch entry */
    ptrdiff_t mask_key_stride;
    mha_mask_type mask_type;
    mha_mode mode;
    ptrdiff_t share; /* query heads that read one key/value head, where each is a pair of its own */

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

    /* statistics only */
    ptrdiff_t n_offset, n_set;
    const int64_t *offset;
    const uint8_t *key_set; /* (n_batch, n_set, n_key): 1 for members */
    const uint8_t *ignored; /* (n_batch, n_key), or NULL */
    double *received;       /* (n_batch, n_head, n_key), or NULL */
} mha_problem;

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

/* What the statistics of some rows have come to.  With w = 2**((score - maximum) * exp_scale):
 * total = sum of w, moment = sum of w * log2(w), far = sum of w * |position - key|, set[i] = sum of w over set i. */
typedef struct {
    void *maximum, *total, *moment, *far, *set, *best, *confident;
    int64_t *best_key;
    ptrdiff_t n_set;
} mha_moments;

/* The key block that they are to take in. */
typedef struct {
    ptrdiff_t first, n_key;
    const void *distance;   /* position of each row minus the first key */
    const uint8_t *ignored; /* keys that `confident` leaves out, or NULL */
    const uint8_t *key_set; /* members of set i at i * set_stride */
    ptrdiff_t set_stride;
    double exp_scale;
} mha_measured_block;

/* How the finished sum of a row becomes its output and log-sum-exp. */
typedef struct {
    double lse_scale;
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

/* The tile functions of one instruction set and element type.  Elements lie in memory as S; packed buffers and all
 * arithmetic are of type T: float for the 16-bit types, otherwise S itself.  Strides are in bytes unless they count
 * rows of a packed buffer.  No function allocates, fails or keeps state; buffers are aligned to 64 bytes.
 * Packed layouts: query [width][tile_rows], score [key][tile_rows], sum [width][tile_rows]. */
typedef struct {
    ptrdiff_t stored_size; /* sizeof(S) */
    ptrdiff_t item_size;   /* sizeof(T) */
    ptrdiff_t tile_rows;   /* rows of a sub-tile */
    ptrdiff_t lanes;       /* elements of a vector; few-rows buffers are padded to a multiple */

    /* ---- tiles of rows; key and value rows are of type T, in place or widened ---- */
    /* Rows of S as rows of T, row_bytes apart; NULL where S is T. */
    void (*widen)(void *block, ptrdiff_t row_bytes, const char *data, ptrdiff_t stride, ptrdiff_t n_row,
                  ptrdiff_t width);
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
    void (*finish)(char *const *out, void *sum, const void *maximum, const void *total, ptrdiff_t n_row,
                   ptrdiff_t width, const mha_finish *how);
    /* Weights of a block of scores, given the final maximum and total: out[row][key], contiguous keys. */
    void (*store_weights)(char *const *out, const void *score, const void *maximum, const void *factor, ptrdiff_t n_row,
                          ptrdiff_t n_key, double exp_scale);
    /* The factor of each row that finish() would multiply by; writes the log-sum-exp. */
    void (*finish_factors)(void *factor, const void *maximum, const void *total, ptrdiff_t n_row,
                           const mha_finish *how);
    /* Statistics of a block of scores; the scores become weights relative to the new maximum. */
    void (*measure)(mha_moments *so_far, void *score, const void *block_maximum, ptrdiff_t n_row,
                    const mha_measured_block *block);
    /* A row of measurements; see mha_mode.  offset_score: the row's scores at the offsets, -inf where excluded. */
    void (*finish_measure)(double *out, const mha_moments *sums, ptrdiff_t row, double exp_scale, const mha_finish *how,
                           const double *offset_score, ptrdiff_t n_offset);
    /* received[key] += weights of n_row rows, given their maximum and factor. */
    void (*add_received)(double *received, const void *score, const void *maximum, const void *factor, ptrdiff_t n_row,
                         ptrdiff_t n_key, double exp_scale);
    int (*tile_finite)(const char *value, ptrdiff_t value_stride, ptrdiff_t n_key, ptrdiff_t width);
    /* Mask of a block of at most MHA_KEY_BLOCK keys as [key][row] numbers; returns what it holds.  A bool mask is
     * written only where it holds both.  work: lanes * MHA_KEY_BLOCK elements. */
    int (*mask_tile)(void *bias, void *work, const char *const *row, ptrdiff_t n_row, ptrdiff_t key_stride,
                     ptrdiff_t n_key, mha_mask_type type);

    /* ---- few rows; key and value rows are read as S ---- query, sum: [row][width padded]; score: [row][MHA_KEY_SPLIT] */
    void (*decode_pack_query)(void *query, const char *const *row, ptrdiff_t n_row, ptrdiff_t width, double scale);
    void (*decode_scores)(void *score, const void *query, ptrdiff_t n_row, const char *key, ptrdiff_t key_stride,
                          ptrdiff_t n_key, ptrdiff_t width);
    /* One row of scores; slope, distance, first, last, bias of `how` are those of this row. */
    void (*decode_adjust)(void *score, ptrdiff_t n_key, const mha_adjust *how);
    void (*decode_softmax)(void *score, void *maximum, void *total, ptrdiff_t n_row, ptrdiff_t n_key, double exp_scale);
    void (*decode_values)(void *sum, const void *weight, ptrdiff_t n_row, const char *value, ptrdiff_t value_stride,
                          ptrdiff_t n_key, ptrdiff_t width);
    void (*decode_values_guarded)(void *sum, const void *weight, const void *visible, ptrdiff_t n_row,
                                  const char *value, ptrdiff_t value_stride, ptrdiff_t n_key, ptrdiff_t width);
    /* Joins the partial results of one row in index order.  sum, maximum and total of partial result i lie at
     * i * partial_stride bytes from the given ones. */
    void (*decode_combine)(char *out, const void *sum, const void *maximum, const void *total, ptrdiff_t partial_stride,
                           ptrdiff_t n_partial, ptrdiff_t width, double exp_scale, void *work, const mha_finish *how);

    int (*decode_finite)(const char *value, ptrdiff_t value_stride, ptrdiff_t n_key, ptrdiff_t width);

    /* ---- both ---- */
    /* One mask row as numbers; returns what it holds. */
    int (*mask_row)(void *bias, const char *row, ptrdiff_t key_stride, ptrdiff_t n_key, mha_mask_type type);
} mha_kernels;

/* ---- tiles of rows on a matrix unit ----
 *
 * Products of bfloat16 terms of numbers.  The unit works beside the vector units, so one function advances a pipeline:
 * it multiplies for two blocks of scores and does the softmax of a third. */

enum {
    MHA_MATRIX_ROWS = 32,       /* rows of a sub-tile */
    MHA_MATRIX_PANEL = 32,      /* keys are packed, and multiplied, in panels of this many */
    MHA_MATRIX_CHUNK = 32,      /* features likewise */
    MHA_MATRIX_MAX_PANELS = 16, /* in a block */
    MHA_MATRIX_PIECE = 256,     /* keys of a stage with float32 scores, at most */
    /* Groups of float32 scores that wait to be shortened: one in the unit, one being stored, one being shortened. */
    MHA_MATRIX_PASSING = 3
};

/* What packing reports. */
typedef struct {
    int has_outliers; /* something that the unit cannot take: Inf, NaN, or too large a number */
    /* Largest square of a row's norm in each group of keys, or of the queries: for short_scores. */
    float square_norm[MHA_MATRIX_MAX_PANELS];
} mha_packed;

/* One sub-tile against one key block: score, weight and sum are [key or feature][MHA_MATRIX_ROWS]. */
typedef struct {
    const char *query, *key, *value; /* packed; key and value from the first group on */
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
    float *unused;  /* room for a group of scores that nobody reads */
    float *passing; /* room for MHA_MATRIX_PASSING groups of scores */
    ptrdiff_t query_chunks, value_chunks;
    double exp_scale;
} mha_pipeline;

typedef struct {
    ptrdiff_t n_term;      /* terms of a number; packed it takes 2 * n_term bytes */
    ptrdiff_t block_keys;  /* keys per block, and so of a stage with short scores at most */
    double most_short;     /* scores times exp_scale below this may be short; 0: none */
    ptrdiff_t min_rows;    /* with fewer rows per key/value head the tiles of mha_kernels are faster */
    void (*acquire)(void); /* the unit, on every thread, before and after */
    void (*release)(void);
    /* Each packs whole groups and chunks, zeros beyond the end and in place of what is left out. */
    mha_packed (*pack_queries)(void *packed, const char *const *row, ptrdiff_t n_row, ptrdiff_t width, double scale);
    mha_packed (*pack_keys)(void *packed, const char *key, ptrdiff_t stride, ptrdiff_t n_key, ptrdiff_t width);
    mha_packed (*pack_values)(void *packed, const char *value, ptrdiff_t stride, ptrdiff_t n_key, ptrdiff_t width);
    void (*step)(mha_pipeline *pipe);
    /* Computes the scores of the queries and keys that were left out. */
    void (*repair_scores)(float *score, const char *const *query, ptrdiff_t n_row, double scale, const char *key,
                          ptrdiff_t stride, ptrdiff_t n_key, ptrdiff_t width);
    /* Adds the elements of values that were left out; visible as in values_guarded. */
    void (*add_outliers)(float *sum, const void *weight, const float *visible, const char *value, ptrdiff_t stride,
                         ptrdiff_t n_key, ptrdiff_t width);
    /* As in mha_kernels, for MHA_MATRIX_ROWS rows. */
    void (*begin)(void *sum, void *maximum, void *total, ptrdiff_t n_row, ptrdiff_t width);
    void (*adjust)(void *score, void *block_maximum, ptrdiff_t n_row, ptrdiff_t n_key, const mha_adjust *how);
    int (*mask_tile)(void *bias, void *work, const char *const *row, ptrdiff_t n_row, ptrdiff_t key_stride,
                     ptrdiff_t n_key, mha_mask_type type);
    void (*finish)(char *const *out, void *sum, const void *maximum, const void *total, ptrdiff_t n_row,
                   ptrdiff_t width, const mha_finish *how);
} mha_matrix;

/* One instruction set. */
typedef struct {
    const char *name;
    const mha_kernels *element;      /* by mha_element */
    const mha_matrix *const *matrix; /* by mha_element, then the same for precision "high"; NULL: no matrix unit */
    /* Runs n rounds of independent multiply-adds and returns the operations done: the peak that speed is held against. */
    double (*multiply_add_rounds)(ptrdiff_t n);
    double (*matrix_rounds)(ptrdiff_t n); /* the same for the matrix unit; NULL: none */
} mha_isa;

/* dispatch.c: instruction sets of this build, slowest first. */
extern const mha_isa *const mha_built[];
extern const int mha_n_built;
int mha_runnable(const mha_isa *isa);
extern const int mha_emulates_matrix_unit; /* "amx" is software here, see kernels/emulated_unit.h */

/* Whether the operating system lets this process use the tile registers of the matrix unit.  Linux keeps their 8 KB for
 * processes that have asked (Documentation/arch/x86/xstate.rst), and from then on demands signal stacks that can hold
 * them; where one is too small already, it refuses.  So this is asked when a call is about to use them, not before. */
int mha_tiles_granted(void);

#ifdef __cplusplus
}
#endif
#endif
