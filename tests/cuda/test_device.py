"""Devices: what the driver says of them, and what happens to all of kina on one whose context dies."""

from __future__ import annotations

import gc
import pickle

import pytest
from helpers.cuda import KERNELS, driver, fork_body, ok, run_body, simulation, stack, unchanged

import kina
from kina.cuda import device_info, peer_matrix
from kina.cuda.device_attributes import NUMBERS

# Description ----------------------------------------------------------------------------------------------


def test_devices_are_what_the_driver_says():
    with unchanged():
        found = kina.devices()
    assert len(found) == ok(driver.cuDeviceGetCount())
    for ordinal, info in enumerate(found):
        device = ok(driver.cuDeviceGet(ordinal))
        assert info.id == kina.DeviceId(ordinal)
        assert info.type == "cuda"
        assert info.name == ok(driver.cuDeviceGetName(256, device)).split(b"\0")[0].decode()
        assert bytes(info.uuid) == bytes(ok(driver.cuDeviceGetUuid(device)).bytes)
        assert info.total_memory_bytes == ok(driver.cuDeviceTotalMem(device))
        attributes = driver.CUdevice_attribute
        assert info.compute_capability == tuple(
            ok(
                driver.cuDeviceGetAttribute(
                    getattr(attributes, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}"), device
                )
            )
            for part in ("MAJOR", "MINOR")
        )
        assert info.multiprocessor_count > 0
        assert info.pci_bus_id.count(":") == 2


#: Attributes by the words of DeviceInfo.
LIMITS = {
    "warp_size": "WARP_SIZE",
    "max_threads_per_block": "MAX_THREADS_PER_BLOCK",
    "max_threads_per_multiprocessor": "MAX_THREADS_PER_MULTIPROCESSOR",
    "max_blocks_per_multiprocessor": "MAX_BLOCKS_PER_MULTIPROCESSOR",
    "max_block": ("MAX_BLOCK_DIM_X", "MAX_BLOCK_DIM_Y", "MAX_BLOCK_DIM_Z"),
    "max_grid": ("MAX_GRID_DIM_X", "MAX_GRID_DIM_Y", "MAX_GRID_DIM_Z"),
    "max_shared_bytes_per_block": "MAX_SHARED_MEMORY_PER_BLOCK",
    "max_shared_bytes_per_block_optin": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "max_shared_bytes_per_multiprocessor": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "reserved_shared_bytes_per_block": "RESERVED_SHARED_MEMORY_PER_BLOCK",
    "max_registers_per_block": "MAX_REGISTERS_PER_BLOCK",
    "max_registers_per_multiprocessor": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "constant_bytes": "TOTAL_CONSTANT_MEMORY",
    "l2_cache_bytes": "L2_CACHE_SIZE",
    "clock_rate_khz": "CLOCK_RATE",
    "memory_clock_rate_khz": "MEMORY_CLOCK_RATE",
    "memory_bus_width_bits": "GLOBAL_MEMORY_BUS_WIDTH",
    "async_engine_count": "ASYNC_ENGINE_COUNT",
    "multiprocessor_count": "MULTIPROCESSOR_COUNT",
}
ABILITIES = {
    "concurrent_kernels": "CONCURRENT_KERNELS",
    "cooperative_launch": "COOPERATIVE_LAUNCH",
    "cluster_launch": "CLUSTER_LAUNCH",
    "memory_pools": "MEMORY_POOLS_SUPPORTED",
    "managed_memory": "MANAGED_MEMORY",
    "virtual_memory_management": "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "can_map_host_memory": "CAN_MAP_HOST_MEMORY",
    "ecc_enabled": "ECC_ENABLED",
    "integrated": "INTEGRATED",
    "multi_gpu_board": "MULTI_GPU_BOARD",
}


def attribute(name: str, ordinal: int = 0) -> int:
    """What the driver answers to cuda.bindings."""
    which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return ok(driver.cuDeviceGetAttribute(which, ok(driver.cuDeviceGet(ordinal))))


