"""DLPack 1.3, both ways: capsules of tensors, tensors of capsules.

Written from the specification (https://dmlc.github.io/dlpack/latest/). Exports share the storage; imports
adopt the memory and owe the producer one call of its deleter.
"""

from cpython.pycapsule cimport (
    PyCapsule_CheckExact,
    PyCapsule_GetName,
    PyCapsule_GetPointer,
    PyCapsule_IsValid,
    PyCapsule_New,
    PyCapsule_SetName,
)
from libc.stdint cimport INT64_MAX, UINT64_MAX, int64_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset, strcmp

from kina._core.dtype cimport DType, dtype_from_dlpack
from kina._core.foreign_types cimport refuse_lazy
from kina._core.host_memory cimport host_device, host_domain, host_resource, host_runtime
from kina._core.layout cimport layout_c_strides, layout_describe, layout_gather, layout_size
from kina._core.status cimport KINA_DLPACK, KINA_OUT_OF_MEMORY, check, fail, last_error
from kina._core.storage cimport (
    KINA_DEVICE_CPU,
    KINA_DEVICE_CUDA,
    KINA_DEVICE_CUDA_HOST,
    KINA_DEVICE_CUDA_MANAGED,
    KINA_DLPACK_FLAG_IS_COPIED,
    KINA_DLPACK_FLAG_READ_ONLY,
    KINA_DLPACK_MAJOR,
    KINA_DLPACK_MINOR,
    KINA_MAX_NDIM,
    KINA_STORAGE_READ_ONLY,
    KINA_TENSOR_READ_ONLY,
    KINA_TENSOR_SELF_OVERLAP,
    drain_python_releases,
    interpreter_is_finalizing,
    kina_dl_device,
    kina_dl_managed_tensor,
    kina_dl_managed_tensor_versioned,
    kina_dl_tensor,
    kina_dl_version,
    kina_exception,
    kina_exception_restore,
    kina_exception_save,
    kina_release,
    kina_retain,
    kina_storage,
    kina_stream,
    kina_tensor,
    kina_tensor_address,
    storage_adopt,
    storage_allocate,
)
from kina._core.tensor cimport Tensor, set_dlpack_exporter, tensor_from_storage

from kina.errors import DLPackError

__all__ = []


cdef const char *LEGACY = b"dltensor"
cdef const char *LEGACY_USED = b"used_dltensor"
cdef const char *VERSIONED = b"dltensor_versioned"
cdef const char *VERSIONED_USED = b"used_dltensor_versioned"

cdef export_hook exporting = NULL
cdef work_stream_hook working = NULL
cdef host_access_hook reading = NULL


cdef void set_export_hook(export_hook hook) noexcept:
    global exporting
    exporting = hook


cdef void set_work_stream_hook(work_stream_hook hook) noexcept:
    global working
    working = hook


cdef void set_host_access_hook(host_access_hook hook) noexcept:
    global reading
    reading = hook


cdef int order_export(kina_storage *storage, int64_t consumer_stream) noexcept nogil:
    if exporting == NULL:
        return fail(KINA_DLPACK, b"__dlpack__", b"stream: no CUDA session layer is loaded to order the export")
    return exporting(storage, consumer_stream)


cdef int export_work_stream(int device_id, void **out) noexcept nogil:
    if working == NULL:
        out[0] = <void *> 1  # no session is open: the legacy stream
        return 0
    return working(device_id, out)


cdef int check_host_access(kina_storage *storage) noexcept nogil:
    return 0 if reading == NULL else reading(storage)


cdef bint device_writes(const kina_dl_device *device) noexcept nogil:
    return device.device_type in (KINA_DEVICE_CUDA, KINA_DEVICE_CUDA_MANAGED)


# Export: managed tensors ----------------------------------------------------------------------------------


cdef void delete_versioned(kina_dl_managed_tensor_versioned *managed) noexcept nogil:
    kina_release(managed.manager_ctx)
    free(managed)


cdef void delete_legacy(kina_dl_managed_tensor *managed) noexcept nogil:
    kina_release(managed.manager_ctx)
    free(managed)


cdef void describe_export(kina_dl_tensor *target, const kina_tensor *source, int64_t *dims) noexcept nogil:
    # Consumers have mishandled byte_offset and NULL strides often enough: neither leaves this house.
    target.data = kina_tensor_address(source) if source.size > 0 else NULL  # as the standard has it
    target.device = source.device
    target.ndim = source.ndim
    target.dtype = source.dtype
    target.shape = dims
    target.strides = dims + source.ndim
    target.byte_offset = 0
    memcpy(target.shape, source.shape, source.ndim * sizeof(int64_t))
    memcpy(target.strides, source.strides, source.ndim * sizeof(int64_t))


