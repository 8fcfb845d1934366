# cython: annotation_typing=False
"""kina.from_dlpack: which session takes in an array of somebody else."""

from cpython.pycapsule cimport PyCapsule_CheckExact

from kina._core.array_interface cimport cuda_array_ordinal, request_interface
from kina._core.dlpack cimport capsule_device, declared_device, drop_managed, managed_device
from kina._core.exchange_table cimport set_taker
from kina._core.foreign_types cimport foreign_type, request_managed, type_of
from kina._core.host_session cimport innermost_host
from kina._core.opening cimport innermost_cuda, load_cuda
from kina._core.session cimport Session
from kina._core.storage cimport (
    KINA_DEVICE_CPU,
    KINA_DEVICE_CUDA,
    KINA_DEVICE_CUDA_HOST,
    KINA_DEVICE_CUDA_MANAGED,
    kina_dl_device,
    kina_dl_exchange_api,
    kina_dl_managed_tensor_versioned,
)
from kina._core.tensor cimport Tensor

from kina._core.opening import device_ordinal, session as open_session
from kina.errors import ArgumentError, DLPackError, ForeignDeviceError, UnavailableError

__all__ = ["from_dlpack"]


cdef enum:
    HOST = -1
    ANYWHERE = -2


def from_dlpack(
    array: object, *, session: Session | None = None, copy: bool | None = None, device: object = None
) -> Tensor:
    """A tensor over the memory of somebody else's array, without a copy.

    Parameters
    ----------
    array
        An array of PyTorch, CuPy, JAX, NumPy, Numba, cuda.core or another library that has DLPack's exchange table,
        ``__dlpack__``, ``__cuda_array_interface__``, ``__array_interface__`` or (on the host) the buffer protocol: the
        first of these that it has is used. A DLPack capsule. A Tensor of kina.
    session
        Who takes it in: an open session of the calling thread. Default: its innermost one on the array's device, else a
        momentary session of the thread's default Runtime there.
    copy
        True: a copy of it, in C order, that shares nothing. None, False: never a copy.
    device
        Where it must be (``"cpu"``, ``"cuda:N"``, an ordinal); nothing crosses from one device to another on its own.

    Raises
    ------
    DLPackError
        The producer refuses, has copied, or describes something impossible; the message names the field. Tensors that
        autograd watches, or whose memory holds conjugated or negated values: the message says what makes an ordinary
        one of them.
    DTypeError
        Elements that kina does not store: smaller than a byte, opaque, vectors.
    ForeignDeviceError
        It is not where `device` or `session` want it.
    NonContiguousError
        ``copy=True`` of an array that is not compact in C order.
    SessionClosedError, WrongThreadError
        `session` is not open in this thread.

    Notes
    -----
    On CUDA the session's stream waits, on the device, for the producer's; the host never waits. The owner is kept until
    the last tensor over its memory is gone and everything that sessions enqueued with it is done. What is read-only
    stays so. Pinned memory counts as host memory here; ``session.adopt`` of a CUDA session takes it too.
    """
    cdef Session here = session
    cdef Tensor tensor
    cdef int wanted = ANYWHERE if device is None else device_ordinal(device)
    if copy is not None and not isinstance(copy, bool):
        raise ArgumentError(f"copy: a bool or None, not {type(copy).__name__}", operation="from_dlpack")
    if here is None and wanted == ANYWHERE and not copy:
        return taken(array)
    if here is None:
        here = innermost_on(wanted if wanted != ANYWHERE else home_of(array))
    if here is None:
        with open_session("cpu" if wanted == HOST else wanted if wanted != ANYWHERE else home_of(array)) as momentary:
            return from_dlpack(array, session=momentary, copy=copy, device=device)
    tensor = here.adopt(array)
    if wanted != ANYWHERE and where_is(tensor.c.device) != wanted:
        raise ForeignDeviceError(f"device: the array is on {tensor.device}, not on {device!r}", operation="from_dlpack")
    return here.copy(tensor) if copy else tensor


cdef Tensor taken(object array):
    cdef const kina_dl_exchange_api *api
    if type(array) is Tensor:
        return array if innermost_on(where_is((<Tensor> array).c.device)) is None else adopted(array)
    api = foreign_type(type_of(array)).api
    if api != NULL:
        return take_in(request_managed(array, api), api)
    return adopted(array)


cdef Tensor adopted(object array):
    cdef int ordinal = home_of(array)
    cdef Session here = innermost_on(ordinal)
    if here is not None:
        return here.adopt(array)
    with momentary_on(ordinal) as momentary:
        return momentary.adopt(array)


cdef Tensor take_in(kina_dl_managed_tensor_versioned *managed, const kina_dl_exchange_api *api):
    cdef Session here
    cdef int ordinal
    try:
        ordinal = where_is(managed_device(managed))
        here = innermost_on(ordinal)
        momentary = None
        if here is None:
            momentary = momentary_on(ordinal)
            here = momentary.__enter__()
    except BaseException:
        drop_managed(managed)
        raise
    if momentary is None:
        return here.take_managed(managed, api, False)
    try:
        return here.take_managed(managed, api, True)
    finally:
        momentary.close()


cdef object momentary_on(int ordinal):
    """A session where an array says that it is."""
    try:
        return open_session("cpu" if ordinal == HOST else ordinal)
    except UnavailableError as error:
        raise DLPackError(f"device: the array is said to live on cuda:{ordinal}: {error}",
                          operation="from_dlpack") from error


cdef Session innermost_on(int ordinal):
    return innermost_host() if ordinal == HOST else innermost_cuda(ordinal)


cdef int where_is(kina_dl_device device) except -2:
    """The ordinal of a CUDA device; HOST."""
    if device.device_type == KINA_DEVICE_CPU or device.device_type == KINA_DEVICE_CUDA_HOST:
        return HOST
    if device.device_type in (KINA_DEVICE_CUDA, KINA_DEVICE_CUDA_MANAGED) and device.device_id >= 0:
        return device.device_id
    raise DLPackError(f"device: unknown device type {device.device_type}, number {device.device_id}",
                      operation="from_dlpack")


cdef int home_of(object array) except -2:
    """Where an array says that it is; the host for anything that says nothing."""
    if type(array) is Tensor:
        return where_is((<Tensor> array).c.device)
    if PyCapsule_CheckExact(array):
        return where_is(capsule_device(array))
    if not hasattr(type(array), "__dlpack_device__"):
        interface = request_interface(array, "__cuda_array_interface__")
        if interface is None:
            return HOST
        load_cuda()
        return cuda_array_ordinal(interface)
    return where_is(declared_device(array, "from_dlpack"))


set_taker(take_in)
