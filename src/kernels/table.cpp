// The table of one instruction set.  CMake compiles this file once for each, with its flags and
//   MHA_ISA             the name users see, also the end of the table's symbol
//   MHA_ISA_NAMESPACE   where everything else lives, inside an unnamed namespace
#include "backward.h"
#include "decode.h"
#include "dropout.h"
#include "features.h"
#include "mask.h"
#include "row_tile.h"
#include "statistics.h"
#include "throughput.h"

namespace {
namespace MHA_ISA_NAMESPACE {

// T computes, S lies in memory.
template <class T, class S> constexpr mha_kernels kernels_of(decltype(mha_kernels::widen) widen_rows) {
    return {
        .stored_size = sizeof(S),
        .item_size = sizeof(T),
        .tile_rows = tile_rows<T>,
        .lanes = lanes<T>,
        .widen = widen_rows,
        .mask = {.row = mask_row<T>, .tile = mask_tile<T, tile_rows<T>>},
        .tile =
            {
                .pack_query = pack_query<T, S>,
                .begin = begin<T, tile_rows<T>>,
                .scores = scores<T>,
                .adjust = adjust<T, tile_rows<T>>,
                .softmax = softmax<T>,
                .values = values<T>,
                .values_guarded = values_guarded<T>,
                .finish = finish<T, S, tile_rows<T>>,
                .store_weights = store_weights<T, S>,
                .finish_factors = finish_factors<T>,
                .replace_not_finite = replace_not_finite<T, S>,
                .all_finite = all_finite<T, T>,
            },
        .decode =
            {
                .pack_query = decode_pack_query<T, S>,
                .scores = decode_scores<T, S>,
                .adjust = decode_adjust<T>,
                .softmax = decode_softmax<T>,
                .values = decode_values<T, S>,
                .values_guarded = decode_values_guarded<T, S>,
                .combine = decode_combine<T, S>,
                .all_finite = all_finite<T, S>,
            },
        .dropout = {.keep_tile = keep_tile<T>, .drop_tile = drop_tile<T>, .drop_row = drop_row<T>},
        .backward =
            {
                .row_products = row_products<T, S>,
                .copy_rows = copy_rows<T, S>,
                .differentiate = differentiate<T>,
                .add_to_keys = add_visible_product<T, over_rows<T>>,
                .add_to_rows = add_visible_product<T, over_keys<T>>,
                .add_rows = add_rows<T>,
                .store_numbers = store_numbers<T, S>,
                .add_over_keys = add_over_keys<T>,
                .sum_over_rows = sum_over_rows<T>,
                .add_tile = add_tile<T>,
                .store_tile = store_tile<T>,
            },
        .statistics = {.measure = measure<T>, .finish = finish_measure<T>, .add_received = add_received<T>},
    };
}
template <class T> constexpr mha_kernels kernels = kernels_of<T, T>(nullptr);
template <class S> constexpr mha_kernels kernels_16_bit = kernels_of<float, S>(widen<float, S>);

static_assert(tile_rows<float> <= MHA_MAX_ROWS, "the loop sizes its row arrays by MHA_MAX_ROWS");
static_assert(MHA_KEY_BLOCK % lanes<float> == 0 && MHA_KEY_SPLIT % lanes<float> == 0, "score rows are whole vectors");

}  // namespace MHA_ISA_NAMESPACE
}  // namespace

#define MHA_JOIN_(a, b) a##b
#define MHA_JOIN(a, b) MHA_JOIN_(a, b)
#define MHA_TEXT_(a) #a
#define MHA_TEXT(a) MHA_TEXT_(a)

// Named by instruction set: another one may take its tables from here.
extern "C" const mha_element_kernels MHA_JOIN(mha_kernels_, MHA_ISA) = {
    .float32 = &MHA_ISA_NAMESPACE::kernels<float>,
    .float64 = &MHA_ISA_NAMESPACE::kernels<double>,
    .float16 = &MHA_ISA_NAMESPACE::kernels_16_bit<MHA_ISA_NAMESPACE::float16>,
    .bfloat16 = &MHA_ISA_NAMESPACE::kernels_16_bit<MHA_ISA_NAMESPACE::bfloat16>,
};

extern "C" const mha_isa MHA_JOIN(mha_isa_, MHA_ISA) = {
    .name = MHA_TEXT(MHA_ISA),
    .needs = MHA_ISA_NAMESPACE::needed_features,
    .kernels = &MHA_JOIN(mha_kernels_, MHA_ISA),
    .matrix = nullptr,
    .matrix_high = nullptr,
    .multiply_add_rounds = MHA_ISA_NAMESPACE::multiply_add_rounds,
    .matrix_rounds = nullptr,
};
