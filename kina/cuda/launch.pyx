# cython: annotation_typing=False
"""Launches: of a function with a configuration that has been checked, from Python and without it.

Source: CUDA Driver API, "Execution Control" (cuLaunchKernel with the `extra` parameter buffer, cuLaunchKernelEx).
"""

cimport cython
from libc.stdio cimport snprintf

from kina._core.construction cimport begin_construction, check_construction, end_construction
from kina._core.status cimport (
    KINA_FOREIGN_RUNTIME,
    KINA_LAUNCH,
    KINA_SESSION_CLOSED,
    KINA_WRONG_THREAD,
    check,
    fail,
    last_error,
    raise_last,
)
from kina._core.tokens cimport thread_token
from kina.cuda.captured cimport follow_capture, look_at_capture, may_be_captured
from kina.cuda.context cimport context_begin, context_end, device_check, device_failed
from kina.cuda.cudatypes cimport (
    CU_LAUNCH_PARAM_BUFFER_POINTER,
    CU_LAUNCH_PARAM_BUFFER_SIZE,
    CU_LAUNCH_PARAM_END,
    CUDA_SUCCESS,
    CUresult,
    CUstream,
)
from kina.cuda.driver cimport cu, process_is_forked
from kina.cuda.entry cimport extend
from kina.cuda.handles cimport kina_device, kina_load, kina_load_u64, kina_session_node
from kina.cuda.parameters cimport MAX_PARAMETER_BYTES, pack_arguments
from kina.cuda.refs cimport look_at_block
from kina.cuda.retire cimport lease, lease_storage, seal_if_full

__all__ = ["PreparedLaunch"]


cdef inline int lease_module(kina_prepared *prepared) noexcept nogil:
    """Once per segment is enough."""
    cdef kina_runtime *runtime = prepared.runtime
    cdef kina_module *module = prepared.module
    if (runtime.open == NULL or module.leased_in != runtime.segment_number
            or module.leased_by != runtime.stream.number):
        if lease(runtime, module, False) != 0:
            return last_error().detail
        module.leased_in = runtime.segment_number
        module.leased_by = runtime.stream.number
    return 0


cdef inline CUresult enqueue(kina_prepared *prepared, const void *buffer) noexcept nogil:
    cdef CUlaunchConfig *config = &prepared.config
    cdef size_t nbytes = prepared.nbytes
    cdef void *extra[5]
    cdef void **extra_or_null = NULL
    if nbytes != 0:
        extra[0] = CU_LAUNCH_PARAM_BUFFER_POINTER
        extra[1] = <void *> buffer
        extra[2] = CU_LAUNCH_PARAM_BUFFER_SIZE
        extra[3] = &nbytes
        extra[4] = CU_LAUNCH_PARAM_END
        extra_or_null = extra
    if prepared.extended:
        return cu.cuLaunchKernelEx(config, prepared.function, NULL, extra_or_null)
    return cu.cuLaunchKernel(
        prepared.function, config.gridDimX, config.gridDimY, config.gridDimZ,
        config.blockDimX, config.blockDimY, config.blockDimZ, config.sharedMemBytes,
        config.hStream, NULL, extra_or_null,
    )


# ---------------------------------------------------------------------------------------------- without Python

cdef kina_prepared *prepared_of(object prepared) except NULL:
    if type(prepared) is not PreparedLaunch:
        raise TypeError(f"function.prepare(config) gives what is needed here, not {type(prepared).__name__}")
    return &(<PreparedLaunch> prepared).c


cdef int refuse_place(kina_runtime *runtime) noexcept nogil:
    if kina_load_u64(&runtime.open_state) >> 16 not in (0, thread_token()):
        return fail(KINA_WRONG_THREAD, b"launch", b"the raw block of the module's Runtime belongs to another thread")
    return fail(KINA_SESSION_CLOSED, b"launch",
                b"no raw block of the module's Runtime is open: use it inside 'with session.raw(...)'")


