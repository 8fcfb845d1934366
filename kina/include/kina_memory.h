/* Handles, streams and memory resources: the types that every room of kina shares.
 *
 * Types and stateless inlines only. Anything `static` and mutable here would silently become one
 * copy per extension module; mutable state lives in exactly one .pyx (tests/test_house.py checks).
 */
#ifndef KINA_MEMORY_H
#define KINA_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* For the one pointer per module that kina keeps in thread-local storage: found without a call. The blocks of all
 * libraries loaded at run time share a small reserve for such variables, so they stay single words. */
#if defined(__GNUC__) && defined(__ELF__)
#define KINA_INITIAL_EXEC __attribute__((tls_model("initial-exec")))
#else
#define KINA_INITIAL_EXEC
#endif

/* Every shared C object begins with a kina_handle. `destroy` runs exactly once, on whichever thread
 * drops the last reference: it may not assume the GIL, a current CUDA context or a kina lock. */
typedef struct kina_handle {
    int64_t references;
    void (*destroy)(struct kina_handle *self);
} kina_handle;

static inline void kina_handle_init(kina_handle *handle, void (*destroy)(kina_handle *)) {
    handle->references = 1;
    handle->destroy = destroy;
}

static inline void kina_retain(void *object) {
    if (object) __atomic_fetch_add(&((kina_handle *)object)->references, 1, __ATOMIC_RELAXED);
}

/* For weak references under the lock of their list: 0 if the last reference went already. */
static inline int kina_retain_if_alive(void *object) {
    int64_t *references = &((kina_handle *)object)->references;
    int64_t seen = __atomic_load_n(references, __ATOMIC_RELAXED);
    while (seen != 0)
        if (__atomic_compare_exchange_n(references, &seen, seen + 1, 1, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return 1;
    return 0;
}

static inline void kina_release(void *object) {
    kina_handle *handle = (kina_handle *)object;
    if (handle && __atomic_fetch_sub(&handle->references, 1, __ATOMIC_ACQ_REL) == 1) handle->destroy(handle);
}

typedef struct kina_stream kina_stream;

/* How what streams do is put in order, given by whoever makes streams. All are called from any thread, several at once,
 * with or without the GIL, with any context current or none. */
typedef struct kina_stream_order {
    /* A fence behind all that was enqueued on `stream` so far: 0, and *fence holds a reference; or a detail code. */
    int (*record)(kina_stream *stream, kina_handle **fence);
    /* 1 once what is before the fence has ended, 0 before, -1 if that cannot be known any more. Never waits. */
    int (*query)(kina_handle *fence);
    /* What is enqueued on `stream` from now on waits for the fence, on the device. 0 or a detail code. */
    int (*order)(kina_stream *stream, kina_handle *fence);
    /* Wait on the host for what is before the fence, on behalf of `waiter`, or of nobody (NULL). 0 or a detail code. */
    int (*wait)(kina_handle *fence, kina_stream *waiter);
} kina_stream_order;

/* The home of an allocation: which stream orders its release, and whose domain it belongs to.
 * A CUDA Runtime's handle begins with one; host memory has none (NULL). */
struct kina_stream {
    kina_handle handle;
    uint64_t number;  /* ours, never reused */
    uint64_t runtime; /* RuntimeIdentity */
    uint64_t domain;  /* AllocationDomainId */
    void *native;     /* CUstream */
    int32_t device_id;
    int32_t reserved;
    const kina_stream_order *ordering;
    struct kina_stream_watch *watches; /* who wants to know when it closes; pool.h */
};

/* A memory resource: a table of functions, a reference count and whatever its maker appends.
 * `allocate` returns 0 or a detail code of kina_status.h (KINA_OUT_OF_MEMORY, most likely); kina's own also record the
 * error of the calling thread. Both functions are called from any thread, several at once, with or without the GIL, and
 * hold no lock while they call another resource. */
#define KINA_RESOURCE_VERSION 1u
/* The name of a Python capsule that brings a kina_resource: it lends one reference, takers retain their own. */
#define KINA_RESOURCE_CAPSULE "kina_resource"

/* The resource, or one below it, calls Python: whoever keeps memory of it keeps its Python object alive too. */
#define KINA_RESOURCE_PYTHON 1u

typedef struct kina_resource kina_resource;

typedef struct kina_resource_vtable {
    uint32_t version;          /* KINA_RESOURCE_VERSION */
    uint32_t supports_streams; /* nonzero: allocation and release are ordered on `stream` */
    const char *name;
    /* *out receives at least nbytes, aligned to 256 bytes. nbytes is never 0. In the order of `stream`; if that is
     * NULL, or the resource does not support streams, the memory may be used at once, on any. */
    int (*allocate)(kina_resource *self, void **out, size_t nbytes, kina_stream *stream);
    /* nbytes is the size that was asked for. In the order of `stream`; if that is NULL, or the resource does not
     * support streams, all uses are over. Never fails visibly: what cannot be freed is leaked. */
    void (*deallocate)(kina_resource *self, void *data, size_t nbytes, kina_stream *stream);
    /* As `allocate`, but with KINA_OUT_OF_MEMORY where only somebody's help could give some (see make_room), or, unless
     * `may_wait`, only a wait on the host. NULL if it has no such. */
    int (*try_allocate)(kina_resource *self, void **out, size_t nbytes, kina_stream *stream, int may_wait);
    /* Ask for somebody's help, without a wait on the host: a user's callback, at this resource or below it, may make room
     * for nbytes. *made: 1 if it says that it has, and it is worth asking again; 0 if nobody helps. 0, or the detail code
     * of a failure that ends the request. NULL if there is nobody to be asked. Called with no lock held. */
    int (*make_room)(kina_resource *self, size_t nbytes, int *made);
} kina_resource_vtable;

struct kina_resource {
    kina_handle handle;
    const kina_resource_vtable *vtable;
    kina_resource *upstream; /* owned reference to where it gets its memory, or NULL; `destroy` releases it */
    int32_t device_type;     /* of the memory that it hands out, in DLPack's numbers (enum kina_device_type) */
    int32_t device_id;
    uint32_t flags; /* KINA_RESOURCE_PYTHON */
    uint32_t reserved;
};

/* What a resource may do for a request. */
typedef enum kina_asking {
    KINA_ASK_QUIETLY = 0,   /* nothing that waits on the host */
    KINA_ASK_PATIENTLY = 1, /* waits */
    KINA_ASK_FOR_ALL = 2    /* and, before it waits, a call for help: what `allocate` does */
} kina_asking;

/* Ask `resource` for memory in that way, where it knows the difference. For those that have an upstream. */
static inline int kina_ask(kina_resource *resource, void **out, size_t nbytes, kina_stream *stream, kina_asking how) {
    const kina_resource_vtable *functions = resource->vtable;
    if (how != KINA_ASK_FOR_ALL && functions->try_allocate)
        return functions->try_allocate(resource, out, nbytes, stream, how == KINA_ASK_PATIENTLY);
    return functions->allocate(resource, out, nbytes, stream);
}

#ifdef __cplusplus
}
#endif
#endif
