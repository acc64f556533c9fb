"""The memory of calls; see memory.h."""

cdef extern from "memory.h" nogil:
    void *mha_take_memory(size_t *size)
    void mha_give_back_memory(void *memory, size_t size)
