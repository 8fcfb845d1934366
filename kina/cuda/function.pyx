# cython: annotation_typing=False
"""Modules and functions: what authors look up in an image, and launch.

Source: CUDA Driver API, "Module Management" and "Execution Control".
"""

cimport cython
from cpython.object cimport PyTypeObject
from cpython.ref cimport PyObject

from kina._core.construction cimport begin_construction, check_construction, end_construction
from kina._core.status cimport check, raise_last
from kina._core.storage cimport kina_release, kina_retain
from kina.cuda.config cimport LaunchConfig
from kina.cuda.context cimport context_begin, context_end, device_check
from kina.cuda.entry cimport make_entry
from kina.cuda.launch cimport install_method, launch_arguments, make_prepared, method_text
from kina.cuda.parameters cimport make_parameters
from kina.cuda.refs cimport check_block
from kina.cuda.signature cimport Signature

from kina.errors import InvalidConfigError, SymbolLookupError

__all__ = ["Function", "Module"]

cdef enum:
    KEPT_FUNCTIONS = 256    # of one module


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
        check_block(self.runtime, b"function")
        if not isinstance(name, str):
            raise TypeError(f"the name of an entry is a str, not {type(name).__name__}")
        if signature is not None and not isinstance(signature, str):
            raise TypeError(f"a signature is a str, not {type(signature).__name__}")
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
    cdef str lowered = module.lowered.get(name, name)
    cdef bytes symbol = lowered.encode("utf-8", "replace")  # no name has a "?"
    cdef int pushed
    if not symbol or b"\0" in symbol:
        raise SymbolLookupError(f"the module has no entry named {name!r}", operation="function")
    begin_construction()
    try:
        function = Function.__new__(Function)
    finally:
        end_construction()
    function.module = module
    function._parameters = make_parameters(
        module.runtime, name, Signature(signature) if signature is not None else None,
    )
    pushed = context_begin(module.runtime.device, b"function")
    if pushed < 0:
        raise_last()
    try:
        function.entry = make_entry(module.runtime, module.c, name, symbol)
        function.entry.read(function._parameters)
    finally:
        context_end(pushed)
    function._parameters.match(module.declared.get(lowered))
    return function


