/* Threads, streams and pools at once, over memory that knows who may touch it. Needs no Python and no driver.
 *
 *     pool_stress THREADS ROUNDS SEED
 *
 * A stream here is a clock: each use of memory on it is a tick, `done` follows behind as a device would, and a fence is
 * a reading of all clocks that the stream is known to be past. Every 256 bytes that the pool frees carry the stream and the
 * tick of the release; whoever gets them must be past it, by its own order, by a fence, or because the device was seen
 * there. Memory that is live carries its owner's mark, so that an overlap shows. Ends with 0 if nothing was wrong and
 * every byte went back to the upstream.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

enum { STREAMS = 4096, LIVE = 64, EXCHANGED = 256, UNIT = 256 };

#define CHECK(condition, ...)                                               \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                   \
            fputc('\n', stderr);                                            \
            abort();                                                        \
        }                                                                   \
    } while (0)

/* ------------------------------------------------------------------------------------------------ streams and fences */

typedef struct {
    kina_stream stream; /* its number is its index below */
    uint64_t tick;      /* of the last use, under `clocks` */
    uint64_t done;      /* ticks that the device has ended; under `clocks` */
    uint64_t *past;     /* ticks of other streams that this one is ordered behind; under `clocks` */
    int closed;
} clock_stream;

typedef struct {
    kina_handle handle;
    uint64_t number, tick;
    uint64_t past[]; /* STREAMS of them */
} clock_fence;

static pthread_mutex_t clocks = PTHREAD_MUTEX_INITIALIZER;
static clock_stream *streams[STREAMS];
static uint64_t streams_made; /* number 0 is memory without a stream */
static int64_t fences_alive, ordered, recorded;
static _Thread_local int closing; /* a fence that fails then is memory lost: nobody can tell when it is over */

static void free_fence(kina_handle *handle) {
    __atomic_fetch_sub(&fences_alive, 1, __ATOMIC_RELAXED);
    free(handle);
}

static int record(kina_stream *stream, kina_handle **fence) {
    clock_stream *on = (clock_stream *)stream;
    clock_fence *made = malloc(sizeof(*made) + STREAMS * sizeof(uint64_t));
    CHECK(made, "no memory");
    pthread_mutex_lock(&clocks);
    CHECK(!on->closed, "a fence on a closed stream");
    if (!closing && ++recorded % 53 == 0) { /* now and then it fails */
        pthread_mutex_unlock(&clocks);
        free(made);
        return KINA_DRIVER;
    }
    kina_handle_init(&made->handle, free_fence);
    made->number = stream->number;
    made->tick = on->tick;
    memcpy(made->past, on->past, STREAMS * sizeof(uint64_t));
    made->past[stream->number] = on->tick;
    pthread_mutex_unlock(&clocks);
    __atomic_fetch_add(&fences_alive, 1, __ATOMIC_RELAXED);
    *fence = &made->handle;
    return 0;
}

/* The device has come so far on the stream, and so on all that it is ordered behind. Under `clocks`. */
static void come_to(clock_stream *on, uint64_t tick) {
    if (on->done < tick) on->done = tick;
    for (int i = 0; i < STREAMS; i++)
        if (streams[i] && streams[i]->done < on->past[i]) streams[i]->done = on->past[i];
}

static int query(kina_handle *handle) {
    clock_fence *fence = (clock_fence *)handle;
    pthread_mutex_lock(&clocks);
    clock_stream *on = streams[fence->number];
    /* The device goes on, by its own pace. */
    if (rand() % 3 == 0 && on->done < on->tick) come_to(on, on->done + 1 + (uint64_t)rand() % (on->tick - on->done));
    int passed = on->done >= fence->tick;
    pthread_mutex_unlock(&clocks);
    return passed;
}

static int order(kina_stream *stream, kina_handle *handle) {
    clock_fence *fence = (clock_fence *)handle;
    clock_stream *on = (clock_stream *)stream;
    pthread_mutex_lock(&clocks);
    CHECK(!on->closed, "a wait on a closed stream");
    if (++ordered % 41 == 0) {
        pthread_mutex_unlock(&clocks);
        return KINA_DRIVER;
    }
    for (int i = 0; i < STREAMS; i++)
        if (fence->past[i] > on->past[i]) on->past[i] = fence->past[i];
    pthread_mutex_unlock(&clocks);
    return 0;
}

