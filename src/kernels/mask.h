// Masks of any type, address and stride, read a block at a time and turned into numbers to add: 0 or -inf for bool.
#pragma once

#include "adjust.h"
#include "storage.h"

namespace {
namespace MHA_ISA_NAMESPACE {

typedef float half_floats __attribute__((vector_size(MHA_VECTOR_BYTES / 2)));
// One integer per lane; compilers widen them well only to twice their size.
template <class T> struct per_lane;
template <> struct per_lane<float> {
    typedef uint8_t bytes __attribute__((vector_size(MHA_VECTOR_BYTES / 4)));
    typedef uint16_t pairs __attribute__((vector_size(MHA_VECTOR_BYTES / 2)));
};
template <> struct per_lane<double> {
    typedef uint8_t bytes __attribute__((vector_size(MHA_VECTOR_BYTES / 8)));
    typedef uint16_t pairs __attribute__((vector_size(MHA_VECTOR_BYTES / 4)));
    typedef uint32_t quads __attribute__((vector_size(MHA_VECTOR_BYTES / 2)));
};
MHA_INLINE ivec<float> widened(per_lane<float>::bytes b) {
    return __builtin_convertvector(__builtin_convertvector(b, per_lane<float>::pairs), ivec<float>);
}
MHA_INLINE ivec<double> widened(per_lane<double>::bytes b) {
    const per_lane<double>::pairs pairs = __builtin_convertvector(b, per_lane<double>::pairs);
    return __builtin_convertvector(__builtin_convertvector(pairs, per_lane<double>::quads), ivec<double>);
}

// What lies at p, at whatever address.
template <class V> MHA_INLINE V load_anywhere(const char *p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

// A type of element: numbers<T>(p) are the lanes<T> elements that follow each other from p on.
struct bool_element {
    static constexpr int size = 1;
    template <class T> static MHA_INLINE vec<T> numbers(const char *p) {
        return widened(load_anywhere<typename per_lane<T>::bytes>(p)) == 0 ? splat(-infinity<T>) : vec<T>{};
    }
};
template <class S> struct half_element {
    static constexpr int size = 2;
    template <class T> static MHA_INLINE vec<T> numbers(const char *p) {
        half_bits bits = {};
        memcpy(&bits, p, lanes<T> * size);
        const vec<float> wide = widened(bits, S{});
        if constexpr (sizeof(T) == sizeof(float)) return wide;
        else return __builtin_convertvector(load_anywhere<half_floats>((const char *)&wide), vec<T>);
    }
};
struct float32_element {
    static constexpr int size = 4;
    template <class T> static MHA_INLINE vec<T> numbers(const char *p) {
        if constexpr (sizeof(T) == size) return load_anywhere<vec<T>>(p);
        else return __builtin_convertvector(load_anywhere<half_floats>(p), vec<T>);
    }
};
struct float64_element {
    static constexpr int size = 8;
    template <class T> static MHA_INLINE vec<T> numbers(const char *p) {
        if constexpr (sizeof(T) == size) return load_anywhere<vec<T>>(p);
        else {
            vec<T> all;
            MHA_UNROLL for (int half = 0; half < 2; half++) {
                const half_floats part = narrow(load_anywhere<vec<double>>(p + half * MHA_VECTOR_BYTES));
                memcpy((char *)&all + half * sizeof part, &part, sizeof part);
            }
            return all;
        }
    }
    // A finite number past float32's range must not turn into -inf, which would exclude the key.
    static MHA_INLINE half_floats narrow(vec<double> v) {
        constexpr double most = largest_finite<float>;
        const vec<double> size = magnitude<double>(v), bounded = v < 0 ? splat(-most) : splat(most);
        return __builtin_convertvector(((size > most) & (size < infinity<double>)) ? bounded : v, half_floats);
    }
};

// lanes<T> elements of a row, key_stride apart; where only n are left, the last one stands in for the others.
template <class T, class Element> MHA_INLINE vec<T> mask_numbers(const char *at, ptrdiff_t key_stride, ptrdiff_t n) {
    if (key_stride == Element::size && n >= lanes<T>) return Element::template numbers<T>(at);
    char packed[lanes<T> * Element::size];
    for (int i = 0; i < lanes<T>; i++)
        memcpy(packed + i * Element::size, at + (i < n ? i : n - 1) * key_stride, Element::size);
    return Element::template numbers<T>(packed);
}

// Keeps what the numbers of a mask are, in three integer steps a vector: each has a code, which for -inf is the highest
// of all and for the others the lower, the larger their magnitude; NaN has the lowest.
template <class T> class mask_census {
    typedef unsigned_vec<T> codes;
    codes lowest = ~codes{}, highest = {};

    static MHA_INLINE codes code(vec<T> v) {
        const codes from_infinity = (codes)v ^ (codes)splat(-infinity<T>);
        return (from_infinity << 1 | from_infinity >> (8 * sizeof(T) - 1)) - 1;
    }

public:
    MHA_INLINE void add(vec<T> v) {
        const codes c = code(v);
        lowest = c < lowest ? c : lowest;
        highest = c > highest ? c : highest;
    }
    int holds() const {
        const codes least_harmless = code(splat(-harmless_bias<T>));
        int found = 0;
        for (int i = 0; i < lanes<T>; i++) {
            if (lowest[i] != codes(~codes{})[0]) found |= MHA_MASK_VISIBLE;
            if (highest[i] == codes(~codes{})[0]) found |= MHA_MASK_EXCLUDED;
            if (lowest[i] < least_harmless[0]) found |= MHA_MASK_LARGE;
        }
        return found;
    }
    // Whether there may be a NaN; Inf counts too.
    bool suspects_nan() const {
        const codes most_of_nan = code((vec<T>)(codes{} - 1 >> 1));
        for (int i = 0; i < lanes<T>; i++)
            if (lowest[i] <= most_of_nan[0]) return true;
        return false;
    }
};

// Weights are rounded to 16 bits by adding to their bits, which a NaN must survive: one that has few bits does.
template <class T> void simplify_nan(T *bias, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++)
        if (bias[i] != bias[i]) bias[i] = T(__builtin_nan(""));
}

template <class T, class Element>
int read_row(T *bias, const char *row, ptrdiff_t key_stride, ptrdiff_t n_key) {
    mask_census<T> census;
    for (ptrdiff_t j = 0; j < n_key; j += lanes<T>) {
        const vec<T> v = mask_numbers<T, Element>(row + j * key_stride, key_stride, n_key - j);
        census.add(v);
        store(bias + j, v);
    }
    if (census.suspects_nan()) simplify_nan(bias, n_key);
    return census.holds();
}

// Rows that share a mask (heads of a group) follow each other; lanes without a row repeat the last one.
template <class T, int ROWS, class Element>
int read_tile(T *bias, const char *const *row, ptrdiff_t n_row, ptrdiff_t key_stride, ptrdiff_t n_key) {
    mask_census<T> census;
    for (ptrdiff_t r = 0; r < n_row; r += lanes<T>) {
        const char *source[lanes<T>];
        for (int i = 0; i < lanes<T>; i++) source[i] = row[r + i < n_row ? r + i : n_row - 1];
        for (ptrdiff_t j = 0; j < n_key; j += lanes<T>) {
            vec<T> square[lanes<T>];
            for (int i = 0; i < lanes<T>; i++) {
                if (i > 0 && source[i] == source[i - 1]) {
                    square[i] = square[i - 1];
                    continue;
                }
                square[i] = mask_numbers<T, Element>(source[i] + j * key_stride, key_stride, n_key - j);
                census.add(square[i]);
            }
            transpose<T>(square);
            for (int i = 0; i < lanes<T> && j + i < n_key; i++) store(bias + (j + i) * ROWS + r, square[i]);
        }
    }
    if (census.suspects_nan())
        for (ptrdiff_t j = 0; j < n_key; j++) simplify_nan(bias + j * ROWS, n_row);
    return census.holds();
}

// Rows of a bool mask as [row][MHA_KEY_BLOCK] bytes, and what they hold; the last key stands in for those past n_key.
inline int gather_bools(char *block, const char *const *row, ptrdiff_t n_row, ptrdiff_t key_stride, ptrdiff_t n_key) {
    typedef uint8_t bytes __attribute__((vector_size(MHA_VECTOR_BYTES)));
    bytes visible = {}, excluded = {};
    for (ptrdiff_t r = 0; r < n_row; r++) {
        char *line = block + r * MHA_KEY_BLOCK;
        const char *source = row[r];
        if (key_stride != 1 || n_key != MHA_KEY_BLOCK) {
            for (ptrdiff_t j = 0; j < MHA_KEY_BLOCK; j++) line[j] = source[(j < n_key ? j : n_key - 1) * key_stride];
            source = line;
        }
        MHA_UNROLL for (int j = 0; j < MHA_KEY_BLOCK; j += MHA_VECTOR_BYTES) {
            const bytes b = load_anywhere<bytes>(source + j);
            visible |= b;
            excluded |= (bytes)(b == 0);
            memcpy(line + j, &b, sizeof b);
        }
    }
    int holds = 0;
    for (int i = 0; i < MHA_VECTOR_BYTES; i++)
        holds |= (visible[i] ? MHA_MASK_VISIBLE : 0) | (excluded[i] ? MHA_MASK_EXCLUDED : 0);
    return holds;
}

// Only a block that holds both is worth the rest of the work.
template <class T, int ROWS>
int read_bool_tile(T *bias, char *block, const char *const *row, ptrdiff_t n_row, ptrdiff_t key_stride,
                   ptrdiff_t n_key) {
    static_assert(ROWS <= MHA_VECTOR_BYTES, "the block fits the working memory of mask_tile");
    const int holds = gather_bools(block, row, n_row, key_stride, n_key);
    if (holds != (MHA_MASK_VISIBLE | MHA_MASK_EXCLUDED)) return holds;
    const char *line[ROWS];
    for (ptrdiff_t r = 0; r < n_row; r++) line[r] = block + r * MHA_KEY_BLOCK;
    read_tile<T, ROWS, bool_element>(bias, line, n_row, 1, n_key);
    return holds;
}

template <class T>
int mask_row(void *bias_, const char *row, ptrdiff_t key_stride, ptrdiff_t n_key, mha_storage storage) {
    T *bias = (T *)bias_;
    switch (storage) {
    case MHA_BOOL: return read_row<T, bool_element>(bias, row, key_stride, n_key);
    case MHA_FLOAT16: return read_row<T, half_element<float16>>(bias, row, key_stride, n_key);
    case MHA_BFLOAT16: return read_row<T, half_element<bfloat16>>(bias, row, key_stride, n_key);
    case MHA_FLOAT32: return read_row<T, float32_element>(bias, row, key_stride, n_key);
    case MHA_FLOAT64: return read_row<T, float64_element>(bias, row, key_stride, n_key);
    case MHA_ABSENT: break;
    }
    return MHA_MASK_VISIBLE;
}

template <class T, int ROWS>
int mask_tile(void *bias_, void *work, const char *const *row, ptrdiff_t n_row, ptrdiff_t key_stride, ptrdiff_t n_key,
              mha_storage storage) {
    T *bias = (T *)bias_;
    switch (storage) {
    case MHA_BOOL: return read_bool_tile<T, ROWS>(bias, (char *)work, row, n_row, key_stride, n_key);
    case MHA_FLOAT16: return read_tile<T, ROWS, half_element<float16>>(bias, row, n_row, key_stride, n_key);
    case MHA_BFLOAT16: return read_tile<T, ROWS, half_element<bfloat16>>(bias, row, n_row, key_stride, n_key);
    case MHA_FLOAT32: return read_tile<T, ROWS, float32_element>(bias, row, n_row, key_stride, n_key);
    case MHA_FLOAT64: return read_tile<T, ROWS, float64_element>(bias, row, n_row, key_stride, n_key);
    case MHA_ABSENT: break;
    }
    return MHA_MASK_VISIBLE;
}

}  // namespace MHA_ISA_NAMESPACE
}  // namespace
