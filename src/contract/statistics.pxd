from libc.stdint cimport int64_t, uint8_t

from contract.tiles cimport mha_finish

cdef extern from "contract/statistics.h" nogil:
    enum:
        MHA_MAXIMUM
        MHA_FACTOR
        MHA_N_MEASURED

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

    ctypedef struct mha_statistics_kernels:
        void (*measure)(mha_moments *, void *, const void *, ptrdiff_t, const mha_measured_block *) noexcept nogil
        void (*finish)(double *, const mha_moments *, ptrdiff_t, double, const mha_finish *, const double *,
                       ptrdiff_t) noexcept nogil
        void (*add_received)(double *, const void *, const void *, const void *, ptrdiff_t, ptrdiff_t,
                             double) noexcept nogil
