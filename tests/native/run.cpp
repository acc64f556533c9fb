// Runs the checks over every table; plants faults to see that they are found; tells the times.
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

namespace {

// ---- planted faults --------------------------------------------------------------------------------------------------

// A function that does its work and then spoils the first thing it wrote.
void spoil(void *result) { ((uint8_t *)result)[3] ^= 0x11; }
void spoil(float *result) { spoil((void *)result); }
void spoil(double *result) { ((uint8_t *)result)[7] ^= 0x11; }
void spoil(char *result) {
    for (int i = 0; i < 8; i++) result[i] ^= 0x11;
}
void spoil(char *const *rows) { spoil(rows[0]); }
void spoil(mha_moments *sums) { spoil(sums->total); }
void spoil(mha_pipeline *pipe) {
    if (pipe->in_sum) spoil(pipe->in_sum->sum);
}

template <class F> struct spoiled;
template <class Result, class First, class... Rest> struct spoiled<Result (*)(First, Rest...)> {
    static inline Result (*original)(First, Rest...);
    static Result call(First first, Rest... rest) {
        if constexpr (std::is_same<Result, int>::value) {
            return !original(first, rest...);
        } else if constexpr (std::is_void<Result>::value) {
            original(first, rest...);
            spoil(first);
        } else {
            const Result result = original(first, rest...);
            spoil(first);
            return result;
        }
    }
};
template <class F> F plant(F function) {
    spoiled<F>::original = function;
    return spoiled<F>::call;
}

#define FUNCTIONS(X)                                                                                                 \
    X(widen)                                                                                                         \
    X(mask.row)                                                                                                      \
    X(mask.tile)                                                                                                     \
    X(tile.pack_query) X(tile.begin) X(tile.scores) X(tile.adjust) X(tile.softmax) X(tile.values)                    \
        X(tile.values_guarded) X(tile.finish) X(tile.store_weights) X(tile.finish_factors) X(tile.replace_not_finite) X(tile.all_finite)        \
            X(decode.pack_query) X(decode.scores) X(decode.adjust) X(decode.softmax) X(decode.values)                \
                X(decode.values_guarded) X(decode.combine) X(decode.all_finite) X(statistics.measure)                \
                    X(statistics.finish) X(statistics.add_received) X(dropout.keep_tile) X(dropout.drop_tile)        \
                        X(dropout.drop_row) X(backward.row_products) X(backward.copy_rows) X(backward.differentiate) \
                            X(backward.add_to_keys) X(backward.add_to_rows) X(backward.add_rows)                     \
                                X(backward.store_numbers) X(backward.add_over_keys) X(backward.sum_over_rows)        \
                                    X(backward.add_tile) X(backward.store_tile)

// With the check that finds it.
#define MATRIX_FUNCTIONS(X)                                                                                         \
    X(begin, "matrix.begin")                                                                                        \
    X(adjust, "matrix.adjust")                                                                                      \
    X(mask_tile, "matrix.mask_tile")                                                                                \
    X(finish, "matrix.finish")                                                                                      \
    X(pack_queries, "matrix.step") X(pack_keys, "matrix.step") X(pack_values, "matrix.step") X(step, "matrix.step") \
        X(repair_scores, "matrix.repair_scores") X(add_outliers, "matrix.step")

const char *const element_names[] = {"", "bool", "float16", "bfloat16", "float32", "float64"};
const mha_storage elements[] = {MHA_FLOAT32, MHA_FLOAT64, MHA_FLOAT16, MHA_BFLOAT16};

// Whether a check finds a fault.
template <class Check> bool finds(run r, const std::string &only, Check check) {
    r.only = only, r.searching = true, r.n_failed = 0;
    try {
        check(r);
    } catch (found) {}
    return r.n_failed > 0;
}

int plant_faults(run r, const mha_kernels &table, mha_storage storage) {
    int n_missed = 0;
#define X(f)                                                                                                  \
    if (table.f) {                                                                                            \
        mha_kernels faulty = table;                                                                           \
        faulty.f = plant(table.f);                                                                            \
        if (!finds(r, #f, [&](run &each) { check_kernels(each, faulty, storage); }))                          \
            printf("%s, %s: a fault in %s is not found\n", r.set.c_str(), r.element.c_str(), #f), n_missed++; \
    }
    FUNCTIONS(X)
#undef X
    return n_missed;
}

int plant_matrix_faults(run r, const mha_kernels &k, const mha_matrix_kernels &table, mha_storage storage) {
    int n_missed = 0;
#define X(f, check)                                                                                                  \
    {                                                                                                                \
        mha_matrix_kernels faulty = table;                                                                           \
        faulty.f = plant(table.f);                                                                                   \
        if (!finds(r, check, [&](run &each) { check_matrix(each, k, faulty, storage); }))                            \
            printf("%s, %s: a fault in matrix." #f " is not found\n", r.set.c_str(), r.element.c_str()), n_missed++; \
    }
    MATRIX_FUNCTIONS(X)
#undef X
    return n_missed;
}

// Memory that a check must not touch: one array, spoiled on purpose on either side.
int plant_overruns() {
    int n_missed = 0;
    for (int where : {-1, 8}) {
        run r;
        r.searching = true;
        {
            array<float> a(r, 8);
            a.data[where] = 1;
        }
        if (!r.n_failed) printf("a write at %d of 8 elements is not found\n", where), n_missed++;
    }
    noise random;
    rows<float> input(2, 3, TIGHT, random);
    const pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        _exit(((volatile float *)input.page.end)[0] == 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (!WIFSIGNALED(status)) printf("a read behind the last row is not found\n"), n_missed++;
    return n_missed;
}

// ---- the tables ------------------------------------------------------------------------------------------------------

run *current;
void report_signal(int number) {
    printf("%s, %s, %s, %s: signal %d, an access to memory that is not there\n", current->set.c_str(),
           current->element.c_str(), current->function.c_str(), current->about.c_str(), number);
    fflush(stdout);
    _exit(2);
}

void check_rounds(run &r, const mha_isa &set) {
    r.element = "float32";
    if (r.wants("multiply_add_rounds") && !(set.multiply_add_rounds(1000) > 0)) r.fail("no operations are counted");
    if (set.matrix_rounds && mha_tiles_granted() && r.wants("matrix_rounds") && !(set.matrix_rounds(100) > 0))
        r.fail("no operations are counted");
}

int check_set(run r, const mha_isa &set, bool planting) {
    int n_missed = 0;
    const long failed_before = r.n_failed;
    current = &r;
    r.set = set.name;
    for (mha_storage storage : elements) {
        const mha_kernels *k = mha_kernels_for(&set, storage);
        r.element = element_names[storage];
        if (planting) n_missed += plant_faults(r, *k, storage);
        else check_kernels(r, *k, storage);
        for (int high = 0; high < 2; high++) {
            const mha_matrix_kernels *m = mha_matrix_for(&set, storage, high);
            if (!m || (high && m == mha_matrix_for(&set, storage, 0)) || !mha_tiles_granted()) continue;
            r.element = std::string(element_names[storage]) + (high ? ", high" : "");
            if (planting) n_missed += plant_matrix_faults(r, *k, *m, storage);
            else check_matrix(r, *k, *m, storage);
        }
    }
    if (!planting) check_rounds(r, set);
    if (!r.timing && !planting) printf("%s: %ld calls, %ld faults\n", set.name, r.n_call, r.n_failed - failed_before);
    return planting ? n_missed : r.n_failed > 0;
}

}  // namespace

void check_kernels(run &r, const mha_kernels &k, mha_storage storage) {
    static_assert(sizeof(mha_kernels) == 5 * sizeof(void *) + sizeof(mha_mask_kernels) + sizeof(mha_tile_kernels) +
                                             sizeof(mha_decode_kernels) + sizeof(mha_statistics_kernels) +
                                             sizeof(mha_dropout_kernels) + sizeof(mha_backward_kernels),
                  "a new part of mha_kernels wants its checks");
    auto check = [&](auto element) {
        typedef decltype(element) S;
        check_masks<S>(r, k);
        check_tiles<S>(r, k);
        check_decode<S>(r, k);
        check_statistics<S>(r, k);
        check_backward<S>(r, k);
    };
    if (storage == MHA_FLOAT32) check(float());
    if (storage == MHA_FLOAT64) check(double());
    if (storage == MHA_FLOAT16) check(f16());
    if (storage == MHA_BFLOAT16) check(bf16());
}

extern "C" __attribute__((visibility("default"))) int run_checks(int argc, char **argv) {
    const std::string usage = "usage: check_kernels [--isa NAME] [--only PART_OF_A_NAME] [--bench] [--plant]\n";
    run r;
    std::string wanted;
    bool planting = false;
    int status = 0, n_run = 0;
    for (int i = 1; i < argc; i++) {
        const std::string option = argv[i];
        if (option == "--bench") r.timing = true;
        else if (option == "--plant") planting = true;
        else if (option == "--isa" && i + 1 < argc) wanted = argv[++i];
        else if (option == "--only" && i + 1 < argc) r.only = argv[++i];
        else return fputs(usage.c_str(), stderr), 2;
    }
    for (int number : {SIGSEGV, SIGBUS, SIGILL}) signal(number, report_signal);
    if (planting) status |= plant_overruns();
    for (int i = 0; i < mha_n_built; i++) {
        const mha_isa &set = *mha_built[i];
        if (!wanted.empty() && wanted != set.name) continue;
        if (!mha_runnable(&set)) {
            printf("%s: cannot run here\n", set.name);
            continue;
        }
        n_run++;
        if (set.matrix && !mha_tiles_granted()) printf("%s: the operating system refuses the matrix unit\n", set.name);
        status |= check_set(r, set, planting) != 0;
    }
    if (!n_run) printf("no such instruction set\n");
    else if (planting && !status) printf("every planted fault was found\n");
    fflush(stdout);
    return status || !n_run;
}
