// How elements lie in memory, and how they become numbers of the arithmetic type: the 16-bit types are widened on
// every load and rounded to nearest even on every store.
#pragma once

#include "vector.h"

namespace {
namespace MHA_ISA_NAMESPACE {

struct float16 {
    uint16_t bits;
};
struct bfloat16 {
    uint16_t bits;
};

// Half a vector of 16-bit patterns beside a vector of the floats they stand for.
typedef uint16_t half_bits __attribute__((vector_size(MHA_VECTOR_BYTES / 2)));
typedef uint32_t float_bits __attribute__((vector_size(MHA_VECTOR_BYTES)));

MHA_INLINE half_bits load_bits(const void *p) {
    half_bits v;
    memcpy(&v, p, sizeof v);
    return v;
}

// 16-bit patterns as 32-bit ones and back (below 2**16); GCC 12 makes a dozen instructions of the general conversion.
#if defined(__AVX512F__)
MHA_INLINE float_bits extended(half_bits h) { return (float_bits)_mm512_cvtepu16_epi32((__m256i)h); }
MHA_INLINE half_bits shortened(float_bits b) { return (half_bits)_mm512_cvtepi32_epi16((__m512i)b); }
#elif defined(__AVX2__)
MHA_INLINE float_bits extended(half_bits h) { return (float_bits)_mm256_cvtepu16_epi32((__m128i)h); }
MHA_INLINE half_bits shortened(float_bits b) {
    return (half_bits)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)b), _mm256_extracti128_si256((__m256i)b, 1));
}
#else
MHA_INLINE float_bits extended(half_bits h) { return __builtin_convertvector(h, float_bits); }
MHA_INLINE half_bits shortened(float_bits b) { return __builtin_convertvector(b, half_bits); }
#endif

MHA_INLINE vec<float> widened(half_bits h, bfloat16) { return (vec<float>)(extended(h) << 16); }
// A bfloat16 in the high half of its lane, to nearest even; what the low half holds does not count.
MHA_INLINE float_bits rounded(vec<float> v) {
    const float_bits bits = (float_bits)v, nan = bits | 0x400000;  // quiet, and never rounded up into Inf
    return v != v ? nan : bits + 0x7fff + ((bits >> 16) & 1);
}
MHA_INLINE half_bits narrowed(vec<float> v, bfloat16) { return shortened(rounded(v) >> 16); }

#if defined(__AVX512F__)
MHA_INLINE vec<float> widened(half_bits h, float16) { return (vec<float>)_mm512_cvtph_ps((__m256i)h); }
MHA_INLINE half_bits narrowed(vec<float> v, float16) {
    return (half_bits)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__F16C__)
