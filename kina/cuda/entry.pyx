# cython: annotation_typing=False
"""Entries of modules: what the driver tells of them, and whether a configuration keeps within their limits.

Source: CUDA Driver API, "Module Management" (cuModuleGetFunction), "Execution Control" (cuFuncGetAttribute,
cuFuncGetParamInfo, cuFuncLoad, cuFuncSetAttribute) and "Occupancy".
"""

cimport cython
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from kina._core.status cimport KINA_LAUNCH, KINA_MODULE_LOAD, KINA_SYMBOL_LOOKUP, check, raise_last
from kina._core.storage cimport kina_release, kina_retain
from kina.cuda.config cimport read_count
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
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
    CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_NOT_FOUND,
    CUDA_SUCCESS,
    CUfunction_attribute,
    CUresult,
    CUstreamCaptureMode,
)
from kina.cuda.device cimport known_device
from kina.cuda.driver cimport cu, relaxed_begin, relaxed_end
from kina.cuda.handles cimport kina_device

from kina.errors import InvalidConfigError, UnsupportedError

__all__ = []

cdef enum:
    PORTABLE_CLUSTER = 8    # blocks that every device with clusters can hold
    LARGEST_CLUSTER = 16


@cython.no_gc  # nothing it refers to can refer back
cdef class Entry:
    """Entry()"""

    def __dealloc__(self):
        with nogil:
            kina_release(self.module)
            kina_release(self.runtime)

    # ------------------------------------------------------------------------------------ what the driver tells

    cdef int read(self, Parameters parameters) except -1:
        cdef size_t offset, size
        cdef CUresult code
        while True:
            code = cu.cuFuncGetParamInfo(self.handle, parameters.count, &offset, &size)
            if code == CUDA_ERROR_INVALID_VALUE:  # past the last one
                break
            check_told(self, code)
            parameters.add(offset, size)
        self.read_attribute(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, &self.max_threads)
        self.read_attribute(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, &self.static_shared_bytes)
        self.read_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, &self.dynamic_limit_bytes)
        self.read_attribute(CU_FUNC_ATTRIBUTE_NUM_REGS, &self.registers_per_thread)
        self.read_attribute(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, &self.local_bytes_per_thread)
        self.read_attribute(CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES, &self.constant_nbytes)
        self.read_attribute(CU_FUNC_ATTRIBUTE_PTX_VERSION, &self.ptx_version_number)
        self.read_attribute(CU_FUNC_ATTRIBUTE_BINARY_VERSION, &self.binary_version_number)
        return 0

    cdef int read_attribute(self, int attribute, int *value) except -1:
        check_told(self, cu.cuFuncGetAttribute(value, <CUfunction_attribute> attribute, self.handle))
        return 0

    cdef int most_dynamic_shared_bytes(self) noexcept:
        return <int> self.runtime.device.max_shared_optin_bytes - self.static_shared_bytes

    cdef int max_active(self, LaunchConfig config, bint clusters) except -1:
        cdef const char *operation = b"max_active_clusters" if clusters else b"max_active_blocks"
        cdef kina_device *device = self.runtime.device
        cdef CUlaunchAttribute attributes[LAUNCH_ATTRIBUTES]
        cdef CUlaunchConfig extended
        cdef CUresult code
        cdef int pushed
        cdef int found = 0
        check(device_check(device, operation))
        self.check_config(config, operation)
        extend(config, attributes, &extended)
        pushed = context_begin(device, operation)
        if pushed < 0:
            raise_last()
        if clusters:
            code = cu.cuOccupancyMaxActiveClusters(&found, self.handle, &extended)
        else:
            code = cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &found, self.handle, config._block[0] * config._block[1] * config._block[2], config._shared_bytes,
            )
        context_end(pushed)
        if code != CUDA_SUCCESS:
            check(device_failed(device, code, KINA_LAUNCH, operation,
                                f"the driver does not tell how many {self.name} with {config!r} fit".encode()))
        return found

    cdef tuple suggest_block(self, object shared_bytes, object max_threads):
        cdef kina_device *device = self.runtime.device
        cdef CUresult code
        cdef int pushed
        cdef int blocks = 0
        cdef int threads = 0
        cdef int limit = read_count(max_threads, "max_threads", "suggest_block")
        cdef size_t shared = read_count(shared_bytes, "shared_bytes", "suggest_block")
        check(device_check(device, b"suggest_block"))
        if self.static_shared_bytes + shared > device.max_shared_optin_bytes:
            self.refuse(f"{self.static_shared_bytes} static + {shared} dynamic bytes of shared memory are over the "
                        f"device's limit of {device.max_shared_optin_bytes} per block", b"suggest_block")
        self.allow_shared(shared, b"suggest_block")
        pushed = context_begin(device, b"suggest_block")
        if pushed < 0:
            raise_last()
        code = cu.cuOccupancyMaxPotentialBlockSize(&blocks, &threads, self.handle, NULL, shared, limit)
        context_end(pushed)
        if code != CUDA_SUCCESS:
            check(device_failed(device, code, KINA_LAUNCH, b"suggest_block",
                                f"the driver suggests no block for {self.name}".encode()))
        return threads, blocks

    # ------------------------------------------------------------------------------------ limits

    cdef int check_config(self, LaunchConfig config, const char *operation) except -1:
        cdef kina_device *device = self.runtime.device
        cdef uint64_t threads = <uint64_t> config._block[0] * config._block[1] * config._block[2]
        cdef int64_t shared = <int64_t> self.static_shared_bytes + config._shared_bytes
        cdef int i
        for i in range(3):
            if config._grid[i] > device.max_grid[i]:
                self.refuse(f"grid[{i}] = {config._grid[i]} is over the device's limit of {device.max_grid[i]}",
                            operation)
            if config._block[i] > device.max_block[i]:
                self.refuse(f"block[{i}] = {config._block[i]} is over the device's limit of {device.max_block[i]}",
                            operation)
        if threads > device.max_threads_per_block:
            self.refuse(f"a block of {threads} threads is over the device's limit of {device.max_threads_per_block}",
                        operation)
        if threads > <uint64_t> self.max_threads:
            self.refuse(f"a block of {threads} threads is over the function's limit of {self.max_threads} (its "
                        "registers and shared memory allow no more)", operation)
        if shared > device.max_shared_optin_bytes:
            self.refuse(f"{self.static_shared_bytes} static + {config._shared_bytes} dynamic bytes of shared memory "
                        f"are over the device's limit of {device.max_shared_optin_bytes} per block", operation)
        if config._cooperative and not device.cooperative_launch:
            raise UnsupportedError("the device has no cooperative launches", operation=operation.decode())
        if config._programmatic:
            check_programmatic(device, operation)
        if config._cluster[0] != 0:
            self.check_cluster(config, operation)
        self.allow_shared(config._shared_bytes, operation)
        return 0

    cdef int check_cluster(self, LaunchConfig config, const char *operation) except -1:
        cdef uint64_t blocks = <uint64_t> config._cluster[0] * config._cluster[1] * config._cluster[2]
        if not self.runtime.device.cluster_launch:
            raise UnsupportedError("the device has no thread block clusters", operation=operation.decode())
        if blocks > LARGEST_CLUSTER:
            self.refuse(f"a cluster of {blocks} blocks is over the limit of {LARGEST_CLUSTER}", operation)
        if blocks > PORTABLE_CLUSTER:
            self.opt_in(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, operation)
        return 0

    cdef int allow_shared(self, size_t nbytes, const char *operation) except -1:
        """So much dynamic shared memory is within the device's limit: opt in to it where the driver asks for that."""
        cdef int most
        if <int> nbytes > self.dynamic_limit_bytes:
            # To the most at once: the attribute is the entry's, and another Entry of it must not lower it.
            most = self.most_dynamic_shared_bytes()
            self.opt_in(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most, operation)
            self.dynamic_limit_bytes = most
        return 0

    cdef int opt_in(self, int attribute, int value, const char *operation) except -1:
        cdef kina_device *device = self.runtime.device
        cdef CUresult code
        cdef int pushed = context_begin(device, operation)
        if pushed < 0:
            raise_last()
        code = cu.cuFuncSetAttribute(self.handle, <CUfunction_attribute> attribute, value)
        context_end(pushed)
        if code != CUDA_SUCCESS:
            check(device_failed(device, code, KINA_LAUNCH, operation,
                                f"{self.name} could not be opted in to {value} (attribute {attribute})".encode()))
        return 0

    cdef int refuse(self, str why, const char *operation) except -1:
        raise InvalidConfigError(f"{self.name}: {why}", operation=operation.decode())


