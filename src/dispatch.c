/* Which instruction sets this build has, and which of them this machine can run.  The only file that asks the CPU. */
#include "contract/instruction_set.h"

#if defined(MHA_HAVE_AMX) && !defined(MHA_EMULATE_MATRIX_UNIT)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(MHA_HAVE_AVX2) || defined(MHA_HAVE_AVX512)
#include <cpuid.h>

/* Not every compiler lets __builtin_cpu_supports() ask for it: Clang 14 does not. */
static int has_f16c(void) {
    unsigned a, b, c, d;

    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

#if defined(MHA_EMULATE_MATRIX_UNIT)
const int mha_emulates_matrix_unit = 1;

static int has_matrix_unit(void) { return 1; }
#else
const int mha_emulates_matrix_unit = 0;
#endif

#if defined(MHA_HAVE_AMX) && !defined(MHA_EMULATE_MATRIX_UNIT)
/* Bits of CPUID leaf 7 (ecx, edx), of its second part (eax), and of XCR0 (Intel SDM, volume 1, chapters 13 and 18). */
enum {
    AVX512_VBMI2 = 1 << 6,
    TILES_AND_FP16 = 1 << 22 | 1 << 23 | 1 << 24, /* AMX-BF16, AVX512-FP16, AMX-TILE */
    AVX512_BF16 = 1 << 5,
    TILE_STATES = 3 << 17
};

static int has_matrix_unit(void) {
    unsigned a, b, c, d, low, high;

    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(c & AVX512_VBMI2) || (d & TILES_AND_FP16) != TILES_AND_FP16)
        return 0;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & AVX512_BF16)) return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & TILE_STATES) == TILE_STATES;
}
#endif

int mha_tiles_granted(void) {
#if defined(MHA_EMULATE_MATRIX_UNIT)
    return 1;
#elif defined(MHA_HAVE_AMX)
    enum { REQUEST = 0x1023, TILE_DATA = 18, UNKNOWN = 0, GRANTED, REFUSED };
    static int answer; /* threads that ask at once get the same one */
    int known = __atomic_load_n(&answer, __ATOMIC_RELAXED);

    if (known == UNKNOWN) {
        known = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0 ? GRANTED : REFUSED;
        __atomic_store_n(&answer, known, __ATOMIC_RELAXED);
    }
    return known == GRANTED;
#else
    return 0;
#endif
}

extern const mha_isa mha_isa_baseline, mha_isa_avx2, mha_isa_avx512, mha_isa_amx, mha_isa_neon;

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
#if defined(MHA_HAVE_AMX)
    &mha_isa_amx,
#endif
};

const int mha_n_built = sizeof mha_built / sizeof mha_built[0];

#if defined(MHA_HAVE_AVX512)
static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma") &&
           has_f16c();
}
#endif

int mha_runnable(const mha_isa *isa) {
#if defined(MHA_HAVE_AVX2) || defined(MHA_HAVE_AVX512)
    /* The compiler's run-time library also asks the operating system (XGETBV) whether it keeps the wide registers. */
    __builtin_cpu_init();
#endif
#if defined(MHA_HAVE_AVX2)
    if (isa == &mha_isa_avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
#endif
#if defined(MHA_HAVE_AVX512)
    if (isa == &mha_isa_avx512) return has_avx512();
#endif
#if defined(MHA_HAVE_AMX)
    if (isa == &mha_isa_amx) return has_avx512() && has_matrix_unit();
#endif
    (void)isa;
    return 1;
}

const mha_kernels *mha_kernels_for(const mha_isa *isa, mha_storage element) {
    const mha_element_kernels *own = isa->kernels, *all = mha_built[0]->kernels;

    switch (element) {
    case MHA_FLOAT32: return own->float32 ? own->float32 : all->float32;
    case MHA_FLOAT64: return own->float64 ? own->float64 : all->float64;
    case MHA_FLOAT16: return own->float16 ? own->float16 : all->float16;
    case MHA_BFLOAT16: return own->bfloat16 ? own->bfloat16 : all->bfloat16;
    default: return NULL;
    }
}

const mha_matrix_kernels *mha_matrix_for(const mha_isa *isa, mha_storage element, int high) {
    const mha_element_matrix_kernels *own = high ? isa->matrix_high : isa->matrix;

    if (!own) return NULL;
    switch (element) {
    case MHA_FLOAT32: return own->float32;
    case MHA_FLOAT64: return own->float64;
    case MHA_FLOAT16: return own->float16;
    case MHA_BFLOAT16: return own->bfloat16;
    default: return NULL;
    }
}
