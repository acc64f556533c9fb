/* For tests: memory functions of the C library that fail at the n-th call from now on, once; all calls count, or those
 * from libraries with a given word in their path.  Loaded by LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>

static long countdown; /* 0: never */
static long n_failed;

static const char *word;

void fail_at(long n, const char *from) { countdown = n, n_failed = 0, word = from; }
long failed(void) { return n_failed; }

static int fails_for(const void *caller) {
    Dl_info who;

    if (countdown == 0) return 0;
    if (word != NULL && (!dladdr(caller, &who) || strstr(who.dli_fname, word) == NULL)) return 0;
    if (__atomic_sub_fetch(&countdown, 1, __ATOMIC_RELAXED) != 0) return 0;
    n_failed++;
    errno = ENOMEM;
    return 1;
}
#define fails() fails_for(__builtin_return_address(0))

/* dlsym() itself may ask for memory before the real function is known: a little comes from here. */
static char early[1 << 16];
static size_t early_used;

static void *from_early(size_t size) {
    void *p = early + early_used;

    early_used += (size + 63) / 64 * 64;
    return early_used <= sizeof early ? p : NULL;
}

#define REAL(name) ((__typeof__(&name))(real_##name ? real_##name : (real_##name = dlsym(RTLD_NEXT, #name))))
static void *real_malloc, *real_calloc, *real_realloc, *real_free, *real_aligned_alloc, *real_posix_memalign;
static __thread int finding;

void *malloc(size_t);
void *calloc(size_t, size_t);
void *realloc(void *, size_t);
void free(void *);
void *aligned_alloc(size_t, size_t);
int posix_memalign(void **, size_t, size_t);

void *malloc(size_t size) { return fails() ? NULL : REAL(malloc)(size); }

void *calloc(size_t n, size_t size) {
    void *p;

    if (finding) return from_early(n * size);
    if (fails()) return NULL;
    if (real_calloc == NULL) {
        finding = 1;
        real_calloc = dlsym(RTLD_NEXT, "calloc");
        finding = 0;
    }
    p = ((void *(*)(size_t, size_t))real_calloc)(n, size);
    return p;
}

void *realloc(void *old, size_t size) { return fails() ? NULL : REAL(realloc)(old, size); }

void free(void *p) {
    if ((char *)p < early || (char *)p >= early + sizeof early) REAL(free)(p);
}

void *aligned_alloc(size_t alignment, size_t size) { return fails() ? NULL : REAL(aligned_alloc)(alignment, size); }

int posix_memalign(void **p, size_t alignment, size_t size) {
    return fails() ? ENOMEM : REAL(posix_memalign)(p, alignment, size);
}
