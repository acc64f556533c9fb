# Tiles of rows: some sub-tiles of one batch_head's rows against the key blocks that any of them may see.

cdef struct key_block:
    ptrdiff_t first, last            # keys of the block that some row of the task may see
    const char *key
    const char *value
    ptrdiff_t key_stride, value_stride
    const char *narrow_key            # of a 16-bit type, not widened yet; NULL: nothing to widen
    const char *narrow_value
    int finite                        # of the values: 1 all, 0 not all, -1 not looked at yet
    mha_prefetch next_keys, next_values  # what is worth fetching while the block is worked on


cdef int read_mask(const sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t first,
                   ptrdiff_t n_key) noexcept nogil:
    """Have the mask of a key block as numbers in w.bias, unless they are there already; return what it holds."""
    cdef mask_cache *mask_cache = &w.mask_cache
    cdef ptrdiff_t r, n_row = 1 if s.same_mask else s.n_row, skipped = first * p.mask_key_stride
    cdef bint there = mask_cache.n_row == n_row and mask_cache.n_key == n_key
    for r in range(n_row):
        there = there and mask_cache.row[r] == s.mask[r] + skipped
        mask_cache.row[r] = s.mask[r] + skipped
    if there:
        return mask_cache.holds
    mask_cache.n_row, mask_cache.n_key = n_row, n_key
    if s.same_mask:
        mask_cache.holds = k.mask_row(w.bias, mask_cache.row[0], p.mask_key_stride, n_key, p.mask_type)
    else:
        mask_cache.holds = k.mask_tile(w.bias, w.mask_work, mask_cache.row, n_row, p.mask_key_stride, n_key, p.mask_type)
    return mask_cache.holds


cdef mha_prefetch mask_ahead(const sub_tile *s, const mha_problem *p, ptrdiff_t first, ptrdiff_t last) noexcept nogil:
    """The mask of keys first ... last - 1 as something to fetch: its rows lie too far apart for the hardware to foresee.

    Nothing where they are not one row per query at equal distances, or where their keys are not together.
    """
    cdef ptrdiff_t size = mask_item_size(p.mask_type)
    cdef bint plain = p.mask_key_stride == size and p.query_index == NULL and not s.same_mask
    if not plain or first >= last or (p.group_size > 1 and p.operand[MHA_MASK].head_stride != 0):
        return mha_prefetch(NULL, 0, 0, 0, NULL)
    return mha_prefetch(s.mask[0] + first * size, p.operand[MHA_MASK].row_stride, ceil_divide(s.n_row, p.group_size),
                     (last - first) * size, NULL)


cdef inline ptrdiff_t mask_item_size(mha_mask_type mask_type) noexcept nogil:
    if mask_type == MHA_BOOL:
        return 1
    if mask_type == MHA_FLOAT32:
        return 4
    return 8 if mask_type == MHA_FLOAT64 else 2


