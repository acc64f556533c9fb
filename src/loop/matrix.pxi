# Tiles of rows on the matrix unit: the same loop as in row_tiles.pxi, but what it does with a sub-tile and a key block
# is spread over four steps of a pipeline (kernels/matrix_tile.h), so that the matrix unit and the vector units work at
# the same time.

cdef enum:
    LEAST_MATRIX_SUB_TILES = 8        # of a task: packing a key block then costs a tenth of working with it
    MATRIX_SUB_BYTES = 3 << 18        # of a task's queries and sums: what leaves room for a block in 2 MB of L2
    MAX_MATRIX_WIDTH = 256            # of a head: a packed block must stay in the cache

cdef struct matrix_block:
    ptrdiff_t first, n_key            # keys of the block, and how many of them there are
    ptrdiff_t slot                   # which of the thread's two
    const char *key                   # packed
    const char *value
    mha_packed packed_keys, packed_values


cdef inline ptrdiff_t chunks_of(ptrdiff_t width) noexcept nogil:
    return ceil_divide(width, MHA_MATRIX_CHUNK)


cdef inline ptrdiff_t matrix_row_size(const plan *work, ptrdiff_t width) noexcept nogil:
    """Bytes of a packed row."""
    return chunks_of(width) * MHA_MATRIX_CHUNK * 2 * work.matrix.n_term


# ---------------------------------------------------------------------------------------------------------- the plan

cdef void size_matrix_tasks(plan *work, const mha_problem *p, int n_thread) noexcept nogil:
    """How large a task of the matrix unit is.

    Every task packs the key blocks for itself.  The larger it is, the less that weighs; packed once for all tasks they
    would come from beyond the cache, which costs more.
    """
    cdef ptrdiff_t batch, n_task
    cdef ptrdiff_t sub_size = MHA_MATRIX_ROWS * (matrix_row_size(work, p.head_width)
                                                 + chunks_of(p.value_width) * MHA_MATRIX_CHUNK * sizeof(float))
    work.key_block_size = work.matrix.block_keys * matrix_row_size(work, p.head_width)
    work.value_block_size = work.matrix.block_keys * matrix_row_size(work, p.value_width)
    work.n_matrix_sub = MAX_MATRIX_SUB_TILES
    while work.n_matrix_sub > LEAST_MATRIX_SUB_TILES and work.n_matrix_sub * sub_size > MATRIX_SUB_BYTES:
        work.n_matrix_sub //= 2
    while True:
        n_task = 0
        for batch in range(p.n_batch):
            if kind_of(work, p, batch) == MATRIX:
                n_task += p.n_kv_head * ceil_divide(p.group_size * queries_of(p, batch),
                                                    work.n_matrix_sub * MHA_MATRIX_ROWS)
        if work.n_matrix_sub <= LEAST_MATRIX_SUB_TILES or n_task >= 4 * n_thread:
            break
        work.n_matrix_sub //= 2
    work.n_task += n_task


cdef void lay_out_pipeline(workspace *w, arena *a, const mha_problem *p, const plan *work) noexcept nogil:
    cdef char *score[2]
    cdef char *weight[3]
    cdef ptrdiff_t i
    for i in range(2):
        score[i] = <char *>take(a, MHA_MATRIX_ROWS * MHA_MATRIX_PIECE * sizeof(float))
        w.block[i] = <char *>take(a, work.key_block_size + work.value_block_size)
    for i in range(3):
        weight[i] = <char *>take(a, MHA_MATRIX_ROWS * work.matrix.block_keys * 2 * work.matrix.n_term)
    # Scores of an item and the next, weights of these and the one after, are wanted at the same time.
    for i in range(N_ITEM):
        w.item[i].score, w.item[i].weight = <float *>score[i % 2], weight[i % 3]
    memset(&w.pipe, 0, sizeof(mha_pipeline))
    w.pipe.query_chunks, w.pipe.value_chunks = chunks_of(p.head_width), chunks_of(p.value_width)
    w.pipe.exp_scale = p.exp_scale
    w.pipe.product = <float *>take(a, w.pipe.value_chunks * MHA_MATRIX_CHUNK * MHA_MATRIX_ROWS * sizeof(float))
    w.pipe.unused = <float *>take(a, MHA_MATRIX_PANEL * MHA_MATRIX_ROWS * sizeof(float))
    w.pipe.passing = <float *>take(a, MHA_MATRIX_PASSING * MHA_MATRIX_PANEL * MHA_MATRIX_ROWS * sizeof(float))


# ------------------------------------------------------------------------------------------------------- the pipeline

cdef void begin_pipeline(workspace *w) noexcept nogil:
    w.pipe.pending = w.pipe.unused
    w.n_item = 0
    w.last_item[0] = w.last_item[1] = -3  # long ago


cdef inline void advance(workspace *w, const mha_matrix *m, mha_matrix_item *item) noexcept nogil:
    """Let an item (NULL: none) enter the pipeline and the others move on."""
    w.pipe.in_scores = item
    m.step(&w.pipe)
    w.pipe.in_sum, w.pipe.in_values, w.pipe.in_softmax = w.pipe.in_values, w.pipe.in_softmax, item


