# Tiles of rows on the matrix unit: the same walk as in forward.pxd, but what it does with a sub-tile and a key block is
# spread over four steps of a pipeline (kernels/matrix_tile.h), so that the matrix unit and the vector units work at the
# same time.
from libc.string cimport memset

from contract.instruction_set cimport mha_kernels
from contract.matrix cimport (
    MHA_MATRIX_CHUNK, MHA_MATRIX_PANEL, MHA_MATRIX_PIECE, MHA_MATRIX_ROWS, mha_matrix_item, mha_matrix_kernels,
)
from contract.problem cimport MHA_KEY, MHA_VALUE, mha_problem
from contract.tiles cimport MHA_MASK_VISIBLE, mha_adjust, mha_finish
from loop.operands cimport has_mask, keys_of, next_run
from loop.rows cimport describe_rows, finish_of
from loop.scores cimport is_excluding, keep_exclusions, read_mask, set_adjustment
from loop.structs cimport N_ITEM, ceil_divide, matrix_block, matrix_row_size, plan, row_run, sub_tile, workspace
from threads cimport mha_is_raised


# ---------------------------------------------------------------------------------------------------------- the pipeline

cdef inline void begin_pipeline(workspace *w) noexcept nogil:
    w.pipe.pending = w.pipe.unused
    w.n_item = 0
    w.last_item[0] = w.last_item[1] = -3  # long ago


cdef inline void advance(workspace *w, const mha_matrix_kernels *m, mha_matrix_item *item) noexcept nogil:
    """Let an item (NULL: none) enter the pipeline and the others move on."""
    w.pipe.in_scores = item
    m.step(&w.pipe)
    w.pipe.in_sum, w.pipe.in_values, w.pipe.in_softmax = w.pipe.in_values, w.pipe.in_softmax, item


cdef inline void drain(workspace *w, const mha_matrix_kernels *m) noexcept nogil:
    """Finish all that is in the pipeline."""
    while w.pipe.in_sum != NULL or w.pipe.in_values != NULL or w.pipe.in_softmax != NULL:
        advance(w, m, NULL)
    w.last_item[0] = w.last_item[1] = w.n_item - 3


# -------------------------------------------------------------------------------------------------------------- the walk

