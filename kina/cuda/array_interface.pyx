"""The CUDA Array Interface where it meets streams and devices: whose memory it is, and who waits for whom.

Source: Numba, "CUDA Array Interface (Version 3)"; CUDA Driver API, cuPointerGetAttribute.
"""

from libc.stdint cimport UINT64_MAX, intptr_t, uint64_t, uintptr_t

import importlib

from kina._core.array_interface cimport (
    array_claim,
    integer_of,
    read_address,
    read_claim,
    refuse_field,
    request_interface,
    set_array_locator,
    set_home_stream_hook,
    tensor_of_claim,
)
from kina._core.dtype cimport DType
from kina._core.status cimport KINA_DLPACK, KINA_DRIVER, check, last_error
from kina._core.storage cimport (
    KINA_DEVICE_CUDA,
    KINA_DEVICE_CUDA_HOST,
    KINA_DEVICE_CUDA_MANAGED,
    kina_dl_device,
    kina_storage,
)
from kina._core.tensor cimport Tensor
from kina.cuda.capture cimport refuse_capture
from kina.cuda.context cimport context_begin, context_end, device_check, device_failed, this_thread
from kina.cuda.cudatypes cimport (
    CU_MEMORYTYPE_HOST,
    CU_POINTER_ATTRIBUTE_CONTEXT,
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    CU_POINTER_ATTRIBUTE_IS_MANAGED,
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    CUDA_ERROR_INVALID_VALUE,
    CUDA_SUCCESS,
    CUcontext,
    CUdeviceptr,
    CUresult,
    CUstream,
)
from kina.cuda.driver cimport cu, driver_failed, ensure_driver
from kina.cuda.foreign_order cimport order_import
from kina.cuda.handles cimport kina_device, kina_runtime, kina_thread

from kina.errors import DLPackError, ForeignDeviceError

__all__ = []

cdef str PROTOCOL = "__cuda_array_interface__"

importlib.import_module("kina._core.buffers")  # so that memoryview(t) refuses, and says why


# Out ------------------------------------------------------------------------------------------------------


cdef int find_home_stream(kina_storage *storage, intptr_t *out) noexcept nogil:
    cdef kina_runtime *runtime = <kina_runtime *> storage.stream
    cdef int status = device_check(runtime.device, b"__cuda_array_interface__")
    cdef int pushed
    if status != 0:
        return status
    # Whoever waits for a stream in a capture draws its own into that, or ends it.
    pushed = context_begin(runtime.device, b"__cuda_array_interface__")
    if pushed < 0:
        return last_error().detail
    status = refuse_capture(runtime, b"__cuda_array_interface__")
    context_end(pushed)
    out[0] = <intptr_t> runtime.stream.native  # the legacy stream is 1 in kina, never 0
    return status


set_home_stream_hook(find_home_stream)


# In -------------------------------------------------------------------------------------------------------


ctypedef struct pointer_facts:
    CUcontext context
    unsigned int memory_type
    unsigned int managed
    int ordinal


