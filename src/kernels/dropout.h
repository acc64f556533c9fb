// Which weights dropout keeps: Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), one
// block for four neighbouring keys.
#pragma once

#include "../contract/dropout.h"
#include "vector.h"

namespace {
namespace MHA_ISA_NAMESPACE {

// A word of the generator is the lower half of a 64-bit lane; the upper half holds anything.
typedef unsigned_vec<double> words;
constexpr int words_lanes = MHA_VECTOR_BYTES / 8;
constexpr uint64_t lower_half = 0xffffffff;

// The whole product of the lower halves.
MHA_INLINE words multiplied(words a, words b) {
#if defined(__AVX512F__)
    return (words)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (words)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (words)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
    return (a & lower_half) * (b & lower_half);
#endif
}

MHA_INLINE words exclusive_or(words a, words b, words c) {
#if defined(__AVX512F__)
    return (words)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0x96);  // GCC 12 takes two instructions
#else
    return a ^ b ^ c;
#endif
}

constexpr uint64_t philox_factor[] = {0xd2511f53, 0xcd9e8d57};
constexpr uint32_t philox_step[] = {0x9e3779b9, 0xbb67ae85};
constexpr int philox_rounds = 10;

MHA_INLINE words same(uint64_t word) { return words{} + word; }

struct philox {
    words counter[4];

    // Rounds number FROM and on; each has a key of its own.
    template <int FROM> MHA_INLINE void finish(const uint32_t (&key)[2]) {
        MHA_UNROLL for (int i = FROM; i < philox_rounds; i++) {
            const words low = multiplied(counter[0], same(philox_factor[0]));
            const words high = multiplied(counter[2], same(philox_factor[1]));
            counter[0] = exclusive_or(high >> 32, counter[1], same(uint32_t(key[0] + i * philox_step[0])));
            counter[1] = high;
            counter[2] = exclusive_or(low >> 32, counter[3], same(uint32_t(key[1] + i * philox_step[1])));
            counter[3] = low;
        }
    }
};

// The first two rounds for some rows: of each, one half depends on the row alone, the other on the keys alone.
struct philox_of_rows {
    words first, second, third;

