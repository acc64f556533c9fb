# Few rows: all rows of a row head against one split of the keys, and the combination of the splits.
from libc.math cimport INFINITY
from libc.stdint cimport uint64_t
from libc.string cimport memset

from contract.decode cimport MHA_KEY_SPLIT
from contract.instruction_set cimport mha_kernels
from contract.problem cimport MHA_KEY, MHA_VALUE, mha_problem
from contract.tiles cimport MHA_MASK_VISIBLE, mha_adjust, mha_finish
from loop.dropout cimport drops, set_counters
from loop.operands cimport next_run, rows_of
from loop.plan cimport first_split, splits_of
from loop.rows cimport describe_rows, finish_of
from loop.scores cimport is_excluding, keep_exclusions, read_mask, set_adjustment
from loop.structs cimport padded, plan, put, row_run, sub_tile, workspace


cdef inline char *partial_of(const plan *work, ptrdiff_t batch_head, ptrdiff_t i) noexcept nogil:
    """Partial result number i, counted from the first split of which some query sees a key."""
    return work.partials + (work.first_partial[batch_head] + i) * work.partial_size


cdef inline const void *of_row(const void *array, ptrdiff_t r, ptrdiff_t n_byte) noexcept nogil:
    return <const char *>array + r * n_byte if array != NULL else NULL


cdef inline void adjust_rows(void *score, const sub_tile *s, const mha_kernels *k, const mha_adjust *how,
                             ptrdiff_t n_key) noexcept nogil:
    """Row by row; `how` holds the numbers of all."""
    cdef ptrdiff_t r, row_bytes = MHA_KEY_SPLIT * k.item_size
    cdef mha_adjust own = how[0]
    for r in range(s.n_row):
        own.first, own.last = of_row(how.first, r, k.item_size), of_row(how.last, r, k.item_size)
        own.slope, own.distance = of_row(how.slope, r, k.item_size), of_row(how.distance, r, k.item_size)
        own.bias = of_row(how.bias, r * how.bias_row_stride, row_bytes)
        k.decode.adjust(<char *>score + r * row_bytes, n_key, &own)


cdef inline void decode_split(workspace *w, const mha_problem *p, const mha_kernels *k, const plan *work,
                              ptrdiff_t batch_head, ptrdiff_t split) noexcept nogil:
    """All rows of a row head against one split of the keys."""
    cdef ptrdiff_t n_row = rows_of(p, batch_head // p.n_row_head), first, n_key, r
    cdef char *result = partial_of(work, batch_head, split - first_split(p, batch_head // p.n_row_head))
    cdef char *maximum = result + work.maximum_at
    cdef char *total = result + work.total_at
    cdef sub_tile *s = &w.sub[0]
    cdef row_run key, value
    cdef int holds = 0
    cdef bint excludes
    cdef mha_adjust how
    describe_rows(s, p, batch_head, 0, n_row)
    first = max(split * MHA_KEY_SPLIT, s.first_key)
    n_key = min((split + 1) * MHA_KEY_SPLIT, s.last_key) - first
    if n_key > 0:
        holds = read_mask(s, w, p, k, NULL, MHA_KEY_SPLIT, first, n_key)
    if not holds & MHA_MASK_VISIBLE:
        memset(result, 0, work.partial_size)
        for r in range(n_row):
            put(k, maximum, r, -INFINITY)
        return

    key, value = next_run(p, MHA_KEY, batch_head, first, n_key), next_run(p, MHA_VALUE, batch_head, first, n_key)
    k.decode.pack_query(s.packed, s.query, n_row, p.head_width, p.query_scale)
    k.decode.scores(w.score, s.packed, n_row, key.data, key.stride, n_key, p.head_width)
    excludes = is_excluding(s, first, n_key, holds)
    if p.natural or excludes:
        set_adjustment(&how, s, w, p, k, first, n_key, holds)
        adjust_rows(w.score, s, k, &how, n_key)
    k.decode.softmax(w.score, maximum, total, n_row, n_key, p.exp_scale)
    if drops(p):
        set_counters(s, p, 0)
        for r in range(n_row):
            k.dropout.drop_row(<char *>w.score + r * MHA_KEY_SPLIT * k.item_size, r, first, n_key, &s.drop)
    # A weight of 0 does not silence an Inf or NaN value.
    if excludes and not k.decode.all_finite(value.data, value.stride, n_key, p.value_width):
        memset(w.visible, 0, n_row * MHA_KEY_SPLIT * k.item_size)
        keep_exclusions(&how)
        adjust_rows(w.visible, s, k, &how, n_key)
        k.decode.values_guarded(result, w.score, w.visible, n_row, value.data, value.stride, n_key, p.value_width)
    else:
        k.decode.values(result, w.score, n_row, value.data, value.stride, n_key, p.value_width)


cdef inline void combine_splits(workspace *w, const mha_problem *p, const mha_kernels *k, const plan *work,
                                ptrdiff_t batch_head) noexcept nogil:
    """Combine the partial results of a row head's rows in index order and write them out."""
    cdef ptrdiff_t r, batch = batch_head // p.n_row_head, n_row = rows_of(p, batch)
    cdef const char *result = partial_of(work, batch_head, 0)
    cdef sub_tile *s = &w.sub[0]
    cdef mha_finish how
    cdef bint is_finite
    describe_rows(s, p, batch_head, 0, n_row)
    s.not_finite = 0
    for r in range(n_row):
        how = finish_of(s, p, r)
        is_finite = k.decode.combine(
            s.out[r], result + r * padded(k, p.value_width) * k.item_size,
            result + work.maximum_at + r * k.item_size, result + work.total_at + r * k.item_size, work.partial_size,
            splits_of(p, batch), p.value_width, p.exp_scale, w.combine_work, &how)
        if not is_finite:
            s.not_finite |= <uint64_t>1 << r