cdef ptrdiff_t score_block(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k,
                           key_block *block, const mha_prefetch *ahead, mha_adjust *how, ptrdiff_t *first,
                           bint *excludes) noexcept nogil:
    """Scores of one sub-tile against one key block, masked, in w.score, and their maxima in w.block_maximum.

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

    widen_keys(block, p, k)
    k.scores(w.score, w.block_maximum, s.packed, s.n_row, block.key + (first[0] - block.first) * block.key_stride,
             block.key_stride, n_key, p.head_width, ahead)
    excludes[0] = edge or holds & MHA_MASK_EXCLUDED
    if p.natural or excludes[0]:
        memset(how, 0, sizeof(mha_adjust))
        how.score_scale = p.score_scale
        how.softcap = p.softcap
        if p.alibi_slope != NULL:
            set_slopes(s, w, k, first[0])
            how.slope, how.distance = w.slope, w.distance
        if p.mask_type > MHA_BOOL or holds & MHA_MASK_EXCLUDED:
            how.bias, how.bias_row_stride, how.bias_harmless = w.bias, not s.same_mask, not holds & MHA_MASK_LARGE
        if edge:
            set_ranges(s, w, k, first[0], n_key)
            how.first, how.last = w.first, w.last
        k.adjust(w.score, w.block_maximum, s.n_row, n_key, how)
    return n_key


cdef void attend_block(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k, key_block *block,
                       const mha_prefetch *ahead_values, const mha_prefetch *ahead_keys) noexcept nogil:
    """One sub-tile against one key block: scores, mask, a step of the online softmax, values."""
    cdef ptrdiff_t first
    cdef bint excludes
    cdef mha_adjust how
    cdef ptrdiff_t n_key = score_block(s, w, p, k, block, ahead_values, &how, &first, &excludes)
    if n_key == 0:
        return
    if p.mode == MHA_STATISTICS:
        measure_block(s, w, p, k, s.batch_head, first, n_key)
        return
    k.softmax(w.score, w.block_maximum, s.maximum, s.total, w.rescale, s.n_row, n_key, p.exp_scale)
    if p.mode == MHA_WEIGHTS:
        return

    widen_values(block, p, k)
    cdef const char *value = block.value + (first - block.first) * block.value_stride
    # A weight of 0 does not silence an Inf or NaN value.
    if excludes and block.finite < 0:
        block.finite = k.tile_finite(block.value, block.value_stride, block.last - block.first, p.value_width)
    if excludes and not block.finite:
        memset(w.visible, 0, n_key * k.tile_rows * k.item_size)
        how.score_scale, how.softcap, how.slope = 1, 0, NULL
        k.adjust(w.visible, w.block_maximum, s.n_row, n_key, &how)
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


cdef void open_block(key_block *block, workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head,
                     ptrdiff_t in_task, ptrdiff_t first, ptrdiff_t last, ptrdiff_t last_key) noexcept nogil:
    """Point to the keys and values of a block of the task's batch_head number in_task, and to what will be wanted next."""
    cdef const mha_operand *key = &p.operand[MHA_KEY]
    cdef const mha_operand *value = &p.operand[MHA_VALUE]
    cdef ptrdiff_t n_key = last - first, n_next = min(MHA_KEY_BLOCK, last_key - last)
    cdef bint valued = p.mode == MHA_ATTENTION
    block.first, block.last, block.finite = first, last, -1
    block.key, block.key_stride = kv_row_address(p, MHA_KEY, batch_head, first), key.row_stride
    block.value, block.value_stride = NULL, value.row_stride
    block.next_keys = mha_prefetch(block.key + n_key * key.row_stride, key.row_stride, n_next,
                                p.head_width * k.stored_size, NULL)
    block.next_values = mha_prefetch(NULL, 0, 0, 0, NULL)
    if valued:
        block.value = kv_row_address(p, MHA_VALUE, batch_head, first)
        # The block's own values come in while its first scores are computed.
        block.next_values = mha_prefetch(block.value, value.row_stride, n_key, p.value_width * k.stored_size, NULL)
    block.narrow_key = block.narrow_value = NULL
    if k.widen == NULL:
        return
    block.narrow_key, block.narrow_value = block.key, block.value
    block.key, block.key_stride = <char *>w.key_tile[in_task], padded(k, p.head_width) * k.item_size
    block.value, block.value_stride = <char *>w.value_tile[in_task], padded(k, p.value_width) * k.item_size
    if valued:
        block.next_values.data, block.next_values.n_row = block.narrow_value + n_key * value.row_stride, n_next


cdef inline void widen_keys(key_block *block, const mha_problem *p, const mha_kernels *k) noexcept nogil:
    """Keys of a 16-bit type become numbers when the first rows need them, which a mask may prevent."""
    if block.narrow_key != NULL:
        k.widen(<void *>block.key, block.key_stride, block.narrow_key, p.operand[MHA_KEY].row_stride,
                block.last - block.first, p.head_width)
        block.narrow_key = NULL


cdef inline void widen_values(key_block *block, const mha_problem *p, const mha_kernels *k) noexcept nogil:
    if block.narrow_value != NULL:
        k.widen(<void *>block.value, block.value_stride, block.narrow_value, p.operand[MHA_VALUE].row_stride,
                block.last - block.first, p.value_width)
        block.narrow_value = NULL


cdef ptrdiff_t begin_rows(workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head, ptrdiff_t n_task_head,
                          ptrdiff_t row, ptrdiff_t n_row, ptrdiff_t *first_key, ptrdiff_t *last_key) noexcept nogil:
    """Describe, pack and reset sub-tiles for rows row ... row + n_row - 1 of n_task_head pairs, the pairs innermost.

    Returns how many sub-tiles, and which keys they see.
    """
    cdef ptrdiff_t n_sub = n_task_head * ceil_divide(n_row, k.tile_rows), i, start
    cdef sub_tile *s
    first_key[0], last_key[0] = p.n_key, 0
    for i in range(n_sub):
        s, start = &w.sub[i], i // n_task_head * k.tile_rows
        describe_rows(s, p, k, batch_head + i % n_task_head, row + start, min(k.tile_rows, n_row - start))
        k.pack_query(s.packed, s.query, s.n_row, p.head_width, p.query_scale)
        k.begin(s.sum, s.maximum, s.total, s.n_row, p.value_width)
        if p.mode == MHA_STATISTICS:
            begin_measure(s, p, k)
        first_key[0], last_key[0] = min(first_key[0], s.first_key), max(last_key[0], s.last_key)
    return n_sub