cdef int check_told(Entry entry, CUresult code) except -1:
    if code != CUDA_SUCCESS:
        check(device_failed(entry.runtime.device, code, KINA_MODULE_LOAD, b"function",
                            f"the driver does not tell the parameters and limits of {entry.name!r}".encode()))
    return 0


cdef int check_programmatic(kina_device *device, const char *operation) except -1:
    major, minor = known_device(device.ordinal).compute_capability
    if major < 9:
        raise UnsupportedError(f"programmatic dependent launches need compute capability 9.0, the device has "
                               f"{major}.{minor}", operation=operation.decode())
    return 0


cdef Entry make_entry(kina_runtime *runtime, kina_module *module, str name, bytes symbol):
    cdef Entry entry = Entry.__new__(Entry)
    cdef const char *text = symbol
    cdef CUstreamCaptureMode mode
    cdef CUresult code
    kina_retain(runtime)
    entry.runtime = runtime
    kina_retain(module)
    entry.module = module
    entry.name = name
    with nogil:
        mode = relaxed_begin()
        code = cu.cuModuleGetFunction(&entry.handle, module.module, text)
        if code == CUDA_SUCCESS and cu.cuFuncLoad != NULL:
            code = cu.cuFuncLoad(entry.handle)
        relaxed_end(mode)
    if code == CUDA_ERROR_NOT_FOUND:
        device_failed(runtime.device, code, KINA_SYMBOL_LOOKUP, b"function",
                      f"the module has no entry named {name!a}".encode())
        raise_last()
    if code != CUDA_SUCCESS:
        device_failed(runtime.device, code, KINA_MODULE_LOAD, b"function",
                      f"the entry {name!r} could not be loaded".encode())
        raise_last()
    return entry


cdef void extend(LaunchConfig config, CUlaunchAttribute *attributes, CUlaunchConfig *launch) noexcept nogil:
    cdef int count = 0
    memset(attributes, 0, LAUNCH_ATTRIBUTES * sizeof(CUlaunchAttribute))
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
    if config._programmatic:
        attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[count].value.programmaticStreamSerializationAllowed = 1
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
