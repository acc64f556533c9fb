# Where the rows of operands lie.
from libc.stdint cimport int64_t

from contract.problem cimport (
    MHA_ABSENT, MHA_BFLOAT16, MHA_BOOL, MHA_FLOAT16, MHA_FLOAT64, MHA_LSE, MHA_MASK, mha_problem, mha_storage,
)
from loop.structs cimport row_run


cdef inline ptrdiff_t queries_of(const mha_problem *p, ptrdiff_t batch) noexcept nogil:
    return p.query_length[batch] if p.query_length != NULL else p.n_query


cdef inline ptrdiff_t keys_of(const mha_problem *p, ptrdiff_t batch) noexcept nogil:
    return p.key_length[batch] if p.key_length != NULL else p.n_key


cdef inline ptrdiff_t rows_of(const mha_problem *p, ptrdiff_t batch) noexcept nogil:
    """Rows of each of the batch entry's row heads."""
    return p.packed_heads * queries_of(p, batch)


cdef inline bint has(const mha_problem *p, int operand) noexcept nogil:
    return p.operand[operand].storage != MHA_ABSENT


cdef inline bint has_mask(const mha_problem *p) noexcept nogil:
    return p.operand[MHA_MASK].storage != MHA_ABSENT


cdef inline bint adds_mask(const mha_problem *p) noexcept nogil:
    """Whether there is a mask of numbers."""
    return p.operand[MHA_MASK].storage > MHA_BOOL


cdef inline bint has_lse(const mha_problem *p) noexcept nogil:
    return p.operand[MHA_LSE].storage != MHA_ABSENT


cdef inline ptrdiff_t size_of(mha_storage storage) noexcept nogil:
    """Bytes of an element."""
    if storage == MHA_BOOL:
        return 1
    if storage == MHA_FLOAT16 or storage == MHA_BFLOAT16:
        return 2
    return 8 if storage == MHA_FLOAT64 else 4


cdef inline char *row_address(const mha_problem *p, int operand, ptrdiff_t batch, ptrdiff_t head,
                              ptrdiff_t row) noexcept nogil:
    return (p.operand[operand].data + p.operand[operand].batch_offset[batch] + head * p.operand[operand].head_stride
            + row * p.operand[operand].row_stride)


cdef inline row_run next_run(const mha_problem *p, int operand, ptrdiff_t batch_head, ptrdiff_t first,
                             ptrdiff_t n_row) noexcept nogil:
    """Rows of the keys or values that a row head reads, from row `first` on: the only place that knows how they lie.

    Strided rows are all in one run.
    """
    cdef ptrdiff_t batch = batch_head // p.n_row_head
    cdef ptrdiff_t head = batch_head % p.n_row_head * p.packed_heads // p.group_size
    return row_run(row_address(p, operand, batch, head, first), p.operand[operand].row_stride, n_row)


cdef inline void point_to_rows(const char **address, const mha_problem *p, int operand, ptrdiff_t batch_head,
                               ptrdiff_t row, ptrdiff_t n_row, const int64_t *query_index) noexcept nogil:
    """Where rows row ... row + n_row - 1 of a row head lie in an operand; query_index as in mha_problem."""
    cdef ptrdiff_t batch = batch_head // p.n_row_head, first_head = batch_head % p.n_row_head * p.packed_heads
    cdef ptrdiff_t r, i = row // p.packed_heads, in_pack = row % p.packed_heads
    cdef ptrdiff_t row_stride = p.operand[operand].row_stride
    cdef const char *data
    if p.packed_heads == 1 and query_index == NULL:
        data = row_address(p, operand, batch, first_head, row)
        for r in range(n_row):
            address[r] = data + r * row_stride
        return
    for r in range(n_row):
        address[r] = row_address(p, operand, batch, first_head + in_pack, i if query_index == NULL else query_index[i])
        in_pack += 1
        if in_pack == p.packed_heads:
            in_pack = 0
            i += 1
