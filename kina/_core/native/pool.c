/* See pool.h for what this is.
 *
 * Locks, in the order in which they are taken:
 *   registry        one per process: which pools, streams and caches there are; taken when one comes, goes or is raided
 *   pool->mutex     its heap, bins, epochs and fences
 *   cache->lock     spins; one thread's cache; taken alone or under the registry, never across anything slow
 * The upstream is called, and fences are waited for, with none of them held. A fork waits for the first two.
 */
#define _GNU_SOURCE /* sched_yield, pthread_atfork under -std=c11 */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "blocks.h"
#include "kina_tensor.h"

enum {
    CLASSES = 80,       /* sizes of 1 to 8 units, then 8 per doubling up to 4,096 units (1 MiB of 256 bytes) */
    DEPTH = 32,         /* blocks of a class in a thread's cache, */
    CACHED = 256 << 10, /* or as many as have this many bytes, at least one */
    BIN_DEPTH = 64,     /* blocks of a class in a stream's bins, */
    BINNED = 512 << 10, /* or as many as have this many bytes, at least one */
    BATCH = 64 << 10,   /* bytes cut from the heap at once for a bin */
    FENCES = 16,        /* of a stream, recorded and not known to have passed */
    SMALLEST_GROWTH = 2 << 20,
    LARGEST_GROWTH = 256 << 20
};

/* What a pool knows of a stream. Memory without a stream has one too, whose `stream` is NULL and whose blocks are
 * anybody's. */
typedef struct home {
    kina_stream_watch watch; /* in the stream's list */
    kina_pool *pool;
    struct home *next;   /* of the pool */
    kina_stream *stream; /* borrowed; NULL once it is closed, and for memory without one */
    const kina_stream_order *ordering;
    uint64_t number;
    struct cache *caches; /* under the registry */
    /* under the pool's mutex */
    kina_index index; /* free in the order of the stream: its own at once, anybody's when `epoch` has passed */
    uint64_t epoch;   /* of releases from now on */
    uint64_t sealed;  /* a fence is, or was, behind the releases up to this one */
    uint64_t awaited; /* the host waits for the releases up to this one */
    struct {
        uint64_t epoch; /* it is behind all releases up to this one */
        kina_handle *handle;
    } fences[FENCES]; /* oldest first */
    int fence_count;
    kina_handle *ending; /* a fence behind all that the stream will have done, for when it closes; NULL if not known */
    uint8_t counts[CLASSES];
    void *bins[CLASSES][BIN_DEPTH];
} home;

/* A thread's blocks of one pool and stream. */
typedef struct cache {
    int lock;
    int dead;              /* under the registry: its pool or stream is gone, only its thread still lists it */
    uint64_t pool, stream; /* numbers: never reused, so a dead cache matches nothing */
    home *home;
    struct cache *next;                                      /* of the thread */
    struct cache *sibling, **link;                           /* of the home */
    int64_t live_bytes, live_allocations, total_allocations; /* what this thread did */
    uint8_t counts[CLASSES];
    void *blocks[CLASSES][DEPTH];
} cache;

struct kina_pool {
    kina_resource resource;
    kina_resource_vtable vtable;
    uint64_t number;
    kina_pool *next, *previous; /* in `pools`; next also in `dying` */
    home *homes;                /* under registry and mutex: either lets it be read */
    int forsaken;               /* atomic: what is free is not kept any more */
    int keeps_all;              /* chunks never go back, until then */
    size_t alignment;
    unsigned shift;
    size_t small_bytes;           /* the largest size that is cached */
    uint8_t cache_limit[CLASSES]; /* blocks of the class in a cache, */
    uint8_t bin_limit[CLASSES];   /* and in a bin */
    size_t initial_bytes, maximum_bytes, growth_bytes;
    pthread_mutex_t mutex;
    kina_heap heap;
    kina_index anybodys;
    size_t promised_bytes; /* that threads are asking the upstream for, beside heap.reserved_bytes */
    int64_t live_bytes, live_allocations, total_allocations; /* of caches that are gone */
    kina_pool_statistics counters;
};

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static kina_pool *pools, *dying;
static uint64_t pools_made;
static kina_pool_reporter report;
static pthread_key_t thread_key;
static _Thread_local cache *my_caches KINA_INITIAL_EXEC; /* the one used last comes first */

/* ---------------------------------------------------------------------------------------------------- size classes */

static unsigned class_of(size_t units) {
    size_t last = units - 1;
    if (last < 8) return (unsigned)last;
    unsigned doubling = 60u - (unsigned)__builtin_clzll(last); /* beyond 8 */
    return 8 * doubling + (unsigned)(last >> doubling);
}

static size_t units_of(unsigned rank) { return rank < 8 ? rank + 1 : (size_t)(9 + (rank & 7)) << ((rank >> 3) - 1); }

static size_t class_bytes(const kina_pool *pool, unsigned rank) { return units_of(rank) << pool->shift; }

/* How many of `bytes` bytes are within `limit`: 1 to `most`. */
static unsigned fitting(size_t bytes, unsigned most, size_t limit) {
    size_t fit = limit / bytes;
    return fit >= most ? most : fit > 0 ? (unsigned)fit : 1;
}

static size_t rounded(const kina_pool *pool, size_t nbytes) {
    return (nbytes + pool->alignment - 1) & ~(pool->alignment - 1);
}

/* ---------------------------------------------------------------------------------------------------------- caches */

static void cache_lock(cache *cached) {
    while (__atomic_exchange_n(&cached->lock, 1, __ATOMIC_ACQUIRE))
        while (__atomic_load_n(&cached->lock, __ATOMIC_RELAXED)) sched_yield();
}

static void cache_unlock(cache *cached) { __atomic_store_n(&cached->lock, 0, __ATOMIC_RELEASE); }

/* ------------------------------------------------------------------------- the heap, under the mutex of its pool */

/* Blocks in the order of `from` become free in the heap. */
static void give_blocks(home *from, void *const *addresses, unsigned number) {
    kina_pool *pool = from->pool;
    kina_index *index = from->ordering ? &from->index : &pool->anybodys;
    for (unsigned i = 0; i < number; i++) {
        kina_block *block = kina_heap_lookup(&pool->heap, (uintptr_t)addresses[i]);
        if (block) kina_heap_give(&pool->heap, block, index, from->epoch);
        else pool->counters.unknown_frees += 1;
    }
}

static void flush_bins(home *flushed) {
    for (unsigned rank = 0; rank < CLASSES; rank++) {
        give_blocks(flushed, flushed->bins[rank], flushed->counts[rank]);
        flushed->counts[rank] = 0;
    }
}

