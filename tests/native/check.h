// What the checks of the kernels share: memory that notices stray accesses, numbers of every storage, comparison.
//
// A check calls one function of a table on sizes around its tiles and compares with the plain formula in long double.
// Outputs lie between canaries and begin as NaN, so that what is not written shows. Inputs end where a page ends that
// nobody may read, and the gaps between their rows are NaN.
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../src/contract/instruction_set.h"

typedef long double wide;
typedef std::vector<ptrdiff_t> sizes;

// ---- elements --------------------------------------------------------------------------------------------------------

struct f16 {
    uint16_t bits;
};
struct bf16 {
    uint16_t bits;
};

wide number(float x);
wide number(double x);
wide number(f16 x);
wide number(bf16 x);
void put_number(float &x, wide v);
void put_number(double &x, wide v);
void put_number(f16 &x, wide v);  // to nearest even
void put_number(bf16 &x, wide v);

template <class S> struct arithmetic {
    typedef float type;
};
template <> struct arithmetic<double> {
    typedef double type;
};
// Distance from 1 to the next number, and the smallest that is not subnormal.
template <class T> constexpr wide epsilon = sizeof(T) == 4 ? 0x1p-23L : 0x1p-52L;
template <class T> constexpr wide smallest = sizeof(T) == 4 ? 0x1p-126L : 0x1p-1022L;
// Error of rounding v to S, when it is not what is computed with.
template <class S> wide rounding(wide v) {
    const wide size = v < 0 ? -v : v;
    if (std::is_same<S, f16>::value) return size * 0x1.1p-11L + 0x1p-25L;
    if (std::is_same<S, bf16>::value) return size * 0x1.1p-8L + 0x1p-133L;
    return 0;
}

constexpr wide infinite = __builtin_infl();

// What ends a check that searches for a fault.
struct found {};

// ---- a run of checks -------------------------------------------------------------------------------------------------

struct run {
    std::string set, element, only;  // only: part of the name of the functions that are wanted
    bool timing = false;
    bool searching = false;  // the first fault is enough: thrown, nothing is printed
    long n_call = 0, n_failed = 0;
    std::string function, about;  // being checked, and its sizes
    std::string timed;            // what was timed last

    // Whether this function is wanted; what follows is about it.
    bool wants(const char *name);
    void sized(const char *format, ...) __attribute__((format(printf, 2, 3)));
    // Calls a kernel; with `timing`, often, and prints how long it took.
    void call(const std::function<void()> &kernel);
    void fail(const char *format, ...) __attribute__((format(printf, 2, 3)));
    void overrun(size_t n);  // memory beside an array of n elements was written; never thrown
    // NaN where NaN is right, the same infinity, otherwise at most `limit` away.
    void near(wide got, wide right, wide limit, const char *what, ptrdiff_t i, ptrdiff_t j);
    void equal(wide got, wide right, const char *what, ptrdiff_t i, ptrdiff_t j) { near(got, right, 0, what, i, j); }
    // All of these when checking; the last when timing.
    sizes of(sizes all) const { return timing ? sizes{all.back()} : all; }
};

// ---- numbers ---------------------------------------------------------------------------------------------------------

// Repeatable noise, about standard normal.
struct noise {
    uint64_t state = 0x9e3779b97f4a7c15;
    uint64_t bits();
    wide uniform() { return wide(bits() >> 11) * 0x1p-53L; }
    wide normal();
    ptrdiff_t below(ptrdiff_t n) { return ptrdiff_t(bits() % uint64_t(n)); }
};

// ---- memory ----------------------------------------------------------------------------------------------------------