def test_limits_and_abilities_have_names():
    for ordinal, info in enumerate(kina.devices()):
        for name, names in LIMITS.items():
            expected = attribute(names, ordinal) if isinstance(names, str) else tuple(attribute(each) for each in names)
            assert getattr(info, name) == expected, name
        for name, of_driver in ABILITIES.items():
            value = getattr(info, name)
            assert type(value) is bool
            assert value == bool(attribute(of_driver, ordinal)), name
        assert info.warp_size == 32
        assert info.max_block[0] >= info.max_threads_per_block // 2 > 0
        with pytest.raises(AttributeError):
            info.warp_size = 16


def test_every_attribute_is_told():
    """Of those that these bindings know too; a name that the driver does not know is not there."""
    info = kina.devices()[0]
    known = info.attributes
    assert info.attributes is known
    with pytest.raises(TypeError):
        known["warp_size"] = 1
    asked = 0
    for member, number in driver.CUdevice_attribute.__members__.items():
        name = member.removeprefix("CU_DEVICE_ATTRIBUTE_").lower()
        if name not in NUMBERS:  # newer bindings, and the end of the list
            continue
        code, value = driver.cuDeviceGetAttribute(number, ok(driver.cuDeviceGet(0)))
        if int(code) == 0:
            assert known[name] == value, name
            asked += 1
        else:
            assert name not in known
    assert asked > 120
    assert set(known) <= set(NUMBERS)
    assert len(known) > 140


def test_asking_for_attributes_opens_no_context():
    def body():
        known = kina.devices()[0].attributes
        _, active = ok(driver.cuDevicePrimaryCtxGetState(ok(driver.cuDeviceGet(0))))
        assert not active
        assert stack() == []
        print(known["warp_size"])

    assert run_body(body) == "32\n"


@pytest.mark.simulated
def test_attributes_are_read_when_they_are_asked_for_and_once():
    def body():
        sim = simulation()

        def asked():
            return sim.calls("cuDeviceGetAttribute")

        info = kina.cuda.device_info(0)
        described = asked()
        assert described < 50
        known = info.attributes
        assert asked() - described == len(known)
        assert kina.cuda.device_info(0).attributes is known
        assert asked() - described == len(known)

    run_body(body)


@pytest.mark.simulated
def test_an_attribute_that_the_driver_does_not_know_is_left_out():
    """As an older driver answers; any other failure is told, and the next question gets all of them."""

    def body():
        from kina.cuda.device_attributes import NUMBERS

        sim, names = simulation(), list(NUMBERS)
        info = kina.devices()[0]
        sim.fail("cuDeviceGetAttribute", 3, 999)
        with pytest.raises(kina.UnavailableError, match=f"does not tell the {names[2]} of cuda:0") as raised:
            print(info.attributes)
        assert raised.value.driver_error.code == 999
        sim.clear_faults()
        sim.fail("cuDeviceGetAttribute", len(names), 1)
        assert list(info.attributes) == names[:-1]

    run_body(body)


def test_two_descriptions_of_a_device_are_equal():
    first, second = kina.devices()[0], device_info("cuda:0")
    assert first == second
    assert hash(first) == hash(second)
    assert first != kina.DeviceId(0)
    assert len({info.uuid for info in kina.devices()}) == len(kina.devices())
    assert repr(first).startswith(f"<kina.DeviceInfo cuda:0: {first.name}, sm_")


@pytest.mark.parametrize("device", [0, "cuda", "cuda:0", kina.DeviceId(0), "info"])
def test_spellings(device):
    info = kina.devices()[0]
    assert device_info(info if device == "info" else device) == info


def test_descriptions_are_not_constructed():
    with pytest.raises(TypeError, match="read from the driver"):
        kina.DeviceInfo()
    with pytest.raises(TypeError):
        pickle.dumps(kina.devices()[0])


def test_a_device_that_is_not_there():
    count = len(kina.devices())
    for device in (count, f"cuda:{count}"):
        with pytest.raises(kina.UnavailableError, match=f"cuda:{count} does not exist"):
            device_info(device)
    for device in ("cpu", -1, None, 1.5, True):
        with pytest.raises(kina.InvalidConfigError):
            device_info(device)


