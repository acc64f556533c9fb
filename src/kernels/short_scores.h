// Scores and weights in 16 bits, for values of bfloat16.
//
// Where all scores of a block are known to be small (|score| * exp_scale < 31.5, by the Cauchy-Schwarz inequality), a
// fixed-point number with 10 fractional bits holds exponent = score * exp_scale: an error of 2**-11 against the 2**-9 of
// a rounded weight.  Twice as many fit into a vector, and a block of them into L1.
//
// 2**exponent is then close to the exponent itself, read as a bfloat16 number: with exponent = n + f, 2**f is 1 + f to
// within 9%.  A polynomial in float16 adds the difference.
#pragma once

#include "adjust.h"
#include "terms.h"

namespace {
namespace MHA_ISA_NAMESPACE {

typedef uint16_t short_bits __attribute__((vector_size(64)));

#if !defined(MHA_EMULATE_MATRIX_UNIT)
typedef __m512h halves;  // float16

MHA_INLINE halves splat_half(float a) { return _mm512_set1_ph((_Float16)a); }
MHA_INLINE halves multiply_add(halves a, halves b, halves c) { return _mm512_fmadd_ph(a, b, c); }

// Right by N places in 16 bits; `above` comes in from the upper end.
template <int N> MHA_INLINE __m512i shift_right(__m512i v, __m512i above) { return _mm512_shrdi_epi16(v, above, N); }

// sum + both bfloat16 numbers of each pair.
MHA_INLINE vec<float> add_pairs(vec<float> sum, __m512i pairs) {
    return (vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi16(0x3f80));
}
#endif

constexpr float exponent_steps = 1024, lowest_exponent = -31.5f;
constexpr double most_exponent = 31.3;  // leaves room for the rounding of the scores

// Calls unit<FIRST>() ... unit<END - 1>() of `work`.
template <int FIRST, int END, class Work> MHA_INLINE void units_of(Work &work) {
    if constexpr (FIRST < END) {
        work.template unit<FIRST>();
        units_of<FIRST + 1, END>(work);
    }
}

// Scores of a block to 16 bits, and their maximum, unit by unit: two keys x 16 rows, as in `weighing`.  They take the
// place of the weights that they will become.
struct shortening {
    const float *passing;
    uint16_t *at;
    vec<float> scale;
    short_bits highest[2];
    ptrdiff_t n, done;

    MHA_INLINE void begin(const mha_matrix_item *item, const float *from, float exp_scale) {
        done = 0;
        n = item->n_panel * panel_keys;
        passing = from;
        at = (uint16_t *)item->weight;
        scale = splat(exp_scale);
        highest[0] = highest[1] = short_bits{};
    }
    MHA_INLINE void up_to(ptrdiff_t end) {
        for (end = end < n ? end : n; done + 2 <= end; done += 2) {
            const ptrdiff_t panel = done / panel_keys, pair = done % panel_keys / 2;
            const float *s = passing + (panel % MHA_MATRIX_PASSING * panel_keys + pair) * matrix_rows;
            uint16_t *p = at + panel * term_numbers + pair * tile_depth;
            MHA_UNROLL for (int half = 0; half < 2; half++) {
                const short_bits both =
                    shortened(load(s + half * tile_edge), load(s + tile_edge * matrix_rows + half * tile_edge));
                store((float *)(p + half * tile_numbers), (vec<float>)both);
                highest[half] = (short_bits)_mm512_max_epu16((__m512i)highest[half], (__m512i)both);
            }
        }
    }
    // Adding 1.5 * 2**13 leaves the exponent above the lowest, in units of 2**-10, in the lower half of a float.
    MHA_INLINE short_bits shortened(vec<float> first, vec<float> second) const {
        constexpr float shift = 12288 - lowest_exponent;
        const __m512i lower_to_upper = _mm512_set4_epi32(0x0d0c0d0c, 0x09080908, 0x05040504, 0x01000100);
        first = first * scale + shift;
        second = second * scale + shift;
        return (short_bits)_mm512_mask_shuffle_epi8((__m512i)first, 0xcccccccccccccccc, (__m512i)second,
                                                    lower_to_upper);
    }
    MHA_INLINE void finish(mha_matrix_item *item) {
        up_to(n);
        MHA_UNROLL for (int half = 0; half < 2; half++) {
            const float_bits both = (float_bits)highest[half], first = both & 0xffff, second = both >> 16;
            const vec<float> most = __builtin_convertvector(first > second ? first : second, vec<float>);
            store(item->block_maximum + half * tile_edge, (most * (1 / exponent_steps) + lowest_exponent) / scale);
        }
    }
};

// Weights of a block of short scores, in their place.
struct short_weighing {
    uint16_t *at;
    short_bits offset[2];
    vec<float> total[2];
    ptrdiff_t n_unit, done;
    ivec<float> reached[2];  // rows whose maximum so far is within the fixed point

    // With offset + score = 0x9600 at the maximum, the correction's bits (0x6604 there, see `unit`) make it 0xfc04, and
    // that, shifted, is 1.
    static constexpr uint16_t offset_of_one = 0x9600;

