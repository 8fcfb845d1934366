"""Refs: what a raw block hands out of a tensor, and the rules for borrowing it."""

cimport cython
from libc.stdint cimport uint64_t, uintptr_t

from kina._core.construction cimport begin_construction, check_construction, end_construction
from kina._core.status cimport check
from kina._core.storage cimport (
    KINA_TENSOR_MISALIGNED,
    KINA_TENSOR_READ_ONLY,
    KINA_TENSOR_SELF_OVERLAP,
    kina_tensor_address,
)
from kina._core.tensor cimport Tensor
from kina._core.tokens cimport thread_token
from kina.cuda.context cimport device_check
from kina.cuda.cudatypes cimport CUstream
from kina.cuda.handles cimport kina_raw_block, kina_ref, kina_runtime

from kina.errors import InvalidLayoutError, SessionClosedError, WrongThreadError

__all__ = ["DeviceBytes", "StreamRef", "TensorMut", "TensorRef"]


cdef int check_block(kina_runtime *runtime, const char *operation) except -1:
    cdef kina_raw_block *block = runtime.block
    if block == NULL:
        raise SessionClosedError("no raw block of the module's Runtime is open: use it inside "
                                 "'with session.raw(...)'", operation=operation.decode())
    if block.node.thread != thread_token():
        raise WrongThreadError("the raw block of the module's Runtime belongs to another thread",
                               operation=operation.decode())
    check(device_check(runtime.device, operation))
    return 0


cdef int check_writable(Tensor tensor, str operation) except -1:
    if tensor.c.flags & KINA_TENSOR_READ_ONLY:
        raise InvalidLayoutError("the tensor is read-only and cannot be written", operation=operation)
    if tensor.c.flags & KINA_TENSOR_SELF_OVERLAP:
        raise InvalidLayoutError(
            f"writing through shape {tensor.shape} with strides {tensor.strides} would write elements more than once",
            operation=operation,
        )
    return 0


cdef int check_aligned(Tensor tensor, str operation) except -1:
    cdef int itemsize = tensor._dtype.itemsize
    if tensor.c.flags & KINA_TENSOR_MISALIGNED:
        raise InvalidLayoutError(
            f"the first element lies {<uintptr_t> kina_tensor_address(&tensor.c) % itemsize} bytes past a multiple of "
            f"{itemsize}, the alignment that kernels need of {tensor._dtype.name}", operation=operation,
        )
    return 0


cdef int check_borrow(kina_raw_block *block, uint64_t low, uint64_t high, bint writable, kina_ref *skip,
                      str operation) except -1:
    cdef kina_ref *ref
    while block != NULL:
        ref = block.refs
        while ref != NULL:
            if ref != skip and ref.low < high and low < ref.high and (writable or ref.writable):
                raise InvalidLayoutError(
                    f"the tensor overlaps a {'mut' if ref.writable else 'ref'} that lives in this raw block "
                    f"(bytes 0x{max(low, ref.low):x} to 0x{min(high, ref.high):x}); release that one first",
                    operation=operation,
                )
            ref = ref.next
        block = block.outer
    return 0


cdef void link(kina_raw_block *block, kina_ref *ref, uint64_t low, uint64_t high, bint writable) noexcept:
    ref.low = low
    ref.high = high
    ref.writable = writable
    ref.alive = 1
    ref.next = block.refs
    if block.refs != NULL:
        block.refs.previous = ref
    block.refs = ref


cdef void unlink(kina_raw_block *block, kina_ref *ref) noexcept:
    if not ref.alive:
        return
    ref.alive = 0
    if ref.previous != NULL:
        ref.previous.next = ref.next
    else:
        block.refs = ref.next
    if ref.next != NULL:
        ref.next.previous = ref.previous


@cython.no_gc  # nothing it refers to can refer back
cdef class TensorRef:
    """TensorRef()

    A tensor validated for reading by raw kernels: its span, its frozen layout, its owner. From ``raw.ref(tensor)``;
    dead after :meth:`release` or its block.
    """

    def __cinit__(self):
        check_construction(self)

    def __dealloc__(self):
        unlink(self.block, &self.c)

    cdef void unlink(self) noexcept:
        unlink(self.block, &self.c)

    def release(self) -> None:
        """End the borrow early. Idempotent."""
        self.unlink()

    @property
    def alive(self) -> bool:
        """Can it still be used?"""
        return self.c.alive != 0

    @property
    def writable(self) -> bool:
        """Is it a mut?"""
        return self.c.writable != 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the tensor."""
        return self._tensor.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the tensor, in elements."""
        return self._tensor.strides

    @property
    def dtype(self) -> DType:
        """DType of the tensor."""
        return self._tensor._dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self._tensor.c.size_bytes

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied: it is a borrow of its raw block")

    def __repr__(self) -> str:
        state = "" if self.c.alive else ", dead"
        return f"<kina.{type(self).__name__} shape={self._tensor.shape} dtype={self._tensor._dtype.name}{state}>"


