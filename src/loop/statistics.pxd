# Measurements of the weights instead of weights times values.  Every query head is a row head of its own here, so that a
# lane is a query of one head.
from libc.math cimport INFINITY
from libc.stdint cimport int64_t
from libc.string cimport memset

from contract.instruction_set cimport mha_kernels
from contract.problem cimport mha_problem
from contract.statistics cimport mha_measured_block
from contract.tiles cimport mha_finish, mha_prefetch
from loop.forward cimport begin_rows, score_block, scored, task_rows, walk_blocks
from loop.rows cimport finish_of
from loop.structs cimport get, key_block, put, sub_tile, workspace
from loop.visibility cimport set_distances


cdef inline void begin_sums(sub_tile *s, const mha_problem *p, const mha_kernels *k) noexcept nogil:
    cdef ptrdiff_t i
    memset(s.sums.moment, 0, k.tile_rows * k.item_size)
    memset(s.sums.far, 0, k.tile_rows * k.item_size)
    memset(s.sums.set, 0, p.asked.n_set * k.tile_rows * k.item_size)
    for i in range(k.tile_rows):
        put(k, s.sums.best, i, -INFINITY)
        put(k, s.sums.confident, i, -INFINITY)
        s.best_key[i] = -1
    for i in range(p.asked.n_offset * s.n_row):
        s.offset_score[i] = -INFINITY


cdef inline void measure_block(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k, key_block *block,
                               const mha_prefetch *ahead_values, const mha_prefetch *ahead_keys) noexcept nogil:
    """Take a block of scores into the sums."""
    cdef scored scores = score_block(s, w, p, k, block, ahead_values)
    cdef ptrdiff_t batch = s.batch_head // p.n_row_head, r, i
    cdef int64_t key
    cdef mha_measured_block measured
    if scores.n_key <= 0:
        return
    for i in range(p.asked.n_offset):
        for r in range(s.n_row):
            key = s.position[r] + p.asked.offset[i]
            if scores.first <= key < scores.first + scores.n_key:
                s.offset_score[r * p.asked.n_offset + i] = get(k, w.score, (key - scores.first) * k.tile_rows + r)
    set_distances(s, w, k, scores.first)
    memset(&measured, 0, sizeof(measured))
    measured.first, measured.n_key = scores.first, scores.n_key
    measured.distance, measured.exp_scale = w.distance, p.exp_scale
    if p.asked.ignored != NULL:
        measured.ignored = p.asked.ignored + batch * p.n_key + scores.first
    if p.asked.key_set != NULL:
        measured.key_set = p.asked.key_set + batch * p.asked.n_set * p.n_key + scores.first
        measured.set_stride = p.n_key
    k.statistics.measure(&s.sums, w.score, w.block_maximum, s.n_row, &measured)


cdef inline void measure_rows(workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head,
                              ptrdiff_t n_task_head, ptrdiff_t row, ptrdiff_t n_row) noexcept nogil:
    """A row of measurements for each of rows row ... row + n_row - 1 of some row heads."""
    cdef task_rows rows = begin_rows(w, p, k, batch_head, n_task_head, row, n_row)
    cdef ptrdiff_t i, r
    cdef mha_finish how
    cdef sub_tile *s
    for i in range(rows.n_sub):
        begin_sums(&w.sub[i], p, k)
    walk_blocks(w, p, k, &rows, measure_block)
    for i in range(rows.n_sub):
        s = &w.sub[i]
        how = finish_of(s, p, 0)
        for r in range(s.n_row):
            k.statistics.finish(<double *>s.out[r], &s.sums, r, p.exp_scale, &how,
                                s.offset_score + r * p.asked.n_offset, p.asked.n_offset)
