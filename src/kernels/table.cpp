// The table of one instruction set.  CMake compiles this file once for each, with its flags and
//   MHA_ISA             the name users see, also the end of the table's symbol
//   MHA_ISA_NAMESPACE   where everything else lives, inside an unnamed namespace
#include "decode.h"
#include "mask.h"
#include "row_tile.h"
#include "statistics.h"
#include "throughput.h"

namespace {
namespace MHA_ISA_NAMESPACE {

// T computes, S lies in memory.
template <class T, class S> constexpr mha_kernels kernels(decltype(mha_kernels::widen) widen_rows) {
    return {
        sizeof(S),
        sizeof(T),
        tile_rows<T>,
        lanes<T>,
        widen_rows,
        pack_query<T, S>,
        begin<T, tile_rows<T>>,
        scores<T>,
        adjust<T, tile_rows<T>>,
        softmax<T>,
        values<T>,
        values_guarded<T>,
        finish<T, S, tile_rows<T>>,
        store_weights<T, S>,
        finish_factors<T>,
        measure<T>,
        finish_measure<T>,
        add_received<T>,
        all_finite<T, T>,
        mask_tile<T, tile_rows<T>>,
        decode_pack_query<T, S>,
        decode_scores<T, S>,
        decode_adjust<T>,
        decode_softmax<T>,
        decode_values<T, S>,
        decode_values_guarded<T, S>,
        decode_combine<T, S>,
        all_finite<T, S>,
        mask_row<T>,
    };
}

static_assert(tile_rows<float> <= MHA_MAX_ROWS, "the loop sizes its row arrays by MHA_MAX_ROWS");
static_assert(MHA_KEY_BLOCK % lanes<float> == 0 && MHA_KEY_SPLIT % lanes<float> == 0, "score rows are whole vectors");

}  // namespace MHA_ISA_NAMESPACE
}  // namespace

#define MHA_JOIN_(a, b) a##b
#define MHA_JOIN(a, b) MHA_JOIN_(a, b)
#define MHA_TEXT_(a) #a
#define MHA_TEXT(a) MHA_TEXT_(a)

// Named by instruction set: another one may take its tables from here.
extern "C" const mha_kernels MHA_JOIN(mha_kernels_, MHA_ISA)[] = {
    MHA_ISA_NAMESPACE::kernels<float, float>(nullptr),
    MHA_ISA_NAMESPACE::kernels<double, double>(nullptr),
    MHA_ISA_NAMESPACE::kernels<float, MHA_ISA_NAMESPACE::float16>(
        MHA_ISA_NAMESPACE::widen<float, MHA_ISA_NAMESPACE::float16>),
    MHA_ISA_NAMESPACE::kernels<float, MHA_ISA_NAMESPACE::bfloat16>(
        MHA_ISA_NAMESPACE::widen<float, MHA_ISA_NAMESPACE::bfloat16>),
};

extern "C" const mha_isa MHA_JOIN(mha_isa_, MHA_ISA) = {
    MHA_TEXT(MHA_ISA), MHA_JOIN(mha_kernels_, MHA_ISA), nullptr, MHA_ISA_NAMESPACE::multiply_add_rounds, nullptr,
};
