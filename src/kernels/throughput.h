// What a CPU can do at most: rounds of multiply-adds that speed is held against.
#pragma once

#include "vector.h"

namespace {
namespace MHA_ISA_NAMESPACE {

// More chains than latency times ports, so that throughput is what limits.
double multiply_add_rounds(ptrdiff_t n) {
    constexpr int n_chain = MHA_ACCUMULATORS < 16 ? MHA_ACCUMULATORS : 16;
    vec<float> chain[n_chain];
    MHA_UNROLL for (int i = 0; i < n_chain; i++) chain[i] = splat(float(i) * 0.01f);
    for (ptrdiff_t round = 0; round < n; round++) {
        MHA_UNROLL for (int i = 0; i < n_chain; i++) chain[i] = chain[i] * 0.999f + 0.001f;
    }
    vec<float> sum = {};
    MHA_UNROLL for (int i = 0; i < n_chain; i++) sum += chain[i];
    volatile float keep = lane_sum<float>(sum);
    (void)keep;
    return double(n) * n_chain * lanes<float> * 2;
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
