/* Loops over a memory resource of kina, without Python, and the driver's own calls beside them. Times are in
 * nanoseconds. Every function returns the first status that is not 0. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include "kina_tensor.h"

static double now(void) {
    struct timespec read;
    clock_gettime(CLOCK_MONOTONIC, &read);
    return (double)read.tv_sec * 1e9 + (double)read.tv_nsec;
}

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

/* Where the memory of a tensor came from, out of the capsule that exports it. */
void memory_home(void *managed, void **resource, void **stream) {
    kina_storage *storage = ((kina_dl_managed_tensor *)managed)->manager_ctx;
    *resource = storage->resource;
    *stream = storage->stream;
}

/* ---------------------------------------------------------------------------- the driver, as if it were a resource */

static int (*plain_allocate)(unsigned long long *, size_t);
static int (*plain_free)(unsigned long long);
static int (*async_allocate)(unsigned long long *, size_t, void *);
static int (*async_free)(unsigned long long, void *);

static int allocate_plain(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) {
    (void)self, (void)stream;
    return plain_allocate((unsigned long long *)out, nbytes);
}

static void free_plain(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) {
    (void)self, (void)nbytes, (void)stream;
    plain_free((uintptr_t)data);
}

static int allocate_async(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) {
    (void)self;
    return async_allocate((unsigned long long *)out, nbytes, stream->native);
}

static void free_async(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) {
    (void)self, (void)nbytes;
    async_free((uintptr_t)data, stream->native);
}

static const kina_resource_vtable plain_functions = {KINA_RESOURCE_VERSION, 0, "cuMemAlloc", allocate_plain,
                                                     free_plain};
static const kina_resource_vtable async_functions = {KINA_RESOURCE_VERSION, 1, "cuMemAllocAsync", allocate_async,
                                                     free_async};
static kina_resource plain = {.vtable = &plain_functions}, async = {.vtable = &async_functions};

/* A resource that does nothing: what the loops, and the machine under them, cost. */
static int allocate_nothing(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) {
    (void)nbytes, (void)stream;
    *out = self;
    return 0;
}

static void free_nothing(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) {
    (void)self, (void)data, (void)nbytes, (void)stream;
}

static const kina_resource_vtable nothing_functions = {KINA_RESOURCE_VERSION, 1, "nothing", allocate_nothing,
                                                       free_nothing};
static kina_resource nothing = {.vtable = &nothing_functions};

int memory_nothing(void **of_nothing) {
    *of_nothing = &nothing;
    return 0;
}

/* The least that a record with a time and a place in an order costs: the processor's counter is read, one number drawn
 * for all threads, and a line of a ring written. ns a record. */
int memory_record_floor(int count, double *ns_per_record) {
    enum { PLACES = 1 << 14 };
    typedef struct {
        uint64_t words[8];
    } line;
    static line ring[PLACES] __attribute__((aligned(64)));
    static uint64_t head;
    double begin = now();
    for (int i = 0; i < count; i++) {
#if defined(__x86_64__)
        uint64_t ticks = __builtin_ia32_rdtsc();
#else
        uint64_t ticks = 0;
#endif
        line *place = &ring[__atomic_fetch_add(&head, 1, __ATOMIC_ACQ_REL) % PLACES];
        for (int word = 0; word < 7; word++) place->words[word] = ticks + (uint64_t)word;
        __atomic_store_n(&place->words[7], ticks, __ATOMIC_RELEASE);
    }
    *ns_per_record = (now() - begin) / count;
    return 0;
}

int memory_driver(void **of_plain, void **of_async) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return 303;
    *(void **)&plain_allocate = dlsym(library, "cuMemAlloc_v2");
    *(void **)&plain_free = dlsym(library, "cuMemFree_v2");
    *(void **)&async_allocate = dlsym(library, "cuMemAllocAsync");
    *(void **)&async_free = dlsym(library, "cuMemFreeAsync");
    if (!plain_allocate || !plain_free || !async_allocate || !async_free) return 500;
    *of_plain = &plain;
    *of_async = &async;
    return 0;
}

/* ----------------------------------------------------------------------------------------------------------- loops */

