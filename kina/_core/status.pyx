"""The one status mechanism: nogil code records an error for its thread, Python raises it, C reads it."""

from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from cpython.ref cimport PyObject
from libc.string cimport memset, strncpy

from kina.errors import DriverFailure, KinaError, OutOfMemoryError, class_of_detail

__all__ = []


cdef extern from *:
    """
    #include <pthread.h>
    #include "kina_memory.h"
    #include "kina_status.h"

    /* One pointer in thread-local storage (dlopened modules share a small static block), the record
     * on the heap, freed by the key's destructor when its thread ends. */
    static pthread_key_t kina_error_key;
    static _Thread_local kina_error *kina_error_of_thread KINA_INITIAL_EXEC;
    static kina_error kina_error_spare;  /* where even calloc fails: better a shared record than none */

    static kina_error *kina_error_attach(kina_error *record) {
        kina_error_of_thread = record;
        pthread_setspecific(kina_error_key, record);
        return record;
    }
    static int kina_error_make_key(void (*destroy)(void *)) {
        return pthread_key_create(&kina_error_key, destroy);
    }
    """
    kina_error *kina_error_of_thread
    kina_error kina_error_spare
    kina_error *kina_error_attach(kina_error *record) noexcept nogil
    int kina_error_make_key(void (*destroy)(void *) noexcept nogil) noexcept nogil


cdef extern from "Python.h":
    PyObject *PyThreadState_GetDict()


cdef void free_record(void *record) noexcept nogil:
    PyMem_RawFree(record)


if kina_error_make_key(free_record) != 0:
    raise ImportError("kina: no thread-local key is left in this process (pthread_key_create failed)")


cdef kina_error *last_error() noexcept nogil:
    cdef kina_error *record = kina_error_of_thread
    if record != NULL:
        return record
    record = <kina_error *> PyMem_RawCalloc(1, sizeof(kina_error))
    if record == NULL:
        return &kina_error_spare
    return kina_error_attach(record)


cdef int fail(int detail, const char *operation, const char *message) noexcept nogil:
    return fail_driver(detail, 0, NULL, NULL, operation, message)


cdef int fail_driver(int detail, int code, const char *name, const char *string,
                     const char *operation, const char *message) noexcept nogil:
    cdef kina_error *record = last_error()
    # The message may have been built in place (last_error().message), so it is copied only if it is not.
    record.detail = detail
    record.has_figures = False
    record.has_exception = False
    record.driver_code = code
    copy_text(record.driver_name, name, sizeof(record.driver_name))
    copy_text(record.driver_string, string, sizeof(record.driver_string))
    copy_text(record.operation, operation, sizeof(record.operation))
    if message != record.message:
        copy_text(record.message, message, sizeof(record.message))
    return detail


cdef int fail_out_of_memory(const char *operation, const char *message,
                            const kina_memory_figures *figures) noexcept nogil:
    cdef kina_error *record = last_error()
    fail(KINA_OUT_OF_MEMORY, operation, message)
    record.figures = figures[0]
    record.has_figures = True
    return KINA_OUT_OF_MEMORY


# Where a thread keeps an exception that passes through nogil code: its own dict, which goes with it.
cdef object KEPT = "kina._core.status.exception"


cdef object take_exception():
    cdef PyObject *kept = PyThreadState_GetDict()
    return None if kept == NULL else (<dict> kept).pop(KEPT, None)


cdef int keep_exception(object exception) except -1:
    cdef PyObject *kept = PyThreadState_GetDict()
    if kept != NULL:
        (<dict> kept)[KEPT] = exception
    return 0


cdef int fail_with(object exception) noexcept:
    cdef int detail = KINA_INTERNAL
    cdef bytes message = b"an exception was raised in Python"
    if isinstance(exception, KinaError):
        detail = type(exception).detail
    elif isinstance(exception, MemoryError):
        detail = KINA_OUT_OF_MEMORY
    try:
        message = f"{type(exception).__name__}: {exception}".encode("utf-8", "replace")
    except Exception:
        pass  # somebody's __str__; the exception itself is what counts
    fail(detail, b"memory resource", message)
    try:
        keep_exception(exception)
        last_error().has_exception = True
    except MemoryError:
        pass
    return detail


