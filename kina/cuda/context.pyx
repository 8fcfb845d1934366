"""Devices, their primary contexts, and the guard that puts the caller's context stack back as it was.

Source: CUDA Driver API, "Primary Context Management" and "Context Management".
"""

import logging

from libc.stdint cimport uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from kina._core.status cimport (
    KINA_DRIVER,
    KINA_INTERNAL,
    KINA_OUT_OF_MEMORY,
    KINA_RUNTIME_BUSY,
    KINA_RUNTIME_POISONED,
    KINA_SESSION_CLOSED,
    KINA_SYNCHRONIZE,
    KINA_UNAVAILABLE,
    check,
    fail,
    fail_driver,
    last_error,
)
from kina._core.storage cimport (
    kina_deferred,
    kina_release,
    kina_retain,
    kina_retain_if_alive,
    release_python_later,
    run_with_gil_later,
)
from kina._core.tokens cimport thread_token
from kina.cuda.cudatypes cimport (
    CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH,
    CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH,
    CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X,
    CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
    CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
    CUDA_ERROR_ASSERT,
    CUDA_ERROR_CONTAINED,
    CUDA_ERROR_CONTEXT_IS_DESTROYED,
    CUDA_ERROR_DEINITIALIZED,
    CUDA_ERROR_ECC_UNCORRECTABLE,
    CUDA_ERROR_EXTERNAL_DEVICE,
    CUDA_ERROR_HARDWARE_STACK_ERROR,
    CUDA_ERROR_ILLEGAL_ADDRESS,
    CUDA_ERROR_ILLEGAL_INSTRUCTION,
    CUDA_ERROR_INVALID_ADDRESS_SPACE,
    CUDA_ERROR_INVALID_CONTEXT,
    CUDA_ERROR_INVALID_PC,
    CUDA_ERROR_LAUNCH_FAILED,
    CUDA_ERROR_LAUNCH_TIMEOUT,
    CUDA_ERROR_MISALIGNED_ADDRESS,
    CUDA_ERROR_MPS_CLIENT_TERMINATED,
    CUDA_ERROR_NVLINK_UNCORRECTABLE,
    CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_ERROR_TENSOR_MEMORY_LEAK,
    CUDA_SUCCESS,
    CUcontext,
    CUdevice_attribute,
    CUresult,
)
from kina.cuda.driver cimport cu, describe, driver_failed, driver_is_silent, ensure_driver, process_is_forked
from kina.cuda.handles cimport (
    KINA_NODE_ABANDONED,
    KINA_NODE_CLOSED,
    KINA_NODE_OPEN,
    kina_device,
    kina_exchange,
    kina_load,
    kina_load_u64,
    kina_runtime,
    kina_session_node,
    kina_store,
    kina_swap_if,
    kina_thread,
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_t,
    pthread_mutex_unlock,
)

from kina.errors import UnavailableError

__all__ = []

logger = logging.getLogger("kina")


cdef extern from *:
    """
    #include <pthread.h>
    #include "handles.h"

    enum { KINA_MAX_DEVICES = 128, KINA_MENDED_DEPTH = 128 };
    static kina_device kina_devices[KINA_MAX_DEVICES];
    static pthread_mutex_t kina_open_mutex = PTHREAD_MUTEX_INITIALIZER; /* first opening of a device */

    /* One pointer in thread-local storage, the record on the heap, freed by the key's destructor. */
    static pthread_key_t kina_thread_key;
    static _Thread_local kina_thread *kina_thread_record KINA_INITIAL_EXEC;

    static int kina_thread_make_key(void (*destroy)(void *)) { return pthread_key_create(&kina_thread_key, destroy); }
    static void kina_thread_attach(kina_thread *record) {
        kina_thread_record = record;
        pthread_setspecific(kina_thread_key, record);
    }
    static void kina_thread_detach(void) { kina_thread_record = NULL; }
    """
    enum: KINA_MAX_DEVICES
    enum: MENDED_DEPTH "KINA_MENDED_DEPTH"
    kina_device *kina_devices
    pthread_mutex_t kina_open_mutex
    kina_thread *kina_thread_record
    int kina_thread_make_key(void (*destroy)(void *) noexcept nogil) noexcept nogil
    void kina_thread_attach(kina_thread *record) noexcept nogil
    void kina_thread_detach() noexcept nogil


# ---------------------------------------------------------------------------------------------- devices

