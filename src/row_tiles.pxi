# Tiles of rows: some sub-tiles of one pair's rows against the key blocks that any of them may see.

cdef struct key_block:
    ptrdiff_t first, last            # keys of the block that some row of the task may see
    const char *key
    const char *value
    ptrdiff_t key_stride, value_stride
    int finite                        # of the values: 1 all, 0 not all, -1 not looked at yet
    mha_ahead next_keys, next_values  # what is worth fetching while the block is worked on


cdef int read_mask(const sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t first,
                   ptrdiff_t n_key) noexcept nogil:
    """Turn the mask of a key block into numbers in w.bias; return what it holds."""
    cdef const char *row[MAX_ROWS]
    cdef ptrdiff_t r
    if s.same_mask:
        return k.mask_row(w.bias, s.mask[0] + first * p.mask_key_stride, p.mask_key_stride, n_key, p.mask_type)
    for r in range(s.n_row):
        row[r] = s.mask[r] + first * p.mask_key_stride
    return k.mask_tile(w.bias, w.mask_work, row, s.n_row, p.mask_key_stride, n_key, p.mask_type)


cdef ptrdiff_t score_block(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k,
                           const key_block *block, const mha_ahead *ahead, mha_adjust *how, ptrdiff_t *first,
                           bint *excludes) noexcept nogil:
    """Scores of one sub-tile against one key block, masked, in w.score, and their maxima in w.peak.

    Returns how many keys from `first` on they cover, 0 where no row sees any.  `excludes` tells whether some of them
    are excluded for some row, and `how` by what.
    """
    first[0] = max(block.first, s.first_key)
    cdef ptrdiff_t n_key = min(block.last, s.last_key) - first[0]
    cdef bint edge = first[0] < s.all_first or first[0] + n_key > s.all_last
    cdef int holds = MHA_MASK_VISIBLE
    if n_key <= 0:
        return 0
    if p.mask_type != MHA_NO_MASK:
        holds = read_mask(s, w, p, k, first[0], n_key)
        if not holds & MHA_MASK_VISIBLE:
            return 0

    k.scores(w.score, w.peak, s.packed, s.n_row, block.key + (first[0] - block.first) * block.key_stride,
             block.key_stride, n_key, p.head_width, ahead)
    excludes[0] = edge or holds & MHA_MASK_EXCLUDED
    if p.natural or excludes[0]:
        memset(how, 0, sizeof(mha_adjust))
        how.score_scale = p.score_scale
        how.softcap = p.softcap
        if p.alibi_slope != NULL:
            set_slopes(s, w, k, first[0])
            how.slope, how.distance = w.slope, w.distance
        if p.mask_type != MHA_NO_MASK:
            how.bias, how.bias_row_stride = w.bias, not s.same_mask
        if edge:
            set_ranges(s, w, k, first[0], n_key)
            how.first, how.last = w.first, w.last
        k.adjust(w.score, w.peak, s.n_row, n_key, how)
    return n_key


cdef void attend_block(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t pair,
                       key_block *block, const mha_ahead *ahead_values, const mha_ahead *ahead_keys) noexcept nogil:
    """One sub-tile against one key block: scores, mask, a step of the online softmax, values."""
    cdef ptrdiff_t first
    cdef bint excludes
    cdef mha_adjust how
    cdef ptrdiff_t n_key = score_block(s, w, p, k, block, ahead_values, &how, &first, &excludes)
    if n_key == 0:
        return
    if p.mode == MHA_STATISTICS:
        measure_block(s, w, p, k, pair, first, n_key)
        return
    k.softmax(w.score, w.peak, s.maximum, s.total, w.rescale, s.n_row, n_key, p.exp_scale)
    if p.mode == MHA_WEIGHTS:
        return

    cdef const char *value = block.value + (first - block.first) * block.value_stride
    # A weight of 0 does not silence an Inf or NaN value.
    if excludes and block.finite < 0:
        block.finite = k.tile_finite(block.value, block.value_stride, block.last - block.first, p.value_width)
    if excludes and not block.finite:
        memset(w.visible, 0, n_key * k.tile_rows * k.item_size)
        how.score_scale, how.softcap, how.slope = 1, 0, NULL
        k.adjust(w.visible, w.peak, s.n_row, n_key, &how)
        k.values_guarded(s.sum, w.rescale, w.score, w.visible, s.n_row, value, block.value_stride, n_key,
                         p.value_width)
    else:
        k.values(s.sum, w.rescale, w.score, s.n_row, value, block.value_stride, n_key, p.value_width, ahead_keys)