def test_peers():
    pairs = {(row["source"].ordinal, row["target"].ordinal): row for row in peer_matrix()}
    count = len(kina.devices())
    assert set(pairs) == {(i, j) for i in range(count) for j in range(count) if i != j}
    for (source, target), row in pairs.items():
        can = ok(driver.cuDeviceCanAccessPeer(ok(driver.cuDeviceGet(source)), ok(driver.cuDeviceGet(target))))
        assert row["access"] == bool(can)


def test_asking_opens_no_context():
    def body():
        count = len(kina.devices())
        assert kina.unavailable_reason() is None
        for ordinal in range(count):
            _, active = ok(driver.cuDevicePrimaryCtxGetState(ok(driver.cuDeviceGet(ordinal))))
            assert not active
        assert stack() == []

    run_body(body)


# Poisoned devices -----------------------------------------------------------------------------------------

# Each body runs in a process of its own, which ends with 0 in silence although things of a dead context live.


def test_a_fault_of_a_kernel_poisons_the_device():
    """The first call that sees it says that earlier work failed; later ones carry the first cause."""

    def body():
        one, other = kina.Runtime(0), kina.Runtime(0)
        with kina.session(one) as session, kina.session(other) as second:
            ours, theirs = session.zeros(10), second.zeros(10)
            witness = session.completion()
            witness.wait()
            with session.raw() as raw:
                raw.module(KERNELS).function("trap", "").launch(kina.LaunchConfig(1, 1))
            late = []

            def see():
                late.append(session.completion())
                session.synchronize()

            with pytest.raises(kina.SynchronizeError, match="earlier asynchronous failure") as first:
                see()
            code = first.value.driver_error.code
            assert code in (700, 719)
            calls = [
                session.synchronize, second.synchronize, session.completion, lambda: session.zeros(3),
                lambda: session.full(3, 1), lambda: session.from_host([1]), lambda: session.to_host(ours),
                lambda: second.copy(theirs), lambda: second.adopt(ours), session.raw, session.counters,
                lambda: kina.session(one).__enter__(), lambda: kina.session(other).__enter__(),
                lambda: kina.Runtime(0), lambda: kina.zeros(3, device="cuda:0"), ours.to_dlpack,
            ]  # fmt: skip
            for call in calls:
                with pytest.raises(kina.RuntimePoisonedError, match="earlier asynchronous failure") as later:
                    call()
                assert later.value.driver_error.code == code
            assert witness.done()
            for unfinished in late:
                with pytest.raises(kina.RuntimePoisonedError):
                    unfinished.wait()
            del calls
        one.close()
        assert stack() == []

    run_body(body)


def test_a_fault_of_one_process_is_none_of_anothers(session):
    """On the same device; and each of them ends in silence."""

    def body():
        with kina.session(0) as theirs:
            with theirs.raw() as raw:
                raw.module(KERNELS).function("trap", "").launch(kina.LaunchConfig(1, 1))
            with pytest.raises(kina.SynchronizeError, match="earlier asynchronous failure"):
                theirs.synchronize()
            with pytest.raises(kina.RuntimePoisonedError):
                theirs.zeros(3)
        print("poisoned")

    def work(times: int) -> None:
        with session.raw() as raw:
            function = raw.module(KERNELS).function("add_one", "mut f32[], u32")
            for _ in range(times):
                function.launch(kina.LaunchConfig.linear(1000), tensor, 1000)

    tensor = session.zeros(1000)
    for _ in range(3):
        work(10)
        assert run_body(body) == "poisoned\n"
    assert (session.to_host(tensor) == 30).all()
    assert session.supports(kina.Capability.NATIVE_MODULE)