cdef CUresult ask_pointer(CUdeviceptr address, pointer_facts *facts) noexcept nogil:
    cdef CUresult code = cu.cuPointerGetAttribute(&facts.memory_type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
    facts.context = NULL
    facts.managed = 0
    facts.ordinal = -1
    if code == CUDA_SUCCESS:
        code = cu.cuPointerGetAttribute(&facts.ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
    if code == CUDA_SUCCESS:
        code = cu.cuPointerGetAttribute(&facts.managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, address)
    if code == CUDA_SUCCESS:
        # Memory of a driver's pool answers NULL, and mapped memory may have no answer: no context owns them.
        code = cu.cuPointerGetAttribute(&facts.context, CU_POINTER_ATTRIBUTE_CONTEXT, address)
        if code == CUDA_ERROR_INVALID_VALUE:
            facts.context = NULL
            code = CUDA_SUCCESS
    return code


cdef kina_dl_device locate(kina_device *device, uintptr_t address) except *:
    """Where the memory is, as DLPack would say; the device can reach it."""
    cdef kina_dl_device where = kina_dl_device(KINA_DEVICE_CUDA, device.ordinal)
    cdef pointer_facts facts
    cdef CUresult code
    with nogil:
        code = ask_pointer(<CUdeviceptr> address, &facts)
    if code == CUDA_ERROR_INVALID_VALUE:
        check(unknown_address(code, address))
    if code != CUDA_SUCCESS:
        check(device_failed(device, code, KINA_DRIVER, b"adopt", b"where the memory is could not be asked"))
    if facts.managed:
        where.device_type = KINA_DEVICE_CUDA_MANAGED
    elif facts.memory_type == CU_MEMORYTYPE_HOST:
        where = kina_dl_device(KINA_DEVICE_CUDA_HOST, 0)  # pinned: every device reaches it
    elif facts.ordinal != device.ordinal:
        raise ForeignDeviceError(f"the producer's data lives on cuda:{facts.ordinal}, the session runs on "
                                 f"cuda:{device.ordinal}", operation="adopt")
    elif facts.context != NULL and facts.context != device.context:
        raise ForeignDeviceError(f"the producer's data belongs to another context of cuda:{device.ordinal} than its "
                                 "primary one, and no kernel of the session could reach it", operation="adopt")
    return where


cdef int unknown_address(CUresult code, uintptr_t address) except -1:
    message = f"{PROTOCOL}['data']: {address:#x} is no address that CUDA knows: it is memory of the host, or freed"
    return driver_failed(code, KINA_DLPACK, b"adopt", message.encode())


cdef int array_ordinal(dict interface) except -2:
    """The device of an array that nobody has taken in yet."""
    cdef array_claim claim
    cdef pointer_facts facts
    cdef kina_thread *thread
    cdef CUresult code
    read_claim(interface, PROTOCOL, &claim)
    read_address(interface, PROTOCOL, &claim)
    ensure_driver()
    if claim.layout.size == 0:  # nowhere: the thread's session will do
        thread = this_thread()
        return 0 if thread == NULL or thread.top == NULL else thread.top.runtime.device.ordinal
    with nogil:
        code = ask_pointer(<CUdeviceptr> claim.address, &facts)
    if code == CUDA_ERROR_INVALID_VALUE:
        check(unknown_address(code, claim.address))
    if code != CUDA_SUCCESS:
        check(driver_failed(code, KINA_DRIVER, b"from_dlpack", b"where the memory is could not be asked"))
    return facts.ordinal


set_array_locator(array_ordinal)


cdef Tensor adopt_cuda_array(kina_runtime *runtime, object source):
    cdef array_claim claim
    cdef kina_dl_device where = kina_dl_device(KINA_DEVICE_CUDA, runtime.device.ordinal)
    cdef CUstream producer = NULL
    cdef DType dtype
    cdef int status
    interface = request_interface(source, PROTOCOL)
    if interface is None:
        raise DLPackError(f"{type(source).__name__} has neither __dlpack__ nor {PROTOCOL}; host data is copied with "
                          "from_host", operation="adopt")
    dtype = read_claim(interface, PROTOCOL, &claim)
    read_address(interface, PROTOCOL, &claim)
    if claim.layout.size > 0:
        where = locate(runtime.device, claim.address)
    stream = interface.get("stream")
    if stream is not None:
        producer = named_stream(stream)
    # The producer's code has run, and may have begun anything.
    check(refuse_capture(runtime, b"adopt"))
    if producer != NULL:
        with nogil:
            status = order_import(runtime, producer, b"adopt")
        check(status)
    return tensor_of_claim(&claim, dtype, source, where, &runtime.stream, runtime.stream.runtime,
                           runtime.stream.domain)


cdef CUstream named_stream(object stream) except NULL:
    cdef uint64_t handle = integer_of(stream, 0, UINT64_MAX, PROTOCOL, "stream")
    if handle == 0:
        raise refuse_field(PROTOCOL, "stream", "0 is ambiguous; 1 is the legacy default stream, 2 the per-thread one, "
                           "None needs no order")
    return <CUstream> <void *> <uintptr_t> handle
