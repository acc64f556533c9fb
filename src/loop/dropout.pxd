# By which numbers dropout knows the rows of a sub-tile.
from libc.stdint cimport uint32_t

from contract.problem cimport mha_problem
from loop.structs cimport sub_tile


cdef inline bint drops(const mha_problem *p) noexcept nogil:
    return p.dropped.factor != 0


cdef inline void set_counters(sub_tile *s, const mha_problem *p, ptrdiff_t row) noexcept nogil:
    """Rows `row` and on of the sub-tile's row head: their queries, and their heads counted on through the batch."""
    cdef ptrdiff_t r, first_head = s.batch_head * p.packed_heads
    s.drop.rule = p.dropped
    for r in range(s.n_row):
        s.drop.query[r] = <uint32_t>((row + r) // p.packed_heads)
        s.drop.head[r] = <uint32_t>(first_head + (row + r) % p.packed_heads)
