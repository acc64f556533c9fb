// The instruction set "amx": the tables of AVX-512, and beside them the matrix unit.
#define MHA_ISA_NAMESPACE mha_amx
#include "features.h"
#include "mask.h"
#include "matrix_tile.h"
#include "outliers.h"
#include "row_tile.h"
#include "throughput.h"

namespace {
namespace MHA_ISA_NAMESPACE {

// S lies in memory; a number times a number takes N_PRODUCT products of terms.
template <class S, int N_PRODUCT> constexpr mha_matrix_kernels matrix_of(ptrdiff_t min_rows) {
    static_assert(products<N_PRODUCT>::block_keys <= MHA_MATRIX_MAX_PANELS * MHA_MATRIX_PANEL, "a norm per panel");
    return {
        .n_term = products<N_PRODUCT>::n_term,
        .block_keys = products<N_PRODUCT>::block_keys,
        .most_short = N_PRODUCT == 1 ? most_exponent : 0,
        .min_rows = min_rows,
        .acquire = begin_tiles,
        .release = end_tiles,
        .pack_queries = pack_queries<S, N_PRODUCT>,
        .pack_keys = pack_keys<S, N_PRODUCT>,
        .pack_values = pack_values<S, N_PRODUCT>,
        .step = step<N_PRODUCT>,
        .repair_scores = repair_scores<S>,
        .add_outliers = add_outliers<S, products<N_PRODUCT>::n_term>,
        .begin = begin<float, MHA_MATRIX_ROWS>,
        .adjust = adjust<float, MHA_MATRIX_ROWS>,
        .mask_tile = mask_tile<float, MHA_MATRIX_ROWS>,
        .finish = finish<float, S, MHA_MATRIX_ROWS>,
    };
}

// float16 would do with fewer products: two of its three terms hold all of it.  But two terms of the weights would leave
// 2**-16 of each, which is more than one rounding at the end.
constexpr mha_matrix_kernels float32_highest = matrix_of<float, 6>(256), float32_high = matrix_of<float, 3>(128),
                             float16_any = matrix_of<float16, 6>(256), bfloat16_any = matrix_of<bfloat16, 1>(64);

constexpr mha_element_matrix_kernels highest = {
    .float32 = &float32_highest, .float64 = nullptr, .float16 = &float16_any, .bfloat16 = &bfloat16_any};
constexpr mha_element_matrix_kernels high = {
    .float32 = &float32_high, .float64 = nullptr, .float16 = &float16_any, .bfloat16 = &bfloat16_any};

double matrix_rounds(ptrdiff_t n) {
    begin_tiles();
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
    // Zeros are multiplied faster than numbers: the unit draws less power.
    alignas(64) uint16_t numbers[tile_numbers];
    uint32_t state = 1;
    for (int i = 0; i < tile_numbers; i++) {
        state = state * 1664525 + 1013904223;  // Numerical Recipes; any noise will do
        numbers[i] = uint16_t(0x3f80 | (state >> 16 & 0x807f));
    }
    load_tile<4>(numbers, 64), load_tile<5>(numbers, 64), load_tile<6>(numbers, 64), load_tile<7>(numbers, 64);
    for (ptrdiff_t i = 0; i < n; i++) {
        add_product<0, 4, 6>();
        add_product<1, 4, 7>();
        add_product<2, 5, 6>();
        add_product<3, 5, 7>();
    }
    end_tiles();
    return double(n) * 4 * 2 * tile_edge * tile_edge * tile_depth;
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace

extern "C" const mha_element_kernels mha_kernels_avx512;

extern "C" const mha_isa mha_isa_amx = {
    .name = "amx",
    .needs = MHA_ISA_NAMESPACE::needed_features,
    .kernels = &mha_kernels_avx512,
    .matrix = &MHA_ISA_NAMESPACE::highest,
    .matrix_high = &MHA_ISA_NAMESPACE::high,
    .multiply_add_rounds = MHA_ISA_NAMESPACE::multiply_add_rounds,
    .matrix_rounds = MHA_ISA_NAMESPACE::matrix_rounds,
};