// An aligned array between canaries, NaN to begin with.
template <class T> struct array {
    static constexpr size_t canary = 64;
    run &to;
    size_t n;
    char *memory;
    T *data;

    array(run &r, ptrdiff_t count) : to(r), n(count) {
        memory = (char *)__builtin_assume_aligned(aligned_alloc_(n * sizeof(T) + 3 * canary), canary);
        memset(memory, 0xa5, n * sizeof(T) + 2 * canary);
        data = (T *)(memory + canary);
        memset((void *)data, 0xff, n * sizeof(T));
    }
    array(const array &) = delete;
    ~array() {
        bool intact = true;
        for (size_t i = 0; i < canary; i++)
            intact &= (uint8_t)memory[i] == 0xa5 && (uint8_t)memory[canary + n * sizeof(T) + i] == 0xa5;
        if (!intact) to.overrun(n);
        free_(memory);
    }
    T &operator[](ptrdiff_t i) { return data[i]; }
    void fill(wide v) {
        for (size_t i = 0; i < n; i++) put_number(data[i], v);
    }
    void copy(const array &other) { memcpy((void *)data, other.data, n * sizeof(T)); }

private:
    static void *aligned_alloc_(size_t size);
    static void free_(void *);
};
void *aligned_memory(size_t size);
void free_memory(void *);
template <class T> void *array<T>::aligned_alloc_(size_t size) { return aligned_memory(size); }
template <class T> void array<T>::free_(void *p) { free_memory(p); }

// Memory whose last byte is followed by a page that nobody may read.
struct ending_page {
    char *memory, *end;
    size_t size;
    explicit ending_page(size_t n_byte);
    ending_page(const ending_page &) = delete;
    ~ending_page();
};

// Rows of S as operands have them.
enum stride_kind { TIGHT, GAPS, BACKWARD, REPEATED, N_STRIDE };
template <class S> struct rows {
    ptrdiff_t n_row, width, stride;
    ending_page page;
    char *first;

    rows(ptrdiff_t n, ptrdiff_t w, int kind, noise &random, wide size = 1)
        : n_row(n),
          width(w),
          stride(kind == REPEATED   ? 0
                 : kind == GAPS     ? (w + 3) * ptrdiff_t(sizeof(S))
                 : kind == BACKWARD ? -w * ptrdiff_t(sizeof(S))
                                    : w * ptrdiff_t(sizeof(S))),
          page(w * sizeof(S) + (n - 1) * (stride < 0 ? -stride : stride)) {
        memset(page.memory, 0xff, page.end - page.memory);
        first = page.end - w * sizeof(S) - (stride > 0 ? (n - 1) * stride : 0);
        if (stride < 0) first = page.end - w * sizeof(S);
        for (ptrdiff_t i = 0; i < n; i++)
            for (ptrdiff_t d = 0; d < w; d++) put_number(at(i, d), random.normal() * size);
    }
    S &at(ptrdiff_t i, ptrdiff_t d) { return ((S *)(first + i * stride))[d]; }
    wide operator()(ptrdiff_t i, ptrdiff_t d) { return number(at(i, d)); }
    std::vector<const char *> addresses() {
        std::vector<const char *> all;
        for (ptrdiff_t i = 0; i < n_row; i++) all.push_back(first + i * stride);
        return all;
    }
};

// ---- formulas --------------------------------------------------------------------------------------------------------

// Limit for a sum of n products with magnitudes that add up to `size`.
template <class T> wide sum_limit(ptrdiff_t n, wide size) { return epsilon<T> * (2 + n / 8.0L) * size + smallest<T>; }
// Right weight of a score; and how far 2**x may be off, with x rounded.
wide right_weight(wide score, wide maximum, wide exp_scale);
template <class T> wide weight_limit(wide weight, wide exponent) {
    if (!(exponent > -1e6L)) return smallest<T>;
    return weight * epsilon<T> * (4 + 2 * (exponent < 0 ? -exponent : exponent)) + smallest<T>;
}

// ---- the checks ------------------------------------------------------------------------------------------------------

void check_kernels(run &r, const mha_kernels &k, mha_storage storage);
void check_matrix(run &r, const mha_kernels &k, const mha_matrix_kernels &m, mha_storage storage);
template <class S> void check_masks(run &r, const mha_kernels &k);
template <class S> void check_tiles(run &r, const mha_kernels &k);
template <class S> void check_decode(run &r, const mha_kernels &k);
template <class S> void check_statistics(run &r, const mha_kernels &k);
template <class S> void check_backward(run &r, const mha_kernels &k);
