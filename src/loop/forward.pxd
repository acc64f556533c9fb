# Tiles of rows: sub-tiles of some row heads walk through the key blocks that any of them may see.
#
# What is done with a sub-tile and a block of its scores is a block_step: attention here, the weights in revisit.pxd,
# measurements in statistics.pxd.
from libc.string cimport memset

from contract.instruction_set cimport mha_kernels
from contract.problem cimport MHA_KEY, MHA_OUT, MHA_QUERY, MHA_VALUE, mha_problem
from contract.tiles cimport MHA_KEY_BLOCK, MHA_MASK_VISIBLE, mha_adjust, mha_finish, mha_prefetch
from loop.dropout cimport drops, set_counters
from loop.operands cimport has_mask, keys_of, next_run, queries_of, row_address, size_of
from loop.rows cimport describe_rows, finish_of
from loop.scores cimport is_excluding, keep_exclusions, mask_ahead, read_mask, set_adjustment
from loop.structs cimport MAX_SUB_TILES, MAX_TASK_HEADS, ceil_divide, key_block, padded, row_run, sub_tile, workspace
from loop.watch cimport may_go_on

cdef struct scored:
    # A block of scores in w.score: keys first ... first + n_key - 1, whose logits are adjusted as `how` says.
    ptrdiff_t first, n_key
    bint excludes                    # some of the keys for some row
    mha_adjust how

ctypedef void (*block_step)(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k, key_block *block,
                            const mha_prefetch *ahead_values, const mha_prefetch *ahead_keys) noexcept nogil


# ------------------------------------------------------------------------------------------------------------ key blocks

cdef inline row_run widened(void *tile, const mha_kernels *k, const row_run *rows, ptrdiff_t width) noexcept nogil:
    """Where rows will be once they are numbers of the arithmetic type."""
    return row_run(<const char *>tile, padded(k, width) * k.item_size, rows.n_row)


cdef inline void widen(row_run *wide, row_run *narrow, const mha_kernels *k, ptrdiff_t width) noexcept nogil:
    """Rows of a 16-bit type become numbers when the first sub-tile needs them, which a mask may prevent."""
    if narrow.data != NULL:
        k.widen(<void *>wide.data, wide.stride, narrow.data, narrow.stride, narrow.n_row, width)
        narrow.data = NULL


cdef inline mha_prefetch rows_ahead(const mha_problem *p, int operand, ptrdiff_t batch_head, ptrdiff_t first,
                                    ptrdiff_t n_row, ptrdiff_t width) noexcept nogil:
    """Rows of keys or values as something to fetch."""
    cdef row_run rows = next_run(p, operand, batch_head, first, n_row)
    return mha_prefetch(rows.data, rows.stride, rows.n_row, width * size_of(p.operand[operand].storage), NULL)


cdef inline void open_block(key_block *block, workspace *w, const mha_problem *p, const mha_kernels *k,
                            ptrdiff_t batch_head, ptrdiff_t in_task, ptrdiff_t first, ptrdiff_t last,
                            ptrdiff_t last_key) noexcept nogil:
    """Point to the keys and values of a block of the task's row head number in_task, and to what will be wanted next."""
    cdef ptrdiff_t n_key = last - first, n_next = min(MHA_KEY_BLOCK, last_key - last)
    cdef bint valued = p.operand[MHA_VALUE].data != NULL
    block.first, block.last, block.finite = first, last, -1
    block.key, block.value = next_run(p, MHA_KEY, batch_head, first, n_key), row_run(NULL, 0, 0)
    block.narrow_key = block.narrow_value = row_run(NULL, 0, 0)
    block.next_keys = rows_ahead(p, MHA_KEY, batch_head, last, n_next, p.head_width)
    block.next_values = mha_prefetch(NULL, 0, 0, 0, NULL)
    if valued:
        block.value = next_run(p, MHA_VALUE, batch_head, first, n_key)
        # The block's own values come in while its first scores are computed; once widened, the next ones.
        block.next_values = rows_ahead(p, MHA_VALUE, batch_head, first, n_key, p.value_width)
    if k.widen == NULL:
        return
    block.narrow_key, block.narrow_value = block.key, block.value
    block.key = widened(w.key_tile[in_task], k, &block.narrow_key, p.head_width)
    block.value = widened(w.value_tile[in_task], k, &block.narrow_value, p.value_width)
    if valued:
        block.next_values = rows_ahead(p, MHA_VALUE, batch_head, last, n_next, p.value_width)


# ---------------------------------------------------------------------------------------------- a sub-tile and its block

