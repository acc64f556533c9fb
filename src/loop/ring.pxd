# In which order the tasks of the backward pass come.
#
# A ring keeps the order of every sum.  Keys and rows of a row head are cut into chunks of fixed size; in phase t, key chunk
# j meets row chunk j + t (modulo the longer of both).  No two tasks of a phase touch the same chunk of either kind, so they
# may run in any order, on any thread; and phase after phase, every gradient takes in its parts in the same order.  It
# needs neither atomic additions nor a copy of the gradients for each thread.
from libc.stdint cimport int64_t
from libc.stdlib cimport qsort

from contract.instruction_set cimport mha_kernels
from contract.problem cimport (
    MHA_DELTA, MHA_GATE_SUM, MHA_GRAD_KEY, MHA_GRAD_QUERY, MHA_GRAD_VALUE, MHA_SLOPE_SUM, mha_problem,
)
from contract.tiles cimport MHA_KEY_BLOCK
from loop.backward cimport KEY_CHUNK, chunk_rows, lay_out_back, space_back
from loop.mask_gradient cimport mask_gradient
from loop.operands cimport has, keys_of, queries_of, rows_of
from loop.structs cimport ceil_divide
from loop.workspace cimport arena, take

cdef struct ring_task:
    ptrdiff_t batch_head, key_chunk  # -1: all chunks of the row head, phase after phase
    ptrdiff_t wave, period

cdef struct ring_round:
    ptrdiff_t first, last, phase     # tasks [first, last) may run in any order

cdef struct plan_back:
    mask_gradient mask
    const int64_t *wave              # of each batch entry, or NULL: one for all
    bint whole                       # a task is a whole row head
    ring_task *tasks
    ring_round *rounds
    ptrdiff_t n_task, n_round, most_rounds
    ptrdiff_t n_row_task, n_mask_task, most_row_tiles  # of a row head
    ptrdiff_t row_cost, mask_cost    # products of a row and a key in a task, about


