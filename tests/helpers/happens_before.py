"""Which work is done before which: vector clocks of streams, and memory that knows who touched it.

A model of what CUDA promises, for tests that make programs of many streams: with it they make only programs without a
race of their own, and know for what the host waits when it waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Clock", "Memory", "Order", "Stream"]

Clock = dict[Any, int]  # by the key of a stream: how many of its operations


def _both(one: Clock, other: Clock) -> Clock:
    return {key: max(one.get(key, 0), other.get(key, 0)) for key in one.keys() | other.keys()}


def _has_passed(clock: Clock, place: tuple[Any, int]) -> bool:
    stream, number = place
    return clock.get(stream, 0) >= number


@dataclass
class Stream:
    key: Any
    device: int
    legacy: bool = False
    blocking: bool = False  # ordered with the legacy stream of its device
    count: int = 0  # operations enqueued
    clock: Clock = field(default_factory=dict)  # what is done when all of them are


@dataclass(eq=False)
class Memory:
    """Its contents once all work so far is done, and who used it since it was written last."""

    values: np.ndarray
    device: int
    written: tuple[Any, int] | None = None
    read: list[tuple[Any, int]] = field(default_factory=list)

    def readable(self, clock: Clock) -> bool:
        return self.written is None or _has_passed(clock, self.written)

    def writable(self, clock: Clock) -> bool:
        return self.readable(clock) and all(_has_passed(clock, place) for place in self.read)


class Order:
    """Streams, and the one host thread at a time that enqueues on them and waits for them."""

    def __init__(self) -> None:
        self.streams: dict[Any, Stream] = {}
        self.host: Clock = {}  # what it has waited for

    def add(self, key: Any, device: int, *, legacy: bool = False, blocking: bool = False) -> Stream:
        self.streams[key] = Stream(key, device, legacy, blocking)
        return self.streams[key]

    def before(self, stream: Stream) -> Clock:
        """What is done when the next operation of the stream begins."""
        clock = _both(stream.clock, self.host)
        for other in self.streams.values():
            related = (other.legacy and stream.blocking) or (stream.legacy and other.blocking)
            if related and other.device == stream.device:
                clock = _both(clock, other.clock)
        return clock

    def enqueue(self, stream: Stream, *, reads: tuple[Memory, ...] = (), writes: tuple[Memory, ...] = ()) -> None:
        """Work on the stream. That it does not race is asserted: a program that does is a mistake of the test."""
        stream.clock = self.before(stream)
        assert all(memory.readable(stream.clock) for memory in reads)
        assert all(memory.writable(stream.clock) for memory in writes)
        stream.count += 1
        stream.clock[stream.key] = stream.count
        for memory in reads:
            memory.read.append((stream.key, stream.count))
        for memory in writes:
            memory.written = (stream.key, stream.count)
            memory.read.clear()

    def order(self, first: Stream, then: Stream) -> None:
        """An event of the first stream, for which the other waits."""
        self.enqueue(first)
        then.clock = _both(self.before(then), first.clock)
        self.enqueue(then)

    def waits_for(self, clock: Clock) -> set[Any]:
        """The streams with work that is done when all of the clock is, and may not be yet."""
        return {key for key, number in clock.items() if number > self.host.get(key, 0)}

    def host_waits(self, clock: Clock) -> None:
        self.host = _both(self.host, clock)

    def is_done(self, stream: Stream, count: int | None = None) -> bool:
        """Has the host waited for this much of the stream, or for all of it?"""
        return _has_passed(self.host, (stream.key, stream.count if count is None else count))
