# Passes over the scores with the softmax known, by its maximum and factor: weights as an output, weights that keys receive.
from libc.string cimport memset

from contract.instruction_set cimport mha_kernels
from contract.problem cimport mha_problem
from contract.statistics cimport MHA_FACTOR, MHA_MAXIMUM
from contract.tiles cimport MHA_KEY_BLOCK, mha_finish, mha_prefetch
from loop.forward cimport begin_rows, open_block, score_block, scored, task_rows, walk_blocks, weigh_block
from loop.operands cimport keys_of
from loop.rows cimport describe_rows, finish_of
from loop.structs cimport MAX_ROWS, key_block, put, sub_tile, workspace

cdef enum:
    RECEIVED_KEYS = 512   # keys of a task of `receive`: a packed query serves eight key blocks


cdef inline void store_block(sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k, key_block *block,
                             const mha_prefetch *ahead_values, const mha_prefetch *ahead_keys) noexcept nogil:
    """The weights of a key block as rows of the output."""
    cdef scored scores = score_block(s, w, p, k, block, NULL)
    cdef char *row[MAX_ROWS]
    cdef ptrdiff_t r
    if scores.n_key <= 0:
        return
    for r in range(s.n_row):
        row[r] = s.out[r] + scores.first * k.stored_size
    k.tile.store_weights(row, w.score, s.maximum, s.factor, s.n_row, scores.n_key, p.exp_scale)


cdef inline void write_weights(workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head,
                               ptrdiff_t n_task_head, ptrdiff_t row, ptrdiff_t n_row) noexcept nogil:
    """Weights of rows row ... row + n_row - 1 of some row heads; keys that are not visited get 0."""
    cdef task_rows rows = begin_rows(w, p, k, batch_head, n_task_head, row, n_row)
    cdef ptrdiff_t i, r
    cdef mha_finish how
    cdef sub_tile *s
    walk_blocks(w, p, k, &rows, weigh_block)
    for i in range(rows.n_sub):
        s = &w.sub[i]
        how = finish_of(s, p, 0)
        k.tile.finish_factors(s.factor, s.maximum, s.total, s.n_row, &how)
        for r in range(s.n_row):
            memset(s.out[r], 0, p.n_key * k.stored_size)
    walk_blocks(w, p, k, &rows, store_block)
    for i in range(rows.n_sub):
        s = &w.sub[i]
        for r in range(s.n_row):
            if p.gate != NULL and s.gate[r] == 0:  # switched off, whatever the weights hold
                memset(s.out[r], 0, p.n_key * k.stored_size)


cdef inline void receive(workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t batch_head,
                         ptrdiff_t number) noexcept nogil:
    """What a range of keys receives from all queries, in their order; the statistics hold maxima and factors."""
    cdef double *received = p.asked.received + batch_head * p.n_key
    cdef ptrdiff_t first_key = number * RECEIVED_KEYS, last_key = min(first_key + RECEIVED_KEYS,
                                                                      keys_of(p, batch_head // p.n_row_head))
    cdef ptrdiff_t row = 0, start, r
    cdef sub_tile *s = &w.sub[0]
    cdef key_block block
    cdef scored scores
    while row < p.n_query:
        describe_rows(s, p, batch_head, row, min(k.tile_rows, p.n_query - row))
        k.tile.pack_query(s.packed, s.query, s.n_row, p.head_width, p.query_scale)
        memset(s.factor, 0, k.tile_rows * k.item_size)
        memset(s.maximum, 0, k.tile_rows * k.item_size)
        for r in range(s.n_row):
            put(k, s.maximum, r, (<double *>s.out[r])[MHA_MAXIMUM])
            put(k, s.factor, r, (<double *>s.out[r])[MHA_FACTOR])
        start = first_key
        while start < min(last_key, s.last_key):
            open_block(&block, w, p, k, batch_head, 0, start, min(start + MHA_KEY_BLOCK, last_key), last_key)
            scores = score_block(s, w, p, k, &block, NULL)
            if scores.n_key > 0:
                k.statistics.add_received(received + scores.first, w.score, s.maximum, s.factor, s.n_row, scores.n_key,
                                          p.exp_scale)
            start += MHA_KEY_BLOCK
        row += k.tile_rows