cdef mha_prefetch share_of_queries(const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head, ptrdiff_t i, ptrdiff_t n,
                                const mha_prefetch *then) noexcept nogil:
    """The i-th of n partials of the queries with which the rows of a batch_head begin."""
    cdef ptrdiff_t batch = batch_head // p.n_kv_head, n_query = min(queries_of(p, batch), MAX_SUB_TILES * k.tile_rows)
    cdef ptrdiff_t first = n_query * i // n
    return mha_prefetch(row_address(p, MHA_QUERY, batch, batch_head % p.n_kv_head, first), p.operand[MHA_QUERY].row_stride,
                     n_query * (i + 1) // n - first, p.head_width * k.stored_size, then)


cdef void attend_sub_tiles(workspace *w, const mha_problem *p, const mha_kernels *k, key_block *block,
                           ptrdiff_t n_task_head, ptrdiff_t n_sub, ptrdiff_t next_last,
                           ptrdiff_t next_batch_head) noexcept nogil:
    """All sub-tiles of a task against a key block of each batch_head; the next block ends before key next_last.

    While a sub-tile is worked on, what comes next is fetched: in the first rows the values, in the last ones the next
    keys, and before other rows begin their mask.  next_batch_head, if not -1, follows this block: what it begins with is fetched,
    and the places of the results.
    """
    cdef ptrdiff_t i
    cdef mha_prefetch mask, results, next_queries
    cdef const mha_prefetch *in_scores
    cdef const mha_prefetch *in_values
    cdef key_block *b
    for i in range(n_sub):
        b = &block[i % n_task_head]
        in_scores = &b.next_values if i < n_task_head else NULL
        in_values = &b.next_keys if i >= n_sub - n_task_head else NULL
        if p.mask_type != MHA_NO_MASK and i % n_task_head == n_task_head - 1:
            if i + 1 < n_sub:
                mask = mask_ahead(&w.sub[i + 1], p, b.first, b.last)
                in_values = &mask
            elif i >= n_task_head:
                mask = mask_ahead(&w.sub[0], p, b.last, next_last)
                in_scores = &mask
        if next_batch_head >= 0:
            results = mha_prefetch(w.sub[i].out[0], p.operand[MHA_OUT].row_stride, w.sub[i].n_row,
                                p.value_width * k.stored_size, in_scores)
            next_queries = share_of_queries(p, k, next_batch_head, i, n_sub, in_values)
            in_scores, in_values = &results, &next_queries
        attend_block(&w.sub[i], w, p, k, b, in_scores, in_values)


cdef void attend_rows(workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head, ptrdiff_t n_task_head,
                      ptrdiff_t row, ptrdiff_t n_row, ptrdiff_t next_batch_head) noexcept nogil:
    """Rows row ... row + n_row - 1 of n_task_head pairs.  The keys of next_batch_head, if not -1, are fetched ahead at the end."""
    cdef ptrdiff_t first_key, last_key, i, start
    cdef ptrdiff_t n_sub = begin_rows(w, p, k, batch_head, n_task_head, row, n_row, &first_key, &last_key)
    cdef mha_finish how
    cdef key_block block[MAX_TASK_HEADS]
    cdef sub_tile *s
    start = first_key // MHA_KEY_BLOCK * MHA_KEY_BLOCK
    while start < last_key:
        for i in range(n_task_head):
            open_block(&block[i], w, p, k, batch_head + i, i, max(start, first_key), min(start + MHA_KEY_BLOCK, last_key),
                       last_key)
        if block[0].last == last_key and next_batch_head >= 0:
            block[0].next_keys.data = kv_row_address(p, MHA_KEY, next_batch_head, 0)
            block[0].next_keys.n_row = min(MHA_KEY_BLOCK, p.n_key)
        attend_sub_tiles(w, p, k, block, n_task_head, n_sub, min(start + 2 * MHA_KEY_BLOCK, last_key),
                         next_batch_head if block[0].last == last_key and p.group_size == 1 else -1)
        start += MHA_KEY_BLOCK

    if p.mode == MHA_WEIGHTS:
        finish_weights(w, p, k, batch_head, n_task_head, n_sub, first_key, last_key)
        return
    for i in range(n_sub):
        s = &w.sub[i]
        how = finish_of(s, p, 0)
        if p.mode == MHA_STATISTICS:
            finish_statistics(s, p, k, &how)
        else:
            k.finish(s.out, s.sum, s.maximum, s.total, s.n_row, p.value_width, &how)


cdef void finish_weights(workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head, ptrdiff_t n_task_head,
                         ptrdiff_t n_sub, ptrdiff_t first_key, ptrdiff_t last_key) noexcept nogil:
    """Visit the blocks again and write the weights; keys that were not visited get 0."""
    cdef ptrdiff_t i, r, start = first_key // MHA_KEY_BLOCK * MHA_KEY_BLOCK
    cdef mha_finish how
    cdef key_block block[MAX_TASK_HEADS]
    cdef sub_tile *s
    for i in range(n_sub):
        s = &w.sub[i]
        how = finish_of(s, p, 0)
        k.finish_factors(s.factor, s.maximum, s.total, s.n_row, &how)
        for r in range(s.n_row):
            memset(s.out[r], 0, p.n_key * k.stored_size)
    while start < last_key:
        for i in range(n_task_head):
            open_block(&block[i], w, p, k, batch_head + i, i, max(start, first_key), min(start + MHA_KEY_BLOCK, last_key),
                       last_key)
        for i in range(n_sub):
            write_weights(&w.sub[i], w, p, k, &block[i % n_task_head])
        start += MHA_KEY_BLOCK
    for i in range(n_sub):
        s = &w.sub[i]
        for r in range(s.n_row):
            if p.gate != NULL and s.gate[r] == 0:  # switched off, whatever the weights hold
                memset(s.out[r], 0, p.n_key * k.stored_size)
