# The plan of a call: its tasks in the order in which they are taken, and the buffer of partial results.
from libc.stdint cimport int64_t
from libc.stdlib cimport qsort

from contract.decode cimport MHA_KEY_SPLIT, MHA_MAX_DECODE_ROWS
from contract.instruction_set cimport mha_kernels
from contract.matrix cimport MHA_MATRIX_CHUNK, MHA_MATRIX_ROWS
from contract.problem cimport MHA_MASK, mha_operand, mha_problem
from loop.operands cimport has_mask, keys_of, queries_of, rows_of
from loop.structs cimport (
    DECODE, MATRIX, MAX_MATRIX_SUB_TILES, MAX_SUB_TILES, MAX_TASK_HEADS, TILES, ceil_divide, chunks_of, matrix_row_size,
    padded, plan, task, task_kind,
)
from loop.visibility cimport has_window, position_of, visible_range

cdef enum:
    LEAST_MATRIX_SUB_TILES = 8        # of a task: packing a key block then costs a tenth of working with it
    MATRIX_SUB_BYTES = 3 << 18        # of a task's queries and sums: what leaves room for a block in 2 MB of L2


cdef inline void seen_by_some(const mha_problem *p, ptrdiff_t batch, ptrdiff_t *first, ptrdiff_t *last) noexcept nogil:
    """Keys [first, last) outside which no query of a batch entry sees any; the first query sees furthest back."""
    cdef int64_t position = position_of(p, batch, 0)
    first[0] = <ptrdiff_t>max(position - p.window_left, 0)
    last[0] = <ptrdiff_t>min(position + queries_of(p, batch) + p.window_right, keys_of(p, batch))


cdef inline ptrdiff_t first_split(const mha_problem *p, ptrdiff_t batch) noexcept nogil:
    cdef ptrdiff_t first, last
    seen_by_some(p, batch, &first, &last)
    return first // MHA_KEY_SPLIT if first < last else 0


cdef inline ptrdiff_t splits_of(const mha_problem *p, ptrdiff_t batch) noexcept nogil:
    """Splits of the keys that some query sees; one where there are none, since the output is to be written."""
    cdef ptrdiff_t first, last
    seen_by_some(p, batch, &first, &last)
    return ceil_divide(last, MHA_KEY_SPLIT) - first // MHA_KEY_SPLIT if first < last else 1


cdef inline task_kind kind_of(const plan *work, const mha_problem *p, ptrdiff_t batch) noexcept nogil:
    """Which path the rows of a batch entry take; sizes alone decide, so a sequence gives the same bits in any batch."""
    cdef ptrdiff_t n_row = rows_of(p, batch)
    if work.kind == TILES:
        if n_row <= MHA_MAX_DECODE_ROWS:
            return DECODE
        if work.matrix != NULL and n_row >= work.min_rows and keys_of(p, batch) >= work.min_keys:
            return MATRIX
    return work.kind