cdef void write_weights(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k,
                        key_block *block) noexcept nogil:
    """The second visit of a key block, with maximum and total known: its weights, as rows of the output."""
    cdef ptrdiff_t first, r
    cdef bint excludes
    cdef mha_adjust how
    cdef char *row[MAX_ROWS]
    cdef ptrdiff_t n_key = score_block(s, w, p, k, block, NULL, &how, &first, &excludes)
    if n_key == 0:
        return
    for r in range(s.n_row):
        row[r] = s.out[r] + first * k.stored_size
    k.store_weights(row, w.score, s.maximum, s.factor, s.n_row, n_key, p.exp_scale)


cdef void open_block(key_block *block, workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t pair,
                     ptrdiff_t first, ptrdiff_t last, ptrdiff_t last_key) noexcept nogil:
    """Point to the keys and values of a block, and to what will be wanted next; 16-bit types are widened here."""
    cdef const mha_operand *key = &p.operand[MHA_KEY]
    cdef const mha_operand *value = &p.operand[MHA_VALUE]
    cdef ptrdiff_t n_key = last - first, n_next = min(MHA_KEY_BLOCK, last_key - last)
    cdef bint valued = p.mode == MHA_ATTENTION
    block.first, block.last, block.finite = first, last, -1
    block.key, block.key_stride = place_of_pair(p, MHA_KEY, pair, first), key.row_stride
    block.value, block.value_stride = NULL, value.row_stride
    block.next_keys = mha_ahead(block.key + n_key * key.row_stride, key.row_stride, n_next,
                                p.head_width * k.stored_size, NULL)
    block.next_values = mha_ahead(NULL, 0, 0, 0, NULL)
    if valued:
        block.value = place_of_pair(p, MHA_VALUE, pair, first)
        # The block's own values come in while its first scores are computed.
        block.next_values = mha_ahead(block.value, value.row_stride, n_key, p.value_width * k.stored_size, NULL)
    if k.widen == NULL:
        return
    block.key_stride, block.value_stride = (padded(k, p.head_width) * k.item_size,
                                            padded(k, p.value_width) * k.item_size)
    k.widen(w.key_tile, block.key_stride, block.key, key.row_stride, n_key, p.head_width)
    block.key = <const char *>w.key_tile
    if valued:
        k.widen(w.value_tile, block.value_stride, block.value, value.row_stride, n_key, p.value_width)
        block.next_values.data, block.next_values.n_row = block.value + n_key * value.row_stride, n_next
        block.value = <const char *>w.value_tile


cdef ptrdiff_t begin_rows(workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t pair, ptrdiff_t row,
                          ptrdiff_t n_row, ptrdiff_t *first_key, ptrdiff_t *last_key) noexcept nogil:
    """Describe, pack and reset sub-tiles for rows row ... row + n_row - 1; return how many, and which keys they see."""
    cdef ptrdiff_t n_sub = 0, done = 0
    cdef sub_tile *s
    first_key[0], last_key[0] = p.n_key, 0
    while done < n_row:
        s = &w.sub[n_sub]
        describe_rows(s, p, k, pair, row + done, min(k.tile_rows, n_row - done))
        k.pack_query(s.packed, s.query, s.n_row, p.head_width, p.query_scale)
        k.begin(s.sum, s.maximum, s.total, s.n_row, p.value_width)
        if p.mode == MHA_STATISTICS:
            begin_measure(s, p, k)
        first_key[0], last_key[0] = min(first_key[0], s.first_key), max(last_key[0], s.last_key)
        done += s.n_row
        n_sub += 1
    return n_sub


