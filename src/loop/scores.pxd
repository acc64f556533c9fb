# What becomes of a block of scores before the softmax: the one reader of masks, and the adjustment that goes with it.
from libc.math cimport INFINITY, NAN
from libc.string cimport memset

from contract.decode cimport MHA_KEY_SPLIT
from contract.instruction_set cimport mha_kernels
from contract.problem cimport MHA_BOOL, MHA_MASK, mha_problem
from contract.tiles cimport (
    MHA_KEY_BLOCK, MHA_MASK_EXCLUDED, MHA_MASK_LARGE, MHA_MASK_VISIBLE, mha_adjust, mha_mask_tile, mha_prefetch,
)
from loop.operands cimport adds_mask, has_mask, size_of
from loop.structs cimport MAX_ROWS, ceil_divide, mask_cache, put, sub_tile, workspace
from loop.visibility cimport set_distances, set_ranges


cdef inline bint is_cached(mask_cache *cached, const sub_tile *s, ptrdiff_t n_row, ptrdiff_t n_key, ptrdiff_t skipped,
                           ptrdiff_t row_width) noexcept nogil:
    """Whether this piece of the mask is there already; note that it will be."""
    cdef ptrdiff_t r
    cdef bint there = cached.n_row == n_row and cached.n_key == n_key and cached.row_width == row_width
    for r in range(n_row):
        there = there and cached.row[r] == s.mask[r] + skipped
        cached.row[r] = s.mask[r] + skipped
    cached.n_row, cached.n_key, cached.row_width = n_row, n_key, row_width
    return there


cdef inline int read_mask_pieces(workspace *w, const mha_problem *p, const mha_kernels *k, mha_mask_tile tile,
                                 ptrdiff_t row_width, ptrdiff_t n_key) noexcept nogil:
    """More keys than `tile` takes at once; what it does not write of a bool mask is filled in."""
    cdef const char *row[MAX_ROWS]
    cdef ptrdiff_t r, n_piece, done = 0, key_stride = p.operand[MHA_MASK].column_stride
    cdef int piece, holds = 0
    cdef char *bias
    while done < n_key:
        for r in range(w.cached.n_row):
            row[r] = w.cached.row[r] + done * key_stride
        bias, n_piece = <char *>w.bias + done * row_width * k.item_size, min(n_key - done, MHA_KEY_BLOCK)
        piece = tile(bias, w.mask_work, row, w.cached.n_row, key_stride, n_piece, p.operand[MHA_MASK].storage)
        if p.operand[MHA_MASK].storage == MHA_BOOL and piece != MHA_MASK_VISIBLE | MHA_MASK_EXCLUDED:
            for r in range(n_piece * row_width):
                put(k, bias, r, 0 if piece & MHA_MASK_VISIBLE else -INFINITY)
        holds |= piece
        done += n_piece
    return holds


cdef inline int read_mask_rows(workspace *w, const mha_problem *p, const mha_kernels *k, ptrdiff_t n_key) noexcept nogil:
    """Row by row, [row][MHA_KEY_SPLIT]."""
    cdef ptrdiff_t r
    cdef int holds = 0
    for r in range(w.cached.n_row):
        holds |= k.mask.row(<char *>w.bias + r * MHA_KEY_SPLIT * k.item_size, w.cached.row[r],
                            p.operand[MHA_MASK].column_stride, n_key, p.operand[MHA_MASK].storage)
    return holds


cdef inline int read_mask(const sub_tile *s, workspace *w, const mha_problem *p, const mha_kernels *k,
                          mha_mask_tile tile, ptrdiff_t row_width, ptrdiff_t first, ptrdiff_t n_key) noexcept nogil:
    """Have the mask of some keys as numbers in w.bias, unless they are there already; return what it holds.

    They are [key] where one row of the mask serves all rows; otherwise what `tile` makes of them, [key][row_width]; with
    tile NULL [row][MHA_KEY_SPLIT].
    """
    cdef mask_cache *cached = &w.cached
    cdef ptrdiff_t key_stride = p.operand[MHA_MASK].column_stride
    if not has_mask(p):
        return MHA_MASK_VISIBLE
    if is_cached(cached, s, 1 if s.same_mask else s.n_row, n_key, first * key_stride, row_width):
        return cached.holds
    if s.same_mask or tile == NULL:
        cached.holds = read_mask_rows(w, p, k, n_key)
    elif n_key <= MHA_KEY_BLOCK:
        cached.holds = tile(w.bias, w.mask_work, cached.row, s.n_row, key_stride, n_key, p.operand[MHA_MASK].storage)
    else:
        cached.holds = read_mask_pieces(w, p, k, tile, row_width, n_key)
    return cached.holds


cdef inline mha_prefetch mask_ahead(const sub_tile *s, const mha_problem *p, ptrdiff_t first,
                                    ptrdiff_t last) noexcept nogil:
    """The mask of keys first ... last - 1 as something to fetch: its rows lie too far apart for the hardware to foresee.

    Nothing where they are not one row per query at equal distances, or where their keys are not together.
    """
    cdef ptrdiff_t size = size_of(p.operand[MHA_MASK].storage)
    cdef bint plain = p.operand[MHA_MASK].column_stride == size and p.query_index == NULL and not s.same_mask
    if not plain or first >= last or (p.packed_heads > 1 and p.operand[MHA_MASK].head_stride != 0):
        return mha_prefetch(NULL, 0, 0, 0, NULL)
    return mha_prefetch(s.mask[0] + first * size, p.operand[MHA_MASK].row_stride, ceil_divide(s.n_row, p.packed_heads),
                        (last - first) * size, NULL)


cdef inline bint is_excluding(const sub_tile *s, ptrdiff_t first, ptrdiff_t n_key, int holds) noexcept nogil:
    """Whether some of the keys are excluded for some row, by position or by the mask."""
    return first < s.all_first or first + n_key > s.all_last or holds & MHA_MASK_EXCLUDED


cdef inline void set_adjustment(mha_adjust *how, const sub_tile *s, workspace *w, const mha_problem *p,
                                const mha_kernels *k, ptrdiff_t first, ptrdiff_t n_key, int holds) noexcept nogil:
    """What makes logits of the dot products of some keys, whose mask has been read."""
    cdef ptrdiff_t r
    memset(how, 0, sizeof(mha_adjust))
    how.score_scale = p.score_scale
    how.softcap = p.softcap
    if p.alibi_slope != NULL:
        for r in range(s.n_row):
            put(k, w.slope, r, s.slope[r] if s.slope[r] == s.slope[r] else NAN)  # see simplify_nan in mask.h
        set_distances(s, w, k, first)
        how.slope, how.distance = w.slope, w.distance
    if adds_mask(p) or holds & MHA_MASK_EXCLUDED:
        how.bias, how.bias_row_stride, how.bias_harmless = w.bias, not s.same_mask, not holds & MHA_MASK_LARGE
    if first < s.all_first or first + n_key > s.all_last:
        set_ranges(s, w, k, first, n_key)
        how.first, how.last = w.first, w.last


cdef inline void keep_exclusions(mha_adjust *how) noexcept nogil:
    """Let it turn scores of 0 into -inf where a key is excluded, and leave the others finite."""
    how.score_scale, how.softcap, how.slope = 1, 0, NULL
