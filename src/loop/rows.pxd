# A sub-tile's rows: what describes them, and how they are finished.
from libc.stdint cimport int64_t

from contract.problem cimport MHA_LSE, MHA_MASK, MHA_OUT, MHA_QUERY, mha_problem
from contract.tiles cimport mha_finish
from loop.operands cimport has_lse, has_mask, point_to_rows
from loop.structs cimport sub_tile
from loop.visibility cimport set_visible_keys


cdef inline void set_head_numbers(sub_tile *s, const mha_problem *p, ptrdiff_t batch_head, ptrdiff_t row,
                                  ptrdiff_t n_row) noexcept nogil:
    """Slope, sink and gate of each row's head."""
    cdef ptrdiff_t batch = batch_head // p.n_row_head, r, head
    for r in range(n_row):
        head = batch_head % p.n_row_head * p.packed_heads + (row + r) % p.packed_heads
        if p.alibi_slope != NULL:
            s.slope[r] = p.alibi_slope[batch * p.n_head + head]
        if p.sink != NULL:
            s.sink[r] = p.sink[head]
        if p.gate != NULL:
            s.gate[r] = p.gate[batch * p.n_head + head]


cdef inline void describe_rows(sub_tile *s, const mha_problem *p, ptrdiff_t batch_head, ptrdiff_t row,
                               ptrdiff_t n_row) noexcept nogil:
    """Fill in where rows row ... row + n_row - 1 of a row head lie and which keys they may see."""
    cdef ptrdiff_t r
    cdef bint used = has_lse(p) or p.gate == NULL
    s.batch_head, s.n_row = batch_head, n_row
    point_to_rows(s.query, p, MHA_QUERY, batch_head, row, n_row, p.query_index)
    point_to_rows(<const char **>s.out, p, MHA_OUT, batch_head, row, n_row, NULL)
    if has_lse(p):
        point_to_rows(<const char **>s.lse, p, MHA_LSE, batch_head, row, n_row, NULL)
    s.same_mask = True
    if has_mask(p):
        point_to_rows(s.mask, p, MHA_MASK, batch_head, row, n_row, p.query_index)
        for r in range(n_row):
            s.same_mask = s.same_mask and s.mask[r] == s.mask[0]
    if p.alibi_slope != NULL or p.sink != NULL or p.gate != NULL:
        set_head_numbers(s, p, batch_head, row, n_row)
    set_visible_keys(s, p, batch_head // p.n_row_head, row, n_row)
    for r in range(n_row if not used else 0):
        used = used or s.gate[r] != 0
    if not used:  # every head here is switched off: nothing to compute, the output is 0
        s.first_key = s.last_key = 0


cdef inline mha_finish finish_of(const sub_tile *s, const mha_problem *p, ptrdiff_t row) noexcept nogil:
    """How row `row` and those behind it are finished."""
    cdef mha_finish how
    how.lse_scale, how.out_scale = p.lse_scale, 1
    how.sink = &s.sink[row] if p.sink != NULL else NULL
    how.gate = &s.gate[row] if p.gate != NULL else NULL
    how.lse = <char **>&s.lse[row] if has_lse(p) else NULL
    return how
