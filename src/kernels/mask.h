// Masks of any type and stride, read a block at a time and turned into numbers to add: 0 or -inf for bool.
#pragma once

#include "adjust.h"

namespace {
namespace MHA_ISA_NAMESPACE {

struct bool_element {
    typedef uint8_t stored;
    template <class T> static T number(stored e) { return e ? T(0) : -infinity<T>; }
};
struct float16_element {
    typedef uint16_t stored;
    template <class T> static T number(stored e) {
        // The 15 bits moved to float32's place are 2**112 too small; Inf and NaN need their exponent filled up.
        uint32_t bits = uint32_t(e & 0x7fff) << 13;
        float magnitude;
        memcpy(&magnitude, &bits, sizeof magnitude);
        magnitude *= 0x1p112f;
        if ((e & 0x7c00) == 0x7c00) magnitude = e & 0x3ff ? __builtin_nanf("") : __builtin_inff();
        return T(e & 0x8000 ? -magnitude : magnitude);
    }
};
struct bfloat16_element {
    typedef uint16_t stored;
    template <class T> static T number(stored e) {
        uint32_t bits = uint32_t(e) << 16;
        float f;
        memcpy(&f, &bits, sizeof f);
        return T(f);
    }
};
struct float32_element {
    typedef float stored;
    template <class T> static T number(stored e) { return T(e); }
};
struct float64_element {
    typedef double stored;
    template <class T> static T number(stored e) {
        // A finite number past float32's range must not turn into -inf, which would exclude the key.
        T n = T(e);
        if (sizeof(T) < sizeof e && __builtin_isinf(n) && !__builtin_isinf(e)) n = e < 0 ? -largest_finite<T> : largest_finite<T>;
        return n;
    }
};

template <class T, class Element> MHA_INLINE T mask_number(const char *place) {
    typename Element::stored e;
    memcpy(&e, place, sizeof e);  // a mask may lie at any address
    return Element::template number<T>(e);
}

template <class T, class Element> void read_mask(T *bias, const char *row, ptrdiff_t key_stride, ptrdiff_t n_key) {
    constexpr ptrdiff_t size = sizeof(typename Element::stored);
    if (key_stride == size) {
        // The same row's next block: rows lie too far apart for the hardware to foresee it.
        for (ptrdiff_t byte = 0; byte < n_key * size; byte += 64) __builtin_prefetch(row + n_key * size + byte, 0, 2);
        // a constant stride lets the compiler vectorise
        for (ptrdiff_t j = 0; j < n_key; j++) bias[j] = mask_number<T, Element>(row + j * size);
    } else
        for (ptrdiff_t j = 0; j < n_key; j++) bias[j] = mask_number<T, Element>(row + j * key_stride);
}

template <class T> int mask_holds(const T *bias, ptrdiff_t n_key) {
    int n_excluded = 0;
    for (ptrdiff_t j = 0; j < n_key; j++) n_excluded += bias[j] == -infinity<T>;
    return (n_excluded < n_key ? MHA_MASK_VISIBLE : 0) | (n_excluded ? MHA_MASK_EXCLUDED : 0);
}

template <class T>
int mask_row(void *bias_, const char *row, ptrdiff_t key_stride, ptrdiff_t n_key, mha_mask_type type) {
    T *bias = (T *)bias_;
    switch (type) {
    case MHA_BOOL: read_mask<T, bool_element>(bias, row, key_stride, n_key); break;
    case MHA_FLOAT16: read_mask<T, float16_element>(bias, row, key_stride, n_key); break;
    case MHA_BFLOAT16: read_mask<T, bfloat16_element>(bias, row, key_stride, n_key); break;
    case MHA_FLOAT32: read_mask<T, float32_element>(bias, row, key_stride, n_key); break;
    case MHA_FLOAT64: read_mask<T, float64_element>(bias, row, key_stride, n_key); break;
    case MHA_NO_MASK: break;
    }
    return mask_holds(bias, n_key);
}

// [key][ROWS] from up to ROWS rows; lanes without a row get 0.
template <class T, int ROWS>
int mask_tile(void *bias_, void *work_, const char *const *row, ptrdiff_t n_row, ptrdiff_t key_stride, ptrdiff_t n_key,
              mha_mask_type type) {
    T *bias = (T *)bias_, *work = (T *)work_;
    int holds = 0;
    for (ptrdiff_t r = 0; r < n_row; r += lanes<T>) {
        for (int i = 0; i < lanes<T>; i++) {
            T *line = work + i * MHA_KEY_BLOCK;
            if (r + i < n_row) holds |= mask_row<T>(line, row[r + i], key_stride, n_key, type);
            else memset(line, 0, MHA_KEY_BLOCK * sizeof(T));
        }
        for (ptrdiff_t j = 0; j < n_key; j += lanes<T>) {
            vec<T> square[lanes<T>];
            for (int i = 0; i < lanes<T>; i++) square[i] = load(work + i * MHA_KEY_BLOCK + j);
            transpose<T>(square);
            for (int i = 0; i < lanes<T> && j + i < n_key; i++) store(bias + (j + i) * ROWS + r, square[i]);
        }
    }
    return holds;
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