cdef mha_ahead share_of_queries(const mha_problem *p, const mha_kernels *k, ptrdiff_t pair, ptrdiff_t i, ptrdiff_t n,
                                const mha_ahead *then) noexcept nogil:
    """The i-th of n parts of the queries with which the rows of a pair begin."""
    cdef ptrdiff_t batch = pair // p.n_kv_head, n_query = min(queries_of(p, batch), MAX_SUB_TILES * k.tile_rows)
    cdef ptrdiff_t first = n_query * i // n
    return mha_ahead(place(p, MHA_QUERY, batch, pair % p.n_kv_head, first), p.operand[MHA_QUERY].row_stride,
                     n_query * (i + 1) // n - first, p.head_width * k.stored_size, then)


cdef void attend_rows(workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t pair, ptrdiff_t row,
                      ptrdiff_t n_row, ptrdiff_t next_pair) noexcept nogil:
    """Rows row ... row + n_row - 1 of a pair.  What next_pair, if not -1, begins with is fetched ahead at the end."""
    cdef ptrdiff_t first_key, last_key, i, start
    cdef ptrdiff_t n_sub = begin_rows(w, p, k, pair, row, n_row, &first_key, &last_key)
    cdef mha_ahead results, next_queries
    cdef const mha_ahead *ahead_values
    cdef const mha_ahead *ahead_keys
    cdef mha_finish how
    cdef key_block block
    cdef sub_tile *s
    start = first_key // MHA_KEY_BLOCK * MHA_KEY_BLOCK
    while start < last_key:
        open_block(&block, w, p, k, pair, max(start, first_key), min(start + MHA_KEY_BLOCK, last_key), last_key)
        if block.last == last_key and next_pair >= 0:
            block.next_keys.data = place_of_pair(p, MHA_KEY, next_pair, 0)
            block.next_keys.n_row = min(MHA_KEY_BLOCK, p.n_key)
        for i in range(n_sub):
            ahead_values = &block.next_values if i == 0 else NULL
            ahead_keys = &block.next_keys if i == n_sub - 1 else NULL
            if block.last == last_key and next_pair >= 0 and p.group == 1:
                results = mha_ahead(w.sub[i].out[0], p.operand[MHA_OUT].row_stride, w.sub[i].n_row,
                                    p.value_width * k.stored_size, ahead_values)
                next_queries = share_of_queries(p, k, next_pair, i, n_sub, ahead_keys)
                ahead_values, ahead_keys = &results, &next_queries
            attend_block(&w.sub[i], w, p, k, pair, &block, ahead_values, ahead_keys)
        start += MHA_KEY_BLOCK

    if p.mode == MHA_WEIGHTS:
        finish_weights(w, p, k, pair, n_sub, first_key, last_key)
        return
    for i in range(n_sub):
        s = &w.sub[i]
        how = finish_of(s, p, 0)
        if p.mode == MHA_STATISTICS:
            finish_statistics(s, p, k, &how)
        else:
            k.finish(s.out, s.sum, s.maximum, s.total, s.n_row, p.value_width, &how)


cdef void finish_weights(workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t pair, ptrdiff_t n_sub,
                         ptrdiff_t first_key, ptrdiff_t last_key) noexcept nogil:
    """Visit the blocks again and write the weights; keys that were not visited get 0."""
    cdef ptrdiff_t i, r, start = first_key // MHA_KEY_BLOCK * MHA_KEY_BLOCK
    cdef mha_finish how
    cdef key_block block
    cdef sub_tile *s
    for i in range(n_sub):
        s = &w.sub[i]
        how = finish_of(s, p, 0)
        k.finish_factors(s.factor, s.maximum, s.total, s.n_row, &how)
        for r in range(s.n_row):
            memset(s.out[r], 0, p.n_key * k.stored_size)
    while start < last_key:
        open_block(&block, w, p, k, pair, max(start, first_key), min(start + MHA_KEY_BLOCK, last_key), last_key)
        for i in range(n_sub):
            write_weights(&w.sub[i], w, p, k, &block)
        start += MHA_KEY_BLOCK
    for i in range(n_sub):
        s = &w.sub[i]
        for r in range(s.n_row):
            if p.gate != NULL and s.gate[r] == 0:  # switched off, whatever the weights hold
                memset(s.out[r], 0, p.n_key * k.stored_size)