/* A fence behind every release in the order of the home so far. Whether there is one. */
static int seal(home *its) {
    kina_handle *fence;
    if (its->index.newest == NULL || its->index.newest->epoch <= its->sealed) return 1;
    if (!its->stream || its->fence_count == FENCES) return 0;
    if (its->ordering->record(its->stream, &fence) != 0) return 0;
    its->fences[its->fence_count].epoch = its->epoch;
    its->fences[its->fence_count].handle = fence;
    its->fence_count += 1;
    its->sealed = its->epoch++;
    return 1;
}

static void drop_fences(home *passed, int number) {
    for (int i = 0; i < number; i++) kina_release(passed->fences[i].handle);
    passed->fence_count -= number;
    memmove(passed->fences, passed->fences + number, (size_t)passed->fence_count * sizeof(passed->fences[0]));
}

/* The stream is past its releases up to `epoch`: they are anybody's. */
static void pass(home *passed, uint64_t epoch) {
    int fences = 0;
    while (fences < passed->fence_count && passed->fences[fences].epoch <= epoch) fences += 1;
    drop_fences(passed, fences);
    while (passed->index.oldest && passed->index.oldest->epoch <= epoch)
        kina_heap_move(&passed->pool->heap, passed->index.oldest, &passed->pool->anybodys, 0);
}

/* Of the releases so far, those that the stream is seen to be past become anybody's. */
static void harvest_home(home *harvested) {
    kina_index *index = &harvested->index;
    int passed = 0;
    if (index->bytes == 0) return;
    seal(harvested);
    while (passed < harvested->fence_count && harvested->ordering->query(harvested->fences[passed].handle) == 1)
        passed += 1;
    if (passed) pass(harvested, harvested->fences[passed - 1].epoch);
}

/* Bytes that are free, wherever in the heap. */
static size_t free_bytes(const kina_pool *pool) {
    size_t sum = pool->anybodys.bytes;
    for (const home *each = pool->homes; each; each = each->next) sum += each->index.bytes;
    return sum;
}

/* Free bytes that a harvest could bring together for `taker`: none if they are all its own as it is. */
static size_t gatherable(const home *taker) {
    size_t all = free_bytes(taker->pool);
    return all == taker->index.bytes ? 0 : all;
}

static void harvest(kina_pool *pool) {
    for (home *each = pool->homes; each; each = each->next) harvest_home(each);
}

/* A fence that the block's stream passes after its release, or NULL. */
static kina_handle *fence_of(home *owner, const kina_block *block) {
    if (block->epoch > owner->sealed && !seal(owner)) return NULL;
    for (int i = 0; i < owner->fence_count; i++)
        if (owner->fences[i].epoch >= block->epoch) return owner->fences[i].handle;
    return NULL;
}

/* A block that is free for `taker` as things are. */
static kina_block *find(home *taker, size_t size) {
    kina_heap *heap = &taker->pool->heap;
    kina_block *found = taker->ordering ? kina_heap_find(heap, &taker->index, size) : NULL;
    return found ? found : kina_heap_find(heap, &taker->pool->anybodys, size);
}

/* A block of another stream, which `taker` waits for on the device. */
static kina_block *steal(home *taker, size_t size) {
    for (home *owner = taker->pool->homes; owner && taker->stream; owner = owner->next) {
        kina_block *found = owner == taker ? NULL : kina_heap_find(&taker->pool->heap, &owner->index, size);
        kina_handle *fence = found ? fence_of(owner, found) : NULL;
        if (fence && taker->ordering->order(taker->stream, fence) == 0) return found;
    }
    return NULL;
}

/* Whether the chunk is free for `taker`, or for anybody (NULL); then it is one block. */
static int is_idle(kina_pool *pool, kina_chunk *chunk, home *taker) {
    kina_index *own = taker ? &taker->index : &pool->anybodys;
    for (const kina_block *each = chunk->first; each; each = each->after)
        if (each->index == NULL || (each->index != own && each->index != &pool->anybodys)) return 0;
    while (chunk->first->after || chunk->first->index != own) { /* what is anybody's merges with what is its own */
        kina_block *foreign = chunk->first;
        while (foreign->index == own) foreign = foreign->after;
        kina_heap_move(&pool->heap, foreign, own, taker ? taker->epoch : 0);
    }
    return 1;
}

/* Chunks that are free for `taker` (NULL: for anybody) leave the heap, until no more than keep_bytes are reserved. */
static kina_chunk *detach_idle(kina_pool *pool, home *taker, size_t keep_bytes) {
    kina_chunk *detached = NULL;
    if (pool->keeps_all) return NULL;
    for (kina_chunk *each = pool->heap.chunks, *next; each && pool->heap.reserved_bytes > keep_bytes; each = next) {
        next = each->next;
        if (!is_idle(pool, each, taker)) continue;
        kina_heap_remove(&pool->heap, each);
        each->next = detached;
        detached = each;
        pool->counters.returned += 1;
    }
    return detached;
}

/* With no lock held. */
static size_t return_chunks(kina_pool *pool, kina_chunk *chunk, kina_stream *stream) {
    kina_resource *upstream = pool->resource.upstream;
    size_t returned = 0;
    for (kina_chunk *next; chunk; chunk = next) {
        next = chunk->next;
        upstream->vtable->deallocate(upstream, chunk->base, chunk->bytes, stream);
        returned += chunk->bytes;
        free(chunk);
    }
    return returned;
}

/* ------------------------------------------------------------------------------------------ streams, caches, threads */

/* All that threads keep in the order of this stream goes to the heap. Under registry and mutex. */
static void raid_home(home *raided) {
    void *blocks[DEPTH];
    for (cache *each = raided->caches; each; each = each->sibling)
        for (unsigned rank = 0; rank < CLASSES; rank++) {
            if (__atomic_load_n(&each->counts[rank], __ATOMIC_RELAXED) == 0) continue;
            cache_lock(each);
            unsigned number = each->counts[rank];
            memcpy(blocks, each->blocks[rank], number * sizeof(blocks[0]));
            __atomic_store_n(&each->counts[rank], 0, __ATOMIC_RELAXED);
            cache_unlock(each);
            give_blocks(raided, blocks, number);
        }
    flush_bins(raided);
}

/* Under the registry, with the mutex held. */
static void raid(kina_pool *pool) {
    for (home *each = pool->homes; each; each = each->next) raid_home(each);
}

static void unlink_cache(cache *removed) {
    kina_pool *pool = removed->home->pool;
    cache_lock(removed);
    *removed->link = removed->sibling;
    if (removed->sibling) removed->sibling->link = removed->link;
    pool->live_bytes += removed->live_bytes;
    pool->live_allocations += removed->live_allocations;
    pool->total_allocations += removed->total_allocations;
    cache_unlock(removed);
    removed->dead = 1;
    removed->home = NULL;
}