cdef int device_count() except -1:
    cdef int count = 0
    cdef CUresult code = cu.cuDeviceGetCount(&count)
    if code != CUDA_SUCCESS:
        check(driver_failed(code, KINA_UNAVAILABLE, b"devices", b"the driver does not tell how many devices there are"))
    return min(count, <int> KINA_MAX_DEVICES)


cdef CUresult read_limits(kina_device *device) noexcept nogil:
    """The limits of launches. None may be guessed: a limit that could not be read would refuse every launch."""
    cdef CUresult code = CUDA_SUCCESS
    cdef int i
    for i in range(3):
        read_limit(device, <CUdevice_attribute> (CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + i), &device.max_block[i], &code)
        read_limit(device, <CUdevice_attribute> (CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + i), &device.max_grid[i], &code)
    read_limit(device, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, &device.max_threads_per_block, &code)
    read_limit(device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, &device.max_shared_bytes, &code)
    read_limit(device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &device.max_shared_optin_bytes, &code)
    read_limit(device, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, &device.pools_supported, &code)
    read_limit(device, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, &device.cooperative_launch, &code)
    read_limit(device, CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, &device.cluster_launch, &code)
    return code


cdef void read_limit(kina_device *device, CUdevice_attribute which, unsigned int *limit, CUresult *code) noexcept nogil:
    cdef int value = 0
    if code[0] == CUDA_SUCCESS:
        code[0] = cu.cuDeviceGetAttribute(&value, which, device.device)
    limit[0] = <unsigned int> max(value, 0)


cdef int retain_primary(kina_device *device, int ordinal) noexcept nogil:
    cdef CUresult code = cu.cuDeviceGet(&device.device, ordinal)
    if code == CUDA_SUCCESS:
        code = read_limits(device)
    if code == CUDA_SUCCESS and device.context == NULL:  # retained once, even if the next line fails the first time
        code = cu.cuDevicePrimaryCtxRetain(&device.context, device.device)
    if code == CUDA_SUCCESS:
        code = cu.cuCtxGetId(device.context, &device.context_id)
    if code != CUDA_SUCCESS:
        snprintf(last_error().message, sizeof(last_error().message),
                 "the primary context of cuda:%d could not be opened", ordinal)
        return driver_failed(code, KINA_UNAVAILABLE, b"open device", last_error().message)
    device.ordinal = ordinal
    pthread_mutex_init(&device.mutex, NULL)
    pthread_mutex_init(&device.looking, NULL)
    kina_store(&device.opened, 1)
    return 0


cdef kina_device *open_device(int ordinal) except NULL:
    cdef kina_device *device
    cdef int count, status = 0
    ensure_driver()
    count = device_count()
    if ordinal < 0 or ordinal >= count:
        raise UnavailableError(
            f"cuda:{ordinal} does not exist: the driver shows {count} device(s)"
            + (" (see CUDA_VISIBLE_DEVICES)" if count == 0 else ""),
            operation="open device",
        )
    device = &kina_devices[ordinal]
    if kina_load(&device.opened) == 0:
        with nogil:  # the GIL is never wanted while this lock is held
            pthread_mutex_lock(&kina_open_mutex)
            if kina_load(&device.opened) == 0:
                status = retain_primary(device, ordinal)
            pthread_mutex_unlock(&kina_open_mutex)
        check(status)
    return device


cdef kina_device *device_after(kina_device *previous) noexcept nogil:
    cdef int ordinal = 0 if previous == NULL else previous.ordinal + 1
    while ordinal < <int> KINA_MAX_DEVICES and kina_load(&kina_devices[ordinal].opened) == 0:
        ordinal += 1
    return &kina_devices[ordinal] if ordinal < <int> KINA_MAX_DEVICES else NULL


cdef kina_runtime *runtime_after(kina_device *device, kina_runtime *previous) noexcept nogil:
    cdef kina_runtime *runtime
    pthread_mutex_lock(&device.mutex)
    runtime = device.runtimes if previous == NULL else previous.next  # the reference keeps it listed
    while runtime != NULL and not kina_retain_if_alive(runtime):
        runtime = runtime.next
    pthread_mutex_unlock(&device.mutex)
    kina_release(previous)  # outside the lock: it may be the last reference
    return runtime


