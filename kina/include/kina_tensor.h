/* The tensor ABI: DLPack's structures under kina's names, the storage behind a tensor, the tensor.
 *
 * Written from the DLPack 1.3 specification. `kina_tensor` begins with the exact DLTensor prefix, so a
 * `kina_tensor *` may be read as a `DLTensor *`; the way back is not safe. Types and stateless
 * inlines only.
 *
 * Who owns what:
 * - A storage is counted. Whoever keeps one calls kina_retain, and kina_release once for each, on any thread, with or
 *   without the GIL, whatever context is current. The last release gives the memory back, in the order of the home stream
 *   and of every other stream that is known to use it, or later, once nothing can use it any more. It never waits.
 * - A tensor owns one reference to its storage, and its shape and strides. A `kina_tensor *` got from a Tensor object is
 *   borrowed: good as long as the object. Its layout never changes; nobody writes to its fields.
 * - A managed tensor of DLPack that kina hands out owns one reference to the storage, and is one block of memory with its
 *   shape and strides: its deleter gives back both, once, under the same freedoms. It may be called after the session, the
 *   Runtime or the interpreter has ended.
 * - A managed tensor that kina takes over is owed one call of its deleter, which comes from whichever thread drops the last
 *   reference, without the GIL, after every use that sessions have enqueued; not at all once the interpreter is ending.
 */
#ifndef KINA_TENSOR_H
#define KINA_TENSOR_H

#include "kina_memory.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KINA_DLPACK_MAJOR 1u
#define KINA_DLPACK_MINOR 3u
#define KINA_MAX_NDIM 64

enum kina_device_type {
    KINA_DEVICE_CPU = 1,
    KINA_DEVICE_CUDA = 2,
    KINA_DEVICE_CUDA_HOST = 3,
    KINA_DEVICE_CUDA_MANAGED = 13
};

enum kina_dtype_code {
    KINA_DTYPE_INT = 0,
    KINA_DTYPE_UINT = 1,
    KINA_DTYPE_FLOAT = 2,
    KINA_DTYPE_OPAQUE = 3,
    KINA_DTYPE_BFLOAT = 4,
    KINA_DTYPE_COMPLEX = 5,
    KINA_DTYPE_BOOL = 6,
    KINA_DTYPE_FLOAT8_E3M4 = 7,
    KINA_DTYPE_FLOAT8_E4M3 = 8,
    KINA_DTYPE_FLOAT8_E4M3B11FNUZ = 9,
    KINA_DTYPE_FLOAT8_E4M3FN = 10,
    KINA_DTYPE_FLOAT8_E4M3FNUZ = 11,
    KINA_DTYPE_FLOAT8_E5M2 = 12,
    KINA_DTYPE_FLOAT8_E5M2FNUZ = 13,
    KINA_DTYPE_FLOAT8_E8M0FNU = 14,
    KINA_DTYPE_FLOAT6_E2M3FN = 15,
    KINA_DTYPE_FLOAT6_E3M2FN = 16,
    KINA_DTYPE_FLOAT4_E2M1FN = 17
};

typedef struct kina_dl_device {
    int32_t device_type;
    int32_t device_id;
} kina_dl_device;

typedef struct kina_dl_dtype {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} kina_dl_dtype;

typedef struct kina_dl_tensor {
    void *data;
    kina_dl_device device;
    int32_t ndim;
    kina_dl_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL means C-contiguous */
    uint64_t byte_offset;
} kina_dl_tensor;

typedef struct kina_dl_managed_tensor {
    kina_dl_tensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(struct kina_dl_managed_tensor *self);
} kina_dl_managed_tensor;

typedef struct kina_dl_version {
    uint32_t major;
    uint32_t minor;
} kina_dl_version;

#define KINA_DLPACK_FLAG_READ_ONLY 1u
#define KINA_DLPACK_FLAG_IS_COPIED 2u
#define KINA_DLPACK_FLAG_SUBBYTE_TYPE_PADDED 4u

