/* The C state of kina.cuda: what must outlive a Python object or be touched without the GIL.
 * Types and stateless inlines only; the functions over them live in the modules of the same names. */
#ifndef KINA_CUDA_HANDLES_H
#define KINA_CUDA_HANDLES_H

#include <cuda.h>
#include <pthread.h>
#include <stdlib.h>

#include "kina_status.h"
#include "kina_tensor.h"

#define KINA_IDLE_STREAMS 32      /* streams a device keeps for the next Runtime */
#define KINA_IDLE_EVENTS 256      /* events a device keeps for the next seal */
#define KINA_IMMORTAL_STREAMS 256 /* PyTorch has 32 of each priority */
#define KINA_SEAL_LEASES 512      /* a segment of this many leases is sealed */
#define KINA_STAGING_CLASSES 2    /* 64 KiB for small transfers, 4 MiB for the chunks of large ones */
#define KINA_STAGING_BLOCKS 16    /* blocks of each class; beyond them a Runtime waits for its own transfers */

struct kina_runtime;
struct kina_segment;
struct kina_capture;
struct kina_held_free;
struct kina_session_node;

/* A device of the process: immortal, one per ordinal. `mutex` guards the idle lists, the orphans and the
 * quarantine; nothing but list work happens under it. */
typedef struct kina_device {
    int ordinal;
    CUdevice device;
    CUcontext context; /* the primary context, retained once for the process */
    unsigned long long context_id;
    int opened;   /* atomic */
    int poisoned; /* atomic; `cause` is complete before it is set */
    kina_error cause;
    pthread_mutex_t mutex;
    /* limits of a launch, cached */
    unsigned int max_threads_per_block;
    unsigned int max_block[3];
    unsigned int max_grid[3];
    unsigned int max_shared_bytes;       /* without opting in */
    unsigned int max_shared_optin_bytes; /* static + dynamic, opted in */
    unsigned int pools_supported;
    unsigned int cooperative_launch;
    unsigned int cluster_launch;
    CUstream idle_streams[KINA_IDLE_STREAMS];
    int idle_stream_count;
    CUevent idle_events[KINA_IDLE_EVENTS];
    int idle_event_count;
    struct kina_staging *idle_staging[KINA_STAGING_CLASSES];
    int staging_count[KINA_STAGING_CLASSES]; /* blocks that exist, idle or in flight */
    kina_resource *memory;                   /* where its Runtimes have their chunks from; made with the first */
    struct kina_idle_pool *idle_pools;       /* memory pools that wait for the next resource */
    struct kina_idle_pool *lent_pools;       /* those that resources have */
    CUstream probe_stream;                   /* atomic: waits for events of others first; NULL while it is out */
    CUstream private_stream;                 /* orders what no stream orders; made at first use */
    struct kina_runtime *runtimes;           /* every live Runtime of the device, for the OOM ladder */
    pthread_mutex_t looking;                 /* before `mutex`: while the seals of `orphans` or `retired` are asked */
    struct kina_segment *orphans;            /* sealed segments of Runtimes that are gone */
    int holding;                             /* atomic: sealed segments that hold foreign owners */
    struct kina_orphan_storage *quarantine;
    struct kina_segment *retired, *retired_last; /* memory without stream order that was dropped, the oldest first */
    struct kina_module *dead_modules;            /* to be unloaded where waiting is allowed */
    struct kina_capture *dropped_captures;       /* whose graphs are gone, by word of the driver */
    struct kina_held_free *held_frees;           /* of streams that were being captured */
    int captures;                                /* atomic: kina's own that are open */
    /* Waits for the whole device, numbered: the newest that began, and the newest that succeeded. */
    uint64_t waits_begun, waits_passed; /* atomic */
    int wait_wanted;                    /* atomic: the next synchronize waits for the whole device */
    /* Streams of other libraries that are known to live as long as the process. Appended to under `mutex`. */
    CUstream immortal_streams[KINA_IMMORTAL_STREAMS];
    int immortal_stream_count; /* atomic */
} kina_device;