cdef int launch_prepared(kina_prepared *prepared, const void *buffer, kina_storage **storages,
                         int count) noexcept nogil:
    cdef kina_runtime *runtime = prepared.runtime
    cdef kina_device *device = runtime.device
    cdef CUresult code
    cdef int i, pushed, status
    # First the word that other threads may read; the block belongs to the thread that this names.
    if kina_load_u64(&runtime.open_state) >> 16 != thread_token() or runtime.block == NULL:
        return refuse_place(runtime)
    if kina_load(&device.poisoned) or process_is_forked():
        return device_check(device, b"launch")
    for i in range(count):
        if storages[i].runtime != runtime.stream.runtime:
            return fail(KINA_FOREIGN_RUNTIME, b"launch", b"a tensor of the launch belongs to another Runtime")
    if may_be_captured(runtime):
        status = look_at_capture(runtime, b"launch")
        if status != 0:
            return status
    pushed = context_begin(device, b"launch")
    if pushed < 0:
        return last_error().detail
    status = lease_module(prepared)
    for i in range(count):
        if status == 0:
            status = lease_storage(runtime, storages[i])
    if status == 0:
        code = enqueue(prepared, buffer)
        if code == CUDA_SUCCESS:
            runtime.counters.launches += 1
        else:
            snprintf(last_error().message, sizeof(last_error().message), "%.400s was refused", prepared.name)
            status = device_failed(device, code, KINA_LAUNCH, b"launch", last_error().message)
    if status == 0:
        seal_if_full(runtime)
    context_end(pushed)
    return status


# ---------------------------------------------------------------------------------------------- from Python

cdef int launch_arguments(PreparedLaunch prepared, PyObject **arguments, Py_ssize_t count) except -1:
    cdef kina_prepared *c = &prepared.c
    cdef kina_runtime *runtime = c.runtime
    cdef kina_device *device = runtime.device
    cdef char buffer[MAX_PARAMETER_BYTES + 4]
    cdef kina_session_node *node
    cdef object _session
    cdef CUresult code
    cdef int pushed
    look_at_block(runtime, b"launch")
    if may_be_captured(runtime):
        follow_capture(runtime, b"launch")
        look_at_block(runtime, b"launch")
    pack_arguments(prepared.parameters, arguments, count, buffer)
    # Nobody's code has run since the block was looked at last. The session is held, for another thread may drop
    # what is left of it while the GIL is released, and it cannot be left meanwhile.
    node = runtime.block.node
    _session = <object> <PyObject *> node.face
    pushed = context_begin(device, b"launch")
    if pushed < 0:
        raise_last()
    if lease_module(c) != 0:
        context_end(pushed)
        raise_last()
    node.calls += 1
    with nogil:
        code = enqueue(c, buffer)
        seal_if_full(runtime)
        context_end(pushed)
    node.calls -= 1
    if code != CUDA_SUCCESS:
        return device_failed(device, code, KINA_LAUNCH, b"launch",
                             f"{prepared.entry.name} with {prepared.config!r} was refused".encode())
    runtime.counters.launches += 1
    return 0


