/* For tests: what calls share, used by many threads at once, under ThreadSanitizer. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "memory.h"
#include "threads.h"

enum { N_THREAD = 8, N_ROUND = 20000 };
static const char tables[2] = {0, 1};
static const void *chosen = &tables[0];
static int stopped;

static void *work(void *number) {
    const int me = *(const int *)number;
    long wrong = 0;

    for (int i = 0; i < N_ROUND; i++) {
        size_t size = (size_t)1 << (6 + (i + me) % 8), least = size;
        char *memory = mha_take_memory(&size);

        if (memory == NULL || size < least) return "no memory, or too little";
        memset(memory, me, least);
        for (size_t k = 0; k < least; k += 61) wrong += memory[k] != me; /* it is nobody else's */
        mha_give_back_memory(memory, size);

        if (i % 1000 == me) mha_store_pointer(&chosen, &tables[i / 1000 % 2]);
        wrong += *(const char *)mha_load_pointer(&chosen) > 1;

        mha_team_met(2, i % 3 ? 0 : 1000000);
        wrong += mha_threads_for(2, 1e-3) > 2;
        if (i % 5000 == 0) wrong += mha_threads_startable(3) < 1;
        if (me == 0 && i == N_ROUND / 2) mha_raise_flag(&stopped);
        wrong += mha_is_raised(&stopped) > 1;
    }
    return wrong ? "another thread's bytes" : NULL;
}

int main(void) {
    pthread_t thread[N_THREAD];
    int number[N_THREAD];
    void *fault, *first = NULL;

    mha_threads_begin();
    for (int i = 0; i < N_THREAD; i++) {
        number[i] = i;
        if (pthread_create(&thread[i], NULL, work, &number[i])) return 2;
    }
    for (int i = 0; i < N_THREAD; i++) {
        pthread_join(thread[i], &fault);
        if (fault != NULL) first = fault;
    }
    puts(first ? (const char *)first : "ok");
    return first != NULL;
}
