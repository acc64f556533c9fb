from contract.backward cimport mha_backward_kernels
from contract.decode cimport mha_decode_kernels
from contract.dropout cimport mha_dropout_kernels
from contract.matrix cimport mha_matrix_kernels
from contract.problem cimport mha_storage
from contract.statistics cimport mha_statistics_kernels
from contract.tiles cimport mha_mask_kernels, mha_tile_kernels

cdef extern from "contract/instruction_set.h" nogil:
    ctypedef struct mha_kernels:
        ptrdiff_t stored_size, item_size, tile_rows, lanes
        void (*widen)(void *, ptrdiff_t, const char *, ptrdiff_t, ptrdiff_t, ptrdiff_t) noexcept nogil
        mha_mask_kernels mask
        mha_tile_kernels tile
        mha_decode_kernels decode
        mha_dropout_kernels dropout
        mha_backward_kernels backward
        mha_statistics_kernels statistics

    ctypedef struct mha_element_matrix_kernels:
        pass

    ctypedef struct mha_isa:
        const char *name
        const mha_element_matrix_kernels *matrix
        double (*multiply_add_rounds)(ptrdiff_t) noexcept nogil
        double (*matrix_rounds)(ptrdiff_t) noexcept nogil

    const mha_isa *const mha_built[]
    const int mha_n_built
    int mha_runnable(const mha_isa *)
    const int mha_emulates_matrix_unit
    bint mha_tiles_granted()
    const mha_kernels *mha_kernels_for(const mha_isa *, mha_storage)
    const mha_matrix_kernels *mha_matrix_for(const mha_isa *, mha_storage, bint)
