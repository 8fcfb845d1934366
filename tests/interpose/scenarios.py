"""What test_interpose.py runs in a process whose driver is the interposer over fake_driver.c."""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import byref, c_double, c_float, c_int, c_int64, c_long, c_uint, c_uint32, c_uint64, c_void_p

from helpers.interpose import Interposer

driver = ctypes.CDLL("libcuda.so.1")
calls = Interposer()


def lookup(name: str, version: int = 13000, flags: int = 0) -> int:
    """The address that cuGetProcAddress_v2 answers with."""
    address, status = c_void_p(), c_int(-1)
    result = driver.cuGetProcAddress_v2(name.encode(), byref(address), version, c_uint64(flags), byref(status))
    assert (result, status.value) == ((0, 0) if address.value else (500, 1))
    return address.value or 0


def symbol(name: str) -> int:
    return ctypes.cast(getattr(driver, name), c_void_p).value or 0


class Large(ctypes.Structure):
    _fields_ = (("a", c_int64), ("b", c_int64), ("c", c_int64))


class Vectors(ctypes.Structure):
    _fields_ = (("a", c_double), ("b", c_double))


class Small(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


def counts() -> None:
    assert calls.real is not None
    assert calls.real == calls.real.resolve()
    assert set(calls.counts()) == {
        "cuByValue", "cuGetProcAddress", "cuInit", "cuLargeResult", "cuLaunchKernel", "cuMemAlloc", "cuMixed",
        "cuVariadic",
    }  # fmt: skip
    assert not any(calls.counts().values())
    by_lookup = ctypes.CFUNCTYPE(c_int, c_uint)(lookup("cuInit"))
    assert [driver.cuInit(0), by_lookup(7), driver.cuInit(3)] == [0, 7, 3]
    assert calls.count("cuInit") == 3
    assert calls.counts()["cuInit"] == 3
    assert calls.count("cuInit", "cuGetProcAddress") == 4
    calls.reset()
    assert not any(calls.counts().values())
    for name in ("cuInitt", "cuHidden"):
        try:
            calls.count(name)
        except KeyError:
            continue
        raise AssertionError(f"{name} was never seen")


def lookups() -> None:
    assert lookup("cuNothing") == 0
    assert lookup("cuInit") == lookup("cuInit")
    hidden = ctypes.CFUNCTYPE(c_int, c_int)(lookup("cuHidden"))
    assert hidden(4) == 40
    assert calls.count("cuHidden") == 1

    # Versions of one function stay different functions and share one count.
    address = c_uint64()
    assert ctypes.CFUNCTYPE(c_int, c_void_p, c_uint)(lookup("cuMemAlloc", 2000))(byref(address), 5) == 1
    assert address.value == 5
    assert ctypes.CFUNCTYPE(c_int, c_void_p, c_uint64)(lookup("cuMemAlloc", 3020))(byref(address), 5) == 2
    assert address.value == 5 << 32
    assert driver.cuMemAlloc_v2(byref(address), c_uint64(1)) == 2
    assert calls.count("cuMemAlloc") == 3
    assert ctypes.CFUNCTYPE(c_int, c_void_p)(lookup("cuLaunchKernel", flags=2))(9) == -9
    assert calls.count("cuLaunchKernel") == 1

    # Nobody gets past the interposer by asking for the lookup itself, in either of its two forms.
    assert lookup("cuGetProcAddress", 12000) == symbol("cuGetProcAddress_v2")
    assert lookup("cuGetProcAddress", 11030) == symbol("cuGetProcAddress")
    address = c_void_p()
    assert driver.cuGetProcAddress(b"cuInit", byref(address), 13000, c_uint64(0)) == 0
    assert address.value == lookup("cuInit")


def forwarding() -> None:
    launch_types = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]
    arguments = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    weights = (1, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29)
    expected = sum(w * a for w, a in zip(weights, arguments, strict=True))
    for address in (symbol("cuLaunchKernel"), lookup("cuLaunchKernel")):
        assert ctypes.CFUNCTYPE(c_int, *launch_types)(address)(*arguments) == expected

    mixed = driver.cuMixed
    mixed.restype = c_double
    mixed.argtypes = [
        c_double, c_int, c_float, c_long, c_double, c_float, c_long, c_double, c_int, c_double,
        c_double, c_int, c_double, c_float, c_long, c_double, c_int,
    ]  # fmt: skip
    values = [1.5, 2, 3.25, 4, 5.5, 6.75, 7, 8.5, 9, 10.5, 11.5, 12, 13.5, 14.25, 15, 16.5, 17]
    expected = sum((i + 1) * value for i, value in enumerate(values))
    driver.cuByValue.restype = c_double
    driver.cuByValue.argtypes = [Large, Vectors, Small]
    driver.cuLargeResult.restype = Large
    driver.cuLargeResult.argtypes = [c_int64]
    driver.cuVariadic.restype = c_double
    # Three times: bound by this call, then through the slow path of a failure that is yet to come.
    for _ in range(3):
        assert mixed(*values) == expected
        assert driver.cuByValue(Large(1, 2, 3), Vectors(4.5, 5.5), Small(6, 7)) == 14 + 18 + 27.5 + 36 + 49
        result = driver.cuLargeResult(5)
        assert (result.a, result.b, result.c) == (5, 10, 15)
        assert driver.cuVariadic(3, c_double(1.5), c_double(2.5), c_double(3.5)) == 17.0
        for name in ("cuMixed", "cuByValue", "cuLargeResult", "cuVariadic"):
            calls.fail(name, nth=100)
    assert calls.count("cuMixed") == calls.count("cuByValue") == 3
    assert calls.injected() == {}