@cython.no_gc  # nothing it refers to can refer back
cdef class TensorMut(TensorRef):
    """TensorMut()

    A tensor validated for writing by raw kernels. From ``raw.mut(tensor)``; nothing that overlaps it can be borrowed or
    passed to a kernel while it lives.
    """


@cython.no_gc  # nothing it refers to can refer back
cdef class DeviceBytes:
    """DeviceBytes()

    Scratch memory of a raw block, from ``raw.workspace(nbytes)``, for kernels and libraries: an argument of a parameter
    that a signature calls ``ptr``. Its contents are undefined. It ends with :meth:`release`, with its last reference or
    with its block; the memory goes back in the order of the session's stream, so that work enqueued before may still
    use it.

    Attributes
    ----------
    nbytes : int
        Its size in bytes; the address is aligned to 256.
    """

    def __cinit__(self):
        check_construction(self)

    def __dealloc__(self):
        unlink(self.block, &self.c)

    cdef void end(self) noexcept:
        unlink(self.block, &self.c)
        self._tensor = None

    def release(self) -> None:
        """Give the memory back now, in the order of the stream. Idempotent.

        Raises
        ------
        WrongThreadError
            Its raw block belongs to another thread.
        """
        if self.c.alive and self.block.node.thread != thread_token():
            raise WrongThreadError("the workspace's raw block belongs to another thread", operation="release")
        self.end()

    @property
    def alive(self) -> bool:
        """Can it still be used?"""
        return self.c.alive != 0

    def __len__(self) -> int:
        return self.nbytes

    def __reduce__(self):
        raise TypeError("DeviceBytes cannot be pickled or copied: they belong to one raw block")

    def __repr__(self) -> str:
        return f"<kina.DeviceBytes {self.nbytes} bytes{'' if self.alive else ', ended'}>"


@cython.no_gc  # nothing it refers to can refer back
cdef class StreamRef:
    """StreamRef()

    The one stream of a raw block, for libraries that take ``__cuda_stream__``. Dead after its block; the handle must
    not be kept beyond it.
    """

    def __cinit__(self):
        check_construction(self)

    def __cuda_stream__(self) -> tuple[int, int]:
        """(version 0, native handle), as the protocol of cuda.core asks.

        Raises
        ------
        SessionClosedError
            The raw block has ended.
        WrongThreadError
            It belongs to another thread.
        """
        if not self.block.alive:
            raise SessionClosedError("the stream's raw block has ended", operation="__cuda_stream__")
        if self.block.node.thread != thread_token():
            raise WrongThreadError("the stream's raw block belongs to another thread", operation="__cuda_stream__")
        return (0, <uintptr_t> <void *> self.handle)

    def __reduce__(self):
        raise TypeError("a StreamRef cannot be pickled or copied: it is a borrow of its raw block")

    def __repr__(self) -> str:
        return f"<kina.StreamRef{'' if self.block.alive else ', dead'}>"


cdef TensorRef make_ref(kina_raw_block *block, Tensor tensor, bint writable):
    cdef TensorRef ref
    cdef uint64_t low, high
    cdef str operation = "mut" if writable else "ref"
    check_aligned(tensor, operation)
    if writable:
        check_writable(tensor, operation)
    span_of(&tensor.c, &low, &high)
    check_borrow(block, low, high, writable, NULL, operation)
    begin_construction()
    try:
        ref = TensorMut.__new__(TensorMut) if writable else TensorRef.__new__(TensorRef)
    finally:
        end_construction()
    ref._tensor = tensor
    ref.block = block
    link(block, &ref.c, low, high, writable)
    return ref


cdef DeviceBytes make_device_bytes(kina_raw_block *block, Tensor tensor):
    cdef DeviceBytes made
    cdef uint64_t low, high
    begin_construction()
    try:
        made = DeviceBytes.__new__(DeviceBytes)
    finally:
        end_construction()
    made._tensor = tensor
    made.nbytes = tensor.c.size_bytes
    made.block = block
    span_of(&tensor.c, &low, &high)
    link(block, &made.c, low, high, True)
    return made


cdef StreamRef make_stream_ref(object raw, kina_raw_block *block, CUstream handle):
    cdef StreamRef ref
    begin_construction()
    try:
        ref = StreamRef.__new__(StreamRef)
    finally:
        end_construction()
    ref.raw = raw
    ref.block = block
    ref.handle = handle
    return ref
