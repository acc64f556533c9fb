# What the modules of the loop share: the structures of a call, and the smallest helpers.
from libc.stdint cimport int64_t, uint64_t

from contract.dropout cimport mha_dropout
from contract.instruction_set cimport mha_kernels
from contract.matrix cimport MHA_MATRIX_CHUNK, mha_matrix_item, mha_matrix_kernels, mha_packed, mha_pipeline
from contract.statistics cimport mha_moments
from contract.tiles cimport mha_prefetch
from loop.watch cimport watch

cdef enum:
    MAX_SUB_TILES = 8     # of a task of row tiles
    MAX_MATRIX_SUB_TILES = 32  # of a task for the matrix unit, whose sub-tiles are the smaller ones
    MAX_TASK_HEADS = 4    # of such a task: row heads whose rows share a mask
    N_ITEM = 12           # of the matrix unit; four are in use, with two buffers of scores and three of weights in turn
    MAX_ROWS = 64         # MHA_MAX_ROWS; members of a structure need a literal

cdef extern from *:
    """
    #include "contract/tiles.h"
    _Static_assert(MHA_MAX_ROWS == 64, "MAX_ROWS in src/loop/structs.pxd");
    """

# ---------------------------------------------------------------------------------------------------- what is to be done

cdef enum task_kind:
    # Rows times keys, by what is made of the scores and how.
    DECODE       # attention, few rows: one split of the keys
    TILES        # attention, tiles of rows
    MATRIX       # attention, tiles of rows on the matrix unit
    WEIGHTS      # the weights themselves
    STATISTICS   # measurements of them

cdef struct task:
    task_kind kind
    ptrdiff_t batch_head, n_task_head  # the first of some row heads of a batch entry, and how many they are
    ptrdiff_t start                  # first row; of a DECODE task: number of the key split
    ptrdiff_t cost                   # products of a row and a key, about

cdef struct plan:
    task_kind kind                   # of rows for which no other kind is faster: TILES, WEIGHTS or STATISTICS
    task *tasks
    ptrdiff_t n_task
    bint has_tiles, has_decode, has_matrix, has_splits  # splits: partial results of more than one task to be combined
    ptrdiff_t n_sub                  # sub-tiles of a task of row tiles, for each row head
    ptrdiff_t n_task_head            # row heads of such a task, at most
    int n_together                   # neighbouring tasks that a thread takes at once
    ptrdiff_t most_splits
    # partial results of DECODE tasks: number i of a batch_head is number first_partial[batch_head] + i
    ptrdiff_t *first_partial
    ptrdiff_t n_partial, partial_size, maximum_at, total_at
    char *partials
    # the matrix unit, if there is one and this call may use it
    const mha_matrix_kernels *matrix
    ptrdiff_t min_rows, min_keys     # of a batch_head that uses it
    ptrdiff_t n_matrix_sub           # sub-tiles of its tasks
    ptrdiff_t key_block_size, value_block_size

# ------------------------------------------------------------------------------------------------- what a thread works on

cdef struct row_run:
    # Rows at equal distances in memory.
    const char *data
    ptrdiff_t stride, n_row

cdef struct sub_tile:
    # Some rows of one row head: where they lie, which keys they see, how far their softmax has come.
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
    uint64_t not_finite              # rows whose sum holds Inf or NaN, as bits, once they are finished
    mha_moments sums                 # statistics, and the scores at the offsets asked for: [row][offset]
    int64_t best_key[MAX_ROWS]
    double *offset_score
    mha_packed packing               # for the matrix unit
    mha_dropout drop

cdef struct key_block:
    # Keys and values of one row head, as tiles of rows read them.
    ptrdiff_t first, last            # keys that some row of the task may see
    row_run key, value
    row_run narrow_key, narrow_value  # not widened yet; data NULL: nothing to widen
    int finite                       # of the values: 1 all, 0 not all, -1 not looked at yet
    mha_prefetch next_keys, next_values  # what is worth fetching while the block is worked on

cdef struct matrix_block:
    # The same, packed for the matrix unit.
    ptrdiff_t first, n_key           # keys of the block, and how many of them there are
    ptrdiff_t slot                   # which of the thread's two
    const char *key
    const char *value
    mha_packed packed_keys, packed_values

cdef struct mask_cache:
    # The mask that w.bias holds: of so many rows and keys, from these addresses on.
    ptrdiff_t n_row, n_key           # n_row 0: nothing
    ptrdiff_t row_width              # numbers from one key to the next
    const char *row[MAX_ROWS]
    int holds

cdef struct workspace:
    # The buffers of a thread.
    int64_t arrived                  # when it joined the team, by mha_clock()
    watch *look                      # of the call, or NULL
    int thread                       # its number in the team; 0 is the calling one
    sub_tile *sub
    void *score
    void *block_maximum
    void *rescale
    void *bias
    void *visible
    mask_cache cached
    void *mask_work
    void *combine_work
    void *again                      # rows of the output, where some are computed twice
    # a key block of a 16-bit type, widened, of each row head of the task
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
    ptrdiff_t last_item[2]           # number of the last item that reads it


# ---------------------------------------------------------------------------------------------------------------- helpers

cdef inline ptrdiff_t ceil_divide(ptrdiff_t a, ptrdiff_t b) noexcept nogil:
    return (a + b - 1) // b


cdef inline ptrdiff_t padded(const mha_kernels *k, ptrdiff_t width) noexcept nogil:
    """Elements that so many take up in whole vectors."""
    return (width + k.lanes - 1) // k.lanes * k.lanes


cdef inline ptrdiff_t chunks_of(ptrdiff_t width) noexcept nogil:
    return ceil_divide(width, MHA_MATRIX_CHUNK)


cdef inline ptrdiff_t matrix_row_size(const mha_matrix_kernels *m, ptrdiff_t width) noexcept nogil:
    """Bytes of a row that is packed for the matrix unit."""
    return chunks_of(width) * MHA_MATRIX_CHUNK * 2 * m.n_term


cdef inline double get(const mha_kernels *k, const void *array, ptrdiff_t i) noexcept nogil:
    """Element i of an array of the arithmetic type."""
    return (<const float *>array)[i] if k.item_size == 4 else (<const double *>array)[i]


cdef inline void put(const mha_kernels *k, void *array, ptrdiff_t i, double number) noexcept nogil:
    if k.item_size == 4:
        (<float *>array)[i] = <float>number
    else:
        (<double *>array)[i] = number
