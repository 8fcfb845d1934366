# cython: annotation_typing=False
"""Raw sessions: inside a session, scoped authority to touch modules, addresses and the stream."""

import hashlib

cimport cython
from libc.stdint cimport uintptr_t

from kina._core.construction cimport begin_construction, check_construction, end_construction
from kina._core.storage cimport kina_release, kina_retain, kina_tensor_address
from kina._core.tensor cimport Tensor
from kina.cuda.cudatypes cimport CUstream
from kina.cuda.handles cimport kina_raw_block, kina_runtime
from kina.cuda.launch cimport Module, make_module
from kina.cuda.module cimport ModuleCache, load_ptx, ptx_image
from kina.cuda.refs cimport StreamRef, TensorRef, make_ref, make_stream_ref
from kina.cuda.session cimport CudaSession, end_refs, set_raw_factory

from kina.errors import SessionClosedError, UnsupportedError

__all__ = ["RawSession"]


@cython.no_gc  # nothing it refers to can refer back
cdef class RawSession:
    """RawSession()

    Raw CUDA authority over a session's one stream, for one ``with`` block: from ``session.raw("what for")``.

    Everything it hands out is dead after the block: refs, the stream. Modules and functions live on and can be used in
    later raw blocks of the same Runtime. Bound to its session's thread.
    """

    cdef CudaSession session
    cdef kina_runtime *runtime  # owned reference: the block below is linked into it
    cdef kina_raw_block block
    cdef readonly str operation
    cdef bint entered

    def __cinit__(self):
        check_construction(self)

    def __dealloc__(self):
        self.unlink()
        with nogil:
            kina_release(self.runtime)

    cdef void unlink(self) noexcept:
        cdef kina_raw_block **link
        if not self.block.alive:
            return
        self.block.alive = 0
        link = &self.runtime.block
        while link[0] != NULL and link[0] != &self.block:
            link = &link[0].outer
        if link[0] != NULL:
            link[0] = self.block.outer
        end_refs(&self.block)

    cdef int check(self, const char *operation) except -1:
        """The block is open and so is its session, in this thread."""
        if not self.block.alive:
            word = "ended" if self.entered else "not been entered (use it in a with statement)"
            raise SessionClosedError(f"the raw block {self.operation!r} has {word}", operation=operation.decode())
        self.session.end(self.session.begin(operation))
        return 0

    def __enter__(self) -> RawSession:
        if self.entered:
            raise SessionClosedError("a raw block is entered once: ask session.raw() for a new one", operation="raw")
        self.session.end(self.session.begin(b"raw"))
        self.block.node = self.session.node
        self.block.outer = self.runtime.block
        self.runtime.block = &self.block
        self.block.alive = 1
        self.entered = True
        return self

    def __exit__(self, *exception: object) -> None:
        self.unlink()

    @property
    def stream(self) -> StreamRef:
        """The session's stream, for libraries that take ``__cuda_stream__``. Dead after the block."""
        return make_stream_ref(self, &self.block, <CUstream> self.runtime.stream.native)

    def ref(self, Tensor tensor not None) -> TensorRef:
        """Borrow a tensor of this Runtime for reading by raw kernels; its layout may be any.

        Raises
        ------
        ForeignRuntimeError, ForeignDeviceError
            It is not this Runtime's.
        InvalidLayoutError
            An overlapping mut lives in the block.
        """
        self.check(b"ref")
        self.session.check_own(tensor, b"ref")
        return make_ref(&self.block, tensor, False)

    def mut(self, Tensor tensor not None) -> TensorMut:
        """Borrow a tensor of this Runtime for writing by raw kernels: nothing that overlaps it may be borrowed too.

        Overlap is judged by byte spans, so interleaved strides count as overlapping.

        Raises
        ------
        ForeignRuntimeError, ForeignDeviceError
            It is not this Runtime's.
        InvalidLayoutError
            It is read-only, overlaps itself (a zero stride), or an overlapping ref or mut lives in the block.
        """
        self.check(b"mut")
        self.session.check_own(tensor, b"mut")
        return make_ref(&self.block, tensor, True)

    def module(
        self,
        image: str | bytes | bytearray | memoryview,
        *,
        options: Sequence[str] = (),
        name_expressions: Sequence[str] = (),
    ) -> Module:
        """Load PTX, or find it in the Runtime's cache (64 modules, 64 MiB of images, least recently used first out).

        Parameters
        ----------
        image : str, bytes, bytearray or memoryview
            PTX text; a trailing NUL is optional, one inside is refused.
        options, name_expressions
            For CUDA C++ source, which this build does not compile yet: must be empty.

        Raises
        ------
        ModuleLoadError
            The driver refused it: ``log`` has the loader's words; for a ``.version`` that is too new the message has
            both versions. Nothing is cached.
        UnsupportedError
            A CUBIN or fatbin image, or options.

        Notes
        -----
        The first load of an image compiles it for the device and may take tens of milliseconds, and the driver waits
        for the work of the device's context meanwhile; what is found in the cache waits for nothing.
        """
        cdef ModuleCache cache
        cdef Module module
        cdef int pushed
        self.check(b"module")
        if options or name_expressions:
            raise UnsupportedError("options and name_expressions belong to CUDA C++ source, which is not compiled yet",
                                   operation="module")
        ptx = ptx_image(image)
        cache = self.session._runtime._modules
        if cache is None:
            cache = ModuleCache()
            cache.runtime = self.runtime
            self.session._runtime._modules = cache
        key = hashlib.sha256(ptx).digest()
        found = cache.find(key)
        if found is not None:
            return found
        pushed = self.session.begin(b"module")
        try:
            module = make_module(self.runtime, load_ptx(self.runtime, ptx))
        finally:
            self.session.end(pushed)
        cache.keep(key, module, len(ptx))
        return module

    def unsafe_stream_handle(self) -> int:
        """The native CUstream of the session.

        Notes
        -----
        **Safety.** It must not be kept or used after the block, nor destroyed. Work that others enqueue on it is not
        covered by leases: what it uses must live until it is complete. The thread's current context is the session's
        device's only inside the session.
        """
        self.check(b"unsafe_stream_handle")
        return <uintptr_t> self.runtime.stream.native

    def unsafe_address(self, TensorRef ref not None) -> int:
        """The device address of element (0, ..., 0) of a live ref of this Runtime.

        Notes
        -----
        **Safety.** Valid until the ref is released or the block ends; the tensor must live until all work that uses the
        address is complete. Read only within the tensor's span and as its dtype and strides say; write only if the ref
        is a mut, and only on this block's stream, or ordered after it.
        """
        self.check(b"unsafe_address")
        if not ref.c.alive:
            raise SessionClosedError("the ref has ended", operation="unsafe_address")
        self.session.check_own(ref._tensor, b"unsafe_address")
        return <uintptr_t> kina_tensor_address(&ref._tensor.c)

    def __reduce__(self):
        raise TypeError("a RawSession cannot be pickled or copied: it is the authority of one block")

    def __repr__(self) -> str:
        state = "open" if self.block.alive else "ended" if self.entered else "not entered"
        return f"<kina.RawSession {self.operation!r}, {state}>"


def make_raw(CudaSession session not None, str operation not None) -> RawSession:
    """A raw block of a session; ``session.raw`` is the public way."""
    cdef RawSession raw
    begin_construction()
    try:
        raw = RawSession.__new__(RawSession)
    finally:
        end_construction()
    raw.session = session
    raw.operation = operation
    raw.runtime = session._runtime.c
    kina_retain(raw.runtime)
    return raw


set_raw_factory(make_raw)