cdef inline ptrdiff_t tile_cost(const mha_problem *p, ptrdiff_t batch, ptrdiff_t row, ptrdiff_t n_row) noexcept nogil:
    """Rows times the keys between the first that the first row sees and the last that the last row sees."""
    cdef ptrdiff_t first, last, unused
    visible_range(p, position_of(p, batch, row // p.packed_heads), keys_of(p, batch), &first, &unused)
    visible_range(p, position_of(p, batch, (row + n_row - 1) // p.packed_heads), keys_of(p, batch), &unused, &last)
    return n_row * max(last - first, 0)


cdef inline int heavy_first(const void *a, const void *b) noexcept nogil:
    cdef const task *x = <const task *>a
    cdef const task *y = <const task *>b
    if x.cost != y.cost:
        return 1 if x.cost < y.cost else -1
    if x.start != y.start:  # a mask that heads share is read by one head after the other while it is near
        return 1 if x.start > y.start else -1
    return (x.batch_head > y.batch_head) - (x.batch_head < y.batch_head)


cdef inline void size_tile_tasks(plan *work, const mha_problem *p, const mha_kernels *k) noexcept nogil:
    """Set how many row heads and sub-tiles make a task of row tiles, at most.

    Sub-tiles of one row head share its key blocks while they are in the cache.  Where heads share a mask with a row per
    query, each piece of it is read and turned into numbers once for several heads (bench.compare --cases float_mask:
    4 heads with 2 sub-tiles each are 15% ahead of 1 with 4; 2 with 4 and 8 with 2 are behind them).
    """
    cdef ptrdiff_t sub_tile_size = k.tile_rows * (p.head_width + p.value_width) * k.item_size
    cdef const mha_operand *mask = &p.operand[MHA_MASK]
    cdef bint shared = has_mask(p) and mask.head_stride == 0 and mask.row_stride != 0
    work.n_task_head = min(p.n_row_head, MAX_TASK_HEADS) if shared else 1
    work.n_sub = MAX_SUB_TILES // work.n_task_head if shared else 4
    # A task stays in the cache.
    while work.n_sub * work.n_task_head > 1 and work.n_sub * work.n_task_head * sub_tile_size > 1 << 20:
        split_tile_tasks(work)


cdef inline void split_tile_tasks(plan *work) noexcept nogil:
    if work.n_sub > 1:
        work.n_sub //= 2
    else:
        work.n_task_head //= 2


cdef inline void size_matrix_tasks(plan *work, const mha_problem *p, int n_thread) noexcept nogil:
    """How large a task of the matrix unit is.

    Every task packs the key blocks for itself.  The larger it is, the less that weighs; packed once for all tasks they
    would come from beyond the cache, which costs more.
    """
    cdef ptrdiff_t batch, n_task
    cdef ptrdiff_t sub_size = MHA_MATRIX_ROWS * (matrix_row_size(work.matrix, p.head_width)
                                                 + chunks_of(p.value_width) * MHA_MATRIX_CHUNK * sizeof(float))
    work.key_block_size = work.matrix.block_keys * matrix_row_size(work.matrix, p.head_width)
    work.value_block_size = work.matrix.block_keys * matrix_row_size(work.matrix, p.value_width)
    work.n_matrix_sub = MAX_MATRIX_SUB_TILES
    while work.n_matrix_sub > LEAST_MATRIX_SUB_TILES and work.n_matrix_sub * sub_size > MATRIX_SUB_BYTES:
        work.n_matrix_sub //= 2
    while True:
        n_task = 0
        for batch in range(p.n_batch):
            if kind_of(work, p, batch) == MATRIX:
                n_task += p.n_row_head * ceil_divide(rows_of(p, batch), work.n_matrix_sub * MHA_MATRIX_ROWS)
        if work.n_matrix_sub <= LEAST_MATRIX_SUB_TILES or n_task >= 4 * n_thread:
            break
        work.n_matrix_sub //= 2
    work.n_task += n_task


cdef inline void count_tasks(plan *work, const mha_problem *p, const mha_kernels *k, int n_thread) noexcept nogil:
    """How many tasks and partial results there are, and how large the tasks of each kind are."""
    cdef ptrdiff_t batch, n_row, most_decode_rows = 0, n_tile_task
    cdef task_kind kind
    size_tile_tasks(work, p, k)
    while True:
        n_tile_task = work.n_partial = 0
        for batch in range(p.n_batch):
            n_row = rows_of(p, batch)
            if n_row == 0:
                continue
            kind = kind_of(work, p, batch)
            if kind == DECODE:
                most_decode_rows = max(most_decode_rows, n_row)
                work.most_splits = max(work.most_splits, splits_of(p, batch))
                work.n_partial += p.n_row_head * splits_of(p, batch)
            elif kind == MATRIX:
                work.has_matrix = True
            else:
                work.has_tiles = True
                n_tile_task += (ceil_divide(p.n_row_head, work.n_task_head)
                                * ceil_divide(n_row, work.n_sub * k.tile_rows))
        # Few tasks become more, so that every thread gets some.
        if work.n_sub * work.n_task_head == 1 or n_tile_task + work.n_partial >= 4 * n_thread or not work.has_tiles:
            break
        split_tile_tasks(work)
    work.n_task = n_tile_task + work.n_partial
    work.has_decode = most_decode_rows > 0
    work.has_splits = work.most_splits > 1
    work.maximum_at = most_decode_rows * padded(k, p.value_width) * k.item_size
    work.total_at = work.maximum_at + most_decode_rows * k.item_size
    work.partial_size = (work.total_at + most_decode_rows * k.item_size + 63) // 64 * 64
    if not work.has_tiles:
        work.n_sub = work.n_task_head = 1
    if work.has_matrix:
        size_matrix_tasks(work, p, n_thread)


cdef inline task *list_decode_tasks(task *t, const mha_problem *p, ptrdiff_t batch_head) noexcept nogil:
    cdef ptrdiff_t split, batch = batch_head // p.n_row_head, first = first_split(p, batch)
    for split in range(first, first + splits_of(p, batch)):
        t[0] = task(DECODE, batch_head, 1, split,
                    rows_of(p, batch) * min(keys_of(p, batch) - split * MHA_KEY_SPLIT, MHA_KEY_SPLIT))
        t += 1
    return t


cdef inline task *list_row_tasks(task *t, task_kind kind, const mha_problem *p, ptrdiff_t batch_head,
                                 ptrdiff_t n_task_head, ptrdiff_t task_rows) noexcept nogil:
    """Tasks of so many rows of some row heads each."""
    cdef ptrdiff_t start = 0, batch = batch_head // p.n_row_head, n_row = rows_of(p, batch)
    while start < n_row:
        t[0] = task(kind, batch_head, n_task_head, start,
                    n_task_head * tile_cost(p, batch, start, min(task_rows, n_row - start)))
        t += 1
        start += task_rows
    return t


cdef inline void list_tasks(plan *work, const mha_problem *p, const mha_kernels *k, int n_thread) noexcept nogil:
    """Fill in the tasks: row head by row head where all are alike, otherwise the heaviest first."""
    cdef ptrdiff_t batch_head, batch, in_batch
    cdef task_kind kind
    cdef task *t = work.tasks
    cdef bint alike = not has_mask(p) and p.query_length == NULL and p.key_length == NULL and not has_window(p)
    work.n_partial = 0
    for batch_head in range(p.n_batch * p.n_row_head):
        batch, in_batch = batch_head // p.n_row_head, batch_head % p.n_row_head
        work.first_partial[batch_head] = work.n_partial
        if queries_of(p, batch) == 0:
            continue
        kind = kind_of(work, p, batch)
        if kind == DECODE:
            t = list_decode_tasks(t, p, batch_head)
            work.n_partial += splits_of(p, batch)
        elif kind == MATRIX:
            t = list_row_tasks(t, kind, p, batch_head, 1, work.n_matrix_sub * MHA_MATRIX_ROWS)
        elif in_batch % work.n_task_head == 0:
            t = list_row_tasks(t, kind, p, batch_head, min(work.n_task_head, p.n_row_head - in_batch),
                               work.n_sub * k.tile_rows)
    if not alike and (work.has_tiles or work.has_matrix):
        qsort(work.tasks, work.n_task, sizeof(task), heavy_first)
    # Several heads in a row, where there are many alike, so that a thread can fetch its next head ahead.
    work.n_together = 4 if alike and work.has_tiles and work.n_task >= 32 * n_thread else 1
