"""All scenarios: each module registers its own."""

from __future__ import annotations

from driver_sim.oracle.scenarios import (  # noqa: F401
    captures,
    contexts,
    events,
    every_call,
    faults,
    graphs,
    host_functions,
    memory,
    modules,
    peers,
    pools,
    streams,
    virtual_memory,
    waiting,
)
from driver_sim.oracle.script import SCENARIOS

__all__ = ["SCENARIOS"]
