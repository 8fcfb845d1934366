from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "kina_memory.h":
    ctypedef struct kina_handle:
        int64_t references
        void (*destroy)(kina_handle *self) noexcept nogil

    void kina_handle_init(kina_handle *handle, void (*destroy)(kina_handle *) noexcept nogil) noexcept nogil
    void kina_retain(void *object) noexcept nogil
    bint kina_retain_if_alive(void *object) noexcept nogil
    void kina_release(void *object) noexcept nogil

    ctypedef struct kina_stream

    ctypedef struct kina_stream_order:
        int (*record)(kina_stream *stream, kina_handle **fence) noexcept nogil
        int (*query)(kina_handle *fence) noexcept nogil
        int (*order)(kina_stream *stream, kina_handle *fence) noexcept nogil
        int (*wait)(kina_handle *fence, kina_stream *waiter) noexcept nogil

    ctypedef struct kina_stream:
        kina_handle handle
        uint64_t number
        uint64_t runtime
        uint64_t domain
        void *native
        int32_t device_id
        const kina_stream_order *ordering
        void *watches           # NULL: no pool knows the stream

    ctypedef struct kina_resource

    ctypedef struct kina_resource_vtable:
        uint32_t version
        uint32_t supports_streams
        const char *name
        int (*allocate)(kina_resource *self, void **out, size_t nbytes, kina_stream *stream) noexcept nogil
        void (*deallocate)(kina_resource *self, void *data, size_t nbytes, kina_stream *stream) noexcept nogil
        int (*try_allocate)(kina_resource *self, void **out, size_t nbytes, kina_stream *stream,
                            bint may_wait) noexcept nogil
        int (*make_room)(kina_resource *self, size_t nbytes, int *made) noexcept nogil

    ctypedef struct kina_resource:
        kina_handle handle
        const kina_resource_vtable *vtable
        kina_resource *upstream
        int32_t device_type
        int32_t device_id
        uint32_t flags

    ctypedef enum kina_asking:
        KINA_ASK_QUIETLY
        KINA_ASK_PATIENTLY
        KINA_ASK_FOR_ALL

    int kina_ask(kina_resource *resource, void **out, size_t nbytes, kina_stream *stream,
                 kina_asking how) noexcept nogil

    enum: KINA_RESOURCE_VERSION
    enum: KINA_RESOURCE_PYTHON
    const char *KINA_RESOURCE_CAPSULE


cdef extern from "kina_tensor.h":
    enum: KINA_DLPACK_MAJOR
    enum: KINA_DLPACK_MINOR
    enum: KINA_MAX_NDIM
    enum: KINA_DEVICE_CPU
    enum: KINA_DEVICE_CUDA
    enum: KINA_DEVICE_CUDA_HOST
    enum: KINA_DEVICE_CUDA_MANAGED
    enum: KINA_DTYPE_INT
    enum: KINA_DTYPE_UINT
    enum: KINA_DTYPE_COMPLEX
    enum: KINA_DTYPE_BOOL
    enum: KINA_DLPACK_FLAG_READ_ONLY
    enum: KINA_DLPACK_FLAG_IS_COPIED
    enum: KINA_DLPACK_FLAG_SUBBYTE_TYPE_PADDED
    enum: KINA_STORAGE_READ_ONLY
    enum: KINA_STORAGE_ADOPTED
    enum: KINA_STORAGE_SHARED
    enum: KINA_TENSOR_READ_ONLY
    enum: KINA_TENSOR_C_CONTIGUOUS
    enum: KINA_TENSOR_F_CONTIGUOUS
    enum: KINA_TENSOR_SELF_OVERLAP
    enum: KINA_TENSOR_MISALIGNED

    ctypedef struct kina_dl_device:
        int32_t device_type
        int32_t device_id

    ctypedef struct kina_dl_dtype:
        uint8_t code
        uint8_t bits
        uint16_t lanes

    ctypedef struct kina_dl_tensor:
        void *data
        kina_dl_device device
        int32_t ndim
        kina_dl_dtype dtype
        int64_t *shape
        int64_t *strides
        uint64_t byte_offset

    ctypedef struct kina_dl_managed_tensor:
        kina_dl_tensor dl_tensor
        void *manager_ctx
        void (*deleter)(kina_dl_managed_tensor *self) noexcept nogil

    ctypedef struct kina_dl_version:
        uint32_t major
        uint32_t minor

    ctypedef struct kina_dl_managed_tensor_versioned:
        kina_dl_version version
        void *manager_ctx
        void (*deleter)(kina_dl_managed_tensor_versioned *self) noexcept nogil
        uint64_t flags
        kina_dl_tensor dl_tensor

    const char *KINA_DLPACK_EXCHANGE_CAPSULE

    ctypedef struct kina_dl_exchange_header:
        kina_dl_version version
        kina_dl_exchange_header *prev_api

    ctypedef struct kina_dl_exchange_api:
        kina_dl_exchange_header header
        int (*managed_tensor_allocator)(kina_dl_tensor *prototype, kina_dl_managed_tensor_versioned **out,
                                        void *error_ctx,
                                        void (*set_error)(void *error_ctx, const char *kind, const char *message)
                                        noexcept nogil) noexcept nogil
        int (*managed_tensor_from_py_object_no_sync)(void *object, kina_dl_managed_tensor_versioned **out) except -1
        int (*managed_tensor_to_py_object_no_sync)(kina_dl_managed_tensor_versioned *tensor, void **out) except -1
        int (*dltensor_from_py_object_no_sync)(void *object, kina_dl_tensor *out) except -1
        int (*current_work_stream)(int32_t device_type, int32_t device_id, void **out_stream) except -1

    ctypedef struct kina_storage:
        kina_handle handle
        void *data
        size_t nbytes
        kina_resource *resource
        kina_stream *stream
        uint64_t runtime
        uint64_t domain
        kina_dl_device device
        uint32_t flags
        void (*release_owner)(void *owner) noexcept nogil
        void *owner
        int (*before_release)(kina_storage *storage) noexcept nogil
        uint64_t foreign_use
        void *foreign_uses  # kina_foreign_use *

    ctypedef struct kina_tensor:
        void *data
        kina_dl_device device
        int32_t ndim
        kina_dl_dtype dtype
        int64_t *shape
        int64_t *strides
        uint64_t byte_offset
        kina_resource *allocator
        kina_stream *stream
        size_t size_bytes
        uint64_t flags
        kina_storage *storage
        int64_t size
        int64_t span_low
        int64_t span_high

    char *kina_tensor_address(const kina_tensor *tensor) noexcept nogil


