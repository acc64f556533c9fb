#include "memory.h"

#include <stdint.h>
#include <stdlib.h>

enum { ALIGNMENT = 64 };
static const size_t MOST_KEPT = (size_t)64 << 20;

/* What is kept, if anything; its size stands in its first bytes, which belong to nobody meanwhile. */
static void *kept;

static void *allocate(size_t size) {
#if defined(_WIN32)
    return _aligned_malloc(size, ALIGNMENT);
#else
    return aligned_alloc(ALIGNMENT, size);
#endif
}

static void release(void *memory) {
#if defined(_WIN32)
    _aligned_free(memory);
#else
    free(memory);
#endif
}

static size_t size_of(const void *memory) { return memory == NULL ? 0 : *(const size_t *)memory; }

void *mha_take_memory(size_t *size) {
    void *memory = __atomic_exchange_n(&kept, NULL, __ATOMIC_ACQ_REL);

    if (size_of(memory) >= *size && memory != NULL) {
        *size = size_of(memory);
        return memory;
    }
    if (memory != NULL) mha_give_back_memory(memory, size_of(memory)); /* too small for this call */
    if (*size > SIZE_MAX - ALIGNMENT) return NULL;
    *size = (*size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (*size == 0) *size = ALIGNMENT;
    return allocate(*size);
}

void mha_give_back_memory(void *memory, size_t size) {
    void *other, *empty = NULL;

    if (size > MOST_KEPT) {
        release(memory);
        return;
    }
    *(size_t *)memory = size;
    other = __atomic_exchange_n(&kept, NULL, __ATOMIC_ACQ_REL);
    if (size_of(other) > size) {
        void *larger = other;
        other = memory;
        memory = larger;
    }
    release(other);
    /* Another thread may have been here in between: there is room for one. */
    if (!__atomic_compare_exchange_n(&kept, &empty, memory, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) release(memory);
}
