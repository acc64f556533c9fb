/* Which instruction sets this build has, and which of them this machine can run.  The only file that asks the CPU. */
#include "kernels.h"

#include <string.h>

#if defined(MHA_HAVE_AVX2) || defined(MHA_HAVE_AVX512)
#include <cpuid.h>

/* Not every compiler lets __builtin_cpu_supports() ask for it: Clang 14 does not. */
static int has_f16c(void)
{
    unsigned a, b, c, d;

    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

extern const mha_isa mha_isa_baseline, mha_isa_avx2, mha_isa_avx512, mha_isa_neon;

const mha_isa *const mha_built[] = {
#if defined(__aarch64__)
    &mha_isa_neon, /* part of every aarch64 CPU, hence its baseline */
#else
    &mha_isa_baseline,
#endif
#if defined(MHA_HAVE_AVX2)
    &mha_isa_avx2,
#endif
#if defined(MHA_HAVE_AVX512)
    &mha_isa_avx512,
#endif
};

const int mha_n_built = sizeof mha_built / sizeof mha_built[0];

int mha_runnable(const mha_isa *isa)
{
#if defined(MHA_HAVE_AVX2) || defined(MHA_HAVE_AVX512)
    /* The compiler's run-time library also asks the operating system (XGETBV) whether it keeps the wide registers. */
    __builtin_cpu_init();
    if (strcmp(isa->name, "avx2") == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    if (strcmp(isa->name, "avx512") == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("fma") && has_f16c();
#endif
    (void)isa;
    return 1;
}
