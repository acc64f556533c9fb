# Which keys a row may see by its position: causal rule, window, length.
from libc.stdint cimport int64_t

from contract.instruction_set cimport mha_kernels
from contract.problem cimport MHA_UNBOUNDED, mha_problem
from loop.operands cimport keys_of
from loop.structs cimport padded, put, sub_tile, workspace


cdef inline int64_t position_of(const mha_problem *p, ptrdiff_t batch, ptrdiff_t query) noexcept nogil:
    return query + (p.query_offset[batch] if p.query_offset != NULL else 0)


cdef inline bint has_window(const mha_problem *p) noexcept nogil:
    return p.window_left < MHA_UNBOUNDED or p.window_right < MHA_UNBOUNDED


cdef inline void visible_range(const mha_problem *p, int64_t position, ptrdiff_t n_key, ptrdiff_t *first,
                               ptrdiff_t *last) noexcept nogil:
    """Keys [first, last) that window, causal rule and length leave to a query; first = last = 0 for none."""
    first[0] = <ptrdiff_t>max(position - p.window_left, 0)
    last[0] = <ptrdiff_t>min(position + p.window_right + 1, n_key)
    if first[0] >= last[0]:
        first[0] = last[0] = 0


cdef inline void set_visible_keys(sub_tile *s, const mha_problem *p, ptrdiff_t batch, ptrdiff_t row,
                                  ptrdiff_t n_row) noexcept nogil:
    """Position of each row, the keys that it may see, and those that some and all of the rows may see."""
    cdef ptrdiff_t r, query, n_key = keys_of(p, batch)
    cdef int64_t start = position_of(p, batch, 0)
    for r in range(n_row):
        query = (row + r) // p.packed_heads if p.packed_heads > 1 else row + r
        s.position[r] = start + (query if p.query_index == NULL else p.query_index[query])
        s.first[r], s.last[r] = 0, n_key
    s.first_key, s.last_key, s.all_first, s.all_last = 0, n_key, 0, n_key
    if not has_window(p):
        return
    s.first_key, s.last_key = n_key, 0
    for r in range(n_row):
        visible_range(p, s.position[r], n_key, &s.first[r], &s.last[r])
        if s.first[r] < s.last[r]:
            s.first_key, s.last_key = min(s.first_key, s.first[r]), max(s.last_key, s.last[r])
        s.all_first, s.all_last = max(s.all_first, s.first[r]), min(s.all_last, s.last[r])


cdef inline void set_ranges(const sub_tile *s, workspace *w, const mha_kernels *k, ptrdiff_t first,
                            ptrdiff_t n_key) noexcept nogil:
    """Each row's visible keys, counted from key `first` of a block; all of them for lanes without a row."""
    cdef ptrdiff_t r
    for r in range(s.n_row):
        put(k, w.first, r, min(max(s.first[r] - first, 0), n_key))
        put(k, w.last, r, min(max(s.last[r] - first, 0), n_key))
    for r in range(s.n_row, padded(k, s.n_row)):  # buffers are whole vectors
        put(k, w.first, r, 0)
        put(k, w.last, r, n_key)


cdef inline void set_distances(const sub_tile *s, workspace *w, const mha_kernels *k, ptrdiff_t first) noexcept nogil:
    """Each row's position, counted from key `first`."""
    cdef ptrdiff_t r
    for r in range(s.n_row):
        put(k, w.distance, r, <double>(s.position[r] - first))