/* Storage whose foreign users cannot be fenced: kept until the next synchronize of the device. */
typedef struct kina_orphan_storage {
    struct kina_orphan_storage *next;
    kina_storage *storage;
} kina_orphan_storage;

/* A memory pool of the driver: idle, or lent to a resource, which has the entry in it. */
typedef struct kina_idle_pool {
    struct kina_idle_pool *next;
    CUmemoryPool pool;
} kina_idle_pool;

/* One recorded event. It returns to the device's idle list when nobody refers to the seal any more. */
typedef struct kina_seal {
    kina_handle handle;
    kina_device *device;
    CUevent event;
    uint64_t number; /* of its Runtime, ascending */
    int complete;    /* atomic: seen complete once, never asked again */
} kina_seal;

/* What must not wait for the next occasion: memory and objects of others; pinned blocks, of which there are few. */
enum { KINA_OWNER = 1, KINA_STAGING = 2 };

/* Leases: what is held until the device is past it. */
typedef struct kina_leases {
    kina_handle **handles; /* owned references */
    int count;
    int capacity;
    int urgent; /* KINA_OWNER, KINA_STAGING: of what is leased */
} kina_leases;

/* 1: it has a reference of its own now; 0: it had one; -1: no host memory. */
static inline int kina_leases_add(kina_leases *leases, void *handle, int urgent) {
    kina_handle **grown;
    int i, capacity;
    /* A loop of launches uses the same few owners: the newest leases are looked through before one is added. */
    for (i = leases->count - 1; i >= 0 && i > leases->count - 9; --i)
        if ((void *)leases->handles[i] == handle) return 0;
    if (leases->count == leases->capacity) {
        capacity = leases->capacity > 8 ? 2 * leases->capacity : 16;
        grown = (kina_handle **)realloc(leases->handles, (size_t)capacity * sizeof(kina_handle *));
        if (!grown) return -1;
        leases->handles = grown;
        leases->capacity = capacity;
    }
    kina_retain(handle);
    leases->handles[leases->count++] = (kina_handle *)handle;
    leases->urgent |= urgent;
    return 1;
}

/* Drops them, which may run anybody's code; no other use follows. */
static inline void kina_leases_end(kina_leases *leases) {
    int i;
    for (i = 0; i < leases->count; ++i) kina_release(leases->handles[i]);
    free(leases->handles);
}

/* What was leased between two seals. Of what is urgent a session's exit takes care, and of owners the reaper too. */
typedef struct kina_segment {
    struct kina_segment *next;
    kina_seal *seal; /* NULL while open */
    kina_leases leases;
} kina_segment;

/* What the replays of a graph use, from the beginning of its capture on. Held by the Runtime while its stream is being
 * captured; then by the graph: kina's own, and the segments with its replays, or, through the driver, somebody else's. */
typedef struct kina_capture {
    kina_handle handle;
    kina_device *device;
    uint64_t id;           /* the driver's, of the capture */
    kina_resource **pools; /* owned references: of what is allocated in it, one for each resource chosen */
    int pool_count;
    struct kina_session_node *node; /* borrowed: where kina's own began; NULL once that is over, and for others' */
    kina_leases leases;
    int unended;               /* kina's own, and the driver would not end it: asked again at the next call */
    CUgraphExec graph;         /* owned: kina's own, once it is made */
    struct kina_capture *next; /* in device->dropped_captures */
} kina_capture;

/* Memory whose release is ordered on a stream that was being captured then. */
typedef struct kina_held_free {
    struct kina_held_free *next;
    kina_resource *resource; /* owned reference */
    kina_stream *stream;     /* owned reference */
    void *data;
    size_t nbytes;
} kina_held_free;

typedef struct kina_counters {
    uint64_t launches;
    uint64_t graph_launches;
    uint64_t events_recorded;
    uint64_t event_queries;
    uint64_t seals;
    uint64_t leases;
    uint64_t retired;
    uint64_t reaped;
    uint64_t leaked;
    uint64_t synchronizations;
    uint64_t host_waits;
    uint64_t bytes_to_device;
    uint64_t bytes_to_host;
    uint64_t modules_loaded;
    uint64_t modules_evicted;
    uint64_t unloads_deferred;
} kina_counters;