int memory_pairs(kina_resource *from, kina_stream *stream, size_t nbytes, int count) {
    for (int i = 0; i < count; i++) {
        void *data;
        int status = from->vtable->allocate(from, &data, nbytes, stream);
        if (status) return status;
        from->vtable->deallocate(from, data, nbytes, stream);
    }
    return 0;
}

/* `count` times: `width` allocations, then their releases. */
int memory_batches(kina_resource *from, kina_stream *stream, size_t nbytes, int width, int count) {
    void *data[1024];
    for (int i = 0; i < count; i++) {
        for (int k = 0; k < width; k++) {
            int status = from->vtable->allocate(from, &data[k], nbytes, stream);
            if (status) return status;
        }
        for (int k = 0; k < width; k++) from->vtable->deallocate(from, data[k], nbytes, stream);
    }
    return 0;
}

/* ns a pair, for each of `count` batches of 64 pairs. */
int memory_tail(kina_resource *from, kina_stream *stream, size_t nbytes, int count, double *out) {
    for (int i = 0; i < count; i++) {
        double begin = now();
        int status = memory_pairs(from, stream, nbytes, 64);
        if (status) return status;
        out[i] = (now() - begin) / 64;
    }
    return 0;
}

/* RMM's random mix: allocate or free with the same chance, sizes up to `largest`, never more than `limit` live. The
 * streams take turns to allocate; a block is freed in the order of the stream that it came from. */
int memory_mix(kina_resource *from, kina_stream **streams, int stream_count, int allocations, size_t largest,
               size_t limit, uint64_t seed, double *ns_per_operation) {
    typedef struct {
        void *data;
        size_t nbytes;
        kina_stream *stream;
    } block;
    block *blocks = malloc((size_t)allocations * sizeof(*blocks));
    uint64_t state = seed * 2654435769u + 88172645463325252u;
    size_t live = 0, held = 0, operations = 0;
    int status = blocks ? 0 : 1;
    double begin = now();
    for (int made = 0; status == 0 && made < allocations;) {
        size_t nbytes = 1 + next_random(&state) % largest;
        if (held == 0 || ((state >> 40 & 1) && live + nbytes <= limit)) {
            block *next = &blocks[held];
            next->nbytes = nbytes;
            next->stream = streams[made % stream_count];
            status = from->vtable->allocate(from, &next->data, nbytes, next->stream);
            if (status) break;
            held += 1;
            live += nbytes;
            made += 1;
        } else {
            block *chosen = &blocks[(state >> 20) % held];
            from->vtable->deallocate(from, chosen->data, chosen->nbytes, chosen->stream);
            live -= chosen->nbytes;
            *chosen = blocks[--held];
        }
        operations += 1;
    }
    *ns_per_operation = (now() - begin) / (double)(operations ? operations : 1);
    while (held > 0) {
        held -= 1;
        from->vtable->deallocate(from, blocks[held].data, blocks[held].nbytes, blocks[held].stream);
    }
    free(blocks);
    return status;
}

/* A warm pair while `blocks` free blocks lie between as many live ones: ns a pair. */
int memory_among_free_blocks(kina_resource *from, kina_stream *stream, int blocks, size_t nbytes, int count,
                             double *ns_per_pair) {
    void **data = malloc((size_t)blocks * 2 * sizeof(*data));
    int status = data ? 0 : 1, made = 0;
    for (; status == 0 && made < 2 * blocks; made++)
        status = from->vtable->allocate(from, &data[made], 2048 + (size_t)made % 97 * 256, stream);
    if (status) made -= 1;
    for (int i = 0; i < made; i += 2) from->vtable->deallocate(from, data[i], 2048 + (size_t)i % 97 * 256, stream);
    double begin = now();
    if (status == 0) status = memory_pairs(from, stream, nbytes, count);
    *ns_per_pair = (now() - begin) / count;
    for (int i = 1; i < made; i += 2) from->vtable->deallocate(from, data[i], 2048 + (size_t)i % 97 * 256, stream);
    free(data);
    return status;
}

/* --------------------------------------------------------------------------------------------------------- threads */

