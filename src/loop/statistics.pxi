# Statistics of the weights instead of weights times values.  Every query head is a batch_head of its own here.

cdef enum:
    RECEIVED_KEYS = 512   # keys of a task of the second pass: a packed query serves eight key blocks


cdef void begin_measure(sub_tile *s, const mha_problem *p, const mha_kernels *k) noexcept nogil:
    cdef ptrdiff_t i
    memset(s.sums.moment, 0, k.tile_rows * k.item_size)
    memset(s.sums.far, 0, k.tile_rows * k.item_size)
    memset(s.sums.set, 0, p.n_set * k.tile_rows * k.item_size)
    for i in range(k.tile_rows):
        put(k, s.sums.best, i, -INFINITY)
        put(k, s.sums.confident, i, -INFINITY)
        s.best_key[i] = -1
    for i in range(p.n_offset * s.n_row):
        s.offset_score[i] = -INFINITY


cdef void measure_block(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head,
                        ptrdiff_t first, ptrdiff_t n_key) noexcept nogil:
    """Take a block of scores into the sums."""
    cdef ptrdiff_t batch = batch_head // p.n_kv_head, r, i
    cdef int64_t key
    cdef mha_measured_block block
    for i in range(p.n_offset):
        for r in range(s.n_row):
            key = s.position[r] + p.offset[i]
            if first <= key < first + n_key:
                s.offset_score[r * p.n_offset + i] = get(k, w.score, (key - first) * k.tile_rows + r)
    set_distances(s, w, k, first)
    memset(&block, 0, sizeof(block))
    block.first, block.n_key, block.distance, block.exp_scale = first, n_key, w.distance, p.exp_scale
    if p.ignored != NULL:
        block.ignored = p.ignored + batch * p.n_key + first
    if p.key_set != NULL:
        block.key_set, block.set_stride = p.key_set + batch * p.n_set * p.n_key + first, p.n_key
    k.measure(&s.sums, w.score, w.block_maximum, s.n_row, &block)


cdef void finish_statistics(sub_tile *s, const mha_problem *p, const mha_kernels *k,
                            const mha_finish *how) noexcept nogil:
    """Write a row of measurements per query."""
    cdef ptrdiff_t r
    for r in range(s.n_row):
        k.finish_measure(<double *>s.out[r], &s.sums, r, p.exp_scale, how, s.offset_score + r * p.n_offset,
                         p.n_offset)


cdef void receive(workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head,
                  ptrdiff_t number) noexcept nogil:
    """Second pass, with maxima and factors known: what a range of keys receives from all queries, in their order."""
    cdef double *received = p.received + batch_head * p.n_key
    cdef ptrdiff_t first_key = number * RECEIVED_KEYS, last_key = min(first_key + RECEIVED_KEYS, p.n_key)
    cdef ptrdiff_t row = 0, start, first, n_key, r
    cdef sub_tile *s = &w.sub[0]
    cdef mha_adjust how
    cdef key_block block
    cdef bint excludes
    while row < p.n_query:
        describe_rows(s, p, k, batch_head, row, min(k.tile_rows, p.n_query - row))
        k.pack_query(s.packed, s.query, s.n_row, p.head_width, p.query_scale)
        memset(s.factor, 0, k.tile_rows * k.item_size)
        memset(s.maximum, 0, k.tile_rows * k.item_size)
        for r in range(s.n_row):
            put(k, s.maximum, r, (<double *>s.out[r])[MHA_MAXIMUM])
            put(k, s.factor, r, (<double *>s.out[r])[MHA_FACTOR])
        start = first_key
        while start < min(last_key, s.last_key):
            open_block(&block, w, p, k, batch_head, 0, start, min(start + MHA_KEY_BLOCK, last_key), last_key)
            n_key = score_block(s, w, p, k, &block, NULL, &how, &first, &excludes)
            if n_key > 0:
                k.add_received(received + first, w.score, s.maximum, s.factor, s.n_row, n_key, p.exp_scale)
            start += MHA_KEY_BLOCK
        row += k.tile_rows
