/* Which instruction sets this build has, and which of them this machine can run.  The only file that asks the CPU. */
#include "contract/instruction_set.h"

#if defined(MHA_HAVE_AMX) && !defined(MHA_EMULATE_MATRIX_UNIT)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(MHA_EMULATE_MATRIX_UNIT)
const int mha_emulates_matrix_unit = 1;
#else
const int mha_emulates_matrix_unit = 0;
#endif

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

/* ---- what the CPU has, and the operating system keeps when it switches between processes ---- */

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>

/* Intel SDM, volume 2, CPUID; volume 1, chapters 13 and 18 for the bits of XCR0. */
enum { EAX, EBX, ECX, EDX, N_REGISTER };
enum { OSXSAVE = 1 << 27, YMM_STATE = 0x06, ZMM_STATE = 0xe6, TILE_STATE = 3 << 17 };

static const struct {
    uint32_t feature, state;
    uint32_t leaf, part;
    int from, bit;
} known[] = {
    {MHA_CPU_AVX2, YMM_STATE, 7, 0, EBX, 5},        {MHA_CPU_FMA, YMM_STATE, 1, 0, ECX, 12},
    {MHA_CPU_F16C, YMM_STATE, 1, 0, ECX, 29},       {MHA_CPU_AVX512F, ZMM_STATE, 7, 0, EBX, 16},
    {MHA_CPU_AVX512DQ, ZMM_STATE, 7, 0, EBX, 17},   {MHA_CPU_AVX512BW, ZMM_STATE, 7, 0, EBX, 30},
    {MHA_CPU_AVX512VL, ZMM_STATE, 7, 0, EBX, 31},   {MHA_CPU_AVX512_VBMI2, ZMM_STATE, 7, 0, ECX, 6},
    {MHA_CPU_AVX512_BF16, ZMM_STATE, 7, 1, EAX, 5}, {MHA_CPU_AVX512_FP16, ZMM_STATE, 7, 0, EDX, 23},
    {MHA_CPU_AMX_TILE, TILE_STATE, 7, 0, EDX, 24},  {MHA_CPU_AMX_BF16, TILE_STATE, 7, 0, EDX, 22},
};

static uint32_t kept_states(void) {
    unsigned a, b, c, d, low, high;

    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
#if defined(__APPLE__)
    low |= ZMM_STATE; /* macOS keeps them from their first use on, and says so only then */
#endif
    return low;
}

static uint32_t cpu_features(void) {
    uint32_t found = 0, states = kept_states();
    unsigned reg[N_REGISTER];

    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (__get_cpuid_count(known[i].leaf, known[i].part, &reg[EAX], &reg[EBX], &reg[ECX], &reg[EDX]) &&
            reg[known[i].from] >> known[i].bit & 1 && (states & known[i].state) == known[i].state)
            found |= known[i].feature;
    return found;
}
#else
static uint32_t cpu_features(void) { return 0; }
#endif

int mha_runnable(const mha_isa *isa) { return (isa->needs & ~cpu_features()) == 0; }

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

/* ---- tables ---- */

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