static int wait_for(kina_handle *handle, kina_stream *waiter) {
    (void)waiter;
    clock_fence *fence = (clock_fence *)handle;
    pthread_mutex_lock(&clocks);
    clock_stream *on = streams[fence->number];
    come_to(on, fence->tick);
    pthread_mutex_unlock(&clocks);
    return 0;
}

static const kina_stream_order ordering = {record, query, order, wait_for};

static clock_stream *open_stream(void) {
    clock_stream *made = calloc(1, sizeof(*made));
    CHECK(made, "no memory");
    made->past = calloc(STREAMS, sizeof(uint64_t));
    made->stream.ordering = &ordering;
    pthread_mutex_lock(&clocks);
    made->stream.number = ++streams_made;
    CHECK(streams_made < STREAMS, "too many streams");
    streams[made->stream.number] = made;
    pthread_mutex_unlock(&clocks);
    return made;
}

static void close_stream(clock_stream *closed) {
    closing = 1;
    kina_stream_closing(&closed->stream);
    closing = 0;
    CHECK(closed->stream.watches == NULL, "a pool still watches a closed stream");
    pthread_mutex_lock(&clocks);
    closed->closed = 1; /* its clock is still read by fences */
    pthread_mutex_unlock(&clocks);
}

/* -------------------------------------------------------------------------------------------------------- the memory */

typedef struct {
    uint64_t owner; /* of live memory; 0 once it is free */
    uint64_t stream, tick;
} mark;

typedef struct {
    void *data;
    size_t nbytes;
    uint64_t owner;
} piece;

static uint64_t owners;

static void claim(piece *taken, clock_stream *on) {
    taken->owner = __atomic_add_fetch(&owners, 1, __ATOMIC_RELAXED);
    CHECK((uintptr_t)taken->data % UNIT == 0, "%p is not aligned", taken->data);
    pthread_mutex_lock(&clocks);
    for (size_t at = 0; at < taken->nbytes; at += UNIT) {
        mark *here = (mark *)((char *)taken->data + at);
        CHECK(here->owner == 0, "memory of %llu is live", (unsigned long long)here->owner);
        if (here->stream != 0 && !(on && here->stream == on->stream.number)) {
            clock_stream *freed = streams[here->stream];
            int ordered = freed->done >= here->tick || (on && on->past[here->stream] >= here->tick);
            CHECK(ordered, "stream %llu gets what stream %llu has in use",
                  on ? (unsigned long long)on->stream.number : 0, (unsigned long long)here->stream);
        }
        here->owner = taken->owner;
    }
    if (on) on->tick += 1;
    pthread_mutex_unlock(&clocks);
}

static void disclaim(const piece *freed, clock_stream *on) {
    pthread_mutex_lock(&clocks);
    if (on) on->tick += 1;
    for (size_t at = 0; at < freed->nbytes; at += UNIT) {
        mark *here = (mark *)((char *)freed->data + at);
        CHECK(here->owner == freed->owner, "memory of %llu was given to %llu", (unsigned long long)freed->owner,
              (unsigned long long)here->owner);
        here->owner = 0;
        here->stream = on ? on->stream.number : 0;
        here->tick = on ? on->tick : 0;
    }
    pthread_mutex_unlock(&clocks);
}

typedef struct {
    kina_resource resource;
    int64_t live, calls, refused;
    int64_t limit;
} upstream_resource;

static int upstream_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) {
    upstream_resource *upstream = (upstream_resource *)self;
    (void)stream;
    int64_t live = __atomic_add_fetch(&upstream->live, (int64_t)nbytes, __ATOMIC_RELAXED);
    __atomic_fetch_add(&upstream->calls, 1, __ATOMIC_RELAXED);
    if (live > upstream->limit || posix_memalign(out, UNIT, nbytes) != 0) {
        __atomic_fetch_sub(&upstream->live, (int64_t)nbytes, __ATOMIC_RELAXED);
        __atomic_fetch_add(&upstream->refused, 1, __ATOMIC_RELAXED);
        return KINA_OUT_OF_MEMORY;
    }
    memset(*out, 0, nbytes);
    return 0;
}

