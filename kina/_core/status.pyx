"""The one status mechanism: nogil code records an error for its thread, Python raises it, C reads it."""

from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from libc.string cimport memset, strncpy

from kina.errors import DriverFailure, class_of_detail

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
    record.driver_code = code
    copy_text(record.driver_name, name, sizeof(record.driver_name))
    copy_text(record.driver_string, string, sizeof(record.driver_string))
    copy_text(record.operation, operation, sizeof(record.operation))
    if message != record.message:
        copy_text(record.message, message, sizeof(record.message))
    return detail


cdef void copy_text(char *target, const char *source, size_t capacity) noexcept nogil:
    if source == NULL:
        target[0] = 0
        return
    strncpy(target, source, capacity - 1)
    target[capacity - 1] = 0


cdef int raise_last() except -1:
    cdef kina_error *record = last_error()
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
    memset(record, 0, sizeof(kina_error))
    raise kind(message, operation=operation or None, driver_error=driver)


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