cdef inline void open_matrix_block(matrix_block *block, workspace *w, const mha_problem *p, const plan *work,
                                   ptrdiff_t batch_head, ptrdiff_t first) noexcept nogil:
    """Pack the keys and values of a block."""
    cdef ptrdiff_t i = first // work.matrix.block_keys % 2
    cdef row_run key, value
    if w.n_item < w.last_item[i] + 3:  # the values there are still wanted
        drain(w, work.matrix)
    block.first, block.slot = first, i
    block.n_key = min(work.matrix.block_keys, keys_of(p, batch_head // p.n_row_head) - first)
    block.key, block.value = w.block[i], w.block[i] + work.key_block_size
    key = next_run(p, MHA_KEY, batch_head, first, block.n_key)
    value = next_run(p, MHA_VALUE, batch_head, first, block.n_key)
    block.packed_keys = work.matrix.pack_keys(<void *>block.key, key.data, key.stride, block.n_key, p.head_width)
    block.packed_values = work.matrix.pack_values(<void *>block.value, value.data, value.stride, block.n_key, p.value_width)


cdef inline bint may_be_short(const sub_tile *s, const mha_problem *p, const mha_matrix_kernels *m,
                              const matrix_block *block, ptrdiff_t panel, ptrdiff_t end) noexcept nogil:
    """Whether the scores of some panels of a block are small enough (Cauchy-Schwarz inequality)."""
    cdef double most = m.most_short / p.exp_scale
    cdef ptrdiff_t i
    if p.natural or m.most_short == 0:
        return False
    for i in range(panel, end):
        if not <double>s.packing.square_norm[0] * block.packed_keys.square_norm[i] < most * most:
            return False
    return True


cdef inline void add_outliers(sub_tile *s, workspace *w, const mha_problem *p, const mha_matrix_kernels *m,
                              const mha_matrix_item *item, mha_adjust *how, ptrdiff_t first, ptrdiff_t n_key,
                              ptrdiff_t n_real) noexcept nogil:
    """What packing left out of the values, once the product of the others is in the sum."""
    cdef row_run value = next_run(p, MHA_VALUE, s.batch_head, first, n_real)
    drain(w, m)
    memset(w.visible, 0, n_key * MHA_MATRIX_ROWS * sizeof(float))
    keep_exclusions(how)
    m.adjust(w.visible, w.block_maximum, s.n_row, n_key, how)
    m.add_outliers(<float *>s.sum, item.weight, <const float *>w.visible, value.data, value.stride, n_real, p.value_width)


cdef inline void multiply_piece(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k, const plan *work,
                                const matrix_block *block, ptrdiff_t first_panel, ptrdiff_t end_panel) noexcept nogil:
    """Let one sub-tile and some panels of a key block enter the pipeline."""
    cdef const mha_matrix_kernels *m = work.matrix
    cdef ptrdiff_t first = block.first + first_panel * MHA_MATRIX_PANEL
    cdef ptrdiff_t n_key = (end_panel - first_panel) * MHA_MATRIX_PANEL  # zeros at the end included
    cdef ptrdiff_t n_real = min(n_key, block.first + block.n_key - first)
    cdef bint repaired = s.packing.has_outliers or block.packed_keys.has_outliers
    cdef int holds = read_mask(s, w, p, k, m.mask_tile, MHA_MATRIX_ROWS, first, n_real)
    cdef mha_matrix_item *item = &w.item[w.n_item % N_ITEM]
    cdef mha_adjust how
    cdef row_run key
    if not holds & MHA_MASK_VISIBLE:
        return
    set_adjustment(&how, s, w, p, k, first, n_key, holds)
    item.query, item.n_row, item.n_panel = <const char *>s.packed, s.n_row, end_panel - first_panel
    item.key = block.key + first_panel * MHA_MATRIX_PANEL * matrix_row_size(m, p.head_width)
    item.value = block.value + first_panel * MHA_MATRIX_PANEL * MHA_MATRIX_CHUNK * 2 * m.n_term
    item.sum, item.maximum, item.total = <float *>s.sum, <float *>s.maximum, <float *>s.total
    item.adjusted = p.natural or repaired or is_excluding(s, first, n_key, holds)
    # Only what is visible to all rows may decide this, or an excluded key would show in the last bit.
    item.short_scores = not item.adjusted and may_be_short(s, p, m, block, first_panel, end_panel)
    w.last_item[block.slot] = w.n_item
    w.n_item += 1
    advance(w, m, item)
    if repaired:
        key = next_run(p, MHA_KEY, s.batch_head, first, n_real)
        m.repair_scores(item.score, s.query, s.n_row, p.query_scale, key.data, key.stride, n_real, p.head_width)
    if item.adjusted:
        m.adjust(item.score, item.block_maximum, s.n_row, n_key, &how)
    if block.packed_values.has_outliers:
        add_outliers(s, w, p, m, item, &how, first, n_key, n_real)


cdef inline void multiply_block(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k, const plan *work,
                                const matrix_block *block) noexcept nogil:
    """Let one sub-tile and what it sees of a key block enter the pipeline.

    In pieces, so that only keys that some rows do not see take the way for such.
    """
    cdef ptrdiff_t panel = max(s.first_key - block.first, 0) // MHA_MATRIX_PANEL, end_piece
    cdef ptrdiff_t end = ceil_divide(min(s.last_key - block.first, block.n_key), MHA_MATRIX_PANEL)
    cdef ptrdiff_t first_seen = ceil_divide(max(s.all_first - block.first, 0), MHA_MATRIX_PANEL)
    cdef ptrdiff_t end_seen = min(max(s.all_last - block.first, 0) // MHA_MATRIX_PANEL, end)
    while panel < end:
        end_piece = panel + MHA_MATRIX_PIECE // MHA_MATRIX_PANEL
        if first_seen <= panel < end_seen:
            if has_mask(p) or not may_be_short(s, p, work.matrix, block, panel, end_seen):
                end_piece = min(end_piece, end_seen)
            else:
                end_piece = end_seen
        elif panel < first_seen < end_seen:
            end_piece = min(end_piece, first_seen)
        end_piece = min(end_piece, end)
        multiply_piece(s, w, p, k, work, block, panel, end_piece)
        panel = end_piece


cdef inline void attend_matrix(workspace *w, const mha_problem *p, const mha_kernels *k, const plan *work,
                               ptrdiff_t batch_head, ptrdiff_t row, ptrdiff_t n_row) noexcept nogil:
    """Rows row ... row + n_row - 1 of a row head."""
    cdef const mha_matrix_kernels *m = work.matrix
    cdef ptrdiff_t i, start, n_sub = ceil_divide(n_row, MHA_MATRIX_ROWS), first_key = p.n_key, last_key = 0
    cdef mha_finish how
    cdef matrix_block block
    cdef sub_tile *s
    for i in range(n_sub):
        s = &w.sub[i]
        describe_rows(s, p, batch_head, row + i * MHA_MATRIX_ROWS, min(MHA_MATRIX_ROWS, n_row - i * MHA_MATRIX_ROWS))
        s.packing = m.pack_queries(s.packed, s.query, s.n_row, p.head_width, p.query_scale)
        m.begin(s.sum, s.maximum, s.total, MHA_MATRIX_ROWS, w.pipe.value_chunks * MHA_MATRIX_CHUNK)
        first_key, last_key = min(first_key, s.first_key), max(last_key, s.last_key)
    m.acquire()
    begin_pipeline(w)
    start = first_key // m.block_keys * m.block_keys
    # Its registers are in use: no other code may run here, a handler of signals neither.
    while start < last_key and not (w.look != NULL and mha_is_raised(&w.look.stopped)):
        open_matrix_block(&block, w, p, work, batch_head, start)
        for i in range(n_sub):
            multiply_block(&w.sub[i], w, p, k, work, &block)
        start += m.block_keys
    drain(w, m)
    m.release()
    for i in range(n_sub):
        s = &w.sub[i]
        how = finish_of(s, p, 0)
        s.not_finite = m.finish(s.out, s.sum, s.maximum, s.total, s.n_row, p.value_width, &how)
