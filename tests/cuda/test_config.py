"""Launch configurations: their own rules, and the limits of the device and the function at launch."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from helpers.kernels import (
    CLUSTER_IDS,
    KERNELS,
    fill_entry,
    grid_count,
    hungry_entry,
    module_text,
    nothing_enqueued,
)

import kina

FILL = "mut f32[], f32, u32"
KIB = 1024


@pytest.fixture
def raw(session):
    with session.raw("config") as block:
        yield block


@pytest.fixture
def fill(raw):
    return raw.module(KERNELS).function("fill", FILL)


def shared(raw, static_bytes=0):
    """A `fill` that touches its static and dynamic shared memory."""
    return raw.module(module_text(fill_entry(static_bytes=static_bytes))).function("fill", FILL)


# Values ---------------------------------------------------------------------------------------------------


def test_axes_are_filled_up_with_ones():
    config = kina.LaunchConfig(3, [4, 5])
    assert (config.grid, config.block) == ((3, 1, 1), (4, 5, 1))
    assert (config.shared_bytes, config.cluster, config.cooperative) == (0, None, False)
    config = kina.LaunchConfig((4, 2, 6), np.int64(7), np.uint8(9), (2, 1, 3), True)
    assert (config.grid, config.block, config.shared_bytes) == ((4, 2, 6), (7, 1, 1), 9)
    assert (config.cluster, config.cooperative, config.programmatic) == ((2, 1, 3), True, False)
    assert kina.LaunchConfig(1, 1, programmatic=True).programmatic is True
    assert kina.LaunchConfig(2**32 - 1, 1).grid[0] == 2**32 - 1


@pytest.mark.parametrize("which", ["grid", "block", "cluster"])
@pytest.mark.parametrize(
    "value",
    [0, -1, 2**32, 2**64, 10**30, 1.0, 2.5, "4", None, True, (), (1, 1, 1, 1), (1, 0), [1, -1], (1, 1.0),
     (1, True), (1, None), {1: 2}, {1}, np.array([1, 2]), b"1"],
    ids=repr,
)  # fmt: skip
def test_axes_that_are_none(which, value):
    if which == "cluster" and value is None:
        assert kina.LaunchConfig(1, 1, cluster=None).cluster is None
        return
    with pytest.raises(kina.InvalidConfigError, match=which) as caught:
        kina.LaunchConfig(**{"grid": 1, "block": 1, which: value})
    assert isinstance(caught.value, ValueError)
    assert caught.value.operation == "LaunchConfig"


@pytest.mark.parametrize("value", [-1, 2**31, 10**30, 1.0, None, True, "1", (1,)], ids=repr)
def test_shared_bytes_that_are_none(value):
    with pytest.raises(kina.InvalidConfigError, match="shared_bytes"):
        kina.LaunchConfig(1, 1, value)


class Counts:
    """An int that is another one each time it is asked."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)

    def __index__(self):
        return self.numbers.pop(0)


def test_ints_are_asked_once():
    """What was checked is what is used."""
    assert kina.LaunchConfig(Counts(3), Counts(4), Counts(5), Counts(1)) == kina.LaunchConfig(3, 4, 5, 1)
    assert kina.LaunchConfig.linear(Counts(512), Counts(256)) == kina.LaunchConfig(2, 256)
    for wrong in (Counts("three"), Counts(None), Counts(2.0)):
        with pytest.raises(kina.InvalidConfigError, match="shared_bytes is an int"):
            kina.LaunchConfig(1, 1, wrong)


@pytest.mark.parametrize(
    ("grid", "cluster", "axis"), [((3, 1, 1), 2, 0), ((4, 3, 1), (2, 2), 1), ((4, 4, 5), (1, 1, 2), 2)]
)
def test_a_grid_is_made_of_whole_clusters(grid, cluster, axis):
    with pytest.raises(kina.InvalidConfigError, match=rf"grid\[{axis}\] = {grid[axis]} is no multiple of"):
        kina.LaunchConfig(grid, 1, cluster=cluster)


