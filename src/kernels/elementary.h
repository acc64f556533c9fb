// 2**x, tanh and the adjustments of a score, on one vector.
// Polynomials: `python -m bench.fit_polynomials` (Remez; relative error below 4e-18 in float64, 2.1e-9 in float32).
#pragma once

#include "vector.h"

namespace {
namespace MHA_ISA_NAMESPACE {

template <class T> struct exp2_constants;
template <> struct exp2_constants<float> {
    // 2**r = 1 + r g(r), lowest order first: r in [-1/2, 1/2], and r in [0, 1).
    static constexpr float nearest[] = {0.69314720285503164763f,   0.24022647913636852127f,
                                        0.055503324711908571697f,  0.0096184373569574205587f,
                                        0.0013398874393981390061f, 0.00015353362068858489034f};
    static constexpr float floor[] = {0.69314704444336655545f,   0.24022930555173854114f,   0.055485280620182784799f,
                                      0.0096754515652170405198f, 0.0012467846450773492551f, 0.00021612914969557343788f};
    // Adding 1.5 * 2**23 rounds to an integer in the low mantissa bits; the bias of the exponent is added along.
    static constexpr float round = 12582912.0f + 127.0f, lowest = -127.0f, least_normal = -126.0f;
    static constexpr int mantissa = 23;
};
template <> struct exp2_constants<double> {
    static constexpr double nearest[] = {0.69314718055994532581,     0.2402265069591013126,    0.055504108664820083227,
                                         0.0096181291075941200896,   0.0013333558146774620517, 0.0001540353045711209086,
                                         0.000015252733493127489347, 1.3215435282308487999e-6, 1.0178199571842137974e-7,
                                         7.0737832485031332991e-9,   4.4347712982003767083e-10};
    static constexpr double floor[] = {0.69314718055994592839,    0.24022650695906330315,   0.055504108665602238723,
                                       0.0096181290995508956128,  0.0013333558629562675936, 0.00015403512309733948746,
                                       0.00001525317505379524616, 1.3208367308220049348e-6, 1.025321230405209001e-7,
                                       6.5595298355172712178e-9,  6.2634652734225902742e-10};
    static constexpr double round = 6755399441055744.0 + 1023.0, lowest = -1023.0, least_normal = -1022.0;
    static constexpr int mantissa = 52;
};

// r g(r) = 2**r - 1
template <class T, int N> MHA_INLINE vec<T> polynomial(vec<T> r, const T (&coefficient)[N]) {
    vec<T> g = splat(coefficient[N - 1]);
    MHA_UNROLL for (int i = N - 2; i >= 0; i--) g = g * r + coefficient[i];
    return g * r;
}

// 2**x = scale + scale * fraction with fraction in [-0.3, 0.42], for x <= 0; NaN stays NaN.
// Below `lowest` the biased exponent, and with it the scale, is exactly 0.
template <class T> struct exp2_parts {
    vec<T> scale, fraction;
};
template <class T> MHA_INLINE exp2_parts<T> split_exp2_above_lowest(vec<T> x) {
    typedef exp2_constants<T> constant;
    vec<T> shifted = x + constant::round;
    // The low bits of `shifted` are the biased exponent: moved to its place they are the float 2**n.
    vec<T> scale = (vec<T>)((ivec<T>)shifted << constant::mantissa);
    return {scale, polynomial<T>(x - (shifted - constant::round), constant::nearest)};
}

template <class T> MHA_INLINE exp2_parts<T> split_exp2(vec<T> x) {
    return split_exp2_above_lowest<T>(larger<T>(splat(exp2_constants<T>::lowest), x));
}

// 2**x for x <= 0.  Exactly 1 at 0, NaN at NaN, and 0 where it would not be a normal number: arithmetic with subnormal
// ones takes up to a hundred times as long, and beside a weight of 1 they vanish.
template <class T> MHA_INLINE vec<T> exp2_nonpositive(vec<T> x) {
    exp2_parts<T> part = split_exp2_above_lowest<T>(x);  // anything, where it is not taken
    return x < exp2_constants<T>::least_normal ? vec<T>{} : part.scale + part.scale * part.fraction;
}
#if defined(__AVX512DQ__)
// Fraction above the floor, then a multiplication by 2**floor(x): two instructions instead of five.
constexpr int reduce_to_floor = 0x09;
template <> MHA_INLINE vec<float> exp2_nonpositive<float>(vec<float> x) {
    vec<float> r = (vec<float>)_mm512_reduce_ps((__m512)x, reduce_to_floor);
    vec<float> p = polynomial<float>(r, exp2_constants<float>::floor) + 1.0f;
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(exp2_constants<float>::least_normal), _CMP_NLT_UQ);
    return (vec<float>)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)x);
}
template <> MHA_INLINE vec<double> exp2_nonpositive<double>(vec<double> x) {
    vec<double> r = (vec<double>)_mm512_reduce_pd((__m512d)x, reduce_to_floor);
    vec<double> p = polynomial<double>(r, exp2_constants<double>::floor) + 1.0;
    const __mmask8 normal = _mm512_cmp_pd_mask((__m512d)x, _mm512_set1_pd(exp2_constants<double>::least_normal), _CMP_NLT_UQ);
    return (vec<double>)_mm512_maskz_scalef_pd(normal, (__m512d)p, (__m512d)x);
}
#endif

// With u = exp(-2|x|) and e = u - 1, whose relative accuracy near 0 split_exp2 keeps: tanh(|x|) is -e / (2 + e), and
// also 1 - 2u / (2 + e), which rounds less where it is near 1.
template <class T> MHA_INLINE vec<T> hyperbolic_tangent(vec<T> x) {
    constexpr T two_log2_e = T(2.885390081777926814720);
    const vec<T> size = magnitude<T>(x);
    exp2_parts<T> part = split_exp2<T>(size * -two_log2_e);
    const vec<T> u = part.scale + part.scale * part.fraction, e = part.scale * part.fraction + (part.scale - T(1));
    const auto near_one = size > T(0.5);
    const vec<T> quotient = (near_one ? u + u : -e) / (T(2) + e);
    const vec<T> t = near_one ? T(1) - quotient : quotient;
    return x < T(0) ? -t : t;
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