cdef inline scored score_block(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k, key_block *block,
                               const mha_prefetch *ahead) noexcept nogil:
    """Scores of one sub-tile against one key block, adjusted, in w.score, and their maxima in w.block_maximum.

    Without a key where no row sees any.
    """
    cdef scored scores
    cdef int holds
    scores.first = max(block.first, s.first_key)
    scores.n_key = min(block.last, s.last_key) - scores.first
    if scores.n_key <= 0:
        return scores
    holds = read_mask(s, w, p, k, k.mask.tile, k.tile_rows, scores.first, scores.n_key)
    if not holds & MHA_MASK_VISIBLE:
        scores.n_key = 0
        return scores
    widen(&block.key, &block.narrow_key, k, p.head_width)
    k.tile.scores(w.score, w.block_maximum, s.packed, s.n_row,
                  block.key.data + (scores.first - block.first) * block.key.stride, block.key.stride, scores.n_key,
                  p.head_width, ahead)
    scores.excludes = is_excluding(s, scores.first, scores.n_key, holds)
    if p.natural or scores.excludes:
        set_adjustment(&scores.how, s, w, p, k, scores.first, scores.n_key, holds)
        k.tile.adjust(w.score, w.block_maximum, s.n_row, scores.n_key, &scores.how)
    return scores


cdef inline void add_values(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k, key_block *block,
                            scored *scores, const mha_prefetch *ahead) noexcept nogil:
    """The sum of a sub-tile takes in the values of a block, given their weights in w.score."""
    cdef const char *value
    widen(&block.value, &block.narrow_value, k, p.value_width)
    value = block.value.data + (scores.first - block.first) * block.value.stride
    # A weight of 0 does not silence an Inf or NaN value.
    if scores.excludes and block.finite < 0:
        block.finite = k.tile.all_finite(block.value.data, block.value.stride, block.last - block.first, p.value_width)
    if scores.excludes and not block.finite:
        memset(w.visible, 0, scores.n_key * k.tile_rows * k.item_size)
        keep_exclusions(&scores.how)
        k.tile.adjust(w.visible, w.block_maximum, s.n_row, scores.n_key, &scores.how)
        k.tile.values_guarded(s.sum, w.rescale, w.score, w.visible, s.n_row, value, block.value.stride, scores.n_key,
                              p.value_width)
    else:
        k.tile.values(s.sum, w.rescale, w.score, s.n_row, value, block.value.stride, scores.n_key, p.value_width, ahead)


cdef inline void weigh_block(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k, key_block *block,
                             const mha_prefetch *ahead_values, const mha_prefetch *ahead_keys) noexcept nogil:
    """A step of the online softmax alone."""
    cdef scored scores = score_block(s, w, p, k, block, ahead_values)
    if scores.n_key > 0:
        k.tile.softmax(w.score, w.block_maximum, s.maximum, s.total, w.rescale, s.n_row, scores.n_key, p.exp_scale)


cdef inline void attend_block(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k, key_block *block,
                              const mha_prefetch *ahead_values, const mha_prefetch *ahead_keys) noexcept nogil:
    """One sub-tile against one key block: scores, mask, a step of the online softmax, values."""
    cdef scored scores = score_block(s, w, p, k, block, ahead_values)
    if scores.n_key > 0:
        k.tile.softmax(w.score, w.block_maximum, s.maximum, s.total, w.rescale, s.n_row, scores.n_key, p.exp_scale)
        if drops(p):
            k.dropout.drop_tile(w.score, s.n_row, scores.first, scores.n_key, &s.drop)
        add_values(s, w, p, k, block, &scores, ahead_keys)


# -------------------------------------------------------------------------------------------------------------- the walk

cdef struct task_rows:
    # The rows of a task: its sub-tiles are w.sub[0 ... n_sub - 1], the row heads innermost.
    ptrdiff_t batch_head, n_task_head, n_sub
    ptrdiff_t first_key, last_key    # that some of them see
    ptrdiff_t next_batch_head        # the row head of the thread's next task, if it is known; else -1


cdef inline task_rows begin_rows(workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head,
                                 ptrdiff_t n_task_head, ptrdiff_t row, ptrdiff_t n_row) noexcept nogil:
    """Describe, pack and reset sub-tiles for rows row ... row + n_row - 1 of some row heads."""
    cdef task_rows rows = task_rows(batch_head, n_task_head, n_task_head * ceil_divide(n_row, k.tile_rows), p.n_key, 0, -1)
    cdef ptrdiff_t i, start
    cdef sub_tile *s
    for i in range(rows.n_sub):
        s, start = &w.sub[i], i // n_task_head * k.tile_rows
        describe_rows(s, p, batch_head + i % n_task_head, row + start, min(k.tile_rows, n_row - start))
        k.tile.pack_query(s.packed, s.query, s.n_row, p.head_width, p.query_scale)
        k.tile.begin(s.sum, s.maximum, s.total, s.n_row, p.value_width)
        if drops(p):
            set_counters(s, p, row + start)
        rows.first_key, rows.last_key = min(rows.first_key, s.first_key), max(rows.last_key, s.last_key)
    return rows


