"""What a Runtime counts."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Counters"]


class Counters(NamedTuple):
    """Totals of one Runtime since it was made; ``pending``, ``live_bytes`` and ``reserved_bytes`` are of this moment.

    Every wait of the host on the device is in ``host_waits``, and every driver call that may be one (loading a module,
    pinning a staging block, freeing where pools are unsupported); ``synchronizations`` are those asked for by name.
    A module that is evicted while something holds it (a lease, a function, a graph) counts in ``unloads_deferred``. Of
    the leases ``retired``, those in ``reaped`` were found by the thread that looks after the memory of other libraries.
    """

    launches: int = 0
    graph_launches: int = 0
    events_recorded: int = 0
    event_queries: int = 0
    seals: int = 0
    leases: int = 0
    pending: int = 0
    retired: int = 0
    reaped: int = 0
    leaked: int = 0
    synchronizations: int = 0
    host_waits: int = 0
    allocations: int = 0
    frees: int = 0
    live_bytes: int = 0
    reserved_bytes: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    modules_loaded: int = 0
    modules_evicted: int = 0
    unloads_deferred: int = 0
