# Few rows: all rows of a batch_head against one split of the keys, and the joining of the splits.

cdef inline char *partial_of(const plan *work, ptrdiff_t batch_head, ptrdiff_t split) noexcept nogil:
    return work.partials + (work.first_partial[batch_head] + split) * work.partial_size


cdef void adjust_decode_rows(void *score, sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k,
                          mha_adjust *how, ptrdiff_t first, ptrdiff_t n_key) noexcept nogil:
    """Row by row; the numbers of `how` hold for all, its slope says whether ALiBi applies."""
    cdef ptrdiff_t r, row_bytes = MHA_KEY_SPLIT * k.item_size
    cdef bint sloped = how.slope != NULL
    set_ranges(s, w, k, first, n_key)
    for r in range(s.n_row):
        how.first, how.last = <char *>w.first + r * k.item_size, <char *>w.last + r * k.item_size
        if p.mask_type != MHA_NO_MASK:
            how.bias = <char *>w.bias + r * row_bytes
        if sloped:
            how.slope, how.distance = <char *>w.slope + r * k.item_size, <char *>w.distance + r * k.item_size
        k.decode_adjust(<char *>score + r * row_bytes, n_key, how)


cdef void decode_split(workspace *w, const mha_problem *p, const mha_kernels *k, const plan *work,
                          ptrdiff_t batch_head, ptrdiff_t split) noexcept nogil:
    """All rows of a batch_head against one split of the keys."""
    cdef ptrdiff_t n_row = p.group_size * queries_of(p, batch_head // p.n_kv_head), row_bytes = MHA_KEY_SPLIT * k.item_size
    cdef ptrdiff_t first, n_key, r
    cdef char *result = partial_of(work, batch_head, split)
    cdef char *maximum = result + work.maximum_at
    cdef char *total = result + work.total_at
    cdef sub_tile *s = &w.sub[0]
    cdef const char *value
    cdef bint excludes
    cdef int holds = MHA_MASK_VISIBLE
    cdef mha_adjust how
    describe_rows(s, p, k, batch_head, 0, n_row)
    first = max(split * MHA_KEY_SPLIT, s.first_key)
    n_key = min((split + 1) * MHA_KEY_SPLIT, s.last_key) - first
    if n_key > 0 and p.mask_type != MHA_NO_MASK:
        w.mask_cache.n_row, holds = 0, 0
        for r in range(n_row):
            holds |= k.mask_row(<char *>w.bias + r * row_bytes, s.mask[r] + first * p.mask_key_stride,
                                p.mask_key_stride, n_key, p.mask_type)
    if n_key <= 0 or not holds & MHA_MASK_VISIBLE:
        memset(result, 0, work.partial_size)
        for r in range(n_row):
            put(k, maximum, r, -INFINITY)
        return

    k.decode_pack_query(s.packed, s.query, n_row, p.head_width, p.query_scale)
    k.decode_scores(w.score, s.packed, n_row, kv_row_address(p, MHA_KEY, batch_head, first),
                 p.operand[MHA_KEY].row_stride, n_key, p.head_width)
    excludes = first < s.all_first or first + n_key > s.all_last or holds & MHA_MASK_EXCLUDED
    memset(&how, 0, sizeof(how))
    if p.natural or excludes:
        how.score_scale = p.score_scale
        how.softcap = p.softcap
        if p.alibi_slope != NULL:
            set_slopes(s, w, k, first)
            how.slope = w.slope
        adjust_decode_rows(w.score, s, w, p, k, &how, first, n_key)
    k.decode_softmax(w.score, maximum, total, n_row, n_key, p.exp_scale)
    value = kv_row_address(p, MHA_VALUE, batch_head, first)
    # A weight of 0 does not silence an Inf or NaN value.
    if excludes and not k.decode_finite(value, p.operand[MHA_VALUE].row_stride, n_key, p.value_width):
        memset(w.visible, 0, n_row * row_bytes)
        how.score_scale, how.softcap, how.slope = 1, 0, NULL
        adjust_decode_rows(w.visible, s, w, p, k, &how, first, n_key)
        k.decode_values_guarded(result, w.score, w.visible, n_row, value, p.operand[MHA_VALUE].row_stride, n_key,
                             p.value_width)
    else:
        k.decode_values(result, w.score, n_row, value, p.operand[MHA_VALUE].row_stride, n_key, p.value_width)


cdef void combine_splits(workspace *w, const mha_problem *p, const mha_kernels *k, const plan *work,
                         ptrdiff_t batch_head) noexcept nogil:
    """Join the partial results of a batch_head's rows in index order and write them out."""
    cdef ptrdiff_t r, batch = batch_head // p.n_kv_head, n_row = p.group_size * queries_of(p, batch)
    cdef const char *result = partial_of(work, batch_head, 0)
    cdef sub_tile *s = &w.sub[0]
    cdef mha_finish how
    describe_rows(s, p, k, batch_head, 0, n_row)
    for r in range(n_row):
        how = finish_of(s, p, r)
        k.decode_combine(s.out[r], result + r * padded(k, p.value_width) * k.item_size,
                    result + work.maximum_at + r * k.item_size, result + work.total_at + r * k.item_size,
                    work.partial_size, splits_of(p, batch), p.value_width, p.exp_scale, w.combine_work, &how)
