# cython: annotation_typing=False
"""Functions and their launches.

Source: CUDA Driver API, "Execution Control" (cuLaunchKernel with the `extra` parameter buffer, cuLaunchKernelEx,
cuFuncGetParamInfo, cuFuncLoad).
"""

cimport cython
from cpython.object cimport PyTypeObject
from cpython.ref cimport PyObject
from libc.math cimport fabs
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset

from kina._core.dtype cimport DType, TypedScalar, is_numpy_scalar, pack_scalar
from kina._core.construction cimport begin_construction, check_construction, end_construction
from kina._core.status cimport KINA_LAUNCH, KINA_MODULE_LOAD, KINA_SYMBOL_LOOKUP, check, raise_last
from kina._core.storage cimport (
    KINA_DEVICE_CUDA,
    KINA_STORAGE_ADOPTED,
    KINA_TENSOR_C_CONTIGUOUS,
    KINA_TENSOR_READ_ONLY,
    KINA_TENSOR_SELF_OVERLAP,
    kina_release,
    kina_retain,
    kina_tensor_address,
)
from kina._core.tensor cimport Tensor
from kina._core.tokens cimport thread_token
from kina.cuda.config cimport LaunchConfig, read_count
from kina.cuda.context cimport context_begin, context_end, device_check, device_failed
from kina.cuda.cudatypes cimport (
    CU_FUNC_ATTRIBUTE_BINARY_VERSION,
    CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES,
    CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
    CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
    CU_FUNC_ATTRIBUTE_NUM_REGS,
    CU_FUNC_ATTRIBUTE_PTX_VERSION,
    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
    CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
    CU_LAUNCH_PARAM_BUFFER_POINTER,
    CU_LAUNCH_PARAM_BUFFER_SIZE,
    CU_LAUNCH_PARAM_END,
    CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_NOT_FOUND,
    CUDA_SUCCESS,
    CUfunction_attribute,
    CUlaunchAttribute,
    CUlaunchConfig,
    CUresult,
    CUstream,
    CUstreamCaptureMode,
)
from kina.cuda.driver cimport cu, process_is_forked, relaxed_begin, relaxed_end
from kina.cuda.handles cimport (
    kina_device,
    kina_load,
    kina_module,
    kina_raw_block,
    kina_ref,
    kina_runtime,
    kina_session_node,
)
from kina.cuda.refs cimport DeviceBytes, TensorRef, check_borrow, check_writable, span_of
from kina.cuda.retire cimport lease, seal_if_full
from kina.cuda.signature cimport PARAMETER_TENSOR, PARAMETER_WORKSPACE, Signature, kina_parameter

from kina.errors import (
    ArgumentError,
    DTypeError,
    ForeignDeviceError,
    ForeignRuntimeError,
    InvalidConfigError,
    InvalidLayoutError,
    NonContiguousError,
    SessionClosedError,
    SymbolLookupError,
    UnsupportedError,
    WrongThreadError,
)

__all__ = ["Function", "Module"]

cdef enum:
    MAX_PARAMETER_BYTES = 32764     # of any kernel, by the driver's documentation
    PORTABLE_CLUSTER = 8            # blocks that every device with clusters can hold
    LARGEST_CLUSTER = 16
    KEPT_FUNCTIONS = 256            # of one module

cdef double LARGEST_FLOAT = 3.4028235677973366e38  # beyond it a double rounds to no finite float


@cython.no_gc  # nothing it refers to can refer back
cdef class Module:
    """Module()

    Device code loaded for one Runtime, from ``raw.module(image)``. Unloaded when nothing refers to it any more and
    the device is past every launch from it.

    Attributes
    ----------
    kind : str
        ``"ptx"``, ``"cubin"`` or ``"fatbin"``: what the driver was given.
    log : str
        What NVRTC said where it compiled CUDA C++: its warnings.
    """

    def __cinit__(self):
        check_construction(self)

    def __dealloc__(self):
        with nogil:
            kina_release(self.c)
            kina_release(self.runtime)

    cdef int check_block(self, const char *operation) except -1:
        """A raw block of its Runtime is open in this thread, and the device is usable."""
        cdef kina_raw_block *block = self.runtime.block
        if block == NULL:
            raise SessionClosedError("no raw block of the module's Runtime is open: use it inside "
                                     "'with session.raw(...)'", operation=operation.decode())
        if block.node.thread != thread_token():
            raise WrongThreadError("the raw block of the module's Runtime belongs to another thread",
                                   operation=operation.decode())
        check(device_check(self.runtime.device, operation))
        return 0

    def function(self, name: str, signature: str | None = None) -> Function:
        """Look up an entry and load it eagerly, so that its first launch neither loads nor waits.

        Parameters
        ----------
        name : str
            The entry's name in the image, or a name expression that the source was compiled with.
        signature : str, optional
            Parameters in the author's words, such as ``"mut f32[], f32[], f32, u32"``: see :class:`Signature`. With
            one, tensors and Python numbers are accepted and converted; without, only typed scalars, refs and bytes.

        Raises
        ------
        SymbolLookupError
            The module has no such entry.
        ArgumentError
            The signature contradicts the parameters that the driver reports.
        """
        cdef Function function
        self.check_block(b"function")
        if not isinstance(name, str):
            raise TypeError(f"the name of an entry is a str, not {type(name).__name__}")
        if self.functions is None:
            return make_function(self, name, signature)
        asked = (name, signature)
        function = self.functions.get(asked)
        if function is None:
            function = make_function(self, name, signature)
            if self.functions is not None and len(self.functions) < KEPT_FUNCTIONS:
                self.functions[asked] = function
        return function

    def __reduce__(self):
        raise TypeError("a Module cannot be pickled or copied: it is code loaded in this process")


