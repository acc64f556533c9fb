/* How many threads a call may use, and how long it may keep them waiting. */
#ifndef MHA_THREADS_H
#define MHA_THREADS_H

#include <stdint.h>

/* Once, at import. */
void mha_threads_begin(void);

int mha_has_openmp(void);

/* Whether this process came out of a fork() since the import: it works on one thread. */
int mha_is_forked(void);

/* A bound on the default (a quota of CPU time); 0: none. */
void mha_limit_default_threads(int most);

/* What a call uses where nobody asked for a number; at least 1. */
int mha_threads_default(void);

/* How many of the wanted threads (0: the default) are worth it for a call that takes one so many seconds. */
int mha_threads_for(int wanted, double seconds);

/* How many of these the system lets the calling thread have; to be asked before each team. */
int mha_threads_startable(int wanted);

/* To be told after each team of n_thread that this thread has called together: by how many nanoseconds the last of
 * them came late. */
void mha_team_met(int n_thread, int64_t late);

/* Nanoseconds on a clock that never goes back. */
int64_t mha_clock(void);

/* Whether this is the thread that answers signals, as far as one can tell. */
int mha_is_main_thread(void);

/* A flag that one thread raises and others read. */
static inline void mha_raise_flag(int *flag) { __atomic_store_n(flag, 1, __ATOMIC_RELAXED); }
static inline int mha_is_raised(const int *flag) { return __atomic_load_n(flag, __ATOMIC_RELAXED); }

/* A pointer that one thread exchanges while others follow it. */
static inline const void *mha_load_pointer(const void *const *place) {
    return __atomic_load_n(place, __ATOMIC_ACQUIRE);
}
static inline void mha_store_pointer(const void **place, const void *pointer) {
    __atomic_store_n(place, pointer, __ATOMIC_RELEASE);
}

#endif
