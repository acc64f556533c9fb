# The buffers of a thread: allocated before the parallel region, so that nothing in it can fail.

cdef enum:
    MAX_SUB_TILES = 4     # sub-tiles that share a key block while it is in the cache
    MAX_ROWS = 64         # MHA_MAX_ROWS; struct members need a literal

assert MAX_ROWS == MHA_MAX_ROWS

cdef struct sub_tile:
    # Some rows of one key/value head: where they lie, which keys they see, how far their softmax has come.
    ptrdiff_t n_row
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

cdef struct workspace:
    sub_tile sub[MAX_SUB_TILES]
    void *score
    void *peak
    void *rescale
    void *bias
    void *visible
    void *mask_work
    void *merge_work
    # a key block of a 16-bit type, widened
    void *key_tile
    void *value_tile
    # the rows' numbers in the arithmetic type
    void *slope
    void *distance
    void *first
    void *last

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
    cdef ptrdiff_t n_row = max(k.tile_rows if work.has_tiles else 0, MHA_MAX_FEW_ROWS if work.has_few else 0)
    cdef ptrdiff_t n_score = max(k.tile_rows * MHA_KEY_BLOCK if work.has_tiles else 0,
                                 MHA_MAX_FEW_ROWS * MHA_KEY_SPLIT if work.has_few else 0)
    cdef ptrdiff_t i
    a.base, a.used = <size_t>base, 0
    for i in range(work.n_sub):
        w.sub[i].packed = take(&a, n_row * padded(k, p.head_width) * k.item_size)
        w.sub[i].sum = take(&a, n_row * padded(k, p.value_width) * k.item_size)
        w.sub[i].maximum = take(&a, n_row * k.item_size)
        w.sub[i].total = take(&a, n_row * k.item_size)
        w.sub[i].factor = take(&a, n_row * k.item_size)
        if p.mode == MHA_STATISTICS:
            w.sub[i].sums = mha_moments(w.sub[i].maximum, w.sub[i].total, take(&a, n_row * k.item_size),
                                        take(&a, n_row * k.item_size), take(&a, p.n_set * n_row * k.item_size),
                                        take(&a, n_row * k.item_size), take(&a, n_row * k.item_size),
                                        &w.sub[i].best_key[0], p.n_set)
            w.sub[i].offset_score = <double *>take(&a, p.n_offset * n_row * sizeof(double))
    w.score = take(&a, n_score * k.item_size)
    w.bias = take(&a, n_score * k.item_size)
    w.visible = take(&a, n_score * k.item_size)
    w.mask_work = take(&a, k.lanes * MHA_KEY_BLOCK * k.item_size)
    w.merge_work = take(&a, work.most_splits * k.item_size)
    w.peak = take(&a, n_row * k.item_size)
    w.rescale = take(&a, n_row * k.item_size)
    w.slope = take(&a, n_row * k.item_size)
    w.distance = take(&a, n_row * k.item_size)
    w.first = take(&a, n_row * k.item_size)
    w.last = take(&a, n_row * k.item_size)
    if k.widen != NULL and work.has_tiles:
        w.key_tile = take(&a, MHA_KEY_BLOCK * padded(k, p.head_width) * k.item_size)
        w.value_tile = take(&a, MHA_KEY_BLOCK * padded(k, p.value_width) * k.item_size)
    return a.used


cdef inline double get(const mha_kernels *k, const void *array, ptrdiff_t i) noexcept nogil:
    return (<const float *>array)[i] if k.item_size == 4 else (<const double *>array)[i]


cdef inline void put(const mha_kernels *k, void *array, ptrdiff_t i, double number) noexcept nogil:
    if k.item_size == 4:
        (<float *>array)[i] = <float>number
    else:
        (<double *>array)[i] = number