/* The stream or the pool goes: what is kept in the stream's order depends on fences only. Under registry and mutex. */
static void retire_home(home *retired) {
    raid_home(retired);
    while (retired->caches) unlink_cache(retired->caches);
    if (!retired->stream) return;
    if (retired->fence_count == FENCES) {
        /* The newest is behind all others, and the next one behind it: between them none is needed. */
        kina_release(retired->fences[FENCES - 2].handle);
        retired->fences[FENCES - 2] = retired->fences[FENCES - 1];
        retired->fence_count -= 1;
    }
    if (retired->ending) {
        retired->fences[retired->fence_count].epoch = retired->epoch;
        retired->fences[retired->fence_count].handle = retired->ending;
        retired->fence_count += 1;
        retired->ending = NULL;
        retired->sealed = retired->epoch++;
    } else {
        seal(retired);
    }
    __atomic_store_n(retired->watch.link, retired->watch.next, __ATOMIC_RELAXED);
    if (retired->watch.next) retired->watch.next->link = retired->watch.link;
    retired->stream = NULL;
}

/* Homes of streams that are closed and have nothing left. Under registry and mutex. */
static void sweep_homes(kina_pool *pool) {
    for (home **link = &pool->homes, *each = *link; each; each = *link) {
        if (each->stream || !each->ordering || each->index.bytes) {
            link = &each->next;
            continue;
        }
        *link = each->next;
        drop_fences(each, each->fence_count);
        free(each);
    }
}

void kina_stream_closing(kina_stream *stream) {
    pthread_mutex_lock(&registry);
    while (stream->watches) {
        home *closed = (home *)stream->watches;
        pthread_mutex_lock(&closed->pool->mutex);
        retire_home(closed);
        harvest_home(closed);
        pthread_mutex_unlock(&closed->pool->mutex);
    }
    pthread_mutex_unlock(&registry);
}

/* With `passed`, the wait is over. */
static void awaited(kina_stream *stream, int passed) {
    if (!__atomic_load_n(&stream->watches, __ATOMIC_RELAXED)) return;
    pthread_mutex_lock(&registry);
    for (kina_stream_watch *each = stream->watches; each; each = each->next) {
        home *its = (home *)each;
        pthread_mutex_lock(&its->pool->mutex);
        if (passed) pass(its, its->awaited);
        else its->awaited = its->epoch++;
        pthread_mutex_unlock(&its->pool->mutex);
    }
    pthread_mutex_unlock(&registry);
}

void kina_stream_awaited(kina_stream *stream) { awaited(stream, 0); }

void kina_stream_passed(kina_stream *stream) { awaited(stream, 1); }

static void end_thread(void *list) {
    cache *each = my_caches, *next;
    (void)list;
    my_caches = NULL;
    pthread_mutex_lock(&registry);
    for (; each; each = next) {
        next = each->next;
        if (!each->dead) {
            kina_pool *pool = each->home->pool;
            pthread_mutex_lock(&pool->mutex);
            for (unsigned rank = 0; rank < CLASSES; rank++)
                give_blocks(each->home, each->blocks[rank], each->counts[rank]);
            unlink_cache(each);
            pthread_mutex_unlock(&pool->mutex);
        }
        free(each);
    }
    pthread_mutex_unlock(&registry);
}

static home *home_of(kina_pool *pool, kina_stream *stream) {
    uint64_t number = stream ? stream->number : 0;
    home *found = pool->homes;
    while (found && (found->number != number || (stream && found->stream != stream))) found = found->next;
    if (found) return found;
    found = calloc(1, sizeof(*found));
    if (!found) return NULL;
    found->pool = pool;
    found->stream = stream;
    found->number = number;
    found->ordering = stream ? stream->ordering : NULL;
    found->epoch = 1;
    if (stream) {
        found->watch.next = stream->watches;
        found->watch.link = &stream->watches;
        if (stream->watches) stream->watches->link = &found->watch.next;
        __atomic_store_n(&stream->watches, &found->watch, __ATOMIC_RELAXED);
    }
    pthread_mutex_lock(&pool->mutex);
    found->next = pool->homes;
    pool->homes = found;
    pthread_mutex_unlock(&pool->mutex);
    return found;
}

static cache *make_cache(kina_pool *pool, kina_stream *stream) {
    if (stream && !stream->ordering) return NULL;
    cache *made = calloc(1, sizeof(*made));
    if (!made) return NULL;
    pthread_mutex_lock(&registry);
    for (cache **link = &my_caches, *each = *link; each; each = *link) {
        if (each->dead) {
            *link = each->next;
            free(each);
        } else {
            link = &each->next;
        }
    }
    pthread_mutex_lock(&pool->mutex);
    sweep_homes(pool);
    pthread_mutex_unlock(&pool->mutex);
    made->home = home_of(pool, stream);
    if (!made->home) {
        pthread_mutex_unlock(&registry);
        free(made);
        return NULL;
    }
    made->pool = pool->number;
    made->stream = made->home->number;
    made->sibling = made->home->caches;
    made->link = &made->home->caches;
    if (made->sibling) made->sibling->link = &made->sibling;
    made->home->caches = made;
    pthread_mutex_unlock(&registry);
    made->next = my_caches;
    my_caches = made;
    pthread_setspecific(thread_key, made); /* anything but NULL: end_thread is to run */
    return made;
}

static cache *other_cache(kina_pool *pool, kina_stream *stream, uint64_t number) {
    for (cache **link = &my_caches, *each = *link; each; link = &each->next, each = *link)
        if (each->pool == pool->number && each->stream == number) {
            *link = each->next;
            each->next = my_caches;
            my_caches = each;
            return each;
        }
    return make_cache(pool, stream);
}

/* The calling thread's cache, made at first use; NULL if there is no host memory for one, or if nothing can be put in
 * order with the stream. */
static inline cache *cache_of(kina_pool *pool, kina_stream *stream) {
    cache *first = my_caches;
    uint64_t number = stream ? stream->number : 0;
    if (first && first->pool == pool->number && first->stream == number) return first;
    return other_cache(pool, stream, number);
}

/* -------------------------------------------------------------------------------------------------------- growing */

static size_t reservable(const kina_pool *pool) {
    size_t spoken_for = pool->heap.reserved_bytes + pool->promised_bytes;
    return spoken_for >= pool->maximum_bytes ? 0 : pool->maximum_bytes - spoken_for;
}

/* More than the upstream's alignment is made here, out of a chunk that is larger by it. */
static size_t slack(const kina_pool *pool) { return pool->alignment > 256 ? pool->alignment : 0; }