cdef Module make_module(kina_runtime *runtime, kina_module *loaded):
    cdef Module module
    begin_construction()
    try:
        module = Module.__new__(Module)
    finally:
        end_construction()
    module.c = loaded
    module.log = ""
    module.lowered = {}
    module.declared = {}
    kina_retain(runtime)
    module.runtime = runtime
    return module


cdef Function make_function(Module module, str name, object signature):
    cdef Function function
    cdef kina_device *device = module.runtime.device
    cdef bytes symbol = (<str> module.lowered.get(name, name)).encode("utf-8", "replace")  # no name has a "?"
    cdef const char *text = symbol
    cdef CUstreamCaptureMode mode
    cdef CUresult code
    cdef int pushed
    if not symbol or b"\0" in symbol:
        raise SymbolLookupError(f"the module has no entry named {name!r}", operation="function")
    begin_construction()
    try:
        function = Function.__new__(Function)
    finally:
        end_construction()
    function.module = module
    function.name = name
    function.signature = Signature(signature) if signature is not None else None  # its own: it holds scratch
    pushed = context_begin(device, b"function")
    if pushed < 0:
        raise_last()
    try:
        with nogil:
            mode = relaxed_begin()
            code = cu.cuModuleGetFunction(&function.handle, module.c.module, text)
            if code == CUDA_SUCCESS and cu.cuFuncLoad != NULL:
                code = cu.cuFuncLoad(function.handle)
            relaxed_end(mode)
        if code == CUDA_ERROR_NOT_FOUND:
            check(device_failed(device, code, KINA_SYMBOL_LOOKUP, b"function",
                                f"the module has no entry named {name!a}".encode()))
        if code != CUDA_SUCCESS:
            check(device_failed(device, code, KINA_MODULE_LOAD, b"function",
                                f"the entry {name!r} could not be loaded".encode()))
        read_function(function, device)
    finally:
        context_end(pushed)
    if function.signature is not None:
        check_signature(function)
    return function


cdef int read_function(Function function, kina_device *device) except -1:
    """Parameters and limits, from the driver."""
    cdef size_t offset, size
    cdef size_t *grown
    cdef int capacity = 0
    cdef CUresult code
    while True:
        code = cu.cuFuncGetParamInfo(function.handle, function.count, &offset, &size)
        if code == CUDA_ERROR_INVALID_VALUE:  # past the last one
            break
        check_function(function, device, code)
        if function.count == capacity:
            capacity = max(8, 2 * capacity)
            grown = <size_t *> realloc(function.offsets, capacity * sizeof(size_t))
            if grown != NULL:
                function.offsets = grown
                grown = <size_t *> realloc(function.sizes, capacity * sizeof(size_t))
            if grown == NULL:
                raise MemoryError("no host memory for a function")
            function.sizes = grown
        function.offsets[function.count] = offset
        function.sizes[function.count] = size
        function.padded = function.padded or offset != function.nbytes
        function.nbytes = max(function.nbytes, offset + size)
        function.count += 1
    if function.nbytes > MAX_PARAMETER_BYTES:
        raise UnsupportedError(f"{function.name} takes {function.nbytes} bytes of parameters, more than the "
                               f"{MAX_PARAMETER_BYTES} a launch can carry", operation="function")
    read_attribute(function, device, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, &function.max_threads)
    read_attribute(function, device, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, &function.static_shared_bytes)
    read_attribute(function, device, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, &function.dynamic_limit_bytes)
    read_attribute(function, device, CU_FUNC_ATTRIBUTE_NUM_REGS, &function.registers_per_thread)
    read_attribute(function, device, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, &function.local_bytes_per_thread)
    read_attribute(function, device, CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES, &function.constant_nbytes)
    read_attribute(function, device, CU_FUNC_ATTRIBUTE_PTX_VERSION, &function.ptx_version_number)
    read_attribute(function, device, CU_FUNC_ATTRIBUTE_BINARY_VERSION, &function.binary_version_number)
    return 0


cdef int read_attribute(Function function, kina_device *device, CUfunction_attribute which, int *value) except -1:
    check_function(function, device, cu.cuFuncGetAttribute(value, which, function.handle))
    return 0


cdef int check_function(Function function, kina_device *device, CUresult code) except -1:
    if code != CUDA_SUCCESS:
        check(device_failed(device, code, KINA_MODULE_LOAD, b"function",
                            f"the driver does not tell the parameters and limits of {function.name!r}".encode()))
    return 0


