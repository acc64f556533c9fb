#include "threads.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <pthread.h>
#endif
#include <time.h>

int64_t mha_clock(void) {
    struct timespec now;

#if defined(_WIN32)
    timespec_get(&now, TIME_UTC);
#else
    clock_gettime(CLOCK_MONOTONIC, &now);
#endif
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int mha_is_main_thread(void) {
#if defined(__linux__)
    return syscall(SYS_gettid) == getpid();
#elif defined(__APPLE__)
    return pthread_main_np();
#else
    return 1;
#endif
}

#ifdef _OPENMP
#include <omp.h>
#include <stdlib.h>
#if !defined(_WIN32)
#include <pthread.h>
#endif

/* ---- fork ----
 * After fork() the child has one thread, but an OpenMP runtime still believes in the parent's team and waits for it for
 * ever (GCC's libgomp).  The team may be that of another library on the same runtime, whom we cannot ask.  So a child
 * works on one thread; results are the same bits for any number of threads. */
static int forked; /* written where there is one thread */

#if !defined(_WIN32)
static void in_child(void) { forked = 1; }
#endif

int mha_is_forked(void) { return forked; }

/* ---- the default ---- */
static int number_given, most_by_default;

void mha_threads_begin(void) {
    const char *given = getenv("OMP_NUM_THREADS");

    number_given = given != NULL && *given != '\0';
#if !defined(_WIN32)
    pthread_atfork(NULL, NULL, in_child);
#endif
}

void mha_limit_default_threads(int most) { most_by_default = most; }

int mha_threads_default(void) {
    int n = omp_get_max_threads();

    if (forked) return 1;
    /* The runtime read the CPUs of this process when it was loaded; it may have been given others since. */
    if (!number_given && omp_get_num_procs() < n) n = omp_get_num_procs();
    if (!number_given && most_by_default > 0 && most_by_default < n) n = most_by_default;
    return n > 1 ? n : 1;
}

/* ---- threads that cannot be made ----
 * The runtime ends the process when the system refuses a thread (RLIMIT_AS, RLIMIT_NPROC, a control group's pids).
 * So before it is asked for more threads than this thread's last team had, as many are made and ended here. */

/* glibc has room for a few such bytes in every thread; otherwise they are allocated at first use, which may fail.  The
 * registers of a unit in software are more than a few. */
#if defined(__GLIBC__) && !defined(MHA_EMULATE_MATRIX_UNIT)
#define TLS_MODEL __attribute__((tls_model("initial-exec")))
#else
#define TLS_MODEL
#endif

/* What the calling thread knows of its team: the runtime keeps one for each. */
static _Thread_local TLS_MODEL struct {
    int size;           /* of the last team; the runtime ends threads that the next one does not need */
    int n_left_untried; /* calls that do not ask again after a refusal */
    int n_alone, pause; /* small calls to go alone, and how many it was last time: see mha_team_met() */
} team;

enum { CALLS_AFTER_REFUSAL = 64, MOST_PROBED = 1024 };

#if !defined(_WIN32)
static void *wait_for_gate(void *gate) {
    pthread_mutex_lock((pthread_mutex_t *)gate);
    pthread_mutex_unlock((pthread_mutex_t *)gate);
    return NULL;
}

/* The stack that the runtime gives its threads; 0: the system's default.  As OpenMP defines OMP_STACKSIZE: kilobytes
 * unless B, K, M or G follows. */
static size_t stack_size(void) {
    const char *text = getenv("OMP_STACKSIZE");
    char *end;
    unsigned long long size;

    if (text == NULL) text = getenv("GOMP_STACKSIZE");
    if (text == NULL) return 0;
    size = strtoull(text, &end, 10);
    while (*end == ' ') end++;
    switch (*end) {
    case 'b':
    case 'B': break;
    case 'm':
    case 'M': size <<= 20; break;
    case 'g':
    case 'G': size <<= 30; break;
    default: size <<= 10;
    }
    return (size_t)size;
}

/* How many of n threads can be made beside those that there are. */
static int startable(int n) {
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_attr_t how;
    pthread_t thread[MOST_PROBED];
    int i, n_made = 0;

    if (n > MOST_PROBED) n = MOST_PROBED;
    pthread_attr_init(&how);
    if (stack_size() > 0)
        pthread_attr_setstacksize(&how,
                                  stack_size()); /* a size that the system refuses leaves its default, there too */
    pthread_mutex_lock(&gate);
    while (n_made < n && pthread_create(&thread[n_made], &how, wait_for_gate, &gate) == 0) n_made++;
    pthread_mutex_unlock(&gate);
    for (i = 0; i < n_made; i++) pthread_join(thread[i], NULL);
    pthread_mutex_destroy(&gate);
    pthread_attr_destroy(&how);
    return n_made;
}
#else
static int startable(int n) { return n < MOST_PROBED ? n : MOST_PROBED; }
#endif

int mha_threads_startable(int wanted) {
    int size = team.size > 1 ? team.size : 1;

    if (forked) return 1;
    if (wanted <= size) return wanted;
    if (team.n_left_untried > 0) {
        team.n_left_untried--;
        return size;
    }
    size += startable(wanted - size);
    if (size < wanted) team.n_left_untried = CALLS_AFTER_REFUSAL;
    return size;
}

/* ---- busy machines ----
 * Where other processes keep the cores busy, a thread of the team comes when the scheduler gives it its turn, and a small
 * call waits longer for it than it takes alone.  So one that had to wait sends the next ones alone, twice as many each
 * time, until a team comes in time again. */
static const double SMALL = 3e-3;       /* seconds on one thread */
static const int64_t LATE = 200 * 1000; /* nanoseconds; a sleeping thread on an idle core comes within 60 */
enum { FIRST_PAUSE = 8, LONGEST_PAUSE = 1024 };

void mha_team_met(int n_thread, int64_t late) {
    team.size = n_thread;
    if (late <= LATE) {
        team.pause = team.n_alone = 0;
        return;
    }
    team.pause = team.pause == 0 ? FIRST_PAUSE : team.pause < LONGEST_PAUSE ? 2 * team.pause : LONGEST_PAUSE;
    team.n_alone = team.pause;
}

int mha_threads_for(int wanted, double seconds) {
    /* More threads than this do nothing but wait for each other. */
    int most = 4 * omp_get_num_procs() > 64 ? 4 * omp_get_num_procs() : 64;

    if (wanted == 0) wanted = mha_threads_default();
    if (forked || wanted < 2) return 1;
    if (team.n_alone > 0 && seconds < SMALL) {
        team.n_alone--;
        return 1;
    }
    return wanted < most ? wanted : most;
}

int mha_has_openmp(void) { return 1; }

#else

void mha_threads_begin(void) {}

int mha_is_forked(void) { return 0; }

void mha_limit_default_threads(int most) { (void)most; }

int mha_threads_default(void) { return 1; }

int mha_threads_for(int wanted, double seconds) {
    (void)wanted, (void)seconds;
    return 1;
}

int mha_threads_startable(int wanted) {
    (void)wanted;
    return 1;
}

void mha_team_met(int n_thread, int64_t late) { (void)n_thread, (void)late; }

int mha_has_openmp(void) { return 0; }

#endif