cdef int export_versioned(const kina_tensor *tensor, kina_dl_version version, uint64_t flags,
                          kina_dl_managed_tensor_versioned **out) noexcept nogil:
    cdef kina_dl_managed_tensor_versioned *managed = <kina_dl_managed_tensor_versioned *> malloc(
        sizeof(kina_dl_managed_tensor_versioned) + 2 * tensor.ndim * sizeof(int64_t))
    out[0] = managed
    if managed == NULL:
        return fail(KINA_OUT_OF_MEMORY, b"__dlpack__", b"no host memory for a DLPack export")
    describe_export(&managed.dl_tensor, tensor, <int64_t *> (managed + 1))
    managed.version = version
    managed.flags = flags
    managed.deleter = delete_versioned
    managed.manager_ctx = tensor.storage
    kina_retain(tensor.storage)
    return 0


cdef int order_consumer(const kina_tensor *tensor, int64_t consumer) noexcept nogil:
    if device_writes(&tensor.device) and consumer != KINA_CONSUMER_HOST:
        return order_export(tensor.storage, consumer)
    if tensor.device.device_type == KINA_DEVICE_CUDA:
        return fail(KINA_DLPACK, b"dlpack", b"the host does not reach memory of a device: to_host copies it")
    return open_to_host(tensor.storage)


cdef int open_to_host(kina_storage *storage) noexcept nogil:
    cdef int status
    if storage.stream == NULL:
        return 0  # pinned memory that a host session adopted, too: no work of kina's is pending on it
    status = check_host_access(storage)
    if status != 0:
        return status
    return order_export(storage, KINA_CONSUMER_HOST)


cdef int export_tensor(const kina_tensor *tensor, int64_t consumer,
                       kina_dl_managed_tensor_versioned **out) noexcept nogil:
    cdef uint64_t flags = 0
    cdef int status = order_consumer(tensor, consumer)
    out[0] = NULL
    if status != 0:
        return status
    if tensor.flags & (KINA_TENSOR_READ_ONLY | KINA_TENSOR_SELF_OVERLAP):
        flags = KINA_DLPACK_FLAG_READ_ONLY
    return export_versioned(tensor, kina_dl_version(KINA_DLPACK_MAJOR, KINA_DLPACK_MINOR), flags, out)


cdef int export_legacy(const kina_tensor *tensor, kina_dl_managed_tensor **out) noexcept nogil:
    cdef kina_dl_managed_tensor *managed = <kina_dl_managed_tensor *> malloc(
        sizeof(kina_dl_managed_tensor) + 2 * tensor.ndim * sizeof(int64_t))
    out[0] = managed
    if managed == NULL:
        return fail(KINA_OUT_OF_MEMORY, b"__dlpack__", b"no host memory for a DLPack export")
    describe_export(&managed.dl_tensor, tensor, <int64_t *> (managed + 1))
    managed.deleter = delete_legacy
    managed.manager_ctx = tensor.storage
    kina_retain(tensor.storage)
    return 0


cdef void destroy_capsule(object capsule) noexcept:
    # A capsule that was consumed has another name by now.
    cdef kina_exception kept
    cdef kina_dl_managed_tensor_versioned *versioned
    cdef kina_dl_managed_tensor *legacy
    kina_exception_save(&kept)
    if PyCapsule_IsValid(capsule, VERSIONED):
        versioned = <kina_dl_managed_tensor_versioned *> PyCapsule_GetPointer(capsule, VERSIONED)
        if versioned.deleter != NULL:
            versioned.deleter(versioned)
    elif PyCapsule_IsValid(capsule, LEGACY):
        legacy = <kina_dl_managed_tensor *> PyCapsule_GetPointer(capsule, LEGACY)
        if legacy.deleter != NULL:
            legacy.deleter(legacy)
    drain_python_releases()
    kina_exception_restore(&kept)


# Export: the Python protocol ------------------------------------------------------------------------------


cdef object refuse_export(str message):
    return DLPackError(message, operation="__dlpack__")


