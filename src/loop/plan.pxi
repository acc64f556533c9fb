# The plan of a call: its tasks in the order in which they are taken, and the buffer of partial results.

cdef enum task_kind:
    DECODE
    TILES
    MATRIX

cdef struct task:
    ptrdiff_t batch_head, n_task_head           # n_task_head kv heads of a batch entry
    ptrdiff_t start                  # tiles: first row; few rows: number of the key split
    ptrdiff_t cost                   # products of a row and a key, about
    task_kind kind

cdef struct plan:
    task *tasks
    ptrdiff_t n_task
    bint has_tiles, has_decode, has_matrix, has_splits  # splits: partial results of more than one task to be joined
    ptrdiff_t n_sub                  # sub-tiles of a task of row tiles, for each batch_head
    ptrdiff_t n_task_head                 # pairs of such a task, at most
    int n_together                   # neighbouring tasks that a thread takes at once
    ptrdiff_t most_splits
    # partial results of the few-rows path: part i of a batch_head is number first_partial[batch_head] + i
    ptrdiff_t *first_partial
    ptrdiff_t n_partial, partial_size, maximum_at, total_at
    char *partials
    # the matrix unit, if there is one and this call may use it
    const mha_matrix *matrix
    ptrdiff_t min_rows, min_keys     # of a batch_head that uses it
    ptrdiff_t n_matrix_sub           # sub-tiles of its tasks
    ptrdiff_t key_block_size, value_block_size


cdef inline ptrdiff_t ceil_divide(ptrdiff_t a, ptrdiff_t b) noexcept nogil:
    return (a + b - 1) // b


cdef inline ptrdiff_t splits_of(const mha_problem *p, ptrdiff_t batch) noexcept nogil:
    return max(ceil_divide(keys_of(p, batch), MHA_KEY_SPLIT), 1)


cdef inline bint takes_decode(const mha_problem *p, ptrdiff_t n_row) noexcept nogil:
    return n_row <= MHA_MAX_DECODE_ROWS and p.mode == MHA_ATTENTION


cdef inline task_kind kind_of(const plan *work, const mha_problem *p, ptrdiff_t batch) noexcept nogil:
    """Which path the rows of a batch entry take; sizes alone decide, so a sequence gives the same bits in any batch."""
    cdef ptrdiff_t n_row = p.group_size * queries_of(p, batch)
    if takes_decode(p, n_row):
        return DECODE
    if work.matrix != NULL and n_row >= work.min_rows and keys_of(p, batch) >= work.min_keys:
        return MATRIX
    return TILES


