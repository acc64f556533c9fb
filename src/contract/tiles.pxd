from libc.stdint cimport uint64_t

from contract.problem cimport mha_storage

cdef extern from "contract/tiles.h" nogil:
    enum:
        MHA_KEY_BLOCK
        MHA_MAX_ROWS
        MHA_MASK_VISIBLE
        MHA_MASK_EXCLUDED
        MHA_MASK_LARGE

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
        double lse_scale, out_scale
        const double *sink
        const double *gate
        char **lse

    ctypedef struct mha_prefetch:
        const char *data
        ptrdiff_t stride, n_row, width
        const mha_prefetch *then

    ctypedef int (*mha_mask_tile)(void *, void *, const char *const *, ptrdiff_t, ptrdiff_t, ptrdiff_t,
                                  mha_storage) noexcept nogil

    ctypedef struct mha_mask_kernels:
        int (*row)(void *, const char *, ptrdiff_t, ptrdiff_t, mha_storage) noexcept nogil
        mha_mask_tile tile

    ctypedef struct mha_tile_kernels:
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
        uint64_t (*finish)(char *const *, void *, const void *, const void *, ptrdiff_t, ptrdiff_t,
                           const mha_finish *) noexcept nogil
        void (*store_weights)(char *const *, const void *, const void *, const void *, ptrdiff_t, ptrdiff_t,
                              double) noexcept nogil
        void (*finish_factors)(void *, const void *, const void *, ptrdiff_t, const mha_finish *) noexcept nogil
        void (*replace_not_finite)(char *, const char *, ptrdiff_t) noexcept nogil
        int (*all_finite)(const char *, ptrdiff_t, ptrdiff_t, ptrdiff_t) noexcept nogil
