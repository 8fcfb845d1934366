# cython: annotation_typing=False
"""kina.session: from a target to a session. On the path of every with statement, so it is short."""

import sys

from kina._core.session cimport Session

__all__ = ["cuda_ordinal", "device_ordinal", "session"]

cdef enum:
    HOST = -1
    KEPT_ORDINALS = 64

# Names that were read before. Only ordinals below the bound are kept, so that the dict is bounded too.
cdef dict known_names = {"cpu": HOST}
cdef object last_name = None
cdef int last_ordinal = HOST

cdef session_opener open_cuda = NULL
cdef session_finder find_cuda = NULL
cdef object runtime_class = None
cdef object cuda_loader = None


cdef void set_cuda_opener(session_opener opener, object runtime_type) noexcept:
    global open_cuda, runtime_class
    open_cuda = opener
    runtime_class = runtime_type


cdef void set_cuda_finder(session_finder finder) noexcept:
    global find_cuda
    find_cuda = finder


cdef Session innermost_cuda(int ordinal):
    return None if find_cuda == NULL else find_cuda(ordinal)  # nobody has one open where nobody could open one


def set_cuda_loader(loader) -> None:
    """`loader()` loads the rooms of CUDA, which lie above this one; they register themselves as openers."""
    global cuda_loader
    cuda_loader = loader


cdef int load_cuda() except -1:
    if open_cuda == NULL:
        cuda_loader()
    return 0


cdef object bad_config(str message, str operation):
    from kina.errors import InvalidConfigError  # not at the top: importing kina costs what is loaded here

    return InvalidConfigError(message, operation=operation)


def session(
    target: str | int | DeviceId | DeviceInfo | Runtime,
    *,
    stream: object = None,
    memory: MemoryResource | None = None,
) -> HostSession | CudaSession:
    """A new session of the calling thread, to be entered by ``with``.

    Parameters
    ----------
    target : str, int, DeviceId, DeviceInfo or Runtime
        ``"cpu"``; ``"cuda:N"``, the ordinal `N` itself, a DeviceId or a DeviceInfo (``"cuda"`` is
        ``"cuda:0"``): the thread's default Runtime of that device, made at first use; or a Runtime.
    stream : object with ``__cuda_stream__``, optional
        CUDA only: a stream of PyTorch, CuPy or cuda.core to run on; its owner is held.
    memory : kina.memory.MemoryResource, optional
        Where the memory of the session's tensors comes from: a resource of the target's device. Default: that of the
        Runtime, else that of ``kina.memory.set_default_resource``, else the Runtime's own pool.

    Returns
    -------
    Session
        Not entered yet; nothing happened on the device.

    Raises
    ------
    InvalidConfigError
        `target` names no device, or `stream` does not go with it.
    ForeignDeviceError
        `memory` hands out memory of another device than `target`.
    ArgumentError
        `memory` is no MemoryResource.
    UnavailableError
        CUDA cannot be used here; the message says what is missing.

    Notes
    -----
    Sessions nest, of the same and of different Runtimes. A session belongs to the thread that enters it;
    entering a Runtime that is open in another thread raises RuntimeBusyError.
    """
    cdef int ordinal
    cdef object found
    global last_name, last_ordinal
    if target is last_name and last_name is not None:  # the same literal as before, most of the time
        ordinal = last_ordinal
    elif type(target) is str:
        found = known_names.get(target)
        ordinal = found if found is not None else read_name(target)
        last_name, last_ordinal = target, ordinal
    elif type(target) is runtime_class:
        if stream is not None:
            raise bad_config("a Runtime has its stream already; leave stream= out", "session")
        return open_cuda(0, None, target, memory)
    elif open_cuda == NULL and "kina.cuda.runtime" in sys.modules:
        cuda_loader()  # it may be a Runtime: only the opener knows their class
        return session(target, stream=stream, memory=memory)
    else:
        ordinal = device_ordinal(target)
    if ordinal == HOST:
        return open_host(stream, memory)
    if open_cuda == NULL:
        cuda_loader()  # UnavailableError on a build without CUDA
    return open_cuda(ordinal, stream, None, memory)


cdef Session open_host(object stream, object memory):
    from kina._core.host_session import open_host_session

    if stream is not None:
        raise bad_config("a host session has no stream; leave stream= out", "session")
    return open_host_session(memory)


def device_ordinal(device: str | int | DeviceId | DeviceInfo) -> int:
    """The ordinal of ``"cuda:N"``, an int, a DeviceId or a DeviceInfo; -1 for ``"cpu"``.

    Whether the device exists is not asked.

    Raises
    ------
    InvalidConfigError
        Anything else.
    """
    if isinstance(device, str):
        return read_name(str(device))
    if isinstance(device, int) and not isinstance(device, bool) and 0 <= device <= 0x7FFFFFFF:
        return int(device)
    from kina._core.identity import DeviceId

    identity = device if isinstance(device, DeviceId) else getattr(device, "id", None)
    if isinstance(identity, DeviceId):
        return check_ordinal(identity.ordinal)
    raise bad_config(
        f"{device!r} names no device: 'cpu', 'cuda', 'cuda:N', an ordinal, a DeviceId or a DeviceInfo does, and for "
        "a session also a Runtime", "device",
    )


cdef object check_ordinal(object ordinal):
    if ordinal > 0x7FFFFFFF:
        raise bad_config(f"cuda:{ordinal} is beyond any device", "device")
    return ordinal


def cuda_ordinal(device: str | int | DeviceId | DeviceInfo) -> int:
    """The same for what must be a CUDA device."""
    cdef int ordinal = device_ordinal(device)
    if ordinal == HOST:
        raise bad_config(f"{device!r} is the host, not a CUDA device", "device")
    return ordinal


cdef int read_name(str name) except? -2:
    found = known_names.get(name)
    if found is not None:
        return found
    kind, colon, number = name.partition(":")
    if kind != "cuda" or (colon and not (number.isascii() and number.isdigit() and len(number) < 10)):
        raise bad_config(f"{name!r} names no device: 'cpu', 'cuda' or 'cuda:N' does", "device")
    ordinal = int(number) if colon else 0
    if ordinal < KEPT_ORDINALS and len(number) <= 2:
        known_names[name] = ordinal
    return ordinal