static size_t growth(const kina_pool *pool, size_t size) {
    size_t wanted = pool->growth_bytes;
    if (wanted == 0) {
        wanted = pool->heap.reserved_bytes / 8;
        if (wanted < SMALLEST_GROWTH) wanted = SMALLEST_GROWTH;
        if (wanted > LARGEST_GROWTH) wanted = LARGEST_GROWTH;
    }
    if (pool->heap.reserved_bytes == 0 && wanted < pool->initial_bytes) wanted = pool->initial_bytes;
    if (wanted < size) wanted = size;
    return (wanted + SMALLEST_GROWTH - 1) & ~(size_t)(SMALLEST_GROWTH - 1);
}

/* A chunk of `bytes` from the upstream, whose first `size` are taken in *out; the mutex is let go meanwhile. */
static int grow_by(home *taker, size_t bytes, size_t size, kina_asking how, kina_block **out) {
    kina_pool *pool = taker->pool;
    kina_resource *upstream = pool->resource.upstream;
    void *base = NULL;
    pool->promised_bytes += bytes;
    pthread_mutex_unlock(&pool->mutex);
    kina_chunk *chunk = calloc(1, sizeof(*chunk));
    int status = chunk ? kina_ask(upstream, &base, bytes, taker->stream, how) : KINA_OUT_OF_MEMORY;
    pthread_mutex_lock(&pool->mutex);
    pool->promised_bytes -= bytes;
    if (status == 0 && kina_heap_reserve(&pool->heap, 3) != 0) {
        pthread_mutex_unlock(&pool->mutex);
        upstream->vtable->deallocate(upstream, base, bytes, taker->stream);
        pthread_mutex_lock(&pool->mutex);
        status = KINA_OUT_OF_MEMORY;
    }
    if (status != 0) {
        free(chunk);
        return status;
    }
    pool->counters.grown += 1;
    chunk->base = base;
    chunk->bytes = bytes;
    uintptr_t begin = ((uintptr_t)base + pool->alignment - 1) & ~(uintptr_t)(pool->alignment - 1);
    size_t usable = (bytes - (begin - (uintptr_t)base)) & ~(pool->alignment - 1);
    kina_block *block = kina_heap_add(&pool->heap, chunk, begin, usable);
    if ((int64_t)pool->heap.reserved_bytes > pool->counters.peak_reserved_bytes)
        pool->counters.peak_reserved_bytes = (int64_t)pool->heap.reserved_bytes;
    if (usable > size) {
        kina_block *rest = kina_heap_cut(&pool->heap, block, size);
        /* What the upstream gives in the order of a stream is that stream's at first. */
        int ordered = taker->ordering && upstream->vtable->supports_streams;
        kina_heap_give(&pool->heap, rest, ordered ? &taker->index : &pool->anybodys, taker->epoch);
    }
    *out = block;
    return 0;
}

/* Whether memory goes back to the upstream without a wait. */
static int returns_at_once(const kina_resource *upstream) {
    return upstream->vtable->supports_streams || upstream->device_type == KINA_DEVICE_CPU;
}

/* A request finds no chunk that is large enough: up to as much as is wanted goes back first, so that chunks which are free
 * but too small do not add up. The mutex is let go meanwhile. */
static void make_way(home *taker, size_t wanted) {
    kina_pool *pool = taker->pool;
    size_t reserved = pool->heap.reserved_bytes;
    if (!returns_at_once(pool->resource.upstream)) return;
    kina_chunk *idle = detach_idle(pool, taker->ordering ? taker : NULL, reserved > wanted ? reserved - wanted : 0);
    if (!idle) return;
    pthread_mutex_unlock(&pool->mutex);
    return_chunks(pool, idle, taker->stream);
    pthread_mutex_lock(&pool->mutex);
}

/* *in_vain is set if the upstream had no room, whether or not it had some for less in the end. */
static int grow(home *taker, size_t size, kina_asking how, kina_block **out, int *in_vain) {
    kina_pool *pool = taker->pool;
    size_t least = size + slack(pool);
    size_t wanted = growth(pool, least);
    make_way(taker, wanted);
    size_t possible = reservable(pool);
    if (possible < least) return KINA_OUT_OF_MEMORY;
    int status = grow_by(taker, wanted < possible ? wanted : possible, size, KINA_ASK_QUIETLY, out);
    *in_vain |= status == KINA_OUT_OF_MEMORY;
    if (status == KINA_OUT_OF_MEMORY && least < wanted && reservable(pool) >= least)
        status = grow_by(taker, least, size, KINA_ASK_QUIETLY, out);
    if (status == KINA_OUT_OF_MEMORY && how != KINA_ASK_QUIETLY && pool->resource.upstream->vtable->try_allocate &&
        reservable(pool) >= least)
        status = grow_by(taker, least, size, how, out);
    return status;
}

/* ------------------------------------------------------------------------------- the ways out of a full upstream */

static size_t bury(kina_patience how);

/* Wait on the host for every fence of the pool, with no lock held. */
static void wait_for_fences(kina_pool *pool, kina_stream *waiter) {
    for (;;) {
        home *each;
        kina_handle *fence = NULL;
        int (*wait)(kina_handle *, kina_stream *) = NULL;
        for (each = pool->homes; each && !fence; each = each->next) {
            if (each->index.bytes == 0 || (!seal(each) && each->fence_count == 0) || each->fence_count == 0) continue;
            fence = each->fences[each->fence_count - 1].handle;
            wait = each->ordering->wait;
            if (each->ordering->query(fence) != 0) fence = NULL; /* passed, or never to be known */
        }
        if (!fence) return;
        kina_retain(fence);
        pthread_mutex_unlock(&pool->mutex);
        int status = wait(fence, waiter);
        kina_release(fence);
        pthread_mutex_lock(&pool->mutex);
        harvest(pool);
        if (status != 0) return;
    }
}

/* Give back what is free for `taker`, or for anybody, and what pools that are gone had; the mutex is let go meanwhile.
 * Whether anything went. */
static int return_idle(kina_pool *pool, home *taker, kina_patience how) {
    kina_chunk *own = NULL, *anybodys = detach_idle(pool, NULL, 0);
    if (taker->stream && pool->resource.upstream->vtable->supports_streams) own = detach_idle(pool, taker, 0);
    pthread_mutex_unlock(&pool->mutex);
    size_t returned = return_chunks(pool, anybodys, NULL) + return_chunks(pool, own, taker->stream);
    returned += bury(how);
    pthread_mutex_lock(&pool->mutex);
    return returned != 0;
}

/* Empty the caches of the threads that use this stream (NULL: any stream); the mutex is let go meanwhile. */
static void raid_unlocked(kina_pool *pool, home *only) {
    pthread_mutex_unlock(&pool->mutex);
    pthread_mutex_lock(&registry);
    pthread_mutex_lock(&pool->mutex);
    if (only) raid_home(only);
    else raid(pool);
    pthread_mutex_unlock(&registry);
}

