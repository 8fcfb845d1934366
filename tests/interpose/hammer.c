/* Calls a function from many threads at once. */
#include <pthread.h>
#include <stdint.h>

typedef int (*function)(unsigned);
struct work {
    function call;
    long calls, failures;
};

static void *strike(void *argument) {
    struct work *work = argument;
    for (long i = 0; i < work->calls; ++i) work->failures += work->call(0) != 0;
    return 0;
}

/* Returns how many of threads * calls calls returned something else than 0; -1 if a thread did not start. */
long hammer(function call, int threads, long calls) {
    pthread_t ids[64];
    struct work work[64];
    long failures = 0;
    for (int i = 0; i < threads; ++i) {
        work[i] = (struct work){call, calls, 0};
        if (pthread_create(&ids[i], 0, strike, &work[i])) return -1;
    }
    for (int i = 0; i < threads; ++i) {
        pthread_join(ids[i], 0);
        failures += work[i].failures;
    }
    return failures;
}
