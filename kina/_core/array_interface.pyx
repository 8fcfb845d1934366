# cython: annotation_typing=False
"""The array interfaces beside DLPack, both ways: `__array_interface__`, on devices `__cuda_array_interface__`.

Dicts that say where an array lies and how. Nobody is told when such an array is dropped: a consumer keeps the object.

Source: NumPy, "The array interface protocol" (version 3); Numba, "CUDA Array Interface (Version 3)".
"""

from cpython.buffer cimport PyObject_CheckBuffer
from cpython.memoryview cimport PyMemoryView_GET_BUFFER
from cpython.number cimport PyNumber_Index
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport INT64_MAX, INT64_MIN, UINT64_MAX, int64_t, intptr_t, uint64_t, uintptr_t
from libc.string cimport memset

from kina._core.dlpack cimport KINA_CONSUMER_ORDERS, open_to_host, order_export
from kina._core.dtype cimport (
    DTYPE_BOOL,
    DTYPE_COMPLEX64,
    DTYPE_COMPLEX128,
    DTYPE_FLOAT16,
    DTYPE_FLOAT32,
    DTYPE_FLOAT64,
    DTYPE_INT8,
    DTYPE_INT64,
    DTYPE_UINT8,
    DTYPE_UINT64,
    DType,
    as_dtype,
)
from kina._core.host_memory cimport host_device, host_domain, host_runtime
from kina._core.host_tensor cimport numpy_view
from kina._core.layout cimport layout_c_strides, layout_describe, layout_size
from kina._core.status cimport check, last_error
from kina._core.storage cimport (
    KINA_DEVICE_CUDA,
    KINA_DEVICE_CUDA_MANAGED,
    KINA_MAX_NDIM,
    KINA_STORAGE_READ_ONLY,
    KINA_TENSOR_C_CONTIGUOUS,
    KINA_TENSOR_READ_ONLY,
    KINA_TENSOR_SELF_OVERLAP,
    kina_dl_device,
    kina_storage,
    kina_stream,
    kina_tensor_address,
    release_python_later,
    storage_adopt,
)
from kina._core.tensor cimport Tensor, is_host_readable, set_array_exporters, tensor_from_storage

from kina.errors import DLPackError, DTypeError, InternalError

__all__ = []


cdef home_stream_hook find_home_stream = NULL


cdef void set_home_stream_hook(home_stream_hook hook) noexcept:
    global find_home_stream
    find_home_stream = hook


cdef array_locator locate = NULL


cdef void set_array_locator(array_locator locator) noexcept:
    global locate
    locate = locator


cdef int cuda_array_ordinal(dict interface) except -2:
    if locate == NULL:
        raise InternalError("kina.cuda.array_interface is not loaded")
    return locate(interface)


# Out ------------------------------------------------------------------------------------------------------


cdef str typestr_of(DType dtype):
    """None for what the protocol has no letter for."""
    if dtype.id == DTYPE_BOOL:
        return "|b1"
    if DTYPE_INT8 <= dtype.id <= DTYPE_INT64:
        kind = "i"
    elif DTYPE_UINT8 <= dtype.id <= DTYPE_UINT64:
        kind = "u"
    elif dtype.id in (DTYPE_FLOAT16, DTYPE_FLOAT32, DTYPE_FLOAT64):
        kind = "f"
    elif dtype.id in (DTYPE_COMPLEX64, DTYPE_COMPLEX128):
        kind = "c"
    else:
        return None
    return f"{'|' if dtype.itemsize == 1 else '<'}{kind}{dtype.itemsize}"


cdef dict described(Tensor tensor, str typestr):
    """The fields that both protocols have."""
    cdef int64_t itemsize = tensor._dtype.itemsize
    strides = None
    if not tensor.c.flags & KINA_TENSOR_C_CONTIGUOUS:
        # The stride of an axis of one element is never used, may be anything, and might not fit when it is scaled.
        strides = tuple([tensor.c.strides[axis] * itemsize if tensor.c.shape[axis] > 1 else itemsize
                         for axis in range(tensor.c.ndim)])
    readonly = tensor.c.flags & (KINA_TENSOR_READ_ONLY | KINA_TENSOR_SELF_OVERLAP) != 0
    address = <uintptr_t> kina_tensor_address(&tensor.c) if tensor.c.size > 0 else 0
    return {"shape": tensor.shape, "typestr": typestr, "data": (address, readonly), "strides": strides, "version": 3}


