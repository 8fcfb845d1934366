# Written by tools/stubs.py from allocator.pyx; not edited by hand.

"""What PyTorch calls: memory by its address.

The GIL is taken for the first use of a device, by resources in Python, and to forget what they raised.
"""

from __future__ import annotations

__all__ = ['torch_counts', 'torch_functions']


def torch_functions() -> tuple[int, int]:
    """The addresses of ``kina_torch_record_stream`` and ``kina_torch_empty_cache``, for PyTorch alone to call."""
def torch_counts() -> dict[str, int]:
    """What PyTorch has from kina, by the names of :class:`kina.memory.integrations.TorchStatistics`."""
