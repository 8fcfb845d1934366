# cython: annotation_typing=False
"""What the driver tells about its devices, without opening a context on any.

Source: CUDA Driver API, "Device Management", "Peer Context Memory Access".
"""

from kina._core.status cimport KINA_UNAVAILABLE, check
from kina.cuda.context cimport device_count
from kina.cuda.cudatypes cimport (
    CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT,
    CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY,
    CU_DEVICE_ATTRIBUTE_CLOCK_RATE,
    CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS,
    CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH,
    CU_DEVICE_ATTRIBUTE_ECC_ENABLED,
    CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
    CU_DEVICE_ATTRIBUTE_INTEGRATED,
    CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
    CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY,
    CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X,
    CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y,
    CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z,
    CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR,
    CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X,
    CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y,
    CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z,
    CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK,
    CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
    CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
    CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD,
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK,
    CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY,
    CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_WARP_SIZE,
    CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED,
    CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED,
    CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
    CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK,
    CUDA_SUCCESS,
    CUdevice,
    CUdevice_attribute,
    CUdevice_P2PAttribute,
    CUresult,
    CUuuid,
)
from kina.cuda.driver cimport cu, driver_failed, ensure_driver

from kina._core.identity import DeviceId, DeviceUuid
from kina._core.opening import cuda_ordinal
from kina.errors import UnavailableError

__all__ = ["DeviceInfo", "device_info", "devices", "peer_matrix"]

# Names of attributes as kina shows them: units in names, bytes and hertz times 1000 as the driver counts.
ATTRIBUTES = {
    "max_threads_per_block": CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
    "max_threads_per_multiprocessor": CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
    "max_blocks_per_multiprocessor": CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR,
    "max_block_x": CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X,
    "max_block_y": CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y,
    "max_block_z": CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z,
    "max_grid_x": CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X,
    "max_grid_y": CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y,
    "max_grid_z": CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z,
    "max_shared_bytes_per_block": CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK,
    "max_shared_bytes_per_block_optin": CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
    "max_shared_bytes_per_multiprocessor": CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
    "reserved_shared_bytes_per_block": CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK,
    "max_registers_per_block": CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK,
    "max_registers_per_multiprocessor": CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR,
    "constant_bytes": CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY,
    "warp_size": CU_DEVICE_ATTRIBUTE_WARP_SIZE,
    "clock_rate_khz": CU_DEVICE_ATTRIBUTE_CLOCK_RATE,
    "memory_clock_rate_khz": CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
    "memory_bus_width_bits": CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
    "l2_cache_bytes": CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
    "async_engine_count": CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT,
    "integrated": CU_DEVICE_ATTRIBUTE_INTEGRATED,
    "ecc_enabled": CU_DEVICE_ATTRIBUTE_ECC_ENABLED,
    "can_map_host_memory": CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY,
    "concurrent_kernels": CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS,
    "unified_addressing": CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
    "managed_memory": CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY,
    "memory_pools_supported": CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
    "virtual_memory_management_supported": CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    "cooperative_launch": CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH,
    "cluster_launch": CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH,
    "multi_gpu_board": CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD,
}


cdef class DeviceInfo:
    """DeviceInfo()

    What a GPU is: read from the driver once, without opening a context. Made by :func:`kina.devices`.

    Attributes
    ----------
    name : str
    total_memory_bytes : int
    multiprocessor_count : int
    pci_bus_id : str
    """

    cdef readonly str name
    cdef readonly size_t total_memory_bytes
    cdef readonly int multiprocessor_count
    cdef readonly str pci_bus_id
    cdef object _id
    cdef object _uuid
    cdef tuple _compute_capability
    cdef object _attributes
    cdef bint _made

    def __init__(self):
        if not self._made:
            raise TypeError("DeviceInfo is read from the driver: use kina.devices()")

    @property
    def type(self) -> str:
        """Kind of device: ``"cuda"``."""
        return "cuda"

    @property
    def id(self) -> DeviceId:
        """Its ordinal in this process, ``cuda:N``."""
        return self._id

    @property
    def uuid(self) -> DeviceUuid:
        """The physical device, whatever its ordinal."""
        return self._uuid

    @property
    def compute_capability(self) -> tuple[int, int]:
        """(major, minor)."""
        return self._compute_capability

    @property
    def attributes(self) -> Mapping[str, int]:
        """Limits and properties, units in their names. Read-only."""
        return self._attributes

    def __eq__(self, other):
        return isinstance(other, DeviceInfo) and self._uuid == (<DeviceInfo> other)._uuid \
            and self._id == (<DeviceInfo> other)._id

    def __hash__(self):
        return hash((self._id, self._uuid))

    def __repr__(self) -> str:
        major, minor = self._compute_capability
        return (f"<kina.DeviceInfo {self._id}: {self.name}, sm_{major}{minor}, "
                f"{self.total_memory_bytes / 2**30:.1f} GiB, {self._uuid}>")