/* A raw block: what its refs and launches check. Owned by the RawSession's face. */
typedef struct kina_ref {
    struct kina_ref *previous, *next;
    uint64_t low, high; /* absolute byte span */
    int writable;
    int alive;
} kina_ref;

typedef struct kina_raw_block {
    struct kina_raw_block *outer; /* the raw block of the same Runtime that this one is nested in */
    struct kina_session_node *node;
    kina_ref *refs;
    int alive;
} kina_raw_block;

/* A Runtime: begins with the stream that its storages know as their home. The open segment and `block` belong to
 * the thread that has it open; `mutex` guards the sealed segments, which other threads may harvest. */
typedef struct kina_runtime {
    kina_stream stream;
    kina_device *device;
    struct kina_runtime *next, *previous; /* in device->runtimes */
    int adopted;
    int lost;                     /* its stream is being captured for good, and is not used again */
    int closed;                   /* atomic */
    void *stream_owner;           /* Python object, owned: keeps an adopted stream alive */
    uint64_t open_state;          /* atomic: thread token << 16 | times opened */
    unsigned long long stream_id; /* the driver's */
    kina_resource *memory;        /* owned: the pool of its tensors by default; NULL: it lends to others alone */
    kina_raw_block *block;        /* the innermost open raw block */
    struct kina_capture *capture; /* atomic, owned: what its stream is being captured into, or NULL */
    uint64_t segment_number;      /* changes with the open segment, and with `capture` */
    kina_segment *open;
    pthread_mutex_t mutex;
    kina_segment *oldest, *newest; /* sealed, in order */
    uint64_t pending_leases;
    kina_counters counters;
} kina_runtime;

/* Another stream than the home stream that may use exported memory, and is known to live as long as it is noted. */
struct kina_foreign_use {
    kina_foreign_use *next;
    kina_runtime *runtime; /* owned reference; NULL: of a stream that lives as long as the process */
    CUstream native;
    int leased; /* the Runtime leases what it uses: nothing is to be fenced */
};

/* A block of pinned memory on its way. */
typedef struct kina_staging {
    kina_handle handle;
    struct kina_staging *next; /* in device->idle_staging */
    kina_device *device;
    int size_class;
    void *data;
} kina_staging;

/* A loaded module. Held by the face, its functions, the cache, and every segment that launched from it. */
typedef struct kina_module {
    kina_handle handle;
    kina_device *device;
    CUmodule module;
    struct kina_module *next; /* in device->dead_modules */
    uint64_t leased_in;       /* runtime number and segment of the newest lease: one lease per segment is enough */
    uint64_t leased_by;
} kina_module;

/* An entered session, in the list of its thread. Owned by the session's face while OPEN; by the list once ABANDONED,
 * until the thread comes by; CLOSED when its thread has ended first, and again the face's to free. */
enum kina_node_state { KINA_NODE_OPEN = 0, KINA_NODE_ABANDONED = 1, KINA_NODE_CLOSED = 2 };

typedef struct kina_session_node {
    struct kina_session_node *below, *above;
    kina_runtime *runtime; /* borrowed from the face while OPEN; owned once ABANDONED */
    CUcontext saved;       /* what was current when it was entered */
    int pushes;            /* entries it put, or took over, on the context stack */
    int calls;             /* of the session that are under way, under the GIL: it cannot be left meanwhile */
    int state;             /* atomic */
    uint64_t thread;
    void *face; /* borrowed PyObject, NULL once the face is gone */
} kina_session_node;

typedef struct kina_thread {
    uint64_t token;
    kina_session_node *top;
    kina_session_node *spare; /* the node freed last: sessions come and go one at a time */
    void *runtimes;           /* Python object, owned: the thread's default and adopted Runtimes */
    void *recent;             /* borrowed from it: the default Runtime asked for last */
    int recent_ordinal;
} kina_thread;

#endif