cdef object cuda_interface(Tensor tensor):
    cdef intptr_t stream = 0
    cdef int status
    # An AttributeError, for then hasattr is False, and consumers look for another way.
    if tensor.c.device.device_type not in (KINA_DEVICE_CUDA, KINA_DEVICE_CUDA_MANAGED):
        raise AttributeError("__cuda_array_interface__: the tensor is in host memory")
    typestr = typestr_of(tensor._dtype)
    if typestr is None:
        raise AttributeError(f"__cuda_array_interface__ has no typestr for {tensor._dtype.name}: exchange it by DLPack "
                             "(from_dlpack)")
    if find_home_stream == NULL:
        raise InternalError("kina.cuda.array_interface is not loaded")
    with nogil:
        status = find_home_stream(tensor.c.storage, &stream)
    check(status)
    check(order_export(tensor.c.storage, KINA_CONSUMER_ORDERS))
    interface = described(tensor, typestr)
    interface["stream"] = stream
    return interface


cdef object host_interface(Tensor tensor):
    if not is_host_readable(tensor):
        raise AttributeError(f"__array_interface__: the tensor is on {tensor.device}; s.to_host(t) brings the values "
                             "to the host")
    typestr = typestr_of(tensor._dtype)
    if typestr is None:
        raise AttributeError(f"__array_interface__ has no typestr for {tensor._dtype.name}: numpy.asarray(t) has it "
                             "from ml_dtypes")
    check(open_to_host(tensor.c.storage))
    return described(tensor, typestr)


cdef object numpy_array(Tensor tensor, object dtype, object copy):
    """Of a tensor that the host can read; NumPy's contract for `__array__`."""
    check(open_to_host(tensor.c.storage))
    array = numpy_view(tensor, not tensor.c.flags & (KINA_TENSOR_READ_ONLY | KINA_TENSOR_SELF_OVERLAP))
    if dtype is not None:
        import numpy

        wanted = numpy.dtype(dtype)
        if wanted != array.dtype:
            if copy is not None and not copy:
                raise ValueError(f"__array__: the tensor holds {tensor._dtype.name}, and as {wanted} only a copy could "
                                 "be had, which copy=False forbids")
            return array.astype(wanted)
    return array.copy(order="K") if copy else array


set_array_exporters(cuda_interface, host_interface, numpy_array)


# In: the fields -------------------------------------------------------------------------------------------


cdef object refuse_field(str protocol, str field, str message):
    return DLPackError(f"{protocol}[{field!r}]: {message}", operation="adopt")


cdef object integer_of(object value, object low, object high, str protocol, str field):
    try:
        if isinstance(value, bool):
            raise TypeError
        number = PyNumber_Index(value)
    except TypeError:
        raise refuse_field(protocol, field, f"an int is needed, not {type(value).__name__}") from None
    if not low <= number <= high:
        raise refuse_field(protocol, field, f"{number} is not in {low} to {high}")
    return number


cdef dict request_interface(object source, str protocol):
    try:
        interface = getattr(source, protocol)
    except AttributeError:
        return None
    except DLPackError:
        raise
    except Exception as error:
        raise DLPackError(f"the producer ({type(source).__name__}) refuses its {protocol}: {error}",
                          operation="adopt") from error
    if not isinstance(interface, dict):
        raise DLPackError(f"{protocol} of {type(source).__name__} is a dict, not {type(interface).__name__}",
                          operation="adopt")
    return dict(interface)  # of a subclass too


cdef object field_of(dict interface, str protocol, str field):
    try:
        return interface[field]
    except KeyError:
        raise refuse_field(protocol, field, "it is missing") from None


cdef int check_version(dict interface, str protocol) except -1:
    # Earlier versions of the CUDA protocol say less, nothing else; those of the host's were no dicts.
    oldest = 0 if protocol == "__cuda_array_interface__" else 3
    version = field_of(interface, protocol, "version")
    integer_of(version, INT64_MIN, INT64_MAX, protocol, "version")
    if not oldest <= version <= 3:
        raise refuse_field(protocol, "version", f"{version} is not one that kina knows ({oldest} to 3)")
    return 0