cdef object error_take(kina_error *record):
    record[0] = last_error()[0]
    memset(last_error(), 0, sizeof(kina_error))
    return take_exception()


cdef void error_put(const kina_error *record, object exception) noexcept:
    last_error()[0] = record[0]
    try:
        if exception is not None:
            keep_exception(exception)
    except MemoryError:
        last_error().has_exception = False


cdef void error_forget() noexcept nogil:
    cdef kina_error forgotten
    if last_error().has_exception:
        with gil:
            error_take(&forgotten)
    last_error().detail = 0


cdef void copy_text(char *target, const char *source, size_t capacity) noexcept nogil:
    if source == NULL:
        target[0] = 0
        return
    strncpy(target, source, capacity - 1)
    target[capacity - 1] = 0


cdef int raise_last() except -1:
    cdef kina_error *record = last_error()
    cdef object kept = take_exception()
    if record.has_exception and kept is not None:
        memset(record, 0, sizeof(kina_error))
        raise kept
    kind = class_of_detail(record.detail)
    operation = (<bytes> record.operation).decode("utf-8", "replace")
    message = (<bytes> record.message).decode("utf-8", "replace")
    driver = None
    if record.driver_code != 0:
        driver = DriverFailure(
            record.driver_code,
            (<bytes> record.driver_name).decode("utf-8", "replace"),
            (<bytes> record.driver_string).decode("utf-8", "replace"),
        )
        message = f"{message}: {driver.name} ({driver.code}): {driver.string}" if message else \
            f"{operation}: {driver.name} ({driver.code}): {driver.string}"
    error = kind(message, operation=operation or None, driver_error=driver)
    if record.has_figures and isinstance(error, OutOfMemoryError):
        set_figures(error, &record.figures)
    memset(record, 0, sizeof(kina_error))
    raise error


cdef int set_figures(object error, const kina_memory_figures *figures) except -1:
    for name, nbytes in (
        ("requested", figures.requested),
        ("live", figures.live),
        ("cached", figures.cached),
        ("pending", figures.pending),
        ("largest_free", figures.largest_free),
        ("limit", figures.limit),
    ):
        if nbytes >= 0:
            setattr(error, name, nbytes)
    return 0


def detail_codes() -> dict[str, int]:
    """The detail codes of kina_status.h by name, for the test that compares them with kina.errors."""
    return {
        "InvalidShapeError": KINA_INVALID_SHAPE,
        "InvalidLayoutError": KINA_INVALID_LAYOUT,
        "NonContiguousError": KINA_NON_CONTIGUOUS,
        "InvalidConfigError": KINA_INVALID_CONFIG,
        "ForeignRuntimeError": KINA_FOREIGN_RUNTIME,
        "ForeignDeviceError": KINA_FOREIGN_DEVICE,
        "ForeignDomainError": KINA_FOREIGN_DOMAIN,
        "SessionClosedError": KINA_SESSION_CLOSED,
        "WrongThreadError": KINA_WRONG_THREAD,
        "RuntimeBusyError": KINA_RUNTIME_BUSY,
        "DLPackError": KINA_DLPACK,
        "UnavailableError": KINA_UNAVAILABLE,
        "OutOfMemoryError": KINA_OUT_OF_MEMORY,
        "CompileError": KINA_COMPILE,
        "ModuleLoadError": KINA_MODULE_LOAD,
        "SymbolLookupError": KINA_SYMBOL_LOOKUP,
        "LaunchError": KINA_LAUNCH,
        "SynchronizeError": KINA_SYNCHRONIZE,
        "PeerAccessError": KINA_PEER_ACCESS,
        "RuntimePoisonedError": KINA_RUNTIME_POISONED,
        "DriverError": KINA_DRIVER,
        "UnsupportedError": KINA_UNSUPPORTED,
        "InternalError": KINA_INTERNAL,
        "DTypeError": KINA_DTYPE,
        "ArgumentError": KINA_ARGUMENT,
    }
