from libc.stdint cimport uint32_t

from contract.problem cimport mha_dropped

cdef extern from "contract/dropout.h" nogil:
    ctypedef struct mha_dropout:
        mha_dropped rule
        uint32_t query[64]
        uint32_t head[64]

    ctypedef struct mha_dropout_kernels:
        void (*keep_tile)(void *, ptrdiff_t, ptrdiff_t, ptrdiff_t, const mha_dropout *) noexcept nogil
        void (*drop_tile)(void *, ptrdiff_t, ptrdiff_t, ptrdiff_t, const mha_dropout *) noexcept nogil
        void (*drop_row)(void *, ptrdiff_t, ptrdiff_t, ptrdiff_t, const mha_dropout *) noexcept nogil
