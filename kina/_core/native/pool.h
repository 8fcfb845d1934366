/* A pool over any memory resource: a resource itself, which keeps what it got from its upstream and hands it out again.
 *
 * Three levels. Each thread has a cache per pool and stream, for which it takes an uncontended lock. Behind the caches of
 * a stream are its bins, filled and emptied in batches. Behind those is the heap (blocks.h): one index of free blocks
 * per stream, in whose order they were freed, and one for those that anybody may have. A stream's own memory is its
 * own at once; it becomes anybody's when a fence behind its release has passed.
 *
 * Any function may be called from any thread. Nothing is waited for, and the upstream and its streams' fences are
 * not called, while a lock is held that `allocate` or `deallocate` of a cached block need; see pool.c for the locks.
 */
#ifndef KINA_POOL_H
#define KINA_POOL_H

#include "kina_memory.h"
#include "kina_status.h"

typedef struct kina_pool kina_pool;

/* In a stream's list of those who want to know when it closes. */
typedef struct kina_stream_watch {
    struct kina_stream_watch *next, **link;
} kina_stream_watch;

typedef struct kina_pool_options {
    size_t initial_bytes; /* of the first chunk, at least; allocated when memory is first asked for */
    size_t maximum_bytes; /* of all chunks together; SIZE_MAX: no limit */
    size_t growth_bytes;  /* of a further chunk, at least; 0: an eighth of what is reserved, 2 MiB to 256 MiB */
    size_t alignment;     /* a power of two, 256 or more: of addresses, and what sizes are rounded up to */
    int keeps_all;        /* nothing goes back to the upstream before kina_pool_keep_all(pool, 0) */
} kina_pool_options;

typedef struct kina_pool_statistics {
    int64_t live_bytes; /* as they were asked for */
    int64_t live_allocations;
    int64_t total_allocations;
    int64_t reserved_bytes; /* of the upstream's memory */
    int64_t peak_reserved_bytes;
    int64_t cached_bytes;  /* free, and to be had without a wait: for its stream, or for anybody */
    int64_t pending_bytes; /* of them: in the order of a stream that may not be past their release yet */
    int64_t largest_free_bytes;
    int64_t chunks;
    int64_t maximum_bytes; /* -1: no limit */
    /* How often: a chunk was taken from the upstream or given back; the ladder's rungs served a request. */
    int64_t grown, returned;
    int64_t rescued_by_harvest, rescued_by_raid, rescued_by_stealing, rescued_by_returning, rescued_by_callback,
        rescued_by_waiting;
    int64_t refused;       /* requests that could not be served */
    int64_t unknown_frees; /* addresses that the pool never gave, or with another size: left alone */
} kina_pool_statistics;

typedef struct kina_pool_stream {
    uint64_t number;       /* of the stream; 0: memory without a stream */
    int64_t cached_bytes;  /* in its threads' caches and its bins */
    int64_t pending_bytes; /* in the heap, in its order */
} kina_pool_stream;

/* What `allocate` calls before it returns KINA_OUT_OF_MEMORY, to record it, and with 0 where the upstream's error came to
 * nothing, because the request was served in another way. `in_vain`: the upstream was asked, and recorded its error if
 * it records any. With no lock held; may be NULL. */
typedef void (*kina_pool_reporter)(const kina_resource *pool, int detail, const kina_memory_figures *figures,
                                   int in_vain);
void kina_pool_set_reporter(kina_pool_reporter reporter);

/* A new pool with one reference, over `upstream`, of which it takes its own: 0 or KINA_OUT_OF_MEMORY. */
int kina_pool_create(kina_resource **out, kina_resource *upstream, const kina_pool_options *options);

/* Memory of `pool` from what the calling thread keeps: nothing is called, and no lock but the thread's own taken. Whether
 * there was some; not if `pool` is no pool. nbytes is not 0. */
int kina_pool_take(kina_resource *pool, void **out, size_t nbytes, kina_stream *stream);

/* Give chunks that are free back to the upstream until no more than keep_bytes are reserved. Waits for nothing; memory
 * whose stream is not past its release stays. The bytes given back. */
size_t kina_pool_trim(kina_resource *pool, size_t keep_bytes);

/* Give back, in the order of `stream`, every chunk that is free for it. Waits for nothing. For whoever ends the stream, with
 * nothing else using it; only over an upstream that supports streams, else it does nothing. */
void kina_pool_return(kina_resource *pool, kina_stream *stream);

/* When the stream closes, `fence` is behind everything that uses memory which the pool has in its order, and nothing is
 * recorded on it then: it may be no more. Takes a reference of its own; NULL: the stream is in use again. Of a stream that the
 * pool does not know, it does nothing. */
void kina_pool_end_with(kina_resource *pool, kina_stream *stream, kina_handle *fence);

/* Whether chunks stay, whatever happens. */
void kina_pool_keep_all(kina_resource *pool, int keeps);

/* From now on free chunks go back at once, as by kina_pool_trim(pool, 0): nobody is left to ask for memory. */
void kina_pool_forsake(kina_resource *pool);

/* What may happen where memory is short. */
typedef enum {
    KINA_QUIETLY,  /* nothing that waits */
    KINA_FREELY,   /* releases of an upstream without stream order, where drivers wait for the device */
    KINA_PATIENTLY /* and waits for fences, and whatever the upstream does */
} kina_patience;

/* Pools that are gone give back what they could not give back without a wait. For where waiting is allowed. */
void kina_pools_settle(void);
/* Trim every pool of memory of a CUDA device: what one keeps must not starve what is no pool. */
void kina_pools_trim_device(int device_id, kina_patience how);

void kina_pool_read(kina_resource *pool, kina_pool_statistics *out);
/* Up to `room` streams that the pool knows; how many it knows. */
size_t kina_pool_streams(kina_resource *pool, kina_pool_stream *out, size_t room);

/* Whoever made a stream calls this before it can no longer be used, with nothing else using it: every pool makes
 * what it keeps in the stream's order independent of it. Never waits. */
void kina_stream_closing(kina_stream *stream);

/* Around a wait on the host for the stream: what was freed in its order before the first is anybody's after the second,
 * which is called only if the wait succeeded. */
void kina_stream_awaited(kina_stream *stream);
void kina_stream_passed(kina_stream *stream);

/* Call once before anything else: watches threads and forks. 0, or -1 if that cannot be done. */
int kina_pool_setup(void);
/* Call again once a library is loaded whose calls fences make: before a fork, locks are then taken in the order in which they
 * are taken here, the pools' before that library's. The same. */
int kina_pool_watch_forks(void);

#endif
