"""Kernel signatures: what a function's arguments are, in its author's words."""

import re

cimport cython
from libc.stdlib cimport calloc, free

from kina._core.dtype cimport DType, as_dtype

from kina.errors import ArgumentError, DTypeError

__all__ = ["Signature"]


@cython.no_gc  # nothing it refers to can refer back
cdef class Signature:
    """Signature(text)

    The parameters of a kernel, comma-separated: ``f32[]`` is a tensor the kernel reads, ``mut f32[]`` one it reads and
    writes, ``out f32[]`` one it only writes; ``u32`` is a scalar passed by value, ``bytes[24]`` a struct of 24 bytes,
    ``ptr`` a workspace. Any dtype of kina, long or short name.

    Raises
    ------
    ArgumentError
        A word cannot be read; the message shows it.
    """

    def __cinit__(self, str text not None):
        cdef int i
        cdef DType dtype
        cdef DType uint8 = as_dtype("uint8")
        words = [word.strip() for word in text.split(",")] if text.strip() else []
        self.text = text
        self.words = words
        self.dtypes = []
        self.count = len(words)
        self.parameters = <kina_parameter *> calloc(max(1, self.count), sizeof(kina_parameter))
        if self.parameters == NULL:
            raise MemoryError("no host memory for a signature")
        for i, word in enumerate(words):
            struct = re.fullmatch(r"bytes\s*\[\s*(\d{1,5})\s*\]", word)
            if struct and int(struct[1]) > 0:
                self.dtypes.append(None)
                self.parameters[i].kind = PARAMETER_SCALAR
                self.parameters[i].dtype_id = -1
                self.parameters[i].nbytes = int(struct[1])
                continue
            if word == "ptr":
                self.dtypes.append(None)
                self.parameters[i].kind = PARAMETER_WORKSPACE
                self.parameters[i].writable = True
                self.parameters[i].dtype_id = uint8.id
                self.parameters[i].nbytes = 8
                continue
            found = re.fullmatch(r"((?:mut|out)\s+)?(\w+)\s*(\[\s*\])?", word)
            if not found or (found[1] and not found[3]):
                raise ArgumentError(
                    f"parameter {i} of the signature, {word!r}, is none of 'f32[]', 'mut f32[]', 'out f32[]', 'f32', "
                    "'bytes[24]', 'ptr'", operation="function",
                )
            try:
                dtype = as_dtype(found[2])
            except DTypeError as error:
                raise ArgumentError(
                    f"parameter {i} of the signature, {word!r}: {error}", operation="function"
                ) from None
            self.dtypes.append(dtype)
            self.parameters[i].kind = PARAMETER_TENSOR if found[3] else PARAMETER_SCALAR
            self.parameters[i].writable = found[1] is not None
            self.parameters[i].dtype_id = dtype.id
            self.parameters[i].nbytes = 8 if found[3] else dtype.itemsize
            letter = {"float32": b"f", "float64": b"d"}.get(dtype.name, b"\0")
            if dtype.name.startswith("int"):
                letter = b"i"
            elif dtype.name.startswith("uint"):
                letter = b"u"
            self.parameters[i].letter = letter[0]

    cdef bint fits(self, int i, str declared):
        cdef DType dtype = self.dtypes[i]
        if declared.startswith("b") or "[" in declared:  # only bits, or a struct, which may hold one pointer
            return self.parameters[i].kind == PARAMETER_SCALAR or self.parameters[i].nbytes == 8
        if self.parameters[i].kind != PARAMETER_SCALAR:
            return declared in ("u64", "s64")
        if dtype is None:
            return False
        if dtype.itemsize > 2 and dtype.name.startswith("float"):
            return declared[0] == "f"
        # PTX has no smaller floats of its own, and no complex numbers.
        return declared[0] in "us" or (dtype.itemsize == 2 and declared in ("f16", "bf16"))

    def __dealloc__(self):
        free(self.parameters)

    def __repr__(self) -> str:
        return f"Signature({self.text!r})"
