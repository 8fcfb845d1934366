"""What ctypes must know of the driver: prototypes, structures, and which arguments make or end an object.

A parameter is a word. `stream`, `ptr`, `u32` and so on go in; `&stream` comes out; `*u32` goes in and comes out.
A name stands for the function that `cuGetProcAddress` gives for CUDA 13.0.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = [
    "ALLOCATES",
    "BY_NAME",
    "DESTROYS",
    "HANDLES",
    "IDS",
    "POINTER_ATTRIBUTES",
    "SCALARS",
    "STRUCTURES",
    "VERSION",
]

VERSION = 13000

#: Objects of the driver: a value is named by the symbol that it was first seen under.
HANDLES = {
    "ctx", "stream", "event", "module", "function", "pool", "graph", "exec", "node", "object", "library", "kernel",
    "allocation",
}  # fmt: skip

#: Numbers that are only compared with each other.
IDS = {"context_id", "stream_id", "capture_id", "buffer_id", "free_bytes"}

SCALARS = {
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "u16": ctypes.c_uint16,
    "u8": ctypes.c_uint8,
    "u64": ctypes.c_uint64,
    "size": ctypes.c_size_t,
    "f32": ctypes.c_float,
    "ptr": ctypes.c_uint64,
    "entry": ctypes.c_uint64,
}

# One function a line. `jit` stands for three parameters: number, options, values.
_PROTOTYPES = """
cuInit u32
cuDriverGetVersion &i32
cuGetErrorName i32 &text
cuGetErrorString i32 &text
cuGetProcAddress text &entry i32 u64 &i32

cuDeviceGet &i32 i32
cuDeviceGetCount &i32
cuDeviceGetName characters i32 i32
cuDeviceGetUuid &uuid i32
cuDeviceTotalMem &size i32
cuDeviceGetAttribute &i32 i32 i32
cuDeviceGetPCIBusId characters i32 i32
cuDeviceGetByPCIBusId &i32 text
cuDeviceCanAccessPeer &i32 i32 i32
cuDeviceGetP2PAttribute &i32 i32 i32 i32
cuDeviceGetDefaultMemPool &pool i32
cuDeviceGetMemPool &pool i32
cuDeviceSetMemPool i32 pool

cuDevicePrimaryCtxRetain &ctx i32
cuDevicePrimaryCtxRelease i32
cuDevicePrimaryCtxReset i32
cuDevicePrimaryCtxGetState i32 &u32 &i32
cuDevicePrimaryCtxSetFlags i32 u32
cuCtxCreate &ctx struct u32 i32
cuCtxDestroy ctx
cuCtxGetCurrent &ctx
cuCtxSetCurrent ctx
cuCtxPushCurrent ctx
cuCtxPopCurrent &ctx
cuCtxGetDevice &i32 ctx
cuCtxGetId ctx &context_id
cuCtxGetFlags &u32
cuCtxSetFlags u32
cuCtxGetApiVersion ctx &u32
cuCtxSynchronize ctx
cuCtxGetStreamPriorityRange &i32 &i32
cuCtxGetLimit &size i32
cuCtxSetLimit i32 size
cuCtxEnablePeerAccess ctx u32
cuCtxDisablePeerAccess ctx
cuCtxRecordEvent ctx event

cuStreamCreate &stream u32
cuStreamCreateWithPriority &stream u32 i32
cuStreamDestroy stream
cuStreamGetId stream &stream_id
cuStreamGetFlags stream &u32
cuStreamGetPriority stream &i32
cuStreamGetDevice stream &i32
cuStreamGetCtx stream &ctx &ctx
cuStreamQuery stream
cuStreamSynchronize stream
cuStreamWaitEvent stream event u32
cuStreamAddCallback stream fn ptr u32
cuStreamAttachMemAsync stream ptr size u32
cuStreamWaitValue32 stream ptr u32 u32
cuStreamWriteValue32 stream ptr u32 u32
cuLaunchHostFunc stream fn ptr
cuStreamBeginCapture stream i32
cuStreamEndCapture stream &graph
cuStreamIsCapturing stream &i32
cuStreamGetCaptureInfo stream &i32 &capture_id &graph ptr ptr &size
cuThreadExchangeStreamCaptureMode *i32

