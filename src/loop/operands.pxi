# Where the rows of a task lie and which keys they may see.  A batch_head is (batch entry, key/value head).

cdef inline ptrdiff_t queries_of(const mha_problem *p, ptrdiff_t batch) noexcept nogil:
    return p.query_length[batch] if p.query_length != NULL else p.n_query


cdef inline ptrdiff_t keys_of(const mha_problem *p, ptrdiff_t batch) noexcept nogil:
    return p.key_length[batch] if p.key_length != NULL else p.n_key


cdef inline char *row_address(const mha_problem *p, int operand, ptrdiff_t batch, ptrdiff_t head,
                        ptrdiff_t row) noexcept nogil:
    return (p.operand[operand].data + p.batch_offset[operand][batch] + head * p.operand[operand].head_stride
            + row * p.operand[operand].row_stride)


cdef inline char *kv_row_address(const mha_problem *p, int operand, ptrdiff_t batch_head, ptrdiff_t row) noexcept nogil:
    """Row of the keys or values of a batch_head."""
    return row_address(p, operand, batch_head // p.n_kv_head, batch_head % p.n_kv_head // p.share, row)


cdef inline int64_t position_of(const mha_problem *p, ptrdiff_t batch, ptrdiff_t query) noexcept nogil:
    return query + (p.query_offset[batch] if p.query_offset != NULL else 0)


cdef inline void visible_range(const mha_problem *p, int64_t position, ptrdiff_t n_key, ptrdiff_t *first,
                               ptrdiff_t *last) noexcept nogil:
    """Keys [first, last) that window, causal rule and length leave to a query; first = last = 0 for none."""
    first[0] = <ptrdiff_t>max(position - p.window_left, 0)
    last[0] = <ptrdiff_t>min(position + p.window_right + 1, n_key)
    if first[0] >= last[0]:
        first[0] = last[0] = 0


cdef void point_to_rows(const char **address, const mha_problem *p, int operand, ptrdiff_t batch_head, ptrdiff_t row,
                        ptrdiff_t n_row, const int64_t *query_index) noexcept nogil:
    """Where rows row ... row + n_row - 1 of a batch_head lie in an operand; query_index as in mha_problem."""
    cdef ptrdiff_t batch = batch_head // p.n_kv_head, first_head = batch_head % p.n_kv_head * p.group_size
    cdef ptrdiff_t r, i = row // p.group_size, in_group = row % p.group_size
    cdef ptrdiff_t row_stride = p.operand[operand].row_stride
    cdef const char *data
    if p.group_size == 1 and query_index == NULL:
        data = row_address(p, operand, batch, first_head, row)
        for r in range(n_row):
            address[r] = data + r * row_stride
        return
    for r in range(n_row):
        address[r] = row_address(p, operand, batch, first_head + in_group, i if query_index == NULL else query_index[i])
        in_group += 1
        if in_group == p.group_size:
            in_group = 0
            i += 1


cdef void set_head_numbers(sub_tile *s, const mha_problem *p, ptrdiff_t batch_head, ptrdiff_t row,
                           ptrdiff_t n_row) noexcept nogil:
    """Slope, sink and gate of each row's head."""
    cdef ptrdiff_t batch = batch_head // p.n_kv_head, r, head
    for r in range(n_row):
        head = batch_head % p.n_kv_head * p.group_size + (row + r) % p.group_size
        if p.alibi_slope != NULL:
            s.slope[r] = p.alibi_slope[batch * p.n_head + head]
        if p.sink != NULL:
            s.sink[r] = p.sink[head]
        if p.gate != NULL:
            s.gate[r] = p.gate[batch * p.n_head + head]


cdef void set_visible_keys(sub_tile *s, const mha_problem *p, ptrdiff_t batch, ptrdiff_t row,
                           ptrdiff_t n_row) noexcept nogil:
    """Position of each row, the keys that it may see, and those that some and all of the rows may see."""
    cdef ptrdiff_t r, query, group = p.group_size, n_key = keys_of(p, batch)
    cdef int64_t start = position_of(p, batch, 0)
    for r in range(n_row):
        query = (row + r) // group if group > 1 else row + r
        s.position[r] = start + (query if p.query_index == NULL else p.query_index[query])
        s.first[r], s.last[r] = 0, n_key
    s.first_key, s.last_key, s.all_first, s.all_last = 0, n_key, 0, n_key
    if p.window_left >= UNBOUNDED and p.window_right >= UNBOUNDED:
        return
    s.first_key, s.last_key = n_key, 0
    for r in range(n_row):
        visible_range(p, s.position[r], n_key, &s.first[r], &s.last[r])
        if s.first[r] < s.last[r]:
            s.first_key, s.last_key = min(s.first_key, s.first[r]), max(s.last_key, s.last[r])
        s.all_first, s.all_last = max(s.all_first, s.first[r]), min(s.all_last, s.last[r])


cdef void describe_rows(sub_tile *s, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head, ptrdiff_t row,
                        ptrdiff_t n_row) noexcept nogil:
    """Fill in where rows row ... row + n_row - 1 of a batch_head lie and which keys they may see."""
    cdef ptrdiff_t r
    cdef bint used = p.operand[MHA_LSE].data != NULL or p.gate == NULL
    s.batch_head, s.n_row = batch_head, n_row
    point_to_rows(s.query, p, MHA_QUERY, batch_head, row, n_row, p.query_index)
    point_to_rows(<const char **>s.out, p, MHA_OUT, batch_head, row, n_row, NULL)
    if p.operand[MHA_LSE].data != NULL:
        point_to_rows(<const char **>s.lse, p, MHA_LSE, batch_head, row, n_row, NULL)
    s.same_mask = True
    if p.mask_type != MHA_NO_MASK:
        point_to_rows(s.mask, p, MHA_MASK, batch_head, row, n_row, p.query_index)
        for r in range(n_row):
            s.same_mask = s.same_mask and s.mask[r] == s.mask[0]
    if p.alibi_slope != NULL or p.sink != NULL or p.gate != NULL:
        set_head_numbers(s, p, batch_head, row, n_row)
    set_visible_keys(s, p, batch_head // p.n_kv_head, row, n_row)
    for r in range(n_row if not used else 0):
        used = used or s.gate[r] != 0
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
