# Cython's view of kernels.h, where every name is explained.
from libc.stdint cimport int64_t, uint8_t

cdef extern from "kernels.h" nogil:
    enum:
        MHA_KEY_BLOCK
        MHA_MAX_ROWS
        MHA_MAX_DECODE_ROWS
        MHA_KEY_SPLIT
        MHA_MASK_VISIBLE
        MHA_MASK_EXCLUDED
        MHA_MASK_LARGE
        MHA_QUERY
        MHA_KEY
        MHA_VALUE
        MHA_OUT
        MHA_MASK
        MHA_LSE
        MHA_N_OPERAND
        MHA_MAXIMUM
        MHA_FACTOR
        MHA_N_MEASURED

    ctypedef enum mha_mask_type:
        MHA_NO_MASK
        MHA_BOOL
        MHA_FLOAT32
        MHA_FLOAT64

    ctypedef enum mha_mode:
        MHA_ATTENTION
        MHA_WEIGHTS
        MHA_STATISTICS

    ctypedef struct mha_operand:
        char *data
        ptrdiff_t head_stride
        ptrdiff_t row_stride

    ctypedef struct mha_problem:
        ptrdiff_t n_batch, n_head, n_kv_head, group_size, n_query, n_key, head_width, value_width
        mha_operand operand[6]
        const ptrdiff_t *batch_offset[6]
        ptrdiff_t mask_key_stride
        mha_mask_type mask_type
        mha_mode mode
        ptrdiff_t share
        const int64_t *query_length
        const int64_t *key_length
        const int64_t *query_index
        const int64_t *query_offset
        int64_t window_left, window_right
        double query_scale, score_scale, exp_scale, lse_scale
        bint natural
        double softcap
        const double *alibi_slope
        const double *sink
        const double *gate
        ptrdiff_t n_offset, n_set
        const int64_t *offset
        const uint8_t *key_set
        const uint8_t *ignored
        double *received

    ctypedef struct mha_moments:
        void *maximum
        void *total
        void *moment
        void *far
        void *set
        void *best
        void *confident
        int64_t *best_key
        ptrdiff_t n_set

    ctypedef struct mha_measured_block:
        ptrdiff_t first, n_key
        const void *distance
        const uint8_t *ignored
        const uint8_t *key_set
        ptrdiff_t set_stride
        double exp_scale

    ctypedef struct mha_adjust:
        double score_scale, softcap
        const void *slope
        const void *distance
        const void *bias
        ptrdiff_t bias_row_stride
        bint bias_harmless
        const void *first
        const void *last

    ctypedef struct mha_finish:
        double lse_scale
        const double *sink
        const double *gate
        char **lse

    ctypedef struct mha_prefetch:
        const char *data
        ptrdiff_t stride, n_row, width
        const mha_prefetch *then

    ctypedef struct mha_kernels:
        ptrdiff_t stored_size, item_size, tile_rows, lanes
        void (*widen)(void *, ptrdiff_t, const char *, ptrdiff_t, ptrdiff_t, ptrdiff_t) noexcept nogil
        void (*pack_query)(void *, const char *const *, ptrdiff_t, ptrdiff_t, double) noexcept nogil
        void (*begin)(void *, void *, void *, ptrdiff_t, ptrdiff_t) noexcept nogil
        void (*scores)(void *, void *, const void *, ptrdiff_t, const char *, ptrdiff_t, ptrdiff_t, ptrdiff_t,
                       const mha_prefetch *) noexcept nogil
        void (*adjust)(void *, void *, ptrdiff_t, ptrdiff_t, const mha_adjust *) noexcept nogil
        void (*softmax)(void *, const void *, void *, void *, void *, ptrdiff_t, ptrdiff_t, double) noexcept nogil
        void (*values)(void *, const void *, const void *, ptrdiff_t, const char *, ptrdiff_t, ptrdiff_t, ptrdiff_t,
                       const mha_prefetch *) noexcept nogil
        void (*values_guarded)(void *, const void *, const void *, const void *, ptrdiff_t, const char *, ptrdiff_t,
                               ptrdiff_t, ptrdiff_t) noexcept nogil
        void (*finish)(char *const *, void *, const void *, const void *, ptrdiff_t, ptrdiff_t,
                       const mha_finish *) noexcept nogil
        void (*store_weights)(char *const *, const void *, const void *, const void *, ptrdiff_t, ptrdiff_t,
                              double) noexcept nogil
        void (*finish_factors)(void *, const void *, const void *, ptrdiff_t, const mha_finish *) noexcept nogil
        void (*measure)(mha_moments *, void *, const void *, ptrdiff_t, const mha_measured_block *) noexcept nogil
        void (*finish_measure)(double *, const mha_moments *, ptrdiff_t, double, const mha_finish *, const double *,
                               ptrdiff_t) noexcept nogil
        void (*add_received)(double *, const void *, const void *, const void *, ptrdiff_t, ptrdiff_t,
                             double) noexcept nogil
        int (*tile_finite)(const char *, ptrdiff_t, ptrdiff_t, ptrdiff_t) noexcept nogil
        int (*mask_tile)(void *, void *, const char *const *, ptrdiff_t, ptrdiff_t, ptrdiff_t,
                         mha_mask_type) noexcept nogil
        void (*decode_pack_query)(void *, const char *const *, ptrdiff_t, ptrdiff_t, double) noexcept nogil
        void (*decode_scores)(void *, const void *, ptrdiff_t, const char *, ptrdiff_t, ptrdiff_t,
                           ptrdiff_t) noexcept nogil
        void (*decode_adjust)(void *, ptrdiff_t, const mha_adjust *) noexcept nogil
        void (*decode_softmax)(void *, void *, void *, ptrdiff_t, ptrdiff_t, double) noexcept nogil
        void (*decode_values)(void *, const void *, ptrdiff_t, const char *, ptrdiff_t, ptrdiff_t,
                           ptrdiff_t) noexcept nogil
        void (*decode_values_guarded)(void *, const void *, const void *, ptrdiff_t, const char *, ptrdiff_t, ptrdiff_t,
                                   ptrdiff_t) noexcept nogil
        void (*decode_combine)(char *, const void *, const void *, const void *, ptrdiff_t, ptrdiff_t, ptrdiff_t, double,
                          void *, const mha_finish *) noexcept nogil
        int (*decode_finite)(const char *, ptrdiff_t, ptrdiff_t, ptrdiff_t) noexcept nogil
        int (*mask_row)(void *, const char *, ptrdiff_t, ptrdiff_t, mha_mask_type) noexcept nogil

    enum:
        MHA_MATRIX_ROWS
        MHA_MATRIX_PANEL
        MHA_MATRIX_PIECE
        MHA_MATRIX_PASSING
        MHA_MATRIX_CHUNK

    ctypedef struct mha_packed:
        bint has_outliers
        float square_norm[16]

    ctypedef struct mha_matrix_item:
        const char *query
        const char *key
        const char *value
        ptrdiff_t n_row, n_panel
        bint adjusted, short_scores
        float *score
        char *weight
        float *sum
        float *maximum
        float *total
        float block_maximum[32]

    ctypedef struct mha_pipeline:
        mha_matrix_item *in_scores
        mha_matrix_item *in_softmax
        mha_matrix_item *in_values
        mha_matrix_item *in_sum
        float *product
        float *pending
        float *unused
        float *passing
        ptrdiff_t query_chunks, value_chunks
        double exp_scale

    ctypedef struct mha_matrix:
        ptrdiff_t n_term, block_keys
        double most_short
        ptrdiff_t min_rows
        void (*acquire)() noexcept nogil
        void (*release)() noexcept nogil
        mha_packed (*pack_queries)(void *, const char *const *, ptrdiff_t, ptrdiff_t, double) noexcept nogil
        mha_packed (*pack_keys)(void *, const char *, ptrdiff_t, ptrdiff_t, ptrdiff_t) noexcept nogil
        mha_packed (*pack_values)(void *, const char *, ptrdiff_t, ptrdiff_t, ptrdiff_t) noexcept nogil
        void (*step)(mha_pipeline *) noexcept nogil
        void (*repair_scores)(float *, const char *const *, ptrdiff_t, double, const char *, ptrdiff_t, ptrdiff_t,
                              ptrdiff_t) noexcept nogil
        void (*add_outliers)(float *, const void *, const float *, const char *, ptrdiff_t, ptrdiff_t,
                             ptrdiff_t) noexcept nogil
        void (*begin)(void *, void *, void *, ptrdiff_t, ptrdiff_t) noexcept nogil
        void (*adjust)(void *, void *, ptrdiff_t, ptrdiff_t, const mha_adjust *) noexcept nogil
        int (*mask_tile)(void *, void *, const char *const *, ptrdiff_t, ptrdiff_t, ptrdiff_t,
                         mha_mask_type) noexcept nogil
        void (*finish)(char *const *, void *, const void *, const void *, ptrdiff_t, ptrdiff_t,
                       const mha_finish *) noexcept nogil

    ctypedef struct mha_isa:
        const char *name
        const mha_kernels *element
        const mha_matrix *const *matrix
        double (*multiply_add_rounds)(ptrdiff_t) noexcept nogil
        double (*matrix_rounds)(ptrdiff_t) noexcept nogil

    const mha_isa *const mha_built[]
    const int mha_n_built
    int mha_runnable(const mha_isa *)
    const int mha_emulates_matrix_unit
    bint mha_tiles_granted()
