/* The memory of calls.  Any number of threads may take and give back at once. */
#ifndef MHA_MEMORY_H
#define MHA_MEMORY_H

#include <stddef.h>

/* At least *size bytes, aligned to 64, and in *size how many these are; NULL if there are none. */
void *mha_take_memory(size_t *size);

/* Of this memory and what is kept already, keep the larger one for the next call.  Fresh pages cost more than what is
 * written into them: at 2048 keys they took a third of a call's time. */
void mha_give_back_memory(void *memory, size_t size);

#endif
