from libc.stdint cimport uint8_t

from contract.tiles cimport mha_adjust

cdef extern from "contract/backward.h" nogil:
    ctypedef struct mha_backward:
        const mha_adjust *adjust
        double score_scale
        const void *lse
        const void *delta
        const void *gate
        const void *keep
        double grad_scale
        bint of_logit

    ctypedef struct mha_backward_kernels:
        void (*row_products)(char *const *, const char *const *, const char *const *, const char *const *,
                             const uint8_t *, ptrdiff_t, ptrdiff_t) noexcept nogil
        void (*copy_rows)(void *, const char *const *, ptrdiff_t, ptrdiff_t) noexcept nogil
        void (*differentiate)(void *, void *, ptrdiff_t, ptrdiff_t, const mha_backward *) noexcept nogil
        void (*add_to_keys)(void *, const void *, const void *, const void *, ptrdiff_t, ptrdiff_t,
                            ptrdiff_t) noexcept nogil
        void (*add_to_rows)(void *, const void *, const void *, const void *, ptrdiff_t, ptrdiff_t,
                            ptrdiff_t) noexcept nogil
        void (*add_rows)(char *const *, const void *, ptrdiff_t, ptrdiff_t) noexcept nogil
        void (*store_numbers)(char *, const void *, ptrdiff_t) noexcept nogil
        void (*add_over_keys)(void *, const void *, const void *, ptrdiff_t, ptrdiff_t) noexcept nogil
        void (*sum_over_rows)(void *, const void *, ptrdiff_t) noexcept nogil
        void (*add_tile)(void *, const void *, ptrdiff_t, ptrdiff_t) noexcept nogil
        void (*store_tile)(char *const *, const void *, ptrdiff_t, ptrdiff_t) noexcept nogil