/* What is free for `taker` once everybody has given up what they keep; the mutex is let go meanwhile. */
static kina_block *gather(home *taker, size_t size) {
    raid_unlocked(taker->pool, NULL);
    harvest(taker->pool);
    return find(taker, size);
}

/* Whoever offered to help is asked until it has helped, or says no; everything is looked through after each time. Whether
 * the request is over, served or not. */
static int call_for_help(home *taker, size_t size, kina_block **out, int *in_vain, int *status) {
    kina_pool *pool = taker->pool;
    kina_resource *upstream = pool->resource.upstream;
    for (;;) {
        int made = 0;
        pthread_mutex_unlock(&pool->mutex);
        *status = upstream->vtable->make_room(upstream, size + slack(pool), &made);
        pthread_mutex_lock(&pool->mutex);
        if (*status != 0) return 1;
        if (!made) return 0;
        if ((*out = gather(taker, size)) != NULL || (*out = steal(taker, size)) != NULL) return 1;
        return_idle(pool, taker, KINA_QUIETLY);
        *status = grow(taker, size, KINA_ASK_QUIETLY, out, in_vain);
        if (*status != KINA_OUT_OF_MEMORY) return 1;
    }
}

/* The status of a rung that serves, or fails for good; what it serves is counted. */
static int step(int status, int64_t *rescued) {
    *rescued += status == 0;
    return status;
}

/* Cheapest first; after each, everything is looked through again. With the mutex held, which is let go in between. */
static int climb(home *taker, size_t size, kina_asking how, kina_block **out, int *in_vain) {
    kina_pool *pool = taker->pool;
    const kina_resource_vtable *upstream = pool->resource.upstream->vtable;
    kina_pool_statistics *count = &pool->counters;
    int status;
    if ((*out = gather(taker, size)) != NULL) return step(0, &count->rescued_by_raid);
    if ((*out = steal(taker, size)) != NULL) return step(0, &count->rescued_by_stealing);
    if (return_idle(pool, taker, KINA_QUIETLY)) {
        status = grow(taker, size, KINA_ASK_QUIETLY, out, in_vain);
        if (status != KINA_OUT_OF_MEMORY) return step(status, &count->rescued_by_returning);
    }
    if (how == KINA_ASK_QUIETLY) return KINA_OUT_OF_MEMORY;
    /* Only if the upstream had no room, not where the pool is at a limit of its own. */
    if (how == KINA_ASK_FOR_ALL && upstream->make_room && *in_vain) {
        if (call_for_help(taker, size, out, in_vain, &status)) return step(status, &count->rescued_by_callback);
        how = KINA_ASK_PATIENTLY; /* they have said no */
    }
    wait_for_fences(pool, taker->stream);
    if ((*out = gather(taker, size)) != NULL) return step(0, &count->rescued_by_waiting);
    if (!return_idle(pool, taker, KINA_PATIENTLY) && !upstream->try_allocate) return KINA_OUT_OF_MEMORY;
    return step(grow(taker, size, how, out, in_vain), &count->rescued_by_waiting);
}

/* A taken block of `size` bytes for `taker`, who holds the mutex; it may be let go in between. */
static int obtain(home *taker, size_t size, int only_cheaply, kina_asking how, kina_block **out, int *in_vain) {
    kina_pool *pool = taker->pool;
    if (kina_heap_reserve(&pool->heap, DEPTH + 2) != 0) return KINA_OUT_OF_MEMORY;
    kina_block *found = find(taker, size);
    if (!found) {
        flush_bins(taker);
        if (gatherable(taker) >= size) harvest(pool);
        found = find(taker, size);
        if (found) pool->counters.rescued_by_harvest += 1;
    }
    if (!found) {
        if (only_cheaply) return KINA_OUT_OF_MEMORY;
        raid_unlocked(pool, taker); /* or what threads hand to each other would be kept by all of them in turn */
        found = find(taker, size);
        if (found) pool->counters.rescued_by_raid += 1;
    }
    if (!found) {
        kina_block *grown = NULL;
        int status = grow(taker, size, KINA_ASK_QUIETLY, &grown, in_vain);
        if (status == 0) {
            *out = grown;
            return 0;
        }
        if (status != KINA_OUT_OF_MEMORY) return status;
        status = climb(taker, size, how, &found, in_vain);
        if (status != 0) return status;
        if (found->index == NULL) { /* grown after all */
            *out = found;
            return 0;
        }
        if (kina_heap_reserve(&pool->heap, 2) != 0) return KINA_OUT_OF_MEMORY;
    }
    *out = kina_heap_take(&pool->heap, found, size);
    return 0;
}

static int refuse(kina_pool *pool, int status, size_t nbytes, kina_asking how, int in_vain) {
    kina_pool_statistics now;
    kina_memory_figures figures;
    pthread_mutex_lock(&pool->mutex);
    pool->counters.refused += how != KINA_ASK_QUIETLY; /* else the asker has other ways, and asks again */
    pthread_mutex_unlock(&pool->mutex);
    if (status != KINA_OUT_OF_MEMORY || !report) return status;
    kina_pool_read(&pool->resource, &now);
    figures.requested = nbytes > INT64_MAX ? INT64_MAX : (int64_t)nbytes;
    figures.live = now.live_bytes;
    figures.cached = now.cached_bytes;
    figures.pending = now.pending_bytes;
    figures.largest_free = now.largest_free_bytes;
    figures.limit = now.maximum_bytes;
    report(&pool->resource, status, &figures, in_vain);
    return status;
}

/* ------------------------------------------------------------------------------------------- allocate, deallocate */

static void served(cache *cached, size_t nbytes) {
    cached->live_bytes += (int64_t)nbytes;
    cached->live_allocations += 1;
    cached->total_allocations += 1;
}

