# The backward pass: gradients from the scores, which are computed again block by block and become weights by the
# log-sum-exp that the forward pass left.
#
# Five products are needed for a block: Q K^T and grad_out V^T, tiles [key][row] as on the way forward; from these, the
# weights and the gradient of the scores; then the gradients of the values, keys and queries, which are sums of rows.
# A task is a chunk of keys and a chunk of rows; ring.pxd says in which order they come.
from libc.math cimport INFINITY
from libc.stdint cimport int64_t
from libc.string cimport memset

from contract.backward cimport mha_backward
from contract.instruction_set cimport mha_kernels
from contract.problem cimport (
    MHA_DELTA, MHA_GRAD_KEY, MHA_GRAD_LSE, MHA_GRAD_OUT, MHA_GRAD_QUERY, MHA_GRAD_VALUE, MHA_KEY, MHA_VALUE, mha_problem,
)
from contract.tiles cimport MHA_KEY_BLOCK, MHA_MASK_VISIBLE, mha_adjust
from loop.dropout cimport drops, set_counters
from loop.forward cimport scored
from loop.operands cimport has, keys_of, next_run, point_to_rows, rows_of
from loop.rows cimport describe_rows
from loop.scores cimport is_excluding, keep_exclusions, read_mask, set_adjustment
from loop.structs cimport MAX_ROWS, ceil_divide, get, padded, put, row_run, sub_tile, workspace
from loop.visibility cimport position_of
from loop.workspace cimport arena, take

cdef enum:
    # Keys and rows of a task, the rows but for a last sub-tile that begins below: chosen, not tuned, so that the four
    # chunks of keys, values and their gradients stay in L2 and a single head has work for several threads.
    KEY_CHUNK = 256
    ROW_CHUNK = 256

cdef struct rows_back:
    # A sub-tile of rows on the way back.
    sub_tile s
    ptrdiff_t row                    # the first one
    const char *grad_out[MAX_ROWS]
    void *packed_grad                # grad_out, packed like queries
    void *query_rows                 # padded rows of the arithmetic type
    void *grad_rows
    void *grad_query                 # what the task adds to
    void *lse
    void *delta
    void *gate
    int queries_finite, grads_finite  # 1, 0, or -1: not looked at yet

cdef struct keys_back:
    # A block of keys and values as padded rows, filled in by the first rows that see any of them.
    ptrdiff_t first, last
    bint filled
    int finite

cdef struct space_back:
    # The buffers of a thread.
    workspace w
    rows_back *rows
    void *grad
    void *keep
    void *key_rows
    void *value_rows
    void *grad_key
    void *grad_value
    void *zeros                      # a row of them
    void *tile
    void *row_sum
    void *key_sum

cdef enum way_of_rows:
    INTO_GRADIENTS
    INTO_SLOPES
    INTO_GATES
    INTO_MASK


cdef inline ptrdiff_t chunk_rows(const mha_kernels *k) noexcept nogil:
    return ceil_divide(ROW_CHUNK, k.tile_rows) * k.tile_rows


cdef inline ptrdiff_t most_sub_tiles(const mha_kernels *k) noexcept nogil:
    """Of a task."""
    return chunk_rows(k) // k.tile_rows


cdef inline size_t lay_out_back(space_back *b, void *base, const mha_problem *p, const mha_kernels *k) noexcept nogil:
    """Place a thread's buffers from `base` on; return their size."""
    cdef arena a
    cdef ptrdiff_t i, item = k.item_size, n_row = k.tile_rows, n_score = n_row * MHA_KEY_BLOCK * item
    cdef ptrdiff_t query_size = padded(k, p.head_width) * item, value_size = padded(k, p.value_width) * item
    cdef rows_back unplaced
    cdef rows_back *x
    a.base, a.used = <size_t>base, 0
    b.rows = <rows_back *>take(&a, most_sub_tiles(k) * sizeof(rows_back))
    for i in range(most_sub_tiles(k)):
        x = &b.rows[i] if base != NULL else &unplaced
        x.s.packed, x.packed_grad = take(&a, n_row * query_size), take(&a, n_row * value_size)
        x.query_rows, x.grad_rows = take(&a, n_row * query_size), take(&a, n_row * value_size)
        x.grad_query = take(&a, n_row * query_size)
        x.lse, x.delta, x.gate = take(&a, n_row * item), take(&a, n_row * item), take(&a, n_row * item)
    memset(&b.w, 0, sizeof(workspace))
    b.w.score, b.grad, b.keep = take(&a, n_score), take(&a, n_score), take(&a, n_score)
    b.w.bias, b.w.visible, b.tile = take(&a, n_score), take(&a, n_score), take(&a, n_score)
    b.w.mask_work = take(&a, k.lanes * MHA_KEY_BLOCK * item)
    b.w.block_maximum, b.w.slope, b.w.distance = take(&a, n_row * item), take(&a, n_row * item), take(&a, n_row * item)
    b.w.first, b.w.last, b.row_sum = take(&a, n_row * item), take(&a, n_row * item), take(&a, n_row * item)
    b.key_sum = take(&a, MHA_KEY_BLOCK * item)
    b.key_rows, b.value_rows = take(&a, MHA_KEY_BLOCK * query_size), take(&a, MHA_KEY_BLOCK * value_size)
    b.grad_key, b.grad_value = take(&a, MHA_KEY_BLOCK * query_size), take(&a, MHA_KEY_BLOCK * value_size)
    b.zeros = take(&a, value_size)
    if base != NULL:
        memset(b.zeros, 0, value_size)
    return a.used