cdef inline mha_prefetch share_of_queries(const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head, ptrdiff_t i,
                                          ptrdiff_t n, const mha_prefetch *then) noexcept nogil:
    """The i-th of n parts of the queries with which the rows of a row head begin."""
    cdef ptrdiff_t batch = batch_head // p.n_row_head, n_query = min(queries_of(p, batch), MAX_SUB_TILES * k.tile_rows)
    cdef ptrdiff_t first = n_query * i // n
    return mha_prefetch(row_address(p, MHA_QUERY, batch, batch_head % p.n_row_head, first),
                        p.operand[MHA_QUERY].row_stride, n_query * (i + 1) // n - first, p.head_width * k.stored_size, then)


cdef inline void step_sub_tiles(workspace *w, const mha_problem *p, const mha_kernels *k, const task_rows *rows,
                                key_block *block, ptrdiff_t next_last, bint is_last, block_step step) noexcept nogil:
    """All sub-tiles of a task against a key block of each row head; the next block ends before key next_last.

    While a sub-tile is worked on, what comes next is fetched: in the first rows the values, in the last ones the next
    keys, and before other rows begin their mask.  In the last block also what the next task begins with, and the
    addresses of the results.
    """
    cdef ptrdiff_t i
    cdef mha_prefetch mask, results, next_queries
    cdef const mha_prefetch *in_scores
    cdef const mha_prefetch *in_values
    cdef key_block *b
    for i in range(rows.n_sub):
        b = &block[i % rows.n_task_head]
        in_scores = &b.next_values if i < rows.n_task_head else NULL
        in_values = &b.next_keys if i >= rows.n_sub - rows.n_task_head else NULL
        if has_mask(p) and i % rows.n_task_head == rows.n_task_head - 1:
            if i + 1 < rows.n_sub:
                mask = mask_ahead(&w.sub[i + 1], p, b.first, b.last)
                in_values = &mask
            elif i >= rows.n_task_head:
                mask = mask_ahead(&w.sub[0], p, b.last, next_last)
                in_scores = &mask
        if is_last and rows.next_batch_head >= 0 and p.packed_heads == 1:
            results = mha_prefetch(w.sub[i].out[0], p.operand[MHA_OUT].row_stride, w.sub[i].n_row,
                                   p.value_width * k.stored_size, in_scores)
            next_queries = share_of_queries(p, k, rows.next_batch_head, i, rows.n_sub, in_values)
            in_scores, in_values = &results, &next_queries
        step(&w.sub[i], w, p, k, b, in_scores, in_values)


cdef inline void walk_blocks(workspace *w, const mha_problem *p, const mha_kernels *k, const task_rows *rows,
                             block_step step) noexcept nogil:
    """Take the step with every sub-tile and key block of the fixed grid, block by block."""
    cdef ptrdiff_t i, start = rows.first_key // MHA_KEY_BLOCK * MHA_KEY_BLOCK
    cdef key_block block[MAX_TASK_HEADS]
    cdef bint is_last
    while start < rows.last_key and may_go_on(w.look, w.thread, rows.n_sub * k.tile_rows * MHA_KEY_BLOCK):
        for i in range(rows.n_task_head):
            open_block(&block[i], w, p, k, rows.batch_head + i, i, max(start, rows.first_key),
                       min(start + MHA_KEY_BLOCK, rows.last_key), rows.last_key)
        is_last = block[0].last == rows.last_key
        if is_last and rows.next_batch_head >= 0:
            block[0].next_keys = rows_ahead(p, MHA_KEY, rows.next_batch_head, 0, min(MHA_KEY_BLOCK, p.n_key), p.head_width)
        step_sub_tiles(w, p, k, rows, block, min(start + 2 * MHA_KEY_BLOCK, rows.last_key), is_last, step)
        start += MHA_KEY_BLOCK


cdef inline void attend_rows(workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head,
                             ptrdiff_t n_task_head, ptrdiff_t row, ptrdiff_t n_row,
                             ptrdiff_t next_batch_head) noexcept nogil:
    """Rows row ... row + n_row - 1 of some row heads.  What next_batch_head, if not -1, begins with is fetched last."""
    cdef task_rows rows = begin_rows(w, p, k, batch_head, n_task_head, row, n_row)
    cdef ptrdiff_t i
    cdef mha_finish how
    cdef sub_tile *s
    rows.next_batch_head = next_batch_head
    walk_blocks(w, p, k, &rows, attend_block)
    for i in range(rows.n_sub):
        s = &w.sub[i]
        how = finish_of(s, p, 0)
        s.not_finite = k.tile.finish(s.out, s.sum, s.maximum, s.total, s.n_row, p.value_width, &how)