cdef bint context_is_ours(kina_device *device) noexcept nogil:
    """Has nobody reset the primary context since we retained it? Costs about 10 ns."""
    cdef unsigned long long now = 0
    cdef CUresult code = cu.cuCtxGetId(device.context, &now)
    if code == CUDA_SUCCESS:
        return now == device.context_id
    # Only these two say that the context is no more; an odd failure of the question says nothing.
    return code != CUDA_ERROR_CONTEXT_IS_DESTROYED and code != CUDA_ERROR_INVALID_CONTEXT


cdef void poison(kina_device *device) noexcept nogil:
    """The calling thread's record becomes the first cause, unless there is one already."""
    pthread_mutex_lock(&device.mutex)
    if device.poisoned == 0:
        memcpy(&device.cause, last_error(), sizeof(device.cause))
        kina_store(&device.poisoned, 1)
    pthread_mutex_unlock(&device.mutex)


cdef int context_was_reset(kina_device *device, const char *operation) noexcept nogil:
    snprintf(last_error().message, sizeof(last_error().message),
             "another library reset the primary context of cuda:%d; what kina held in it is lost", device.ordinal)
    fail_driver(KINA_RUNTIME_POISONED, <int> CUDA_ERROR_CONTEXT_IS_DESTROYED, b"CUDA_ERROR_CONTEXT_IS_DESTROYED",
                b"context is destroyed", operation, last_error().message)
    poison(device)
    return KINA_RUNTIME_POISONED


cdef int device_check(kina_device *device, const char *operation) noexcept nogil:
    if process_is_forked():
        return fail(KINA_UNAVAILABLE, operation,
                    b"this process was forked from one that had already initialised CUDA; use the 'spawn' method")
    if kina_load(&device.poisoned) == 0:
        if context_is_ours(device):
            return 0
        return context_was_reset(device, operation)
    snprintf(last_error().message, sizeof(last_error().message),
             "the context of cuda:%d can no longer be used and the process must be restarted. First cause: %.800s",
             device.ordinal, device.cause.message)
    return fail_driver(KINA_RUNTIME_POISONED, device.cause.driver_code, device.cause.driver_name,
                       device.cause.driver_string, operation, last_error().message)


cdef bint device_is_gone(kina_device *device) noexcept nogil:
    return driver_is_silent() or kina_load(&device.poisoned) != 0 or not context_is_ours(device)


cdef bint is_sticky(CUresult code) noexcept nogil:
    """Does this answer mean that the context can never be used again?"""
    return code in (
        CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_ASSERT, CUDA_ERROR_HARDWARE_STACK_ERROR,
        CUDA_ERROR_ILLEGAL_INSTRUCTION, CUDA_ERROR_MISALIGNED_ADDRESS, CUDA_ERROR_INVALID_ADDRESS_SPACE,
        CUDA_ERROR_INVALID_PC, CUDA_ERROR_LAUNCH_TIMEOUT, CUDA_ERROR_ECC_UNCORRECTABLE,
        CUDA_ERROR_NVLINK_UNCORRECTABLE, CUDA_ERROR_MPS_CLIENT_TERMINATED,
        CUDA_ERROR_EXTERNAL_DEVICE, CUDA_ERROR_CONTAINED, CUDA_ERROR_TENSOR_MEMORY_LEAK,
    )


cdef int device_failed(kina_device *device, CUresult code, int detail, const char *operation,
                       const char *message) noexcept nogil:
    cdef int status
    if code == CUDA_ERROR_CONTEXT_IS_DESTROYED:
        return context_was_reset(device, operation)
    if is_sticky(code):
        # No call of ours faults by itself: the device tells of work that was enqueued before.
        snprintf(last_error().message, sizeof(last_error().message),
                 "cuda:%d reports an earlier asynchronous failure (seen by \"%s\")", device.ordinal, operation)
        status = driver_failed(code, KINA_SYNCHRONIZE, operation, last_error().message)
        poison(device)
        return status
    if code == CUDA_ERROR_OUT_OF_MEMORY:
        detail = KINA_OUT_OF_MEMORY
    return driver_failed(code, detail, operation, message)


# ----------------------------------------------------------------------------------- a context around one call

cdef int context_push(kina_device *device, const char *operation) noexcept nogil:
    cdef CUresult code = cu.cuCtxPushCurrent(device.context)
    if code != CUDA_SUCCESS:
        device_failed(device, code, KINA_DRIVER, operation, b"the device's context could not be made current")
        return -1
    return 1


ctypedef struct stays_note:
    kina_deferred deferred
    CUresult code