cdef DType dtype_of_typestr(object typestr, str protocol):
    if not isinstance(typestr, str):
        raise refuse_field(protocol, "typestr", f"a str is needed, not {type(typestr).__name__}")
    order, kind, digits = typestr[:1], typestr[1:2], typestr[2:]
    if order not in ("<", ">", "|", "=") or kind == "" or kind not in "tbiufcmMOSUV" or not 0 < len(digits) <= 9 \
            or not (digits.isascii() and digits.isdigit()):
        raise refuse_field(protocol, "typestr", f"{typestr!r} is not a byte order, a kind and a number of bytes")
    nbytes = int(digits)
    why = "is of no dtype that kina stores"
    if kind in "iufc" and nbytes > 1 and order in (">", "|"):
        why = "is byte-swapped; kina stores native byte order" if order == ">" else "says nothing of the byte order"
    elif kind == "b" and nbytes == 1:
        return as_dtype("bool")
    elif kind in "iu" and nbytes in (1, 2, 4, 8):
        return as_dtype(f"{'u' if kind == 'u' else ''}int{8 * nbytes}")
    elif kind == "f" and nbytes in (2, 4, 8):
        return as_dtype(f"float{8 * nbytes}")
    elif kind == "c" and nbytes in (8, 16):
        return as_dtype(f"complex{8 * nbytes}")
    elif kind == "V":
        why = "is structured or opaque; kina stores numbers"
    raise DTypeError(f"{protocol}['typestr']: {typestr!r} {why}", operation="adopt")


cdef int check_description(dict interface, str protocol) except -1:
    """A `descr` that says more than the typestr is of a structure."""
    descr = interface.get("descr")
    if descr is None:
        return 0
    if not isinstance(descr, list):
        raise refuse_field(protocol, "descr", f"a list is needed, not {type(descr).__name__}")
    if descr != [("", interface["typestr"])]:
        raise DTypeError(f"{protocol}['descr']: {descr!r} is a structure; kina stores numbers", operation="adopt")
    return 0


cdef tuple tuple_of(object value, str protocol, str field):
    if not isinstance(value, tuple):
        raise refuse_field(protocol, field, f"a tuple is needed, not {type(value).__name__}")
    return tuple(value)  # of a subclass too


cdef int refuse_layout(int status, str protocol) except -1:
    """The recorded error of a layout check, as one of the field that it is about."""
    if status == 0:
        return 0
    message = (<bytes> last_error().message).decode("utf-8", "replace")
    field, _, rest = message.partition(": ")
    if field not in ("shape", "strides"):
        field, rest = "strides", message
    raise refuse_field(protocol, field, rest)


cdef DType read_claim(dict interface, str protocol, array_claim *claim):
    cdef int ndim, axis
    cdef int64_t size = 0
    check_version(interface, protocol)
    if interface.get("mask") is not None:
        raise refuse_field(protocol, "mask", "masked arrays are not taken: fill it, or adopt data and mask apart")
    cdef DType dtype = dtype_of_typestr(field_of(interface, protocol, "typestr"), protocol)
    check_description(interface, protocol)
    shape = tuple_of(field_of(interface, protocol, "shape"), protocol, "shape")
    if len(shape) > KINA_MAX_NDIM:
        raise refuse_field(protocol, "shape", f"{len(shape)} axes are more than the {KINA_MAX_NDIM} supported")
    ndim = <int> len(shape)
    for axis in range(ndim):
        claim.shape[axis] = integer_of(shape[axis], 0, INT64_MAX, protocol, "shape")
    refuse_layout(layout_size(b"adopt", ndim, claim.shape, &size), protocol)
    read_strides(interface.get("strides"), dtype, ndim, size, protocol, claim)
    memset(&claim.layout, 0, sizeof(claim.layout))
    claim.layout.ndim = ndim
    claim.layout.dtype.code = dtype.code
    claim.layout.dtype.bits = dtype.bits
    claim.layout.dtype.lanes = 1
    claim.layout.shape = claim.shape
    claim.layout.strides = claim.strides
    refuse_layout(layout_describe(b"adopt", &claim.layout), protocol)
    return dtype


