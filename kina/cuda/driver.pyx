"""The raw layer: one table of driver functions, filled once, and what every caller of it needs.

Source: CUDA Driver API, "Driver Entry Point Access" (cuGetProcAddress) and "Error Handling".
"""

import os
import threading

from kina._core.pool cimport pools_watch_forks
from kina._core.status cimport fail_driver
from kina.cuda.cudatypes cimport CUDA_SUCCESS, CUDA_VERSION, CUresult
from kina.cuda.driver_table cimport kina_driver_table

from kina.errors import DriverFailure, UnavailableError

__all__ = ["compiled_version", "driver_path", "driver_version"]


cdef extern from *:
    """
    #include <dlfcn.h>
    #include <pthread.h>
    #include <string.h>
    #include "driver_table.h"

    static kina_driver_table kina_table;
    static const char *kina_missing_name;  /* the first needed entry that the driver lacks */
    static int kina_initialised = 0;
    static int kina_forked = 0;

    static void kina_mark_forked(void) {
        if (__atomic_load_n(&kina_initialised, __ATOMIC_RELAXED)) __atomic_store_n(&kina_forked, 1, __ATOMIC_RELEASE);
    }
    static int kina_watch_forks(void) { return pthread_atfork(NULL, NULL, kina_mark_forked); }

    /* The version that the library calls itself, asked before the table is there; 0 if it is no driver at all. */
    static CUresult kina_ask_version(void *library, int *version) {
        PFN_cuDriverGetVersion_v2020 ask = (PFN_cuDriverGetVersion_v2020)dlsym(library, "cuDriverGetVersion");
        *version = 0;
        return ask ? ask(version) : CUDA_SUCCESS;
    }

    /* 0, or 1 when the library has no cuGetProcAddress_v2, or 2 when it lacks kina_missing_name. A driver answers no
     * question about a version newer than its own, so the older of the two is asked for. */
    static int kina_fill_table(void *library, int version) {
        PFN_cuGetProcAddress_v12000 get = (PFN_cuGetProcAddress_v12000)dlsym(library, "cuGetProcAddress_v2");
        kina_driver_table filled;
        if (!get) return 1;
        memset(&filled, 0, sizeof filled);
    #define KINA_FILL(field, name, optional)                                                        \\
        {                                                                                           \\
            void *found = NULL;                                                                     \\
            CUdriverProcAddressQueryResult result = CU_GET_PROC_ADDRESS_SUCCESS;                    \\
            if (get(name, &found, version, CU_GET_PROC_ADDRESS_DEFAULT, &result) != CUDA_SUCCESS) \\
                found = NULL;                                                                       \\
            if (!found && !(optional)) {                                                            \\
                kina_missing_name = name;                                                           \\
                return 2;                                                                           \\
            }                                                                                       \\
            memcpy(&filled.field, &found, sizeof found);                                            \\
        }
        KINA_DRIVER_ENTRIES(KINA_FILL)
    #undef KINA_FILL
        kina_table = filled;
        return 0;
    }

    static const char *kina_library_path(void) {
        Dl_info info;
        void *entry;
        memcpy(&entry, &kina_table.cuInit_, sizeof entry);
        return entry && dladdr(entry, &info) && info.dli_fname ? info.dli_fname : "";
    }
    """
    kina_driver_table kina_table
    const char *kina_missing_name
    int kina_initialised
    int kina_forked
    int kina_watch_forks() noexcept nogil
    CUresult kina_ask_version(void *library, int *version) noexcept nogil
    int kina_fill_table(void *library, int version) noexcept nogil
    const char *kina_library_path() noexcept nogil


cdef extern from "<dlfcn.h>" nogil:
    void *dlopen(const char *path, int mode) noexcept
    char *dlerror() noexcept
    enum: RTLD_NOW
    enum: RTLD_LOCAL


cu = &kina_table
forked_flag = &kina_forked
kina_watch_forks()

cdef const char *LIBRARY = "libcuda.so.1"


