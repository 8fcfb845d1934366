# cython: annotation_typing=False
"""Tensor: a storage and a frozen layout. Views share the storage; nothing here touches elements."""

cimport cython
from cpython.number cimport PyIndex_Check, PyNumber_AsSsize_t
from cpython.slice cimport PySlice_AdjustIndices, PySlice_Unpack
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from kina._core.dtype cimport DType
from kina._core.layout cimport (
    layout_broadcast,
    layout_c_strides,
    layout_describe,
    layout_permute,
    layout_reshape,
    layout_size,
    layout_slice,
)
from kina._core.shape cimport one_or_many, parse_extents, too_many_axes
from kina._core.status cimport check
from kina._core.storage cimport (
    KINA_DEVICE_CPU,
    KINA_DEVICE_CUDA_HOST,
    KINA_DEVICE_CUDA_MANAGED,
    KINA_MAX_NDIM,
    KINA_STORAGE_READ_ONLY,
    KINA_TENSOR_C_CONTIGUOUS,
    KINA_TENSOR_READ_ONLY,
    drain_python_releases,
    kina_release,
    kina_retain,
    kina_storage,
    kina_tensor,
)

from kina.errors import ArgumentError, InternalError, InvalidShapeError

__all__ = ["Tensor"]


cdef enum:
    INLINE_NDIM = 6

cdef bint under_construction = False
cdef dlpack_exporter export_through_dlpack = NULL


cdef void set_dlpack_exporter(dlpack_exporter exporter) noexcept:
    global export_through_dlpack
    export_through_dlpack = exporter


cdef array_exporter export_cuda_interface = NULL
cdef array_exporter export_host_interface = NULL
cdef numpy_exporter export_numpy = NULL
cdef buffer_exporter fill_buffer = NULL
cdef buffer_releaser release_buffer = NULL


cdef void set_array_exporters(array_exporter cuda, array_exporter host, numpy_exporter numpy) noexcept:
    global export_cuda_interface, export_host_interface, export_numpy
    export_cuda_interface = cuda
    export_host_interface = host
    export_numpy = numpy


cdef void set_buffer_exporter(buffer_exporter fill, buffer_releaser release) noexcept:
    global fill_buffer, release_buffer
    fill_buffer = fill
    release_buffer = release


