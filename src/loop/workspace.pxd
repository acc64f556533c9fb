# Where the buffers of a call lie: all in one piece of memory, laid out before the parallel region, so that nothing in it
# can fail.
from libc.string cimport memset

from contract.decode cimport MHA_KEY_SPLIT, MHA_MAX_DECODE_ROWS
from contract.instruction_set cimport mha_kernels
from contract.matrix cimport (
    MHA_MATRIX_CHUNK, MHA_MATRIX_PANEL, MHA_MATRIX_PASSING, MHA_MATRIX_PIECE, MHA_MATRIX_ROWS, mha_pipeline,
)
from contract.problem cimport mha_problem
from contract.statistics cimport mha_moments
from contract.tiles cimport MHA_KEY_BLOCK
from loop.structs cimport N_ITEM, STATISTICS, chunks_of, matrix_row_size, padded, plan, sub_tile, task, workspace

cdef struct arena:
    # Memory that is handed out from `base` on; with base 0 only its size counts.
    size_t base, used


cdef inline void *take(arena *a, ptrdiff_t n_byte) noexcept nogil:
    cdef size_t start = a.used
    a.used += (<size_t>n_byte + 63) // 64 * 64
    return <void *>(a.base + start)


cdef inline void lay_out_pipeline(workspace *w, arena *a, const mha_problem *p, const plan *work) noexcept nogil:
    cdef char *score[2]
    cdef char *weight[3]
    cdef ptrdiff_t i
    for i in range(2):
        score[i] = <char *>take(a, MHA_MATRIX_ROWS * MHA_MATRIX_PIECE * sizeof(float))
        w.block[i] = <char *>take(a, work.key_block_size + work.value_block_size)
    for i in range(3):
        weight[i] = <char *>take(a, MHA_MATRIX_ROWS * work.matrix.block_keys * 2 * work.matrix.n_term)
    # Scores of an item and the next, weights of these and the one after, are wanted at the same time.
    for i in range(N_ITEM):
        w.item[i].score, w.item[i].weight = <float *>score[i % 2], weight[i % 3]
    memset(&w.pipe, 0, sizeof(mha_pipeline))
    w.pipe.query_chunks, w.pipe.value_chunks = chunks_of(p.head_width), chunks_of(p.value_width)
    w.pipe.exp_scale = p.exp_scale
    w.pipe.product = <float *>take(a, w.pipe.value_chunks * MHA_MATRIX_CHUNK * MHA_MATRIX_ROWS * sizeof(float))
    w.pipe.unused = <float *>take(a, MHA_MATRIX_PANEL * MHA_MATRIX_ROWS * sizeof(float))
    w.pipe.passing = <float *>take(a, MHA_MATRIX_PASSING * MHA_MATRIX_PANEL * MHA_MATRIX_ROWS * sizeof(float))


cdef inline void lay_out_sub_tile(sub_tile *s, arena *a, const mha_problem *p, const mha_kernels *k, const plan *work,
                                  ptrdiff_t n_row, ptrdiff_t packed_size, ptrdiff_t sum_size) noexcept nogil:
    s.packed = take(a, packed_size)
    s.sum = take(a, sum_size)
    s.maximum = take(a, n_row * k.item_size)
    s.total = take(a, n_row * k.item_size)
    s.factor = take(a, n_row * k.item_size)
    if work.kind == STATISTICS:
        s.sums = mha_moments(s.maximum, s.total, take(a, n_row * k.item_size), take(a, n_row * k.item_size),
                             take(a, p.asked.n_set * n_row * k.item_size), take(a, n_row * k.item_size),
                             take(a, n_row * k.item_size), &s.best_key[0], p.asked.n_set)
        s.offset_score = <double *>take(a, p.asked.n_offset * n_row * sizeof(double))


