# cython: language_level=3, cdivision=True
"""The fused attention loop.

    attend()               acquires the buffers, fills the problem, allocates all workspace; can still raise
      |
      |  nogil, prange over tasks, cannot fail
      |
      +- attend_rows()     one task: up to four sub-tiles of rows of one key/value head
      |    for each key block that any of the rows may see:
      |        for each sub-tile:  attend_block()
      |            mask -> scores -> adjust -> online softmax -> values
      |    finish: divide by the total, gate, write out and log-sum-exp
      |
      +- attend_few_rows() one task: all (at most 8) rows of a key/value head, 512 keys -> partial result
           merge_few_rows()     joins the partial results in index order

No n_query x n_key array exists: a task holds one block of scores for one sub-tile.  The key blocks lie on a fixed
grid and every sub-tile runs through them by itself, so neither the number of threads nor the batch that a sequence
is in changes a single bit of the result.

All arithmetic is in the tile functions that kernels.h describes; this file decides what is visited, in which order.
"""
from cpython.buffer cimport (
    PyBUF_STRIDED_RO, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from cython.parallel cimport prange, threadid
from libc.math cimport INFINITY, fabs
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from kernels cimport *

cdef extern from "stdlib.h" nogil:
    void *aligned_alloc(size_t alignment, size_t size)

cdef enum:
    MAX_SUB_TILES = 4     # sub-tiles that share a key block while it is in the cache
    MAX_ROWS = 64         # MHA_MAX_ROWS; struct members need a literal
    MAX_BATCH_AXES = 64   # NumPy's own limit
    N_OPERAND = 5         # query, key, value, out, mask

cdef double LOG2_E = 1.44269504088896340736

assert MAX_ROWS == MHA_MAX_ROWS


# ---------------------------------------------------------------------------------------------- workspace of a thread

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

cdef struct workspace:
    sub_tile sub[MAX_SUB_TILES]
    ptrdiff_t n_sub
    void *score
    void *peak
    void *rescale
    void *bias
    void *visible
    void *mask_work
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


cdef size_t lay_out(workspace *w, void *base, const mha_problem *p, const mha_kernels *k, ptrdiff_t n_sub,
                    ptrdiff_t n_part) noexcept nogil:
    """Place a thread's buffers from `base` on; return their size.  n_part: of a few-rows row, 0 for row tiles."""
    cdef arena a
    cdef ptrdiff_t n_row = MHA_MAX_FEW_ROWS if n_part else k.tile_rows
    cdef ptrdiff_t n_score = MHA_MAX_FEW_ROWS * MHA_KEY_SPLIT if n_part else k.tile_rows * MHA_KEY_BLOCK
    cdef ptrdiff_t i
    a.base, a.used = <size_t>base, 0
    for i in range(n_sub):
        w.sub[i].packed = take(&a, n_row * padded(k, p.head_width) * k.item_size)
        w.sub[i].sum = take(&a, n_row * padded(k, p.value_width) * k.item_size)
        w.sub[i].maximum = take(&a, n_row * k.item_size)
        w.sub[i].total = take(&a, n_row * k.item_size)
    w.score = take(&a, n_score * k.item_size)
    w.bias = take(&a, n_score * k.item_size)
    w.visible = take(&a, n_score * k.item_size)
    w.mask_work = take(&a, max(k.lanes * MHA_KEY_BLOCK, n_part) * k.item_size)
    w.peak = take(&a, n_row * k.item_size)
    w.rescale = take(&a, n_row * k.item_size)
    w.slope = take(&a, n_row * k.item_size)
    w.distance = take(&a, n_row * k.item_size)
    w.first = take(&a, n_row * k.item_size)
    w.last = take(&a, n_row * k.item_size)
    return a.used


cdef inline void put(const mha_kernels *k, void *array, ptrdiff_t i, double number) noexcept nogil:
    if k.item_size == 4:
        (<float *>array)[i] = <float>number
    else:
        (<double *>array)[i] = number


# ------------------------------------------------------------------------------------------------- what a row may see

cdef void describe_rows(sub_tile *s, const mha_problem *p, const mha_kernels *k, ptrdiff_t pair, ptrdiff_t row,
                        ptrdiff_t n_row) noexcept nogil:
    """Fill in where rows row ... row + n_row - 1 of a (batch entry, key/value head) pair lie and what they may see."""
    cdef ptrdiff_t batch = pair // p.n_kv_head, kv_head = pair % p.n_kv_head
    cdef ptrdiff_t length = p.key_length[batch] if p.key_length != NULL else p.n_key
    cdef int64_t offset = p.query_offset[batch] if p.query_offset != NULL else 0
    cdef ptrdiff_t r, i = row // p.group, in_group = row % p.group, head, first, last
    cdef bint used = False
    s.n_row = n_row
    s.first_key, s.last_key, s.all_first, s.all_last = length, 0, 0, length
    s.same_mask = True
    for r in range(n_row):
        head = kv_head * p.group + in_group
        s.query[r] = p.query.data + p.batch_offset[0][batch] + head * p.query.head_stride + i * p.query.row_stride
        s.out[r] = p.out.data + p.batch_offset[3][batch] + head * p.out.head_stride + i * p.out.row_stride
        if p.lse != NULL:
            s.lse[r] = p.lse + ((batch * p.n_head + head) * p.n_query + i) * k.item_size
        if p.mask_type != MHA_NO_MASK:
            s.mask[r] = p.mask.data + p.batch_offset[4][batch] + head * p.mask.head_stride + i * p.mask.row_stride
            s.same_mask = s.same_mask and s.mask[r] == s.mask[0]
        if p.alibi_slope != NULL:
            s.slope[r] = p.alibi_slope[batch * p.n_head + head]
        if p.sink != NULL:
            s.sink[r] = p.sink[head]
        if p.gate != NULL:
            s.gate[r] = p.gate[batch * p.n_head + head]
        used = used or p.lse != NULL or p.gate == NULL or s.gate[r] != 0

        s.position[r] = offset + i
        first = <ptrdiff_t>max(s.position[r] - p.window_left, 0)
        last = <ptrdiff_t>min(s.position[r] + p.window_right + 1, length)
        if first >= last:
            first = last = 0
        else:
            s.first_key, s.last_key = min(s.first_key, first), max(s.last_key, last)
        s.first[r], s.last[r] = first, last
        s.all_first, s.all_last = max(s.all_first, first), min(s.all_last, last)
        in_group += 1
        if in_group == p.group:
            in_group = 0
            i += 1
    if not used:  # every head here is switched off: nothing to compute, the output is 0
        s.first_key = s.last_key = 0


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


cdef void set_ranges(const sub_tile *s, workspace *w, const mha_kernels *k, ptrdiff_t first,
                     ptrdiff_t n_key) noexcept nogil:
    """Each row's visible keys, counted from key `first` of a block."""
    cdef ptrdiff_t r
    for r in range(k.tile_rows if s.n_row > MHA_MAX_FEW_ROWS else max(s.n_row, k.lanes)):
        if r < s.n_row:
            put(k, w.first, r, min(max(s.first[r] - first, 0), n_key))
            put(k, w.last, r, min(max(s.last[r] - first, 0), n_key))
        else:  # lanes without a row
            put(k, w.first, r, 0)
            put(k, w.last, r, n_key)


cdef void set_positions(const sub_tile *s, workspace *w, const mha_kernels *k, ptrdiff_t first) noexcept nogil:
    """Each row's ALiBi slope, and its distance from key `first`."""
    cdef ptrdiff_t r
    for r in range(s.n_row):
        put(k, w.slope, r, s.slope[r])
        put(k, w.distance, r, <double>(s.position[r] - first))


cdef mha_finish finish_of(const sub_tile *s, const mha_problem *p, ptrdiff_t row) noexcept nogil:
    cdef mha_finish how
    how.lse_scale = p.lse_scale
    how.sink = &s.sink[row] if p.sink != NULL else NULL
    how.gate = &s.gate[row] if p.gate != NULL else NULL
    how.lse = <char **>&s.lse[row] if p.lse != NULL else NULL
    return how


# ------------------------------------------------------------------------------------------------------ tiles of rows

cdef struct key_block:
    ptrdiff_t first, last            # keys of the block that some row of the task may see
    const char *key
    const char *value
    int finite                       # of the values: 1 all, 0 not all, -1 not looked at yet


cdef void attend_block(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k, key_block *block,
                       const mha_ahead *ahead_values, const mha_ahead *ahead_keys) noexcept nogil:
    """One sub-tile against one key block: scores, mask, a step of the online softmax, values."""
    cdef ptrdiff_t first = max(block.first, s.first_key), n_key = min(block.last, s.last_key) - first
    cdef bint edge = first < s.all_first or first + n_key > s.all_last
    cdef int holds = MHA_MASK_VISIBLE
    cdef const char *value = block.value + (first - block.first) * p.value.row_stride
    cdef mha_adjust how
    if n_key <= 0:
        return
    if p.mask_type != MHA_NO_MASK:
        holds = read_mask(s, w, p, k, first, n_key)
        if not holds & MHA_MASK_VISIBLE:
            return

    k.scores(w.score, w.peak, s.packed, s.n_row, block.key + (first - block.first) * p.key.row_stride,
             p.key.row_stride, n_key, p.head_width, ahead_values)
    cdef bint excludes = edge or holds & MHA_MASK_EXCLUDED
    if p.natural or excludes:
        memset(&how, 0, sizeof(how))
        how.score_scale = p.score_scale
        how.softcap = p.softcap
        if p.alibi_slope != NULL:
            set_positions(s, w, k, first)
            how.slope, how.distance = w.slope, w.distance
        if p.mask_type != MHA_NO_MASK:
            how.bias, how.bias_row_stride = w.bias, not s.same_mask
        if edge:
            set_ranges(s, w, k, first, n_key)
            how.first, how.last = w.first, w.last
        k.adjust(w.score, w.peak, s.n_row, n_key, &how)
    k.softmax(w.score, w.peak, s.maximum, s.total, w.rescale, s.n_row, n_key, p.exp_scale)

    # A weight of 0 does not silence an Inf or NaN value.
    if excludes and block.finite < 0:
        block.finite = k.all_finite(block.value, p.value.row_stride, block.last - block.first, p.value_width)
    if excludes and not block.finite:
        memset(w.visible, 0, n_key * k.tile_rows * k.item_size)
        how.score_scale, how.softcap, how.slope = 1, 0, NULL
        k.adjust(w.visible, w.peak, s.n_row, n_key, &how)
        k.values_guarded(s.sum, w.rescale, w.score, w.visible, s.n_row, value, p.value.row_stride, n_key,
                         p.value_width)
    else:
        k.values(s.sum, w.rescale, w.score, s.n_row, value, p.value.row_stride, n_key, p.value_width, ahead_keys)


cdef inline const char *keys_of(const mha_problem *p, ptrdiff_t pair) noexcept nogil:
    return p.key.data + p.batch_offset[1][pair // p.n_kv_head] + pair % p.n_kv_head * p.key.head_stride


cdef inline const char *values_of(const mha_problem *p, ptrdiff_t pair) noexcept nogil:
    return p.value.data + p.batch_offset[2][pair // p.n_kv_head] + pair % p.n_kv_head * p.value.head_stride


cdef void attend_rows(workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t pair, ptrdiff_t row,
                      ptrdiff_t n_row, bint next_pair_follows) noexcept nogil:
    """Rows row ... row + n_row - 1 of a (batch entry, key/value head) pair, some sub-tiles of them."""
    cdef const char *key = keys_of(p, pair)
    cdef const char *value = values_of(p, pair)
    cdef ptrdiff_t first_key = p.n_key, last_key = 0, n_sub = 0, done = 0, i, r, start
    cdef mha_ahead none, ahead_values, ahead_keys
    cdef mha_finish how
    cdef key_block block
    cdef sub_tile *s
    while done < n_row:
        s = &w.sub[n_sub]
        describe_rows(s, p, k, pair, row + done, min(k.tile_rows, n_row - done))
        k.pack_query(s.packed, s.query, s.n_row, p.head_width, p.query_scale)
        memset(s.sum, 0, p.value_width * k.tile_rows * k.item_size)
        memset(s.total, 0, k.tile_rows * k.item_size)
        for r in range(k.tile_rows):
            put(k, s.maximum, r, -INFINITY)
        first_key, last_key = min(first_key, s.first_key), max(last_key, s.last_key)
        done += s.n_row
        n_sub += 1

    memset(&none, 0, sizeof(none))
    start = first_key // MHA_KEY_BLOCK * MHA_KEY_BLOCK
    while start < last_key:
        block.first, block.last = max(start, first_key), min(start + MHA_KEY_BLOCK, last_key)
        block.key, block.value = key + block.first * p.key.row_stride, value + block.first * p.value.row_stride
        block.finite = -1
        # Values come in while the first sub-tile computes scores, the next keys while the last one adds values;
        # after the last keys of a head those of the next head.
        ahead_values = mha_ahead(block.value, p.value.row_stride, block.last - block.first,
                                 p.value_width * k.item_size)
        ahead_keys = mha_ahead(key + block.last * p.key.row_stride, p.key.row_stride,
                               min(MHA_KEY_BLOCK, last_key - block.last), p.head_width * k.item_size)
        if block.last == last_key and next_pair_follows:
            ahead_keys.data, ahead_keys.n_row = keys_of(p, pair + 1), min(MHA_KEY_BLOCK, p.n_key)
        for i in range(n_sub):
            attend_block(&w.sub[i], w, p, k, &block, &ahead_values if i == 0 else &none,
                         &ahead_keys if i == n_sub - 1 else &none)
        start += MHA_KEY_BLOCK

    for i in range(n_sub):
        s = &w.sub[i]
        how = finish_of(s, p, 0)
        k.finish(s.out, s.sum, s.maximum, s.total, s.n_row, p.value_width, &how)


# ----------------------------------------------------------------------------------------------------------- few rows

cdef struct partial:                 # results of one key split, a piece of the buffer of all of them
    char *data
    ptrdiff_t n_split, size, maximum, total


cdef void lay_out_partial(partial *part, const mha_problem *p, const mha_kernels *k, ptrdiff_t n_row) noexcept nogil:
    part.n_split = max((p.n_key + MHA_KEY_SPLIT - 1) // MHA_KEY_SPLIT, 1)
    part.maximum = n_row * padded(k, p.value_width) * k.item_size
    part.total = part.maximum + n_row * k.item_size
    part.size = (part.total + n_row * k.item_size + 63) // 64 * 64


cdef void attend_few_rows(workspace *w, const mha_problem *p, const mha_kernels *k, const partial *part,
                          ptrdiff_t pair, ptrdiff_t split) noexcept nogil:
    """All rows of a (batch entry, key/value head) pair against one split of the keys."""
    cdef char *result = part.data + (pair * part.n_split + split) * part.size
    cdef sub_tile *s = &w.sub[0]
    cdef ptrdiff_t n_row = p.group * p.n_query, row_bytes = MHA_KEY_SPLIT * k.item_size, first, n_key, r
    cdef const char *key
    cdef const char *value
    cdef bint excludes
    cdef int holds = MHA_MASK_VISIBLE
    cdef mha_adjust how
    describe_rows(s, p, k, pair, 0, n_row)
    first = max(split * MHA_KEY_SPLIT, s.first_key)
    n_key = min((split + 1) * MHA_KEY_SPLIT, s.last_key) - first
    if n_key > 0 and p.mask_type != MHA_NO_MASK:
        holds = 0
        for r in range(n_row):
            holds |= k.mask_row(<char *>w.bias + r * row_bytes, s.mask[r] + first * p.mask_key_stride,
                                p.mask_key_stride, n_key, p.mask_type)
    if n_key <= 0 or not holds & MHA_MASK_VISIBLE:
        memset(result, 0, part.size)
        for r in range(n_row):
            put(k, result + part.maximum, r, -INFINITY)
        return

    key = keys_of(p, pair) + first * p.key.row_stride
    value = values_of(p, pair) + first * p.value.row_stride
    k.few_pack(s.packed, s.query, n_row, p.head_width, p.query_scale)
    k.few_scores(w.score, s.packed, n_row, key, p.key.row_stride, n_key, p.head_width)
    excludes = first < s.all_first or first + n_key > s.all_last or holds & MHA_MASK_EXCLUDED
    memset(&how, 0, sizeof(how))
    if p.natural or excludes:
        how.score_scale = p.score_scale
        how.softcap = p.softcap
        adjust_few_rows(w.score, s, w, p, k, &how, first, n_key)
    k.few_softmax(w.score, result + part.maximum, result + part.total, n_row, n_key, p.exp_scale)
    if excludes and not k.all_finite(value, p.value.row_stride, n_key, p.value_width):
        memset(w.visible, 0, n_row * row_bytes)
        how.score_scale, how.softcap = 1, 0
        adjust_few_rows(w.visible, s, w, p, k, &how, first, n_key)
        k.few_values_guarded(result, w.score, w.visible, n_row, value, p.value.row_stride, n_key, p.value_width)
    else:
        k.few_values(result, w.score, n_row, value, p.value.row_stride, n_key, p.value_width)


cdef void adjust_few_rows(void *score, sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k,
                          mha_adjust *how, ptrdiff_t first, ptrdiff_t n_key) noexcept nogil:
    cdef ptrdiff_t r, row_bytes = MHA_KEY_SPLIT * k.item_size
    set_ranges(s, w, k, first, n_key)
    set_positions(s, w, k, first)
    for r in range(s.n_row):
        how.first, how.last = <char *>w.first + r * k.item_size, <char *>w.last + r * k.item_size
        if p.mask_type != MHA_NO_MASK:
            how.bias = <char *>w.bias + r * row_bytes
        if p.alibi_slope != NULL:
            how.slope, how.distance = <char *>w.slope + r * k.item_size, <char *>w.distance + r * k.item_size
        k.few_adjust(<char *>score + r * row_bytes, n_key, how)


cdef void merge_few_rows(workspace *w, const mha_problem *p, const mha_kernels *k, const partial *part,
                         ptrdiff_t pair) noexcept nogil:
    """Join the partial results of a pair's rows and write them out."""
    cdef const char *result = part.data + pair * part.n_split * part.size
    cdef ptrdiff_t r, n_row = p.group * p.n_query
    cdef sub_tile *s = &w.sub[0]
    cdef mha_finish how
    describe_rows(s, p, k, pair, 0, n_row)
    for r in range(n_row):
        how = finish_of(s, p, r)
        k.few_merge(s.out[r], result + r * padded(k, p.value_width) * k.item_size,
                    result + part.maximum + r * k.item_size, result + part.total + r * k.item_size, part.size,
                    part.n_split, p.value_width, p.exp_scale, w.mask_work, &how)


# ---------------------------------------------------------------------------------------------------- the two regions

cdef inline ptrdiff_t ceil_divide(ptrdiff_t a, ptrdiff_t b) noexcept nogil:
    return (a + b - 1) // b


cdef int team_size(const mha_problem *p, const mha_kernels *k, int wanted) noexcept nogil:
    """One thread where a second one does not pay; otherwise what is wanted and possible.

    Waking a team costs up to 50 microseconds after idleness (bench/README.md).  The rates are a slow core's: 60
    giga multiply-adds and 10 gigabytes of K and V a second.  Only the shape counts, so equal calls run alike.
    """
    cdef double madds = <double>p.n_batch * p.n_head * p.n_query * p.n_key * (p.head_width + p.value_width)
    cdef double n_byte = <double>p.n_batch * p.n_kv_head * p.n_key * (p.head_width + p.value_width) * k.item_size
    if wanted < 2 or madds / 60e9 + n_byte / 10e9 < 50e-6:
        return 1
    return mha_threads_usable(wanted)


cdef int run_row_tiles(const mha_problem *p, const mha_kernels *k, int wanted) except -1:
    cdef ptrdiff_t n_pair = p.n_batch * p.n_kv_head, n_row = p.group * p.n_query
    cdef ptrdiff_t n_sub = MAX_SUB_TILES, n_tile, task, tile, pair, task_rows
    cdef int n_thread = team_size(p, k, wanted)
    # Few tasks are made smaller so that every thread gets some, and wide heads so that the tile stays in the cache.
    while n_sub > 1 and (n_pair * ceil_divide(n_row, n_sub * k.tile_rows) < 4 * n_thread
                         or n_sub * k.tile_rows * (p.head_width + p.value_width) * k.item_size > 1 << 20):
        n_sub //= 2
    task_rows = n_sub * k.tile_rows
    n_tile = ceil_divide(n_row, task_rows)
    n_thread = <int>min(n_thread, n_pair * n_tile)
    # Causal tiles grow with their number: the long ones first, so that no thread ends with one.  A mask shared by the
    # heads is read by one head after the other while it is in the cache.
    cdef bint tile_major = p.window_right < p.n_key or p.mask_type != MHA_NO_MASK
    # Several heads in a row, where there are many, so that a thread can fetch its next head ahead.
    cdef int n_together = 4 if n_pair * n_tile >= 32 * n_thread and not tile_major else 1
    cdef workspace scratch
    cdef size_t size = lay_out(&scratch, NULL, p, k, n_sub, 0)
    cdef workspace *space = <workspace *>malloc(n_thread * sizeof(workspace))
    cdef char *memory = <char *>aligned_alloc(64, n_thread * size)
    try:
        if space == NULL or memory == NULL:
            raise MemoryError(f"no memory for the workspace of {n_thread} threads, {n_thread * size} bytes")
        for task in range(n_thread):
            lay_out(&space[task], memory + task * size, p, k, n_sub, 0)
        mha_threads_used(n_thread)
        with nogil:
            for task in prange(n_pair * n_tile, schedule="dynamic", chunksize=n_together, num_threads=n_thread):
                if tile_major:
                    tile, pair = n_tile - 1 - task // n_pair, task % n_pair
                else:
                    tile, pair = task % n_tile, task // n_tile
                attend_rows(&space[threadid()], p, k, pair, tile * task_rows,
                            min(task_rows, n_row - tile * task_rows),
                            not tile_major and tile == n_tile - 1 and pair + 1 < n_pair)
    finally:
        free(space)
        free(memory)
    return 0


cdef int run_few_rows(const mha_problem *p, const mha_kernels *k, int wanted) except -1:
    cdef ptrdiff_t n_pair = p.n_batch * p.n_kv_head, task
    cdef partial part
    lay_out_partial(&part, p, k, p.group * p.n_query)
    cdef int n_thread = <int>min(team_size(p, k, wanted), n_pair * part.n_split)
    cdef workspace scratch
    cdef size_t size = lay_out(&scratch, NULL, p, k, 1, part.n_split)
    cdef workspace *space = <workspace *>malloc(n_thread * sizeof(workspace))
    cdef char *memory = <char *>aligned_alloc(64, n_thread * size + n_pair * part.n_split * part.size)
    try:
        if space == NULL or memory == NULL:
            raise MemoryError(f"no memory for the workspace of {n_thread} threads, {n_thread * size} bytes, "
                              f"and {n_pair * part.n_split} partial results of {part.size} bytes")
        for task in range(n_thread):
            lay_out(&space[task], memory + task * size, p, k, 1, part.n_split)
        part.data = memory + n_thread * size
        mha_threads_used(n_thread)
        with nogil:
            for task in prange(n_pair * part.n_split, schedule="dynamic", chunksize=1, num_threads=n_thread):
                attend_few_rows(&space[threadid()], p, k, &part, task // part.n_split, task % part.n_split)
            for task in prange(n_pair, schedule="static", num_threads=n_thread):
                merge_few_rows(&space[threadid()], p, k, &part, task)
    finally:
        free(space)
        free(memory)
    return 0


# ---------------------------------------------------------------------------------------------------- Python's entrance

cdef const mha_isa *chosen = NULL


cdef void choose_units(mha_problem *p, double scale, size_t item_size) noexcept:
    """Keep scores raw and fold the scale into the exponential, unless something has to be added to the logits."""
    cdef double exponent = fabs(scale) * LOG2_E
    cdef double most = 1e37 if item_size == 4 else 1e307  # what the type holds with room to spare
    p.natural = (p.softcap != 0 or p.alibi_slope != NULL or p.mask_type > MHA_BOOL
                 or (scale != 0 and not 1 / most < exponent < most))
    p.query_scale, p.score_scale, p.exp_scale, p.lse_scale = 1, 1, LOG2_E, 1
    if p.natural:
        p.score_scale = scale
    elif scale == 0:
        p.query_scale = 0
    else:
        p.query_scale = 1 if scale > 0 else -1
        p.exp_scale, p.lse_scale = exponent, fabs(scale)


cdef void set_operand(mha_operand *operand, const Py_buffer *view):
    """The last three axes (head, row, column) of a buffer; axes of length 1 or absent do not move."""
    cdef int n = view.ndim
    operand.data = <char *>view.buf
    operand.head_stride = view.strides[n - 3] if n >= 3 and view.shape[n - 3] != 1 else 0
    operand.row_stride = view.strides[n - 2] if n >= 2 and view.shape[n - 2] != 1 else 0


cdef void set_batch_offsets(ptrdiff_t *offset, const Py_buffer *view, const Py_ssize_t *shape, int n_axis):
    """Byte offset of every entry of the broadcast batch axes, in C order."""
    cdef ptrdiff_t stride[MAX_BATCH_AXES]
    cdef ptrdiff_t index[MAX_BATCH_AXES]
    cdef ptrdiff_t n_entry = 1, entry, here = 0
    cdef int axis, own, own_axes = view.ndim - 3
    for axis in range(n_axis):
        own = axis - (n_axis - own_axes)
        stride[axis] = view.strides[own] if own >= 0 and view.shape[own] != 1 else 0
        index[axis] = 0
        n_entry *= shape[axis]
    for entry in range(n_entry):
        offset[entry] = here
        for axis in range(n_axis - 1, -1, -1):
            index[axis] += 1
            here += stride[axis]
            if index[axis] < shape[axis]:
                break
            here -= index[axis] * stride[axis]
            index[axis] = 0


cdef const void *numbers(object array, Py_buffer *view, int *n_view) except? NULL:
    """Data of a contiguous array of per-batch or per-head numbers; None gives NULL."""
    if array is None:
        return NULL
    PyObject_GetBuffer(array, &view[n_view[0]], PyBUF_STRIDED_RO)
    n_view[0] += 1
    return view[n_view[0] - 1].buf


def attend(query, key, value, out, lse, mask, int mask_type, key_length, query_offset, int64_t window_left,
           int64_t window_right, double scale, double softcap, alibi_slope, sink, gate, tuple batch_shape,
           int n_thread):
    """Attention of checked and normalised operands (mha_fast/_arguments.py), written into `out` and `lse`.

    query, key, value and out have a head axis and a contiguous last axis; batch axes broadcast.  The numbers per
    batch entry and head are contiguous int64 and float64 arrays over the whole batch, or None.
    """
    cdef Py_buffer view[11]
    cdef Py_ssize_t shape[MAX_BATCH_AXES]
    cdef mha_problem p
    cdef const mha_kernels *k
    cdef ptrdiff_t *offset = NULL
    cdef int n_view = 0, i, n_axis = len(batch_shape)
    memset(&p, 0, sizeof(p))
    memset(view, 0, sizeof(view))
    try:
        for array in (query, key, value, out):
            PyObject_GetBuffer(array, &view[n_view], PyBUF_STRIDED_RO if n_view < 3 else PyBUF_STRIDES | PyBUF_WRITABLE)
            n_view += 1
        if mask is not None:
            PyObject_GetBuffer(mask, &view[n_view], PyBUF_STRIDED_RO)
            n_view += 1
            p.mask_type = <mha_mask_type>mask_type
            set_operand(&p.mask, &view[4])
            i = view[4].ndim - 1
            p.mask_key_stride = view[4].strides[i] if i >= 0 and view[4].shape[i] != 1 else 0
        set_operand(&p.query, &view[0])
        set_operand(&p.key, &view[1])
        set_operand(&p.value, &view[2])
        set_operand(&p.out, &view[3])

        p.n_batch = 1
        for i in range(n_axis):
            shape[i] = batch_shape[i]
            p.n_batch *= shape[i]
        p.n_head, p.n_query, p.head_width = query.shape[-3:]
        p.n_kv_head, p.n_key = key.shape[-3:-1]
        p.value_width = value.shape[-1]
        p.group = p.n_head // max(p.n_kv_head, 1)
        offset = <ptrdiff_t *>malloc(N_OPERAND * p.n_batch * sizeof(ptrdiff_t))
        if offset == NULL:
            raise MemoryError(f"no memory for the offsets of {p.n_batch} batch entries")
        for i in range(N_OPERAND if mask is not None else N_OPERAND - 1):
            p.batch_offset[i] = offset + i * p.n_batch
            set_batch_offsets(offset + i * p.n_batch, &view[i], shape, n_axis)

        p.lse = <char *>numbers(lse, view, &n_view)
        p.key_length = <const int64_t *>numbers(key_length, view, &n_view)
        p.query_offset = <const int64_t *>numbers(query_offset, view, &n_view)
        p.alibi_slope = <const double *>numbers(alibi_slope, view, &n_view)
        p.sink = <const double *>numbers(sink, view, &n_view)
        p.gate = <const double *>numbers(gate, view, &n_view)
        p.window_left, p.window_right = window_left, window_right
        p.softcap = softcap

        k = &chosen.float32 if view[0].itemsize == 4 else &chosen.float64
        choose_units(&p, scale, view[0].itemsize)
        if p.group * p.n_query <= MHA_MAX_FEW_ROWS:
            run_few_rows(&p, k, n_thread)
        else:
            run_row_tiles(&p, k, n_thread)
    finally:
        free(offset)
        for i in range(n_view):
            PyBuffer_Release(&view[i])


# -------------------------------------------------------------------------------------------- instruction set, threads

def built_isas():
    """Names of the instruction sets in this build, slowest first."""
    return tuple(mha_built[i].name.decode() for i in range(mha_n_built))


def available_isas():
    """Names of those that this CPU and operating system can run, slowest first."""
    return tuple(mha_built[i].name.decode() for i in range(mha_n_built) if mha_runnable(mha_built[i]))


def isa():
    """Name of the one in use."""
    return chosen.name.decode()


def use_isa(str name):
    """Use the named instruction set from now on.  ValueError if it is unknown or cannot run here."""
    global chosen
    if name not in built_isas():
        raise ValueError(f"unknown instruction set {name!r}; this build has {', '.join(built_isas())}")
    if name not in available_isas():
        raise ValueError(f"instruction set {name!r} cannot run on this machine; "
                         f"available: {', '.join(available_isas())}")
    for i in range(mha_n_built):
        if mha_built[i].name.decode() == name:
            chosen = mha_built[i]


def has_openmp():
    """Whether this build runs on more than one thread."""
    return bool(mha_has_openmp())


def default_threads():
    """Threads that the OpenMP runtime would use."""
    return mha_threads_default()


def measure_fma_peak(int n_thread=1, ptrdiff_t n_round=300_000):
    """GFLOP/s of independent float32 multiply-adds on n_thread threads: what speeds are held against."""
    from time import perf_counter
    cdef double operations = 0
    cdef int _
    start = perf_counter()
    mha_threads_used(n_thread)
    with nogil:
        for _ in prange(n_thread, schedule="static", chunksize=1, num_threads=n_thread):
            operations += chosen.multiply_add_rounds(n_round)
    return operations / (perf_counter() - start) / 1e9


use_isa(available_isas()[-1])
