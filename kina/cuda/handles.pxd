from libc.stdint cimport uint64_t

from kina._core.status cimport kina_error
from kina._core.storage cimport kina_handle, kina_resource, kina_storage, kina_stream
from kina.cuda.cudatypes cimport CUcontext, CUdevice, CUevent, CUgraphExec, CUmemoryPool, CUmodule, CUstream


cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attributes) noexcept
    int pthread_mutex_destroy(pthread_mutex_t *mutex) noexcept
    int pthread_mutex_lock(pthread_mutex_t *mutex) noexcept
    int pthread_mutex_unlock(pthread_mutex_t *mutex) noexcept


cdef extern from "handles.h" nogil:
    enum: KINA_IDLE_STREAMS
    enum: KINA_IDLE_EVENTS
    enum: KINA_IMMORTAL_STREAMS
    enum: KINA_SEAL_LEASES
    enum: KINA_STAGING_CLASSES
    enum: KINA_STAGING_BLOCKS
    enum: KINA_OWNER
    enum: KINA_STAGING
    enum: KINA_NODE_OPEN
    enum: KINA_NODE_ABANDONED
    enum: KINA_NODE_CLOSED

    ctypedef struct kina_runtime
    ctypedef struct kina_segment
    ctypedef struct kina_session_node
    ctypedef struct kina_module
    ctypedef struct kina_staging
    ctypedef struct kina_capture
    ctypedef struct kina_foreign_use

    ctypedef struct kina_orphan_storage:
        kina_orphan_storage *next
        kina_storage *storage

    ctypedef struct kina_held_free:
        kina_held_free *next
        kina_resource *resource
        kina_stream *stream
        void *data
        size_t nbytes

    ctypedef struct kina_idle_pool:
        kina_idle_pool *next
        CUmemoryPool pool

    ctypedef struct kina_device:
        int ordinal
        CUdevice device
        CUcontext context
        unsigned long long context_id
        int opened
        int poisoned
        kina_error cause
        pthread_mutex_t mutex
        unsigned int max_threads_per_block
        unsigned int max_block[3]
        unsigned int max_grid[3]
        unsigned int max_shared_bytes
        unsigned int max_shared_optin_bytes
        unsigned int pools_supported
        unsigned int cooperative_launch
        unsigned int cluster_launch
        CUstream idle_streams[KINA_IDLE_STREAMS]
        int idle_stream_count
        CUevent idle_events[KINA_IDLE_EVENTS]
        int idle_event_count
        kina_staging *idle_staging[KINA_STAGING_CLASSES]
        int staging_count[KINA_STAGING_CLASSES]
        kina_resource *memory
        kina_idle_pool *idle_pools
        kina_idle_pool *lent_pools
        CUstream probe_stream
        CUstream private_stream
        kina_runtime *runtimes
        pthread_mutex_t looking
        kina_segment *orphans
        int holding
        kina_orphan_storage *quarantine
        kina_segment *retired
        kina_segment *retired_last
        kina_module *dead_modules
        kina_capture *dropped_captures
        kina_held_free *held_frees
        int captures
        uint64_t waits_begun
        uint64_t waits_passed
        int wait_wanted
        CUstream immortal_streams[KINA_IMMORTAL_STREAMS]
        int immortal_stream_count

    ctypedef struct kina_seal:
        kina_handle handle
        kina_device *device
        CUevent event
        uint64_t number
        int complete

    ctypedef struct kina_leases:
        kina_handle **handles
        int count
        int capacity
        int urgent

    int kina_leases_add(kina_leases *leases, void *handle, int urgent) noexcept
    void kina_leases_end(kina_leases *leases) noexcept

    ctypedef struct kina_segment:
        kina_segment *next
        kina_seal *seal
        kina_leases leases

    ctypedef struct kina_capture:
        kina_handle handle
        kina_device *device
        uint64_t id
        kina_resource **pools
        int pool_count
        kina_session_node *node
        kina_leases leases
        int unended
        CUgraphExec graph
        kina_capture *next

    ctypedef struct kina_counters:
        uint64_t launches
        uint64_t graph_launches
        uint64_t events_recorded
        uint64_t event_queries
        uint64_t seals
        uint64_t leases
        uint64_t retired
        uint64_t reaped
        uint64_t leaked
        uint64_t synchronizations
        uint64_t host_waits
        uint64_t bytes_to_device
        uint64_t bytes_to_host
        uint64_t modules_loaded
        uint64_t modules_evicted
        uint64_t unloads_deferred

    ctypedef struct kina_ref:
        kina_ref *previous
        kina_ref *next
        uint64_t low
        uint64_t high
        int writable
        int alive

    ctypedef struct kina_raw_block:
        kina_raw_block *outer
        kina_session_node *node
        kina_ref *refs
        int alive

    ctypedef struct kina_runtime:
        kina_stream stream
        kina_device *device
        kina_runtime *next
        kina_runtime *previous
        int adopted
        int lost
        int closed
        void *stream_owner
        uint64_t open_state
        unsigned long long stream_id
        kina_resource *memory
        kina_raw_block *block
        kina_capture *capture
        uint64_t segment_number
        kina_segment *open
        pthread_mutex_t mutex
        kina_segment *oldest
        kina_segment *newest
        uint64_t pending_leases
        kina_counters counters

    ctypedef struct kina_foreign_use:
        kina_foreign_use *next
        kina_runtime *runtime
        CUstream native
        int leased

    ctypedef struct kina_staging:
        kina_handle handle
        kina_staging *next
        kina_device *device
        int size_class
        void *data

    ctypedef struct kina_module:
        kina_handle handle
        kina_device *device
        CUmodule module
        kina_module *next
        uint64_t leased_in
        uint64_t leased_by

    ctypedef struct kina_session_node:
        kina_session_node *below
        kina_session_node *above
        kina_runtime *runtime
        CUcontext saved
        int pushes
        int calls
        int state
        uint64_t thread
        void *face

    ctypedef struct kina_thread:
        uint64_t token
        kina_session_node *top
        kina_session_node *spare
        void *runtimes
        void *recent
        int recent_ordinal


cdef extern from * nogil:
    """
    #define kina_load(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    #define kina_store(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
    #define kina_exchange(p, v) __atomic_exchange_n((p), (v), __ATOMIC_ACQ_REL)
    #define kina_add(p, v) __atomic_add_fetch((p), (v), __ATOMIC_RELAXED)
    #define kina_swap_if(p, expected, v) \
        __atomic_compare_exchange_n((p), (expected), (v), 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)
    """
    int kina_load(int *p) noexcept
    uint64_t kina_load_u64 "kina_load"(uint64_t *p) noexcept
    void kina_store(int *p, int v) noexcept
    int kina_exchange(int *p, int v) noexcept
    kina_capture *kina_load_capture "kina_load"(kina_capture **p) noexcept
    uint64_t kina_add(uint64_t *p, uint64_t v) noexcept
    int kina_count_captures "kina_add"(int *p, int v) noexcept
    int kina_count_holding "kina_add"(int *p, int v) noexcept
    bint kina_swap_if(uint64_t *p, uint64_t *expected, uint64_t v) noexcept
