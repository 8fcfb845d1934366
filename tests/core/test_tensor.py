"""Tensor: its faces, what it refuses, and how it holds its storage."""

import copy
import gc
import pickle
import tracemalloc
import weakref

import numpy as np
import pytest

import kina


def test_faces(host):
    tensor = host.zeros((2, 3), "i16")
    assert tensor.shape == (2, 3)
    assert tensor.strides == (3, 1)
    assert tensor.dtype is kina.int16
    assert tensor.device == "cpu"
    assert (tensor.ndim, tensor.size, tensor.itemsize, tensor.nbytes, len(tensor)) == (2, 6, 2, 12, 2)
    assert tensor.is_contiguous
    assert not tensor.readonly
    assert tensor.allocation_domain == host.allocation_domain
    assert tensor.runtime_identity == host.runtime_identity
    assert isinstance(tensor.allocation_domain, kina.AllocationDomainId)
    assert isinstance(tensor.runtime_identity, kina.RuntimeIdentity)


@pytest.mark.parametrize("name", ["shape", "strides", "dtype", "device", "readonly", "size", "anything"])
def test_the_layout_is_frozen(host, name):
    with pytest.raises(AttributeError):
        setattr(host.zeros(3), name, 1)


def test_repr_shows_no_data(host):
    tensor = host.full((2, 3), 123.0)
    assert repr(tensor) == "<kina.Tensor float32 (2, 3) on cpu>"
    assert repr(tensor[:, ::-1].as_readonly()) == "<kina.Tensor float32 (2, 3) on cpu, strides (3, -1), read-only>"


def test_zero_axes_and_no_elements(host):
    scalar = host.full((), 7, "i32")
    assert (scalar.shape, scalar.strides, scalar.ndim, scalar.size, scalar.nbytes) == ((), (), 0, 1, 4)
    assert scalar.is_contiguous
    assert scalar[...].shape == scalar[()].shape == ()
    assert scalar[None].shape == (1,)
    assert host.to_host(scalar)[()] == 7
    with pytest.raises(TypeError, match="len"):
        len(scalar)
    empty = host.zeros((3, 0, 2))
    assert (empty.size, empty.nbytes, len(empty)) == (0, 0, 3)
    assert empty.is_contiguous
    assert empty[:, :, ::2].permute(2, 0, 1).is_contiguous
    assert host.to_host(empty).shape == (3, 0, 2)


def test_it_cannot_be_made(host):
    attempts = (
        kina.Tensor,
        lambda: kina.Tensor([1, 2]),
        lambda: kina.Tensor(shape=3),
        lambda: kina.Tensor.__new__(kina.Tensor),
    )
    for attempt in attempts:
        with pytest.raises(TypeError, match="made by a session"):
            attempt()
    host.zeros(3)  # and the door is closed again after a success
    with pytest.raises(TypeError, match="made by a session"):
        kina.Tensor()
    with pytest.raises(TypeError):
        type("Sub", (kina.Tensor,), {})


@pytest.mark.parametrize("attempt", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_neither_copied_nor_pickled(host, attempt):
    with pytest.raises(TypeError, match=r"s\.copy\(t\) copies"):
        attempt(host.zeros(3))


@pytest.mark.parametrize(
    "attempt",
    [
        bool,
        int,
        float,
        complex,
        lambda t: [][t],
        lambda t: np.add(1, t),
        lambda t: np.ones(1) + t,
        lambda t: range(t),
        list,
        iter,
        lambda t: 0.0 in t,
        lambda t: t < 1,
    ],
)
def test_a_tensor_does_not_become_its_values(host, attempt):
    with pytest.raises(TypeError):
        attempt(host.full(1, 1, "i32"))


def test_the_refusal_names_the_way(host):
    with pytest.raises(TypeError, match=r"s\.to_host\(t\)"):
        float(host.zeros(()))


def test_equality_and_hash_are_identity(host):
    one, other = host.zeros(3), host.zeros(3)
    assert one == one
    assert one != other
    assert one != one[:]
    assert len({one, other, one}) == 2


@pytest.mark.parametrize("index", [3, -4, (0, 5), (0, 0, 0), 2**70, (Ellipsis, 2, Ellipsis)], ids=repr)
def test_out_of_bounds_is_an_index_error(host, index):
    with pytest.raises(IndexError):
        host.zeros((3, 4))[index]


@pytest.mark.parametrize("index", [True, 1.0, "a", [0], np.array([0]), np.array([True] * 3), np.bool_(True)], ids=repr)
def test_what_would_need_a_copy_is_refused(host, index):
    with pytest.raises(kina.ArgumentError, match="indexed by ints"):
        host.zeros(3)[index]
    with pytest.raises(kina.ArgumentError):
        host.zeros(3)[host.zeros((), "i32")]


def test_a_step_of_zero_is_a_value_error(host):
    with pytest.raises(ValueError, match="step"):
        host.zeros(3)[::0]


def test_indexing_never_writes(host):
    with pytest.raises(TypeError):
        host.zeros(3)[0] = 1


def test_views_share_the_storage_and_keep_it_alive(host):
    array = np.arange(12, dtype="f4").reshape(3, 4)
    alive = weakref.finalize(array, lambda: None)
    tensor = host.adopt(array)
    view = tensor[1:, ::2].permute(1, 0).reshape(2, 2).broadcast_to(3, 2, 2).as_readonly()[0]
    array[1, 0] = 100
    assert host.to_host(view)[0, 0] == 100
    del array, tensor
    gc.collect()
    assert alive.alive
    assert host.to_host(view).tolist() == [[100, 8], [6, 10]]
    del view
    gc.collect()
    assert not alive.alive


def test_readonly_views(host):
    tensor = host.zeros(3)
    locked = tensor.as_readonly()
    assert locked.readonly
    assert locked[1:].readonly
    assert locked.reshape(3, 1).readonly
    assert not tensor.readonly
    with pytest.raises(kina.InvalidLayoutError, match="read-only"):
        host.add(tensor, tensor, out=locked)


@pytest.mark.parametrize("shape", [(3, 3), (2, 3)])
def test_repeated_elements_are_not_written(host, shape):
    repeated = host.zeros(3).broadcast_to(shape)
    assert not repeated.is_contiguous
    with pytest.raises(kina.InvalidLayoutError, match="stride of 0"):
        host.add(host.zeros(shape), host.zeros(shape), out=repeated)
    with pytest.raises(kina.NonContiguousError):
        host.copy(repeated)


def test_a_stride_of_zero_on_one_element_repeats_nothing(host):
    single = host.zeros((1, 3)).broadcast_to(1, 3)[None]
    assert single.strides[0] == 0
    assert single.is_contiguous
    host.add(host.zeros((1, 1, 3)), host.full((1, 1, 3), 2), out=single)
    assert host.to_host(single).tolist() == [[[2, 2, 2]]]


def test_tensors_leave_nothing_behind(host):
    """Thousands come and go: what Python's allocator holds may not grow with them."""

    def churn(count):
        for _ in range(count):
            tensor = host.zeros((2, 2, 2, 2, 2, 2, 2))
            tensor[0].permute(5, 4, 3, 2, 1, 0)
            host.adopt(np.zeros(3))

    churn(100)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        churn(2000)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()