/* The cache is empty: half of what it holds comes from the bin, or from the heap, and one block more for *out. */
static int refill(kina_pool *pool, cache *cached, unsigned rank, kina_asking how, void **out, int *in_vain) {
    home *taker = cached->home;
    size_t bytes = class_bytes(pool, rank);
    unsigned wanted = pool->cache_limit[rank] / 2u + 1, got = 0;
    void *blocks[DEPTH];
    int status = 0;
    pthread_mutex_lock(&pool->mutex);
    while (got < wanted && taker->counts[rank]) blocks[got++] = taker->bins[rank][--taker->counts[rank]];
    if (got == 0) {
        kina_block *block = NULL;
        unsigned batch = fitting(bytes, wanted, BATCH);
        status = KINA_OUT_OF_MEMORY;
        if (batch > 1) status = obtain(taker, batch * bytes, 1, how, &block, in_vain);
        if (status != 0) {
            batch = 1;
            status = obtain(taker, bytes, 0, how, &block, in_vain);
        }
        for (; status == 0 && batch > 0; batch--) {
            kina_block *rest = batch > 1 ? kina_heap_cut(&pool->heap, block, bytes) : NULL;
            blocks[got++] = (void *)block->address;
            block = rest;
        }
    }
    pthread_mutex_unlock(&pool->mutex);
    if (status != 0) return status;
    *out = blocks[--got];
    cache_lock(cached);
    while (got > 0) { /* nobody else fills this cache */
        cached->blocks[rank][cached->counts[rank]] = blocks[--got];
        __atomic_store_n(&cached->counts[rank], cached->counts[rank] + 1, __ATOMIC_RELAXED);
    }
    cache_unlock(cached);
    return 0;
}

/* A block of the thread's own. */
static inline int take_cached(cache *cached, unsigned rank, void **out, size_t nbytes) {
    cache_lock(cached);
    unsigned number = cached->counts[rank];
    if (number) {
        *out = cached->blocks[rank][number - 1];
        __atomic_store_n(&cached->counts[rank], (uint8_t)(number - 1), __ATOMIC_RELAXED);
        served(cached, nbytes);
    }
    cache_unlock(cached);
    return number != 0;
}

static inline unsigned class_for(const kina_pool *pool, size_t nbytes) {
    return class_of((nbytes + pool->alignment - 1) >> pool->shift);
}

static int serve(kina_resource *self, void **out, size_t nbytes, kina_stream *stream, kina_asking how) {
    kina_pool *pool = (kina_pool *)self;
    cache *cached = cache_of(pool, stream);
    int status, in_vain = 0;
    if (!cached)
        return refuse(pool, stream && !stream->ordering ? KINA_UNSUPPORTED : KINA_OUT_OF_MEMORY, nbytes, how, 0);
    if (nbytes <= pool->small_bytes) {
        unsigned rank = class_for(pool, nbytes);
        if (take_cached(cached, rank, out, nbytes)) return 0;
        status = refill(pool, cached, rank, how, out, &in_vain);
    } else if (nbytes > SIZE_MAX / 4) {
        status = KINA_OUT_OF_MEMORY;
    } else {
        kina_block *block = NULL;
        pthread_mutex_lock(&pool->mutex);
        status = obtain(cached->home, rounded(pool, nbytes), 0, how, &block, &in_vain);
        if (status == 0) *out = (void *)block->address;
        pthread_mutex_unlock(&pool->mutex);
    }
    if (status != 0) return refuse(pool, status, nbytes, how, in_vain);
    if (in_vain && report) report(&pool->resource, 0, NULL, 1);
    cache_lock(cached);
    served(cached, nbytes);
    cache_unlock(cached);
    return 0;
}

static int pool_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) {
    return serve(self, out, nbytes, stream, KINA_ASK_FOR_ALL);
}

static int pool_try_allocate(kina_resource *self, void **out, size_t nbytes, kina_stream *stream, int may_wait) {
    return serve(self, out, nbytes, stream, may_wait ? KINA_ASK_PATIENTLY : KINA_ASK_QUIETLY);
}

static int pool_make_room(kina_resource *self, size_t nbytes, int *made) {
    return self->upstream->vtable->make_room(self->upstream, nbytes, made);
}

int kina_pool_take(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) {
    kina_pool *pool = (kina_pool *)self;
    cache *first = my_caches;
    if (self->vtable->allocate != pool_allocate || nbytes > pool->small_bytes) return 0;
    if (!first || first->pool != pool->number || first->stream != (stream ? stream->number : 0)) return 0;
    return take_cached(first, class_for(pool, nbytes), out, nbytes);
}

/* The cache is full: half of it goes to the bin, what that does not hold to the heap. */
static void spill(kina_pool *pool, cache *cached, unsigned rank, unsigned number) {
    home *giver = cached->home;
    unsigned limit = pool->bin_limit[rank];
    void *blocks[DEPTH];
    cache_lock(cached);
    if (number > cached->counts[rank]) number = cached->counts[rank];
    unsigned left = cached->counts[rank] - number;
    /* The oldest go: what was freed last is warm. */
    memcpy(blocks, cached->blocks[rank], number * sizeof(blocks[0]));
    memmove(cached->blocks[rank], cached->blocks[rank] + number, left * sizeof(blocks[0]));
    __atomic_store_n(&cached->counts[rank], (uint8_t)left, __ATOMIC_RELAXED);
    cache_unlock(cached);
    pthread_mutex_lock(&pool->mutex);
    while (number > 0 && giver->counts[rank] < limit) giver->bins[rank][giver->counts[rank]++] = blocks[--number];
    give_blocks(giver, blocks, number);
    pthread_mutex_unlock(&pool->mutex);
}

static void free_large(kina_pool *pool, home *giver, void *data, size_t nbytes) {
    pthread_mutex_lock(&pool->mutex);
    kina_block *block = kina_heap_lookup(&pool->heap, (uintptr_t)data);
    if (block && block->size == rounded(pool, nbytes))
        kina_heap_give(&pool->heap, block, giver->ordering ? &giver->index : &pool->anybodys, giver->epoch);
    else pool->counters.unknown_frees += 1;
    pthread_mutex_unlock(&pool->mutex);
}

static void put_back(kina_pool *pool, void *data, size_t nbytes, kina_stream *stream) {
    cache *cached = cache_of(pool, stream);
    if (!cached) return; /* the block stays out until the pool goes */
    cache_lock(cached);
    cached->live_bytes -= (int64_t)nbytes;
    cached->live_allocations -= 1;
    if (nbytes > pool->small_bytes) {
        cache_unlock(cached);
        free_large(pool, cached->home, data, nbytes);
        return;
    }
    unsigned rank = class_for(pool, nbytes);
    unsigned limit = pool->cache_limit[rank];
    if (cached->counts[rank] >= limit) {
        cache_unlock(cached);
        spill(pool, cached, rank, (limit + 1) / 2);
        cache_lock(cached);
    }
    cached->blocks[rank][cached->counts[rank]] = data;
    __atomic_store_n(&cached->counts[rank], (uint8_t)(cached->counts[rank] + 1), __ATOMIC_RELAXED);
    cache_unlock(cached);
}

static void pool_deallocate(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) {
    kina_pool *pool = (kina_pool *)self;
    put_back(pool, data, nbytes, stream);
    if (__atomic_load_n(&pool->forsaken, __ATOMIC_RELAXED)) kina_pool_trim(self, 0);
}