def test_configurations_are_values():
    every = [
        kina.LaunchConfig(2, 3),
        kina.LaunchConfig((2, 3), 1),
        kina.LaunchConfig(2, 3, 4),
        kina.LaunchConfig(2, 3, cluster=1),
        kina.LaunchConfig(2, 3, cluster=2),
        kina.LaunchConfig(2, 3, cooperative=True),
        kina.LaunchConfig(2, 3, programmatic=True),
        kina.LaunchConfig(2, 3, 4, (2, 1, 1), True),
        kina.LaunchConfig(2, 3, 4, (2, 1, 1), True, True),
    ]
    assert len(set(every)) == len(every)
    for config in every:
        for same in (
            copy.copy(config),
            copy.deepcopy(config),
            *(pickle.loads(pickle.dumps(config, p)) for p in range(2, 6)),
        ):
            assert same == config
            assert (same != config) is False
            assert hash(same) == hash(config)
            assert repr(same) == repr(config)
        assert eval(repr(config), {"LaunchConfig": kina.LaunchConfig}) == config
        assert config != (config.grid, config.block)
    assert kina.LaunchConfig([2, 1], 3) == every[0]


@pytest.mark.parametrize("name", ["grid", "block", "shared_bytes", "cluster", "cooperative", "programmatic", "other"])
def test_configurations_do_not_change(name):
    config = kina.LaunchConfig(1, 1)
    with pytest.raises(AttributeError):
        setattr(config, name, 1)


@pytest.mark.parametrize(
    ("size", "block", "grid"),
    [(1, 256, 1), (256, 256, 1), (257, 256, 2), (2**32, 256, 2**24), (2**40, 1024, 2**30), (5, 1, 5)],
)
def test_linear_covers(size, block, grid):
    assert kina.LaunchConfig.linear(size, block) == kina.LaunchConfig(grid, block)
    assert kina.LaunchConfig.linear(size, block=block, shared_bytes=7).shared_bytes == 7


@pytest.mark.parametrize("size", [0, -1, 1.0, None, True, "1", (1,), 2**45], ids=repr)
def test_linear_of_nothing(size):
    with pytest.raises(kina.InvalidConfigError):
        kina.LaunchConfig.linear(size)
    with pytest.raises(kina.InvalidConfigError, match="block"):
        kina.LaunchConfig.linear(1, 0)


# Limits ---------------------------------------------------------------------------------------------------

OVER = {
    "grid-x": (((2**31, 1, 1), 1), {}, r"grid\[0\] = 2147483648 .* 2147483647"),
    "grid-y": (((1, 65536, 1), 1), {}, r"grid\[1\] = 65536 .* 65535"),
    "grid-z": (((1, 1, 65536), 1), {}, r"grid\[2\] = 65536 .* 65535"),
    "block-x": ((1, (1025, 1, 1)), {}, r"block\[0\] = 1025 .* 1024"),
    "block-y": ((1, (1, 1025, 1)), {}, r"block\[1\] = 1025 .* 1024"),
    "block-z": ((1, (1, 1, 65)), {}, r"block\[2\] = 65 .* 64"),
    "block": ((1, (32, 32, 2)), {}, "2048 threads .* 1024"),
    "block-huge": ((1, (1024, 1024, 64)), {}, "67108864 threads .* 1024"),
    "cluster": (((32, 1, 1), 1), {"cluster": 32}, "32 blocks .* 16"),
    "cluster-axes": (((3, 3, 3), 1), {"cluster": (3, 3, 3)}, "27 blocks .* 16"),
}  # fmt: skip


@pytest.mark.parametrize("case", OVER)
def test_over_a_limit_of_the_device(session, fill, case):
    arguments, more, match = OVER[case]
    y = session.zeros(4)
    with nothing_enqueued(session):
        for _ in range(2):  # nothing of a refused configuration is remembered
            with pytest.raises(kina.InvalidConfigError, match=match) as caught:
                fill.launch(kina.LaunchConfig(*arguments, **more), y, 1.0, 4)
            assert caught.value.operation == "launch"
            assert "fill" in str(caught.value)
    assert not session.to_host(y).any()
    fill.launch(kina.LaunchConfig(4, 1), y, 1.0, 4)
    assert session.to_host(y).all()


