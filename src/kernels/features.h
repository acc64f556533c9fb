// What this file's code may need of a CPU: all that its compiler flags allow.
#pragma once

#include "../contract/instruction_set.h"

namespace {
namespace MHA_ISA_NAMESPACE {

constexpr uint32_t needed_features = 0
#if defined(__AVX2__)
                                     | MHA_CPU_AVX2
#endif
#if defined(__FMA__)
                                     | MHA_CPU_FMA
#endif
#if defined(__F16C__)
                                     | MHA_CPU_F16C
#endif
#if defined(__AVX512F__)
                                     | MHA_CPU_AVX512F
#endif
#if defined(__AVX512DQ__)
                                     | MHA_CPU_AVX512DQ
#endif
#if defined(__AVX512BW__)
                                     | MHA_CPU_AVX512BW
#endif
#if defined(__AVX512VL__)
                                     | MHA_CPU_AVX512VL
#endif
#if defined(__AVX512VBMI2__)
                                     | MHA_CPU_AVX512_VBMI2
#endif
#if defined(__AVX512BF16__)
                                     | MHA_CPU_AVX512_BF16
#endif
#if defined(__AVX512FP16__)
                                     | MHA_CPU_AVX512_FP16
#endif
#if defined(__AMX_TILE__)
                                     | MHA_CPU_AMX_TILE
#endif
#if defined(__AMX_BF16__)
                                     | MHA_CPU_AMX_BF16
#endif
    ;

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