typedef struct {
    kina_resource *from;
    kina_stream *stream;
    size_t nbytes;
    int count, status;
    pthread_barrier_t *start;
    double begin, end;
} share;

static void *work(void *argument) {
    share *mine = argument;
    pthread_barrier_wait(mine->start);
    mine->begin = now();
    mine->status = memory_pairs(mine->from, mine->stream, mine->nbytes, mine->count);
    mine->end = now();
    return NULL;
}

/* `threads` at once, each with `count` pairs on its stream of `streams`: pairs a second, of all together. */
int memory_threads(kina_resource *from, kina_stream **streams, int threads, size_t nbytes, int count,
                   double *pairs_per_second) {
    pthread_t running[64];
    share shares[64];
    pthread_barrier_t start;
    int status = 0;
    double begin = 0, end = 0;
    pthread_barrier_init(&start, NULL, (unsigned)threads);
    for (int i = 0; i < threads; i++) {
        shares[i] = (share){from, streams[i], nbytes, count, 0, &start, 0, 0};
        if (pthread_create(&running[i], NULL, work, &shares[i])) abort();
    }
    for (int i = 0; i < threads; i++) {
        pthread_join(running[i], NULL);
        if (shares[i].status) status = shares[i].status;
        if (i == 0 || shares[i].begin < begin) begin = shares[i].begin;
        if (shares[i].end > end) end = shares[i].end;
    }
    *pairs_per_second = (double)threads * count / (end - begin) * 1e9;
    pthread_barrier_destroy(&start);
    return status;
}

/* ---------------------------------------------------------------------------------------------------- handing over */

enum { PLACES = 256 };

typedef struct {
    kina_resource *from;
    kina_stream *stream;
    struct {
        void *data; /* NULL: the end */
        size_t nbytes;
    } places[PLACES];
    _Alignas(128) size_t pushed;
    _Alignas(128) size_t popped;
} belt;

static void push(belt *belt, void *data, size_t nbytes) {
    size_t pushed = belt->pushed;
    while (pushed - __atomic_load_n(&belt->popped, __ATOMIC_ACQUIRE) == PLACES) sched_yield();
    belt->places[pushed % PLACES].data = data;
    belt->places[pushed % PLACES].nbytes = nbytes;
    __atomic_store_n(&belt->pushed, pushed + 1, __ATOMIC_RELEASE);
}

static void *consume(void *argument) {
    belt *belt = argument;
    for (size_t popped = 0;; popped++) {
        while (__atomic_load_n(&belt->pushed, __ATOMIC_ACQUIRE) == popped) sched_yield();
        void *data = belt->places[popped % PLACES].data;
        size_t nbytes = belt->places[popped % PLACES].nbytes;
        __atomic_store_n(&belt->popped, popped + 1, __ATOMIC_RELEASE);
        if (!data) return NULL;
        belt->from->vtable->deallocate(belt->from, data, nbytes, belt->stream);
    }
}

/* This thread allocates ten times `count` blocks of up to `largest` bytes, another frees them in the order of the same
 * stream. At most PLACES are between the two, and so many are before the other begins, so that the most that is live is
 * reached at once. `look` is called after each tenth, outside the clock. */
int memory_handover(kina_resource *from, kina_stream *stream, size_t largest, int count, void (*look)(void),
                    double *ns_per_block) {
    static belt shared;
    pthread_t consumer;
    uint64_t state = 88172645463325252u;
    int status = 0, started = 0;
    double spent = 0;
    shared = (belt){.from = from, .stream = stream};
    for (int tenth = 0; tenth < 10 && status == 0; tenth++) {
        double begin = now();
        for (int i = 0; i < count; i++) {
            void *data;
            size_t nbytes = 1 + next_random(&state) % largest;
            status = from->vtable->allocate(from, &data, nbytes, stream);
            if (status) break;
            push(&shared, data, nbytes);
            if (!started && shared.pushed == PLACES) started = !pthread_create(&consumer, NULL, consume, &shared);
        }
        spent += now() - begin;
        look();
    }
    if (!started) return status ? status : 1;
    push(&shared, NULL, 0);
    pthread_join(consumer, NULL);
    *ns_per_block = spent / (10.0 * count);
    return status;
}