typedef struct kina_dl_managed_tensor_versioned {
    kina_dl_version version;
    void *manager_ctx;
    void (*deleter)(struct kina_dl_managed_tensor_versioned *self);
    uint64_t flags;
    kina_dl_tensor dl_tensor;
} kina_dl_managed_tensor_versioned;

/* The C exchange table of a type: DLPack's fast way from one library to another, without a capsule. A type has it as its
 * attribute __dlpack_c_exchange_api__, a capsule named KINA_DLPACK_EXCHANGE_CAPSULE. Every function needs the GIL but the
 * allocator, and returns 0, or -1 with a Python exception set. None orders one stream after another: whoever imports asks
 * current_work_stream, and works there or waits for it. A table lives as long as the process. */
#define KINA_DLPACK_EXCHANGE_CAPSULE "dlpack_exchange_api"

typedef struct kina_dl_exchange_header {
    kina_dl_version version;                  /* beyond these two fields only another major version may differ */
    struct kina_dl_exchange_header *prev_api; /* the table of an older major version; NULL: there is none */
} kina_dl_exchange_header;

typedef struct kina_dl_exchange_api {
    kina_dl_exchange_header header;
    /* A new tensor of the prototype's dtype, shape and device. Failure is told to set_error, with the name of an
     * exception, and needs no GIL. */
    int (*managed_tensor_allocator)(kina_dl_tensor *prototype, kina_dl_managed_tensor_versioned **out, void *error_ctx,
                                    void (*set_error)(void *error_ctx, const char *kind, const char *message));
    /* The tensor of an object, owned: *out owes a call of its deleter. */
    int (*managed_tensor_from_py_object_no_sync)(void *object, kina_dl_managed_tensor_versioned **out);
    /* An object of a tensor, which is taken over also on failure; *out_object is an owned reference. */
    int (*managed_tensor_to_py_object_no_sync)(kina_dl_managed_tensor_versioned *tensor, void **out_object);
    /* The tensor of an object, borrowed until control returns to whoever holds the object; may be NULL. */
    int (*dltensor_from_py_object_no_sync)(void *object, kina_dl_tensor *out);
    /* The stream that the library works on now, in this thread. */
    int (*current_work_stream)(int32_t device_type, int32_t device_id, void **out_stream);
} kina_dl_exchange_api;

/* One allocation. Owned memory goes back to `resource` in the order of `stream`; adopted memory is
 * handed to `release_owner`. It holds its resource and its stream, so teardown order is structural. */
#define KINA_STORAGE_READ_ONLY 1u
#define KINA_STORAGE_ADOPTED 2u
#define KINA_STORAGE_SHARED 4u /* adopted of another storage, which is its owner */

typedef struct kina_foreign_use kina_foreign_use;

typedef struct kina_storage {
    kina_handle handle;
    void *data;
    size_t nbytes;
    kina_resource *resource; /* owned reference; NULL when adopted */
    kina_stream *stream;     /* owned reference to the home stream; NULL on the host */
    uint64_t runtime;        /* RuntimeIdentity of its maker */
    uint64_t domain;         /* AllocationDomainId */
    kina_dl_device device;
    uint32_t flags;
    uint32_t reserved;
    void (*release_owner)(void *owner); /* adopted memory only; any thread, no GIL */
    /* Adopted memory: whose it is. Else the Python object of a resource that calls Python, or NULL: an owned reference
     * that goes after the memory, and both go where the GIL is held. */
    void *owner;
    /* Set once others may use the memory outside its home stream. Asked when the last reference goes: 0, release
     * as usual (the home stream now waits for them); nonzero, it has kept the storage and will release it later. */
    int (*before_release)(struct kina_storage *storage);
    uint64_t foreign_use;           /* before_release's own note of who they are; atomic */
    kina_foreign_use *foreign_uses; /* the same, of streams that it knows; atomic */
} kina_storage;

/* Facts about a layout, computed once. */
#define KINA_TENSOR_READ_ONLY 1u
#define KINA_TENSOR_C_CONTIGUOUS 2u
#define KINA_TENSOR_F_CONTIGUOUS 4u
#define KINA_TENSOR_SELF_OVERLAP 8u /* a zero stride on an axis longer than 1: not writable */
#define KINA_TENSOR_MISALIGNED 16u  /* its elements lie at no multiples of their size: not for kernels */

