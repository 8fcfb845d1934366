# Written by tools/stubs.py from dtype.pyx; not edited by hand.

"""Dtypes: one object per element type, its spellings, and the bytes of one scalar."""

from __future__ import annotations

from typing import Final, final
import numpy

__all__ = ['DType', 'TypedScalar']

@final
class DType:
    """DType()

    One element type, such as ``kina.float32``. There is exactly one object per type: compare with ``is``
    or ``==``. Calling one makes a typed scalar, ``kina.f32(2)``.

    Attributes
    ----------
    name : str
        Long name, as NumPy and ml_dtypes spell it: ``"float32"``.
    short_name : str
        ``"f32"``.
    itemsize : int
        Bytes of one element.

    Notes
    -----
    Immutable, so safe to share between threads. Copying and unpickling give the same object.
    """
    name: Final[str]
    short_name: Final[str]
    itemsize: Final[int]

    def __new__(cls): ...
    @property
    def numpy(self) -> numpy.dtype:
        """The NumPy dtype of the same elements (ml_dtypes for bfloat16 and fp8); loads NumPy at first use."""
    def __call__(self, value: object) -> TypedScalar:
        """A scalar of this dtype.

        Parameters
        ----------
        value
            An int for integer types, an int or float for floating types, a complex for complex types, a
            bool for ``kina.bool``; NumPy scalars likewise.

        Raises
        ------
        ArgumentError
            A number out of range, or a value of the wrong kind: nothing wraps, nothing is truncated, and nothing
            finite becomes an infinity or NaN.

        Notes
        -----
        Floating values round once, half to even, as IEEE 754 says; infinities and NaN stay what they are. For fp8
        the rules of ml_dtypes hold (formats without infinity make NaN of one).
        """
    def __repr__(self) -> str: ...
    def __str__(self) -> str: ...
    def __reduce__(self): ...

@final
class TypedScalar:
    """TypedScalar()

    One value with its dtype, made by calling a dtype: ``kina.f32(2.0)``. For launches without a signature,
    where a plain number would not say how many bytes it is.

    Attributes
    ----------
    dtype : DType
        The type of the value.
    """
    dtype: Final[DType]

    def __new__(cls): ...
    @property
    def value(self) -> bool | int | float | complex:
        """The value as held, that is after rounding to the dtype, as a Python number."""
    def __bytes__(self) -> bytes:
        """The bytes of the element, little-endian."""
    def __repr__(self) -> str: ...
    def __reduce__(self): ...
