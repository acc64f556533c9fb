// The matrix unit in software, for machines without one: what CONTRIBUTING.md calls checking it there.  Every result
// has the bits that the unit gives, by the pseudo-code of Intel's manual (SDM, volume 2: TDPBF16PS, VDPBF16PS,
// VPSHRDW, VFMADD213PH); any CPU with AVX-512 (F, DQ, BW, VL) runs it.
#pragma once

#include <stdlib.h>

#include "storage.h"

namespace {
namespace MHA_ISA_NAMESPACE {

// ---- tiles -----------------------------------------------------------------------------------------------------------

struct tile_state {
    alignas(64) uint32_t tile[8][16][16];
};
// From begin_tiles() to end_tiles(); 8 KB are too many for a thread's static storage.
thread_local tile_state *tiles = nullptr;

// An instruction on tiles without a configuration ends the process there; so it does here.
inline uint32_t (*tile_rows_of(int tile))[16] {
    if (!tiles) __builtin_trap();
    return tiles->tile[tile];
}

template <int TILE> void load_tile(const void *data, ptrdiff_t row_bytes) {
    auto *row = tile_rows_of(TILE);
    for (int i = 0; i < 16; i++) memcpy(row[i], (const char *)data + i * row_bytes, 64);
}
template <int TILE> void store_tile(void *data, ptrdiff_t row_bytes) {
    auto *row = tile_rows_of(TILE);
    for (int i = 0; i < 16; i++) memcpy((char *)data + i * row_bytes, row[i], 64);
}
template <int TILE> void clear_tile() { memset(tile_rows_of(TILE), 0, sizeof tiles->tile[TILE]); }

// Sums of the even and of the odd numbers apart, one fused multiply-add after the other; then both to c.
__attribute__((noinline)) void add_pair_products(uint32_t (*c)[16], const uint32_t (*a)[16], const uint32_t (*b)[16]) {
    constexpr int n_together = 4;  // rows: as many additions as are under way at a time
    for (int first = 0; first < 16; first += n_together) {
        vec<float> even[n_together] = {}, odd[n_together] = {};
        for (int k = 0; k < 16; k++) {
            const float_bits pairs = (float_bits)load((const float *)b[k]);
            const __m512 b_even = (__m512)(pairs << 16), b_odd = (__m512)(pairs & 0xffff0000);
            MHA_UNROLL for (int m = 0; m < n_together; m++) {
                const float_bits pair = float_bits{} + a[first + m][k];
                even[m] = (vec<float>)_mm512_fmadd_ps((__m512)(pair << 16), b_even, (__m512)even[m]);
                odd[m] = (vec<float>)_mm512_fmadd_ps((__m512)(pair & 0xffff0000), b_odd, (__m512)odd[m]);
            }
        }
        for (int m = 0; m < n_together; m++) {
            float *row = (float *)c[first + m];
            store(row, load(row) + (even[m] + odd[m]));
        }
    }
}

template <int C, int A, int B> void add_product() {
    // Denormal numbers are taken for zero and results flushed, rounding is to nearest even, all exceptions are masked.
    constexpr unsigned of_unit = 0x9fc0;
    unsigned before;
    asm volatile("stmxcsr %0" : "=m"(before) : : "memory");
    asm volatile("ldmxcsr %0" : : "m"(of_unit) : "memory");
    add_pair_products(tile_rows_of(C), tile_rows_of(A), tile_rows_of(B));
    asm volatile("ldmxcsr %0" : : "m"(before) : "memory");
}

void begin_tiles() {
    free(tiles);
    tiles = (tile_state *)aligned_alloc(64, sizeof(tile_state));
    if (!tiles) __builtin_trap();
    memset(tiles, 0, sizeof(tile_state));
}
void end_tiles() {
    free(tiles);
    tiles = nullptr;
}

// ---- 16-bit numbers in vectors ---------------------------------------------------------------------------------------

typedef __m512i halves;  // float16

MHA_INLINE halves splat_half(float a) { return _mm512_set1_epi16((short)_cvtss_sh(a, 0)); }

// A product of two float16 numbers is exact in float32, its sum with a third rounded to odd there: the last bit then
// says that something was cut off, and rounding that to float16 is rounding once (Boldo & Melquiond 2008, "Emulation
// of FMA and correctly rounded sums: proved algorithms using rounding to odd").
MHA_INLINE __m256i rounded_sum(__m256i a, __m256i b, __m256i c) {
    const __m512 x = _mm512_cvtph_ps(a), y = _mm512_cvtph_ps(b), z = _mm512_cvtph_ps(c);
    const __m512 down = _mm512_fmadd_round_ps(x, y, z, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const __m512 up = _mm512_fmadd_round_ps(x, y, z, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
    const __m512 nearest = _mm512_fmadd_ps(x, y, z);
    // Of two neighbours one is odd.
    const __mmask16 exact = _mm512_cmp_ps_mask(down, up, _CMP_EQ_OQ), nan = _mm512_cmp_ps_mask(down, up, _CMP_UNORD_Q);
    const __mmask16 up_is_odd = _mm512_test_epi32_mask((__m512i)up, _mm512_set1_epi32(1));
    const __m512 odd = _mm512_mask_mov_ps(down, up_is_odd, up);
    return _mm512_cvtps_ph(_mm512_mask_mov_ps(odd, exact | nan, nearest),
                           _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
MHA_INLINE halves multiply_add(halves a, halves b, halves c) {
    const __m256i low = rounded_sum(_mm512_castsi512_si256(a), _mm512_castsi512_si256(b), _mm512_castsi512_si256(c));
    const __m256i high =
        rounded_sum(_mm512_extracti64x4_epi64(a, 1), _mm512_extracti64x4_epi64(b, 1), _mm512_extracti64x4_epi64(c, 1));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// Right by N places in 16 bits; `above` comes in from the upper end.
template <int N> MHA_INLINE __m512i shift_right(__m512i v, __m512i above) {
    return _mm512_or_si512(_mm512_srli_epi16(v, N), _mm512_slli_epi16(above, 16 - N));
}

// sum + both bfloat16 numbers of each pair, the upper first.  Denormal weights and sums do not occur.
MHA_INLINE vec<float> add_pairs(vec<float> sum, __m512i pairs) {
    sum += (vec<float>)((float_bits)pairs & 0xffff0000);
    return sum + (vec<float>)((float_bits)pairs << 16);
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
