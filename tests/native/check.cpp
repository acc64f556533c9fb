// The machinery of check.h.
#include "check.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

// ---- elements --------------------------------------------------------------------------------------------------------

wide number(float x) { return x; }
wide number(double x) { return x; }
wide number(f16 x) {
    const int exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023;
    const wide size = exponent == 31 ? (mantissa ? wide(NAN) : infinite)
                      : exponent     ? ldexpl(1024 + mantissa, exponent - 25)
                                     : ldexpl(mantissa, -24);
    return x.bits & 0x8000 ? -size : size;
}
wide number(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

void put_number(float &x, wide v) { x = float(v); }
void put_number(double &x, wide v) { x = double(v); }
// Units in the last place, counted from 0: consecutive integers are consecutive numbers.
static uint16_t to_16_bits(wide v, int mantissa, int bias, uint16_t infinity) {
    const uint16_t sign = signbit(v) ? 0x8000 : 0;
    const wide size = fabsl(v);
    if (isnan(v)) return infinity | 1 << (mantissa - 1);
    int exponent = size == 0 || isinf(size) ? -bias : ilogbl(size);
    if (exponent < 1 - bias) exponent = 1 - bias;
    if (isinf(size) || exponent > bias) return sign | infinity;
    const wide unit = rintl(ldexpl(size, mantissa - exponent));  // the default direction is to nearest even
    return sign | uint16_t((wide(exponent + bias - 1) * (1 << mantissa)) + unit);
}
void put_number(f16 &x, wide v) { x.bits = to_16_bits(v, 10, 15, 0x7c00); }
void put_number(bf16 &x, wide v) { x.bits = to_16_bits(v, 7, 127, 0x7f80); }

// ---- a run -----------------------------------------------------------------------------------------------------------

bool run::wants(const char *name) {
    function = name;
    about.clear();
    return only.empty() || function.find(only) != std::string::npos;
}

void run::sized(const char *format, ...) {
    char text[200];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    about = text;
}

static double seconds() {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

void run::call(const std::function<void()> &kernel) {
    n_call++;
    kernel();
    if (!timing || set + element + function + about == timed) return;
    timed = set + element + function + about;
    double best = 1e9;
    for (int round = 0; round < 20; round++) {
        const double start = seconds();
        for (int i = 0; i < 200; i++) kernel();
        const double took = (seconds() - start) / 200;
        best = took < best ? took : best;
    }
    printf("%-9s %-9s %-26s %-34s %10.0f ns\n", set.c_str(), element.c_str(), function.c_str(), about.c_str(),
           best * 1e9);
}

void run::fail(const char *format, ...) {
    n_failed++;
    if (searching) throw found();
    if (timing || n_failed > 20) return;
    va_list arguments;
    va_start(arguments, format);
    printf("%s, %s, %s, %s: ", set.c_str(), element.c_str(), function.c_str(), about.c_str());
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
}

void run::overrun(size_t n) {
    n_failed++;
    if (!searching)
        printf("%s, %s, %s, %s: memory beside an array of %zu elements was written\n", set.c_str(), element.c_str(),
               function.c_str(), about.c_str(), n);
}

void run::near(wide got, wide right, wide limit, const char *what, ptrdiff_t i, ptrdiff_t j) {
    if (isnan(right) ? isnan(got) : got == right || fabsl(got - right) <= limit) return;
    fail("%s[%td][%td] is %.9Lg, right %.9Lg, limit %.3Lg", what, i, j, got, right, limit);
}

// ---- numbers and memory ----------------------------------------------------------------------------------------------

uint64_t noise::bits() {  // xorshift64*, Vigna 2016
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return state * 0x2545f4914f6cdd1d;
}
wide noise::normal() {
    wide sum = 0;
    for (int i = 0; i < 6; i++) sum += uniform() - 0.5L;
    return sum * sqrtl(2);
}

void *aligned_memory(size_t size) { return aligned_alloc(64, (size + 63) / 64 * 64); }
void free_memory(void *p) { free(p); }

ending_page::ending_page(size_t n_byte) {
    const size_t page = sysconf(_SC_PAGESIZE), used = (n_byte + page - 1) / page * page;
    size = used + page;
    memory = (char *)mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory + used, page, PROT_NONE) != 0) abort();
    end = memory + used;
}
ending_page::~ending_page() { munmap(memory, size); }

wide right_weight(wide score, wide maximum, wide exp_scale) {
    if (score == -infinite) return 0;
    return exp2l((score - (maximum == -infinite ? 0 : maximum)) * exp_scale);
}