@cython.no_gc  # nothing it refers to can refer back
cdef class PreparedLaunch:
    """PreparedLaunch()

    A function with a configuration that has been checked once, from ``function.prepare(config)``: reusable in later raw
    blocks of its Runtime. It keeps the code loaded.

    Attributes
    ----------
    config : LaunchConfig

    Notes
    -----
    Cython code launches it without the GIL by ``launch_prepared`` of ``kina/cuda/launch.pxd``.
    """

    def __cinit__(self):
        check_construction(self)

    @property
    def name(self) -> str:
        """The entry's name."""
        return self.entry.name

    @cython.binding(False)  # the hot call: a plain method costs less
    @cython.embedsignature(True)
    @cython.embedsignature.format("clinic")
    def launch(self, *arguments: object) -> None:
        """Enqueue one launch on the session's stream; nothing waits.

        Parameters
        ----------
        *arguments
            One per parameter, as :meth:`kina.cuda.Function.launch` takes them.

        Raises
        ------
        ArgumentError, InvalidLayoutError, NonContiguousError, DTypeError, ForeignRuntimeError, ForeignDeviceError, \
DLPackError, UnsupportedError, SessionClosedError, WrongThreadError, RuntimePoisonedError, LaunchError
            As :meth:`kina.cuda.Function.launch`.

        Notes
        -----
        All checks of the arguments and of the raw block come before anything is enqueued; the configuration was checked
        when it was prepared. What the launch uses is protected as by :meth:`kina.cuda.Function.launch`, and tensors of
        other libraries are borrowed and waited for as there.

        **Safety.** That of :meth:`kina.cuda.Function.launch`: the kernel runs with the authority of this process, must
        stay within the memory of its arguments and write only what is passed as ``mut``, and what is hidden in scalars
        or bytes is not protected.
        """
        # Defined for its text: the class has a method in its place that makes no tuple.
        check(launch_arguments(self, PySequence_Fast_ITEMS(arguments), len(arguments)))

    def __reduce__(self):
        raise TypeError("a PreparedLaunch cannot be pickled or copied: it is code loaded in this process")

    def __repr__(self) -> str:
        return f"<kina.PreparedLaunch {self.entry.name} with {self.config!r}>"


cdef PreparedLaunch make_prepared(Entry entry, Parameters parameters, LaunchConfig config, const char *operation):
    cdef PreparedLaunch prepared
    entry.check_config(config, operation)
    begin_construction()
    try:
        prepared = PreparedLaunch.__new__(PreparedLaunch)
    finally:
        end_construction()
    prepared.config = config
    prepared.entry = entry
    prepared.parameters = parameters
    prepared.symbol = entry.name.encode("utf-8", "replace")
    prepared.c.runtime = entry.runtime
    prepared.c.module = entry.module
    prepared.c.function = entry.handle
    prepared.c.nbytes = parameters.nbytes
    prepared.c.name = prepared.symbol
    prepared.c.extended = config._extended
    extend(config, prepared.c.attributes, &prepared.c.config)
    prepared.c.config.hStream = <CUstream> entry.runtime.stream.native
    return prepared


# ---------------------------------------------------------------------------------------------- without a tuple

cdef extern from *:
    """
    static PyObject *kina_prepared_launch(PyObject *self, PyObject **arguments, Py_ssize_t count);
    static PyMethodDef kina_prepared_method = {
        "launch", (PyCFunction)(void (*)(void))kina_prepared_launch, METH_FASTCALL, NULL};

    /* In place of the method of the same name; the definition stays as long as the process. */
    static int kina_install_method(PyTypeObject *type, void *definition, const char *text) {
        PyMethodDef *wanted = (PyMethodDef *)definition;
        PyObject *method;
        int done;
        wanted->ml_doc = text;
        method = PyDescr_NewMethod(type, wanted);
        if (!method) return -1;
        done = PyDict_SetItemString(type->tp_dict, wanted->ml_name, method);
        Py_DECREF(method);
        PyType_Modified(type);
        return done;
    }
    """
    int kina_prepared_method  # a PyMethodDef, named only for its address
    int kina_install_method(PyTypeObject *type, void *definition, const char *text) except -1
    PyObject **PySequence_Fast_ITEMS(object sequence)


cdef object launch_method "kina_prepared_launch" (PyObject *self, PyObject **arguments, Py_ssize_t count):
    check(launch_arguments(<PreparedLaunch> self, arguments, count))


cdef int install_method(type owner, void *definition, const char *text) except -1:
    return kina_install_method(<PyTypeObject *> owner, definition, text)


cdef bytes method_text(object method):
    return f"{method.__name__}{method.__text_signature__}\n--\n\n{method.__doc__}".encode()


cdef bytes launch_text = method_text(PreparedLaunch.launch)  # for as long as the process
install_method(PreparedLaunch, &kina_prepared_method, launch_text)
