# cython: language_level=3, cdivision=True, freethreading_compatible=True
"""The fused attention loop.

    attend()                 acquires the buffers, fills the problem, plans the tasks, allocates; can still raise
      |
      |  nogil, prange over the tasks, cannot fail
      |
      +- TILES       loop/forward.pxd     sub-tiles of rows of one row head (the query heads of a batch entry that read
      |                                   one key/value head), or of a few whose rows share a mask, walk through the key
      |                                   blocks that any of them may see:
      |                                       mask -> scores -> adjust -> online softmax -> values
      |                                   then: divide by the total, gate, write out and log-sum-exp
      +- MATRIX      loop/matrix.pxd      the same on a matrix unit, if there is one and the rows are many; these steps
      |                                   of three neighbouring blocks run at the same time
      +- DECODE      loop/decode.pxd      all rows (at most 8) of a row head, 512 keys -> a partial result; partial
      |                                   results are combined in index order
      +- WEIGHTS     loop/revisit.pxd     a walk for maximum and total, and a second one that writes the weights
      +- STATISTICS  loop/statistics.pxd  measurements of the weights take the place of the values

Each module of loop/ is made of inline functions and takes in only modules above it:

    structs       what they share: plan, tasks, sub-tiles, workspace
    operands      where rows lie; next_run() is all that knows how keys and values are stored
    visibility    which keys a row sees by its position
    rows          a sub-tile's description, and how its rows are finished
    scores        the reader of masks, and what makes logits of dot products
    plan          tasks and their order
    workspace     where the buffers lie, in one piece of memory
    dropout       how it counts the rows of a sub-tile
    forward       the walk, and attention on it
    revisit, statistics, decode, matrix
    large_values  rows whose sum left the range of its type, once more
    backward, row_sums, mask_gradient, ring   the gradients, and in which order their tasks come

differentiate() goes the same way, with tasks that add to the gradients.

contract/ holds what the loop and the kernels agree on, as a header and its .pxd for each domain: problem, tiles, dropout,
decode, statistics, matrix, backward, instruction_set.  All arithmetic is in kernels/; the loop decides what is visited,
and in which order.

No n_query x n_key array exists, unless the weights themselves are the output: a task holds one block of scores for
one sub-tile.  The key blocks lie on a fixed grid and every sub-tile runs through them by itself, so neither the
number of threads nor the batch that a sequence is in changes a single bit of the result.
"""
from cpython.buffer cimport (
    PyBUF_STRIDED_RO, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from cython.parallel cimport parallel, prange, threadid
from libc.math cimport fabs, floor, log2
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from contract.decode cimport MHA_MAX_DECODE_ROWS
from contract.instruction_set cimport (
    mha_built, mha_emulates_matrix_unit, mha_isa, mha_kernels, mha_kernels_for, mha_matrix_for, mha_n_built,
    mha_runnable, mha_tiles_granted,
)
from contract.matrix cimport MHA_MATRIX_PANEL, MHA_MATRIX_ROWS, mha_matrix_kernels
from contract.problem cimport (
    MHA_DELTA, MHA_FLOAT32, MHA_FLOAT64, MHA_GATE_SUM, MHA_GRAD_KEY, MHA_GRAD_LSE, MHA_GRAD_OUT, MHA_GRAD_QUERY,
    MHA_GRAD_VALUE, MHA_KEY, MHA_LSE, MHA_MASK, MHA_N_OPERAND, MHA_OUT, MHA_QUERY, MHA_SLOPE_SUM, MHA_VALUE, mha_operand,
    mha_problem, mha_storage,
)
from loop.backward cimport KEY_CHUNK, ROW_CHUNK, differentiate_chunks, space_back
from loop.decode cimport combine_splits, decode_split
from loop.dropout cimport drops
from loop.forward cimport attend_rows
from loop.large_values cimport mend_sub_tiles
from loop.mask_gradient cimport run_mask_task
from loop.matrix cimport attend_matrix
from loop.operands cimport adds_mask, has, keys_of, queries_of, rows_of
from loop.plan cimport count_tasks, kind_of, list_tasks, splits_of
from loop.revisit cimport RECEIVED_KEYS, receive, write_weights
from loop.ring cimport (
    count_back, key_chunks_of, lay_out_call_back, list_ring_rounds, list_ring_tasks, plan_back, ring_task,
)
from loop.row_sums cimport run_row_task
from loop.statistics cimport measure_rows
from loop.structs cimport (
    DECODE, MATRIX, STATISTICS, TILES, WEIGHTS, ceil_divide, plan, task, task_kind, workspace,
)
from loop.watch cimport begin_watch, may_go_on, watch
from loop.workspace cimport lay_out_call
from memory cimport mha_give_back_memory, mha_take_memory
from threads cimport *

cdef enum:
    MAX_BATCH_AXES = 64      # NumPy's own limit
    MAX_MATRIX_WIDTH = 256   # of a head: a packed block must stay in the cache

cdef double LOG2_E = 1.44269504088896340736


# ---------------------------------------------------------------------------------------------------- how many threads

cdef double seconds_alone(const mha_problem *p, const mha_kernels *k) noexcept nogil:
    """About how long one thread takes, at the rates of a slow core: 60 giga multiply-adds, 10 gigabytes of K and V a second.

    Only sizes and lengths count, so equal calls run alike.
    """
    cdef double madds = 0, n_byte = 0, width = p.head_width + p.value_width
    cdef ptrdiff_t batch
    for batch in range(p.n_batch):
        madds += <double>p.n_head * queries_of(p, batch) * keys_of(p, batch) * width
        n_byte += <double>p.n_kv_head * keys_of(p, batch) * width * k.stored_size
    return madds / 60e9 + n_byte / 10e9


cdef int team_size(double seconds, int wanted) noexcept nogil:
    """One thread where a second one does not pay: waking a team that has gone to sleep costs tens of microseconds."""
    return 1 if wanted == 1 or seconds < 50e-6 else mha_threads_for(wanted, seconds)


# ------------------------------------------------------------------------------------------------- the parallel region

cdef inline void combine(workspace *w, const mha_problem *p, const mha_kernels *k, const plan *work,
                         ptrdiff_t batch_head) noexcept nogil:
    combine_splits(w, p, k, work, batch_head)
    mend_sub_tiles(w, p, k, batch_head, 1, 0, rows_of(p, batch_head // p.n_row_head), MHA_MAX_DECODE_ROWS)


cdef inline void run_task(workspace *w, const mha_problem *p, const mha_kernels *k, const plan *work,
                          ptrdiff_t i) noexcept nogil:
    cdef const task *t = &work.tasks[i]
    cdef ptrdiff_t next_batch_head = -1, batch = t.batch_head // p.n_row_head, n_row = rows_of(p, batch) - t.start
    if t.kind == DECODE:
        decode_split(w, p, k, work, t.batch_head, t.start)
        if splits_of(p, batch) == 1:
            combine(w, p, k, work, t.batch_head)
    elif t.kind == MATRIX:
        n_row = min(n_row, work.n_matrix_sub * MHA_MATRIX_ROWS)
        attend_matrix(w, p, k, work, t.batch_head, t.start, n_row)
        mend_sub_tiles(w, p, k, t.batch_head, 1, t.start, n_row, MHA_MATRIX_ROWS)
    elif t.kind == TILES:
        if work.n_together > 1 and i + 1 < work.n_task and work.tasks[i + 1].batch_head != t.batch_head:
            next_batch_head = work.tasks[i + 1].batch_head
        n_row = min(n_row, work.n_sub * k.tile_rows)
        attend_rows(w, p, k, t.batch_head, t.n_task_head, t.start, n_row, next_batch_head)
        mend_sub_tiles(w, p, k, t.batch_head, t.n_task_head, t.start, n_row, k.tile_rows)
    elif t.kind == WEIGHTS:
        write_weights(w, p, k, t.batch_head, t.n_task_head, t.start, min(n_row, work.n_sub * k.tile_rows))
    else:
        measure_rows(w, p, k, t.batch_head, t.n_task_head, t.start, min(n_row, work.n_sub * k.tile_rows))


cdef inline void combine_if_split(workspace *w, const mha_problem *p, const mha_kernels *k, const plan *work,
                                  ptrdiff_t batch_head) noexcept nogil:
    cdef ptrdiff_t batch = batch_head // p.n_row_head
    if queries_of(p, batch) > 0 and kind_of(work, p, batch) == DECODE and splits_of(p, batch) > 1:
        combine(w, p, k, work, batch_head)


cdef void run_alone(workspace *w, const mha_problem *p, const mha_kernels *k, const plan *work, ptrdiff_t n_range,
                    watch *look) noexcept nogil:
    """All of the work on the calling thread: a parallel region makes a system call, even for a team of one."""
    cdef ptrdiff_t i, n_batch_head = p.n_batch * p.n_row_head
    for i in range(work.n_task):
        if may_go_on(look, 0, work.tasks[i].cost):
            run_task(w, p, k, work, i)
    if work.has_splits:
        for i in range(n_batch_head):
            combine_if_split(w, p, k, work, i)
    for i in range(n_batch_head * n_range):
        if may_go_on(look, 0, p.n_query * RECEIVED_KEYS):
            receive(w, p, k, i // n_range, i % n_range)


cdef void run_as_team(workspace *w, const mha_problem *p, const mha_kernels *k, const plan *work, ptrdiff_t n_range,
                      int n_thread, watch *look) noexcept nogil:
    """The same on several threads, each with a workspace of its own."""
    cdef ptrdiff_t i, n_batch_head = p.n_batch * p.n_row_head
    cdef int64_t called = mha_clock(), late = 0
    for i in range(n_thread):  # a runtime may send fewer
        w[i].arrived = called
    with parallel(num_threads=n_thread):
        w[threadid()].arrived = mha_clock()
        for i in prange(work.n_task, schedule="dynamic", chunksize=work.n_together):
            if may_go_on(look, threadid(), work.tasks[i].cost):
                run_task(&w[threadid()], p, k, work, i)
        if work.has_splits:
            for i in prange(n_batch_head, schedule="static"):
                combine_if_split(&w[threadid()], p, k, work, i)
        if n_range > 0:
            for i in prange(n_batch_head * n_range, schedule="dynamic", chunksize=1):
                if may_go_on(look, threadid(), p.n_query * RECEIVED_KEYS):
                    receive(&w[threadid()], p, k, i // n_range, i % n_range)
    for i in range(n_thread):
        late = max(late, w[i].arrived - called)
    mha_team_met(n_thread, late)


cdef int run(const mha_problem *p, const mha_kernels *k, const mha_matrix_kernels *matrix, task_kind kind,
             int wanted) except -1:
    """Plan, allocate, compute."""
    cdef plan work
    cdef workspace *space
    cdef watch look
    cdef double seconds = seconds_alone(p, k)
    cdef int i, n_thread = team_size(seconds, wanted)
    memset(&work, 0, sizeof(work))
    work.kind, work.matrix = kind, matrix
    if matrix != NULL:
        work.min_rows = matrix.min_rows if matrix_from < 0 else matrix_from
        work.min_keys = MHA_MATRIX_PANEL if matrix_from < 0 else 1
    count_tasks(&work, p, k, n_thread)
    if work.has_matrix and not mha_tiles_granted():
        give_up_matrix_unit()
        return run(p, k, NULL, kind, wanted)
    n_thread = <int>max(min(n_thread, work.n_task), 1)
    if n_thread > 1:
        n_thread = mha_threads_startable(n_thread)
    cdef ptrdiff_t n_range = ceil_divide(p.n_key, RECEIVED_KEYS) if p.asked.received != NULL else 0
    cdef size_t size = lay_out_call(NULL, &space, &work, p, k, n_thread)
    cdef char *memory = <char *>mha_take_memory(&size)
    if memory == NULL:
        raise MemoryError(f"no memory for {work.n_task} tasks, the workspace of {n_thread} threads and {work.n_partial} "
                          f"partial results: {size} bytes")
    lay_out_call(memory, &space, &work, p, k, n_thread)
    with nogil:
        list_tasks(&work, p, k, n_thread)
        begin_watch(&look, seconds)
        for i in range(n_thread):
            space[i].look, space[i].thread = &look, i
        if n_thread == 1:
            run_alone(space, p, k, &work, n_range, &look)
        else:
            run_as_team(space, p, k, &work, n_range, n_thread, &look)
    mha_give_back_memory(memory, size)
    return -1 if look.stopped else 0


# ---------------------------------------------------------------------------------------------------- the backward pass

cdef inline void run_ring_task(space_back *b, const mha_problem *p, const mha_kernels *k, const ring_task *t,
                               ptrdiff_t phase, int thread, watch *look) noexcept nogil:
    """A key chunk in a phase, or all of them in all phases."""
    cdef ptrdiff_t i, cost = KEY_CHUNK * ROW_CHUNK
    if t.key_chunk >= 0:
        if may_go_on(look, thread, cost):
            differentiate_chunks(b, p, k, t.batch_head, t.key_chunk, (t.key_chunk + phase) % t.period)
        return
    for phase in range(t.period):
        for i in range(key_chunks_of(p, t.batch_head)):
            if may_go_on(look, thread, cost):
                differentiate_chunks(b, p, k, t.batch_head, i, (i + phase) % t.period)


cdef inline void run_rows(space_back *b, const mha_problem *p, const mha_kernels *k, const plan_back *work,
                          ptrdiff_t i) noexcept nogil:
    run_row_task(b, p, k, i // work.most_row_tiles, i % work.most_row_tiles * k.tile_rows)


cdef void run_back_alone(space_back *b, const mha_problem *p, const mha_problem *by_head, const mha_kernels *k,
                         const plan_back *work, watch *look) noexcept nogil:
    """All of the work on the calling thread."""
    cdef ptrdiff_t i, r
    for i in range(work.n_row_task):
        if may_go_on(look, 0, work.row_cost):
            run_rows(b, p, k, work, i)
    for r in range(work.n_round):
        for i in range(work.rounds[r].first, work.rounds[r].last):
            run_ring_task(b, p, k, &work.tasks[i], work.rounds[r].phase, 0, look)
    for i in range(work.n_mask_task):
        if may_go_on(look, 0, work.mask_cost):
            run_mask_task(b, by_head, k, &work.mask, i)


cdef void run_back_as_team(space_back *b, const mha_problem *p, const mha_problem *by_head, const mha_kernels *k,
                           const plan_back *work, int n_thread, watch *look) noexcept nogil:
    """The same on several threads, each with a workspace of its own.  A round ends when all have done their part."""
    cdef ptrdiff_t i, r
    cdef int64_t called = mha_clock(), late = 0
    for i in range(n_thread):  # a runtime may send fewer
        b[i].w.arrived = called
    with parallel(num_threads=n_thread):
        b[threadid()].w.arrived = mha_clock()
        for i in prange(work.n_row_task, schedule="dynamic", chunksize=4):
            if may_go_on(look, threadid(), work.row_cost):
                run_rows(&b[threadid()], p, k, work, i)
        for r in range(work.n_round):
            for i in prange(work.rounds[r].first, work.rounds[r].last, schedule="dynamic", chunksize=1):
                run_ring_task(&b[threadid()], p, k, &work.tasks[i], work.rounds[r].phase, threadid(), look)
        for i in prange(work.n_mask_task, schedule="dynamic", chunksize=1):
            if may_go_on(look, threadid(), work.mask_cost):
                run_mask_task(&b[threadid()], by_head, k, &work.mask, i)
    for i in range(n_thread):
        late = max(late, b[i].w.arrived - called)
    mha_team_met(n_thread, late)


cdef int run_back(const mha_problem *p, const mha_kernels *k, plan_back *work, int wanted) except -1:
    """Plan, allocate, compute.  `work` holds the mask and the waves."""
    cdef double seconds = 2.5 * seconds_alone(p, k)  # five products in place of two
    cdef int i, n_thread = team_size(seconds, wanted)
    cdef space_back *space
    cdef mha_problem by_head = p[0]  # for the mask: every query head has rows of its own
    cdef watch look
    by_head.packed_heads, by_head.n_row_head = 1, p.n_head
    if n_thread > 1:
        n_thread = mha_threads_startable(n_thread)
    count_back(work, p, k, n_thread)
    cdef size_t size = lay_out_call_back(NULL, &space, work, p, k, n_thread)
    cdef char *memory = <char *>mha_take_memory(&size)
    if memory == NULL:
        raise MemoryError(f"no memory for {work.n_task} tasks and the workspace of {n_thread} threads: {size} bytes")
    lay_out_call_back(memory, &space, work, p, k, n_thread)
    with nogil:
        if work.n_task > 0:
            list_ring_tasks(work.tasks, p, k, work)
        work.n_round = list_ring_rounds(work.rounds, work.tasks, work.n_task)
        begin_watch(&look, seconds)
        for i in range(n_thread):
            space[i].w.look, space[i].w.thread = &look, i
        if n_thread == 1:
            run_back_alone(space, p, &by_head, k, work, &look)
        else:
            run_back_as_team(space, p, &by_head, k, work, n_thread, &look)
    mha_give_back_memory(memory, size)
    return -1 if look.stopped else 0


# ---------------------------------------------------------------------------------------------------- Python's entrance

# Read once by each call, so that threads may change it while others work.
cdef const mha_isa *chosen = NULL
cdef ptrdiff_t matrix_from = -1  # rows per key/value head from which on the matrix unit is used; -1: its own choice


cdef inline const mha_isa *isa_in_use() noexcept nogil:
    return <const mha_isa *>mha_load_pointer(<const void *const *>&chosen)


cdef const mha_matrix_kernels *matrix_for(const mha_isa *isa, const mha_problem *p, bint high, double scale) noexcept:
    """The matrix unit, where attention of these sizes may use it."""
    if (drops(p) or not 0 < p.head_width <= MAX_MATRIX_WIDTH or not 0 < p.value_width <= MAX_MATRIX_WIDTH
            # Beyond, the last terms of small keys, which the unit takes for 0, would show in the logits.
            or fabs(scale) > 1e12
            # Numbers that are left out would meet the part of the scale that the queries have not taken up.
            or 0 < fabs(scale) < 2.0**-32):
        return NULL
    return mha_matrix_for(isa, p.operand[MHA_QUERY].storage, high)


cdef void choose_units(mha_problem *p, double scale, size_t item_size, bint folds) noexcept:
    """Keep scores raw and fold the scale into the exponential, unless something has to be added to the logits.

    With `folds`, the queries take up a power of two of a scale that is very small: dot products of large numbers would
    overflow before it could act.
    """
    cdef double least_scale = 2.0**-32 if item_size == 4 else 2.0**-256
    cdef double folded = 1, exponent
    cdef double most = 1e37 if item_size == 4 else 1e307  # what the type holds with room to spare
    if folds and 0 < fabs(scale) < least_scale:
        folded = 2.0**floor(log2(fabs(scale) / least_scale))
        scale /= folded
    exponent = fabs(scale) * LOG2_E
    p.natural = (p.softcap != 0 or p.alibi_slope != NULL or adds_mask(p)
                 or (scale != 0 and not 1 / most < exponent < most))
    p.query_scale, p.score_scale, p.exp_scale, p.lse_scale = folded, 1, LOG2_E, 1
    if p.natural:
        p.score_scale = scale
    elif scale == 0:
        p.query_scale = 0
    else:
        p.query_scale = folded if scale > 0 else -folded
        p.exp_scale, p.lse_scale = exponent, fabs(scale)


cdef class Buffers:
    """Buffers of a call, and the numbers derived from them; everything is given back at the end."""
    cdef Py_buffer view[32]
    cdef int n_view
    cdef ptrdiff_t *offset
    cdef mha_problem problem
    cdef bint backward               # what attention wrote is read

    def __dealloc__(self):
        cdef int i
        free(self.offset)
        for i in range(self.n_view):
            PyBuffer_Release(&self.view[i])

    cdef Py_buffer *acquire(self, array, int flags) except NULL:
        PyObject_GetBuffer(array, &self.view[self.n_view], flags)
        self.n_view += 1
        return &self.view[self.n_view - 1]

    cdef const void *numbers(self, array) except? NULL:
        """Data of a contiguous array of numbers per batch entry, query or head; None gives NULL."""
        return NULL if array is None else self.acquire(array, PyBUF_STRIDED_RO).buf

    cdef const Py_buffer *operand(self, int which, array, int storage, tuple batch_shape, int n_own) except NULL:
        """Set an operand whose last n_own axes are head, row and (but for lse) column."""
        cdef bint written = which >= MHA_DELTA or (which in (MHA_OUT, MHA_LSE) and not self.backward)
        cdef Py_buffer *view = self.acquire(array, PyBUF_STRIDES | PyBUF_WRITABLE if written else PyBUF_STRIDED_RO)
        cdef mha_operand *operand = &self.problem.operand[which]
        cdef ptrdiff_t *offset = self.offset + which * self.problem.n_batch
        operand.data, operand.storage = <char *>view.buf, <mha_storage>storage
        operand.head_stride, operand.row_stride = stride_of(view, n_own), stride_of(view, n_own - 1)
        operand.column_stride = stride_of(view, n_own - 2) if n_own > 2 else 0
        operand.batch_offset = offset
        set_batch_offsets(offset, view, batch_shape, n_own)
        return view

    cdef void pack(self, int which, const int64_t *boundary):
        """Let batch entry b of an operand begin at row boundary[b]."""
        cdef ptrdiff_t batch
        cdef ptrdiff_t *offset = self.offset + which * self.problem.n_batch
        for batch in range(self.problem.n_batch):
            offset[batch] = boundary[batch] * self.problem.operand[which].row_stride


cdef inline ptrdiff_t length_of(const Py_buffer *view, int from_last) noexcept:
    """Length of an axis counted from the last (1)."""
    return view.shape[view.ndim - from_last]


cdef inline ptrdiff_t stride_of(const Py_buffer *view, int from_last) noexcept:
    """Stride of an axis counted from the last (1); 0 for an axis of length 1 or none at all, which does not move."""
    cdef int axis = view.ndim - from_last
    return view.strides[axis] if axis >= 0 and view.shape[axis] != 1 else 0


cdef int set_batch_offsets(ptrdiff_t *offset, const Py_buffer *view, tuple shape, int n_own) except -1:
    """Byte offset of every entry of the broadcast batch axes, in C order."""
    cdef ptrdiff_t length[MAX_BATCH_AXES]
    cdef ptrdiff_t stride[MAX_BATCH_AXES]
    cdef ptrdiff_t index[MAX_BATCH_AXES]
    cdef ptrdiff_t n_entry = 1, entry, here = 0
    cdef int axis, n_axis = len(shape)
    for axis in range(n_axis):
        length[axis] = shape[axis]
        stride[axis] = stride_of(view, n_own + n_axis - axis)
        index[axis] = 0
        n_entry *= length[axis]
    for entry in range(n_entry):
        offset[entry] = here
        for axis in range(n_axis - 1, -1, -1):
            index[axis] += 1
            here += stride[axis]
            if index[axis] < length[axis]:
                break
            here -= index[axis] * stride[axis]
            index[axis] = 0
    return 0


cdef int ask_statistics(Buffers buffers, what) except -1:
    """What `what`, a `Measured` of mha_fast/_statistics.py, asks for."""
    cdef mha_problem *p = &buffers.problem
    p.packed_heads, p.n_row_head = 1, p.n_head
    p.asked.offset = <const int64_t *>buffers.numbers(what.offsets)
    p.asked.n_offset = what.offsets.shape[0]
    if what.key_sets is not None:
        p.asked.key_set = <const uint8_t *>buffers.numbers(what.key_sets)
        p.asked.n_set = what.key_sets.shape[1]
    p.asked.ignored = <const uint8_t *>buffers.numbers(what.ignored)
    if what.received is not None:
        p.asked.received = <double *>buffers.acquire(what.received, PyBUF_STRIDES | PyBUF_WRITABLE).buf
    return 0


cdef int set_operands(Buffers buffers, call, value, out, int out_storage, lse) except -1:
    """Sizes, and where the arrays of a call lie."""
    cdef mha_problem *p = &buffers.problem
    cdef tuple batch_shape = call.batch_shape
    cdef int element = call.element
    cdef const Py_buffer *view
    mask = call.mask
    p.n_batch = call.n_batch
    buffers.offset = <ptrdiff_t *>malloc(MHA_N_OPERAND * max(p.n_batch, 1) * sizeof(ptrdiff_t))
    if buffers.offset == NULL:
        raise MemoryError(f"no memory for the offsets of {p.n_batch} batch entries")
    view = buffers.operand(MHA_QUERY, call.query, element, batch_shape, 3)
    p.n_head, p.n_query, p.head_width = length_of(view, 3), length_of(view, 2), length_of(view, 1)
    view = buffers.operand(MHA_KEY, call.key, element, batch_shape, 3)
    p.n_kv_head, p.n_key = length_of(view, 3), length_of(view, 2)
    p.group_size = p.n_head // max(p.n_kv_head, 1)
    p.packed_heads, p.n_row_head = p.group_size, p.n_kv_head
    if value is not None:
        p.value_width = length_of(buffers.operand(MHA_VALUE, value, element, batch_shape, 3), 1)
    buffers.operand(MHA_OUT, out, out_storage, batch_shape, 3)
    if mask is not None:
        buffers.operand(MHA_MASK, mask, call.mask_type, batch_shape, 3)
    if lse is not None:
        buffers.operand(MHA_LSE, lse, arithmetic(element), batch_shape, 2)
    return 0


cdef inline int arithmetic(int element) noexcept:
    """The type of the computation, and of the log-sum-exp."""
    return MHA_FLOAT64 if element == MHA_FLOAT64 else MHA_FLOAT32


cdef int pack_sequences(Buffers buffers, call) except -1:
    """Where sequences lie one after the other, let each entry of every operand begin with its own."""
    cdef int which
    if call.cu_seqlens_q is None:
        return 0
    cdef const int64_t *of_queries = <const int64_t *>buffers.numbers(call.cu_seqlens_q)
    cdef const int64_t *of_keys = <const int64_t *>buffers.numbers(call.cu_seqlens_k)
    for which in range(MHA_N_OPERAND):
        if has(&buffers.problem, which):
            buffers.pack(which, of_keys if which in (MHA_KEY, MHA_VALUE, MHA_GRAD_KEY, MHA_GRAD_VALUE) else of_queries)
    return 0


cdef void set_dropout(mha_problem *p, double share, uint64_t seed) noexcept:
    """A word below the share of 2**32 is dropped; the product with a power of 2 is exact."""
    p.dropped.threshold, p.dropped.factor = <uint32_t>(share * 4294967296.0), 1 / (1 - share)
    p.dropped.key[0], p.dropped.key[1] = <uint32_t>seed, <uint32_t>(seed >> 32)


cdef int set_options(Buffers buffers, call, size_t item_size) except -1:
    """Everything else; what is None has no effect."""
    cdef mha_problem *p = &buffers.problem
    if call.queries is not None:
        p.query_index = <const int64_t *>buffers.numbers(call.queries)
        p.n_query = call.queries.shape[0]
    p.query_length = <const int64_t *>buffers.numbers(call.q_lengths)
    p.key_length = <const int64_t *>buffers.numbers(call.kv_lengths)
    p.query_offset = <const int64_t *>buffers.numbers(call.query_offset)
    p.alibi_slope = <const double *>buffers.numbers(call.alibi_slopes)
    p.sink = <const double *>buffers.numbers(call.sinks)
    p.gate = <const double *>buffers.numbers(call.head_mask)
    p.window_left, p.window_right = call.window
    p.softcap = call.softcap
    if call.dropout_p > 0:
        set_dropout(p, call.dropout_p, call.dropout_seed)
    p.grad_scale = call.scale
    choose_units(p, call.scale, item_size, not buffers.backward)
    return 0


def attend(call, out, lse, int n_thread):
    """Compute one checked call (a `Call` of mha_fast/_arguments.py) into `out` and, if not None, `lse`.

    query, key, value and out have a head axis and a contiguous last axis; batch axes broadcast.  With
    `call.cu_seqlens_q` the rows of all sequences lie one after the other and there is no batch axis.
    """
    cdef Buffers buffers = Buffers()
    cdef mha_problem *p = &buffers.problem
    cdef int element = call.element
    cdef const mha_isa *isa = isa_in_use()
    cdef const mha_kernels *k = mha_kernels_for(isa, <mha_storage>element)
    cdef task_kind kind = TILES
    cdef const mha_matrix_kernels *matrix = NULL
    value = call.value
    if value is None:
        kind = WEIGHTS if call.statistics is None else STATISTICS
    set_operands(buffers, call, value, out, MHA_FLOAT64 if kind == STATISTICS else element, lse)
    pack_sequences(buffers, call)
    set_options(buffers, call, k.item_size)
    if kind == STATISTICS:
        ask_statistics(buffers, call.statistics)
    elif kind == TILES and isa.matrix != NULL:
        matrix = matrix_for(isa, p, call.high, call.scale)
    run(p, k, matrix, kind, n_thread)


def differentiate(call, what, int n_thread):
    """Add the gradients of one checked call to the arrays in `what`, a `Gradients` of mha_fast/_gradients.py."""
    cdef Buffers buffers = Buffers()
    cdef mha_problem *p = &buffers.problem
    cdef int element = call.element, number = arithmetic(element)
    cdef const mha_kernels *k = mha_kernels_for(isa_in_use(), <mha_storage>element)
    cdef plan_back work
    cdef const Py_buffer *view
    buffers.backward = True
    set_operands(buffers, call, call.value, what.out, element, what.lse)
    buffers.operand(MHA_GRAD_OUT, what.grad_out, element, call.batch_shape, 3)
    for which, array, n_own in (
        (MHA_GRAD_LSE, what.grad_lse, 2), (MHA_DELTA, what.delta, 2), (MHA_GRAD_QUERY, what.query, 3),
        (MHA_GRAD_KEY, what.key, 3), (MHA_GRAD_VALUE, what.value, 3), (MHA_SLOPE_SUM, what.slope_sum, 2),
        (MHA_GATE_SUM, what.gate_sum, 2),
    ):
        if array is not None:
            buffers.operand(which, array, number, call.batch_shape, n_own)
    pack_sequences(buffers, call)
    set_options(buffers, call, k.item_size)
    memset(&work, 0, sizeof(work))
    if what.mask is not None:
        view = buffers.acquire(what.mask, PyBUF_STRIDES | PyBUF_WRITABLE)
        work.mask.data, work.mask.n_entry, work.mask.n_head = <char *>view.buf, view.shape[0], view.shape[1]
        work.mask.n_query, work.mask.n_key = view.shape[2], view.shape[3]
        work.mask.batch_of = <const int64_t *>buffers.numbers(what.mask_batches)
        work.mask.first_of = <const int64_t *>buffers.numbers(what.mask_bounds)
    work.wave = <const int64_t *>buffers.numbers(what.waves)
    run_back(p, k, &work, n_thread)


def round_numbers(int element, wide, narrow):
    """Round the numbers of a contiguous array of the arithmetic type to the element type, one after the other."""
    cdef Buffers buffers = Buffers()
    cdef const mha_kernels *k = mha_kernels_for(isa_in_use(), <mha_storage>element)
    cdef const Py_buffer *source = buffers.acquire(wide, PyBUF_STRIDED_RO)
    cdef char *target = <char *>buffers.acquire(narrow, PyBUF_STRIDES | PyBUF_WRITABLE).buf
    cdef ptrdiff_t n = source.len // k.item_size
    with nogil:
        k.backward.store_numbers(target, source.buf, n)


# -------------------------------------------------------------------------------------------- instruction set, threads

def built_isas():
    """Names of the instruction sets in this build, slowest first."""
    return tuple(mha_built[i].name.decode() for i in range(mha_n_built))


def available_isas():
    """Names of those that this CPU and operating system can run, slowest first."""
    return tuple(mha_built[i].name.decode() for i in range(mha_n_built) if mha_runnable(mha_built[i]))


def isa():
    """Name of the one in use."""
    return isa_in_use().name.decode()


def use_isa(str name):
    """Use the named instruction set from now on.  ValueError if it is unknown or cannot run here."""
    if name not in built_isas():
        raise ValueError(f"unknown instruction set {name!r}; this build has {', '.join(built_isas())}")
    if name not in available_isas():
        raise ValueError(f"instruction set {name!r} cannot run on this machine; "
                         f"available: {', '.join(available_isas())}")
    for i in range(mha_n_built):
        if mha_built[i].name.decode() == name:
            mha_store_pointer(<const void **>&chosen, mha_built[i])


cdef void give_up_matrix_unit():
    """The operating system refused it: from now on the set below, whose tiles are the same."""
    for i in range(1, mha_n_built):
        if mha_built[i] == isa_in_use():
            mha_store_pointer(<const void **>&chosen, mha_built[i - 1])
            return


def use_matrix_from(ptrdiff_t n_row):
    """Use the matrix unit from so many rows per key/value head on (-1: where it pays); return the setting before."""
    global matrix_from
    before, matrix_from = matrix_from, n_row
    return before


def emulates_matrix_unit():
    """Whether the instruction set "amx" of this build is software (CONTRIBUTING.md), for checking it anywhere."""
    return bool(mha_emulates_matrix_unit)


def has_openmp():
    """Whether this build runs on more than one thread."""
    return bool(mha_has_openmp())


def default_threads():
    """Threads that a call uses where nobody asked for a number."""
    return mha_threads_default()


def limit_default_threads(int most):
    """Bound that number, unless OMP_NUM_THREADS gives it; 0: no bound."""
    mha_limit_default_threads(most)


def is_forked():
    """Whether this process came out of a fork() since the import; it works on one thread."""
    return mha_is_forked()


def measure_fma_peak(int n_thread=1, ptrdiff_t n_round=300_000):
    """GFLOP/s of independent float32 multiply-adds on n_thread threads: what speeds are held against."""
    from time import perf_counter
    cdef const mha_isa *isa = isa_in_use()
    cdef double operations = 0
    cdef int _
    start = perf_counter()
    n_thread = mha_threads_startable(n_thread)
    with nogil:
        for _ in prange(n_thread, schedule="static", chunksize=1, num_threads=n_thread):
            operations += isa.multiply_add_rounds(n_round)
    return operations / (perf_counter() - start) / 1e9


def measure_matrix_peak(int n_thread=1, ptrdiff_t n_round=100_000):
    """GFLOP/s of bfloat16 multiply-adds on the matrix unit; None where there is none."""
    from time import perf_counter
    cdef const mha_isa *isa = isa_in_use()
    cdef double operations = 0
    cdef int _
    if isa.matrix_rounds == NULL or not mha_tiles_granted():
        return None
    start = perf_counter()
    n_thread = mha_threads_startable(n_thread)
    with nogil:
        for _ in prange(n_thread, schedule="static", chunksize=1, num_threads=n_thread):
            operations += isa.matrix_rounds(n_round)
    return operations / (perf_counter() - start) / 1e9


mha_threads_begin()
use_isa(available_isas()[-1])
