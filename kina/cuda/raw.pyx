# cython: annotation_typing=False
"""Raw sessions: inside a session, scoped authority to touch modules, addresses and the stream."""

import hashlib
import os
import weakref

cimport cython
from libc.stdint cimport uintptr_t

from kina._core.construction cimport begin_construction, check_construction, end_construction
from kina._core.resource cimport parse_nbytes
from kina._core.storage cimport kina_release, kina_retain, kina_tensor_address
from kina._core.tensor cimport Tensor
from kina.cuda.adoption cimport check_own
from kina.cuda.config cimport read_index
from kina.cuda.cudatypes cimport CUstream
from kina.cuda.handles cimport kina_module, kina_raw_block, kina_runtime
from kina.cuda.function cimport Module, make_module
from kina.cuda.module cimport ModuleCache, compiler_flags, load_image
from kina.cuda.object_cache cimport ObjectCache, make_object_cache
from kina.cuda.refs cimport (
    DeviceBytes,
    StreamRef,
    TensorRef,
    make_device_bytes,
    make_ref,
    make_stream_ref,
)
from kina.cuda.session cimport CudaSession, end_refs, set_raw_factory

from kina.cuda.images import declared_parameters, read_image
from kina.errors import ArgumentError, SessionClosedError

__all__ = ["RawSession"]


cdef enum:
    LONGEST_SPELLING = 1 << 20  # what is longer is read again each time, not kept for its own sake