cdef void drain(workspace *w, const mha_matrix *m) noexcept nogil:
    """Finish all that is in the pipeline."""
    while w.pipe.in_sum != NULL or w.pipe.in_values != NULL or w.pipe.in_softmax != NULL:
        advance(w, m, NULL)
    w.last_item[0] = w.last_item[1] = w.n_item - 3


# ---------------------------------------------------------------------------------------------------------- the loop

cdef void open_matrix_block(matrix_block *block, workspace *w, const mha_problem *p, const plan *work,
                            ptrdiff_t batch_head, ptrdiff_t first) noexcept nogil:
    """Pack the keys and values of a block."""
    cdef ptrdiff_t i = first // work.matrix.block_keys % 2
    if w.n_item < w.last_item[i] + 3:  # the values there are still wanted
        drain(w, work.matrix)
    block.first, block.slot = first, i
    block.n_key = min(work.matrix.block_keys, keys_of(p, batch_head // p.n_kv_head) - first)
    block.key, block.value = w.block[i], w.block[i] + work.key_block_size
    block.packed_keys = work.matrix.pack_keys(w.block[i], kv_row_address(p, MHA_KEY, batch_head, first),
                                              p.operand[MHA_KEY].row_stride, block.n_key, p.head_width)
    block.packed_values = work.matrix.pack_values(w.block[i] + work.key_block_size,
                                                  kv_row_address(p, MHA_VALUE, batch_head, first),
                                                  p.operand[MHA_VALUE].row_stride, block.n_key, p.value_width)


cdef int read_matrix_mask(const sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k,
                          const mha_matrix *m, ptrdiff_t first, ptrdiff_t n_key) noexcept nogil:
    """As read_mask, piece by piece of as many keys as its functions take."""
    cdef const char *row[MAX_ROWS]
    cdef ptrdiff_t r, n_piece, done = 0
    cdef int piece, holds = 0
    cdef float *bias
    w.mask_cache.n_row = 0
    if s.same_mask:
        return k.mask_row(w.bias, s.mask[0] + first * p.mask_key_stride, p.mask_key_stride, n_key, p.mask_type)
    while done < n_key:
        for r in range(s.n_row):
            row[r] = s.mask[r] + (first + done) * p.mask_key_stride
        bias, n_piece = <float *>w.bias + done * MHA_MATRIX_ROWS, min(n_key - done, MHA_KEY_BLOCK)
        piece = m.mask_tile(bias, w.mask_work, row, s.n_row, p.mask_key_stride, n_piece, p.mask_type)
        if p.mask_type == MHA_BOOL and piece != MHA_MASK_VISIBLE | MHA_MASK_EXCLUDED:  # not written then
            for r in range(n_piece * MHA_MATRIX_ROWS):
                bias[r] = 0 if piece & MHA_MASK_VISIBLE else -INFINITY
        holds |= piece
        done += MHA_KEY_BLOCK
    return holds


cdef inline bint may_be_short(const sub_tile *s, const mha_problem *p, const mha_matrix *m, const matrix_block *block,
                              ptrdiff_t panel, ptrdiff_t end) noexcept nogil:
    """Whether the scores of some groups of a block are small enough (Cauchy-Schwarz inequality)."""
    cdef double most = m.most_short / p.exp_scale
    cdef ptrdiff_t i
    if p.natural or m.most_short == 0:
        return False
    for i in range(panel, end):
        if not <double>s.packing.square_norm[0] * block.packed_keys.square_norm[i] < most * most:
            return False
    return True


cdef void multiply_piece(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k, const plan *work,
                         ptrdiff_t batch_head, const matrix_block *block, ptrdiff_t first_panel,
                         ptrdiff_t end_panel) noexcept nogil:
    """Let one sub-tile and some groups of a key block enter the pipeline."""
    cdef const mha_matrix *m = work.matrix
    cdef ptrdiff_t first = block.first + first_panel * MHA_MATRIX_PANEL
    cdef ptrdiff_t n_key = (end_panel - first_panel) * MHA_MATRIX_PANEL  # zeros at the end included
    cdef ptrdiff_t n_real = min(n_key, block.first + block.n_key - first)
    cdef bint edge = first < s.all_first or first + n_key > s.all_last
    cdef bint repaired = s.packing.has_outliers or block.packed_keys.has_outliers
    cdef int holds = MHA_MASK_VISIBLE
    cdef mha_matrix_item *item = &w.item[w.n_item % N_ITEM]
    cdef mha_adjust how
    if p.mask_type != MHA_NO_MASK:
        holds = read_matrix_mask(s, w, p, k, m, first, n_real)
        if not holds & MHA_MASK_VISIBLE:
            return
    memset(&how, 0, sizeof(how))
    how.score_scale = p.score_scale
    how.softcap = p.softcap
    if p.alibi_slope != NULL:
        set_slopes(s, w, k, first)
        how.slope, how.distance = w.slope, w.distance
    if p.mask_type > MHA_BOOL or holds & MHA_MASK_EXCLUDED:
        how.bias, how.bias_row_stride, how.bias_harmless = w.bias, not s.same_mask, not holds & MHA_MASK_LARGE
    if edge:
        set_ranges(s, w, k, first, n_key)
        how.first, how.last = w.first, w.last

    item.query, item.n_row, item.n_panel = <const char *>s.packed, s.n_row, end_panel - first_panel
    item.key = block.key + first_panel * MHA_MATRIX_PANEL * matrix_row_size(work, p.head_width)
    item.value = block.value + first_panel * MHA_MATRIX_PANEL * MHA_MATRIX_CHUNK * 2 * m.n_term
    item.sum, item.maximum, item.total = <float *>s.sum, <float *>s.maximum, <float *>s.total
    item.adjusted = p.natural or edge or repaired or holds & MHA_MASK_EXCLUDED
    # Only what is visible to all rows may decide this, or an excluded key would show in the last bit.
    item.short_scores = not item.adjusted and may_be_short(s, p, m, block, first_panel, end_panel)
    w.last_item[block.slot] = w.n_item
    w.n_item += 1
    advance(w, m, item)
    if repaired:
        m.repair_scores(item.score, s.query, s.n_row, p.query_scale, kv_row_address(p, MHA_KEY, batch_head, first),
                        p.operand[MHA_KEY].row_stride, n_real, p.head_width)
    if item.adjusted:
        m.adjust(item.score, item.block_maximum, s.n_row, n_key, &how)
    if block.packed_values.has_outliers:
        drain(w, m)
        memset(w.visible, 0, n_key * MHA_MATRIX_ROWS * sizeof(float))
        how.score_scale, how.softcap, how.slope = 1, 0, NULL
        m.adjust(w.visible, w.block_maximum, s.n_row, n_key, &how)
        m.add_outliers(<float *>s.sum, item.weight, <const float *>w.visible, kv_row_address(p, MHA_VALUE, batch_head, first),
                       p.operand[MHA_VALUE].row_stride, n_real, p.value_width)


cdef void multiply_block(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k, const plan *work,
                         ptrdiff_t batch_head, const matrix_block *block) noexcept nogil:
    """Let one sub-tile and what it sees of a key block enter the pipeline.

    In pieces, so that only keys that some rows do not see take the way for such.
    """
    cdef ptrdiff_t panel = max(s.first_key - block.first, 0) // MHA_MATRIX_PANEL, end_piece
    cdef ptrdiff_t end = ceil_divide(min(s.last_key - block.first, block.n_key), MHA_MATRIX_PANEL)
    cdef ptrdiff_t first_seen = ceil_divide(max(s.all_first - block.first, 0), MHA_MATRIX_PANEL)
    cdef ptrdiff_t end_seen = min(max(s.all_last - block.first, 0) // MHA_MATRIX_PANEL, end)
    while panel < end:
        end_piece = panel + MHA_MATRIX_PIECE // MHA_MATRIX_PANEL
        if first_seen <= panel < end_seen:
            if p.mask_type != MHA_NO_MASK or not may_be_short(s, p, work.matrix, block, panel, end_seen):
                end_piece = min(end_piece, end_seen)
            else:
                end_piece = end_seen
        elif panel < first_seen < end_seen:
            end_piece = min(end_piece, first_seen)
        end_piece = min(end_piece, end)
        multiply_piece(s, w, p, k, work, batch_head, block, panel, end_piece)
        panel = end_piece


cdef void attend_matrix(workspace *w, const mha_problem *p, const mha_kernels *k, const plan *work, ptrdiff_t batch_head,
                        ptrdiff_t row, ptrdiff_t n_row) noexcept nogil:
    """Rows row ... row + n_row - 1 of a batch_head."""
    cdef const mha_matrix *m = work.matrix
    cdef ptrdiff_t i, start, n_sub = ceil_divide(n_row, MHA_MATRIX_ROWS), first_key = p.n_key, last_key = 0
    cdef mha_finish how
    cdef matrix_block block
    cdef sub_tile *s
    for i in range(n_sub):
        s = &w.sub[i]
        describe_rows(s, p, k, batch_head, row + i * MHA_MATRIX_ROWS, min(MHA_MATRIX_ROWS, n_row - i * MHA_MATRIX_ROWS))
        s.packing = m.pack_queries(s.packed, s.query, s.n_row, p.head_width, p.query_scale)
        m.begin(s.sum, s.maximum, s.total, MHA_MATRIX_ROWS, w.pipe.value_chunks * MHA_MATRIX_CHUNK)
        first_key, last_key = min(first_key, s.first_key), max(last_key, s.last_key)
    m.acquire()
    begin_pipeline(w)
    start = first_key // m.block_keys * m.block_keys
    while start < last_key:
        open_matrix_block(&block, w, p, work, batch_head, start)
        for i in range(n_sub):
            multiply_block(&w.sub[i], w, p, k, work, batch_head, &block)
        start += m.block_keys
    drain(w, m)
    m.release()
    for i in range(n_sub):
        s = &w.sub[i]
        how = finish_of(s, p, 0)
        m.finish(s.out, s.sum, s.maximum, s.total, s.n_row, p.value_width, &how)
