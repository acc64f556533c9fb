// The matrix unit (Intel AMX): eight registers of 16 rows x 64 bytes, and a product of two of them added to a third.
// Inline assembly: compilers do not know what the instructions read and write (GCC 12 declares 8 bytes of a
// configuration and no memory for a load, and -O3 then moves stores past them).
#pragma once

#include "vector.h"
#if defined(MHA_EMULATE_MATRIX_UNIT)
#include "emulated_unit.h"
#endif

namespace {
namespace MHA_ISA_NAMESPACE {

constexpr int tile_edge = 16;   // rows of a tile, and 32-bit numbers of a row
constexpr int tile_depth = 32;  // bfloat16 numbers of a row: what one product sums over

// Memory and the instructions between two of these stay in their order.
MHA_INLINE void barrier() { asm volatile("" ::: "memory"); }

#if !defined(MHA_EMULATE_MATRIX_UNIT)
template <int TILE> MHA_INLINE void load_tile(const void *data, ptrdiff_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(data), "r"(row_bytes), "i"(TILE) : "memory");
}
template <int TILE> MHA_INLINE void store_tile(void *data, ptrdiff_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(data), "r"(row_bytes), "i"(TILE) : "memory");
}
template <int TILE> MHA_INLINE void clear_tile() { asm volatile("tilezero %%tmm%c0" : : "i"(TILE)); }

// C[i][j] += sum of A[i][2k] B[k][2j] + A[i][2k + 1] B[k][2j + 1]: rows of A are bfloat16, rows of B pairs of them.
template <int C, int A, int B> MHA_INLINE void add_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

struct tile_configuration {
    uint8_t palette, first_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t n_row[16];
};
static_assert(sizeof(tile_configuration) == 64, "the layout that LDTILECFG reads");

// Whole tiles everywhere; what a block lacks is filled with zeros when it is packed.
void begin_tiles() {
    tile_configuration all = {};
    all.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
        all.row_bytes[tile] = 64;
        all.n_row[tile] = tile_edge;
    }
    asm volatile("ldtilecfg %0" : : "m"(all));
}

// Tiles in use cost every context switch 8 KB.
void end_tiles() { asm volatile("tilerelease"); }
#endif

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