static void upstream_deallocate(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) {
    upstream_resource *upstream = (upstream_resource *)self;
    pthread_mutex_lock(&clocks);
    for (size_t at = 0; at + sizeof(mark) <= nbytes; at += UNIT) {
        mark *here = (mark *)((char *)data + at);
        CHECK(here->owner == 0, "live memory went back to the upstream");
        if (here->stream == 0 || (stream && stream->number == here->stream)) continue;
        int ordered = stream && ((clock_stream *)stream)->past[here->stream] >= here->tick;
        CHECK(ordered || streams[here->stream]->done >= here->tick, "memory in use went back to the upstream");
    }
    pthread_mutex_unlock(&clocks);
    free(data);
    __atomic_fetch_sub(&upstream->live, (int64_t)nbytes, __ATOMIC_RELAXED);
}

/* Without a wait there is less. */
static int upstream_try_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream, int may_wait) {
    int64_t nth = __atomic_add_fetch(&((upstream_resource *)self)->calls, 1, __ATOMIC_RELAXED);
    return nth % 3 == 0 && !may_wait ? KINA_OUT_OF_MEMORY : upstream_allocate(self, out, nbytes, stream);
}

static void upstream_stays(kina_handle *handle) { (void)handle; }

static kina_resource_vtable upstream_functions = {
    KINA_RESOURCE_VERSION, 1, "upstream", upstream_allocate, upstream_deallocate, upstream_try_allocate, NULL,
};

/* ------------------------------------------------------------------------------------------------------- the threads */

static kina_resource *pool;
static piece exchanged[EXCHANGED]; /* memory that one thread allocates and another frees, with its stream */
static clock_stream *exchanged_on[EXCHANGED];
static pthread_mutex_t exchange = PTHREAD_MUTEX_INITIALIZER;
static int64_t refused;
static int rounds;

static size_t some_size(unsigned *seed) {
    unsigned doubling = (unsigned)rand_r(seed) % 22;
    return 1 + (size_t)rand_r(seed) % ((size_t)1 << doubling);
}

static void give_back(piece *freed, clock_stream *on) {
    disclaim(freed, on);
    pool->vtable->deallocate(pool, freed->data, freed->nbytes, on ? &on->stream : NULL);
    freed->data = NULL;
}

/* The host waits for the stream, or tries to. */
static void wait_on_host(clock_stream *on, int in_vain) {
    kina_stream_awaited(&on->stream);
    if (in_vain) return;
    pthread_mutex_lock(&clocks);
    uint64_t tick = on->tick;
    pthread_mutex_unlock(&clocks);
    for (int i = 0; i < 50; i++) sched_yield(); /* others go on, and free memory in the order of the stream */
    pthread_mutex_lock(&clocks);
    come_to(on, tick);
    pthread_mutex_unlock(&clocks);
    kina_stream_passed(&on->stream);
}

static void *work(void *argument) {
    unsigned seed = (unsigned)(uintptr_t)argument;
    for (int lifetime = 0; lifetime < 4; lifetime++) {
        piece live[LIVE] = {{0}};
        clock_stream *on = rand_r(&seed) % 8 ? open_stream() : NULL;
        for (int i = 0; i < rounds; i++) {
            piece *chosen = &live[rand_r(&seed) % LIVE];
            if (chosen->data) {
                if (rand_r(&seed) % 4 == 0) {
                    pthread_mutex_lock(&exchange);
                    int at = rand_r(&seed) % EXCHANGED;
                    if (!exchanged[at].data) {
                        exchanged[at] = *chosen;
                        exchanged_on[at] = on;
                        chosen->data = NULL;
                    }
                    pthread_mutex_unlock(&exchange);
                }
                if (chosen->data) give_back(chosen, on);
                continue;
            }
            if (rand_r(&seed) % 8 == 0) {
                /* What another thread allocated, freed in the order of its stream; that one waits for it below. */
                pthread_mutex_lock(&exchange);
                int at = rand_r(&seed) % EXCHANGED;
                if (exchanged[at].data) give_back(&exchanged[at], exchanged_on[at]);
                pthread_mutex_unlock(&exchange);
            }
            chosen->nbytes = some_size(&seed);
            if (pool->vtable->allocate(pool, &chosen->data, chosen->nbytes, on ? &on->stream : NULL) == 0)
                claim(chosen, on);
            else {
                chosen->data = NULL;
                __atomic_fetch_add(&refused, 1, __ATOMIC_RELAXED);
            }
            if (on && rand_r(&seed) % 256 == 0) wait_on_host(on, rand_r(&seed) % 3 == 0);
            if (rand_r(&seed) % 512 == 0) kina_pool_trim(pool, (size_t)rand_r(&seed) % (4u << 20));
            if (rand_r(&seed) % 512 == 0) {
                kina_pool_statistics now;
                kina_pool_read(pool, &now);
                CHECK(now.cached_bytes <= now.reserved_bytes, "more is free than there is");
            }
        }
        for (int i = 0; i < LIVE; i++)
            if (live[i].data) give_back(&live[i], on);
        if (!on) continue;
        pthread_mutex_lock(&exchange);
        for (int i = 0; i < EXCHANGED; i++)
            if (exchanged[i].data && exchanged_on[i] == on) give_back(&exchanged[i], on);
        pthread_mutex_unlock(&exchange);
        close_stream(on);
    }
    return NULL;
}

