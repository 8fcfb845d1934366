"""Modules: images made into device code, and the bounded cache of what a Runtime has loaded.

Source: CUDA Driver API, "Module Management" (cuModuleLoadDataEx, cuModuleUnload).
"""

import re
from collections import OrderedDict

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free

from kina._core.status cimport KINA_MODULE_LOAD, raise_last
from kina._core.storage cimport kina_handle_init
from kina.cuda.context cimport device_failed
from kina.cuda.cudatypes cimport (
    CU_JIT_ERROR_LOG_BUFFER,
    CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
    CUDA_ERROR_NO_BINARY_FOR_GPU,
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
    CUDA_SUCCESS,
    CUjit_option,
    CUmodule,
    CUresult,
    CUstreamCaptureMode,
)
from kina.cuda.device cimport known_device
from kina.cuda.driver cimport cu, relaxed_begin, relaxed_end
from kina.cuda.handles cimport kina_add, kina_device, kina_module, kina_runtime
from kina.cuda.retire cimport bury_module, harvest, seal, unload_dead_modules

from kina.cuda.images import targets_of
from kina.errors import ModuleLoadError

__all__ = []

cdef enum:
    LOG_BYTES = 16384
    CACHE_BYTES = 64 << 20  # of images
    CACHE_SPELLINGS = 8     # of one module


cdef kina_module *load_image(kina_runtime *runtime, str kind, bytes image) except NULL:
    cdef kina_device *device = runtime.device
    cdef kina_module *module = <kina_module *> calloc(1, sizeof(kina_module))
    cdef char *log = <char *> calloc(1, LOG_BYTES)
    cdef const char *text = image
    cdef CUjit_option options[2]
    cdef void *values[2]
    cdef CUmodule loaded = NULL
    cdef CUstreamCaptureMode mode
    cdef CUresult code
    if module == NULL or log == NULL:
        free(module)
        free(log)
        raise MemoryError("no host memory for a module")
    options[0] = CU_JIT_ERROR_LOG_BUFFER
    values[0] = log
    options[1] = CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES
    values[1] = <void *> <uintptr_t> LOG_BYTES
    with nogil:
        unload_dead_modules(device)
        mode = relaxed_begin()
        code = cu.cuModuleLoadDataEx(&loaded, text, 2, options, values)
        relaxed_end(mode)
    log[LOG_BYTES - 1] = 0
    words = (<bytes> log).decode(errors="replace").strip()
    free(log)
    if code != CUDA_SUCCESS:
        free(module)
        device_failed(device, code, KINA_MODULE_LOAD, b"module", explain(device, code, kind, image, words))
        try:
            raise_last()
        except ModuleLoadError as error:
            error.log = words
            raise
    kina_handle_init(&module.handle, bury_module)
    module.device = device
    module.module = loaded
    runtime.counters.modules_loaded += 1
    kina_add(&runtime.counters.host_waits, 1)  # the driver may wait for the device to load code
    return module


cdef bytes explain(kina_device *device, CUresult code, str kind, bytes image, str log):
    """What to say of a refused image: for a version that is too new, or another architecture, both."""
    name = {"ptx": "PTX", "cubin": "CUBIN", "fatbin": "fatbin"}[kind]
    if kind != "ptx" and code == CUDA_ERROR_NO_BINARY_FOR_GPU:
        made_for = ", ".join(targets_of(kind, image)) or "an unknown architecture"
        major, minor = known_device(device.ordinal).compute_capability
        return (f"the {name} is code for {made_for}, the device is sm_{major}{minor}: compile it for "
                f"sm_{major}{minor}, or ship PTX").encode()
    if code == CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
        asked = re.search(rb"^[ \t]*\.version\s+(\d+\.\d+)", image, re.MULTILINE)
        known = re.search(r"current version is '?(\d+\.\d+)", log)
        return (
            f"the PTX asks for .version {asked[1].decode() if asked else 'unknown'}, this driver accepts up to "
            f"{known[1] if known else newest_ptx_version()}: update the driver or emit older PTX"
        ).encode()
    first = log.splitlines()[0][:400] if log else "the loader gave no reason"
    return f"the driver refused the {name} ({first})".encode()


cdef str newest_ptx_version():
    """PTX that a driver knows for sure: CUDA 12.x speaks 8.x, 13.x speaks 9.x (PTX ISA, release history)."""
    cdef int version = 0
    cu.cuDriverGetVersion(&version)
    return f"{version // 1000 - 4}.{version % 1000 // 10}"


@cython.no_gc  # the collector must not take the module away from it: it ends what that keeps
cdef class CacheEntry:
    """CacheEntry()"""

    def __dealloc__(self):
        if self.module is not None:
            self.module.functions = None


cdef extern from "<stdlib.h>":
    const char *getenv(const char *name) noexcept


cdef object compiler_flags():
    cdef const char *before = getenv(b"NVRTC_PREPEND_FLAGS")
    cdef const char *after = getenv(b"NVRTC_APPEND_FLAGS")
    return (<bytes> before if before != NULL else b"", <bytes> after if after != NULL else b"")


cdef class ModuleCache:
    """ModuleCache()"""

    def __cinit__(self):
        self.entries = OrderedDict()
        self.spellings = {}

    cdef Module find(self, object key):
        cdef CacheEntry entry = self.entries.get(key)
        if entry is None:
            return None
        self.use(entry)
        return entry.module

    cdef Module spelled(self, object spelling):
        cdef CacheEntry entry = self.spellings.get(spelling)
        if entry is None or (entry.flags is not None and entry.flags != compiler_flags()):
            return None
        self.use(entry)
        return entry.module

    cdef int use(self, CacheEntry entry) except -1:
        if entry is not self.newest:
            self.entries.move_to_end(entry.key)
            self.newest = entry
        return 0

    cdef void make_way(self) noexcept:
        cdef kina_runtime *runtime = self.runtime
        if runtime.counters.modules_evicted == 0:
            return
        with nogil:
            if (self.evicted >= self.most or self.evicted_bytes >= CACHE_BYTES) and seal(runtime, NULL) == 0:
                self.evicted = 0
                self.evicted_bytes = 0
            harvest(runtime)

    cdef int keep(self, object key, Module module, size_t nbytes) except -1:
        cdef CacheEntry entry
        if nbytes > CACHE_BYTES:
            return 0
        entry = CacheEntry.__new__(CacheEntry)
        entry.module = module
        entry.key = key
        entry.nbytes = nbytes
        entry.spellings = []
        module.functions = {}
        self.entries[key] = self.newest = entry
        self.nbytes += nbytes
        while len(self.entries) > self.most or self.nbytes > CACHE_BYTES:
            entry = self.entries.popitem(last=False)[1]
            for spelling in entry.spellings:
                del self.spellings[spelling]
            self.nbytes -= entry.nbytes
            self.evicted += 1
            self.evicted_bytes += entry.nbytes
            self.runtime.counters.modules_evicted += 1
            entry.module.functions = None  # those that nobody has go now
            if entry.module.c.handle.references > 1 or (<PyObject *> entry.module).ob_refcnt > 1:
                self.runtime.counters.unloads_deferred += 1
        return 0

    cdef int also(self, object spelling, object key, object flags) except -1:
        cdef CacheEntry entry = self.entries.get(key)
        if entry is None:
            return 0
        if self.spellings.get(spelling) is not entry:
            if len(entry.spellings) == CACHE_SPELLINGS or spelling in self.spellings:
                return 0
            self.spellings[spelling] = entry
            entry.spellings.append(spelling)
        entry.flags = flags
        return 0