# Allocate nbytes (0 allowed: NULL data) from `resource` in the order of `stream` (NULL on the host).
# On success *out holds one reference and the storage holds its own on resource and stream.
cdef int storage_allocate(kina_storage **out, kina_resource *resource, kina_stream *stream, size_t nbytes,
                          kina_dl_device device, uint64_t runtime, uint64_t domain) noexcept nogil

# The same over memory that `resource` has just given; on failure it has it back.
cdef int storage_over(kina_storage **out, void *data, kina_resource *resource, kina_stream *stream, size_t nbytes,
                      kina_dl_device device, uint64_t runtime, uint64_t domain) noexcept nogil

# What a failed `allocate` of a resource ends in: those of others give a code without a record of the error.
cdef int allocation_failed(const kina_resource *resource, int status, size_t nbytes) noexcept nogil

# Adopt memory somebody else owns. On success the storage owes `owner` one call of `release_owner`, made on
# whichever thread drops the last reference, without the GIL. On failure (no memory) nothing is taken over.
cdef int storage_adopt(kina_storage **out, void *data, size_t nbytes, kina_dl_device device, kina_stream *stream,
                       uint64_t runtime, uint64_t domain, uint32_t flags,
                       void (*release_owner)(void *) noexcept nogil, void *owner) noexcept nogil

# Release a storage that before_release kept, whatever uses there were: the caller has waited for them.
cdef void storage_release_now(kina_storage *storage) noexcept nogil

# Keep `face`, the Python object of the storage's resource, as long as the storage: see KINA_RESOURCE_PYTHON.
cdef void storage_keep(kina_storage *storage, object face) noexcept

cdef extern from *:
    """
    #ifndef KINA_DEFERRED
    #define KINA_DEFERRED
    /* What is to be done under the GIL, by whoever holds it next: `run` gets the node back and frees it. The first
     * field of a struct that its maker allocated. */
    typedef struct kina_deferred {
        struct kina_deferred *next;
        void (*run)(struct kina_deferred *self);
    } kina_deferred;

    /* A destructor may run while an exception is under way, and has to leave it alone. */
    typedef struct { PyObject *kind, *value, *trace; } kina_exception;
    static inline void kina_exception_save(kina_exception *kept) {
    #if PY_VERSION_HEX >= 0x030C0000
        kept->value = PyErr_GetRaisedException();
    #else
        PyErr_Fetch(&kept->kind, &kept->value, &kept->trace);
    #endif
    }
    static inline void kina_exception_restore(kina_exception *kept) {
    #if PY_VERSION_HEX >= 0x030C0000
        PyErr_SetRaisedException(kept->value);
    #else
        PyErr_Restore(kept->kind, kept->value, kept->trace);
    #endif
    }
    #endif
    """
    ctypedef struct kina_deferred:
        kina_deferred *next
        void (*run)(kina_deferred *self) noexcept

    ctypedef struct kina_exception:
        pass
    void kina_exception_save(kina_exception *kept) noexcept
    void kina_exception_restore(kina_exception *kept) noexcept


# Hand a node over to the queue that is drained, first come first served, where the GIL is held; after finalisation it
# leaks. Callable from any thread with or without the GIL.
cdef void run_with_gil_later(kina_deferred *node) noexcept nogil
# The same for dropping a Python object. Steals the reference. `void *` so that it fits release_owner.
cdef void release_python_later(void *object) noexcept nogil
# Do what the queue holds. Needs the GIL; cheap when empty.
cdef void drain_python_releases() noexcept
# Whether the queue holds anything.
cdef bint python_releases_wait() noexcept nogil
# Whether the calling thread holds the GIL. Right also where sub-interpreters exist, unlike PyGILState_Check.
cdef bint holds_gil() noexcept nogil
# Nonzero once interpreter exit has begun: native owners may be released, Python ones leak.
cdef bint interpreter_is_finalizing() noexcept nogil
