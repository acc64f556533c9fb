# Beside the gradients: sums of each row over its keys, for delta and for what a head's slope and gate get.
from libc.math cimport INFINITY
from libc.stdint cimport uint8_t
from libc.string cimport memset

from contract.instruction_set cimport mha_kernels
from contract.problem cimport (
    MHA_DELTA, MHA_GATE_SUM, MHA_GRAD_LSE, MHA_GRAD_OUT, MHA_LSE, MHA_OUT, MHA_SLOPE_SUM, mha_problem,
)
from contract.tiles cimport MHA_KEY_BLOCK
from loop.backward cimport (
    INTO_GATES, INTO_SLOPES, begin_rows_back, differentiate_block, keys_back, rows_back, space_back, way_of_rows,
)
from loop.forward cimport scored
from loop.operands cimport has, point_to_rows, rows_of
from loop.structs cimport MAX_ROWS, get, put
from loop.watch cimport may_go_on


cdef inline bint is_silent(const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head, ptrdiff_t row,
                           double lse) noexcept nogil:
    """Whether an output of 0 is that of a query without keys or of a gate of 0, as far as lse tells."""
    cdef ptrdiff_t batch = batch_head // p.n_row_head
    cdef ptrdiff_t head = batch_head % p.n_row_head * p.packed_heads + row % p.packed_heads
    cdef double sink = -INFINITY if p.sink == NULL else p.sink[head]
    if k.item_size == sizeof(float):
        sink = <float>sink
    return lse == -INFINITY or lse == sink or (p.gate != NULL and p.gate[batch * p.n_head + head] == 0)


cdef inline void multiply_rows(const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head,
                               ptrdiff_t start) noexcept nogil:
    """Delta of tile_rows rows."""
    cdef ptrdiff_t n_row = min(k.tile_rows, rows_of(p, batch_head // p.n_row_head) - start)
    cdef const char *grad_out[MAX_ROWS]
    cdef const char *out[MAX_ROWS]
    cdef const char *grad_lse[MAX_ROWS]
    cdef const char *delta[MAX_ROWS]
    cdef const char *lse[MAX_ROWS]
    cdef uint8_t silent[MAX_ROWS]
    cdef ptrdiff_t r
    cdef bint has_grad_lse = has(p, MHA_GRAD_LSE)
    point_to_rows(grad_out, p, MHA_GRAD_OUT, batch_head, start, n_row, NULL)
    point_to_rows(out, p, MHA_OUT, batch_head, start, n_row, NULL)
    point_to_rows(delta, p, MHA_DELTA, batch_head, start, n_row, NULL)
    if has_grad_lse:
        point_to_rows(grad_lse, p, MHA_GRAD_LSE, batch_head, start, n_row, NULL)
    point_to_rows(lse, p, MHA_LSE, batch_head, start, n_row, NULL)
    for r in range(n_row):
        silent[r] = is_silent(p, k, batch_head, start + r, get(k, lse[r], 0))
    k.backward.row_products(<char **>delta, grad_out, out, grad_lse if has_grad_lse else NULL, silent, n_row,
                            p.value_width)


cdef inline void sum_over_keys(space_back *b, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head,
                               ptrdiff_t row, way_of_rows way) noexcept nogil:
    """For each of tile_rows rows the sum over its keys that its head's slope or gate gets."""
    cdef ptrdiff_t n_row = min(k.tile_rows, rows_of(p, batch_head // p.n_row_head) - row), start, r
    cdef int operand = MHA_SLOPE_SUM if way == INTO_SLOPES else MHA_GATE_SUM
    cdef const char *address[MAX_ROWS]
    cdef rows_back *x = &b.rows[0]
    cdef keys_back block
    cdef scored scores
    begin_rows_back(x, b, p, k, batch_head, row, n_row, way)
    memset(b.row_sum, 0, k.tile_rows * k.item_size)
    b.w.cached.n_row = 0
    start = x.s.first_key // MHA_KEY_BLOCK * MHA_KEY_BLOCK
    while start < x.s.last_key and may_go_on(b.w.look, b.w.thread, k.tile_rows * MHA_KEY_BLOCK):
        block = keys_back(start, min(start + MHA_KEY_BLOCK, x.s.last_key), False, -1)
        scores = differentiate_block(x, b, p, k, &block, way)
        if scores.n_key > 0:
            k.backward.add_over_keys(b.row_sum, b.grad, scores.how.distance if way == INTO_SLOPES else NULL, n_row,
                                     scores.n_key)
        start += MHA_KEY_BLOCK
    point_to_rows(address, p, operand, batch_head, row, n_row, NULL)
    for r in range(n_row):
        put(k, <void *>address[r], 0, get(k, b.row_sum, r))


cdef inline void run_row_task(space_back *b, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head,
                              ptrdiff_t row) noexcept nogil:
    """All of them, for tile_rows rows."""
    if row >= rows_of(p, batch_head // p.n_row_head):
        return
    multiply_rows(p, k, batch_head, row)
    if has(p, MHA_SLOPE_SUM):
        sum_over_keys(b, p, k, batch_head, row, INTO_SLOPES)
    if has(p, MHA_GATE_SUM):
        sum_over_keys(b, p, k, batch_head, row, INTO_GATES)
