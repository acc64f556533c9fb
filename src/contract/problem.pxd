from libc.stdint cimport int64_t, uint8_t, uint32_t

cdef extern from "contract/problem.h" nogil:
    enum:
        MHA_QUERY
        MHA_KEY
        MHA_VALUE
        MHA_OUT
        MHA_MASK
        MHA_LSE
        MHA_GRAD_OUT
        MHA_GRAD_LSE
        MHA_DELTA
        MHA_GRAD_QUERY
        MHA_GRAD_KEY
        MHA_GRAD_VALUE
        MHA_SLOPE_SUM
        MHA_GATE_SUM
        MHA_N_OPERAND

    const int64_t MHA_UNBOUNDED

    ctypedef enum mha_storage:
        MHA_ABSENT
        MHA_BOOL
        MHA_FLOAT16
        MHA_BFLOAT16
        MHA_FLOAT32
        MHA_FLOAT64

    ctypedef struct mha_operand:
        char *data
        mha_storage storage
        ptrdiff_t head_stride, row_stride, column_stride
        const ptrdiff_t *batch_offset

    ctypedef struct mha_asked:
        ptrdiff_t n_offset, n_set
        const int64_t *offset
        const uint8_t *key_set
        const uint8_t *ignored
        double *received

    ctypedef struct mha_dropped:
        uint32_t key[2]
        uint32_t threshold
        double factor

    ctypedef struct mha_problem:
        ptrdiff_t n_batch, n_head, n_kv_head, group_size, n_query, n_key, head_width, value_width
        ptrdiff_t packed_heads, n_row_head
        mha_operand operand[14]
        const int64_t *query_length
        const int64_t *key_length
        const int64_t *query_index
        const int64_t *query_offset
        int64_t window_left, window_right
        double query_scale, score_scale, exp_scale, lse_scale
        bint natural
        double softcap
        const double *alibi_slope
        const double *sink
        const double *gate
        mha_dropped dropped
        double grad_scale
        mha_asked asked