cdef int describe_check(CUresult code, int ordinal, str what) except -1:
    if code != CUDA_SUCCESS:
        check(driver_failed(code, KINA_UNAVAILABLE, b"devices",
                            f"the driver does not tell the {what} of cuda:{ordinal}".encode()))
    return 0


cdef int read_attribute(int ordinal, CUdevice device, CUdevice_attribute which, str name) except? -1:
    cdef int value = 0
    describe_check(cu.cuDeviceGetAttribute(&value, which, device), ordinal, name)
    return value


cdef DeviceInfo describe_device(int ordinal):
    from types import MappingProxyType

    cdef DeviceInfo info = DeviceInfo.__new__(DeviceInfo)
    cdef CUdevice device = 0
    cdef CUuuid uuid
    cdef char text[256]
    cdef size_t nbytes = 0
    describe_check(cu.cuDeviceGet(&device, ordinal), ordinal, "handle")
    info._made = True
    info._id = DeviceId(ordinal)
    describe_check(cu.cuDeviceGetUuid(&uuid, device), ordinal, "UUID")
    info._uuid = DeviceUuid((<char *> uuid.bytes)[:16])
    describe_check(cu.cuDeviceGetName(text, sizeof(text), device), ordinal, "name")
    info.name = (<char *> text).decode(errors="replace")
    describe_check(cu.cuDeviceGetPCIBusId(text, sizeof(text), device), ordinal, "PCI bus id")
    info.pci_bus_id = (<char *> text).decode(errors="replace")
    describe_check(cu.cuDeviceTotalMem(&nbytes, device), ordinal, "memory")
    info.total_memory_bytes = nbytes
    info._compute_capability = (
        read_attribute(ordinal, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, "compute capability"),
        read_attribute(ordinal, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, "compute capability"),
    )
    info.multiprocessor_count = read_attribute(ordinal, device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                                               "number of multiprocessors")
    info._attributes = MappingProxyType({
        name: read_attribute(ordinal, device, <CUdevice_attribute> <int> which, name)
        for name, which in ATTRIBUTES.items()
    })
    return info


cdef dict described = {}  # by ordinal, so bounded by the number of devices


cdef object known_device(int ordinal):
    info = described.get(ordinal)
    if info is None:
        info = described[ordinal] = describe_device(ordinal)
    return info


def devices() -> list[DeviceInfo]:
    """Every GPU the driver shows this process. Raises UnavailableError without a usable driver."""
    ensure_driver()
    return [known_device(ordinal) for ordinal in range(device_count())]


def device_info(device: str | int | DeviceId | DeviceInfo) -> DeviceInfo:
    """The DeviceInfo of one GPU. Raises UnavailableError if the driver shows no such device."""
    ensure_driver()
    ordinal = cuda_ordinal(device)
    count = device_count()
    if ordinal >= count:
        raise UnavailableError(f"cuda:{ordinal} does not exist: the driver shows {count} device(s)",
                               operation="device_info")
    return known_device(ordinal)


cdef int peer_attribute(CUdevice_P2PAttribute which, CUdevice source, CUdevice target) except? -1:
    cdef int value = 0
    cdef CUresult code = cu.cuDeviceGetP2PAttribute(&value, which, source, target)
    if code != CUDA_SUCCESS:
        check(driver_failed(code, KINA_UNAVAILABLE, b"peer_matrix",
                            b"the driver does not tell what two devices can do with each other's memory"))
    return value


def peer_matrix() -> list[dict]:
    """For each ordered pair of GPUs, what ``source`` can do with the memory of ``target``; asked anew each time.

    Returns
    -------
    list of dict
        Keys ``source`` and ``target`` (DeviceId), ``access``, ``atomics``, ``array_access`` (bool),
        ``performance_rank`` (int, 0 is the fastest link).
    """
    cdef CUdevice first, second
    ensure_driver()
    pairs = []
    count = device_count()
    for source in range(count):
        for target in range(count):
            if source == target:
                continue
            describe_check(cu.cuDeviceGet(&first, source), source, "handle")
            describe_check(cu.cuDeviceGet(&second, target), target, "handle")
            pairs.append({
                "source": DeviceId(source),
                "target": DeviceId(target),
                "access": bool(peer_attribute(CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, first, second)),
                "performance_rank": peer_attribute(CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK, first, second),
                "atomics": bool(peer_attribute(CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, first, second)),
                "array_access": bool(
                    peer_attribute(CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED, first, second)
                ),
            })
    return pairs