cdef int check_signature(Function function) except -1:
    cdef Signature signature = function.signature
    cdef int i
    lowered = function.module.lowered.get(function.name, function.name)
    declared = function.module.declared.get(lowered)
    if signature.count != function.count:
        raise ArgumentError(
            f"the signature of {function.name} has {signature.count} parameter(s), the kernel {function.count}",
            operation="function",
        )
    for i in range(signature.count):
        if <size_t> signature.parameters[i].nbytes != function.sizes[i]:
            raise ArgumentError(
                f"parameter {i} of {function.name} takes {function.sizes[i]} bytes in the kernel, "
                f"{signature.parameters[i].nbytes} by its signature ({signature.text!r})", operation="function",
            )
        if declared is not None and len(declared) == function.count and not signature.fits(i, declared[i]):
            raise ArgumentError(
                f"parameter {i} of {function.name} is declared .{declared[i]} in the kernel, "
                f"{signature.words[i]!r} by its signature ({signature.text!r})", operation="function",
            )
        signature.parameters[i].offset = function.offsets[i]
    return 0


@cython.no_gc  # nothing it refers to can refer back
cdef class Function:
    """Function()

    One entry of a Module, ready to launch, from ``module.function(name, signature)``. Reusable in later raw blocks of
    its Runtime.
    """

    def __cinit__(self):
        check_construction(self)

    def __dealloc__(self):
        free(self.offsets)
        free(self.sizes)

    @property
    def parameters(self) -> tuple[tuple[int, int], ...]:
        """(offset, size) of each parameter in bytes, as the driver reports them."""
        return tuple((self.offsets[i], self.sizes[i]) for i in range(self.count))

    @property
    def max_threads_per_block(self) -> int:
        """The largest block it can run with."""
        return self.max_threads

    @property
    def shared_bytes(self) -> int:
        """Static shared memory per block, in bytes."""
        return self.static_shared_bytes

    @property
    def max_dynamic_shared_bytes(self) -> int:
        """The most dynamic shared memory per block that a launch may ask for, in bytes."""
        return self.module.runtime.device.max_shared_optin_bytes - self.static_shared_bytes

    @property
    def registers(self) -> int:
        """Registers of 32 bits per thread."""
        return self.registers_per_thread

    @property
    def local_bytes(self) -> int:
        """Local memory per thread, in bytes: what did not fit into registers."""
        return self.local_bytes_per_thread

    @property
    def constant_bytes(self) -> int:
        """Constant memory that it declares, in bytes."""
        return self.constant_nbytes

    @property
    def ptx_version(self) -> tuple[int, int]:
        """(major, minor) of the virtual architecture that it was compiled for."""
        return divmod(self.ptx_version_number, 10)

    @property
    def binary_version(self) -> tuple[int, int]:
        """(major, minor) of the architecture whose code is loaded."""
        return divmod(self.binary_version_number, 10)

    def max_active_blocks(self, config: LaunchConfig) -> int:
        """How many blocks of a launch with this configuration a multiprocessor holds at once; 0: it cannot be launched.

        Raises
        ------
        InvalidConfigError
            A limit of the device or the function is exceeded.

        Notes
        -----
        Source: cuOccupancyMaxActiveBlocksPerMultiprocessor. Nothing is enqueued. Any thread, also outside a raw block.
        """
        return self.occupancy(config, False)

    def max_active_clusters(self, config: LaunchConfig) -> int:
        """How many clusters of a launch with this configuration the device holds at once.

        Raises
        ------
        InvalidConfigError
            It has no ``cluster``, or a limit of the device or the function is exceeded.

        Notes
        -----
        Source: cuOccupancyMaxActiveClusters. Nothing is enqueued. Any thread, also outside a raw block.
        """
        if config.cluster is None:
            raise InvalidConfigError("max_active_clusters: the configuration has no cluster",
                                     operation="max_active_clusters")
        return self.occupancy(config, True)

    cdef int occupancy(self, LaunchConfig config, bint clusters) except -1:
        cdef kina_device *device = self.module.runtime.device
        cdef CUresult code
        cdef int pushed
        cdef int found = 0
        cdef int threads = config._block[0] * config._block[1] * config._block[2]
        check(device_check(device, b"occupancy"))
        self.check_config(config)
        pushed = context_begin(device, b"occupancy")
        if pushed < 0:
            raise_last()
        if clusters:
            code = active_clusters(self, config, &found)
        else:
            code = cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(&found, self.handle, threads, config._shared_bytes)
        context_end(pushed)
        if code != CUDA_SUCCESS:
            check(device_failed(device, code, KINA_LAUNCH, b"occupancy",
                                f"the driver does not tell how many {self.name} with {config!r} fit".encode()))
        return found

    def suggest_block(self, shared_bytes: int = 0, max_threads: int = 0) -> tuple[int, int]:
        """A block size that fills the multiprocessors as far as this function can.

        Parameters
        ----------
        shared_bytes : int
            Dynamic shared memory per block, in bytes.
        max_threads : int
            The largest block that is wanted; 0: any.

        Returns
        -------
        tuple of int
            Threads in a block, and the blocks that are needed to fill the device.

        Raises
        ------
        InvalidConfigError
            A number is negative, or so much shared memory is not to be had.

        Notes
        -----
        Source: cuOccupancyMaxPotentialBlockSize. Nothing is enqueued. Any thread, also outside a raw block.
        """
        cdef kina_device *device = self.module.runtime.device
        cdef CUresult code
        cdef int pushed
        cdef int blocks = 0
        cdef int threads = 0
        cdef int limit = read_count(max_threads, "max_threads", "suggest_block")
        cdef size_t shared = read_count(shared_bytes, "shared_bytes", "suggest_block")
        check(device_check(device, b"suggest_block"))
        if self.static_shared_bytes + shared > device.max_shared_optin_bytes:
            self.refuse(f"{self.static_shared_bytes} static + {shared} dynamic bytes of shared memory are over the "
                        f"device's limit of {device.max_shared_optin_bytes} per block")
        self.allow_shared(shared)
        pushed = context_begin(device, b"suggest_block")
        if pushed < 0:
            raise_last()
        code = cu.cuOccupancyMaxPotentialBlockSize(&blocks, &threads, self.handle, NULL, shared, limit)
        context_end(pushed)
        if code != CUDA_SUCCESS:
            check(device_failed(device, code, KINA_LAUNCH, b"suggest_block",
                                f"the driver suggests no block for {self.name}".encode()))
        return threads, blocks

    @cython.binding(False)  # the hot call: a plain method costs less
    @cython.embedsignature(True)
    def launch(self, LaunchConfig config not None, *arguments: object) -> None:
        """Enqueue one launch on the session's stream; nothing waits.

        Parameters
        ----------
        config : LaunchConfig
        *arguments
            One per parameter. With a signature: tensors (or refs) of the declared dtype, C-ordered and compact, of this
            Runtime, and Python or NumPy numbers that fit. Without: refs, ``kina.f32(2)``-style or NumPy scalars, and
            ``bytes`` of a parameter's exact size. Workspaces go where a parameter takes an address.

        Raises
        ------
        ArgumentError
            Wrong number, type, size or range of arguments.
        InvalidConfigError
            A limit of the device or the function is exceeded; the message has both numbers.
        InvalidLayoutError, NonContiguousError, DTypeError, ForeignRuntimeError, ForeignDeviceError
            A tensor cannot be passed as declared.
        SessionClosedError, WrongThreadError, RuntimePoisonedError
            There is no raw block of its Runtime to launch in.
        LaunchError
            The driver refused.

        Notes
        -----
        All checks come before anything is enqueued. Memory of this Runtime is protected by stream order; the module
        and foreign memory are leased until the device is past the launch.

        **Safety.** The kernel runs with the authority of this process. The arguments must be what it expects, in its
        order; without a signature only sizes are checked. It must stay within the memory of the tensors it is given,
        write only to those passed as ``mut``, read nothing it has not initialised, and must not alias what the
        signature says is apart. A ref passed without a signature may be written through only if it is a mut. Handles
        and addresses hidden in scalars or bytes are not protected by leases: what they point to must live until the
        work is complete.
        """
        cdef tuple items = (config,) + arguments
        # Calls with keywords come here; the others go by kina_launch_plain, which makes no tuple.
        self.launch_checked(PySequence_Fast_ITEMS(items), len(items))

    cdef int launch_checked(self, PyObject **arguments, Py_ssize_t count) except -1:
        """One launch: the configuration, then an argument per parameter."""
        cdef LaunchConfig config
        cdef kina_runtime *runtime = self.module.runtime
        cdef kina_module *loaded = self.module.c
        cdef kina_device *device = runtime.device
        cdef kina_raw_block *block = runtime.block
        cdef char buffer[MAX_PARAMETER_BYTES + 4]
        cdef void *extra[5]
        cdef void **extra_or_null = NULL
        cdef size_t nbytes = self.nbytes
        cdef kina_session_node *node
        cdef object _session
        cdef CUresult code
        cdef int pushed
        if count < 1 or Py_TYPE(arguments[0]) != <PyTypeObject *> LaunchConfig:
            raise TypeError("launch takes a LaunchConfig first, got "
                            + (type(<object> arguments[0]).__name__ if count > 0 else "nothing"))
        config = <LaunchConfig> <object> arguments[0]
        if block == NULL or block.node.thread != thread_token() or kina_load(&device.poisoned) \
                or process_is_forked():
            self.module.check_block(b"launch")
        if config is not self.checked:
            self.check_config(config)
        if count - 1 != self.count:
            raise ArgumentError(f"{self.name} takes {self.count} argument(s), got {count - 1}", operation="launch")
        if self.padded:
            memset(buffer, 0, nbytes)
        if self.signature is not None:
            self.pack_typed(arguments + 1, buffer)
        else:
            self.pack_loose(arguments + 1, buffer)
        # Nobody's code has run since the block was looked at last. The session is held, for another thread may drop
        # what is left of it while the GIL is released, and it cannot be left meanwhile.
        node = runtime.block.node
        _session = <object> <PyObject *> node.face
        pushed = context_begin(device, b"launch")
        if pushed < 0:
            raise_last()
        if (runtime.open == NULL or loaded.leased_in != runtime.segment_number
                or loaded.leased_by != runtime.stream.number):
            if lease(runtime, loaded, False) != 0:
                context_end(pushed)
                raise_last()
            loaded.leased_in = runtime.segment_number
            loaded.leased_by = runtime.stream.number
        if nbytes != 0:
            extra[0] = CU_LAUNCH_PARAM_BUFFER_POINTER
            extra[1] = buffer
            extra[2] = CU_LAUNCH_PARAM_BUFFER_SIZE
            extra[3] = &nbytes
            extra[4] = CU_LAUNCH_PARAM_END
            extra_or_null = extra
        node.calls += 1
        with nogil:
            if config._extended:
                code = launch_extended(self, config, extra_or_null)
            else:
                code = cu.cuLaunchKernel(
                    self.handle, config._grid[0], config._grid[1], config._grid[2],
                    config._block[0], config._block[1], config._block[2], config._shared_bytes,
                    <CUstream> runtime.stream.native, NULL, extra_or_null,
                )
            seal_if_full(runtime)
            context_end(pushed)
        node.calls -= 1
        if code != CUDA_SUCCESS:
            self.checked = None
            check(device_failed(device, code, KINA_LAUNCH, b"launch",
                                f"{self.name} with {config!r} was refused".encode()))
        runtime.counters.launches += 1
        return 0

    cdef int check_config(self, LaunchConfig config) except -1:
        cdef kina_device *device = self.module.runtime.device
        cdef uint64_t threads = <uint64_t> config._block[0] * config._block[1] * config._block[2]
        cdef int64_t shared = <int64_t> self.static_shared_bytes + config._shared_bytes
        cdef int i
        for i in range(3):
            if config._grid[i] > device.max_grid[i]:
                self.refuse(f"grid[{i}] = {config._grid[i]} is over the device's limit of {device.max_grid[i]}")
            if config._block[i] > device.max_block[i]:
                self.refuse(f"block[{i}] = {config._block[i]} is over the device's limit of {device.max_block[i]}")
        if threads > device.max_threads_per_block:
            self.refuse(f"a block of {threads} threads is over the device's limit of {device.max_threads_per_block}")
        if threads > <uint64_t> self.max_threads:
            self.refuse(f"a block of {threads} threads is over the function's limit of {self.max_threads} (its "
                        "registers and shared memory allow no more)")
        if shared > device.max_shared_optin_bytes:
            self.refuse(f"{self.static_shared_bytes} static + {config._shared_bytes} dynamic bytes of shared memory "
                        f"are over the device's limit of {device.max_shared_optin_bytes} per block")
        if config._cooperative and not device.cooperative_launch:
            raise UnsupportedError("the device has no cooperative launches", operation="launch")
        if config._cluster[0] != 0:
            self.check_cluster(config)
        self.allow_shared(config._shared_bytes)
        self.checked = config
        return 0

    cdef int allow_shared(self, size_t nbytes) except -1:
        """So much dynamic shared memory is within the device's limit: opt in to it where the driver asks for that."""
        cdef int most
        if <int> nbytes > self.dynamic_limit_bytes:
            # To the most at once: the attribute is the entry's, and another Function of it must not lower it.
            most = <int> self.module.runtime.device.max_shared_optin_bytes - self.static_shared_bytes
            self.opt_in(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most)
            self.dynamic_limit_bytes = most
        return 0

    cdef int check_cluster(self, LaunchConfig config) except -1:
        cdef uint64_t blocks = <uint64_t> config._cluster[0] * config._cluster[1] * config._cluster[2]
        if not self.module.runtime.device.cluster_launch:
            raise UnsupportedError("the device has no thread block clusters", operation="launch")
        if blocks > LARGEST_CLUSTER:
            self.refuse(f"a cluster of {blocks} blocks is over the limit of {LARGEST_CLUSTER}")
        if blocks > PORTABLE_CLUSTER:
            self.opt_in(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        return 0

    cdef int opt_in(self, int attribute, int value) except -1:
        cdef kina_device *device = self.module.runtime.device
        cdef CUresult code
        cdef int pushed = context_begin(device, b"launch")
        if pushed < 0:
            raise_last()
        code = cu.cuFuncSetAttribute(self.handle, <CUfunction_attribute> attribute, value)
        context_end(pushed)
        if code != CUDA_SUCCESS:
            check(device_failed(device, code, KINA_LAUNCH, b"launch",
                                f"{self.name} could not be opted in to {value} (attribute {attribute})".encode()))
        return 0

    cdef int refuse(self, str why) except -1:
        raise InvalidConfigError(f"{self.name}: {why}", operation="launch")

    # ------------------------------------------------------------------------------------ arguments

    cdef int pack_typed(self, PyObject **arguments, char *buffer) except -1:
        """Every argument at the offset that the driver reported, converted and checked as the signature says."""
        cdef kina_parameter *parameters = self.signature.parameters
        cdef kina_parameter *parameter
        cdef const int *order = self.signature.order
        cdef int numbers = self.signature.numbers
        cdef bint strange = False
        cdef int i, j, k
        # Numbers first: their conversion may run anybody's code, and the spans of the tensors are scratch.
        for k in range(numbers):
            i = order[k]
            parameter = &parameters[i]
            if not store_number(parameter, arguments[i], buffer + parameter.offset):
                self.pack_number(i, <object> arguments[i], buffer + parameter.offset)
                strange = True
        if strange:
            self.module.check_block(b"launch")
        for k in range(numbers, self.count):
            i = order[k]
            parameter = &parameters[i]
            if Py_TYPE(arguments[i]) == <PyTypeObject *> Tensor and parameter.kind == PARAMETER_TENSOR:
                self.pack_tensor(i, <Tensor> arguments[i], NULL, buffer + parameter.offset)
            else:
                self.pack_ref(i, <object> arguments[i], buffer + parameter.offset)
            # What is written overlaps no other argument of the same launch.
            for j in order[numbers:k]:
                if (parameters[j].low < parameter.high and parameter.low < parameters[j].high
                        and (parameter.writable or parameters[j].writable)):
                    self.refuse_aliases(i, j)
        return 0

    cdef int pack_ref(self, int i, object argument, char *target) except -1:
        cdef TensorRef ref
        if self.signature.parameters[i].kind == PARAMETER_WORKSPACE:
            return self.pack_tensor(i, self.tensor_of(i, argument), &(<DeviceBytes> argument).c, target)
        if not isinstance(argument, TensorRef):
            raise ArgumentError(
                f"argument {i} of {self.name} is a tensor of {self.signature.dtypes[i].name}, got "
                f"{type(argument).__name__}", operation="launch",
            )
        ref = <TensorRef> argument
        if not ref.c.alive:
            raise SessionClosedError(f"argument {i} of {self.name} is a ref that has ended", operation="launch")
        if self.signature.parameters[i].writable and not ref.c.writable:
            raise ArgumentError(f"argument {i} of {self.name} is written: pass a mut, not a ref", operation="launch")
        return self.pack_tensor(i, ref._tensor, &ref.c, target)

    cdef Tensor tensor_of(self, int i, object workspace):
        if not isinstance(workspace, DeviceBytes):
            raise ArgumentError(f"argument {i} of {self.name} is a workspace (raw.workspace), got "
                                f"{type(workspace).__name__}", operation="launch")
        if not (<DeviceBytes> workspace).c.alive:
            raise SessionClosedError(f"argument {i} of {self.name} is a workspace that has ended", operation="launch")
        return (<DeviceBytes> workspace)._tensor

    cdef int pack_tensor(self, int i, Tensor tensor, kina_ref *own, char *target) except -1:
        cdef kina_parameter *parameter = &self.signature.parameters[i]
        cdef kina_runtime *runtime = self.module.runtime
        if (tensor.c.storage.runtime != runtime.stream.runtime or tensor._dtype.id != parameter.dtype_id
                or not tensor.c.flags & KINA_TENSOR_C_CONTIGUOUS
                or (parameter.writable and tensor.c.flags & (KINA_TENSOR_READ_ONLY | KINA_TENSOR_SELF_OVERLAP))):
            self.refuse_tensor(i, tensor)
        span_of(tensor, &parameter.low, &parameter.high)
        if runtime.block.refs != NULL or runtime.block.outer != NULL:
            check_borrow(runtime.block, parameter.low, parameter.high, parameter.writable, own, "launch")
        if tensor.c.storage.flags & KINA_STORAGE_ADOPTED:
            check(lease(runtime, tensor.c.storage, True))
        (<uint64_t *> target)[0] = <uint64_t> <uintptr_t> kina_tensor_address(&tensor.c)
        return 0

    cdef int refuse_aliases(self, int i, int j) except -1:
        raise InvalidLayoutError(
            f"arguments {min(i, j)} and {max(i, j)} of {self.name} overlap, and argument "
            f"{i if self.signature.parameters[i].writable else j} is written", operation="launch",
        )

    cdef int refuse_tensor(self, int i, Tensor tensor) except -1:
        cdef kina_runtime *runtime = self.module.runtime
        where = f"argument {i} of {self.name}"
        if tensor.c.device.device_type != KINA_DEVICE_CUDA or tensor.c.device.device_id != runtime.device.ordinal:
            raise ForeignDeviceError(f"{where} lives on {tensor.device}, the kernel runs on cuda:"
                                     f"{runtime.device.ordinal}", operation="launch")
        if tensor.c.storage.runtime != runtime.stream.runtime:
            raise ForeignRuntimeError(f"{where} belongs to another Runtime: take it in with session.adopt(tensor)",
                                      operation="launch")
        if tensor._dtype is not self.signature.dtypes[i]:
            raise DTypeError(f"{where} is declared {self.signature.dtypes[i].name}, got {tensor._dtype.name}",
                             operation="launch")
        if not tensor.c.flags & KINA_TENSOR_C_CONTIGUOUS:
            raise NonContiguousError(
                f"{where} has shape {tensor.shape} with strides {tensor.strides}: a kernel that takes strides gets "
                "them as arguments and the tensor as raw.ref or raw.mut, without a signature", operation="launch",
            )
        check_writable(tensor, "launch")
        return 0

    cdef int pack_number(self, int i, object argument, char *target) except -1:
        cdef DType dtype = self.signature.dtypes[i]
        if dtype is None:
            return self.pack_struct(i, argument, target)
        if isinstance(argument, (Tensor, TensorRef)):
            raise ArgumentError(f"argument {i} of {self.name} is a scalar {dtype.name}, got {type(argument).__name__}",
                                operation="launch")
        try:
            if isinstance(argument, TypedScalar):
                if (<TypedScalar> argument).dtype is not dtype:
                    raise ArgumentError(f"it is a {(<TypedScalar> argument).dtype.name}")
                memcpy(target, (<TypedScalar> argument).raw, dtype.itemsize)
                return 0
            pack_scalar(dtype, argument, target)
        except ArgumentError as error:
            raise ArgumentError(f"argument {i} of {self.name} is a scalar {dtype.name}: {error}",
                                operation="launch") from None
        return 0

    cdef int pack_struct(self, int i, object argument, char *target) except -1:
        cdef int nbytes = self.signature.parameters[i].nbytes
        cdef bytes octets
        if isinstance(argument, bytes):
            octets = argument
        elif is_numpy_scalar(argument) and argument.dtype.kind == "V":
            octets = argument.tobytes()
        else:
            raise ArgumentError(f"argument {i} of {self.name} is a struct: bytes, or a NumPy scalar of a structured "
                                f"dtype, not {type(argument).__name__}", operation="launch")
        if len(octets) != nbytes:
            raise ArgumentError(f"argument {i} of {self.name} is a struct of {nbytes} bytes, got {len(octets)}",
                                operation="launch")
        memcpy(target, <const char *> octets, nbytes)
        return 0

    cdef int pack_loose(self, PyObject **arguments, char *buffer) except -1:
        """Without a signature. Numbers first here too: their conversion may run anybody's code, which may end refs and
        seal what is leased already."""
        cdef int i
        for i in range(self.count):
            if not isinstance(<object> arguments[i], (TensorRef, DeviceBytes)):
                self.pack_untyped(i, <object> arguments[i], buffer + self.offsets[i])
        self.module.check_block(b"launch")
        for i in range(self.count):
            if isinstance(<object> arguments[i], (TensorRef, DeviceBytes)):
                self.pack_untyped(i, <object> arguments[i], buffer + self.offsets[i])
        return 0

    cdef int pack_untyped(self, int i, object argument, char *target) except -1:
        cdef kina_runtime *runtime = self.module.runtime
        cdef size_t wanted = self.sizes[i]
        cdef Tensor tensor = None
        cdef uint64_t address
        cdef bytes octets
        if isinstance(argument, TensorRef):
            if not (<TensorRef> argument).c.alive:
                raise SessionClosedError(f"argument {i} of {self.name} is a ref that has ended", operation="launch")
            tensor = (<TensorRef> argument)._tensor
        elif isinstance(argument, DeviceBytes):
            tensor = self.tensor_of(i, argument)
        if tensor is not None:
            if tensor.c.storage.runtime != runtime.stream.runtime:
                self.refuse_foreign_ref(i)
            if wanted != 8:
                raise ArgumentError(f"parameter {i} of {self.name} takes {wanted} bytes, an address has 8",
                                    operation="launch")
            if tensor.c.storage.flags & KINA_STORAGE_ADOPTED:
                check(lease(runtime, tensor.c.storage, True))
            address = <uint64_t> <uintptr_t> kina_tensor_address(&tensor.c)
            memcpy(target, &address, 8)
            return 0
        if isinstance(argument, TypedScalar):
            octets = (<char *> (<TypedScalar> argument).raw)[:(<TypedScalar> argument).dtype.itemsize]
        elif isinstance(argument, bytes):
            octets = argument
        elif is_numpy_scalar(argument) and argument.dtype.kind in "biufcV":
            octets = argument.tobytes()
        else:
            raise ArgumentError(
                f"argument {i} of {self.name}: without a signature only typed scalars (kina.f32(2), np.float32(2)), "
                f"refs, workspaces and bytes are accepted, not {type(argument).__name__}", operation="launch",
            )
        if <size_t> len(octets) != wanted:
            raise ArgumentError(f"argument {i} of {self.name} has {len(octets)} bytes, its parameter {wanted}",
                                operation="launch")
        memcpy(target, <const char *> octets, wanted)
        return 0

    cdef int refuse_foreign_ref(self, int i) except -1:
        raise ForeignRuntimeError(f"argument {i} of {self.name} belongs to another Runtime", operation="launch")

    def __reduce__(self):
        raise TypeError("a Function cannot be pickled or copied: it is code loaded in this process")

    def __repr__(self) -> str:
        signature = f" ({self.signature.text})" if self.signature is not None else ""
        return f"<kina.Function {self.name}{signature}>"


cdef int launch_borrowed(PyObject *function, PyObject **arguments, Py_ssize_t count) except -1:
    return (<Function> function).launch_checked(arguments, count)


cdef inline bint store_number(kina_parameter *parameter, PyObject *argument, char *target) noexcept:
    """The short way for plain Python floats and ints that fit; everything else goes the long one."""
    cdef double value
    if PyFloat_CheckExact(argument):
        value = PyFloat_AS_DOUBLE(argument)
        if parameter.letter == c"d":
            (<double *> target)[0] = value
            return True
        if parameter.letter == c"f" and (fabs(value) <= LARGEST_FLOAT or value != value):
            (<float *> target)[0] = <float> value
            return True
    elif PyLong_CheckExact(argument):
        if parameter.letter == c"u":
            return store_unsigned(argument, parameter.nbytes, target)
        if parameter.letter == c"i":
            return store_signed(argument, parameter.nbytes, target)
    return False


cdef extern from *:
    """
    /* Store a Python int if it fits `nbytes`; 0 where it does not (the slow path then says why). */
    static int kina_store_unsigned(PyObject *value, int nbytes, char *target) {
        unsigned long long number = PyLong_AsUnsignedLongLong(value);
        if (number == (unsigned long long)-1 && PyErr_Occurred()) {
            PyErr_Clear();
            return 0;
        }
        if (nbytes < 8 && number >> (8 * nbytes)) return 0;
        memcpy(target, &number, nbytes); /* little endian, as every host of a CUDA device is */
        return 1;
    }
    static int kina_store_signed(PyObject *value, int nbytes, char *target) {
        int overflow = 0;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        long long limit;
        if (overflow || (number == -1 && PyErr_Occurred())) {
            PyErr_Clear();
            return 0;
        }
        limit = nbytes < 8 ? (1LL << (8 * nbytes - 1)) - 1 : 0x7FFFFFFFFFFFFFFFLL;
        if (number > limit || number < -limit - 1) return 0;
        memcpy(target, &number, nbytes);
        return 1;
    }
    """
    bint store_unsigned "kina_store_unsigned"(PyObject *value, int nbytes, char *target)
    bint store_signed "kina_store_signed"(PyObject *value, int nbytes, char *target)
    # Borrowed arguments stay pointers on this path: a reference of ours to each would be counted up and down.
    PyTypeObject *Py_TYPE(PyObject *value)
    bint PyLong_CheckExact(PyObject *value)
    bint PyFloat_CheckExact(PyObject *value)
    double PyFloat_AS_DOUBLE(PyObject *value)


cdef extern from *:
    """
    /* launch without a tuple of its arguments: the method that Function has in its place. */
    static int (*kina_launch_checked)(PyObject *self, PyObject **arguments, Py_ssize_t count);
    static PyObject *kina_launch_general; /* the method of the class, for calls with keywords; owned */

    static PyObject *kina_launch_plain(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
        if (names && PyTuple_GET_SIZE(names)) {
            descrgetfunc bind = Py_TYPE(kina_launch_general)->tp_descr_get;
            PyObject *bound = bind(kina_launch_general, self, (PyObject *)Py_TYPE(self));
            PyObject *result = bound ? PyObject_Vectorcall(bound, arguments, (size_t)count, names) : NULL;
            Py_XDECREF(bound);
            return result;
        }
        if (kina_launch_checked(self, (PyObject **)arguments, count) < 0) return NULL;
        Py_RETURN_NONE;
    }
    static PyMethodDef kina_launch_method = {
        "launch", (PyCFunction)(void (*)(void))kina_launch_plain, METH_FASTCALL | METH_KEYWORDS, NULL};

    static int kina_install_launch(PyTypeObject *type, const char *text) {
        PyObject *method;
        kina_launch_general = PyDict_GetItemString(type->tp_dict, "launch");
        if (!kina_launch_general) return -1;
        Py_INCREF(kina_launch_general);
        kina_launch_method.ml_doc = text;
        method = PyDescr_NewMethod(type, &kina_launch_method);
        if (!method || PyDict_SetItemString(type->tp_dict, "launch", method) < 0) return -1;
        Py_DECREF(method);
        PyType_Modified(type);
        return 0;
    }
    """
    int (*kina_launch_checked)(PyObject *self, PyObject **arguments, Py_ssize_t count) except -1
    int kina_install_launch(PyTypeObject *type, const char *text) except -1
    PyObject **PySequence_Fast_ITEMS(object sequence)


cdef bytes launch_text = Function.launch.__doc__.encode()  # the method's text for as long as the process
kina_launch_checked = launch_borrowed
kina_install_launch(<PyTypeObject *> Function, launch_text)


cdef CUresult launch_extended(Function function, LaunchConfig config, void **extra) noexcept nogil:
    """With attributes: clusters and cooperative launches."""
    cdef CUlaunchAttribute attributes[2]
    cdef CUlaunchConfig extended
    extend(config, attributes, &extended)
    extended.hStream = <CUstream> function.module.runtime.stream.native
    return cu.cuLaunchKernelEx(&extended, function.handle, NULL, extra)


cdef CUresult active_clusters(Function function, LaunchConfig config, int *found) noexcept nogil:
    cdef CUlaunchAttribute attributes[2]
    cdef CUlaunchConfig extended
    extend(config, attributes, &extended)
    return cu.cuOccupancyMaxActiveClusters(found, function.handle, &extended)


cdef void extend(LaunchConfig config, CUlaunchAttribute *attributes, CUlaunchConfig *launch) noexcept nogil:
    """The configuration as the driver takes it, with room for two attributes."""
    cdef int count = 0
    memset(attributes, 0, 2 * sizeof(CUlaunchAttribute))
    memset(launch, 0, sizeof(CUlaunchConfig))
    if config._cooperative:
        attributes[count].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attributes[count].value.cooperative = 1
        count += 1
    if config._cluster[0] != 0:
        attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attributes[count].value.clusterDim.x = config._cluster[0]
        attributes[count].value.clusterDim.y = config._cluster[1]
        attributes[count].value.clusterDim.z = config._cluster[2]
        count += 1
    launch.gridDimX = config._grid[0]
    launch.gridDimY = config._grid[1]
    launch.gridDimZ = config._grid[2]
    launch.blockDimX = config._block[0]
    launch.blockDimY = config._block[1]
    launch.blockDimZ = config._block[2]
    launch.sharedMemBytes = config._shared_bytes
    launch.attrs = attributes
    launch.numAttrs = count