# --------------------------------------------------------------------------------------------------------- rows and keys

cdef inline bint lets_through(const mha_problem *p, double lse, double gate, way_of_rows way) noexcept nogil:
    """Whether anything flows back through a row.  Its query sees no key where lse is -inf."""
    if lse == -INFINITY:
        return False
    return gate != 0 or way == INTO_GATES or has(p, MHA_GRAD_LSE)


cdef inline void set_row_numbers(rows_back *x, space_back *b, const mha_problem *p, const mha_kernels *k,
                                 way_of_rows way) noexcept nogil:
    """Log-sum-exp, delta and gate of each row; rows that nothing flows through see no key."""
    cdef ptrdiff_t r
    cdef sub_tile *s = &x.s
    cdef const char *delta[MAX_ROWS]
    cdef double lse, gate
    if has(p, MHA_DELTA) and way != INTO_GATES:
        point_to_rows(delta, p, MHA_DELTA, s.batch_head, x.row, s.n_row, NULL)
        for r in range(s.n_row):
            put(k, x.delta, r, get(k, delta[r], 0))
    else:
        memset(x.delta, 0, k.tile_rows * k.item_size)
    s.first_key, s.last_key = p.n_key, 0
    for r in range(s.n_row):
        lse, gate = get(k, s.lse[r], 0), s.gate[r] if p.gate != NULL else 1
        if not lets_through(p, lse, gate, way):
            s.first[r] = s.last[r] = s.all_last = 0
            lse = 0
        elif s.first[r] < s.last[r]:
            s.first_key, s.last_key = min(s.first_key, s.first[r]), max(s.last_key, s.last[r])
        if gate == 0 and way != INTO_GATES:
            x.grad_out[r] = <const char *>b.zeros
        put(k, x.lse, r, lse)
        put(k, x.gate, r, 1 if way == INTO_GATES else gate)
    for r in range(s.n_row, k.tile_rows):
        put(k, x.lse, r, 0)
        put(k, x.delta, r, 0)
        put(k, x.gate, r, 1)


cdef inline void begin_rows_back(rows_back *x, space_back *b, const mha_problem *p, const mha_kernels *k,
                                 ptrdiff_t batch_head, ptrdiff_t row, ptrdiff_t n_row, way_of_rows way) noexcept nogil:
    """Describe rows row ... row + n_row - 1 of a batch_head and pack what will be needed of them."""
    cdef sub_tile *s = &x.s
    describe_rows(s, p, batch_head, row, n_row)
    x.row = row
    point_to_rows(x.grad_out, p, MHA_GRAD_OUT, batch_head, row, n_row, NULL)
    set_row_numbers(x, b, p, k, way)
    if s.first_key >= s.last_key:
        return
    if drops(p):
        set_counters(s, p, row)
    k.tile.pack_query(s.packed, s.query, n_row, p.head_width, p.query_scale)
    k.tile.pack_query(x.packed_grad, x.grad_out, n_row, p.value_width, 1)
    if way != INTO_GRADIENTS:
        return
    x.queries_finite = x.grads_finite = -1
    k.backward.copy_rows(x.query_rows, s.query, n_row, p.head_width)
    k.backward.copy_rows(x.grad_rows, x.grad_out, n_row, p.value_width)
    memset(x.grad_query, 0, n_row * padded(k, p.head_width) * k.item_size)


cdef inline void point_to_keys(char **row, const mha_problem *p, int operand, ptrdiff_t batch_head, ptrdiff_t first,
                               ptrdiff_t n_key) noexcept nogil:
    cdef ptrdiff_t j
    cdef row_run rows = next_run(p, operand, batch_head, first, n_key)
    for j in range(n_key):
        row[j] = <char *>rows.data + j * rows.stride