@cython.no_gc  # nothing it refers to can refer back
cdef class Function:
    """Function()

    One entry of a Module, ready to launch, from ``module.function(name, signature)``. Reusable in later raw blocks of
    its Runtime.
    """

    def __cinit__(self):
        check_construction(self)

    @property
    def name(self) -> str:
        """The entry's name, as it was asked for."""
        return self.entry.name

    @property
    def signature(self) -> Signature | None:
        """What its author says of its parameters."""
        return self._parameters.signature

    @property
    def parameters(self) -> tuple[tuple[int, int], ...]:
        """(offset, size) of each parameter in bytes, as the driver reports them."""
        return tuple((self._parameters.offsets[i], self._parameters.sizes[i]) for i in range(self._parameters.count))

    @property
    def max_threads_per_block(self) -> int:
        """The largest block it can run with."""
        return self.entry.max_threads

    @property
    def shared_bytes(self) -> int:
        """Static shared memory per block, in bytes."""
        return self.entry.static_shared_bytes

    @property
    def max_dynamic_shared_bytes(self) -> int:
        """The most dynamic shared memory per block that a launch may ask for, in bytes."""
        return self.entry.most_dynamic_shared_bytes()

    @property
    def registers(self) -> int:
        """Registers of 32 bits per thread."""
        return self.entry.registers_per_thread

    @property
    def local_bytes(self) -> int:
        """Local memory per thread, in bytes: what did not fit into registers."""
        return self.entry.local_bytes_per_thread

    @property
    def constant_bytes(self) -> int:
        """Constant memory that it declares, in bytes."""
        return self.entry.constant_nbytes

    @property
    def ptx_version(self) -> tuple[int, int]:
        """(major, minor) of the virtual architecture that it was compiled for."""
        return divmod(self.entry.ptx_version_number, 10)

    @property
    def binary_version(self) -> tuple[int, int]:
        """(major, minor) of the architecture whose code is loaded."""
        return divmod(self.entry.binary_version_number, 10)

    def max_active_blocks(self, LaunchConfig config not None) -> int:
        """How many blocks of a launch with this configuration a multiprocessor holds at once; 0: it cannot be launched.

        Raises
        ------
        InvalidConfigError
            A limit of the device or the function is exceeded.

        Notes
        -----
        Source: cuOccupancyMaxActiveBlocksPerMultiprocessor. Nothing is enqueued. Any thread, also outside a raw block.
        """
        return self.entry.max_active(config, False)

    def max_active_clusters(self, LaunchConfig config not None) -> int:
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
        return self.entry.max_active(config, True)

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
        return self.entry.suggest_block(shared_bytes, max_threads)

    def prepare(self, LaunchConfig config not None) -> PreparedLaunch:
        """Check a configuration once, for any number of launches.

        Parameters
        ----------
        config : LaunchConfig

        Returns
        -------
        PreparedLaunch
            ``prepared.launch(*arguments)`` does what ``function.launch(config, *arguments)`` does.

        Raises
        ------
        InvalidConfigError
            A limit of the device or the function is exceeded; the message has both numbers.
        UnsupportedError
            The device has no such launches.
        LaunchError
            The driver did not let the function have the shared memory or the cluster that it takes.

        Notes
        -----
        Nothing is enqueued. Any thread, also outside a raw block. A function that is launched again with the very
        configuration of its last launch does not check it again either.
        """
        check(device_check(self.module.runtime.device, b"prepare"))
        return make_prepared(self.entry, self._parameters, config, b"prepare")

    @cython.binding(False)  # the hot call: a plain method costs less
    @cython.embedsignature(True)
    @cython.embedsignature.format("clinic")
    def launch(self, LaunchConfig config not None, *arguments: object) -> None:
        """Enqueue one launch on the session's stream; nothing waits.

        Parameters
        ----------
        config : LaunchConfig
        *arguments
            One per parameter. With a signature: tensors (or refs) of the declared dtype, C-ordered and compact, of this
            Runtime or of another library, and Python or NumPy numbers that fit. Without: refs, ``kina.f32(2)``-style or
            NumPy scalars, and ``bytes`` of a parameter's exact size. Workspaces go where a parameter takes an address.

        Raises
        ------
        ArgumentError
            Wrong number, type, size or range of arguments.
        InvalidConfigError
            A limit of the device or the function is exceeded; the message has both numbers.
        InvalidLayoutError, NonContiguousError, DTypeError, ForeignRuntimeError, ForeignDeviceError
            A tensor cannot be passed as declared.
        DLPackError
            Another library's tensor does not hold its values (``requires_grad``, a conjugate or negative bit), is not
            what DLPack allows, or was refused by that library; the message names the field.
        UnsupportedError
            The wait for another library's stream would end a capture.
        SessionClosedError, WrongThreadError, RuntimePoisonedError
            There is no raw block of its Runtime to launch in.
        LaunchError
            The driver refused.

        Notes
        -----
        All checks come before anything is enqueued. Memory of this Runtime is protected by stream order; the module
        and foreign memory are leased until the device is past the launch.

        A tensor of another library is any object whose type has the C exchange table of DLPack, ``torch.Tensor`` say,
        in memory of the session's device or within its reach (pinned, managed). It is borrowed without a copy, and the
        object is kept until the device is past the launch, or as long as the graph that captures it. If the library
        works on another stream just now, the session's stream waits for that one, on the device, before the launch:
        once for each library. Nothing orders the library's stream after the launch:
        ``session.stream_ordered_with(stream)`` does.

        **Safety.** The kernel runs with the authority of this process. The arguments must be what it expects, in its
        order; without a signature only sizes are checked. It must stay within the memory of the tensors it is given,
        write only to those passed as ``mut``, read nothing it has not initialised, and must not alias what the
        signature says is apart. A ref passed without a signature may be written through only if it is a mut. Handles
        and addresses hidden in scalars or bytes are not protected by leases: what they point to must live until the
        work is complete. A borrowed tensor does not say that it is read-only; until the work is complete nobody may
        give its object other memory (``resize_``, ``set_``), and work of other streams that uses it must be ordered.

        References
        ----------
        DLPack 1.3, "C exchange API"; cuLaunchKernel, cuLaunchKernelEx.
        """
        cdef tuple items = (config,) + arguments
        # Calls with keywords come here; the others go by launch_method, which makes no tuple.
        self.launch_checked(PySequence_Fast_ITEMS(items), len(items))

    cdef int launch_checked(self, PyObject **arguments, Py_ssize_t count) except -1:
        """One launch: the configuration, then an argument per parameter."""
        cdef PreparedLaunch prepared = self.newest
        if count < 1 or Py_TYPE(arguments[0]) != <PyTypeObject *> LaunchConfig:
            raise TypeError("launch takes a LaunchConfig first, got "
                            + (type(<object> arguments[0]).__name__ if count > 0 else "nothing"))
        if prepared is None or <PyObject *> prepared.config != arguments[0]:
            check_block(self.module.runtime, b"launch")
            prepared = make_prepared(self.entry, self._parameters, <LaunchConfig> arguments[0], b"launch")
            self.newest = prepared
        if launch_arguments(prepared, arguments + 1, count - 1) != 0:
            self.newest = None
            raise_last()
        return 0

    def __reduce__(self):
        raise TypeError("a Function cannot be pickled or copied: it is code loaded in this process")

    def __repr__(self) -> str:
        signature = f" ({self._parameters.signature.text})" if self._parameters.signature is not None else ""
        return f"<kina.Function {self.entry.name}{signature}>"