MHA_INLINE vec<float> widened(half_bits h, float16) { return (vec<float>)_mm256_cvtph_ps((__m128i)h); }
MHA_INLINE half_bits narrowed(vec<float> v, float16) {
    return (half_bits)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
MHA_INLINE vec<float> widened(half_bits h, float16) {
    // The 15 bits moved to float32's place are 2**112 too small; Inf and NaN need their exponent filled up.
    const float_bits wide = extended(h), size = (wide & 0x7fff) << 13;
    const float_bits number = (float_bits)((vec<float>)size * 0x1p112f);
    const float_bits magnitude = size >= 0x7c00u << 13 ? size | 0x7f800000 : number;
    return (vec<float>)(magnitude | (wide & 0x8000) << 16);
}
MHA_INLINE half_bits narrowed(vec<float> v, float16) {
    const float_bits bits = (float_bits)v, size = bits & 0x7fffffff, sign = (bits >> 16) & 0x8000;
    // Below 2**-14 the last place is 2**-24: adding 1/2 leaves the rounded multiple of it in the low bits.
    const float_bits small = (float_bits)((vec<float>)size + 0.5f) - 0x3f000000;
    // Otherwise 13 bits go, with ties to even; past the largest number the carry makes Inf.
    const float_bits normal = (size - (112u << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    float_bits result = size < 113u << 23 ? small : normal;
    result = size >= 143u << 23 ? float_bits{} + 0x7c00 : result;
    result = size > 0x7f800000 ? float_bits{} + 0x7e00 : result;
    return shortened(result | sign);
}
#endif

// A vector from where its elements lie, and back.  T computes, S lies in memory.
template <class T, class S> MHA_INLINE vec<T> load_stored(const S *p) {
    if constexpr (sizeof(S) == 2) return widened(load_bits(p), S{});
    else return load(p);
}
template <class T, class S> MHA_INLINE void store_stored(S *p, vec<T> v) {
    if constexpr (sizeof(S) == 2) {
        const half_bits h = narrowed(v, S{});
        memcpy(p, &h, sizeof h);
    } else {
        store(p, v);
    }
}

// The first n lanes, the others 0; nothing past them is read or written.
template <class T, class S> MHA_INLINE vec<T> load_stored_first(const S *p, ptrdiff_t n) {
    if constexpr (sizeof(S) == 2) return widened(load_first<half_bits>(p, n), S{});
    else return load_first<vec<T>>(p, n);
}
template <class T, class S> MHA_INLINE void store_stored_first(S *p, vec<T> v, ptrdiff_t n) {
    if constexpr (sizeof(S) == 2) store_first(p, narrowed(v, S{}), n);
    else store_first(p, v, n);
}

// Two neighbours of 16 bits in each lane, the first in the low half: a transposition moves both at once.
template <class S> MHA_INLINE void widen_pairs(vec<float> pairs, vec<float> &first, vec<float> &second, S) {
    first = widened(shortened((float_bits)pairs & 0xffff), S{});
    second = widened(shortened((float_bits)pairs >> 16), S{});
}
MHA_INLINE void widen_pairs(vec<float> pairs, vec<float> &first, vec<float> &second, bfloat16) {
    first = (vec<float>)((float_bits)pairs << 16);
    second = (vec<float>)((float_bits)pairs & 0xffff0000);
}
template <class S> MHA_INLINE vec<float> narrow_pairs(vec<float> first, vec<float> second, S) {
    return (vec<float>)(extended(narrowed(first, S{})) | extended(narrowed(second, S{})) << 16);
}
MHA_INLINE vec<float> narrow_pairs(vec<float> first, vec<float> second, bfloat16) {
    return (vec<float>)(rounded(first) >> 16 | (rounded(second) & 0xffff0000));
}

// Rows of 16-bit elements as a packed block of floats, `row_bytes` apart.
template <class T, class S>
void widen(void *block, ptrdiff_t row_bytes, const char *data, ptrdiff_t stride, ptrdiff_t n_row, ptrdiff_t width) {
    for (ptrdiff_t r = 0; r < n_row; r++) {
        T *wide = (T *)((char *)block + r * row_bytes);
        const S *row = row_at<S>(data, stride, r);
        ptrdiff_t d = 0;
        for (; d + lanes<T> <= width; d += lanes<T>) store(wide + d, load_stored<T>(row + d));
        if (d < width) store(wide + d, load_stored_first<T>(row + d, width - d));
    }
}

// 0 * v summed is NaN as soon as one v is Inf or NaN.  Four sums: one alone would wait for itself.
template <class T, class S>
int all_finite(const char *data, ptrdiff_t stride, ptrdiff_t n_row, ptrdiff_t width) {
    vec<T> zero[4] = {};
    for (ptrdiff_t r = 0; r < n_row; r++) {
        const S *row = row_at<S>(data, stride, r);
        in_steps<4>(width / lanes<T>, [&](auto step, ptrdiff_t x) __attribute__((always_inline)) {
            MHA_UNROLL for (int i = 0; i < decltype(step)::value; i++) {
                zero[i] += load_stored<T>(row + (x + i) * lanes<T>) * T(0);
            }
        });
        const ptrdiff_t rest = width % lanes<T>;
        if (rest) zero[0] += load_stored_first<T>(row + width - rest, rest) * T(0);
    }
    return lane_sum<T>((zero[0] + zero[1]) + (zero[2] + zero[3])) == T(0);
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