int main(int count, char **arguments) {
    CHECK(count == 4, "usage: pool_stress THREADS ROUNDS SEED");
    int threads = atoi(arguments[1]);
    rounds = atoi(arguments[2]);
    unsigned seed = (unsigned)atoi(arguments[3]);
    srand(seed);
    CHECK(kina_pool_setup() == 0, "no thread-local key");
    upstream_resource upstream = {.limit = 24 << 20};
    kina_handle_init(&upstream.resource.handle, upstream_stays);
    upstream.resource.vtable = &upstream_functions;
    upstream.resource.device_type = 2; /* kDLCUDA: streams matter */
    kina_pool_options options = {0, SIZE_MAX, 0, UNIT, 0};
    kina_pool_statistics now;
    for (int pools = 0; pools < 3; pools++) {
        CHECK(kina_pool_create(&pool, &upstream.resource, &options) == 0, "no pool");
        pthread_t running[64];
        for (int i = 0; i < threads; i++) {
            uintptr_t given = seed * 1000u + (unsigned)(pools * 64 + i);
            CHECK(pthread_create(&running[i], NULL, work, (void *)given) == 0, "no thread");
        }
        for (int i = 0; i < threads; i++) pthread_join(running[i], NULL);
        for (int i = 0; i < EXCHANGED; i++) /* of memory without a stream */
            if (exchanged[i].data) give_back(&exchanged[i], exchanged_on[i]);
        kina_pool_read(pool, &now);
        CHECK(now.live_bytes == 0 && now.live_allocations == 0, "%lld bytes are live", (long long)now.live_bytes);
        CHECK(now.unknown_frees == 0, "%lld frees of unknown memory", (long long)now.unknown_frees);
        CHECK(now.cached_bytes == now.reserved_bytes, "%lld of %lld bytes are free", (long long)now.cached_bytes,
              (long long)now.reserved_bytes);
        printf("allocations %lld refused %lld grown %lld returned %lld harvest %lld raid %lld steal %lld return %lld "
               "wait %lld\n",
               (long long)now.total_allocations, (long long)now.refused, (long long)now.grown, (long long)now.returned,
               (long long)now.rescued_by_harvest, (long long)now.rescued_by_raid, (long long)now.rescued_by_stealing,
               (long long)now.rescued_by_returning, (long long)now.rescued_by_waiting);
        closing = 1;
        kina_release(pool);
        closing = 0;
    }
    /* What the streams were not past goes back at the next use of any pool. */
    for (uint64_t i = 1; i <= streams_made; i++) streams[i]->done = streams[i]->tick;
    CHECK(kina_pool_create(&pool, &upstream.resource, &options) == 0, "no pool");
    kina_release(pool);
    CHECK(upstream.live == 0, "%lld bytes did not go back", (long long)upstream.live);
    CHECK(fences_alive == 0, "%lld fences are left", (long long)fences_alive);
    CHECK(upstream.resource.handle.references == 1, "the upstream is still referred to");
    for (uint64_t i = 1; i <= streams_made; i++) {
        free(streams[i]->past);
        free(streams[i]);
    }
    return 0;
}
