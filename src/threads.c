/* How many threads a call may use. */
#include "kernels.h"

#ifdef _OPENMP
#include <omp.h>
#include <pthread.h>

/* After fork() the child has one thread, but the OpenMP runtime still believes in the parent's team and waits for it
 * for ever (GCC's libgomp).  So a child of a process that has used a team works on one thread; results are the same
 * bits for any number of threads. */
static int team_used, team_lost;

static void in_child(void)
{
    team_lost = team_used;
}

int mha_threads_default(void)
{
    return omp_get_max_threads();
}

int mha_threads_usable(int wanted)
{
    /* The runtime ends the process when the system refuses a thread, so a careless number must not reach it. */
    int most = 4 * omp_get_num_procs() > 64 ? 4 * omp_get_num_procs() : 64;

    return team_lost ? 1 : wanted < most ? wanted : most;
}

void mha_threads_used(int n_thread)
{
    if (n_thread < 2 || team_used)
        return;
    team_used = 1;
    pthread_atfork(NULL, NULL, in_child);
}

int mha_has_openmp(void)
{
    return 1;
}

#else

int mha_threads_default(void)
{
    return 1;
}

int mha_threads_usable(int wanted)
{
    (void)wanted;
    return 1;
}

void mha_threads_used(int n_thread)
{
    (void)n_thread;
}

int mha_has_openmp(void)
{
    return 0;
}

#endif