cdef int64_t consumer_stream(kina_dl_device where, object stream) except? -2:
    """The stream argument as DLPack means it; host memory has none."""
    if not device_writes(&where):
        if stream is not None:
            raise refuse_export(f"stream: host memory has no stream, got {stream!r}")
        return KINA_CONSUMER_HOST
    if stream is None:  # NumPy takes managed memory too, and has no stream to name
        return KINA_CONSUMER_HOST if where.device_type == KINA_DEVICE_CUDA_MANAGED else 1
    if not isinstance(stream, int) or isinstance(stream, bool):
        raise refuse_export(f"stream: an int or None, not {type(stream).__name__}")
    if stream == 0:
        raise refuse_export("stream: 0 is ambiguous; 1 is the legacy default stream, 2 the per-thread one")
    if stream < -1 or stream > INT64_MAX:
        raise refuse_export(f"stream: {stream} is not a stream handle")
    return stream


cdef kina_dl_version agreed_version(object max_version) except *:
    """major 0 stands for the legacy form."""
    cdef kina_dl_version version = kina_dl_version(0, 0)
    if max_version is None:
        return version
    try:
        major, minor = max_version
        if major < 0 or minor < 0:
            raise ValueError
        if major >= KINA_DLPACK_MAJOR:
            version.major = KINA_DLPACK_MAJOR
            version.minor = KINA_DLPACK_MINOR if major > KINA_DLPACK_MAJOR else min(minor, KINA_DLPACK_MINOR)
    except (TypeError, ValueError):
        raise refuse_export(f"max_version: a pair (major, minor) or None, not {max_version!r}") from None
    return version


cdef kina_dl_device exported_device(Tensor tensor, object dl_device) except *:
    """What the capsule is to say. Managed memory is the device's and the host's too, pinned memory the host's."""
    cdef kina_dl_device own = tensor.c.device
    cdef kina_dl_device wanted
    if dl_device is None:
        return own
    try:
        kind, number = dl_device
        kind, number = int(kind), int(number)
    except (TypeError, ValueError, OverflowError):
        raise refuse_export(f"dl_device: a pair (device type, device id) or None, not "
                            f"{dl_device!r}") from None
    if (kind, number) == (own.device_type, own.device_id):
        return own
    wanted.device_type = KINA_DEVICE_CUDA if kind == KINA_DEVICE_CUDA else KINA_DEVICE_CPU
    wanted.device_id = 0
    if own.device_type == KINA_DEVICE_CUDA_MANAGED and (kind, number) == (KINA_DEVICE_CUDA, own.device_id):
        wanted.device_id = own.device_id
        return wanted
    if kind == KINA_DEVICE_CPU:
        if own.device_type in (KINA_DEVICE_CUDA_MANAGED, KINA_DEVICE_CUDA_HOST) and number == 0:
            return wanted
        raise refuse_export("dl_device: nothing crosses to the host on its own; s.to_host(t) does it")
    raise refuse_export(f"dl_device: the tensor is on {tensor.__dlpack_device__()}, not on "
                        f"{(kind, number)}")


cdef Tensor compact_copy(Tensor tensor):
    """Of memory that the host can read, in host memory."""
    cdef kina_storage *storage
    cdef Tensor copied
    if tensor.c.storage.stream != NULL:
        check(check_host_access(tensor.c.storage))
    check(storage_allocate(&storage, host_resource(), NULL, tensor.c.size_bytes, host_device(), host_runtime(),
                           host_domain()))
    copied = tensor_from_storage(storage, tensor._dtype, tensor.c.ndim, tensor.c.shape, NULL, 0, 0,
                                 b"__dlpack__")
    with nogil:
        layout_gather(&tensor.c, <char *> copied.c.data)
    return copied


