# The types and constants of cuda.h that kina names. Only the raw layer and the modules right above it use them.
from libc.stdint cimport uint64_t


cdef extern from "<cuda.h>" nogil:
    enum: CUDA_VERSION

    ctypedef enum CUresult:
        CUDA_SUCCESS
        CUDA_ERROR_INVALID_VALUE
        CUDA_ERROR_OUT_OF_MEMORY
        CUDA_ERROR_NOT_INITIALIZED
        CUDA_ERROR_DEINITIALIZED
        CUDA_ERROR_NO_DEVICE
        CUDA_ERROR_INVALID_DEVICE
        CUDA_ERROR_INVALID_IMAGE
        CUDA_ERROR_INVALID_CONTEXT
        CUDA_ERROR_ECC_UNCORRECTABLE
        CUDA_ERROR_INVALID_PTX
        CUDA_ERROR_NVLINK_UNCORRECTABLE
        CUDA_ERROR_NO_BINARY_FOR_GPU
        CUDA_ERROR_UNSUPPORTED_PTX_VERSION
        CUDA_ERROR_INVALID_HANDLE
        CUDA_ERROR_NOT_FOUND
        CUDA_ERROR_NOT_READY
        CUDA_ERROR_ILLEGAL_ADDRESS
        CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
        CUDA_ERROR_LAUNCH_TIMEOUT
        CUDA_ERROR_CONTEXT_IS_DESTROYED
        CUDA_ERROR_ASSERT
        CUDA_ERROR_HARDWARE_STACK_ERROR
        CUDA_ERROR_ILLEGAL_INSTRUCTION
        CUDA_ERROR_MISALIGNED_ADDRESS
        CUDA_ERROR_INVALID_ADDRESS_SPACE
        CUDA_ERROR_INVALID_PC
        CUDA_ERROR_LAUNCH_FAILED
        CUDA_ERROR_SYSTEM_NOT_READY
        CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        CUDA_ERROR_MPS_CLIENT_TERMINATED
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        CUDA_ERROR_CAPTURED_EVENT
        CUDA_ERROR_EXTERNAL_DEVICE
        CUDA_ERROR_CONTAINED
        CUDA_ERROR_TENSOR_MEMORY_LEAK

    ctypedef int CUdevice
    ctypedef unsigned long long CUdeviceptr
    ctypedef struct CUctx_st
    ctypedef struct CUstream_st
    ctypedef struct CUevent_st
    ctypedef struct CUmod_st
    ctypedef struct CUfunc_st
    ctypedef struct CUmemPoolHandle_st
    ctypedef struct CUgreenCtx_st
    ctypedef struct CUgraph_st
    ctypedef struct CUgraphNode_st
    ctypedef struct CUgraphExec_st
    ctypedef struct CUuserObject_st
    ctypedef CUctx_st *CUcontext
    ctypedef CUstream_st *CUstream
    ctypedef CUevent_st *CUevent
    ctypedef CUmod_st *CUmodule
    ctypedef CUfunc_st *CUfunction
    ctypedef size_t (*CUoccupancyB2DSize)(int) noexcept nogil
    ctypedef CUmemPoolHandle_st *CUmemoryPool
    ctypedef CUgreenCtx_st *CUgreenCtx
    ctypedef CUgraph_st *CUgraph
    ctypedef CUgraphNode_st *CUgraphNode
    ctypedef CUgraphExec_st *CUgraphExec
    ctypedef CUuserObject_st *CUuserObject
    ctypedef uint64_t cuuint64_t
    ctypedef struct CUgraphEdgeData:
        pass
    ctypedef void (*CUhostFn)(void *data) noexcept nogil

    ctypedef struct CUuuid:
        char bytes[16]

    ctypedef enum CUdevice_attribute:
        CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X
        CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y
        CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z
        CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X
        CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y
        CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
        CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY
        CU_DEVICE_ATTRIBUTE_WARP_SIZE
        CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK
        CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR
        CU_DEVICE_ATTRIBUTE_CLOCK_RATE
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        CU_DEVICE_ATTRIBUTE_INTEGRATED
        CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
        CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS
        CU_DEVICE_ATTRIBUTE_ECC_ENABLED
        CU_DEVICE_ATTRIBUTE_PCI_BUS_ID
        CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID
        CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID
        CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE
        CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
        CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR
        CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
        CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY
        CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD
        CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH
        CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR
        CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH
        CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK

    ctypedef enum CUdevice_P2PAttribute:
        CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK
        CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED
        CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED

    ctypedef enum CUfunction_attribute:
        CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES
        CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
        CU_FUNC_ATTRIBUTE_NUM_REGS
        CU_FUNC_ATTRIBUTE_PTX_VERSION
        CU_FUNC_ATTRIBUTE_BINARY_VERSION
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED

    ctypedef enum CUstreamCaptureMode:
        CU_STREAM_CAPTURE_MODE_GLOBAL
        CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        CU_STREAM_CAPTURE_MODE_RELAXED

    ctypedef enum CUstreamCaptureStatus:
        CU_STREAM_CAPTURE_STATUS_NONE
        CU_STREAM_CAPTURE_STATUS_ACTIVE
        CU_STREAM_CAPTURE_STATUS_INVALIDATED

    enum: CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    enum: CU_GRAPH_USER_OBJECT_MOVE

    ctypedef enum CUmemPool_attribute:
        CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES
        CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
        CU_MEMPOOL_ATTR_USED_MEM_CURRENT

    ctypedef enum CUmemAllocationType:
        CU_MEM_ALLOCATION_TYPE_PINNED
    ctypedef enum CUmemLocationType:
        CU_MEM_LOCATION_TYPE_DEVICE
    ctypedef struct CUmemLocation:
        CUmemLocationType type
        int id
    ctypedef struct CUmemPoolProps:
        CUmemAllocationType allocType
        CUmemLocation location

    ctypedef enum CUpointer_attribute:
        CU_POINTER_ATTRIBUTE_CONTEXT
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        CU_POINTER_ATTRIBUTE_IS_MANAGED
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    enum: CU_MEMORYTYPE_HOST

    ctypedef enum CUjit_option:
        CU_JIT_INFO_LOG_BUFFER
        CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES
        CU_JIT_ERROR_LOG_BUFFER
        CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES

    ctypedef enum CUlaunchAttributeID:
        CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    ctypedef struct kina_cluster_dimension "struct { unsigned int x, y, z; }":
        unsigned int x
        unsigned int y
        unsigned int z
    ctypedef union CUlaunchAttributeValue:
        int cooperative
        kina_cluster_dimension clusterDim
        int programmaticStreamSerializationAllowed
    ctypedef struct CUlaunchAttribute:
        CUlaunchAttributeID id
        CUlaunchAttributeValue value
    ctypedef struct CUlaunchConfig:
        unsigned int gridDimX
        unsigned int gridDimY
        unsigned int gridDimZ
        unsigned int blockDimX
        unsigned int blockDimY
        unsigned int blockDimZ
        unsigned int sharedMemBytes
        CUstream hStream
        CUlaunchAttribute *attrs
        unsigned int numAttrs

    enum: CU_STREAM_NON_BLOCKING
    enum: CU_EVENT_DISABLE_TIMING
    enum: CU_EVENT_BLOCKING_SYNC
    enum: CU_MEMHOSTALLOC_PORTABLE
    enum: CU_MEM_ATTACH_GLOBAL
    CUstream CU_STREAM_LEGACY
    CUstream CU_STREAM_PER_THREAD
    void *CU_LAUNCH_PARAM_BUFFER_POINTER
    void *CU_LAUNCH_PARAM_BUFFER_SIZE
    void *CU_LAUNCH_PARAM_END