    MHA_INLINE void begin(mha_matrix_item *item, float exp_scale) {
        done = 0;
        n_unit = item->n_panel * panel_keys;
        at = (uint16_t *)item->weight;
        bool all_reached = true;
        vec<float> base[2];
        MHA_UNROLL for (int half = 0; half < 2; half++) {
            float *maximum = item->maximum + half * tile_edge;
            const vec<float> old = load(maximum),
                             now = larger<float>(load(item->block_maximum + half * tile_edge), old);
            // The next step of the fixed point from there; a maximum on a step stays in spite of its rounding.
            base[half] =
                (vec<float>)_mm512_roundscale_ps((__m512)((now * exp_scale - lowest_exponent) * exponent_steps - 0.01f),
                                                 _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
            // Lanes without a row hold anything, and must not decide.
            const vec<float> row = lane_numbers<float>() + float(half * tile_edge);
            const vec<float> steps = row < float(item->n_row) ? base[half] : vec<float>{};
            all_reached &= all_within(steps, 65535.0f);
            reached[half] = steps <= 65535.0f;
            offset[half] = (short_bits)((float_bits) __builtin_convertvector(base[half], ivec<float>) * 0x10001);
            offset[half] = offset_of_one - offset[half];
            base[half] = (base[half] * (1 / exponent_steps) + lowest_exponent) / exp_scale;
            store(maximum, base[half]);
            store(item->rescale + half * tile_edge, weight_of<float>(old, base[half], exp_scale));
            total[half] = vec<float>{};
        }
        if (!all_reached) weigh_apart(base, exp_scale);
    }
    // In some rows another block's maximum is too far above this one's scores: there they are widened again.  The
    // others get the weights that they would have got without those rows.
    __attribute__((noinline)) void weigh_apart(const vec<float> (&base)[2], float exp_scale) {
        auto weight_of = [=](float_bits score, vec<float> from) {
            const vec<float> exponent =
                __builtin_convertvector(score, vec<float>) * (1 / exponent_steps) + lowest_exponent;
            return plus_half_ulp(exp2_nonpositive<float>(exponent - from * exp_scale));
        };
        for (; done < n_unit; done++) {
            const int half = done % 2;
            uint16_t *p =
                at + done / panel_keys * term_numbers + half * tile_numbers + done % panel_keys / 2 * tile_depth;
            const float_bits both = (float_bits)load((const float *)p);
            const vec<float> first = weight_of(both & 0xffff, base[half]), second = weight_of(both >> 16, base[half]);
            const __m512i within = short_weights((__m512i)both, half);
            const vec<float> sum = total[half] + (upper_half(first) + upper_half(second));
            total[half] = reached[half] ? add_pairs(total[half], within) : sum;
            store((float *)p, reached[half] ? (vec<float>)within : upper_halves(first, second));
        }
    }
    MHA_INLINE __m512i short_weights(__m512i score, int half) const {
        const __m512i exponent = _mm512_add_epi16(score, (__m512i)offset[half]);
        // 1 + f as float16: the offset has its half place in the fraction, which goes here.
        constexpr int fraction_then_flip = 0x6a;  // (exponent & fraction) ^ one
        const halves t = (halves)_mm512_ternarylogic_epi32(exponent, _mm512_set1_epi16(0x3ff),
                                                           _mm512_set1_epi16(0x3e00), fraction_then_flip);
        // 1540 + 1024 (2**f - 1 - f) by Horner's rule (bench.fit_polynomials; the error is 0.3 rms of the 8 that a weight
        // is rounded to).  From 1024 to 2048 the last place of a float16 number is 1, and its bits count up; 4 rounds.
        halves c = splat_half(80.875f);
        c = multiply_add(c, t, splat_half(-13.0546875f));
        c = multiply_add(c, t, splat_half(-527.0f));
        c = multiply_add(c, t, splat_half(1999.0f));
        const __m512i corrected = _mm512_add_epi16(exponent, (__m512i)c);
        // Three places less, and 001 from above: exponents from -63 to 0.
        return shift_right<3>(corrected, _mm512_set1_epi16(1));
    }
    template <int U> MHA_INLINE void unit() {
        constexpr int half = U % 2;
        uint16_t *p =
            at + done / panel_keys * term_numbers + half * tile_numbers + (done % panel_keys / 2 + U / 2) * tile_depth;
        const __m512i weight = short_weights((__m512i)load((const float *)p), half);
        total[half] = add_pairs(total[half], weight);
        store((float *)p, (vec<float>)weight);
    }
    MHA_INLINE void finish(mha_matrix_item *item) {
        for (; done < n_unit; done += 2) units_of<0, 2>(*this);
        MHA_UNROLL for (int half = 0; half < 2; half++) {
            float *sum = item->total + half * tile_edge;
            store(sum, load(sum) * load(item->rescale + half * tile_edge) + total[half]);
        }
    }
};

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