void kina_pool_keep_all(kina_resource *self, int keeps) {
    kina_pool *pool = (kina_pool *)self;
    pthread_mutex_lock(&pool->mutex);
    pool->keeps_all = keeps;
    pthread_mutex_unlock(&pool->mutex);
}

void kina_pool_forsake(kina_resource *self) {
    __atomic_store_n(&((kina_pool *)self)->forsaken, 1, __ATOMIC_RELAXED);
    kina_pool_trim(self, 0);
}

/* ------------------------------------------------------------------------------------------------ what is to be seen */

static void read_locked(kina_pool *pool, kina_pool_statistics *out) {
    int64_t held = 0;
    *out = pool->counters;
    out->live_bytes = pool->live_bytes;
    out->live_allocations = pool->live_allocations;
    out->total_allocations = pool->total_allocations;
    out->largest_free_bytes = (int64_t)kina_index_largest(&pool->anybodys);
    for (home *each = pool->homes; each; each = each->next) {
        int64_t largest = (int64_t)kina_index_largest(&each->index);
        if (largest > out->largest_free_bytes) out->largest_free_bytes = largest;
        out->pending_bytes += (int64_t)each->index.bytes;
        for (unsigned rank = 0; rank < CLASSES; rank++) held += (int64_t)(each->counts[rank] * class_bytes(pool, rank));
        for (cache *one = each->caches; one; one = one->sibling) {
            cache_lock(one);
            out->live_bytes += one->live_bytes;
            out->live_allocations += one->live_allocations;
            out->total_allocations += one->total_allocations;
            for (unsigned rank = 0; rank < CLASSES; rank++)
                held += (int64_t)(one->counts[rank] * class_bytes(pool, rank));
            cache_unlock(one);
        }
    }
    out->cached_bytes = held + (int64_t)pool->anybodys.bytes + out->pending_bytes;
    out->reserved_bytes = (int64_t)pool->heap.reserved_bytes;
    out->chunks = (int64_t)pool->heap.chunk_count;
    out->maximum_bytes = pool->maximum_bytes > INT64_MAX ? -1 : (int64_t)pool->maximum_bytes;
}

void kina_pool_read(kina_resource *self, kina_pool_statistics *out) {
    kina_pool *pool = (kina_pool *)self;
    pthread_mutex_lock(&registry);
    pthread_mutex_lock(&pool->mutex);
    read_locked(pool, out);
    pthread_mutex_unlock(&pool->mutex);
    pthread_mutex_unlock(&registry);
}

size_t kina_pool_streams(kina_resource *self, kina_pool_stream *out, size_t room_for) {
    kina_pool *pool = (kina_pool *)self;
    size_t known = 0;
    pthread_mutex_lock(&registry);
    pthread_mutex_lock(&pool->mutex);
    for (home *each = pool->homes; each; each = each->next, known++) {
        if (known >= room_for) continue;
        kina_pool_stream *one = &out[known];
        one->number = each->number;
        one->pending_bytes = (int64_t)each->index.bytes;
        one->cached_bytes = 0;
        for (unsigned rank = 0; rank < CLASSES; rank++) {
            unsigned number = each->counts[rank];
            for (cache *its = each->caches; its; its = its->sibling)
                number += __atomic_load_n(&its->counts[rank], __ATOMIC_RELAXED);
            one->cached_bytes += (int64_t)(number * class_bytes(pool, rank));
        }
    }
    pthread_mutex_unlock(&pool->mutex);
    pthread_mutex_unlock(&registry);
    return known;
}

static size_t trim(kina_pool *pool, size_t keep_bytes, kina_patience how) {
    pthread_mutex_lock(&registry);
    pthread_mutex_lock(&pool->mutex);
    raid(pool);
    harvest(pool);
    sweep_homes(pool);
    pthread_mutex_unlock(&registry);
    if (how == KINA_PATIENTLY) {
        wait_for_fences(pool, NULL);
        harvest(pool); /* what had passed by itself was not waited for */
    }
    kina_chunk *idle = detach_idle(pool, NULL, keep_bytes);
    pthread_mutex_unlock(&pool->mutex);
    return return_chunks(pool, idle, NULL);
}

void kina_pool_end_with(kina_resource *self, kina_stream *stream, kina_handle *fence) {
    kina_pool *pool = (kina_pool *)self;
    kina_handle *before = NULL;
    pthread_mutex_lock(&pool->mutex);
    home *ending = pool->homes;
    while (ending && ending->stream != stream) ending = ending->next;
    if (ending) {
        before = ending->ending;
        kina_retain(fence);
        ending->ending = fence;
    }
    pthread_mutex_unlock(&pool->mutex);
    kina_release(before);
}

size_t kina_pool_trim(kina_resource *self, size_t keep_bytes) {
    bury(KINA_QUIETLY);
    return trim((kina_pool *)self, keep_bytes, KINA_QUIETLY);
}

void kina_pool_return(kina_resource *self, kina_stream *stream) {
    kina_pool *pool = (kina_pool *)self;
    kina_chunk *idle = NULL;
    if (!self->upstream->vtable->supports_streams) return;
    pthread_mutex_lock(&registry);
    pthread_mutex_lock(&pool->mutex);
    home *ending = pool->homes;
    while (ending && ending->stream != stream) ending = ending->next;
    if (ending) {
        raid_home(ending);
        idle = detach_idle(pool, ending, 0);
    }
    pthread_mutex_unlock(&pool->mutex);
    pthread_mutex_unlock(&registry);
    return_chunks(pool, idle, stream);
}

void kina_pools_settle(void) { bury(KINA_FREELY); }

void kina_pools_trim_device(int device_id, kina_patience how) {
    bury(how);
    for (uint64_t last = UINT64_MAX;;) { /* pools are listed with the newest first, and may come and go meanwhile */
        pthread_mutex_lock(&registry);
        kina_pool *found = pools;
        while (found &&
               (found->number >= last || found->resource.device_id != device_id || !found->vtable.supports_streams ||
                (how == KINA_QUIETLY && !found->resource.upstream->vtable->supports_streams) ||
                !kina_retain_if_alive(found)))
            found = found->next;
        pthread_mutex_unlock(&registry);
        if (!found) return;
        last = found->number;
        trim(found, 0, how);
        kina_release(found);
    }
}

/* ------------------------------------------------------------------------------------------------- coming and going */

/* Nothing of a pool in `dying` is used by anybody; its chunks wait for fences. What has passed goes back. */
static int is_over(kina_pool *pool, kina_patience how, size_t *returned) {
    if (how == KINA_QUIETLY && !returns_at_once(pool->resource.upstream)) return 0;
    pthread_mutex_lock(&pool->mutex);
    if (how == KINA_PATIENTLY) wait_for_fences(pool, NULL);
    harvest(pool);
    kina_chunk *idle = detach_idle(pool, NULL, 0);
    int over = pool->heap.chunks == NULL;
    pthread_mutex_unlock(&pool->mutex);
    *returned += return_chunks(pool, idle, NULL);
    return over;
}