@pytest.mark.parametrize("operation", ["launch", "prepare", "max_active_blocks", "max_active_clusters"])
def test_errors_name_what_was_called(session, fill, operation):
    def call(config):
        if operation == "launch":
            return fill.launch(config, session.zeros(4), 1.0, 4)
        return getattr(fill, operation)(config)

    for config in (
        kina.LaunchConfig(2, 2048, cluster=2),
        kina.LaunchConfig(2, (1, 1, 65), cluster=2),
        kina.LaunchConfig((2, 65536), 1, cluster=2),
        kina.LaunchConfig(2, (32, 32, 2), cluster=2),
        kina.LaunchConfig(2, 1, 2**30, cluster=2),
        kina.LaunchConfig(32, 1, cluster=32),
    ):
        with nothing_enqueued(session), pytest.raises(kina.InvalidConfigError) as caught:
            call(config)
        assert caught.value.operation == operation


def test_errors_name_suggest_block(fill):
    for arguments in ((2**30,), (-1,), (0, -1), (0, 2**40)):
        with pytest.raises(kina.InvalidConfigError) as caught:
            fill.suggest_block(*arguments)
        assert caught.value.operation == "suggest_block"


def test_at_the_limits_of_the_device(session, fill):
    """The largest block of each axis; the largest grid of the axes that one can afford."""
    for config in (
        kina.LaunchConfig(1, (1024, 1, 1)),
        kina.LaunchConfig(1, (1, 1024, 1)),
        kina.LaunchConfig(1, (1, 16, 64)),
        kina.LaunchConfig((1, 65535, 1), 1),
        kina.LaunchConfig((1, 1, 65535), 1),
    ):
        y = session.zeros(1)
        fill.launch(config, y, 1.0, 1)
        assert session.to_host(y).all()


def test_over_the_limit_of_the_function(session, raw):
    function = raw.module(module_text(fill_entry(limit=".maxntid 128, 1, 1"))).function("fill", FILL)
    y = session.zeros(256)
    with (
        nothing_enqueued(session),
        pytest.raises(kina.InvalidConfigError, match=r"129 threads .* function's limit of 128"),
    ):
        function.launch(kina.LaunchConfig(2, 129), y, 1.0, 256)
    function.launch(kina.LaunchConfig(2, 128), y, 1.0, 256)
    assert session.to_host(y).all()


def test_a_block_that_needs_more_registers_than_there_are(session, raw):
    function = raw.module(module_text(hungry_entry())).function("fill_hungry", FILL)
    available = session.device_info.max_registers_per_block
    most = function.max_threads_per_block
    assert function.registers >= 200
    assert available < function.registers * session.device_info.max_threads_per_block
    assert 32 <= most <= available // function.registers
    y = session.zeros(1024)
    for block in (most + 1, 1024, (most, 2, 1)):
        config = kina.LaunchConfig(1, block)
        threads = config.block[0] * config.block[1]
        with (
            nothing_enqueued(session),
            pytest.raises(kina.InvalidConfigError, match=rf"{threads} threads .* function's limit of {most}"),
        ):
            function.launch(config, y, 1.0, 1024)
    function.launch(kina.LaunchConfig(2, most), y, 1.0, 1024)
    assert session.to_host(y).sum() == 2 * most


@pytest.mark.parametrize("wrong", [None, (1, 1), 1, "linear", kina.LaunchConfig])
def test_a_launch_takes_a_configuration(session, fill, wrong):
    y = session.zeros(4)
    with nothing_enqueued(session), pytest.raises(TypeError):
        fill.launch(wrong, y, 1.0, 4)


# Shared memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("static_bytes", [0, 1, 16 * KIB])
def test_shared_memory_is_judged_on_static_and_dynamic(session, raw, static_bytes):
    function = shared(raw, static_bytes)
    assert static_bytes <= function.shared_bytes < static_bytes + 64
    limit = session.device_info.max_shared_bytes_per_block_optin
    most = limit - function.shared_bytes
    assert most > 48 * KIB
    y = session.zeros(4)
    threshold = 48 * KIB - function.shared_bytes
    for value, nbytes in enumerate((0, 1, threshold - 1, threshold, threshold + 1, 48 * KIB, 48 * KIB + 1, most), 1):
        function.launch(kina.LaunchConfig(1, 4, nbytes), y, float(value), 4)
        assert (session.to_host(y) == value).all(), nbytes
    with nothing_enqueued(session), pytest.raises(kina.InvalidConfigError) as caught:
        function.launch(kina.LaunchConfig(1, 4, most + 1), y, 99.0, 4)
    assert f"{function.shared_bytes} static + {most + 1} dynamic" in str(caught.value)
    assert str(limit) in str(caught.value)
    function.launch(kina.LaunchConfig(1, 4, 5), y, 100.0, 4)
    assert (session.to_host(y) == 100).all()


