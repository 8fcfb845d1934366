"""Modules: PTX text made into device code, and the bounded cache of what a Runtime has loaded.

Source: CUDA Driver API, "Module Management" (cuModuleLoadDataEx, cuModuleUnload).
"""

import re
from collections import OrderedDict

from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free

from kina._core.status cimport KINA_MODULE_LOAD, raise_last
from kina._core.storage cimport kina_handle_init
from kina.cuda.context cimport device_failed
from kina.cuda.cudatypes cimport (
    CU_JIT_ERROR_LOG_BUFFER,
    CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
    CUDA_SUCCESS,
    CUjit_option,
    CUmodule,
    CUresult,
    CUstreamCaptureMode,
)
from kina.cuda.driver cimport cu, relaxed_begin, relaxed_end
from kina.cuda.handles cimport kina_add, kina_device, kina_module, kina_runtime
from kina.cuda.retire cimport bury_module, unload_dead_modules

from kina.errors import ArgumentError, ModuleLoadError, UnsupportedError

__all__ = []

cdef enum:
    LOG_BYTES = 16384
    CACHE_ENTRIES = 64
    CACHE_BYTES = 64 << 20  # of images


cdef bytes ptx_image(object source):
    cdef bytes image
    if isinstance(source, str):
        image = source.encode()
    elif isinstance(source, (bytes, bytearray, memoryview)):
        image = bytes(source)
    else:
        raise ArgumentError(f"a module is made from PTX as str or bytes, not {type(source).__name__}",
                            operation="module")
    if image[:4] == b"\x7fELF" or image[:4] == b"\x50\xed\x55\xba":
        raise UnsupportedError("this build loads PTX text; CUBIN and fatbin images are not supported yet",
                               operation="module")
    image = image.rstrip(b"\0")
    if not image.strip():
        raise ModuleLoadError("the module image is empty", operation="module")
    if b"\0" in image:
        raise ModuleLoadError(f"PTX is text, but byte {image.index(0)} of the image is NUL", operation="module")
    return image + b"\0"


cdef kina_module *load_ptx(kina_runtime *runtime, bytes image) except NULL:
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
        device_failed(device, code, KINA_MODULE_LOAD, b"module", explain(code, image, words))
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


cdef bytes explain(CUresult code, bytes image, str log):
    """What to say of a refused image: for a version that is too new, both versions."""
    if code == CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
        asked = re.search(rb"^\s*\.version\s+(\d+\.\d+)", image, re.MULTILINE)
        known = re.search(r"current version is '?(\d+\.\d+)", log)
        return (
            f"the PTX asks for .version {asked[1].decode() if asked else 'unknown'}, this driver accepts up to "
            f"{known[1] if known else newest_ptx_version()}: update the driver or emit older PTX"
        ).encode()
    first = log.splitlines()[0][:400] if log else "the loader gave no reason"
    return f"the driver refused the PTX ({first})".encode()


cdef str newest_ptx_version():
    """PTX that a driver knows for sure: CUDA 12.x speaks 8.x, 13.x speaks 9.x (PTX ISA, release history)."""
    cdef int version = 0
    cu.cuDriverGetVersion(&version)
    return f"{version // 1000 - 4}.{version % 1000 // 10}"


cdef class ModuleCache:
    """ModuleCache()"""

    def __cinit__(self):
        self.entries = OrderedDict()

    cdef object find(self, object key):
        entry = self.entries.get(key)
        if entry is None:
            return None
        self.entries.move_to_end(key)
        return entry[0]

    cdef int keep(self, object key, object module, size_t nbytes) except -1:
        cdef size_t dropped
        if nbytes > CACHE_BYTES:
            return 0
        self.entries[key] = (module, nbytes)
        self.nbytes += nbytes
        while len(self.entries) > CACHE_ENTRIES or self.nbytes > CACHE_BYTES:
            dropped = self.entries.popitem(last=False)[1][1]
            self.nbytes -= dropped
            self.runtime.counters.modules_evicted += 1
        return 0