cdef object launch_method "kina_function_launch" (PyObject *self, PyObject **arguments, Py_ssize_t count,
                                                  PyObject *names):
    if names != NULL and len(<tuple> names) != 0:
        return launch_with_names(self, arguments, count, names)
    (<Function> self).launch_checked(arguments, count)


cdef extern from *:
    """
    /* launch without a tuple of its arguments: the method that Function has in its place. */
    static PyObject *kina_function_launch(PyObject *self, PyObject **arguments, Py_ssize_t count, PyObject *names);
    static PyMethodDef kina_launch_method = {
        "launch", (PyCFunction)(void (*)(void))kina_function_launch, METH_FASTCALL | METH_KEYWORDS, NULL};
    static PyObject *kina_launch_general; /* the method of the class, for calls with keywords; owned */

    static PyObject *kina_launch_with_names(PyObject *self, PyObject **arguments, Py_ssize_t count, PyObject *names) {
        descrgetfunc bind = Py_TYPE(kina_launch_general)->tp_descr_get;
        PyObject *bound = bind(kina_launch_general, self, (PyObject *)Py_TYPE(self));
        PyObject *result = bound ? PyObject_Vectorcall(bound, arguments, (size_t)count, names) : NULL;
        Py_XDECREF(bound);
        return result;
    }
    static void kina_keep_launch(PyObject *method) {
        Py_INCREF(method);
        kina_launch_general = method;
    }
    """
    int kina_launch_method  # a PyMethodDef, named only for its address
    object launch_with_names "kina_launch_with_names"(PyObject *self, PyObject **arguments, Py_ssize_t count,
                                                      PyObject *names)
    void keep_launch "kina_keep_launch"(object method)
    PyTypeObject *Py_TYPE(PyObject *value)
    PyObject **PySequence_Fast_ITEMS(object sequence)


cdef bytes launch_text = method_text(Function.launch)  # for as long as the process
keep_launch(Function.launch)
install_method(Function, &kina_launch_method, launch_text)