def test_two_faces_of_one_entry_opt_in_alike(session, raw):
    """The limit is the driver's, per entry: what one Function raised, another does not lower."""
    one, other = shared(raw, 1), shared(raw, 1)
    y = session.zeros(4)
    for function, nbytes in (
        (one, 60 * KIB),
        (other, 160 * KIB),
        (one, 100 * KIB),
        (other, 150 * KIB),
        (other, 160 * KIB),
    ):
        function.launch(kina.LaunchConfig(1, 4, nbytes), y, nbytes / KIB, 4)
        assert (session.to_host(y) == nbytes / KIB).all()


@pytest.mark.simulated
def test_an_opt_in_that_fails_enqueues_nothing(session, raw, sim):
    function = shared(raw)
    y = session.zeros(4)
    config = kina.LaunchConfig(1, 4, 60 * KIB)
    for _ in range(2):
        with (
            sim.failing("cuFuncSetAttribute", result=1),
            nothing_enqueued(session),
            pytest.raises(kina.LaunchError),
        ):
            function.launch(config, y, 1.0, 4)
    function.launch(config, y, 1.0, 4)
    assert (session.to_host(y) == 1).all()


# Attributes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [{"cluster": 1}, {"cluster": 2}, {"cluster": (4, 1, 1)}, {"cluster": 8}, {"cluster": 16},
     {"cooperative": True}, {"cluster": 2, "cooperative": True}],
    ids=repr,
)  # fmt: skip
def test_extended_launches_pass_arguments_alike(session, fill, more):
    y = session.zeros(512)
    fill.launch(kina.LaunchConfig(16, 32, **more), y, 2.0, 512)
    assert (session.to_host(y) == 2).all()
    fill.launch(kina.LaunchConfig(16, 32), y, 3.0, 512)
    assert (session.to_host(y) == 3).all()


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("more", "name"), [({"cluster": 2}, "Ex"), ({"cooperative": True}, "Ex"), ({"programmatic": True}, "Ex"), ({}, "")]
)
def test_attributes_go_through_the_extended_call(session, fill, sim, more, name):
    y = session.zeros(4)
    with sim.tracing() as records:
        fill.launch(kina.LaunchConfig(2, 2, **more), y, 1.0, 4)
    assert [r["name"] for r in records if r["name"].startswith("cuLaunch")] == [f"cuLaunchKernel{name}"]


def test_a_grid_that_cannot_be_resident_is_refused(session, fill):
    y = session.zeros(4)
    before = session.counters().launches
    with pytest.raises(kina.LaunchError, match="fill") as caught:
        fill.launch(kina.LaunchConfig(2**20, 1024, cooperative=True), y, 1.0, 4)
    assert caught.value.driver_error is not None
    assert session.counters().launches == before
    fill.launch(kina.LaunchConfig(4, 4, cooperative=True), y, 1.0, 4)
    assert (session.to_host(y) == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_clusters_are_clusters(session, raw, size):
    function = raw.module(CLUSTER_IDS).function("cluster_ids", "mut u32[]")
    to = session.zeros((32, 2), "u32")
    function.launch(kina.LaunchConfig(32, 32, cluster=size), to)
    expected = np.stack([np.arange(32) // size, np.arange(32) % size], axis=1)
    assert (session.to_host(to) == expected).all()


@pytest.mark.gpu
def test_a_cooperative_grid_waits_for_itself(session, raw):
    function = raw.module(module_text(grid_count())).function("grid_count", "mut u32[]")
    blocks = 128
    seen = session.zeros(1 + blocks, "u32")
    function.launch(kina.LaunchConfig(blocks, 1, cooperative=True), seen)
    assert (session.to_host(seen) == blocks).all()