cdef void log_context_stays(kina_deferred *note) noexcept:
    failure = describe((<stays_note *> note).code)
    free(note)
    logger.error("kina: a context that was made current for one call could not be taken off the stack: %s (%d): %s",
                 failure.name, failure.code, failure.string)


cdef void context_stays(CUresult code) noexcept nogil:
    # Any thread comes here, with or without the GIL: it is logged as soon as somebody has it.
    cdef stays_note *note
    if code == CUDA_ERROR_DEINITIALIZED or driver_is_silent():
        return
    note = <stays_note *> calloc(1, sizeof(stays_note))
    if note != NULL:
        note.deferred.run = log_context_stays
        note.code = code
        run_with_gil_later(&note.deferred)


# ---------------------------------------------------------------------------------------------- threads

cdef kina_thread *this_thread() noexcept nogil:
    cdef kina_thread *thread = kina_thread_record
    if thread != NULL:
        return thread
    thread = <kina_thread *> calloc(1, sizeof(kina_thread))
    if thread != NULL:
        thread.token = thread_token()
        kina_thread_attach(thread)
    return thread


cdef void end_thread(void *record) noexcept nogil:
    """The thread is ending: its context stack goes with it, its Runtimes become free for others."""
    cdef kina_thread *thread = <kina_thread *> record
    cdef kina_session_node *node = thread.top
    cdef kina_session_node *below
    cdef kina_runtime *runtime
    kina_thread_detach()
    while node != NULL:
        below = node.below
        node.above = NULL
        node.below = NULL
        # Once it is CLOSED its face may free it, and drop the Runtime, at any moment: the Runtime is held from before.
        runtime = node.runtime
        kina_retain(runtime)
        if runtime.capture != NULL and runtime.capture.node == node:
            runtime.capture.node = NULL
            kina_store(&runtime.capture.unended, 1)  # for whoever has the Runtime next
        if kina_exchange(&node.state, KINA_NODE_CLOSED) == KINA_NODE_OPEN:
            runtime_unclaim(runtime)
        else:
            free_abandoned(node)
        kina_release(runtime)
        node = below
    free(thread.spare)
    release_python_later(thread.runtimes)
    free(thread)


if kina_thread_make_key(end_thread) != 0:
    raise ImportError("kina.cuda: no thread-local key is left in this process (pthread_key_create failed)")


# ---------------------------------------------------------------------------------------------- sessions

cdef int runtime_claim(kina_runtime *runtime, uint64_t token) noexcept nogil:
    """Open it once more for this thread, or answer that another thread has it."""
    cdef uint64_t state = kina_load_u64(&runtime.open_state)
    while True:
        if state != 0 and state >> 16 != token:
            return fail(KINA_RUNTIME_BUSY, b"session",
                        b"the Runtime is open in another thread: leave the session there, or use a Runtime per thread")
        if state & 0xFFFF == 0xFFFF:
            return fail(KINA_INTERNAL, b"session", b"more than 65,535 nested sessions on one Runtime")
        if kina_swap_if(&runtime.open_state, &state, (token << 16) | ((state & 0xFFFF) + 1)):
            return 0


cdef void runtime_unclaim(kina_runtime *runtime) noexcept nogil:
    cdef uint64_t state = kina_load_u64(&runtime.open_state)
    cdef uint64_t count
    while True:
        count = state & 0xFFFF
        if kina_swap_if(&runtime.open_state, &state, state - 1 if count > 1 else 0):
            return


cdef void free_abandoned(kina_session_node *node) noexcept nogil:
    kina_release(node.runtime)
    free(node)


cdef void unlink(kina_thread *thread, kina_session_node *node) noexcept nogil:
    if node.above != NULL:
        node.above.below = node.below
    else:
        thread.top = node.below
    if node.below != NULL:
        node.below.above = node.above


cdef void hand_over(kina_session_node *node) noexcept nogil:
    """It leaves before the session above it: what it owes the context stack becomes that one's to pay."""
    node.above.saved = node.saved
    node.above.pushes += node.pushes


cdef bint is_of_a_device(CUcontext context) noexcept nogil:
    """Is it one that sessions push? A session may have taken over the entries of one on another device."""
    cdef int i
    for i in range(KINA_MAX_DEVICES):
        if kina_load(&kina_devices[i].opened) and kina_devices[i].context == context:
            return True
    return False


