# Stopping in the middle of a call: the calling thread lets Python look for signals now and then.
from libc.stdint cimport int64_t

from threads cimport mha_clock, mha_is_main_thread, mha_is_raised, mha_raise_flag

cdef extern from "Python.h":
    int PyErr_CheckSignals()  # without `except`: the error waits until the threads have met

cdef enum:
    # Products of a row and a key after which the calling thread looks at the clock: 10 to 100 microseconds.
    UNWATCHED_WORK = 100_000
    SIGNAL_INTERVAL = 50_000_000  # nanoseconds

cdef struct watch:
    bint can_answer                  # the calling thread is the one that Python tells of signals
    int64_t next_look
    ptrdiff_t work                   # since the clock was read
    int stopped                      # a signal's handler raised; nobody begins another task or block


cdef inline void begin_watch(watch *look, double seconds) noexcept nogil:
    """Signals are answered in calls of a millisecond or more: to know who calls costs as much as a tiny call."""
    look.can_answer = seconds > 1e-3 and mha_is_main_thread()
    look.next_look = mha_clock() + SIGNAL_INTERVAL if look.can_answer else 0
    look.work = look.stopped = 0


cdef inline void answer_signals(watch *look) noexcept nogil:
    """Run Python's handlers of signals that have come; they may do anything, call us too."""
    cdef int raised
    if mha_clock() < look.next_look:
        return
    with gil:
        raised = PyErr_CheckSignals()
    if raised:
        mha_raise_flag(&look.stopped)
    look.next_look = mha_clock() + SIGNAL_INTERVAL


cdef inline bint may_go_on(watch *look, int thread, ptrdiff_t work) noexcept nogil:
    """Whether a thread (0: the calling one) may begin a task or a block of so much work; without a watch it may."""
    if look == NULL:
        return True
    if thread == 0 and look.can_answer:
        look.work += work
        if look.work > UNWATCHED_WORK:
            look.work = 0
            answer_signals(look)
    return not mha_is_raised(&look.stopped)