cuEventCreate &event u32
cuEventDestroy event
cuEventRecord event stream
cuEventRecordWithFlags event stream u32
cuEventQuery event
cuEventSynchronize event
cuEventElapsedTime &f32 event event

cuMemGetInfo &free_bytes &size
cuMemAlloc &ptr size
cuMemAllocPitch &ptr &size size size u32
cuMemAllocManaged &ptr size u32
cuMemFree ptr
cuMemHostAlloc &ptr size u32
cuMemAllocHost &ptr size
cuMemFreeHost ptr
cuMemHostGetDevicePointer &ptr ptr u32
cuMemHostGetFlags &u32 ptr
cuMemHostRegister ptr size u32
cuMemHostUnregister ptr
cuMemGetAddressRange &ptr &size ptr
cuPointerGetAttribute &attribute i32 ptr

cuMemAllocAsync &ptr size stream
cuMemAllocFromPoolAsync &ptr size pool stream
cuMemFreeAsync ptr stream
cuMemPoolCreate &pool struct
cuMemPoolDestroy pool
cuMemPoolTrimTo pool size
cuMemPoolSetAttribute pool i32 *u64
cuMemPoolGetAttribute pool i32 &u64
cuMemPoolSetAccess pool struct size
cuMemPoolGetAccess &i32 pool struct

cuMemAddressReserve &ptr size size ptr u64
cuMemAddressFree ptr size
cuMemCreate &allocation size struct u64
cuMemRelease allocation
cuMemMap ptr size size allocation u64
cuMemUnmap ptr size
cuMemSetAccess ptr size struct size
cuMemGetAccess &u64 struct ptr
cuMemGetAllocationGranularity &size struct i32

cuMemcpy ptr ptr size
cuMemcpyAsync ptr ptr size stream
cuMemcpyHtoD ptr ptr size
cuMemcpyHtoDAsync ptr ptr size stream
cuMemcpyDtoH ptr ptr size
cuMemcpyDtoHAsync ptr ptr size stream
cuMemcpyDtoD ptr ptr size
cuMemcpyDtoDAsync ptr ptr size stream
cuMemcpy2DAsync struct stream
cuMemcpyPeer ptr ctx ptr ctx size
cuMemcpyPeerAsync ptr ctx ptr ctx size stream
cuMemsetD8 ptr u8 size
cuMemsetD32 ptr u32 size
cuMemsetD8Async ptr u8 size stream
cuMemsetD16Async ptr u16 size stream
cuMemsetD32Async ptr u32 size stream
cuMemsetD2D32Async ptr size u32 size size stream

cuModuleLoadData &module image
cuModuleLoadDataEx &module image jit
cuModuleUnload module
cuModuleGetFunction &function module text
cuModuleGetFunctionCount &u32 module
cuModuleGetGlobal &ptr &size module text
cuModuleGetLoadingMode &i32
cuLibraryLoadData &library image ptr ptr u32 ptr ptr u32
cuLibraryUnload library
cuLibraryGetKernel &kernel library text
cuLibraryGetModule &module library
cuKernelGetFunction &function kernel
cuFuncGetAttribute &i32 i32 function
cuFuncSetAttribute function i32 i32
cuFuncGetParamInfo function size &size &size
cuFuncGetModule &module function
cuFuncLoad function
cuFuncIsLoaded &i32 function
cuLaunchKernel function u32 u32 u32 u32 u32 u32 u32 stream params extra
cuLaunchCooperativeKernel function u32 u32 u32 u32 u32 u32 u32 stream params
cuLaunchKernelEx struct function params extra

