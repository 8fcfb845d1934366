# Written by tools/stubs.py from driver.pyx; not edited by hand.

"""The raw layer: one table of driver functions, filled once, and what every caller of it needs.

Source: CUDA Driver API, "Driver Entry Point Access" (cuGetProcAddress) and "Error Handling".
"""

from __future__ import annotations

__all__ = ['compiled_version', 'driver_path', 'driver_version']

def driver_version() -> str:
    """The CUDA version the loaded driver supports, "13.0" say. Raises UnavailableError without one."""
def driver_path() -> str:
    """The file the driver was loaded from. Raises UnavailableError without one."""
def compiled_version() -> str:
    """The CUDA version of the headers kina was compiled against."""
