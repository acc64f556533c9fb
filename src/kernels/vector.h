// One vector type for every instruction set: GCC/Clang vector extensions, and the few intrinsics they cannot express.
// No C++ standard-library header (nor <math.h>, which pulls one in): an inline function compiled here must never be the copy that the linker keeps for others.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Per instruction set: vector bytes; vectors of rows in a sub-tile; accumulators that fit the register file beside
// one vector of operands per column and a broadcast (bench.compare: on AVX2, 4 x 3 is 4% ahead of 6 x 2).
#if defined(__AVX512F__)
#define MHA_VECTOR_BYTES 64
#define MHA_TILE_VECTORS 4
#define MHA_ACCUMULATORS 24
#elif defined(__AVX2__)
#define MHA_VECTOR_BYTES 32
#define MHA_TILE_VECTORS 3
#define MHA_ACCUMULATORS 12
#elif defined(__aarch64__)
#define MHA_VECTOR_BYTES 16
#define MHA_TILE_VECTORS 4
#define MHA_ACCUMULATORS 24
#else
#define MHA_VECTOR_BYTES 16
#define MHA_TILE_VECTORS 2
#define MHA_ACCUMULATORS 8
#endif

#define MHA_INLINE inline __attribute__((always_inline))
#define MHA_UNROLL _Pragma("GCC unroll 32")
#if defined(__clang__) && defined(__aarch64__)
// Clang loads the operands of both rounds before it uses the first, and so spills the accumulators.
#define MHA_UNROLL_2 _Pragma("GCC unroll 1")
#else
#define MHA_UNROLL_2 _Pragma("GCC unroll 2")
#endif

