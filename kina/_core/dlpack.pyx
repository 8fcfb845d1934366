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
from kina._core.host_memory cimport host_resource
from kina._core.layout cimport layout_c_strides, layout_describe, layout_gather, layout_size
from kina._core.status cimport KINA_OUT_OF_MEMORY, check, fail, last_error
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

cdef export_hook order_export = NULL


cdef void set_export_hook(export_hook hook) noexcept:
    global order_export
    order_export = hook


# Export: managed tensors ----------------------------------------------------------------------------------


cdef void delete_versioned(kina_dl_managed_tensor_versioned *managed) noexcept nogil:
    kina_release(managed.manager_ctx)
    free(managed)


cdef void delete_legacy(kina_dl_managed_tensor *managed) noexcept nogil:
    kina_release(managed.manager_ctx)
    free(managed)


cdef void describe_export(kina_dl_tensor *target, const kina_tensor *source, int64_t *dims) noexcept nogil:
    # Consumers have mishandled byte_offset and NULL strides often enough: neither leaves this house.
    target.data = kina_tensor_address(source) if source.data != NULL else NULL
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


cdef bint device_writes(Tensor tensor) noexcept:
    return tensor.c.device.device_type in (KINA_DEVICE_CUDA, KINA_DEVICE_CUDA_MANAGED)


cdef int64_t consumer_stream(Tensor tensor, object stream) except? -2:
    """The stream argument as DLPack means it; host tensors have none."""
    if not device_writes(tensor):
        if stream is not None:
            raise refuse_export(f"stream: host memory has no stream, got {stream!r}")
        return -1
    if stream is None:
        return 1
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


cdef int check_dl_device(Tensor tensor, object dl_device) except -1:
    if dl_device is None:
        return 0
    try:
        kind, number = dl_device
        kind, number = int(kind), int(number)
    except (TypeError, ValueError):
        raise refuse_export(f"dl_device: a pair (device type, device id) or None, not "
                            f"{dl_device!r}") from None
    if kind != tensor.c.device.device_type or number != tensor.c.device.device_id:
        if kind == KINA_DEVICE_CPU:
            raise refuse_export("dl_device: nothing crosses to the host on its own; s.to_host(t) does it")
        raise refuse_export(f"dl_device: the tensor is on {tensor.__dlpack_device__()}, not on "
                            f"{(kind, number)}")
    return 0


cdef Tensor compact_copy(Tensor tensor):
    cdef kina_storage *storage
    cdef Tensor copied
    check(storage_allocate(&storage, host_resource(), NULL, tensor.c.size_bytes, tensor.c.device,
                           tensor.c.storage.runtime, tensor.c.storage.domain))
    copied = tensor_from_storage(storage, tensor._dtype, tensor.c.ndim, tensor.c.shape, NULL, 0, 0,
                                 b"__dlpack__")
    with nogil:
        layout_gather(&tensor.c, <char *> copied.c.data)
    return copied


cdef object export_capsule(Tensor tensor, object stream, object max_version, object dl_device, object copy):
    cdef int64_t consumer = consumer_stream(tensor, stream)
    cdef kina_dl_version version = agreed_version(max_version)
    cdef kina_dl_managed_tensor_versioned *versioned = NULL
    cdef kina_dl_managed_tensor *legacy = NULL
    cdef uint64_t flags = 0
    cdef bint on_device = tensor.c.device.device_type != KINA_DEVICE_CPU
    check_dl_device(tensor, dl_device)
    if copy is not None and not isinstance(copy, bool):
        raise refuse_export(f"copy: a bool or None, not {type(copy).__name__}")
    if copy:
        if on_device:
            raise refuse_export("copy: an export never copies on a device; s.copy(t) does it")
        tensor = compact_copy(tensor)
        flags |= KINA_DLPACK_FLAG_IS_COPIED
    if tensor.c.flags & (KINA_TENSOR_READ_ONLY | KINA_TENSOR_SELF_OVERLAP):
        flags |= KINA_DLPACK_FLAG_READ_ONLY
        if version.major == 0:
            raise refuse_export(
                "max_version: a legacy capsule cannot say that the tensor is read-only"
                + ("" if tensor.c.flags & KINA_TENSOR_READ_ONLY else " (a stride of 0 repeats elements)")
                + "; ask for DLPack 1.0 or newer"
            )
    # Pinned memory that a host session adopted has no home stream: no work of kina's is pending on it.
    if device_writes(tensor) or tensor.c.storage.stream != NULL:
        if order_export == NULL:
            raise refuse_export("stream: no CUDA session layer is loaded to order the export")
        order_export(tensor.c.storage, consumer)
    if version.major == 0:
        check(export_legacy(&tensor.c, &legacy))
        try:
            return PyCapsule_New(legacy, LEGACY, destroy_capsule)
        except BaseException:
            delete_legacy(legacy)
            raise
    check(export_versioned(&tensor.c, version, flags, &versioned))
    try:
        return PyCapsule_New(versioned, VERSIONED, destroy_capsule)
    except BaseException:
        delete_versioned(versioned)
        raise


