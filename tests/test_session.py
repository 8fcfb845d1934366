"""kina.session and the module-level functions: targets, and which session serves."""

import sys
import threading
from types import ModuleType

import numpy as np
import pytest

import kina
from kina.session import innermost


def test_kina_session_is_a_function_whatever_was_imported():
    import kina.session
    from kina.session import session

    assert kina.session is session
    assert callable(kina.session)


@pytest.mark.parametrize(
    "target",
    [
        "gpu",
        "cpu:0",
        "CPU",
        "",
        "cuda:",
        "cuda:-1",
        "cuda:x",
        "cuda: 1",
        "cuda:1.0",
        "cuda:٣",
        "cuda:0:1",
        -1,
        1.0,
        True,
        None,
        ("cuda", 0),
        object(),
        b"cpu",
    ],
    ids=repr,
)
def test_what_is_no_target(target):
    with pytest.raises(kina.InvalidConfigError) as raised:
        kina.session(target)
    assert repr(target) in str(raised.value)
    with pytest.raises(kina.InvalidConfigError):
        innermost(target if target is not None else "none")


def test_a_target_is_required():
    with pytest.raises(TypeError):
        kina.session()


def test_a_host_session_has_no_stream():
    with pytest.raises(kina.InvalidConfigError, match="no stream"):
        kina.session("cpu", stream=object())


@pytest.mark.parametrize(
    ("device", "ordinal"),
    [
        ("cpu", -1),
        ("cuda", 0),
        ("cuda:0", 0),
        ("cuda:17", 17),
        ("cuda:007", 7),
        (3, 3),
        (kina.DeviceId(2), 2),
    ],
    ids=repr,
)
def test_names_of_devices(device, ordinal):
    from kina._core.opening import cuda_ordinal, device_ordinal

    for _ in range(2):  # read, and remembered
        assert device_ordinal(device) == ordinal
    if ordinal >= 0:
        assert cuda_ordinal(device) == ordinal
    else:
        with pytest.raises(kina.InvalidConfigError, match="not a CUDA device"):
            cuda_ordinal(device)


class Str(str):
    pass


def test_subclasses_of_str_and_int_are_taken():
    assert repr(kina.session(Str("cpu"))) == "<kina.HostSession, not entered>"
    assert innermost(np.str_("cuda:1")) is None


# Innermost


def test_innermost_follows_the_blocks():
    assert innermost("cpu") is None
    with kina.session("cpu") as outer:
        assert innermost("cpu") is innermost() is outer
        with kina.session("cpu") as inner:
            assert innermost() is inner
            with outer:
                assert innermost() is outer
            assert innermost() is inner
        assert innermost() is outer
    assert innermost() is None


def test_innermost_after_exits_out_of_order():
    first, second, third = (kina.session("cpu") for _ in range(3))
    first.__enter__()
    second.__enter__()
    third.__enter__()
    second.__exit__(None, None, None)
    assert innermost() is third
    third.close()
    assert innermost() is first
    first.close()
    assert innermost() is None


def test_innermost_is_of_this_thread(host):
    found = []
    thread = threading.Thread(target=lambda: found.append(innermost()))
    thread.start()
    thread.join()
    assert found == [None]
    assert innermost() is host


def test_a_session_given_up_elsewhere_is_not_found():
    session = kina.session("cpu").__enter__()
    thread = threading.Thread(target=session.__exit__, args=(KeyError, KeyError(), None))
    thread.start()
    thread.join()
    assert innermost() is None


def test_no_cuda_session_is_open(host):
    assert innermost("cuda:0") is None
    assert innermost(0) is None
    assert innermost(kina.DeviceId(3)) is None


# Functions of the module


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("inside", [True, False])
def test_functions(device, inside):
    def check():
        assert kina.empty((2, 3), "i8", device=device).shape == (2, 3)
        with kina.session("cpu") as host:
            zeros = kina.zeros((2, 3), device=device)
            assert host.to_host(zeros).tolist() == [[0] * 3] * 2
            assert host.to_host(kina.full(2, 7, "i64", device=device)).tolist() == [7, 7]
            assert host.to_host(kina.from_host([1, 2], "f64", device=device)).tolist() == [1, 2]
            array = np.arange(3.0)
            shared = kina.from_dlpack(array, device=device)
            array[0] = 5
            assert host.to_host(shared).tolist() == [5, 1, 2]

    if inside:
        with kina.session("cpu"):
            check()
    else:
        check()
    assert innermost() is None


def test_momentary_sessions_are_left_on_errors():
    with pytest.raises(kina.InvalidShapeError):
        kina.zeros(-1)
    with pytest.raises(kina.DLPackError):
        kina.from_dlpack(object())
    assert innermost() is None


def test_from_dlpack_takes_what_adopt_takes(host):
    assert host.to_host(kina.from_dlpack(b"ab")).tolist() == [97, 98]
    assert host.to_host(kina.from_dlpack(host.full(2, 1).to_dlpack())).tolist() == [1, 1]
    assert host.to_host(kina.from_dlpack(np.float32(2))).item() == 2


class Elsewhere:
    def __init__(self, device):
        self.device = device

    def __dlpack_device__(self):
        return self.device


@pytest.mark.parametrize("device", [(99, 0), (2, -1), (0, 0), ("a", 0), 5, None], ids=repr)
def test_producers_on_no_device(device):
    with pytest.raises(kina.DLPackError, match="device"):
        kina.from_dlpack(Elsewhere(device))


def test_another_thread_is_still_loading_the_host_session(monkeypatch):
    """The first tensors of a program may be made by several threads at once."""
    monkeypatch.setitem(sys.modules, "kina._core.host_session", ModuleType("kina._core.host_session"))
    assert innermost("cpu") is None
    assert innermost() is None
