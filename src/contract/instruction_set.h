/* What an instruction set offers, and which of them this build has.
 *
 * The loop (_core.pyx, loop/) decides what is visited and in which order; for everything that touches numbers it calls
 * the functions of one table.  There is one table per instruction set and element type. */
#pragma once

#include "backward.h"
#include "decode.h"
#include "dropout.h"
#include "matrix.h"
#include "statistics.h"
#include "tiles.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The functions for one element type.  Elements lie in memory as S; packed buffers and all arithmetic are of type T:
 * float for the 16-bit types, otherwise S itself.  Strides are in bytes unless they count rows of a packed buffer.  No
 * function allocates, fails or keeps state; buffers are aligned to 64 bytes.
 * Packed layouts of tiles: query [width][tile_rows], score [key][tile_rows], sum [width][tile_rows]. */
typedef struct {
    ptrdiff_t stored_size; /* sizeof(S) */
    ptrdiff_t item_size;   /* sizeof(T) */
    ptrdiff_t tile_rows;   /* rows of a sub-tile */
    ptrdiff_t lanes;       /* elements of a vector */
    /* Rows of S as rows of T, row_bytes apart; NULL where S is T. */
    void (*widen)(void *block, ptrdiff_t row_bytes, const char *data, ptrdiff_t stride, ptrdiff_t n_row,
                  ptrdiff_t width);
    mha_mask_kernels mask;
    mha_tile_kernels tile;
    mha_decode_kernels decode;
    mha_dropout_kernels dropout;
    mha_backward_kernels backward;
    mha_statistics_kernels statistics;
} mha_kernels;

/* One of them for each element type; NULL: the set has none of its own. */
typedef struct {
    const mha_kernels *float32, *float64, *float16, *bfloat16;
} mha_element_kernels;
typedef struct {
    const mha_matrix_kernels *float32, *float64, *float16, *bfloat16;
} mha_element_matrix_kernels;

/* What a CPU may lack; the rest is part of every one that the build is for. */
enum {
    MHA_CPU_AVX2 = 1 << 0,
    MHA_CPU_FMA = 1 << 1,
    MHA_CPU_F16C = 1 << 2,
    MHA_CPU_AVX512F = 1 << 3,
    MHA_CPU_AVX512DQ = 1 << 4,
    MHA_CPU_AVX512BW = 1 << 5,
    MHA_CPU_AVX512VL = 1 << 6,
    MHA_CPU_AVX512_VBMI2 = 1 << 7,
    MHA_CPU_AVX512_BF16 = 1 << 8,
    MHA_CPU_AVX512_FP16 = 1 << 9,
    MHA_CPU_AMX_TILE = 1 << 10,
    MHA_CPU_AMX_BF16 = 1 << 11
};

typedef struct {
    const char *name;
    uint32_t needs; /* of these */
    const mha_element_kernels *kernels;
    const mha_element_matrix_kernels *matrix,
        *matrix_high; /* for precision "highest" and "high"; NULL: no matrix unit */
    /* Runs n rounds of independent multiply-adds and returns the operations done: the peak that speed is held against. */
    double (*multiply_add_rounds)(ptrdiff_t n);
    double (*matrix_rounds)(ptrdiff_t n); /* the same for the matrix unit; NULL: none */
} mha_isa;

/* ---- dispatch.c.  Visible outside of the extension, so that tests/native can check the tables of a build. ---- */
#if defined(_WIN32)
#define MHA_VISIBLE
#else
#define MHA_VISIBLE __attribute__((visibility("default")))
#endif

/* Instruction sets of this build, slowest first. */
extern MHA_VISIBLE const mha_isa *const mha_built[];
extern MHA_VISIBLE const int mha_n_built;
MHA_VISIBLE int mha_runnable(const mha_isa *isa);
extern const int mha_emulates_matrix_unit; /* "amx" is software here, see kernels/emulated_unit.h */
/* Whether the operating system lets this process use the tile registers of the matrix unit.  Linux keeps their 8 KB for
 * processes that have asked (Documentation/arch/x86/xstate.rst), and from then on demands signal stacks that can hold
 * them; where one is too small already, it refuses.  So this is asked when a call is about to use them, not before. */
MHA_VISIBLE int mha_tiles_granted(void);
/* Tables for an element type: the set's own or, where it lacks one, those of the slowest set, which has all. */
MHA_VISIBLE const mha_kernels *mha_kernels_for(const mha_isa *isa, mha_storage element);
/* NULL: this is not for the matrix unit. */
MHA_VISIBLE const mha_matrix_kernels *mha_matrix_for(const mha_isa *isa, mha_storage element, int high);

#ifdef __cplusplus
}
#endif