cdef int read_strides(object strides, DType dtype, int ndim, int64_t size, str protocol, array_claim *claim) except -1:
    cdef int64_t itemsize = dtype.itemsize
    cdef int64_t step
    cdef int axis
    refuse_layout(layout_c_strides(b"adopt", ndim, claim.shape, claim.strides), protocol)
    if strides is None:
        return 0
    strides = tuple_of(strides, protocol, "strides")
    if len(strides) != ndim:
        raise refuse_field(protocol, "strides", f"{len(strides)} are given for {ndim} axes")
    for axis in range(ndim):
        step = integer_of(strides[axis], INT64_MIN, INT64_MAX, protocol, "strides")
        if size == 0 or claim.shape[axis] == 1:
            continue  # it is never used
        if step % itemsize != 0:
            raise refuse_field(protocol, "strides", f"axis {axis} steps {step} bytes, which is no multiple of the "
                               f"{itemsize} bytes of {dtype.name}")
        claim.strides[axis] = step // itemsize
    return 0


cdef int believe_address(object address, object readonly, str protocol, array_claim *claim) except -1:
    cdef uint64_t first
    if not isinstance(readonly, bool):
        raise refuse_field(protocol, "data", f"whether it is read-only is a bool, not {type(readonly).__name__}")
    first = integer_of(address, 0, UINT64_MAX, protocol, "data")
    claim.address = first
    claim.readonly = readonly
    if claim.layout.size == 0:
        return 0
    if first == 0:
        raise refuse_field(protocol, "data", f"NULL for {claim.layout.size} elements")
    if (claim.layout.span_low < 0 and <uint64_t> -claim.layout.span_low > first) \
            or <uint64_t> claim.layout.span_high > UINT64_MAX - first:
        raise refuse_field(protocol, "strides", f"bytes {claim.layout.span_low} to {claim.layout.span_high} around the "
                           "first element leave the address space")
    return 0


cdef int read_address(dict interface, str protocol, array_claim *claim) except -1:
    data = tuple_of(field_of(interface, protocol, "data"), protocol, "data")
    if len(data) != 2:
        raise refuse_field(protocol, "data", f"an address and whether it is read-only, not {len(data)} values")
    return believe_address(data[0], data[1], protocol, claim)


cdef Tensor tensor_of_claim(array_claim *claim, DType dtype, object owner, kina_dl_device device, kina_stream *stream,
                            uint64_t runtime, uint64_t domain):
    cdef kina_storage *storage
    cdef void *lowest = NULL
    if claim.layout.size > 0:
        lowest = <void *> (claim.address + claim.layout.span_low)
    Py_INCREF(owner)
    try:
        check(storage_adopt(&storage, lowest, <size_t> (claim.layout.span_high - claim.layout.span_low), device, stream,
                            runtime, domain, KINA_STORAGE_READ_ONLY if claim.readonly else 0, release_python_later,
                            <void *> owner))
    except BaseException:
        Py_DECREF(owner)
        raise
    return tensor_from_storage(storage, dtype, claim.layout.ndim, claim.shape, claim.strides,
                               <uint64_t> -claim.layout.span_low, 0, b"adopt")


# In: the host ---------------------------------------------------------------------------------------------


cdef str HOST = "__array_interface__"


cdef object read_buffer(dict interface, object data, array_claim *claim):
    """The memory as an object with the buffer protocol, which the protocol allows too; gives the buffer's holder."""
    cdef Py_buffer *buffer
    view = memoryview(data)
    if not view.c_contiguous:
        raise refuse_field(HOST, "data", "the buffer has gaps")
    buffer = PyMemoryView_GET_BUFFER(view)
    offset = integer_of(interface.get("offset", 0), 0, buffer.len, HOST, "offset")
    if claim.layout.size > 0 and (claim.layout.span_low + <int64_t> offset < 0
                                  or claim.layout.span_high > buffer.len - <int64_t> offset):
        raise refuse_field(HOST, "data", f"a buffer of {buffer.len} bytes, from its byte {offset} on, does not hold "
                           f"the bytes {claim.layout.span_low} to {claim.layout.span_high}")
    believe_address(<uintptr_t> buffer.buf + <uintptr_t> <int64_t> offset, bool(view.readonly), HOST, claim)
    return view


cdef Tensor adopt_array_interface(object source):
    cdef array_claim claim
    cdef DType dtype
    interface = request_interface(source, HOST)
    if interface is None:
        return None
    dtype = read_claim(interface, HOST, &claim)
    owner = source
    data = interface.get("data")
    if data is not None and PyObject_CheckBuffer(data):
        owner = read_buffer(interface, data, &claim)
    else:
        read_address(interface, HOST, &claim)
    return tensor_of_claim(&claim, dtype, owner, host_device(), NULL, host_runtime(), host_domain())
