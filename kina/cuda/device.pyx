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
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_WARP_SIZE,
    CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED,
    CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED,
    CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
    CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK,
    CUDA_ERROR_INVALID_VALUE,
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

cdef class DeviceInfo:
    """DeviceInfo()

    What a GPU is: read from the driver once, without opening a context. Made by :func:`kina.devices`.

    Attributes
    ----------
    name : str
    total_memory_bytes : int
    multiprocessor_count : int
    pci_bus_id : str
        ``domain:bus:device.function``, in hexadecimal digits.
    warp_size : int
        Threads of a warp.
    max_threads_per_block, max_threads_per_multiprocessor, max_blocks_per_multiprocessor : int
    max_block, max_grid : tuple of int
        Most threads of a block, and most blocks of a grid, along x, y and z.
    max_shared_bytes_per_block : int
        What every launch may use. Beyond it a function opts in: :meth:`kina.cuda.Function.launch` does so by itself.
    max_shared_bytes_per_block_optin, max_shared_bytes_per_multiprocessor, reserved_shared_bytes_per_block : int
        The driver keeps the last of them in each block.
    max_registers_per_block, max_registers_per_multiprocessor : int
        Of 32 bits.
    constant_bytes, l2_cache_bytes : int
    clock_rate_khz, memory_clock_rate_khz : int
    memory_bus_width_bits : int
    async_engine_count : int
        Copies that can run beside kernels, and each other.
    concurrent_kernels, cooperative_launch, cluster_launch : bool
    memory_pools, managed_memory, virtual_memory_management, can_map_host_memory : bool
    ecc_enabled, integrated, multi_gpu_board : bool
    """

    cdef readonly str name
    cdef readonly size_t total_memory_bytes
    cdef readonly int multiprocessor_count
    cdef readonly str pci_bus_id
    cdef readonly int warp_size
    cdef readonly int max_threads_per_block
    cdef readonly int max_threads_per_multiprocessor
    cdef readonly int max_blocks_per_multiprocessor
    cdef tuple _max_block
    cdef tuple _max_grid
    cdef readonly int max_shared_bytes_per_block
    cdef readonly int max_shared_bytes_per_block_optin
    cdef readonly int max_shared_bytes_per_multiprocessor
    cdef readonly int reserved_shared_bytes_per_block
    cdef readonly int max_registers_per_block
    cdef readonly int max_registers_per_multiprocessor
    cdef readonly int constant_bytes
    cdef readonly int l2_cache_bytes
    cdef readonly int clock_rate_khz
    cdef readonly int memory_clock_rate_khz
    cdef readonly int memory_bus_width_bits
    cdef readonly int async_engine_count
    cdef readonly bint concurrent_kernels
    cdef readonly bint cooperative_launch
    cdef readonly bint cluster_launch
    cdef readonly bint memory_pools
    cdef readonly bint managed_memory
    cdef readonly bint virtual_memory_management
    cdef readonly bint can_map_host_memory
    cdef readonly bint ecc_enabled
    cdef readonly bint integrated
    cdef readonly bint multi_gpu_board
    cdef CUdevice _device
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
    def max_block(self) -> tuple[int, int, int]:
        """Most threads of a block along x, y and z."""
        return self._max_block

    @property
    def max_grid(self) -> tuple[int, int, int]:
        """Most blocks of a grid along x, y and z."""
        return self._max_grid

    @property
    def attributes(self) -> Mapping[str, int]:
        """Every attribute that the driver knows, by the name of its CU_DEVICE_ATTRIBUTE in lower case. Read-only.

        Raises
        ------
        UnavailableError
            The driver fails to tell one of them.

        Notes
        -----
        Read when it is first asked for, and kept. Values are the driver's, in its units: clock rates in kHz, the width
        of the memory's bus in bits, sizes of memory, pitches and alignments in bytes, registers of 32 bits, widths,
        heights and depths of textures and surfaces in elements; what can be or not is 1 or 0. An attribute of these
        headers that the driver is too old to know is not there.

        References
        ----------
        CUDA Driver API, cuDeviceGetAttribute.
        """
        if self._attributes is None:
            self._attributes = read_attributes(self)
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


