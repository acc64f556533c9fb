# Where the rows of a task lie and which keys they may see.  A pair is (batch entry, key/value head).

cdef inline ptrdiff_t queries_of(const mha_problem *p, ptrdiff_t batch) noexcept nogil:
    return p.query_length[batch] if p.query_length != NULL else p.n_query


cdef inline ptrdiff_t keys_of(const mha_problem *p, ptrdiff_t batch) noexcept nogil:
    return p.key_length[batch] if p.key_length != NULL else p.n_key


cdef inline char *place(const mha_problem *p, int operand, ptrdiff_t batch, ptrdiff_t head,
                        ptrdiff_t row) noexcept nogil:
    return (p.operand[operand].data + p.batch_offset[operand][batch] + head * p.operand[operand].head_stride
            + row * p.operand[operand].row_stride)


cdef inline char *place_of_pair(const mha_problem *p, int operand, ptrdiff_t pair, ptrdiff_t row) noexcept nogil:
    """Row of the keys or values of a pair."""
    return place(p, operand, pair // p.n_kv_head, pair % p.n_kv_head // p.share, row)


cdef inline int64_t position_of(const mha_problem *p, ptrdiff_t batch, ptrdiff_t query) noexcept nogil:
    return query + (p.query_offset[batch] if p.query_offset != NULL else 0)


cdef inline void visible_range(const mha_problem *p, int64_t position, ptrdiff_t n_key, ptrdiff_t *first,
                               ptrdiff_t *last) noexcept nogil:
    """Keys [first, last) that window, causal rule and length leave to a query; first = last = 0 for none."""
    first[0] = <ptrdiff_t>max(position - p.window_left, 0)
    last[0] = <ptrdiff_t>min(position + p.window_right + 1, n_key)
    if first[0] >= last[0]:
        first[0] = last[0] = 0


cdef void describe_rows(sub_tile *s, const mha_problem *p, const mha_kernels *k, ptrdiff_t pair, ptrdiff_t row,
                        ptrdiff_t n_row) noexcept nogil:
    """Fill in where rows row ... row + n_row - 1 of a pair lie and which keys they may see."""
    cdef ptrdiff_t batch = pair // p.n_kv_head, kv_head = pair % p.n_kv_head, n_key = keys_of(p, batch)
    cdef ptrdiff_t r, i = row // p.group, in_group = row % p.group, head, query
    cdef bint used = False
    s.pair, s.n_row = pair, n_row
    s.first_key, s.last_key, s.all_first, s.all_last = n_key, 0, 0, n_key
    s.same_mask = True
    for r in range(n_row):
        head = kv_head * p.group + in_group
        query = p.query_index[i] if p.query_index != NULL else i
        s.query[r] = place(p, MHA_QUERY, batch, head, query)
        s.out[r] = place(p, MHA_OUT, batch, head, i)
        if p.operand[MHA_LSE].data != NULL:
            s.lse[r] = place(p, MHA_LSE, batch, head, i)
        if p.mask_type != MHA_NO_MASK:
            s.mask[r] = place(p, MHA_MASK, batch, head, query)
            s.same_mask = s.same_mask and s.mask[r] == s.mask[0]
        if p.alibi_slope != NULL:
            s.slope[r] = p.alibi_slope[batch * p.n_head + head]
        if p.sink != NULL:
            s.sink[r] = p.sink[head]
        if p.gate != NULL:
            s.gate[r] = p.gate[batch * p.n_head + head]
        used = used or p.operand[MHA_LSE].data != NULL or p.gate == NULL or s.gate[r] != 0

        s.position[r] = position_of(p, batch, query)
        visible_range(p, s.position[r], n_key, &s.first[r], &s.last[r])
        if s.first[r] < s.last[r]:
            s.first_key, s.last_key = min(s.first_key, s.first[r]), max(s.last_key, s.last[r])
        s.all_first, s.all_last = max(s.all_first, s.first[r]), min(s.all_last, s.last[r])
        in_group += 1
        if in_group == p.group:
            in_group = 0
            i += 1
    if not used:  # every head here is switched off: nothing to compute, the output is 0
        s.first_key = s.last_key = 0


cdef void set_ranges(const sub_tile *s, workspace *w, const mha_kernels *k, ptrdiff_t first,
                     ptrdiff_t n_key) noexcept nogil:
    """Each row's visible keys, counted from key `first` of a block; all of them for lanes without a row."""
    cdef ptrdiff_t r
    for r in range(s.n_row):
        put(k, w.first, r, min(max(s.first[r] - first, 0), n_key))
        put(k, w.last, r, min(max(s.last[r] - first, 0), n_key))
    for r in range(s.n_row, padded(k, s.n_row)):  # buffers are whole vectors
        put(k, w.first, r, 0)
        put(k, w.last, r, n_key)


cdef void set_distances(const sub_tile *s, workspace *w, const mha_kernels *k, ptrdiff_t first) noexcept nogil:
    """Each row's position, counted from key `first`."""
    cdef ptrdiff_t r
    for r in range(s.n_row):
        put(k, w.distance, r, <double>(s.position[r] - first))


cdef void set_slopes(const sub_tile *s, workspace *w, const mha_kernels *k, ptrdiff_t first) noexcept nogil:
    """Each row's ALiBi slope, and the position that goes with it."""
    cdef ptrdiff_t r
    for r in range(s.n_row):
        put(k, w.slope, r, s.slope[r])
    set_distances(s, w, k, first)


cdef mha_finish finish_of(const sub_tile *s, const mha_problem *p, ptrdiff_t row) noexcept nogil:
    """How row `row` and those behind it are finished."""
    cdef mha_finish how
    how.lse_scale = p.lse_scale
    how.sink = &s.sink[row] if p.sink != NULL else NULL
    how.gate = &s.gate[row] if p.gate != NULL else NULL
    how.lse = <char **>&s.lse[row] if p.operand[MHA_LSE].data != NULL else NULL
    return how