    MHA_INLINE void begin(words query, words head, const uint32_t (&key)[2]) {
        const words high = multiplied(head, same(philox_factor[1]));
        const words low = multiplied((high >> 32) ^ query ^ same(key[0]), same(philox_factor[0]));
        first = high;
        second = (low >> 32) ^ same(uint32_t(key[1] + philox_step[1]));
        third = low;
    }
    // Of keys 4 * number ... 4 * number + 3.
    MHA_INLINE philox block(uint32_t number, const uint32_t (&key)[2]) const {
        const uint64_t low = number * philox_factor[0];
        const uint64_t high = (uint32_t(low >> 32) ^ key[1]) * philox_factor[1];
        philox p = {{same(uint32_t(high >> 32) ^ uint32_t(key[0] + philox_step[0])) ^ first, same(high),
                     second ^ same(uint32_t(low)), third}};
        p.finish<2>(key);
        return p;
    }
};

// The factors of lanes<T> rows: in float32 the even ones and the odd ones come from generators of their own.
template <class T> struct kept_rows;
template <> struct kept_rows<float> {
    philox_of_rows even, odd;
    vec<float> factor;
    unsigned_vec<float> threshold;

    MHA_INLINE void begin(const mha_dropout *how, ptrdiff_t row) {
        const words query = (words)load((const float *)how->query + row),
                    head = (words)load((const float *)how->head + row);
        even.begin(query, head, how->rule.key);
        odd.begin(query >> 32, head >> 32, how->rule.key);
        factor = splat(float(how->rule.factor));
        threshold = unsigned_vec<float>{} + how->rule.threshold;
    }
    template <class Each> MHA_INLINE void block(uint32_t number, const uint32_t (&key)[2], Each each) const {
        const philox a = even.block(number, key), b = odd.block(number, key);
        MHA_UNROLL for (int i = 0; i < 4; i++) {
            const auto word = (unsigned_vec<float>)((a.counter[i] & lower_half) | b.counter[i] << 32);
            each(i, word >= threshold ? factor : vec<float>{});
        }
    }
};
template <> struct kept_rows<double> {
    philox_of_rows all;
    vec<double> factor;
    words threshold;

    MHA_INLINE void begin(const mha_dropout *how, ptrdiff_t row) {
        words query, head;
        MHA_UNROLL for (int i = 0; i < words_lanes; i++) query[i] = how->query[row + i], head[i] = how->head[row + i];
        all.begin(query, head, how->rule.key);
        factor = splat(how->rule.factor);
        threshold = same(how->rule.threshold);
    }
    template <class Each> MHA_INLINE void block(uint32_t number, const uint32_t (&key)[2], Each each) const {
        const philox a = all.block(number, key);
        MHA_UNROLL for (int i = 0; i < 4; i++)
            each(i, (a.counter[i] & lower_half) >= threshold ? factor : vec<double>{});
    }
};

// Calls each(key, row of the first lane, factors) for the keys from first_key on, which it counts from 0.
template <class T, class Each>
MHA_INLINE void each_kept(ptrdiff_t n_row, ptrdiff_t first_key, ptrdiff_t n_key, const mha_dropout *how, Each each) {
    const uint32_t key[2] = {how->rule.key[0], how->rule.key[1]};
    for (ptrdiff_t r = 0; r < n_row; r += lanes<T>) {
        kept_rows<T> rows;
        rows.begin(how, r);
        for (ptrdiff_t j = first_key / 4 * 4; j < first_key + n_key; j += 4) {
            const ptrdiff_t here = j - first_key;
            rows.block(uint32_t(j / 4), key, [&](int i, vec<T> factor) __attribute__((always_inline)) {
                if (here + i >= 0 && here + i < n_key) each(here + i, r, factor);
            });
        }
    }
}

template <class T>
void keep_tile(void *keep, ptrdiff_t n_row, ptrdiff_t first_key, ptrdiff_t n_key, const mha_dropout *how) {
    each_kept<T>(n_row, first_key, n_key, how,
                 [=](ptrdiff_t j, ptrdiff_t r, vec<T> factor)
                     __attribute__((always_inline)) { store((T *)keep + j * tile_rows<T> + r, factor); });
}

template <class T>
void drop_tile(void *weight, ptrdiff_t n_row, ptrdiff_t first_key, ptrdiff_t n_key, const mha_dropout *how) {
    each_kept<T>(n_row, first_key, n_key, how,
                 [=](ptrdiff_t j, ptrdiff_t r, vec<T> factor) __attribute__((always_inline)) {
        T *place = (T *)weight + j * tile_rows<T> + r;
        store(place, load(place) * factor);
    });
}

// One row: a lane is a block of four keys.
template <class T>
void drop_row(void *weight_, ptrdiff_t row, ptrdiff_t first_key, ptrdiff_t n_key, const mha_dropout *how) {
    T *weight = (T *)weight_;
    const uint32_t key[2] = {how->rule.key[0], how->rule.key[1]};
    words number = same(first_key / 4);
    MHA_UNROLL for (int i = 0; i < words_lanes; i++) number[i] += i;
    for (ptrdiff_t j = first_key / 4 * 4 - first_key; j < n_key; j += 4 * words_lanes, number += words_lanes) {
        philox p = {{number, same(how->query[row]), same(how->head[row]), words{}}};
        p.finish<0>(key);
        for (int i = 0; i < 4 * words_lanes; i++) {
            const bool kept = uint32_t(p.counter[i % 4][i / 4]) >= how->rule.threshold;
            if (j + i >= 0 && j + i < n_key) weight[j + i] *= kept ? T(how->rule.factor) : T(0);
        }
    }
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