cdef bint is_host_readable(Tensor tensor) noexcept:
    return tensor.c.device.device_type in (KINA_DEVICE_CPU, KINA_DEVICE_CUDA_HOST, KINA_DEVICE_CUDA_MANAGED)


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class Tensor:
    """Tensor()

    An array on the host or on a CUDA device: a counted storage and a layout frozen at creation. Sessions
    make tensors (``s.zeros``, ``s.from_host``, ``s.adopt``); calling the class is a TypeError.

    Indexing with ints, slices, ``...`` and ``None``, :meth:`reshape`, :meth:`permute`,
    :meth:`broadcast_to` and :meth:`as_readonly` give views: they share the storage, keep it alive and
    move no element. Nothing crosses to the host on its own: ``numpy.asarray(t)`` of a tensor on a device
    raises, and ``bool(t)``, ``float(t)`` and iteration do so everywhere.

    Others get the memory itself, without a copy: by DLPack (``from_dlpack`` of NumPy, PyTorch, CuPy and JAX); by
    ``__cuda_array_interface__`` where it is on a device; by ``numpy.asarray(t)``, ``memoryview(t)`` and
    ``__array_interface__`` where it is on the host. What is read-only, or repeats elements, leaves read-only.

    Notes
    -----
    ``==`` and ``hash`` go by identity, as for any object without values on the host.
    All faces are immutable and cheap, and may be read from any thread; the last reference may be dropped
    on any thread. ``t.strides`` counts elements, not bytes.
    """

    # NumPy leaves operators between an array and a Tensor alone (they are TypeErrors).
    __array_ufunc__ = None

    def __cinit__(self, *args, **kwargs):
        global under_construction
        if not under_construction:
            raise TypeError("a Tensor is made by a session: kina.zeros(...), s.from_host(...), s.adopt(...)")
        under_construction = False

    def __dealloc__(self):
        kina_release(self.c.storage)
        free(self._heap_dims)
        # The storage may just have queued a Python owner; the GIL is held, so it goes now, as users expect.
        drain_python_releases()

    # Faces ------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return tuple([self.c.shape[axis] for axis in range(self.c.ndim)])

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance between neighbours along each axis, in elements; may be negative or zero in views."""
        return tuple([self.c.strides[axis] for axis in range(self.c.ndim)])

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self._dtype

    @property
    def device(self) -> str:
        """Where the elements are: ``"cpu"``, or ``"cuda:"`` and the device ordinal."""
        cdef int kind = self.c.device.device_type
        if kind == KINA_DEVICE_CPU or kind == KINA_DEVICE_CUDA_HOST:
            return "cpu"
        return f"cuda:{self.c.device.device_id}"

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.c.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.c.size

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, ``size * itemsize``; a strided view spans more, a broadcast one less."""
        return self.c.size_bytes

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps. True for empty tensors."""
        return (self.c.flags & KINA_TENSOR_C_CONTIGUOUS) != 0

    @property
    def readonly(self) -> bool:
        """Whether writing is refused by name. Views that repeat elements are not written to either."""
        return (self.c.flags & KINA_TENSOR_READ_ONLY) != 0

    @property
    def allocation_domain(self) -> AllocationDomainId:
        """Who owns and retires the storage."""
        from kina._core.identity import AllocationDomainId

        return AllocationDomainId._issue(self.c.storage.domain)

    @property
    def runtime_identity(self) -> RuntimeIdentity:
        """The Runtime that the tensor belongs to."""
        from kina._core.identity import RuntimeIdentity

        return RuntimeIdentity._issue(self.c.storage.runtime)

    def __len__(self) -> int:
        if self.c.ndim == 0:
            raise TypeError("a tensor without axes has no len()")
        return self.c.shape[0]

    def __repr__(self) -> str:
        text = f"<kina.Tensor {self._dtype.name} {self.shape} on {self.device}"
        if not self.c.flags & KINA_TENSOR_C_CONTIGUOUS:
            text += f", strides {self.strides}"
        if self.c.flags & KINA_TENSOR_READ_ONLY:
            text += ", read-only"
        return text + ">"

    # Views ------------------------------------------------------------------------------------------------

    def __getitem__(self, key: object) -> Tensor:
        return basic_index(self, key if type(key) is tuple else (key,))

    def reshape(self, *shape: object) -> Tensor:
        """The same elements in C order under another shape, as a view.

        Parameters
        ----------
        *shape
            Extents, as one sequence or as separate ints; one of them may be -1 and is worked out.

        Raises
        ------
        InvalidShapeError
            The sizes differ.
        NonContiguousError
            Only a copy could have this shape (NumPy's rule for views); none is made.
        """
        cdef int64_t extents[KINA_MAX_NDIM]
        cdef int64_t strides[KINA_MAX_NDIM]
        cdef int ndim = parse_extents(one_or_many(shape), extents, b"Tensor.reshape")
        complete_shape(self, ndim, extents)
        check(layout_reshape(b"Tensor.reshape", self.c.ndim, self.c.shape, self.c.strides, ndim, extents,
                             strides))
        return tensor_view(self, ndim, extents, strides, 0, b"Tensor.reshape")

    def permute(self, *axes: int) -> Tensor:
        """The axes in another order, as a view.

        Parameters
        ----------
        *axes
            Every axis once, as one sequence or as separate ints; negative ones count from the end.

        Raises
        ------
        InvalidShapeError
            An axis is missing, named twice or does not exist.
        """
        cdef int64_t wanted[KINA_MAX_NDIM]
        cdef int order[KINA_MAX_NDIM]
        cdef int64_t shape[KINA_MAX_NDIM]
        cdef int64_t strides[KINA_MAX_NDIM]
        cdef int place
        cdef int count = parse_extents(one_or_many(axes), wanted, b"Tensor.permute")
        if count != self.c.ndim:
            raise InvalidShapeError(f"axes: {count} are named, the tensor has {self.c.ndim}",
                                    operation="Tensor.permute")
        for place in range(count):
            if not -self.c.ndim <= wanted[place] < self.c.ndim:
                raise InvalidShapeError(f"axes: {wanted[place]} is out of range for {self.c.ndim} axes",
                                        operation="Tensor.permute")
            order[place] = <int> (wanted[place] + self.c.ndim if wanted[place] < 0 else wanted[place])
        check(layout_permute(b"Tensor.permute", count, order, self.c.shape, self.c.strides, shape, strides))
        return tensor_view(self, count, shape, strides, 0, b"Tensor.permute")

    def broadcast_to(self, *shape: object) -> Tensor:
        """The elements repeated to a larger shape, as a view with stride 0 along the repeated axes.

        Parameters
        ----------
        *shape
            Extents, as one sequence or as separate ints.

        Raises
        ------
        InvalidShapeError
            An axis that is neither 1 nor equal would have to be stretched.

        Notes
        -----
        A view that repeats elements cannot be written to, and leaves through DLPack read-only.
        """
        cdef int64_t extents[KINA_MAX_NDIM]
        cdef int64_t strides[KINA_MAX_NDIM]
        cdef int ndim = parse_shape(one_or_many(shape), extents, b"Tensor.broadcast_to")
        check(layout_broadcast(b"Tensor.broadcast_to", self.c.ndim, self.c.shape, self.c.strides, ndim,
                               extents, strides))
        return tensor_view(self, ndim, extents, strides, 0, b"Tensor.broadcast_to")

    def as_readonly(self) -> Tensor:
        """A view of the same layout through which nothing can be written."""
        cdef Tensor view = tensor_view(self, self.c.ndim, self.c.shape, self.c.strides, 0,
                                       b"Tensor.as_readonly")
        view.c.flags |= KINA_TENSOR_READ_ONLY
        return view

    # DLPack -----------------------------------------------------------------------------------------------

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None,
                   dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> object:
        """A DLPack capsule that shares the storage (versioned if `max_version` allows, else legacy).

        Parameters
        ----------
        stream
            Host: None. CUDA: the consumer's stream, ordered after this tensor's pending work by an event:
            None or 1 legacy default, 2 per-thread default, a handle; -1: the consumer orders for itself. Managed
            memory without a stream is the host's to read.
        max_version
            The newest DLPack version that the consumer understands.
        dl_device
            Where the consumer wants it; only where it is already. Managed memory may be named as its device's (for
            PyTorch, which does not know it) or the host's, pinned memory as the host's.
        copy
            True: a compact copy (host only). Otherwise the storage is shared.

        Raises
        ------
        DLPackError
            A request that cannot be honoured, named; a legacy capsule of a read-only tensor. Pinned and managed memory
            for the host while a device may not be past it: call ``synchronize()`` of the session first.

        Notes
        -----
        The storage lives until the consumer drops it. No host wait.
        """
        if export_through_dlpack == NULL:
            raise InternalError("kina._core.dlpack is not loaded")
        return export_through_dlpack(self, stream, max_version, dl_device, copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.c.device.device_type, self.c.device.device_id

    def to_dlpack(self, *, stream: int | None = None, versioned: bool = True) -> object:
        """A DLPack capsule that shares the storage: versioned, or legacy where told.

        Same rules as ``__dlpack__``. A capsule that nobody consumes frees itself.
        """
        if export_through_dlpack == NULL:
            raise InternalError("kina._core.dlpack is not loaded")
        return export_through_dlpack(self, stream, (1, 3) if versioned else None, None, None)

    # The protocols beside it ------------------------------------------------------------------------------

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """The CUDA Array Interface, version 3, of memory on a device.

        ``stream`` is the home stream: whatever the tensor's session enqueued so far is done when that is past it, and
        the consumer waits for it. Who reads this may use the memory on any stream, so that it goes back only when the
        whole device has been waited for (``s.synchronize()``). The consumer keeps the tensor.

        Raises
        ------
        AttributeError
            The tensor is in host memory, or of a dtype that the protocol cannot say (bfloat16, fp8): DLPack can.
        UnsupportedError
            The home stream is being captured into a graph, which whoever waits for it would end.

        Notes
        -----
        Source: Numba, "CUDA Array Interface (Version 3)". No host wait. Any thread.
        """
        if export_cuda_interface == NULL:
            raise InternalError("kina._core.array_interface is not loaded")
        return export_cuda_interface(self)

    @property
    def __array_interface__(self) -> dict[str, object]:
        """NumPy's array interface, version 3, of host memory. The consumer keeps the tensor.

        Raises
        ------
        AttributeError
            The tensor is on a device, or of a dtype that the protocol cannot say (bfloat16, fp8).
        DLPackError
            Pinned or managed memory that the device may not be past; ``s.synchronize()`` waits for it.
        """
        if export_host_interface == NULL:
            raise InternalError("kina._core.array_interface is not loaded")
        return export_host_interface(self)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if fill_buffer == NULL:
            raise InternalError("kina._core.buffers is not loaded")
        fill_buffer(self, buffer, flags)
        buffer.obj = self

    def __releasebuffer__(self, Py_buffer *buffer):
        release_buffer(buffer)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> numpy.ndarray:
        """The memory of a host tensor as a NumPy array; ml_dtypes has the dtypes that NumPy lacks.

        Parameters
        ----------
        dtype
            What NumPy calls a dtype. Another than the tensor's is a converted copy.
        copy
            True: a copy. False: never one. None: only where `dtype` needs it.

        Raises
        ------
        TypeError
            The tensor is on a device: nothing crosses to the host on its own.
        ValueError
            `copy` is False, and only a copy could have that dtype.
        DLPackError
            Pinned or managed memory that the device may not be past; ``s.synchronize()`` waits for it.

        Notes
        -----
        The array keeps the storage. It cannot be written to where the tensor is read-only or repeats elements.
        """
        if not is_host_readable(self):
            raise refusal("a NumPy array")
        if export_numpy == NULL:
            raise InternalError("kina._core.array_interface is not loaded")
        return export_numpy(self, dtype, copy)

    # What a tensor refuses --------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        raise refusal("a truth value")

    def __int__(self) -> int:
        raise refusal("an int")

    def __index__(self) -> int:
        raise refusal("an index")

    def __float__(self) -> float:
        raise refusal("a float")

    def __complex__(self) -> complex:
        raise refusal("a complex")

    def __iter__(self) -> object:
        raise TypeError("a Tensor is not iterated: t[i] gives views, s.to_host(t) gives the values")

    def __reduce_ex__(self, protocol: int) -> object:
        raise TypeError("a Tensor is neither copied nor pickled on its own: s.copy(t) copies, s.to_host(t) "
                        "gives a NumPy array to keep")


cdef object refusal(str what):
    return TypeError(f"a Tensor does not become {what} on its own: s.to_host(t) brings the values to the "
                     f"host")


cdef const kina_tensor *tensor_of(object tensor) except NULL:
    if type(tensor) is not Tensor:
        raise TypeError(f"a kina.Tensor is needed, not {type(tensor).__name__}")
    return &(<Tensor> tensor).c


# Making tensors -------------------------------------------------------------------------------------------


cdef Tensor empty_object():
    global under_construction
    under_construction = True
    try:
        return Tensor.__new__(Tensor)
    except BaseException:
        under_construction = False
        raise


cdef int set_dims(Tensor tensor, int ndim, const int64_t *shape, const int64_t *strides,
                  const char *operation) except -1:
    cdef int64_t *dims = tensor._inline_dims
    if ndim > INLINE_NDIM:
        if ndim > KINA_MAX_NDIM:
            raise too_many_axes(ndim, operation)
        dims = tensor._heap_dims = <int64_t *> malloc(2 * ndim * sizeof(int64_t))
        if dims == NULL:
            raise MemoryError
    tensor.c.ndim = ndim
    tensor.c.shape = dims
    tensor.c.strides = dims + ndim
    if ndim == 0:
        return 0  # whoever has no axes may have NULL for them
    memcpy(tensor.c.shape, shape, ndim * sizeof(int64_t))
    if strides != NULL:
        memcpy(tensor.c.strides, strides, ndim * sizeof(int64_t))
        return 0
    return check(layout_c_strides(operation, ndim, tensor.c.shape, tensor.c.strides))


cdef Tensor tensor_from_storage(kina_storage *storage, DType dtype, int ndim, const int64_t *shape,
                                const int64_t *strides, uint64_t byte_offset, uint64_t flags,
                                const char *operation):
    cdef Tensor tensor
    try:
        tensor = empty_object()
    except BaseException:
        kina_release(storage)
        raise
    tensor.c.storage = storage  # from here on the tensor's deallocation releases it
    tensor.c.data = storage.data
    tensor.c.device = storage.device
    tensor.c.allocator = storage.resource
    tensor.c.stream = storage.stream
    tensor.c.dtype.code = dtype.code
    tensor.c.dtype.bits = dtype.bits
    tensor.c.dtype.lanes = 1
    tensor.c.byte_offset = byte_offset
    tensor.c.flags = flags & KINA_TENSOR_READ_ONLY
    if storage.flags & KINA_STORAGE_READ_ONLY:
        tensor.c.flags = KINA_TENSOR_READ_ONLY
    tensor._dtype = dtype
    set_dims(tensor, ndim, shape, strides, operation)
    check(layout_describe(operation, &tensor.c))
    return tensor


cdef Tensor tensor_view(Tensor base, int ndim, const int64_t *shape, const int64_t *strides, int64_t offset,
                        const char *operation):
    # Whatever `offset` is, it was reached by indices within the extents, so it lies in the span or names no
    # element; layout_describe checks the span of the view all the same.
    kina_retain(base.c.storage)
    return tensor_from_storage(base.c.storage, base._dtype, ndim, shape, strides,
                               base.c.byte_offset + <uint64_t> (offset * base._dtype.itemsize), base.c.flags,
                               operation)


# Reading what Python hands over ---------------------------------------------------------------------------


cdef int complete_shape(Tensor tensor, int ndim, int64_t *extents) except -1:
    """Work out a -1 and compare the sizes, for reshape."""
    cdef int axis
    cdef int unknown = -1
    cdef int64_t size = 0
    for axis in range(ndim):
        if extents[axis] == -1:
            if unknown >= 0:
                raise InvalidShapeError("shape: only one extent may be -1", operation="Tensor.reshape")
            unknown = axis
            extents[axis] = 1
    check(layout_size(b"Tensor.reshape", ndim, extents, &size))
    if unknown >= 0:
        if size == 0 or tensor.c.size % size != 0:
            extents[unknown] = -1
            raise size_mismatch(tensor, ndim, extents)
        extents[unknown] = tensor.c.size // size
    elif size != tensor.c.size:
        raise size_mismatch(tensor, ndim, extents)
    return 0


cdef object size_mismatch(Tensor tensor, int ndim, const int64_t *extents):
    wanted = tuple([extents[axis] for axis in range(ndim)])
    return InvalidShapeError(f"shape: {tensor.c.size} elements of {tensor.shape} do not fill {wanted}",
                             operation="Tensor.reshape")


cdef Tensor basic_index(Tensor tensor, tuple key):
    cdef int64_t shape[KINA_MAX_NDIM]
    cdef int64_t strides[KINA_MAX_NDIM]
    cdef int64_t offset = 0
    cdef int64_t nowhere = 0
    cdef Py_ssize_t start, stop, step, count, position
    cdef int axis = 0
    cdef int ndim = 0
    cdef int consumed = 0
    cdef int added = 0
    cdef int taken = 0
    cdef int ellipses = 0
    # Once there is no element to name, the strides may be anything, and nothing is added to the offset any
    # more.
    cdef bint empty = tensor.c.size == 0
    for item in key:
        if item is None:
            added += 1
        elif item is Ellipsis:
            ellipses += 1
        elif isinstance(item, slice):
            consumed += 1
        elif PyIndex_Check(item) and not isinstance(item, bool):
            consumed += 1
            taken += 1
        else:
            raise ArgumentError("tensors are indexed by ints, slices, '...' and None, not "
                                f"{type(item).__name__}: anything else would need a copy")
    if ellipses > 1:
        raise IndexError("an index has at most one ellipsis ('...')")
    if consumed > tensor.c.ndim:
        raise IndexError(f"too many indices: {consumed} for {tensor.c.ndim} axes")
    if tensor.c.ndim - taken + added > KINA_MAX_NDIM:
        raise too_many_axes(tensor.c.ndim - taken + added, b"Tensor.__getitem__")
    for item in key:
        if item is None:
            shape[ndim] = 1
            strides[ndim] = 0
            ndim += 1
        elif item is Ellipsis:
            keep_axes(tensor, tensor.c.ndim - consumed, &axis, &ndim, shape, strides)
        elif isinstance(item, slice):
            PySlice_Unpack(item, &start, &stop, &step)
            count = PySlice_AdjustIndices(tensor.c.shape[axis], &start, &stop, step)
            shape[ndim] = count
            empty = empty or count == 0
            check(layout_slice(b"Tensor.__getitem__", start, step, count, tensor.c.strides[axis],
                               &nowhere if empty else &offset, &strides[ndim]))
            ndim += 1
            axis += 1
        else:
            position = index_of(item, axis, tensor.c.shape[axis])
            if not empty:
                offset += position * tensor.c.strides[axis]
            axis += 1
    keep_axes(tensor, tensor.c.ndim - axis, &axis, &ndim, shape, strides)
    return tensor_view(tensor, ndim, shape, strides, offset, b"Tensor.__getitem__")


cdef void keep_axes(Tensor tensor, int count, int *axis, int *ndim, int64_t *shape,
                    int64_t *strides) noexcept:
    """Take the next `count` axes as they are."""
    memcpy(shape + ndim[0], tensor.c.shape + axis[0], count * sizeof(int64_t))
    memcpy(strides + ndim[0], tensor.c.strides + axis[0], count * sizeof(int64_t))
    axis[0] += count
    ndim[0] += count


cdef Py_ssize_t index_of(object item, int axis, int64_t extent) except -1:
    cdef Py_ssize_t position
    try:
        position = PyNumber_AsSsize_t(item, IndexError)
    except TypeError as error:
        raise ArgumentError(f"tensors are indexed by ints, slices, '...' and None: {error}") from error
    if not -extent <= position < extent:
        raise IndexError(f"index {position} is out of bounds for axis {axis} of {extent} elements")
    return position + extent if position < 0 else position