cdef int read_attribute(DeviceInfo info, CUdevice_attribute which, str name) except? -1:
    cdef int value = 0
    describe_check(cu.cuDeviceGetAttribute(&value, which, info._device), info._id.ordinal, name)
    return value


cdef object read_attributes(DeviceInfo info):
    """All of them, but for those that a driver older than the headers does not know."""
    from types import MappingProxyType

    from kina.cuda.device_attributes import NUMBERS

    cdef int value
    cdef int number
    cdef CUresult code
    ensure_driver()  # the process may be a fork of the one that it was described in
    known = {}
    for name, number in NUMBERS.items():
        value = 0
        code = cu.cuDeviceGetAttribute(&value, <CUdevice_attribute> number, info._device)
        if code == CUDA_ERROR_INVALID_VALUE:
            continue
        describe_check(code, info._id.ordinal, name)
        known[name] = value
    return MappingProxyType(known)


cdef int read_limits(DeviceInfo info) except -1:
    info.multiprocessor_count = read_attribute(info, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                                               "number of multiprocessors")
    info.warp_size = read_attribute(info, CU_DEVICE_ATTRIBUTE_WARP_SIZE, "warp size")
    info.max_threads_per_block = read_attribute(info, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, "threads of a block")
    info.max_threads_per_multiprocessor = read_attribute(
        info, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, "threads of a multiprocessor")
    info.max_blocks_per_multiprocessor = read_attribute(
        info, CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, "blocks of a multiprocessor")
    info._max_block = (
        read_attribute(info, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, "width of a block"),
        read_attribute(info, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, "height of a block"),
        read_attribute(info, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, "depth of a block"),
    )
    info._max_grid = (
        read_attribute(info, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, "width of a grid"),
        read_attribute(info, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, "height of a grid"),
        read_attribute(info, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, "depth of a grid"),
    )
    info.max_shared_bytes_per_block = read_attribute(
        info, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, "shared memory of a block")
    info.max_shared_bytes_per_block_optin = read_attribute(
        info, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, "shared memory of a block that opts in")
    info.max_shared_bytes_per_multiprocessor = read_attribute(
        info, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, "shared memory of a multiprocessor")
    info.reserved_shared_bytes_per_block = read_attribute(
        info, CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, "shared memory that the driver keeps")
    info.max_registers_per_block = read_attribute(
        info, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, "registers of a block")
    info.max_registers_per_multiprocessor = read_attribute(
        info, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, "registers of a multiprocessor")
    info.constant_bytes = read_attribute(info, CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, "constant memory")
    info.l2_cache_bytes = read_attribute(info, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, "L2 cache")
    info.clock_rate_khz = read_attribute(info, CU_DEVICE_ATTRIBUTE_CLOCK_RATE, "clock rate")
    info.memory_clock_rate_khz = read_attribute(
        info, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, "clock rate of the memory")
    info.memory_bus_width_bits = read_attribute(
        info, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, "width of the memory's bus")
    info.async_engine_count = read_attribute(info, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, "number of copy engines")
    info.concurrent_kernels = read_attribute(info, CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, "concurrent kernels")
    info.cooperative_launch = read_attribute(info, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, "cooperative launches")
    info.cluster_launch = read_attribute(info, CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, "clusters")
    info.memory_pools = read_attribute(info, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, "memory pools")
    info.managed_memory = read_attribute(info, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, "managed memory")
    info.virtual_memory_management = read_attribute(
        info, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management")
    info.can_map_host_memory = read_attribute(
        info, CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, "mapping of host memory")
    info.ecc_enabled = read_attribute(info, CU_DEVICE_ATTRIBUTE_ECC_ENABLED, "ECC")
    info.integrated = read_attribute(info, CU_DEVICE_ATTRIBUTE_INTEGRATED, "kind")
    info.multi_gpu_board = read_attribute(info, CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD, "board")
    return 0


cdef DeviceInfo describe_device(int ordinal):
    cdef DeviceInfo info = DeviceInfo.__new__(DeviceInfo)
    cdef CUdevice device = 0
    cdef CUuuid uuid
    cdef char text[256]
    cdef size_t nbytes = 0
    describe_check(cu.cuDeviceGet(&device, ordinal), ordinal, "handle")
    info._made = True
    info._device = device
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
        read_attribute(info, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, "compute capability"),
        read_attribute(info, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, "compute capability"),
    )
    read_limits(info)
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
