# Rows whose sum of weights times values left the range of its type, although their mean need not: once more, with weights
# so small that it cannot.
from libc.stdint cimport uint64_t
from libc.string cimport memset

from contract.instruction_set cimport mha_kernels
from contract.problem cimport mha_problem
from contract.tiles cimport mha_adjust, mha_finish, mha_prefetch
from loop.dropout cimport drops
from loop.forward cimport add_values, begin_rows, score_block, scored, task_rows, walk_blocks
from loop.rows cimport finish_of
from loop.structs cimport MAX_MATRIX_SUB_TILES, MAX_ROWS, ceil_divide, key_block, sub_tile, workspace


cdef inline double share_of_a_key(const mha_problem *p) noexcept nogil:
    """A power of two, so that no bit is lost, that as many keys as there are cannot add up to more than 1."""
    cdef double share = 1
    while share * p.n_key > 1:
        share /= 2
    return share


cdef inline void attend_block_small(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k,
                                    key_block *block, const mha_prefetch *ahead_values,
                                    const mha_prefetch *ahead_keys) noexcept nogil:
    """As attend_block(), with small weights."""
    cdef scored scores = score_block(s, w, p, k, block, ahead_values)
    cdef mha_adjust how
    if scores.n_key <= 0:
        return
    k.tile.softmax(w.score, w.block_maximum, s.maximum, s.total, w.rescale, s.n_row, scores.n_key, p.exp_scale)
    if drops(p):
        k.dropout.drop_tile(w.score, s.n_row, scores.first, scores.n_key, &s.drop)
    memset(&how, 0, sizeof(how))
    how.score_scale = share_of_a_key(p)
    k.tile.adjust(w.score, w.block_maximum, s.n_row, scores.n_key, &how)
    add_values(s, w, p, k, block, &scores, ahead_keys)


cdef inline void attend_again(workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head,
                              ptrdiff_t row, ptrdiff_t n_row) noexcept nogil:
    """Up to a sub-tile of rows; what the workspace held of others is lost.

    Only what was not finite is replaced: a large value has no influence on other features.
    """
    cdef task_rows rows = begin_rows(w, p, k, batch_head, 1, row, n_row)
    cdef ptrdiff_t r, n_byte = p.value_width * k.stored_size
    cdef sub_tile *s = &w.sub[0]
    cdef mha_finish how
    cdef char *out[MAX_ROWS]
    walk_blocks(w, p, k, &rows, attend_block_small)
    for r in range(n_row):
        out[r] = <char *>w.again + r * n_byte
    how = finish_of(s, p, 0)
    how.out_scale, how.lse = 1 / share_of_a_key(p), NULL
    k.tile.finish(out, s.sum, s.maximum, s.total, s.n_row, p.value_width, &how)
    for r in range(n_row):
        k.tile.replace_not_finite(s.out[r], out[r], p.value_width)


cdef inline void mend_rows(workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head, ptrdiff_t row,
                           ptrdiff_t n_row, uint64_t wanted) noexcept nogil:
    """Those of n_row rows whose bits are set, in runs of a sub-tile at most: the others keep their results."""
    cdef ptrdiff_t first = 0, last
    while first < n_row:
        last = first
        while last < min(n_row, first + k.tile_rows) and wanted >> last & 1:
            last += 1
        if last > first:
            attend_again(w, p, k, batch_head, row + first, last - first)
        first = max(last, first + 1)


cdef inline void mend_sub_tiles(workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head,
                                ptrdiff_t n_task_head, ptrdiff_t row, ptrdiff_t n_row, ptrdiff_t sub_rows) noexcept nogil:
    """Mend what is not finite in the sub-tiles of a task, of sub_rows rows each, that have just been finished."""
    cdef uint64_t wanted[MAX_MATRIX_SUB_TILES]
    cdef ptrdiff_t i, start, n_sub = n_task_head * ceil_divide(n_row, sub_rows)
    cdef bint needed = False
    for i in range(n_sub):
        wanted[i] = w.sub[i].not_finite
        needed = needed or wanted[i] != 0
    for i in range(n_sub if needed else 0):
        start = i // n_task_head * sub_rows
        mend_rows(w, p, k, batch_head + i % n_task_head, row + start, min(sub_rows, n_row - start), wanted[i])