cdef object export_capsule(Tensor tensor, object stream, object max_version, object dl_device, object copy):
    cdef kina_dl_device where = exported_device(tensor, dl_device)
    cdef int64_t consumer = consumer_stream(where, stream)
    cdef kina_dl_version version = agreed_version(max_version)
    cdef kina_dl_managed_tensor_versioned *versioned = NULL
    cdef kina_dl_managed_tensor *legacy = NULL
    cdef uint64_t flags = 0
    if copy is not None and not isinstance(copy, bool):
        raise refuse_export(f"copy: a bool or None, not {type(copy).__name__}")
    if copy:
        if device_writes(&where):
            raise refuse_export("copy: an export never copies on a device; s.copy(t) does it")
        tensor = compact_copy(tensor)
        where = tensor.c.device
        flags |= KINA_DLPACK_FLAG_IS_COPIED
    if tensor.c.flags & (KINA_TENSOR_READ_ONLY | KINA_TENSOR_SELF_OVERLAP):
        flags |= KINA_DLPACK_FLAG_READ_ONLY
        if version.major == 0:
            raise refuse_export(
                "max_version: a legacy capsule cannot say that the tensor is read-only"
                + ("" if tensor.c.flags & KINA_TENSOR_READ_ONLY else " (a stride of 0 repeats elements)")
                + "; ask for DLPack 1.0 or newer"
            )
    check(order_consumer(&tensor.c, consumer))
    if version.major == 0:
        check(export_legacy(&tensor.c, &legacy))
        legacy.dl_tensor.device = where
        try:
            return PyCapsule_New(legacy, LEGACY, destroy_capsule)
        except BaseException:
            delete_legacy(legacy)
            raise
    check(export_versioned(&tensor.c, version, flags, &versioned))
    versioned.dl_tensor.device = where
    try:
        return PyCapsule_New(versioned, VERSIONED, destroy_capsule)
    except BaseException:
        delete_versioned(versioned)
        raise


set_dlpack_exporter(export_capsule)


# Import ---------------------------------------------------------------------------------------------------


cdef object refuse_import(str message):
    return DLPackError(message, operation="from_dlpack")


cdef kina_dl_device declared_device(object producer, str operation) except *:
    cdef kina_dl_device device
    if not hasattr(producer, "__dlpack_device__"):
        raise DLPackError(f"{type(producer).__name__} is no DLPack producer: it has no __dlpack_device__",
                          operation=operation)
    try:
        kind, number = producer.__dlpack_device__()
        device.device_type = kind
        device.device_id = number
    except Exception as error:
        raise DLPackError(f"device: __dlpack_device__ of {type(producer).__name__} failed: {error}",
                          operation=operation) from error
    return device


cdef object request_capsule(object producer, object stream, object dl_device, object copy):
    cdef kina_dl_managed_tensor_versioned *managed
    export = getattr(producer, "__dlpack__", None)
    if export is None:
        raise refuse_import(f"{type(producer).__name__} has no __dlpack__")
    refuse_lazy(producer, -1)
    wishes = {}
    if stream is not None:
        wishes["stream"] = stream
    asked = dict(wishes, max_version=(KINA_DLPACK_MAJOR, KINA_DLPACK_MINOR))
    if dl_device is not None:
        asked["dl_device"] = dl_device
    if copy is not None:
        asked["copy"] = copy
    try:
        try:
            capsule = export(**asked)
        except TypeError:
            # A producer from before DLPack 1.0 knows only `stream`, and can promise nothing else.
            if dl_device is not None or copy is not None:
                raise
            capsule = export(**wishes)
    except DLPackError:
        raise
    except Exception as error:
        raise refuse_import(f"the producer ({type(producer).__name__}) refuses: {error}") from error
    if not copy and PyCapsule_IsValid(capsule, VERSIONED):
        managed = <kina_dl_managed_tensor_versioned *> PyCapsule_GetPointer(capsule, VERSIONED)
        if managed.version.major == KINA_DLPACK_MAJOR:
            refuse_copied(managed.flags)
    return capsule


cdef int refuse_copied(uint64_t flags) except -1:
    if flags & KINA_DLPACK_FLAG_IS_COPIED:
        raise refuse_import("flags: the producer made a copy that nobody asked it for; a capsule of it, asked for with "
                            "copy=True, is taken")
    return 0


cdef void release_versioned(void *owner) noexcept nogil:
    cdef kina_dl_managed_tensor_versioned *managed = <kina_dl_managed_tensor_versioned *> owner
    # Any thread, no GIL: so the standard has it. A producer in Python takes the GIL itself, which it can no
    # longer once the interpreter goes; then the memory is left to the process's end.
    if managed.deleter != NULL and not interpreter_is_finalizing():
        managed.deleter(managed)


cdef void release_legacy(void *owner) noexcept nogil:
    cdef kina_dl_managed_tensor *managed = <kina_dl_managed_tensor *> owner
    if managed.deleter != NULL and not interpreter_is_finalizing():
        managed.deleter(managed)