cdef inline size_t lay_out(workspace *w, void *base, const mha_problem *p, const mha_kernels *k,
                           const plan *work) noexcept nogil:
    """Place a thread's buffers from `base` on, as large as the plan's tasks need them; return their size."""
    cdef arena a
    # Any rows may have to go through tiles in the end: see large_values.pxd.  Memory that nobody touches costs nothing.
    cdef ptrdiff_t n_row = max(k.tile_rows, MHA_MAX_DECODE_ROWS if work.has_decode else 0)
    cdef ptrdiff_t n_score = max(k.tile_rows * MHA_KEY_BLOCK, MHA_MAX_DECODE_ROWS * MHA_KEY_SPLIT if work.has_decode else 0)
    cdef ptrdiff_t i, n_sub = max(work.n_sub * work.n_task_head, work.n_matrix_sub), packed_size, sum_size
    cdef sub_tile unplaced
    a.base, a.used = <size_t>base, 0
    packed_size = n_row * padded(k, p.head_width) * k.item_size
    sum_size = n_row * padded(k, p.value_width) * k.item_size
    if work.has_matrix:
        n_row = max(n_row, MHA_MATRIX_ROWS)
        # w.visible: of a whole block, where scores are short
        n_score = max(n_score, MHA_MATRIX_ROWS * work.matrix.block_keys)
        packed_size = max(packed_size, MHA_MATRIX_ROWS * matrix_row_size(work.matrix, p.head_width))
        sum_size = max(sum_size, MHA_MATRIX_ROWS * chunks_of(p.value_width) * MHA_MATRIX_CHUNK * sizeof(float))
    w.cached.n_row = 0
    w.look, w.thread = NULL, 0
    w.sub = <sub_tile *>take(&a, n_sub * sizeof(sub_tile))
    for i in range(n_sub):
        lay_out_sub_tile(&w.sub[i] if base != NULL else &unplaced, &a, p, k, work, n_row, packed_size, sum_size)
    w.score = take(&a, n_score * k.item_size)
    w.bias = take(&a, n_score * k.item_size)
    w.visible = take(&a, n_score * k.item_size)
    w.mask_work = take(&a, k.lanes * MHA_KEY_BLOCK * k.item_size)
    w.combine_work = take(&a, work.most_splits * k.item_size)
    w.again = take(&a, k.tile_rows * p.value_width * k.stored_size)
    w.block_maximum = take(&a, n_row * k.item_size)
    w.rescale = take(&a, n_row * k.item_size)
    w.slope = take(&a, n_row * k.item_size)
    w.distance = take(&a, n_row * k.item_size)
    w.first = take(&a, n_row * k.item_size)
    w.last = take(&a, n_row * k.item_size)
    if k.widen != NULL:
        for i in range(work.n_task_head):
            w.key_tile[i] = take(&a, MHA_KEY_BLOCK * padded(k, p.head_width) * k.item_size)
            w.value_tile[i] = take(&a, MHA_KEY_BLOCK * padded(k, p.value_width) * k.item_size)
    if work.has_matrix:
        lay_out_pipeline(w, &a, p, work)
    return a.used


cdef inline size_t lay_out_call(void *base, workspace **space, plan *work, const mha_problem *p, const mha_kernels *k,
                                int n_thread) noexcept nogil:
    """Place all that a call needs from `base` on; return its size.  With base NULL nothing is written there."""
    cdef arena a
    cdef workspace scratch
    cdef size_t thread_size = lay_out(&scratch, NULL, p, k, work)
    cdef int i
    a.base, a.used = <size_t>base, 0
    work.tasks = <task *>take(&a, work.n_task * sizeof(task))
    work.first_partial = <ptrdiff_t *>take(&a, p.n_batch * p.n_row_head * sizeof(ptrdiff_t))
    work.partials = <char *>take(&a, work.n_partial * work.partial_size)
    space[0] = <workspace *>take(&a, n_thread * sizeof(workspace))
    for i in range(n_thread if base != NULL else 0):
        lay_out(&space[0][i], <void *>(a.base + a.used + i * thread_size), p, k, work)
    return a.used + n_thread * thread_size