def failures() -> None:
    def results(count: int) -> list[int]:
        return [driver.cuInit(0) for _ in range(count)]

    calls.fail("cuInit")
    assert results(3) == [999, 0, 0]
    calls.fail("cuInit", nth=3, code=2, times=2)
    assert results(6) == [0, 0, 2, 2, 0, 0]
    calls.fail("cuInit", nth=2, code=719, times=-1)
    assert results(4) == [0, 719, 719, 719]
    calls.fail("cuInit", times=0)
    assert results(2) == [0, 0]
    assert calls.count("cuInit") == 15
    assert calls.injected() == {"cuInit": 6}
    # Answered in the driver's stead, also with success.
    calls.fail("cuMemAlloc", code=0)
    address = c_uint32(77)
    assert driver.cuMemAlloc(byref(address), 5) == 0
    assert address.value == 77
    # An order covers every version of the name and every way to it.
    calls.fail("cuInit_v2", code=3)
    assert ctypes.CFUNCTYPE(c_int, c_uint)(lookup("cuInit"))(0) == 3
    calls.fail("cuGetProcAddress", code=500)
    assert driver.cuGetProcAddress_v2(b"cuInit", byref(c_void_p()), 13000, c_uint64(0), None) == 500
    calls.fail("cuInit")
    calls.reset()
    assert results(2) == [0, 0]
    for name, nth, error in (("cuNever", 1, KeyError), ("cuInit", 0, ValueError)):
        try:
            calls.fail(name, nth)
        except error:
            continue
        raise AssertionError(f"fail({name!r}, {nth}) was accepted")


def threads() -> None:
    hammer = ctypes.CDLL(os.environ["HAMMER"]).hammer
    hammer.restype = c_long
    hammer.argtypes = [c_void_p, c_int, c_long]
    for address in (symbol("cuInit"), lookup("cuInit")):
        calls.reset()
        calls.fail("cuInit", nth=5000, times=1234)
        assert hammer(address, 8, 50_000) == 1234
        assert calls.count("cuInit") == 400_000
        assert calls.injected() == {"cuInit": 1234}


def missing() -> None:
    """Under a KINA_INTERPOSE_REAL that cannot be loaded."""
    assert calls.real is None
    assert driver.cuInit(0) == 303
    assert driver.cuGetProcAddress_v2(b"cuInit", byref(c_void_p()), 13000, c_uint64(0), None) == 303


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("passed", sys.argv[1])