cdef tuple words(object given, str what):
    cdef tuple kept
    if isinstance(given, (str, bytes)):
        raise ArgumentError(f"{what}: a sequence of str is needed, not one {type(given).__name__}", operation="module")
    try:
        kept = tuple(given)
    except TypeError:
        raise ArgumentError(f"{what}: a sequence of str is needed, not {type(given).__name__}",
                            operation="module") from None
    for word in kept:
        if type(word) is not str or not word or "\0" in word or word != word.strip():
            raise ArgumentError(f"{what}: {word!r} is no str, is empty, has a NUL inside or blanks around it",
                                operation="module")
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(f"{what}: {word!r} is no text: {error}", operation="module") from None
    return kept


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
    cdef list workspaces        # weak references: one that is dropped is given back
    cdef Py_ssize_t most_workspaces
    cdef bint entered

    def __cinit__(self):
        check_construction(self)

    def __dealloc__(self):
        self.unlink()
        with nogil:
            kina_release(self.runtime)

    cdef void unlink(self) noexcept:
        cdef kina_raw_block **link
        for known in self.workspaces or ():  # None: it was never made
            workspace = known()
            if workspace is not None:
                (<DeviceBytes> workspace).end()
        self.workspaces = []
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
        self.session.begin_call(operation)
        self.session.end_call()
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
        """Borrow a tensor of this Runtime for reading by raw kernels; its strides may be any.

        Raises
        ------
        ForeignRuntimeError, ForeignDeviceError
            It is not this Runtime's.
        InvalidLayoutError
            Its elements do not lie at multiples of their size, or an overlapping mut lives in the block.
        """
        self.check(b"ref")
        check_own(self.runtime, tensor, b"ref")
        return make_ref(&self.block, tensor, False)

    def mut(self, Tensor tensor not None) -> TensorMut:
        """Borrow a tensor of this Runtime for writing by raw kernels: nothing that overlaps it may be borrowed too.

        Overlap is judged by byte spans, so interleaved strides count as overlapping.

        Raises
        ------
        ForeignRuntimeError, ForeignDeviceError
            It is not this Runtime's.
        InvalidLayoutError
            It is read-only, overlaps itself (a zero stride), its elements do not lie at multiples of their size, or an
            overlapping ref or mut lives in the block.
        """
        self.check(b"mut")
        check_own(self.runtime, tensor, b"mut")
        return make_ref(&self.block, tensor, True)

    def module(
        self,
        image: str | bytes | bytearray | memoryview | os.PathLike,
        *,
        options: Sequence[str] = (),
        name_expressions: Sequence[str] = (),
    ) -> Module:
        """Load PTX, a CUBIN or a fatbin, or compile CUDA C++ and load that; or find it in the Runtime's cache.

        Parameters
        ----------
        image : str, bytes, bytearray, memoryview or os.PathLike
            Text whose first directive is ``.version`` is PTX; other text is CUDA C++ (a trailing NUL is optional, one
            inside is refused); bytes of an ELF are a CUBIN. A str is never a path.
        options : sequence of str
            For CUDA C++: NVRTC's options, one word each. Without ``--gpu-architecture`` a CUBIN for the very device is
            made; ``--gpu-architecture=compute_90``, say, asks for PTX. Headers of the compiler's own version are found
            by themselves, and those beside a source that is a file; ``-I`` names other folders (``-I.`` the working
            one).
        name_expressions : sequence of str
            For CUDA C++: what is to be instantiated, ``"scale<float>"``, say. ``function`` takes the same words.

        Raises
        ------
        CompileError
            The source was refused: ``log`` has the compiler's words.
        ModuleLoadError
            The image is cut off, or the driver refused it: ``log`` has the loader's words; for a ``.version`` that is
            too new, or a CUBIN of another architecture, the message has both. Nothing is cached.
        UnavailableError
            CUDA C++ was passed and NVRTC is not installed.
        ArgumentError
            Options or name expressions were passed with an image, or are no sequences of str.

        Notes
        -----
        The Runtime keeps 64 modules, or as many as its ``modules`` says, and 64 MiB of images; the least recently used
        go first. What was compiled is also kept for other Runtimes, and on disk for other processes
        (``KINA_CACHE_DIR``, empty: off; see ``python -m kina cache``), unless it takes in headers that cannot be looked
        through.

        The first load of an image may take tens of milliseconds, and the driver waits for the work of the device's
        context meanwhile; what is found in the cache waits for nothing. The GIL is released while it compiles and
        loads.

        Thread-bound, like the block.
        """
        cdef ModuleCache cache
        cdef Module module
        self.check(b"module")
        plain = type(options) is tuple and type(name_expressions) is tuple and not options and not name_expressions
        if not plain:
            options = words(options, "options")
            name_expressions = words(name_expressions, "name_expressions")
        cache = self.session._runtime._modules
        if cache is None:
            cache = ModuleCache()
            cache.runtime = self.runtime
            cache.most = self.session._runtime._most_modules
            self.session._runtime._modules = cache
        spelling = None
        if (type(image) is str or type(image) is bytes) and len(image) <= LONGEST_SPELLING:
            spelling = image if plain and type(image) is str else (type(image), image, options, name_expressions)
            module = cache.spelled(spelling)
            if module is not None:
                return module
        return self.load(cache, image, options, name_expressions, spelling)

    cdef Module load(self, ModuleCache cache, object image, tuple options, tuple names, object spelling):
        cdef kina_module *loaded
        cdef Module module
        cdef int pushed
        read = read_image(image)
        kind, data, log, lowered, declared, same, flags = read.kind, read.data, "", {}, {}, True, None
        if kind == "source":
            from kina.cuda.compiler import compile_source
            made = compile_source(data, options, names, self.session.device_info.compute_capability, read.path)
            flags = compiler_flags()
            # Files may change between two calls with the same words.
            kind, data, log, lowered, declared = made.kind, made.image, made.log, made.names, made.declared
            key, same = made.key, made.settled
        elif options or names:
            raise ArgumentError(f"options and name_expressions belong to CUDA C++ source; the image is a {kind}",
                                operation="module")
        else:
            key = hashlib.sha256(data).digest()
        module = cache.find(key)
        if module is None:
            pushed = self.session.begin(b"module")
            try:
                cache.make_way()
                loaded = load_image(self.runtime, kind, data)
            finally:
                self.session.end(pushed)
            module = make_module(self.runtime, loaded)
            module.log = log
            module.kind = kind
            module.lowered = lowered
            module.declared = declared_parameters(data) if read.kind == "ptx" else declared
            cache.keep(key, module, len(data))
        if spelling is not None and same:
            cache.also(spelling, key, flags)
        return module

    def workspace(self, nbytes: int, *, memory: MemoryResource | None = None) -> DeviceBytes:
        """Scratch memory for this block, aligned to 256 bytes, with undefined contents.

        Parameters
        ----------
        nbytes : int
            0 allowed: its address is NULL.
        memory : kina.memory.MemoryResource, optional
            As in ``session.empty``.

        Raises
        ------
        InvalidShapeError
            `nbytes` is negative or too large.
        OutOfMemoryError, ArgumentError, ForeignDeviceError
            As ``session.empty``.

        Notes
        -----
        It goes back to its resource in the order of the session's stream, when it is released or dropped or the block
        ends: work enqueued before may still use it.
        """
        cdef DeviceBytes made
        self.check(b"workspace")
        count = parse_nbytes(nbytes, "workspace")
        made = make_device_bytes(&self.block, self.session.empty(count, "uint8", memory=memory))
        if len(self.workspaces) >= self.most_workspaces:
            self.workspaces = [known for known in self.workspaces if known() is not None and known().alive]
            self.most_workspaces = max(64, 2 * len(self.workspaces))
        self.workspaces.append(weakref.ref(made))
        return made

    def resource(self, type_: type, init: Callable[[], object], *, nbytes: int = 0, pinned: bool = False) -> object:
        """The Runtime's one object of a class, made by `init` when it is first asked for: a library's handle, a plan.

        Parameters
        ----------
        type_ : type
            Whose instance it is: the key.
        init : callable
            Makes it, without arguments, inside the block.
        nbytes : int
            The device memory that it takes up, as far as its maker knows.
        pinned : bool
            It stays until the Runtime ends or :meth:`clear_resources`, as handles that are dear to make should.

        Raises
        ------
        OutOfMemoryError
            It would not fit beside what is pinned: `init` is not called.
        ArgumentError
            `type_` is no class, `init` gave something else or asks for its own class, `nbytes` is negative.

        Notes
        -----
        A Runtime keeps 32 objects and 1 GiB of declared bytes; the least recently used that is not pinned goes first.
        What goes, also when the Runtime is dropped, is kept until the device is past everything that was enqueued on
        the Runtime's stream until then. An object must not itself keep the Runtime: such a cycle lasts until the
        Runtime is closed. What `init` raises passes through, and nothing is kept. Thread-bound, like the
        block.
        """
        self.check(b"resource")
        if not isinstance(type_, type):
            raise ArgumentError(f"resource: a class is needed, not {type_!r}", operation="resource")
        if not callable(init):
            raise ArgumentError(f"resource: init is called, but a {type(init).__name__} cannot be",
                                operation="resource")
        declared = read_index(nbytes)
        if declared is None or not 0 <= declared < 2**62:
            raise ArgumentError(f"resource: nbytes is an int from 0 to 2**62-1, got {nbytes!r}", operation="resource")
        return self.objects().get(type_, init, declared, bool(pinned))

    def clear_resources(self) -> int:
        """Let go of all objects of :meth:`resource`, pinned ones too; how many there were."""
        self.check(b"clear_resources")
        return self.objects().clear()

    cdef ObjectCache objects(self):
        cdef ObjectCache cache = self.session._runtime._objects
        if cache is None:
            cache = self.session._runtime._objects = make_object_cache(self.runtime)
        return cache

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

    def unsafe_address(self, borrowed: TensorRef | DeviceBytes) -> int:
        """The device address of element (0, ..., 0) of a live ref, or of a workspace, of this Runtime.

        Notes
        -----
        **Safety.** Valid until the ref is released or the block ends; the tensor must live until all work that uses the
        address is complete. Read only within the tensor's span and as its dtype and strides say; write only if the ref
        is a mut, and only on this block's stream, or ordered after it. A workspace may be read and written on this
        block's stream until it is released or the block ends.
        """
        cdef Tensor tensor
        self.check(b"unsafe_address")
        if isinstance(borrowed, DeviceBytes):
            tensor = (<DeviceBytes> borrowed)._tensor
            alive = (<DeviceBytes> borrowed).c.alive
        elif isinstance(borrowed, TensorRef):
            tensor = (<TensorRef> borrowed)._tensor
            alive = (<TensorRef> borrowed).c.alive
        else:
            raise TypeError(f"unsafe_address takes a ref or a workspace, not {type(borrowed).__name__}")
        if not alive:
            raise SessionClosedError(f"the {'workspace' if isinstance(borrowed, DeviceBytes) else 'ref'} has ended",
                                     operation="unsafe_address")
        check_own(self.runtime, tensor, b"unsafe_address")
        return <uintptr_t> kina_tensor_address(&tensor.c)

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
    raw.workspaces = []
    raw.runtime = session._runtime.c
    kina_retain(raw.runtime)
    return raw


set_raw_factory(make_raw)