cdef ptrdiff_t tile_cost(const mha_problem *p, ptrdiff_t batch, ptrdiff_t row, ptrdiff_t n_row) noexcept nogil:
    """Rows times the keys between the first that the first row sees and the last that the last row sees."""
    cdef ptrdiff_t first, last, unused
    visible_range(p, position_of(p, batch, row // p.group_size), keys_of(p, batch), &first, &unused)
    visible_range(p, position_of(p, batch, (row + n_row - 1) // p.group_size), keys_of(p, batch), &unused, &last)
    return n_row * max(last - first, 0)


cdef int heavy_first(const void *a, const void *b) noexcept nogil:
    cdef const task *x = <const task *>a
    cdef const task *y = <const task *>b
    if x.cost != y.cost:
        return 1 if x.cost < y.cost else -1
    if x.start != y.start:  # a mask that heads share is read by one head after the other while it is near
        return 1 if x.start > y.start else -1
    return (x.batch_head > y.batch_head) - (x.batch_head < y.batch_head)


cdef void size_tasks(plan *work, const mha_problem *p, const mha_kernels *k) noexcept nogil:
    """Set how many pairs and sub-tiles make a task of row tiles, at most.

    Sub-tiles of one batch_head share its key blocks while they are in the cache.  Where heads share a mask with a row per
    query, each piece of it is read and turned into numbers once for several heads (bench.compare --cases float_mask:
    4 pairs of 2 sub-tiles are 15% ahead of 1 of 4; 2 of 4 and 8 of 2 are behind them).
    """
    cdef ptrdiff_t sub_tile_size = k.tile_rows * (p.head_width + p.value_width) * k.item_size
    cdef const mha_operand *mask = &p.operand[MHA_MASK]
    cdef bint shared = p.mask_type != MHA_NO_MASK and mask.head_stride == 0 and mask.row_stride != 0
    work.n_task_head = min(p.n_kv_head, MAX_TASK_HEADS) if shared else 1
    work.n_sub = MAX_SUB_TILES // work.n_task_head if shared else 4
    # A task stays in the cache.
    while work.n_sub * work.n_task_head > 1 and work.n_sub * work.n_task_head * sub_tile_size > 1 << 20:
        split_tasks(work)


cdef void split_tasks(plan *work) noexcept nogil:
    if work.n_sub > 1:
        work.n_sub //= 2
    else:
        work.n_task_head //= 2


cdef void count_tasks(plan *work, const mha_problem *p, const mha_kernels *k, int n_thread) noexcept nogil:
    """How many tasks and partial results there are, and how large the tasks of each kind are."""
    cdef ptrdiff_t batch, n_row, most_decode_rows = 0, n_tile_task
    cdef task_kind kind
    size_tasks(work, p, k)
    while True:
        n_tile_task = work.n_partial = 0
        for batch in range(p.n_batch):
            n_row = p.group_size * queries_of(p, batch)
            if n_row == 0:
                continue
            kind = kind_of(work, p, batch)
            if kind == DECODE:
                most_decode_rows = max(most_decode_rows, n_row)
                work.most_splits = max(work.most_splits, splits_of(p, batch))
                work.n_partial += p.n_kv_head * splits_of(p, batch)
            elif kind == MATRIX:
                work.has_matrix = True
            else:
                work.has_tiles = True
                n_tile_task += ceil_divide(p.n_kv_head, work.n_task_head) * ceil_divide(n_row, work.n_sub * k.tile_rows)
        # Few tasks become more, so that every thread gets some.
        if work.n_sub * work.n_task_head == 1 or n_tile_task + work.n_partial >= 4 * n_thread or not work.has_tiles:
            break
        split_tasks(work)
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


cdef void list_tasks(plan *work, const mha_problem *p, const mha_kernels *k, int n_thread) noexcept nogil:
    """Fill in the tasks: batch_head by batch_head where all are alike, otherwise the heaviest first."""
    cdef ptrdiff_t batch_head, n_task_head, batch, n_row, start, task_rows
    cdef task_kind kind
    cdef task *t = work.tasks
    cdef bint alike = (p.mask_type == MHA_NO_MASK and p.query_length == NULL and p.key_length == NULL
                       and p.window_left >= UNBOUNDED and p.window_right >= UNBOUNDED)
    work.n_partial = 0
    for batch_head in range(p.n_batch * p.n_kv_head):
        batch = batch_head // p.n_kv_head
        n_row = p.group_size * queries_of(p, batch)
        work.first_partial[batch_head] = work.n_partial
        if n_row == 0:
            continue
        kind = kind_of(work, p, batch)
        if kind == DECODE:
            for start in range(splits_of(p, batch)):
                t[0] = task(batch_head, 1, start, n_row * min(keys_of(p, batch) - start * MHA_KEY_SPLIT, MHA_KEY_SPLIT), kind)
                t += 1
            work.n_partial += splits_of(p, batch)
            continue
        start, task_rows, n_task_head = 0, work.n_matrix_sub * MHA_MATRIX_ROWS, 1
        if kind == TILES:
            task_rows, n_task_head = work.n_sub * k.tile_rows, min(work.n_task_head, p.n_kv_head - batch_head % p.n_kv_head)
            if batch_head % p.n_kv_head % work.n_task_head != 0:  # in a task already
                continue
        while start < n_row:
            t[0] = task(batch_head, n_task_head, start, n_task_head * tile_cost(p, batch, start, min(task_rows, n_row - start)), kind)
            t += 1
            start += task_rows
    if not alike and (work.has_tiles or work.has_matrix):
        qsort(work.tasks, work.n_task, sizeof(task), heavy_first)
    # Several heads in a row, where there are many alike, so that a thread can fetch its next head ahead.
    work.n_together = 4 if alike and work.has_tiles and work.n_task >= 32 * n_thread else 1