cdef inline void fill_keys(keys_back *block, space_back *b, const mha_problem *p, const mha_kernels *k,
                           ptrdiff_t batch_head) noexcept nogil:
    """Keys and values of a block as padded rows, and nothing in the sums for them yet."""
    cdef char *row[MHA_KEY_BLOCK]
    cdef ptrdiff_t n_key = block.last - block.first
    if has(p, MHA_GRAD_KEY):
        memset(b.grad_key, 0, n_key * padded(k, p.head_width) * k.item_size)
    if has(p, MHA_GRAD_VALUE):
        memset(b.grad_value, 0, n_key * padded(k, p.value_width) * k.item_size)
    block.filled = True
    point_to_keys(row, p, MHA_KEY, batch_head, block.first, n_key)
    k.backward.copy_rows(b.key_rows, <const char **>row, n_key, p.head_width)
    point_to_keys(row, p, MHA_VALUE, batch_head, block.first, n_key)
    k.backward.copy_rows(b.value_rows, <const char **>row, n_key, p.value_width)


# ----------------------------------------------------------------------------------------------------- a block of scores

cdef inline scored differentiate_block(rows_back *x, space_back *b, const mha_problem *p, const mha_kernels *k,
                                       keys_back *block, way_of_rows way) noexcept nogil:
    """Weights of a sub-tile against a key block in b.w.score, and the gradient of its scores in b.grad.

    Without a key where no row sees any.
    """
    cdef sub_tile *s = &x.s
    cdef ptrdiff_t key_size = padded(k, p.head_width) * k.item_size, value_size = padded(k, p.value_width) * k.item_size
    cdef ptrdiff_t skipped
    cdef scored scores
    cdef bint is_adjusted
    cdef int holds
    cdef mha_backward back
    scores.first = max(block.first, s.first_key)
    scores.n_key = min(block.last, s.last_key) - scores.first
    if scores.n_key <= 0:
        return scores
    holds = read_mask(s, &b.w, p, k, k.mask.tile, k.tile_rows, scores.first, scores.n_key)
    if not holds & MHA_MASK_VISIBLE:
        scores.n_key = 0
        return scores
    if not block.filled:
        fill_keys(block, b, p, k, s.batch_head)
    skipped = scores.first - block.first
    k.tile.scores(b.w.score, b.w.block_maximum, s.packed, s.n_row, <char *>b.key_rows + skipped * key_size, key_size,
                  scores.n_key, p.head_width, NULL)
    if has(p, MHA_DELTA):
        k.tile.scores(b.grad, b.w.block_maximum, x.packed_grad, s.n_row, <char *>b.value_rows + skipped * value_size,
                      value_size, scores.n_key, p.value_width, NULL)
    scores.excludes = is_excluding(s, scores.first, scores.n_key, holds)
    is_adjusted = p.natural or scores.excludes
    if is_adjusted:
        set_adjustment(&scores.how, s, &b.w, p, k, scores.first, scores.n_key, holds)
    back.adjust = &scores.how if is_adjusted else NULL
    back.score_scale = p.score_scale if p.natural else p.lse_scale
    back.lse, back.delta, back.gate, back.keep = x.lse, x.delta, x.gate, NULL
    back.grad_scale, back.of_logit = p.grad_scale if way == INTO_GRADIENTS else 1, way != INTO_GRADIENTS
    if drops(p):
        k.dropout.keep_tile(b.keep, s.n_row, scores.first, scores.n_key, &s.drop)
        back.keep = b.keep
    k.backward.differentiate(b.w.score, b.grad if has(p, MHA_DELTA) else NULL, s.n_row, scores.n_key, &back)
    return scores


cdef inline bint needs_guard(rows_back *x, space_back *b, const mha_problem *p, const mha_kernels *k,
                             keys_back *block) noexcept nogil:
    """Whether Inf or NaN lies in the rows or keys: a weight or gradient of 0 does not silence it."""
    cdef ptrdiff_t key_size = padded(k, p.head_width) * k.item_size, value_size = padded(k, p.value_width) * k.item_size
    if block.finite < 0:
        block.finite = k.tile.all_finite(<char *>b.key_rows, key_size, block.last - block.first, p.head_width)
    if x.queries_finite < 0:
        x.queries_finite = k.tile.all_finite(<char *>x.query_rows, key_size, x.s.n_row, p.head_width)
        x.grads_finite = k.tile.all_finite(<char *>x.grad_rows, value_size, x.s.n_row, p.value_width)
    return not (block.finite and x.queries_finite and x.grads_finite)