typedef struct kina_tensor {
    /* the DLTensor prefix */
    void *data;
    kina_dl_device device;
    int32_t ndim;
    kina_dl_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements, never NULL */
    uint64_t byte_offset;
    /* kina's own */
    kina_resource *allocator; /* borrowed from the storage */
    kina_stream *stream;      /* borrowed from the storage */
    size_t size_bytes;        /* elements * itemsize */
    uint64_t flags;
    kina_storage *storage; /* owned reference */
    int64_t size;          /* elements */
    int64_t span_low;      /* lowest byte touched, relative to `data` */
    int64_t span_high;     /* one past the highest byte touched; == span_low when size is 0 */
} kina_tensor;

/* Address of element (0, ..., 0). */
static inline char *kina_tensor_address(const kina_tensor *tensor) {
    return (char *)tensor->data + tensor->byte_offset;
}

#ifdef __cplusplus
#define KINA_STATIC_ASSERT(condition, message) static_assert(condition, message)
#else
#define KINA_STATIC_ASSERT(condition, message) _Static_assert(condition, message)
#endif

#define KINA_ASSERT_PREFIX(field)                                                       \
    KINA_STATIC_ASSERT(offsetof(kina_tensor, field) == offsetof(kina_dl_tensor, field), \
                       "kina_tensor." #field " must lie where DLTensor has it")
KINA_ASSERT_PREFIX(data);
KINA_ASSERT_PREFIX(device);
KINA_ASSERT_PREFIX(ndim);
KINA_ASSERT_PREFIX(dtype);
KINA_ASSERT_PREFIX(shape);
KINA_ASSERT_PREFIX(strides);
KINA_ASSERT_PREFIX(byte_offset);
#if UINTPTR_MAX == UINT64_MAX
KINA_STATIC_ASSERT(offsetof(kina_dl_tensor, data) == 0, "DLTensor.data");
KINA_STATIC_ASSERT(offsetof(kina_dl_tensor, device) == 8, "DLTensor.device");
KINA_STATIC_ASSERT(offsetof(kina_dl_tensor, ndim) == 16, "DLTensor.ndim");
KINA_STATIC_ASSERT(offsetof(kina_dl_tensor, dtype) == 20, "DLTensor.dtype");
KINA_STATIC_ASSERT(offsetof(kina_dl_tensor, shape) == 24, "DLTensor.shape");
KINA_STATIC_ASSERT(offsetof(kina_dl_tensor, strides) == 32, "DLTensor.strides");
KINA_STATIC_ASSERT(offsetof(kina_dl_tensor, byte_offset) == 40, "DLTensor.byte_offset");
KINA_STATIC_ASSERT(offsetof(kina_tensor, allocator) == 48, "kina_tensor.allocator");
KINA_STATIC_ASSERT(offsetof(kina_tensor, stream) == 56, "kina_tensor.stream");
KINA_STATIC_ASSERT(offsetof(kina_tensor, size_bytes) == 64, "kina_tensor.size_bytes");
KINA_STATIC_ASSERT(offsetof(kina_tensor, flags) == 72, "kina_tensor.flags");
KINA_STATIC_ASSERT(offsetof(kina_dl_managed_tensor_versioned, dl_tensor) == 32, "DLManagedTensorVersioned.dl_tensor");
KINA_STATIC_ASSERT(offsetof(kina_dl_exchange_header, prev_api) == 8, "DLPackExchangeAPIHeader.prev_api");
KINA_STATIC_ASSERT(offsetof(kina_dl_exchange_api, managed_tensor_allocator) == 16, "DLPackExchangeAPI");
KINA_STATIC_ASSERT(offsetof(kina_dl_exchange_api, current_work_stream) == 48, "DLPackExchangeAPI.current_work_stream");
#endif

#ifdef __cplusplus
}
#endif
#endif
