/* Measurements of the weights instead of weights times values, on tiles of rows. */
#pragma once

#include "tiles.h"

/* The output, a row of float64 per query: these, then the mass at each offset, then that of each key set. */
enum { MHA_ENTROPY, MHA_CONFIDENCE, MHA_DISTANCE, MHA_TOP_KEY, MHA_MAXIMUM, MHA_FACTOR, MHA_N_MEASURED };

/* What the statistics of some rows have come to.  With w = 2**((score - maximum) * exp_scale):
 * total = sum of w, moment = sum of w * log2(w), far = sum of w * |position - key|, set[i] = sum of w over set i. */
typedef struct {
    void *maximum, *total, *moment, *far, *set, *best, *confident;
    int64_t *best_key;
    ptrdiff_t n_set;
} mha_moments;

/* The key block that they are to take in. */
typedef struct {
    ptrdiff_t first, n_key;
    const void *distance;   /* position of each row minus the first key */
    const uint8_t *ignored; /* keys that `confident` leaves out, or NULL */
    const uint8_t *key_set; /* members of set i at i * set_stride */
    ptrdiff_t set_stride;
    double exp_scale;
} mha_measured_block;

typedef struct {
    /* Takes in a block of scores, which become weights relative to the new maximum. */
    void (*measure)(mha_moments *so_far, void *score, const void *block_maximum, ptrdiff_t n_row,
                    const mha_measured_block *block);
    /* Writes the measurements of a row.  offset_score: its scores at the offsets, -inf where excluded. */
    void (*finish)(double *out, const mha_moments *sums, ptrdiff_t row, double exp_scale, const mha_finish *how,
                   const double *offset_score, ptrdiff_t n_offset);
    /* received[key] += weights of n_row rows, given their maximum and factor. */
    void (*add_received)(double *received, const void *score, const void *maximum, const void *factor, ptrdiff_t n_row,
                         ptrdiff_t n_key, double exp_scale);
} mha_statistics_kernels;
