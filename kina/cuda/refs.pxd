cimport cython
from libc.stdint cimport uint64_t, uintptr_t

from kina._core.storage cimport kina_tensor
from kina._core.tensor cimport Tensor
from kina._core.tokens cimport thread_token
from kina.cuda.cudatypes cimport CUstream
from kina.cuda.driver cimport process_is_forked
from kina.cuda.handles cimport kina_load, kina_raw_block, kina_ref, kina_runtime


cdef class TensorRef:
    cdef Tensor _tensor
    cdef kina_ref c                 # in its block's list while alive
    cdef kina_raw_block *block      # borrowed; only meaningful while c.alive
    cdef void unlink(self) noexcept


@cython.final
cdef class TensorMut(TensorRef):
    pass


@cython.final
cdef class DeviceBytes:
    cdef Tensor _tensor             # of uint8; None once its memory has gone back
    cdef readonly size_t nbytes
    cdef kina_ref c                 # a mut of it, in its block's list while alive
    cdef kina_raw_block *block      # borrowed; only meaningful while c.alive
    cdef object __weakref__
    cdef void end(self) noexcept


@cython.final
cdef class StreamRef:
    cdef CUstream handle
    cdef kina_raw_block *block      # borrowed from `raw`
    cdef object raw                 # strong: the block that `block` points into lives in it

cdef TensorRef make_ref(kina_raw_block *block, Tensor tensor, bint writable)
cdef DeviceBytes make_device_bytes(kina_raw_block *block, Tensor tensor)
cdef StreamRef make_stream_ref(object raw, kina_raw_block *block, CUstream handle)

cdef inline void span_of(const kina_tensor *tensor, uint64_t *low, uint64_t *high) noexcept:
    """The absolute byte span of a tensor: [low, high)."""
    cdef uint64_t base = <uint64_t> <uintptr_t> tensor.data
    if tensor.size == 0:
        low[0] = high[0] = 0  # no element overlaps nothing, wherever the view begins
        return
    low[0] = base + <uint64_t> tensor.span_low
    high[0] = base + <uint64_t> tensor.span_high

# A raw block of the Runtime is open in this thread, and the device is usable.
cdef int check_block(kina_runtime *runtime, const char *operation) except -1


cdef inline int look_at_block(kina_runtime *runtime, const char *operation) except -1:
    """The same, and short where all is well: the driver is not asked whether the context is the one that it was."""
    cdef kina_raw_block *block = runtime.block
    if (block == NULL or block.node.thread != thread_token() or kina_load(&runtime.device.poisoned)
            or process_is_forked()):
        check_block(runtime, operation)
    return 0


# May kernels use `tensor`: do its elements lie at multiples of their size?
cdef int check_aligned(Tensor tensor, str operation) except -1
# May `tensor` be written at all, as far as its own layout says?
cdef int check_writable(Tensor tensor, str operation) except -1
# Does a live ref of the block, or of the blocks around it, forbid this use? `skip` is one that may overlap itself.
cdef int check_borrow(kina_raw_block *block, uint64_t low, uint64_t high, bint writable, kina_ref *skip,
                      str operation) except -1