cdef object describe(CUresult code):
    cdef const char *name = NULL
    cdef const char *string = NULL
    cu.cuGetErrorName(code, &name)
    cu.cuGetErrorString(code, &string)
    return DriverFailure(
        <int> code,
        name.decode() if name != NULL else "CUDA_ERROR_UNKNOWN",
        string.decode() if string != NULL else "unknown error",
    )


cdef object loading = threading.Lock()  # cuInit lets go of the GIL, and others may come meanwhile


def _after_fork() -> None:
    """Whoever had it is not here to give it back."""
    global loading
    loading = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


cdef int ensure_driver() except -1:
    if process_is_forked():
        raise UnavailableError(
            "this process was forked from one that had already initialised CUDA, which does not survive a fork: "
            "start workers with multiprocessing's 'spawn' or 'forkserver' method, or fork before the first use of "
            "CUDA",
            operation="load driver",
        )
    if kina_initialised:
        return 0
    with loading:
        return 0 if kina_initialised else load_driver()


cdef int load_driver() except -1:
    global kina_initialised
    cdef void *library
    cdef const char *words
    cdef int outcome, version = 0
    cdef CUresult code
    library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL)  # never closed: the driver does not support it
    if library == NULL:
        words = dlerror()
        raise UnavailableError(
            f"the CUDA driver library {LIBRARY.decode()} could not be loaded "
            f"({words.decode(errors='replace') if words != NULL else 'no reason given'}): "
            "install an NVIDIA driver of version 580 or newer, or put its folder on the loader's path",
            operation="load driver",
        )
    code = kina_ask_version(library, &version)
    if code != CUDA_SUCCESS:
        raise UnavailableError(f"the driver does not tell its version (cuDriverGetVersion: error {<int> code}): check "
                               "nvidia-smi", operation="load driver",
                               driver_error=DriverFailure(<int> code, "CUDA_ERROR_UNKNOWN", "unknown error"))
    if version < CUDA_VERSION // 1000 * 1000:
        raise UnavailableError(
            f"the CUDA driver is too old: it supports CUDA {version_text(version)}, kina needs CUDA "
            f"{version_text(CUDA_VERSION)} (driver 580 or newer)",
            operation="load driver",
        )
    outcome = kina_fill_table(library, min(version, <int> CUDA_VERSION))
    if outcome != 0:
        missing = "cuGetProcAddress_v2" if outcome == 1 else kina_missing_name.decode()
        raise UnavailableError(
            f"the CUDA driver is too old: it has no {missing}; kina needs a driver for CUDA "
            f"{version_text(CUDA_VERSION)} (580 or newer)",
            operation="load driver",
        )
    with nogil:
        code = cu.cuInit(0)
    if code != CUDA_SUCCESS:
        failure = describe(code)
        hint = (
            "the driver sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES" if failure.code == 100
            else "the driver could not be initialised: check nvidia-smi"
        )
        raise UnavailableError(
            f"{hint} (cuInit: {failure.name} ({failure.code}): {failure.string})",
            operation="load driver", driver_error=failure,
        )
    pools_watch_forks()
    kina_initialised = 1
    return 0


cdef int driver_failed(CUresult code, int detail, const char *operation, const char *message) noexcept nogil:
    cdef const char *name = NULL
    cdef const char *string = NULL
    cu.cuGetErrorName(code, &name)
    cu.cuGetErrorString(code, &string)
    if name == NULL:
        name = b"CUDA_ERROR_UNKNOWN"
    if string == NULL:
        string = b"an error that this driver does not know"
    return fail_driver(detail, <int> code, name, string, operation, message)


cdef object version_text(int version):
    return f"{version // 1000}.{version % 1000 // 10}"


def driver_version() -> str:
    """The CUDA version the loaded driver supports, "13.0" say. Raises UnavailableError without one."""
    cdef int version = 0
    ensure_driver()
    cu.cuDriverGetVersion(&version)
    return version_text(version)


def driver_path() -> str:
    """The file the driver was loaded from. Raises UnavailableError without one."""
    ensure_driver()
    return kina_library_path().decode(errors="replace")


def compiled_version() -> str:
    """The CUDA version of the headers kina was compiled against."""
    return version_text(CUDA_VERSION)