set_dlpack_exporter(export_capsule)


# Import ---------------------------------------------------------------------------------------------------


cdef object refuse_import(str message):
    return DLPackError(message, operation="from_dlpack")


cdef object request_capsule(object producer, object stream, object dl_device, object copy):
    export = getattr(producer, "__dlpack__", None)
    if export is None:
        raise refuse_import(f"{type(producer).__name__} has no __dlpack__")
    # PyTorch exports lazily negated tensors without a word, and the memory holds the opposite of the values.
    negated = getattr(type(producer), "is_neg", None)
    if negated is not None and negated(producer):
        raise refuse_import(f"the producer ({type(producer).__name__}) has its negative bit set, so its "
                            "memory does not hold its values: call .resolve_neg() first")
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
            return export(**asked)
        except TypeError:
            # A producer from before DLPack 1.0 knows only `stream`, and can promise nothing else.
            if dl_device is not None or copy is not None:
                raise
            return export(**wishes)
    except DLPackError:
        raise
    except Exception as error:
        raise refuse_import(f"the producer ({type(producer).__name__}) refuses: {error}") from error


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


cdef int check_version(object capsule, kina_dl_managed_tensor_versioned *managed) except -1:
    cdef uint64_t major = managed.version.major
    cdef uint64_t minor = managed.version.minor
    if major == KINA_DLPACK_MAJOR:
        return 0
    # Of another major version only the deleter may be touched, and it must be.
    PyCapsule_SetName(capsule, VERSIONED_USED)
    release_versioned(managed)
    raise refuse_import(f"version: {major}.{minor} is not of the supported major version {KINA_DLPACK_MAJOR}")


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


cdef Tensor consume_capsule(object capsule, kina_dl_device device, kina_stream *stream, uint64_t runtime,
                            uint64_t domain):
    cdef const char *name = live_name(capsule)
    cdef void *managed = PyCapsule_GetPointer(capsule, name)
    cdef kina_dl_tensor *given
    cdef kina_tensor layout
    cdef int64_t strides[KINA_MAX_NDIM]
    cdef char *lowest
    cdef kina_storage *storage
    cdef unsigned int flags = 0
    if name == VERSIONED:
        check_version(capsule, <kina_dl_managed_tensor_versioned *> managed)
        given = &(<kina_dl_managed_tensor_versioned *> managed).dl_tensor
        if (<kina_dl_managed_tensor_versioned *> managed).flags & KINA_DLPACK_FLAG_READ_ONLY:
            flags = KINA_STORAGE_READ_ONLY
    else:
        given = &(<kina_dl_managed_tensor *> managed).dl_tensor
    dtype = check_fields(given, device, &layout, strides)
    lowest = <char *> given.data
    if layout.size > 0:  # the offset of no elements is not to be believed
        lowest = lowest + given.byte_offset + layout.span_low
    check(storage_adopt(&storage, lowest, <size_t> (layout.span_high - layout.span_low), device, stream,
                        runtime, domain,
                        flags, release_versioned if name == VERSIONED else release_legacy, managed))
    # From here on the storage owes the deleter's call, so the capsule must not.
    PyCapsule_SetName(capsule, VERSIONED_USED if name == VERSIONED else LEGACY_USED)
    return tensor_from_storage(storage, dtype, layout.ndim, layout.shape, layout.strides,
                               <uint64_t> -layout.span_low, 0, b"from_dlpack")