cdef inline void add_products(rows_back *x, space_back *b, const mha_problem *p, const mha_kernels *k, keys_back *block,
                              scored *scores) noexcept nogil:
    """From weights and gradients of the scores to those of values, keys and queries."""
    cdef ptrdiff_t key_size = padded(k, p.head_width) * k.item_size, value_size = padded(k, p.value_width) * k.item_size
    cdef ptrdiff_t n_row = x.s.n_row, n_key = scores.n_key, skipped = scores.first - block.first
    cdef void *visible = NULL
    if scores.excludes and needs_guard(x, b, p, k, block):
        visible = b.w.visible
        memset(visible, 0, n_key * k.tile_rows * k.item_size)
        keep_exclusions(&scores.how)
        k.tile.adjust(visible, b.w.block_maximum, n_row, n_key, &scores.how)
    if has(p, MHA_GRAD_VALUE):
        k.backward.add_to_keys(<char *>b.grad_value + skipped * value_size, b.w.score, visible, x.grad_rows, n_key, n_row,
                               p.value_width)
    if has(p, MHA_GRAD_KEY):
        k.backward.add_to_keys(<char *>b.grad_key + skipped * key_size, b.grad, visible, x.query_rows, n_key, n_row,
                               p.head_width)
    if has(p, MHA_GRAD_QUERY):
        k.backward.add_to_rows(x.grad_query, b.grad, visible, <char *>b.key_rows + skipped * key_size, n_row, n_key,
                               p.head_width)


cdef inline void add_key_sums(space_back *b, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head,
                              const keys_back *block) noexcept nogil:
    """What a block's keys and values have got, into their gradients."""
    cdef char *row[MHA_KEY_BLOCK]
    cdef ptrdiff_t n_key = block.last - block.first
    if has(p, MHA_GRAD_KEY):
        point_to_keys(row, p, MHA_GRAD_KEY, batch_head, block.first, n_key)
        k.backward.add_rows(row, b.grad_key, n_key, p.head_width)
    if has(p, MHA_GRAD_VALUE):
        point_to_keys(row, p, MHA_GRAD_VALUE, batch_head, block.first, n_key)
        k.backward.add_rows(row, b.grad_value, n_key, p.value_width)


# ---------------------------------------------------------------------------------------------------------------- a task

cdef inline void add_row_sums(rows_back *x, const mha_problem *p, const mha_kernels *k) noexcept nogil:
    """What the queries of a sub-tile have got, into their gradient."""
    cdef const char *address[MAX_ROWS]
    if x.s.first_key < x.s.last_key:
        point_to_rows(address, p, MHA_GRAD_QUERY, x.s.batch_head, x.row, x.s.n_row, NULL)
        k.backward.add_rows(<char **>address, x.grad_query, x.s.n_row, p.head_width)


cdef inline bint chunks_meet(const mha_problem *p, ptrdiff_t batch, ptrdiff_t row, ptrdiff_t last_row,
                             ptrdiff_t first_key, ptrdiff_t last_key) noexcept nogil:
    """Whether any of the rows may see any of the keys: the ranges of later rows lie further on."""
    if row >= last_row:
        return False
    cdef int64_t start = position_of(p, batch, row // p.packed_heads)
    cdef int64_t end = position_of(p, batch, (last_row - 1) // p.packed_heads)
    return start - p.window_left < last_key and end + p.window_right >= first_key


cdef inline void differentiate_chunks(space_back *b, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head,
                                      ptrdiff_t key_chunk, ptrdiff_t row_chunk) noexcept nogil:
    """What a chunk of keys and a chunk of rows add to the gradients of both."""
    cdef ptrdiff_t batch = batch_head // p.n_row_head, size = chunk_rows(k), n_sub = 0, i, start
    cdef ptrdiff_t row = row_chunk * size, last_row = min(row + size, rows_of(p, batch))
    cdef ptrdiff_t first_key = p.n_key, last_key = 0
    cdef ptrdiff_t chunk_first = key_chunk * KEY_CHUNK, chunk_last = min(chunk_first + KEY_CHUNK, keys_of(p, batch))
    cdef scored scores
    cdef keys_back block
    cdef rows_back *x
    if not chunks_meet(p, batch, row, last_row, chunk_first, chunk_last):
        return
    while row < last_row:
        x = &b.rows[n_sub]
        begin_rows_back(x, b, p, k, batch_head, row, min(k.tile_rows, last_row - row), INTO_GRADIENTS)
        first_key, last_key = min(first_key, x.s.first_key), max(last_key, x.s.last_key)
        row += k.tile_rows
        n_sub += 1
    b.w.cached.n_row = 0
    start = max(chunk_first, first_key // MHA_KEY_BLOCK * MHA_KEY_BLOCK)
    while start < min(chunk_last, last_key):
        block = keys_back(start, min(start + MHA_KEY_BLOCK, chunk_last), False, -1)
        for i in range(n_sub):
            scores = differentiate_block(&b.rows[i], b, p, k, &block, INTO_GRADIENTS)
            if scores.n_key > 0:
                add_products(&b.rows[i], b, p, k, &block, &scores)
        if block.filled:
            add_key_sums(b, p, k, batch_head, &block)
        start += MHA_KEY_BLOCK
    for i in range(n_sub if has(p, MHA_GRAD_QUERY) else 0):
        add_row_sums(&b.rows[i], p, k)
