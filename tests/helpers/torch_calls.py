"""The allocator that PyTorch is given, called as PyTorch calls it: by its C symbols, without the GIL."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from pathlib import Path
from typing import Any

from helpers.compiler import compile_c

__all__ = ["TorchCalls"]

SOURCE = Path(__file__).parents[1] / "native" / "torch_calls.cpp"


@functools.cache
def _caller() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(compile_c(SOURCE, Path(folder) / "torch_calls.so", "-shared", "-fPIC")))


class TorchCalls:
    """``allocate``, ``free``, ``record_stream`` and ``empty_cache`` of kina, for PyTorch.

    What PyTorch turns into a RuntimeError is one here too; a std::bad_alloc is told apart as MemoryError.
    """

    def __init__(self) -> None:
        from kina.cuda import load_sessions

        load_sessions()
        from kina.cuda import allocator

        self._library = ctypes.CDLL(allocator.__file__)
        self._free = self._library.kina_torch_deallocate
        self._free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._free.restype = None
        self.empty_cache = self._library.kina_torch_empty_cache
        self.empty_cache.restype = None

    def allocate(self, nbytes: int, stream: int = 0, ordinal: int = 0) -> int:
        found = ctypes.c_void_p()
        function = ctypes.cast(self._library.kina_torch_allocate, ctypes.c_void_p)
        number = (ctypes.c_ssize_t(nbytes), ctypes.c_int(ordinal), ctypes.c_void_p(stream))
        self._call("call_allocate", function, ctypes.byref(found), *number)
        return found.value or 0

    def record_stream(self, address: int, stream: int) -> None:
        function = ctypes.cast(self._library.kina_torch_record_stream, ctypes.c_void_p)
        self._call("call_record_stream", function, ctypes.c_void_p(address), ctypes.c_void_p(stream))

    def free(self, address: int, nbytes: int = 0, stream: int = 0, ordinal: int = 0) -> None:
        """PyTorch may name the size and stream of an earlier allocation at the address: they are nonsense here."""
        self._free(address, nbytes, ordinal, stream)

    def _call(self, name: str, *arguments: Any) -> None:
        words = ctypes.create_string_buffer(2048)
        outcome = getattr(_caller(), name)(*arguments, words, ctypes.c_size_t(len(words)))
        if outcome != 0:
            raise (MemoryError if outcome == 1 else RuntimeError)(words.value.decode())