cdef const char *live_name(object capsule) except NULL:
    cdef const char *name
    if not PyCapsule_CheckExact(capsule):
        raise refuse_import(f"capsule: __dlpack__ gave a {type(capsule).__name__}, not a capsule")
    name = PyCapsule_GetName(capsule)
    if name == NULL:
        raise refuse_import("capsule: it has no name")
    if strcmp(name, VERSIONED) == 0:
        return VERSIONED
    if strcmp(name, LEGACY) == 0:
        return LEGACY
    if strcmp(name, VERSIONED_USED) == 0 or strcmp(name, LEGACY_USED) == 0:
        raise refuse_import("capsule: it was consumed already; each import needs a capsule of its own")
    raise refuse_import(f"capsule: it is named {name.decode('utf-8', 'replace')!r}, not 'dltensor' or "
                        "'dltensor_versioned'")


cdef kina_dl_device capsule_device(object capsule) except *:
    cdef const char *name = live_name(capsule)
    cdef void *managed = PyCapsule_GetPointer(capsule, name)
    if name == LEGACY:
        return (<kina_dl_managed_tensor *> managed).dl_tensor.device
    check_version(capsule, <kina_dl_managed_tensor_versioned *> managed)
    return (<kina_dl_managed_tensor_versioned *> managed).dl_tensor.device


cdef struct kina_import:
    # What a managed tensor says, once it is believed.
    kina_tensor layout
    int64_t strides[KINA_MAX_NDIM]
    void *dtype                 # a DType, which lives as long as the process


cdef int check_capsule(object capsule, kina_dl_device device) except -1:
    cdef const char *name = live_name(capsule)
    cdef void *managed = PyCapsule_GetPointer(capsule, name)
    cdef kina_import found
    if name == LEGACY:
        check_fields(&(<kina_dl_managed_tensor *> managed).dl_tensor, device, &found.layout, found.strides)
    else:
        check_version(capsule, <kina_dl_managed_tensor_versioned *> managed)
        check_fields(&(<kina_dl_managed_tensor_versioned *> managed).dl_tensor, device, &found.layout, found.strides)
    return 0


cdef int check_version(object capsule, kina_dl_managed_tensor_versioned *managed) except -1:
    if managed.version.major == KINA_DLPACK_MAJOR:
        return 0
    # Of another major version only the deleter may be touched, and it must be.
    refusal = refuse_version(managed)
    PyCapsule_SetName(capsule, VERSIONED_USED)
    release_versioned(managed)
    raise refusal


cdef object refuse_version(kina_dl_managed_tensor_versioned *managed):
    return refuse_import(f"version: {managed.version.major}.{managed.version.minor} is not of the supported major "
                         f"version {KINA_DLPACK_MAJOR}")


cdef str device_name(kina_dl_device device):
    kinds = {KINA_DEVICE_CPU: "cpu", KINA_DEVICE_CUDA: "cuda", KINA_DEVICE_CUDA_HOST: "pinned host memory",
             KINA_DEVICE_CUDA_MANAGED: "managed memory"}
    kind = kinds.get(device.device_type)
    if kind is None:
        return f"an unknown device (device_type {device.device_type}, device_id {device.device_id})"
    return f"{kind} (device_type {device.device_type}, device_id {device.device_id})"


cdef int relabel(int status, str field) except -1:
    """Turn the recorded error of a layout check into a DLPackError that names the field."""
    if status == 0:
        return 0
    message = (<bytes> last_error().message).decode("utf-8", "replace")
    if not message.startswith(("shape", "strides", "byte_offset")):
        message = f"{field}: {message}"
    raise refuse_import(message)


cdef DType check_fields(kina_dl_tensor *given, kina_dl_device device, kina_tensor *layout, int64_t *strides):
    """Every field, before anything is believed. Fills `layout` with what the storage will need."""
    cdef uint64_t address
    if given.device.device_type != device.device_type or given.device.device_id != device.device_id:
        raise refuse_import(f"device: the tensor is on {device_name(given.device)}, {device_name(device)} is "
                            "needed")
    if given.ndim < 0 or given.ndim > KINA_MAX_NDIM:
        raise refuse_import(f"ndim: {given.ndim} is not in 0 to {KINA_MAX_NDIM}")
    if given.ndim > 0 and given.shape == NULL:
        raise refuse_import(f"shape: NULL for {given.ndim} axes")
    dtype = dtype_from_dlpack(given.dtype.code, given.dtype.bits, given.dtype.lanes)
    memset(layout, 0, sizeof(kina_tensor))
    layout.ndim = given.ndim
    layout.dtype = given.dtype
    layout.shape = given.shape
    layout.strides = given.strides
    if given.strides == NULL:
        relabel(layout_size_of(layout), "shape")
        relabel(layout_c_strides(b"from_dlpack", given.ndim, given.shape, strides), "shape")
        layout.strides = strides
    relabel(layout_describe(b"from_dlpack", layout), "strides")
    if layout.size == 0:
        return dtype
    if given.data == NULL:
        raise refuse_import(f"data: NULL for {layout.size} elements")
    address = <uintptr_t> given.data
    if given.byte_offset > UINT64_MAX - address:
        raise refuse_import(f"byte_offset: {given.byte_offset} leaves the address space")
    address += given.byte_offset
    if (layout.span_low < 0 and <uint64_t> -layout.span_low > address) \
            or <uint64_t> layout.span_high > UINT64_MAX - address:
        raise refuse_import(f"strides: bytes {layout.span_low} to {layout.span_high} around the first "
                            "element leave the address space")
    return dtype