@pytest.mark.parametrize("seen_by", ["to_host", "witness", "close", "from_host"])
def test_a_fault_is_seen_by_whoever_waits_first(seen_by):
    def body(seen_by):
        runtime = kina.Runtime(0)
        session = kina.session(runtime).__enter__()
        tensor = session.zeros(10)
        with session.raw() as raw:
            raw.module(KERNELS).function("trap", "").launch(kina.LaunchConfig(1, 1))
        if seen_by == "from_host":  # which does not wait: the fault has to be there
            import time

            time.sleep(0.5) if simulation() is None else simulation().wait_idle()
        calls = {
            "to_host": lambda: session.to_host(tensor),
            "witness": lambda: session.completion().wait(),
            "close": lambda: (session.close(), runtime.close()),
            "from_host": lambda: session.from_host([1.0]),
        }
        with pytest.raises(kina.SynchronizeError, match="earlier asynchronous failure"):
            calls[seen_by]()
        with pytest.raises(kina.RuntimePoisonedError):
            kina.session(runtime).__enter__()
        session.close()

    run_body(body, seen_by)


@pytest.mark.multi_gpu
def test_a_fault_takes_the_other_devices_along():
    """It ends the process' use of all of them, and each is poisoned where it is seen there."""

    def body():
        with kina.session(1) as bystander, kina.session(0) as session:
            tensor = bystander.full(3, 1)
            bystander.synchronize()
            with session.raw() as raw:
                raw.module(KERNELS).function("trap", "").launch(kina.LaunchConfig(1, 1))
            with pytest.raises(kina.SynchronizeError, match="cuda:0 reports an earlier asynchronous failure") as here:
                session.synchronize()
            with pytest.raises(kina.SynchronizeError, match="cuda:1 reports an earlier asynchronous failure") as there:
                bystander.to_host(tensor)
            assert there.value.driver_error.code == here.value.driver_error.code
        for device in (0, 1):
            with pytest.raises(kina.RuntimePoisonedError, match=f"cuda:{device}"):
                kina.session(device).__enter__()
        assert stack() == []

    run_body(body)


@pytest.mark.parametrize("inside", [False, True])
def test_another_library_resets_the_primary_context(inside):
    """What kina held there is lost; nothing crashes, and nothing of it is given to the driver again."""

    def body(inside):
        session = kina.session("cuda:0").__enter__()
        tensors = [session.zeros(10), session.from_host([1.0])]
        witness = session.completion()
        if not inside:
            session.close()
        ok(driver.cuDevicePrimaryCtxReset(ok(driver.cuDeviceGet(0))))
        if inside:
            with pytest.raises(kina.RuntimePoisonedError, match="reset"):
                session.synchronize()
            with pytest.raises(kina.RuntimePoisonedError):
                session.zeros(3)
        with pytest.raises(kina.RuntimePoisonedError):
            kina.session("cuda:0").__enter__()
        for ask in (witness.done, witness.wait):
            with pytest.raises(kina.RuntimePoisonedError):
                ask()
        tensors.clear()
        del witness
        gc.collect()
        sim = simulation()
        if sim is not None:
            # The one question that may be put to a dead context is whether it is dead.
            assert {record["name"] for record in sim.trace(event="violation")} <= {"cuCtxGetId"}

    run_body(body, inside)


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("code", "call"),
    [
        *((code, "cuStreamSynchronize") for code in (700, 702, 710, 214, 220, 714, 715, 716, 717, 718, 719)),
        *((700, call) for call in ("cuMemcpyHtoDAsync", "cuLaunchKernel", "cuEventRecord", "cuMemAllocFromPoolAsync")),
    ],
)
def test_every_sticky_answer_poisons(code, call):
    def body(code, call):
        sim = simulation()
        with kina.session("cuda:0") as session:
            tensor = session.zeros(10)
            with session.raw() as raw:
                function = raw.module(KERNELS).function("add_one", "mut f32[], u32")
                sim.fail(call, 1, code)

                def use():
                    session.empty(64 << 20)  # more than is cached
                    session.from_host([1.0])
                    session.completion()
                    function.launch(kina.LaunchConfig(1, 1), tensor, 1)
                    session.synchronize()

                with pytest.raises(kina.SynchronizeError, match="earlier asynchronous failure") as first:
                    use()
                assert first.value.driver_error.code == code
            with pytest.raises(kina.RuntimePoisonedError) as later:
                session.synchronize()
            assert later.value.driver_error.code == code

    fork_body(body, code, call)