cdef void reap_abandoned(kina_thread *thread, bint patient) noexcept nogil:
    """Sessions whose face was collected, on whatever thread: their place in this thread's list is given up here.
    `patient`: one whose entries the driver does not take back now keeps its place until the next occasion."""
    cdef kina_session_node *node = thread.top
    cdef kina_session_node *below
    cdef CUcontext current, popped
    cdef CUresult code
    while node != NULL:
        below = node.below
        if kina_load(&node.state) == KINA_NODE_ABANDONED:
            if node.above != NULL:
                hand_over(node)
            else:
                # Nobody promised its caller anything any more: undo our own pushes while they are on top, and
                # leave alone whatever the caller has put there since.
                code = CUDA_SUCCESS
                while node.pushes > 0 and not process_is_forked():
                    current = NULL
                    code = cu.cuCtxGetCurrent(&current)
                    if code != CUDA_SUCCESS or not is_of_a_device(current):
                        break
                    code = cu.cuCtxPopCurrent(&popped)
                    if code != CUDA_SUCCESS:
                        break
                    node.pushes -= 1
                if code != CUDA_SUCCESS and patient:
                    node = below
                    continue
            unlink(thread, node)
            free_abandoned(node)
            # Its Runtime may have gone with it, and releases run anybody's code: the list may be another one now.
            below = thread.top
        node = below


cdef kina_session_node *innermost_node(int ordinal) noexcept nogil:
    cdef kina_thread *thread = this_thread()
    cdef kina_session_node *node = thread.top if thread != NULL else NULL
    while node != NULL:
        if kina_load(&node.state) == KINA_NODE_OPEN \
                and (ordinal < 0 or node.runtime.device.ordinal == ordinal):
            return node
        node = node.below
    return NULL


cdef kina_session_node *session_enter(kina_runtime *runtime) noexcept nogil:
    cdef kina_thread *thread = this_thread()
    cdef kina_device *device = runtime.device
    cdef kina_session_node *node
    cdef CUcontext current = NULL
    cdef CUresult code
    if device_check(device, b"session") != 0:
        return NULL
    if kina_load(&runtime.closed):
        fail(KINA_SESSION_CLOSED, b"session", b"the Runtime was closed")
        return NULL
    if thread == NULL:
        fail(KINA_OUT_OF_MEMORY, b"session", b"no host memory for the bookkeeping of a thread")
        return NULL
    reap_abandoned(thread, True)
    node = thread.spare
    thread.spare = NULL
    if node == NULL:
        node = <kina_session_node *> calloc(1, sizeof(kina_session_node))
        if node == NULL:
            fail(KINA_OUT_OF_MEMORY, b"session", b"no host memory for a session")
            return NULL
    node.pushes = 0
    node.calls = 0
    if runtime_claim(runtime, thread.token) != 0:
        keep_spare(thread, node)
        return NULL
    code = cu.cuCtxGetCurrent(&current)
    if code == CUDA_SUCCESS and current != device.context:
        code = cu.cuCtxPushCurrent(device.context)
        node.pushes = 1
    if code != CUDA_SUCCESS:
        device_failed(device, code, KINA_DRIVER, b"session", b"the device's context could not be made current")
        runtime_unclaim(runtime)
        keep_spare(thread, node)
        return NULL
    node.runtime = runtime
    node.saved = current
    node.state = KINA_NODE_OPEN
    node.thread = thread.token
    node.above = NULL
    node.below = thread.top
    if thread.top != NULL:
        thread.top.above = node
    thread.top = node
    return node


cdef void keep_spare(kina_thread *thread, kina_session_node *node) noexcept nogil:
    if thread.spare == NULL:
        thread.spare = node
    else:
        free(node)


cdef CUresult restore(kina_session_node *node) noexcept nogil:
    """Put the context stack back as it was at entry, whatever was left on it meanwhile."""
    cdef CUcontext ours = node.runtime.device.context
    cdef CUcontext current = NULL
    cdef CUcontext popped = ours
    cdef CUresult code = CUDA_SUCCESS
    if node.pushes == 1:
        code = cu.cuCtxPopCurrent(&popped)
    if code == CUDA_SUCCESS and node.pushes <= 1:
        code = cu.cuCtxGetCurrent(&current)
        if code == CUDA_SUCCESS and popped == ours and current == node.saved:
            return CUDA_SUCCESS
    if code == CUDA_SUCCESS and popped != ours:
        code = cu.cuCtxPushCurrent(popped)  # not what was expected: back, for the whole stack to be read
    elif code == CUDA_ERROR_INVALID_CONTEXT:
        code = CUDA_SUCCESS  # somebody emptied the stack
    if code == CUDA_SUCCESS:
        code = mend_stack(node)
    if code == CUDA_SUCCESS:
        return CUDA_SUCCESS
    # What was current at entry is current again at least; the failure is reported all the same.
    cu.cuCtxSetCurrent(node.saved)
    return code