cdef inline ptrdiff_t key_chunks_of(const mha_problem *p, ptrdiff_t batch_head) noexcept nogil:
    return ceil_divide(keys_of(p, batch_head // p.n_row_head), KEY_CHUNK)


cdef inline ptrdiff_t row_chunks_of(const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head) noexcept nogil:
    return ceil_divide(rows_of(p, batch_head // p.n_row_head), chunk_rows(k))


cdef inline ptrdiff_t waves_of(const mha_problem *p, const int64_t *wave) noexcept nogil:
    cdef ptrdiff_t batch, n_wave = 1
    for batch in range(p.n_batch if wave != NULL else 0):
        n_wave = max(n_wave, wave[batch] + 1)
    return n_wave


cdef inline int by_wave_and_period(const void *a, const void *b) noexcept nogil:
    cdef const ring_task *x = <const ring_task *>a
    cdef const ring_task *y = <const ring_task *>b
    if x.wave != y.wave:
        return 1 if x.wave > y.wave else -1
    if x.period != y.period:
        return 1 if x.period < y.period else -1
    if x.batch_head != y.batch_head:
        return 1 if x.batch_head > y.batch_head else -1
    return (x.key_chunk > y.key_chunk) - (x.key_chunk < y.key_chunk)


cdef inline ptrdiff_t list_ring_tasks(ring_task *tasks, const mha_problem *p, const mha_kernels *k,
                                      const plan_back *work) noexcept nogil:
    """Fill in the tasks, unless NULL, and return their number: key chunks of all row heads, or these as a whole.

    Entries of the batch that share a gradient, since an argument was broadcast, are in different waves.
    """
    cdef ptrdiff_t batch_head, i, n_key_chunk, n_row_chunk, n_task = 0
    for batch_head in range(p.n_batch * p.n_row_head):
        n_key_chunk, n_row_chunk = key_chunks_of(p, batch_head), row_chunks_of(p, k, batch_head)
        if n_key_chunk == 0 or n_row_chunk == 0:
            continue
        for i in range(1 if work.whole else n_key_chunk):
            if tasks != NULL:
                tasks[n_task] = ring_task(batch_head, -1 if work.whole else i,
                                          0 if work.wave == NULL else work.wave[batch_head // p.n_row_head],
                                          max(n_key_chunk, n_row_chunk))
            n_task += 1
    if tasks != NULL:
        qsort(tasks, n_task, sizeof(ring_task), by_wave_and_period)
    return n_task


cdef inline ptrdiff_t list_ring_rounds(ring_round *rounds, const ring_task *tasks, ptrdiff_t n_task) noexcept nogil:
    """Fill in the rounds, unless NULL, and return their number: wave after wave, phase after phase."""
    cdef ptrdiff_t start = 0, end, last, phase, n_round = 0
    while start < n_task:
        end = start
        while end < n_task and tasks[end].wave == tasks[start].wave:
            end += 1
        last = end
        for phase in range(tasks[start].period if tasks[start].key_chunk >= 0 else 1):
            while phase >= tasks[last - 1].period:
                last -= 1
            if rounds != NULL:
                rounds[n_round] = ring_round(start, last, phase)
            n_round += 1
        start = end
    return n_round


cdef inline bint row_heads_suffice(const mha_problem *p, const int64_t *wave, int n_thread) noexcept nogil:
    """Whether whole row heads are small enough tasks to keep all threads busy; the result is the same."""
    cdef double most = 0, total = 0, cost
    cdef ptrdiff_t batch
    for batch in range(p.n_batch):
        cost = <double>queries_of(p, batch) * keys_of(p, batch)
        most, total = max(most, cost), total + p.n_row_head * cost
    return n_thread == 1 or total >= 8 * n_thread * waves_of(p, wave) * most


cdef inline void count_back(plan_back *work, const mha_problem *p, const mha_kernels *k, int n_thread) noexcept nogil:
    """How much of each kind of work there is; the mask is known."""
    cdef ptrdiff_t batch_head, longest = 0
    cdef bint has_ring = has(p, MHA_GRAD_QUERY) or has(p, MHA_GRAD_KEY) or has(p, MHA_GRAD_VALUE)
    work.whole = row_heads_suffice(p, work.wave, n_thread)
    work.n_task = list_ring_tasks(NULL, p, k, work) if has_ring else 0
    for batch_head in range(p.n_batch * p.n_row_head):
        longest = max(longest, max(key_chunks_of(p, batch_head), row_chunks_of(p, k, batch_head)))
        work.most_row_tiles = max(work.most_row_tiles, ceil_divide(rows_of(p, batch_head // p.n_row_head), k.tile_rows))
    work.most_rounds = (1 if work.whole else longest) * waves_of(p, work.wave) if work.n_task > 0 else 0
    if has(p, MHA_DELTA):
        work.n_row_task = p.n_batch * p.n_row_head * work.most_row_tiles
    work.row_cost = k.tile_rows
    if has(p, MHA_SLOPE_SUM) or has(p, MHA_GATE_SUM):
        work.row_cost = k.tile_rows * p.n_key
    if work.mask.data != NULL:
        work.n_mask_task = (ceil_divide(work.mask.n_query, k.tile_rows) * ceil_divide(work.mask.n_key, MHA_KEY_BLOCK)
                            * work.mask.n_head * work.mask.n_entry)
        work.mask_cost = p.n_batch * p.n_head * p.n_query * p.n_key // max(work.n_mask_task, 1)


cdef inline size_t lay_out_call_back(void *base, space_back **space, plan_back *work, const mha_problem *p,
                                     const mha_kernels *k, int n_thread) noexcept nogil:
    """Place all that a call needs from `base` on; return its size.  With base NULL nothing is written there."""
    cdef arena a
    cdef space_back unplaced
    cdef size_t thread_size = lay_out_back(&unplaced, NULL, p, k)
    cdef int i
    a.base, a.used = <size_t>base, 0
    work.tasks = <ring_task *>take(&a, work.n_task * sizeof(ring_task))
    work.rounds = <ring_round *>take(&a, work.most_rounds * sizeof(ring_round))
    space[0] = <space_back *>take(&a, n_thread * sizeof(space_back))
    for i in range(n_thread if base != NULL else 0):
        lay_out_back(&space[0][i], <void *>(a.base + a.used + i * thread_size), p, k)
    return a.used + n_thread * thread_size
