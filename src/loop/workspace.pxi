# The buffers of a thread: allocated before the parallel region, so that nothing in it can fail.

cdef enum:
    MAX_SUB_TILES = 8     # of a task of row tiles
    MAX_TASK_HEADS = 4         # of such a task: kv heads whose rows share a mask
    MAX_MATRIX_SUB_TILES = 32
    N_ITEM = 12          # four are in use, with two buffers of scores and three of weights in turn
    MAX_ROWS = 64         # MHA_MAX_ROWS; struct members need a literal

assert MAX_ROWS == MHA_MAX_ROWS

cdef struct sub_tile:
    # Some rows of one key/value head: where they lie, which keys they see, how far their softmax has come.
    ptrdiff_t batch_head, n_row
    const char *query[MAX_ROWS]
    char *out[MAX_ROWS]
    char *lse[MAX_ROWS]
    const char *mask[MAX_ROWS]
    int64_t position[MAX_ROWS]
    ptrdiff_t first[MAX_ROWS]        # keys [first, last) may be visible to the row
    ptrdiff_t last[MAX_ROWS]
    double slope[MAX_ROWS]
    double sink[MAX_ROWS]
    double gate[MAX_ROWS]
    ptrdiff_t first_key, last_key    # to some row
    ptrdiff_t all_first, all_last    # to every row
    bint same_mask                   # one mask row serves all
    void *packed
    void *sum
    void *maximum
    void *total
    void *factor                     # of the weights, once maximum and total are known
    mha_moments sums                 # statistics, and the scores at the offsets asked for: [row][offset]
    int64_t best_key[MAX_ROWS]
    double *offset_score
    mha_packed packing               # for the matrix unit

cdef struct mask_cache:
    # The mask that w.bias holds: of a key block, from these places on.
    ptrdiff_t n_row, n_key           # n_row 1: [key], otherwise [key][row]; 0: nothing
    const char *row[MAX_ROWS]
    int holds

cdef struct workspace:
    int64_t arrived                  # when its thread came to the team
    sub_tile *sub
    void *score
    void *block_maximum
    void *rescale
    void *bias
    void *visible
    mask_cache mask_cache
    void *mask_work
    void *combine_work
    # a key block of a 16-bit type, widened, of each batch_head of the task
    void *key_tile[MAX_TASK_HEADS]
    void *value_tile[MAX_TASK_HEADS]
    # the rows' numbers in the arithmetic type
    void *slope
    void *distance
    void *first
    void *last
    # the matrix unit: items in a ring, packed key blocks in turn
    mha_matrix_item item[N_ITEM]
    mha_pipeline pipe
    ptrdiff_t n_item
    char *block[2]
    ptrdiff_t last_item[2]          # number of the last item that reads it

cdef struct arena:
    size_t base, used


cdef inline void *take(arena *a, ptrdiff_t n_byte) noexcept nogil:
    cdef size_t start = a.used
    a.used += (<size_t>n_byte + 63) // 64 * 64
    return <void *>(a.base + start)


cdef inline ptrdiff_t padded(const mha_kernels *k, ptrdiff_t width) noexcept nogil:
    return (width + k.lanes - 1) // k.lanes * k.lanes


cdef size_t lay_out(workspace *w, void *base, const mha_problem *p, const mha_kernels *k,
                    const plan *work) noexcept nogil:
    """Place a thread's buffers from `base` on, as large as the plan's tasks need them; return their size."""
    cdef arena a
    cdef ptrdiff_t n_row = max(k.tile_rows if work.has_tiles else 0, MHA_MAX_DECODE_ROWS if work.has_decode else 0)
    cdef ptrdiff_t n_score = max(k.tile_rows * MHA_KEY_BLOCK if work.has_tiles else 0,
                                 MHA_MAX_DECODE_ROWS * MHA_KEY_SPLIT if work.has_decode else 0)
    cdef ptrdiff_t i, n_sub = max(work.n_sub * work.n_task_head, work.n_matrix_sub), packed_size, sum_size
    cdef sub_tile unplaced
    cdef sub_tile *s
    a.base, a.used = <size_t>base, 0
    packed_size = n_row * padded(k, p.head_width) * k.item_size
    sum_size = n_row * padded(k, p.value_width) * k.item_size
    if work.has_matrix:
        n_row = max(n_row, MHA_MATRIX_ROWS)
        n_score = max(n_score, MHA_MATRIX_ROWS * MHA_MATRIX_PIECE)
        packed_size = max(packed_size, MHA_MATRIX_ROWS * matrix_row_size(work, p.head_width))
        sum_size = max(sum_size, MHA_MATRIX_ROWS * chunks_of(p.value_width) * MHA_MATRIX_CHUNK * sizeof(float))
    w.mask_cache.n_row = 0
    w.sub = <sub_tile *>take(&a, n_sub * sizeof(sub_tile))
    for i in range(n_sub):
        s = &w.sub[i] if base != NULL else &unplaced
        s.packed = take(&a, packed_size)
        s.sum = take(&a, sum_size)
        s.maximum = take(&a, n_row * k.item_size)
        s.total = take(&a, n_row * k.item_size)
        s.factor = take(&a, n_row * k.item_size)
        if p.mode == MHA_STATISTICS:
            s.sums = mha_moments(s.maximum, s.total, take(&a, n_row * k.item_size), take(&a, n_row * k.item_size),
                                 take(&a, p.n_set * n_row * k.item_size), take(&a, n_row * k.item_size),
                                 take(&a, n_row * k.item_size), &s.best_key[0], p.n_set)
            s.offset_score = <double *>take(&a, p.n_offset * n_row * sizeof(double))
    w.score = take(&a, n_score * k.item_size)
    w.bias = take(&a, n_score * k.item_size)
    w.visible = take(&a, n_score * k.item_size)
    w.mask_work = take(&a, k.lanes * MHA_KEY_BLOCK * k.item_size)
    w.combine_work = take(&a, work.most_splits * k.item_size)
    w.block_maximum = take(&a, n_row * k.item_size)
    w.rescale = take(&a, n_row * k.item_size)
    w.slope = take(&a, n_row * k.item_size)
    w.distance = take(&a, n_row * k.item_size)
    w.first = take(&a, n_row * k.item_size)
    w.last = take(&a, n_row * k.item_size)
    if k.widen != NULL and work.has_tiles:
        for i in range(work.n_task_head):
            w.key_tile[i] = take(&a, MHA_KEY_BLOCK * padded(k, p.head_width) * k.item_size)
            w.value_tile[i] = take(&a, MHA_KEY_BLOCK * padded(k, p.value_width) * k.item_size)
    if work.has_matrix:
        lay_out_pipeline(w, &a, p, work)
    return a.used


cdef inline double get(const mha_kernels *k, const void *array, ptrdiff_t i) noexcept nogil:
    return (<const float *>array)[i] if k.item_size == 4 else (<const double *>array)[i]


cdef inline void put(const mha_kernels *k, void *array, ptrdiff_t i, double number) noexcept nogil:
    if k.item_size == 4:
        (<float *>array)[i] = <float>number
    else:
        (<double *>array)[i] = number
