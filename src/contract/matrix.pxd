from libc.stdint cimport uint64_t

from contract.tiles cimport mha_adjust, mha_finish, mha_mask_tile

cdef extern from "contract/matrix.h" nogil:
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

    ctypedef struct mha_matrix_kernels:
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
        mha_mask_tile mask_tile
        uint64_t (*finish)(char *const *, void *, const void *, const void *, ptrdiff_t, ptrdiff_t,
                           const mha_finish *) noexcept nogil