cdef int layout_size_of(kina_tensor *layout) noexcept nogil:
    cdef int64_t size
    return layout_size(b"from_dlpack", layout.ndim, layout.shape, &size)


cdef kina_storage *adopt_given(kina_dl_tensor *given, uint64_t flags, void (*release)(void *) noexcept nogil,
                               void *managed, kina_dl_device device, kina_stream *stream, uint64_t runtime,
                               uint64_t domain, kina_import *found) except NULL:
    """From success on the storage owes the deleter's call, and nobody else does."""
    cdef kina_tensor *layout = &found.layout
    cdef kina_storage *storage
    cdef char *lowest = <char *> given.data
    cdef DType dtype
    dtype = check_fields(given, device, layout, found.strides)
    found.dtype = <void *> dtype
    if layout.size > 0:  # the offset of no elements is not to be believed
        lowest = lowest + given.byte_offset + layout.span_low
    check(storage_adopt(&storage, lowest, <size_t> (layout.span_high - layout.span_low), device, stream, runtime,
                        domain, KINA_STORAGE_READ_ONLY if flags & KINA_DLPACK_FLAG_READ_ONLY else 0, release, managed))
    return storage


cdef Tensor imported(kina_storage *storage, kina_import *found):
    return tensor_from_storage(storage, <DType> found.dtype, found.layout.ndim, found.layout.shape,
                               found.layout.strides, <uint64_t> -found.layout.span_low, 0, b"from_dlpack")


cdef Tensor consume_capsule(object capsule, kina_dl_device device, kina_stream *stream, uint64_t runtime,
                            uint64_t domain):
    cdef const char *name = live_name(capsule)
    cdef void *managed = PyCapsule_GetPointer(capsule, name)
    cdef kina_dl_managed_tensor_versioned *versioned = <kina_dl_managed_tensor_versioned *> managed
    cdef kina_storage *storage
    cdef kina_import found
    if name == VERSIONED:
        check_version(capsule, versioned)
        storage = adopt_given(&versioned.dl_tensor, versioned.flags, release_versioned, managed, device, stream,
                              runtime, domain, &found)
        PyCapsule_SetName(capsule, VERSIONED_USED)
    else:
        storage = adopt_given(&(<kina_dl_managed_tensor *> managed).dl_tensor, 0, release_legacy, managed, device,
                              stream, runtime, domain, &found)
        PyCapsule_SetName(capsule, LEGACY_USED)
    return imported(storage, &found)


cdef Tensor adopt_managed(kina_dl_managed_tensor_versioned *managed, kina_dl_device device, kina_stream *stream,
                          uint64_t runtime, uint64_t domain):
    cdef kina_storage *storage
    cdef kina_import found
    try:
        managed_device(managed)
        refuse_copied(managed.flags)
        storage = adopt_given(&managed.dl_tensor, managed.flags, release_versioned, managed, device, stream, runtime,
                              domain, &found)
    except BaseException:
        release_versioned(managed)
        raise
    return imported(storage, &found)


cdef Tensor adopt_host_side(Tensor tensor, kina_dl_device device, kina_stream *stream, uint64_t runtime,
                            uint64_t domain):
    cdef kina_dl_managed_tensor_versioned *managed
    check(export_tensor(&tensor.c, KINA_CONSUMER_HOST, &managed))
    managed.dl_tensor.device = device
    return adopt_managed(managed, device, stream, runtime, domain)


cdef kina_dl_device managed_device(kina_dl_managed_tensor_versioned *managed) except *:
    if managed.version.major != KINA_DLPACK_MAJOR:
        raise refuse_version(managed)
    return managed.dl_tensor.device


cdef void drop_managed(kina_dl_managed_tensor_versioned *managed) noexcept nogil:
    release_versioned(managed)