namespace {
namespace MHA_ISA_NAMESPACE {

template <class T> struct vector_of;
template <> struct vector_of<float> {
    typedef float type __attribute__((vector_size(MHA_VECTOR_BYTES)));
    typedef float unaligned
        __attribute__((vector_size(MHA_VECTOR_BYTES), aligned(2), may_alias));  // or pairs of 16 bits
    typedef int32_t integer __attribute__((vector_size(MHA_VECTOR_BYTES)));
    typedef uint32_t unsigned_integer __attribute__((vector_size(MHA_VECTOR_BYTES)));
};
template <> struct vector_of<double> {
    typedef double type __attribute__((vector_size(MHA_VECTOR_BYTES)));
    typedef double unaligned __attribute__((vector_size(MHA_VECTOR_BYTES), aligned(8), may_alias));
    typedef int64_t integer __attribute__((vector_size(MHA_VECTOR_BYTES)));
    typedef uint64_t unsigned_integer __attribute__((vector_size(MHA_VECTOR_BYTES)));
};

template <class T> using vec = typename vector_of<T>::type;
template <class T> using ivec = typename vector_of<T>::integer;
template <class T> using unsigned_vec = typename vector_of<T>::unsigned_integer;
template <class T> constexpr int lanes = MHA_VECTOR_BYTES / int(sizeof(T));
template <class T> constexpr int tile_rows = MHA_TILE_VECTORS * lanes<T>;

template <class T> MHA_INLINE vec<T> load(const T *p) {
    return *reinterpret_cast<const typename vector_of<T>::unaligned *>(p);
}
template <class T> MHA_INLINE void store(T *p, vec<T> v) {
    *reinterpret_cast<typename vector_of<T>::unaligned *>(p) = v;
}
// v - 0 is v to the bit, so the compiler makes a plain broadcast of it (0 + a would turn -0 into +0).
template <class T> MHA_INLINE vec<T> splat(T a) { return a - vec<T>{}; }

// The first n elements of a vector from memory, the others 0, and back; nothing past them is read or written.  An
// element is as large as S, whatever the vector computes with.
template <class V, class S> MHA_INLINE V load_first(const S *p, ptrdiff_t n) {
    constexpr int count = sizeof(V) / sizeof(S);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const uint32_t mask = n < count ? (1u << n) - 1 : ~0u;
    if constexpr (sizeof(S) == 8) return (V)_mm512_maskz_loadu_epi64((__mmask8)mask, p);
    else if constexpr (sizeof(S) == 4) return (V)_mm512_maskz_loadu_epi32((__mmask16)mask, p);
    else if constexpr (sizeof(V) == 64) return (V)_mm512_maskz_loadu_epi16(mask, p);
    else return (V)_mm256_maskz_loadu_epi16((__mmask16)mask, p);
#else
    V v = {};
    memcpy(&v, p, (n < count ? n : count) * sizeof(S));
    return v;
#endif
}
template <class S, class V> MHA_INLINE void store_first(S *p, V v, ptrdiff_t n) {
    constexpr int count = sizeof(V) / sizeof(S);
    if (n >= count) {
        memcpy(p, &v, sizeof v);
        return;
    }
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const uint32_t mask = (1u << n) - 1;
    if constexpr (sizeof(S) == 8) _mm512_mask_storeu_epi64(p, (__mmask8)mask, (__m512i)v);
    else if constexpr (sizeof(S) == 4) _mm512_mask_storeu_epi32(p, (__mmask16)mask, (__m512i)v);
    else if constexpr (sizeof(V) == 64) _mm512_mask_storeu_epi16(p, mask, (__m512i)v);
    else _mm256_mask_storeu_epi16(p, (__mmask16)mask, (__m256i)v);
#else
    memcpy(p, &v, n * sizeof(S));
#endif
}

// The larger lane; where either is NaN, the second.  The order of the arguments thus decides whether NaN is kept.
template <class T> MHA_INLINE vec<T> larger(vec<T> a, vec<T> b) { return a > b ? a : b; }
#if defined(__AVX512F__)
template <> MHA_INLINE vec<float> larger<float>(vec<float> a, vec<float> b) {
    return (vec<float>)_mm512_max_ps((__m512)a, (__m512)b);
}
template <> MHA_INLINE vec<double> larger<double>(vec<double> a, vec<double> b) {
    return (vec<double>)_mm512_max_pd((__m512d)a, (__m512d)b);
}
#elif defined(__AVX2__)
template <> MHA_INLINE vec<float> larger<float>(vec<float> a, vec<float> b) {
    return (vec<float>)_mm256_max_ps((__m256)a, (__m256)b);
}
template <> MHA_INLINE vec<double> larger<double>(vec<double> a, vec<double> b) {
    return (vec<double>)_mm256_max_pd((__m256d)a, (__m256d)b);
}
#elif defined(__SSE2__)
template <> MHA_INLINE vec<float> larger<float>(vec<float> a, vec<float> b) {
    return (vec<float>)_mm_max_ps((__m128)a, (__m128)b);
}
template <> MHA_INLINE vec<double> larger<double>(vec<double> a, vec<double> b) {
    return (vec<double>)_mm_max_pd((__m128d)a, (__m128d)b);
}
#endif

// a * b + c, rounded once wherever the CPU can.  Plain expressions are left to the compiler, which may round one and not
// the other of two that should agree.
template <class T> MHA_INLINE vec<T> multiply_add(vec<T> a, vec<T> b, vec<T> c) { return a * b + c; }
#if defined(__AVX512F__)
template <> MHA_INLINE vec<float> multiply_add<float>(vec<float> a, vec<float> b, vec<float> c) {
    return (vec<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
template <> MHA_INLINE vec<double> multiply_add<double>(vec<double> a, vec<double> b, vec<double> c) {
    return (vec<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
#elif defined(__AVX2__)
template <> MHA_INLINE vec<float> multiply_add<float>(vec<float> a, vec<float> b, vec<float> c) {
    return (vec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
template <> MHA_INLINE vec<double> multiply_add<double>(vec<double> a, vec<double> b, vec<double> c) {
    return (vec<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
#elif defined(__aarch64__)
template <> MHA_INLINE vec<float> multiply_add<float>(vec<float> a, vec<float> b, vec<float> c) {
    return (vec<float>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
template <> MHA_INLINE vec<double> multiply_add<double>(vec<double> a, vec<double> b, vec<double> c) {
    return (vec<double>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}
#endif

template <class T> MHA_INLINE vec<T> magnitude(vec<T> v) { return v < T(0) ? -v : v; }

// 0, 1, 2, ...
template <class T> MHA_INLINE vec<T> lane_numbers() {
    vec<T> v = {};
    MHA_UNROLL for (int i = 0; i < lanes<T>; i++) v[i] = T(i);
    return v;
}

template <int... I> struct indices {};
template <int N, int... I> struct index_list : index_list<N - 1, N - 1, I...> {};
template <int... I> struct index_list<0, I...> {
    typedef indices<I...> type;
};

// From a pair of vectors, the lanes whose number has bit STEP clear (low) or set (high), b's in the places between.
template <int STEP, class V, int... I> MHA_INLINE V merge_low(V a, V b, indices<I...>) {
    return __builtin_shufflevector(a, b, ((I & STEP) ? int(sizeof...(I)) + I - STEP : I)...);
}
template <int STEP, class V, int... I> MHA_INLINE V merge_high(V a, V b, indices<I...>) {
    return __builtin_shufflevector(a, b, ((I & STEP) ? int(sizeof...(I)) + I : I + STEP)...);
}

#if MHA_VECTOR_BYTES > 16
// A vector from two halves in memory.
template <class T> MHA_INLINE vec<T> load_halves(const T *low, const T *high) {
#if defined(__AVX512F__)
    const __m512d v = _mm512_castpd256_pd512(_mm256_loadu_pd((const double *)low));
    return (vec<T>)_mm512_insertf64x4(v, _mm256_loadu_pd((const double *)high), 1);
#else
    const __m256d v = _mm256_castpd128_pd256(_mm_loadu_pd((const double *)low));
    return (vec<T>)_mm256_insertf128_pd(v, _mm_loadu_pd((const double *)high), 1);
#endif
}
#endif

template <class T, int STEP> MHA_INLINE void transpose_step(vec<T> (&row)[lanes<T>]) {
    typedef typename index_list<lanes<T>>::type all;
    MHA_UNROLL for (int i = 0; i < lanes<T>; i++) {
        if (i & STEP) continue;
        vec<T> a = row[i], b = row[i + STEP];
        row[i] = merge_low<STEP>(a, b, all{});
        row[i + STEP] = merge_high<STEP>(a, b, all{});
    }
}
// A square of lanes x lanes elements: row[i][j] <-> row[j][i].
template <class T> MHA_INLINE void transpose(vec<T> (&row)[lanes<T>]) {
    transpose_step<T, 1>(row);
    if constexpr (lanes<T> > 2) transpose_step<T, 2>(row);
    if constexpr (lanes<T> > 4) transpose_step<T, 4>(row);
    if constexpr (lanes<T> > 8) transpose_step<T, 8>(row);
}

// The same on the way from memory: row(i) points to row i.
template <class T, class Row> MHA_INLINE void load_transposed(vec<T> (&square)[lanes<T>], Row row) {
#if MHA_VECTOR_BYTES > 16
    // The last step is done by loading halves to their places: more units can do that than can move lanes.
    constexpr int half = lanes<T> / 2;
    MHA_UNROLL for (int i = 0; i < half; i++) {
        square[i] = load_halves<T>(row(i), row(i + half));
        square[i + half] = load_halves<T>(row(i) + half, row(i + half) + half);
    }
    transpose_step<T, 1>(square);
    if constexpr (lanes<T> > 4) transpose_step<T, 2>(square);
    if constexpr (lanes<T> > 8) transpose_step<T, 4>(square);
#else
    MHA_UNROLL for (int i = 0; i < lanes<T>; i++) square[i] = load(row(i));
    transpose<T>(square);
#endif
}

template <class T, int STEP> MHA_INLINE void sum_step(vec<T> (&row)[lanes<T>]) {
    typedef typename index_list<lanes<T>>::type all;
    MHA_UNROLL for (int i = 0; i < STEP; i++) {
        vec<T> a = row[i], b = row[i + STEP];
        row[i] = merge_low<STEP>(a, b, all{}) + merge_high<STEP>(a, b, all{});
    }
}
// Lane i of the result is the sum over the lanes of row[i].
template <class T> MHA_INLINE vec<T> row_sums(vec<T> (&row)[lanes<T>]) {
    if constexpr (lanes<T> > 8) sum_step<T, 8>(row);
    if constexpr (lanes<T> > 4) sum_step<T, 4>(row);
    if constexpr (lanes<T> > 2) sum_step<T, 2>(row);
    sum_step<T, 1>(row);
    return row[0];
}

template <class T> MHA_INLINE T lane_sum(vec<T> v) {
    T sum = 0;
    MHA_UNROLL for (int i = 0; i < lanes<T>; i++) sum += v[i];
    return sum;
}

// A number known at compile time, handed to a generic lambda as an argument.
template <int N> struct number {
    static constexpr int value = N;
};

// Calls body(number<n>, i) for n = POWER, POWER / 2, ... 1, each at most once, over what is left from i on.
template <int POWER, class Body> MHA_INLINE void in_powers(ptrdiff_t i, ptrdiff_t count, Body &body) {
    if (i + POWER <= count) {
        body(number<POWER>{}, i);
        i += POWER;
    }
    if constexpr (POWER > 1) in_powers<POWER / 2>(i, count, body);
}

// Calls body(number<n>, i) over [0, count): in steps of STEP, then in powers of two for what is left.
template <int STEP, class Body> MHA_INLINE void in_steps(ptrdiff_t count, Body body) {
    ptrdiff_t i = 0;
    for (; i + STEP <= count; i += STEP) body(number<STEP>{}, i);
    if constexpr (STEP > 1) in_powers<(STEP > 8 ? 8 : STEP > 4 ? 4 : STEP > 2 ? 2 : 1)>(i, count, body);
}

// Calls body(number<n>) with n = the vectors that n_row rows take, 1 ... MHA_TILE_VECTORS.
template <class T, class Body> MHA_INLINE void with_vectors(ptrdiff_t n_row, Body body) {
    switch ((n_row + lanes<T> - 1) / lanes<T>) {
    case 1: return body(number<1>{});
    case 2: return body(number<MHA_TILE_VECTORS >= 2 ? 2 : MHA_TILE_VECTORS>{});
    case 3: return body(number<MHA_TILE_VECTORS >= 3 ? 3 : MHA_TILE_VECTORS>{});
    default: return body(number<MHA_TILE_VECTORS>{});
    }
}

template <class T> MHA_INLINE const T *row_at(const char *data, ptrdiff_t stride, ptrdiff_t i) {
    return reinterpret_cast<const T *>(data + i * stride);
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
