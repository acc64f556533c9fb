from contract.tiles cimport mha_adjust, mha_finish

cdef extern from "contract/decode.h" nogil:
    enum:
        MHA_MAX_DECODE_ROWS
        MHA_KEY_SPLIT

    ctypedef struct mha_decode_kernels:
        void (*pack_query)(void *, const char *const *, ptrdiff_t, ptrdiff_t, double) noexcept nogil
        void (*scores)(void *, const void *, ptrdiff_t, const char *, ptrdiff_t, ptrdiff_t, ptrdiff_t) noexcept nogil
        void (*adjust)(void *, ptrdiff_t, const mha_adjust *) noexcept nogil
        void (*softmax)(void *, void *, void *, ptrdiff_t, ptrdiff_t, double) noexcept nogil
        void (*values)(void *, const void *, ptrdiff_t, const char *, ptrdiff_t, ptrdiff_t, ptrdiff_t) noexcept nogil
        void (*values_guarded)(void *, const void *, const void *, ptrdiff_t, const char *, ptrdiff_t, ptrdiff_t,
                               ptrdiff_t) noexcept nogil
        int (*combine)(char *, const void *, const void *, const void *, ptrdiff_t, ptrdiff_t, ptrdiff_t, double,
                       void *, const mha_finish *) noexcept nogil
        int (*all_finite)(const char *, ptrdiff_t, ptrdiff_t, ptrdiff_t) noexcept nogil