cuGraphCreate &graph u32
cuGraphDestroy graph
cuGraphGetNodes graph ptr *size
cuGraphInstantiateWithFlags &exec graph u64
cuGraphLaunch exec stream
cuGraphExecDestroy exec
cuUserObjectCreate &object ptr fn u32 u32
cuUserObjectRetain object u32
cuUserObjectRelease object u32
cuGraphRetainUserObject graph object u32 u32
cuGraphReleaseUserObject graph object u32
"""

BY_NAME: dict[str, list[str]] = {line.split()[0]: line.split()[1:] for line in _PROTOTYPES.splitlines() if line.strip()}

#: Calls whose success ends the object of their argument with this number.
DESTROYS = {
    "cuCtxDestroy": 0,
    "cuStreamDestroy": 0,
    "cuEventDestroy": 0,
    "cuMemFree": 0,
    "cuMemFreeHost": 0,
    "cuMemFreeAsync": 0,
    "cuMemHostUnregister": 0,
    "cuMemPoolDestroy": 0,
    "cuMemAddressFree": 0,
    "cuMemRelease": 0,
    "cuModuleUnload": 0,
    "cuLibraryUnload": 0,
    "cuGraphDestroy": 0,
    "cuGraphExecDestroy": 0,
}

#: Calls that make memory: the arguments that hold the address and the size. With True, an address that was freed
#: before is said to be so: there, reuse follows a documented order.
ALLOCATES = {
    "cuMemAlloc": (0, 1, False),
    "cuMemAllocManaged": (0, 1, False),
    "cuMemHostAlloc": (0, 1, False),
    "cuMemAllocHost": (0, 1, False),
    "cuMemAllocAsync": (0, 1, True),
    "cuMemAllocFromPoolAsync": (0, 1, True),
    "cuMemAddressReserve": (0, 1, False),
}

#: CUpointer_attribute whose value is no plain number.
POINTER_ATTRIBUTES = {1: "ctx", 3: "ptr", 4: "ptr", 7: "buffer_id", 11: "ptr", 17: "pool"}


def _structure(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


_i32, _u32, _size, _u64, _u16 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint16

STRUCTURES = {
    "CUmemLocation": _structure("CUmemLocation", ("type", _i32), ("id", _i32)),
    "CUmemAccessDesc": _structure("CUmemAccessDesc", ("type", _i32), ("id", _i32), ("flags", _i32)),
    "CUmemPoolProps": _structure(
        "CUmemPoolProps",
        ("allocType", _i32),
        ("handleTypes", _i32),
        ("type", _i32),
        ("id", _i32),
        ("win32SecurityAttributes", _u64),
        ("maxSize", _size),
        ("usage", _u16),
        ("reserved", ctypes.c_uint8 * 54),
    ),
    "CUmemAllocationProp": _structure(
        "CUmemAllocationProp",
        ("allocType", _i32),
        ("handleTypes", _i32),
        ("type", _i32),
        ("id", _i32),
        ("win32HandleMetaData", _u64),
        ("allocFlags", _u64),
    ),
    "CUDA_MEMCPY2D": _structure(
        "CUDA_MEMCPY2D",
        ("srcXInBytes", _size),
        ("srcY", _size),
        ("srcMemoryType", _i32),
        ("srcHost", _u64),
        ("srcDevice", _u64),
        ("srcArray", _u64),
        ("srcPitch", _size),
        ("dstXInBytes", _size),
        ("dstY", _size),
        ("dstMemoryType", _i32),
        ("dstHost", _u64),
        ("dstDevice", _u64),
        ("dstArray", _u64),
        ("dstPitch", _size),
        ("WidthInBytes", _size),
        ("Height", _size),
    ),
    "CUlaunchConfig": _structure(
        "CUlaunchConfig",
        ("grid", _u32 * 3),
        ("block", _u32 * 3),
        ("shared", _u32),
        ("stream", _u64),
        ("attributes", _u64),
        ("count", _u32),
    ),
    "CUlaunchAttribute": _structure("CUlaunchAttribute", ("id", _i32), ("pad", _u32), ("value", _u32 * 16)),
}
