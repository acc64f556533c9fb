"""Threads and signals; see threads.h."""
from libc.stdint cimport int64_t

cdef extern from "threads.h" nogil:
    void mha_threads_begin()
    int mha_has_openmp()
    bint mha_is_forked()
    void mha_limit_default_threads(int most)
    int mha_threads_default()
    int mha_threads_for(int wanted, double seconds)
    int mha_threads_startable(int wanted)
    void mha_team_met(int n_thread, int64_t late)
    int64_t mha_clock()
    bint mha_is_main_thread()
    void mha_raise_flag(int *flag)
    bint mha_is_raised(const int *flag)
    const void *mha_load_pointer(const void *const *place)
    void mha_store_pointer(const void **place, const void *pointer)