static void free_pool(kina_pool *pool) {
    for (home *each = pool->homes, *next; each; each = next) {
        next = each->next;
        drop_fences(each, each->fence_count);
        kina_release(each->ending);
        free(each);
    }
    kina_heap_clear(&pool->heap);
    pthread_mutex_destroy(&pool->mutex);
    kina_release(pool->resource.upstream);
    free(pool);
}

/* See to the pools that wait, with no lock held: the bytes that went back. */
static size_t bury(kina_patience how) {
    size_t returned = 0;
    if (__atomic_load_n(&dying, __ATOMIC_RELAXED) == NULL) return 0;
    pthread_mutex_lock(&registry);
    kina_pool *taken = dying, *next;
    __atomic_store_n(&dying, NULL, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&registry);
    for (; taken; taken = next) {
        next = taken->next;
        if (is_over(taken, how, &returned)) {
            free_pool(taken);
            continue;
        }
        pthread_mutex_lock(&registry);
        taken->next = dying;
        __atomic_store_n(&dying, taken, __ATOMIC_RELAXED);
        pthread_mutex_unlock(&registry);
    }
    return returned;
}

static void destroy_pool(kina_handle *handle) {
    kina_pool *pool = (kina_pool *)handle;
    pthread_mutex_lock(&registry);
    if (pool->previous) pool->previous->next = pool->next;
    else pools = pool->next;
    if (pool->next) pool->next->previous = pool->previous;
    pthread_mutex_lock(&pool->mutex);
    for (home *each = pool->homes; each; each = each->next) retire_home(each);
    pthread_mutex_unlock(&pool->mutex);
    pool->next = dying;
    __atomic_store_n(&dying, pool, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&registry);
    bury(KINA_QUIETLY);
}

int kina_pool_create(kina_resource **out, kina_resource *upstream, const kina_pool_options *options) {
    kina_pool *pool = calloc(1, sizeof(*pool));
    if (!pool) return KINA_OUT_OF_MEMORY;
    bury(KINA_QUIETLY);
    kina_handle_init(&pool->resource.handle, destroy_pool);
    pool->vtable.version = KINA_RESOURCE_VERSION;
    pool->vtable.supports_streams = upstream->device_type == KINA_DEVICE_CUDA ||
                                    upstream->device_type == KINA_DEVICE_CUDA_MANAGED; /* the host has no streams */
    pool->vtable.name = "PoolMemoryResource";
    pool->vtable.allocate = pool_allocate;
    pool->vtable.deallocate = pool_deallocate;
    pool->vtable.try_allocate = pool_try_allocate;
    if (upstream->vtable->make_room) pool->vtable.make_room = pool_make_room;
    pool->resource.vtable = &pool->vtable;
    kina_retain(upstream);
    pool->resource.upstream = upstream;
    pool->resource.device_type = upstream->device_type;
    pool->resource.device_id = upstream->device_id;
    pool->resource.flags = upstream->flags;
    pool->alignment = options->alignment;
    pool->shift = (unsigned)__builtin_ctzll(options->alignment);
    pool->heap.shift = pool->shift;
    pool->small_bytes = units_of(CLASSES - 1) << pool->shift;
    for (unsigned rank = 0; rank < CLASSES; rank++) {
        pool->cache_limit[rank] = (uint8_t)fitting(class_bytes(pool, rank), DEPTH, CACHED);
        pool->bin_limit[rank] = (uint8_t)fitting(class_bytes(pool, rank), BIN_DEPTH, BINNED);
    }
    pool->initial_bytes = options->initial_bytes;
    pool->maximum_bytes = options->maximum_bytes;
    pool->growth_bytes = options->growth_bytes;
    pool->keeps_all = options->keeps_all;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_mutex_lock(&registry);
    pool->number = ++pools_made;
    pool->next = pools;
    if (pools) pools->previous = pool;
    pools = pool;
    pthread_mutex_unlock(&registry);
    *out = &pool->resource;
    return 0;
}

void kina_pool_set_reporter(kina_pool_reporter reporter) { report = reporter; }

/* What runs before a fork runs in the reverse order of its registration, so pools register again behind each library that is
 * called under their locks; the first to run of them all takes the locks, the last gives them back. */
static _Thread_local int fork_handlers KINA_INITIAL_EXEC;

/* A child has nothing of a device, so that nothing of such a pool need be whole there. */
static int of_device(const kina_pool *pool) { return pool->vtable.supports_streams != 0; }

static void hold_for_fork(void) {
    if (fork_handlers++ > 0) return;
    pthread_mutex_lock(&registry);
    for (kina_pool *each = pools; each; each = each->next)
        if (!of_device(each)) pthread_mutex_lock(&each->mutex);
}

static void let_go(void) {
    if (--fork_handlers > 0) return;
    for (kina_pool *each = pools; each; each = each->next)
        if (!of_device(each)) pthread_mutex_unlock(&each->mutex);
    pthread_mutex_unlock(&registry);
}

/* The other threads are not here. A cache that one of them was busy with is not whole: what it holds stays out. And a
 * device is not here: of its memory nothing is handed out or given back any more. */
static void let_go_in_child(void) {
    if (fork_handlers > 1) {
        fork_handlers -= 1;
        return;
    }
    for (kina_pool *each = pools; each; each = each->next) {
        int gone = of_device(each);
        for (home *one = each->homes; one; one = one->next) {
            for (cache *its = one->caches; its; its = its->sibling) {
                if (its->lock || gone) memset(its->counts, 0, sizeof(its->counts));
                its->lock = 0;
            }
            if (!gone) continue;
            memset(one->counts, 0, sizeof(one->counts));
            memset(&one->index, 0, sizeof(one->index));
        }
        if (!gone) continue;
        pthread_mutex_init(&each->mutex, NULL); /* another thread may have had it */
        memset(&each->anybodys, 0, sizeof(each->anybodys));
        unsigned shift = each->heap.shift;
        memset(&each->heap, 0, sizeof(each->heap)); /* leaked: another thread may have been in the middle of it */
        each->heap.shift = shift;
    }
    let_go();
}

int kina_pool_setup(void) {
    if (pthread_key_create(&thread_key, end_thread) != 0) return -1;
    return kina_pool_watch_forks();
}

int kina_pool_watch_forks(void) { return pthread_atfork(hold_for_fork, let_go, let_go_in_child) == 0 ? 0 : -1; }