cdef CUresult mend_stack(kina_session_node *node) noexcept nogil:
    """Somebody left the stack other than as the session had made it: read all of it, and keep what the caller had."""
    cdef CUcontext stack[MENDED_DEPTH]
    cdef CUcontext current = NULL
    cdef CUcontext popped = NULL
    cdef CUresult code
    cdef int depth = 0
    cdef int kept, i
    while True:
        code = cu.cuCtxGetCurrent(&current)
        if code != CUDA_SUCCESS or current == NULL or depth == MENDED_DEPTH:
            break
        code = cu.cuCtxPopCurrent(&popped)
        if code != CUDA_SUCCESS:
            break
        stack[depth] = popped
        depth += 1
    # stack[depth - 1] is the bottom; what follows counts from there.
    for i in range(depth // 2):
        popped = stack[i]
        stack[i] = stack[depth - 1 - i]
        stack[depth - 1 - i] = popped
    kept = caller_depth(node, stack, depth)
    for i in range(kept):
        if code == CUDA_SUCCESS:
            code = cu.cuCtxPushCurrent(stack[i])
    if code == CUDA_SUCCESS:
        code = cu.cuCtxGetCurrent(&current)
    if code == CUDA_SUCCESS and current != node.saved:
        code = cu.cuCtxPushCurrent(node.saved)  # the caller's own entry was taken away or replaced
    return code


cdef int caller_depth(kina_session_node *node, CUcontext *stack, int depth) noexcept nogil:
    """How many entries from the bottom were the caller's: the driver tells no depth, so what was on top is sought."""
    cdef CUcontext ours = node.runtime.device.context
    cdef int found = 0
    cdef int i
    if node.saved == NULL:
        return 0
    # Nobody else was here: what was on top, and the entries of this session and of those that it pays for.
    found = depth - node.pushes
    for i in range(max(found, 0), depth):
        if not is_of_a_device(stack[i]):
            found = 0
    if found > 0 and stack[found - 1] == node.saved:
        return found
    found = 0
    for i in range(depth):
        if stack[i] != node.saved:
            continue
        # Right below our own entry, if that is still there; else the highest with something above it, for an entry of
        # ours was there, replaced or not; else the only one.
        if node.pushes > 0 and i + 1 < depth and stack[i + 1] == ours:
            return i + 1
        if found == 0 or i + 1 < depth:
            found = i + 1
    if found != 0:
        return found
    # The caller's own entry is gone. Where a session outside this one made it, it was popped if that one's caller
    # shows; else it was replaced, as cudaSetDevice does.
    if (depth > 0 and node.below != NULL and stack[depth - 1] == node.below.saved
            and (depth == 1 or stack[depth - 2] != node.below.saved)):
        return depth
    return max(depth - 1, 0)


cdef int session_leave(kina_thread *thread, kina_session_node *node) noexcept nogil:
    cdef CUresult code = CUDA_SUCCESS
    # Abandoned ones above it make it look out of order.
    reap_abandoned(thread, False)
    if node.above != NULL:
        hand_over(node)
    elif not process_is_forked():
        code = restore(node)
    runtime_unclaim(node.runtime)
    unlink(thread, node)
    keep_spare(thread, node)
    if code != CUDA_SUCCESS and code != CUDA_ERROR_DEINITIALIZED:
        driver_failed(code, KINA_SYNCHRONIZE, b"leave session",
                      b"the context that was current before the session could not be restored")
        return 1
    return 0


cdef void session_abandon(kina_session_node *node) noexcept nogil:
    cdef kina_runtime *runtime = node.runtime
    # The list needs the Runtime once the face is gone: retained first, for the list's thread may be fast.
    kina_retain(runtime)
    if kina_exchange(&node.state, KINA_NODE_ABANDONED) == KINA_NODE_OPEN:
        runtime_unclaim(runtime)
    else:
        kina_release(runtime)  # its thread ended before: nobody else knows the node
        free(node)
