"""Layouts for exchanges to carry: strategies of Hypothesis, and the same layout as an array of NumPy or PyTorch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

FARTHEST = 1 << 40  # elements: the stride of an axis that nobody walks along


@dataclass(frozen=True)
class Layout:
    """Strides are in elements; `before` of them lie before the first one, in a buffer of `length`."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    before: int
    length: int

    @property
    def steps(self) -> list[int]:
        """The strides that mean anything; all the others may be lost on the way."""
        return [] if 0 in self.shape else [step for step, n in zip(self.strides, self.shape, strict=True) if n > 1]

    @property
    def repeats(self) -> bool:
        return 0 in self.steps

    @property
    def descends(self) -> bool:
        return any(step < 0 for step in self.steps)

    def octets(self, itemsize: int, *, most: int = 250) -> np.ndarray:
        """The buffer: no byte of an element is that of its neighbour."""
        count = np.arange(max(1, self.length) * itemsize)
        return (count * 37 % (most + 1)).astype("u1")

    def numpy(self, base: np.ndarray) -> np.ndarray:
        return np.lib.stride_tricks.as_strided(
            base[self.before :], self.shape, [step * base.itemsize for step in self.strides]
        )

    def torch(self, base: Any) -> Any:
        return sys.modules["torch"].as_strided(base, self.shape, self.strides, self.before)


def steps_of(array: Any) -> list[int]:
    """The strides, in elements, that mean anything, of anybody's array or tensor."""
    shape = tuple(array.shape)
    if hasattr(array, "stride"):
        strides = array.stride()
    elif hasattr(array, "flags"):  # in bytes: NumPy and CuPy
        strides = [step // array.itemsize for step in array.strides]
    else:
        strides = array.strides
    return Layout(shape, tuple(strides), 0, 0).steps


@st.composite
def layouts(draw: Any, *, most_axes: int = 10, lowest: int = -3) -> Layout:
    """Of no axis and of many, empty ones, extents of one; strides in C order, permuted with gaps, of any sign, zero."""
    ndim = draw(st.integers(0, most_axes))
    shape = draw(st.lists(st.integers(1, 4 if ndim <= 4 else 2), min_size=ndim, max_size=ndim))
    if ndim and draw(st.integers(0, 7)) == 0:
        shape[draw(st.integers(0, ndim - 1))] = 0
    kind = draw(st.sampled_from(["C", "permuted", "any"]))
    strides = [0] * ndim
    if kind == "any":
        strides = draw(st.lists(st.integers(lowest, 3), min_size=ndim, max_size=ndim))
    else:
        order = list(range(ndim))[::-1] if kind == "C" else draw(st.permutations(range(ndim)))
        step = 1
        for turn, axis in enumerate(order):
            if kind == "permuted" and turn < 3:
                step *= draw(st.integers(1, 2))  # a gap
            strides[axis] = step * (draw(st.sampled_from([1, 1, -1])) if kind == "permuted" and lowest < 0 else 1)
            step *= max(1, shape[axis])
    for axis in range(ndim):
        if shape[axis] == 1 and draw(st.booleans()):
            strides[axis] = draw(st.sampled_from([0, 7, FARTHEST]))
    reaches = [(n - 1) * step for n, step in zip(shape, strides, strict=True)] if 0 not in shape else []
    low, high = sum(min(0, reach) for reach in reaches), sum(max(0, reach) for reach in reaches)
    before = draw(st.integers(0, 5)) - low
    return Layout(tuple(shape), tuple(strides), before, before + high + 1 + draw(st.integers(0, 3)))
