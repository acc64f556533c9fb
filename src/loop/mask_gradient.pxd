# The gradient of a mask: a pass of its own, parallel over tiles of the mask's own shape.  Each tile takes in all that it
# was broadcast to, in their order, so that no array is larger than the mask itself.
from libc.stdint cimport int64_t
from libc.string cimport memcpy, memset

from contract.instruction_set cimport mha_kernels
from contract.problem cimport mha_problem
from contract.tiles cimport MHA_KEY_BLOCK
from loop.backward cimport INTO_MASK, begin_rows_back, differentiate_block, keys_back, rows_back, space_back
from loop.forward cimport scored
from loop.structs cimport MAX_ROWS, ceil_divide, get, put
from loop.watch cimport may_go_on

cdef struct mask_gradient:
    # The gradient of a mask of shape (n_entry, n_head, n_query, n_key), each its own or 1.
    char *data
    ptrdiff_t n_entry, n_head, n_query, n_key
    const int64_t *batch_of          # batch entries, those of mask entry e from first_of[e] on
    const int64_t *first_of


cdef inline double sum_of(const mha_kernels *k, const void *numbers, ptrdiff_t n) noexcept nogil:
    cdef double total = 0
    cdef ptrdiff_t i
    for i in range(n):
        total += get(k, numbers, i)
    return total


cdef inline void store_mask_tile(space_back *b, const mha_kernels *k, const mask_gradient *m, ptrdiff_t row, ptrdiff_t key,
                                 ptrdiff_t n_row, ptrdiff_t n_key) noexcept nogil:
    """Sum a finished tile over the axes that the mask does not have, and write it."""
    cdef ptrdiff_t r
    cdef char *address[MAX_ROWS]
    cdef char *at = m.data + (row * m.n_key + (0 if m.n_key == 1 else key)) * k.item_size
    cdef void *sums = b.tile
    n_key = min(n_key, MHA_KEY_BLOCK)
    if m.n_query == 1:
        k.backward.sum_over_rows(b.key_sum, b.tile, n_key)
        if m.n_key > 1:
            memcpy(at, b.key_sum, n_key * k.item_size)
        else:
            put(k, at, 0, sum_of(k, b.key_sum, n_key))
        return
    n_row = min(n_row, k.tile_rows)
    if m.n_key == 1:
        memset(b.row_sum, 0, k.tile_rows * k.item_size)
        k.backward.add_over_keys(b.row_sum, sums, NULL, n_row, n_key)
        memcpy(at, b.row_sum, n_row * k.item_size)
        return
    for r in range(n_row):
        address[r] = at + r * m.n_key * k.item_size
    k.backward.store_tile(address, sums, n_row, n_key)


cdef inline void sum_into_tile(space_back *b, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head,
                               ptrdiff_t row, ptrdiff_t last_row, ptrdiff_t first_key, ptrdiff_t last_key) noexcept nogil:
    """Add the gradients of all blocks of these rows and keys to b.tile, one upon the other."""
    cdef ptrdiff_t start
    cdef rows_back *x = &b.rows[0]
    cdef keys_back block
    cdef scored scores
    while row < last_row:
        begin_rows_back(x, b, p, k, batch_head, row, min(k.tile_rows, last_row - row), INTO_MASK)
        b.w.cached.n_row = 0
        start = first_key
        while (start < min(last_key, x.s.last_key)
               and may_go_on(b.w.look, b.w.thread, k.tile_rows * MHA_KEY_BLOCK)):
            block = keys_back(start, min(start + MHA_KEY_BLOCK, last_key), False, -1)
            scores = differentiate_block(x, b, p, k, &block, INTO_MASK)
            if scores.n_key > 0:
                k.backward.add_tile(<char *>b.tile + (scores.first - start) * k.tile_rows * k.item_size, b.grad, x.s.n_row,
                                    scores.n_key)
            start += MHA_KEY_BLOCK
        row += k.tile_rows


cdef inline void run_mask_task(space_back *b, const mha_problem *p, const mha_kernels *k, const mask_gradient *m,
                               ptrdiff_t task) noexcept nogil:
    """A tile of the mask's gradient: the sum over all that the tile was broadcast to, in their order.

    In this problem every query head is a batch_head of its own, as in the statistics.
    """
    cdef ptrdiff_t n_row_tile = ceil_divide(m.n_query, k.tile_rows), n_key_tile = ceil_divide(m.n_key, MHA_KEY_BLOCK)
    cdef ptrdiff_t key_tile = task % n_key_tile, row_tile = task // n_key_tile % n_row_tile
    cdef ptrdiff_t head = task // n_key_tile // n_row_tile % m.n_head
    cdef ptrdiff_t entry = task // n_key_tile // n_row_tile // m.n_head, n_head = p.n_head if m.n_head == 1 else 1
    cdef ptrdiff_t first_row = row_tile * k.tile_rows, first_key = key_tile * MHA_KEY_BLOCK, i, h
    cdef ptrdiff_t last_row = p.n_query if m.n_query == 1 else min(first_row + k.tile_rows, p.n_query)
    cdef ptrdiff_t last_key = p.n_key if m.n_key == 1 else min(first_key + MHA_KEY_BLOCK, p.n_key)
    memset(b.tile, 0, k.tile_rows * MHA_KEY_BLOCK * k.item_size)
    for i in range(m.first_of[entry], m.first_of[entry + 1]):
        for h in range(n_head):
            sum_into_tile(b, p, k, m.batch_of[i] * p.n_head + head + h, first_row, last_row, first_key, last_key)
    store_mask_tile(b, k, m, (entry * m.n_head + head) * m.n_query + (0 if m.n_query == 1 else first_row), first_key,
                    last_row - first_row, last_key - first_key)
