"""Logs of allocations: reading them, playing them again, and what a report says of them."""

from __future__ import annotations

import _thread
import bz2
import gzip
import json
import lzma
import re
import signal
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import numpy
import pytest
from helpers.processes import run_python
from helpers.resources import PythonResource
from hypothesis import given
from hypothesis import strategies as st

import kina
from kina import memory
from kina.memory import report
from kina.memory.log_reader import EVENT, EVENT_KINDS, read_log

HEADER = "Thread,Time,Action,Pointer,Size,Stream"


def log_of(path: Path, *lines: str, header: str = HEADER) -> Path:
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def line(action: str, pointer: int, nbytes: int, thread: object = 1, stream: str = "0x0", time: str = "") -> str:
    return f"{thread},{time or '12:00:00.000000'},{action},{pointer:#x},{nbytes},{stream}"


def events_of(trace: memory.AllocationTrace) -> list[tuple[str, int]]:
    return [(EVENT_KINDS[each["action"]], int(each["nbytes"])) for each in numpy.frombuffer(trace, EVENT)]


class Watching(PythonResource):
    """Notes what is asked, and on which thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, int]] = []
        self.before = lambda _count: None  # called with the number of the allocation

    def _allocate(self, nbytes: int, stream: object) -> int:
        self.before(self.asked)
        address = super()._allocate(nbytes, stream)
        self.seen.append(("allocate", nbytes, threading.get_ident()))
        return address

    def _deallocate(self, address: int, nbytes: int, stream: object) -> None:
        super()._deallocate(address, nbytes, stream)
        self.seen.append(("free", nbytes, threading.get_ident()))

    def operations(self) -> list[tuple[str, int]]:
        return [(action, nbytes) for action, nbytes, _ in self.seen]


# Reading --------------------------------------------------------------------------------------------------


def test_rmm_wrote_it_in_several_ways(tmp_path):
    """With and without 0x, C++'s and C's null, both separators before the microseconds, and as its guide has it."""
    log = log_of(
        tmp_path / "log.csv",
        "140573312345856,10:00:00:000001,allocate,7f8a40000000,1024,0",
        "140573312345856,10:00:00.000002,allocate failure,(nil),4096,0x0",
        "140573312345857,10:00:00.5,allocate failure,0x0,8192,0x7f8a38001020",
        "",
        "140573312345856,10:00:01,deallocate,0x7F8A40000000,1024,0x0",
    )
    trace = read_log(log)
    assert events_of(trace) == [("allocate", 1024), ("failure", 4096), ("failure", 8192), ("free", 1024)]
    assert trace.thread_names == ("140573312345856", "140573312345857")
    assert trace.stream_names == ("0", "0x0", "0x7f8a38001020")
    assert (trace.name, trace.was_cut, len(trace)) == (str(log), False, 4)
    seconds = log_of(
        tmp_path / "seconds.csv", "1,1634567890.123456,allocate,0x100,8,0x1", "1,1634567891,free,0x100,8,0x1"
    )
    assert report.summarize(seconds).seconds == pytest.approx(0.876544)


def test_further_columns_are_passed_over(tmp_path):
    """Ours is Stack, in quotes, which hold whatever a file is called."""
    log = log_of(
        tmp_path / "log.csv",
        line("allocate", 256, 8) + ',"a ""strange"", name\nover, two lines:1 f"',
        line("free", 256, 8) + ',""',
        header=HEADER + ",Stack",
    )
    assert events_of(read_log(log)) == [("allocate", 8), ("free", 8)]


def test_line_ends_of_windows(tmp_path):
    log = tmp_path / "log.csv"
    log.write_bytes(f"{HEADER}\r\n{line('allocate', 256, 8)}\r\n{line('free', 256, 8)}\r\n".encode())
    assert events_of(read_log(log)) == [("allocate", 8), ("free", 8)]


BAD_LINES = {
    "1,12:00:00.0,allocate,0x100,8": "fewer columns",
    "junk": "fewer columns",
    "1,12:00:00.0,allocate,0x100,8,0x0,more": "more columns",
    "1,12:00:00.0,fly,0x100,8,0x0": "Action",
    "1,12:00:00.0,allocate,0xg00,8,0x0": "Pointer",
    "1,12:00:00.0,allocate,0x,8,0x0": "Pointer",
    "1,12:00:00.0,allocate,0x12345678123456789,8,0x0": "Pointer",
    "1,12:00:00.0,allocate,0x100,-8,0x0": "Size",
    "1,12:00:00.0,allocate,0x100,9223372036854775808,0x0": "Size",
    "1,12:00:00.0,allocate,0x100,99999999999999999999,0x0": "Size",
    "1,12:00:00.0,allocate,0x100,,0x0": "Size",
    "1,noon,allocate,0x100,8,0x0": "Time",
    "1,12:00:xx.0,allocate,0x100,8,0x0": "Time",
    "1,12:00:00.,allocate,0x100,8,0x0": "Time",
    "1,12:00:00.0y,allocate,0x100,8,0x0": "Time",
    ",12:00:00.0,allocate,0x100,8,0x0": "Thread",
    "1,12:00:00.0,allocate,0x100,8,": "Stream",
    "1,12:00:00.0,allocate,0x100,8," + 48 * "s": "Stream",
    "1,12:00:00.0,allocate,0x0,8,0x0": "address 0",
    "1,12:00:00.0,allocate,0x700,8,0x0": "live already",
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_line_is_named(bad, tmp_path):
    log = log_of(tmp_path / "log.csv", line("allocate", 0x700, 8), bad, line("free", 0x700, 8))
    with pytest.raises(kina.InvalidConfigError, match=rf"log\.csv, line 3: .*{BAD_LINES[bad]}") as caught:
        read_log(log)
    assert caught.value.operation == "read_log"


@pytest.mark.parametrize("text", ["Thread,Time,Action\n", "Thread,Time,Action,Pointer,Size,Streams\n", "1,2\n", "\n"])
def test_another_header_is_refused(text, tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(text)
    with pytest.raises(kina.InvalidConfigError, match=r"line 1: the header is not Thread,Time,"):
        read_log(path)


def test_files_that_are_no_logs(tmp_path):
    (tmp_path / "empty.csv").write_bytes(b"")
    with pytest.raises(kina.InvalidConfigError, match="line 1: there is no header"):
        read_log(tmp_path / "empty.csv")
    (tmp_path / "binary.csv").write_bytes(bytes(range(1, 10)) * (1 << 18))
    with pytest.raises(kina.InvalidConfigError, match="line 1"):
        read_log(tmp_path / "binary.csv")
    (tmp_path / "quote.csv").write_text(f'{HEADER},Stack\n1,12:00:00.0,free,0x1,1,0x0,"' + "x\n" * (1 << 20))
    with pytest.raises(kina.InvalidConfigError, match="line 2: it is longer than 1048576 bytes"):
        read_log(tmp_path / "quote.csv")
    with pytest.raises(FileNotFoundError):
        read_log(tmp_path / "missing.csv")
    for path in (3, b"log.csv", None):
        with pytest.raises(kina.ArgumentError, match="a path is needed"):
            read_log(path)


def test_what_changes_nothing(tmp_path):
    """A log that begins in the middle of a program, failures, and 0 bytes."""
    log = log_of(
        tmp_path / "log.csv",
        line("free", 0x900, 64),
        line("allocate", 0x100, 8),
        line("allocate failure", 0, 1 << 40),
        line("allocate", 0, 0),
        line("free", 0, 0),
        line("free", 0, 16),
        line("free", 0x100, 8),
        line("free", 0x100, 8),
    )
    trace = read_log(log)
    assert [kind for kind, _ in events_of(trace)] == [
        *("unknown free", "allocate", "failure", "empty", "empty", "unknown free", "free", "unknown free"),
    ]
    resource = Watching()
    found = memory.replay(trace, resource)
    assert resource.operations() == [("allocate", 8), ("free", 8)]
    assert (found.allocations, found.deallocations, found.operations, found.skipped) == (1, 1, 2, 6)


def test_an_address_is_used_again(tmp_path):
    log = log_of(
        tmp_path / "log.csv", *[line(*each) for n in range(1, 9) for each in (("allocate", 64, n), ("free", 64, n))]
    )
    resource = Watching()
    assert memory.replay(log, resource).peak_live_bytes == 8
    assert resource.operations() == [each for n in range(1, 9) for each in (("allocate", n), ("free", n))]


def test_a_free_of_another_size_gives_back_what_was_allocated(tmp_path):
    trace = read_log(log_of(tmp_path / "log.csv", line("allocate", 64, 100), line("free", 64, 99)))
    assert (trace.wrong_size_count, trace.live_at_end_bytes) == (1, 0)
    resource = Watching()
    memory.replay(trace, resource)
    assert resource.operations() == [("allocate", 100), ("free", 100)]


def sample(count: int) -> list[str]:
    return [line("allocate", 256 * (number + 1), number + 1) for number in range(count)]


@pytest.mark.parametrize("kept", [1, 20, 40])
def test_a_file_that_ends_within_a_line(kept, tmp_path):
    """However much of the line is there: its last column may lack digits."""
    last = line("allocate", 0x990000, 77)
    path = log_of(tmp_path / "log.csv", *sample(3))
    path.write_text(path.read_text() + last[:kept])
    trace = read_log(path)
    assert trace.was_cut
    assert events_of(trace) == [("allocate", 1), ("allocate", 2), ("allocate", 3)]
    assert "which ends within a line" in str(report.summarize(trace))


def small_blocks(data: bytes) -> bytes:
    return bz2.compress(data, 1)


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", small_blocks), (".XZ", lzma.compress)])
def test_compressed_files(suffix, pack, tmp_path):
    text = "\n".join([HEADER, *sample(30_000)]) + "\n"
    path = tmp_path / f"log.csv{suffix}"
    path.write_bytes(pack(text.encode()))
    trace = read_log(path)
    assert (len(trace), trace.was_cut) == (30_000, False)
    packed = path.read_bytes()
    path.write_bytes(packed[: len(packed) // 2])
    cut = read_log(path)
    assert cut.was_cut
    assert events_of(cut) == events_of(trace)[: len(cut)]
    assert len(cut) > 1000
    path.write_bytes(b"Thread,Time" + packed)
    with pytest.raises((OSError, kina.InvalidConfigError), match=r"(?i)not a gzip|invalid data|damaged"):
        read_log(path)


def test_zstandard_needs_a_newer_python(tmp_path):
    path = tmp_path / "log.csv.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd")
    expected = kina.UnsupportedError if sys.version_info < (3, 14) else kina.InvalidConfigError
    with pytest.raises(expected, match=re.escape(str(path))):
        read_log(path)


def test_midnight(tmp_path):
    """Of two threads, one a little behind."""
    times = ["23:59:59.000000", "23:59:59.500000", "00:00:00.250000", "23:59:59.750000", "00:00:01", "00:00:00.9"]
    log = log_of(tmp_path / "log.csv", *[line("allocate", 256 + n, 8, time=time) for n, time in enumerate(times)])
    micros = numpy.frombuffer(read_log(log), EVENT)["time_us"] - 86_400_000_000
    assert micros.tolist() == [-1_000_000, -500_000, 250_000, -250_000, 1_000_000, 900_000]


PLAIN = "\n".join([HEADER + ",Stack", *[f'{line("allocate", 256 * n, n)},""' for n in range(1, 9)]]).encode() + b"\n"
EDIT = st.tuples(st.integers(0, len(PLAIN)), st.integers(0, 3), st.binary(max_size=3))


@given(st.lists(EDIT, min_size=1, max_size=4))
def test_damage_is_told_or_read(edits):
    """Whatever a file holds, it is read, or an error names a line that it has."""
    data = PLAIN
    for place, removed, put in edits:
        data = data[:place] + put + data[place + removed :]
    trace = memory.AllocationTrace("damaged")
    try:
        trace.feed(data)
        trace.finish()
    except kina.InvalidConfigError as error:
        found = re.match(r"damaged, line (\d+): ", str(error))
        assert 1 <= int(found[1]) <= data.count(b"\n") + 1
    else:
        assert len(trace) <= data.count(b"\n")
        assert trace.live_at_end_count <= len(trace)


def test_a_trace_is_fed_in_pieces_of_any_length():
    text = "\n".join([HEADER + ",Stack", *[f'{each},"a\n""b"""' for each in sample(20)]]).encode() + b"\n"
    for length in (1, 2, 3, 7, 64, 10_000):
        trace = memory.AllocationTrace("pieces")
        for start in range(0, len(text), length):
            trace.feed(text[start : start + length])
        with pytest.raises(BufferError, match="not read to its end"):
            memoryview(trace)
        trace.finish()
        assert events_of(trace) == [("allocate", number) for number in range(1, 21)]
        with pytest.raises(kina.SessionClosedError):
            trace.feed(b"")
    with pytest.raises(kina.ArgumentError, match="bytes are needed"):
        memory.AllocationTrace().feed("text")
    with pytest.raises(kina.ArgumentError, match="source"):
        memory.AllocationTrace(3)


# Playing --------------------------------------------------------------------------------------------------


def test_a_single_thread_is_the_calling_one(tmp_path):
    log = log_of(tmp_path / "log.csv", line("allocate", 64, 8), line("allocate", 128, 9), line("free", 64, 8))
    resource = Watching()
    found = memory.replay(str(log), resource)
    assert resource.operations() == [("allocate", 8), ("allocate", 9), ("free", 8), ("free", 9)]
    assert {thread for _, _, thread in resource.seen} == {threading.get_ident()}
    assert (found.left_count, found.left_bytes, found.peak_live_bytes, found.threads) == (1, 9, 17, 1)
    assert resource.live == {}


# An operation: a new allocation of so many bytes, or a free of one of those that are live; and on which thread.
OPERATIONS = st.lists(
    st.tuples(st.booleans(), st.integers(1, 5000), st.integers(0, 1000), st.integers(1, 5)), min_size=1, max_size=60
)


@given(OPERATIONS)
def test_a_resource_sees_what_the_log_says(tmp_path_factory, operations):
    """In its order, each event on the thread that stands for its own, and nothing is left."""
    path = tmp_path_factory.mktemp("logs") / "log.csv"
    live: dict[int, int] = {}
    lines, expected = [], []
    now = peak = 0
    for allocate, nbytes, which, thread in operations:
        if allocate or not live:
            address = min(set(range(256, 256 * 100, 256)) - set(live))
            live[address] = nbytes
            lines.append(line("allocate", address, nbytes, thread))
            expected.append(("allocate", nbytes, thread))
            now += nbytes
            peak = max(peak, now)
        else:
            address = sorted(live)[which % len(live)]
            nbytes = live.pop(address)
            lines.append(line("free", address, nbytes, thread))
            expected.append(("free", nbytes, thread))
            now -= nbytes
    outstanding = sorted(live.values())
    resource = Watching()
    statistics = memory.StatisticsMemoryResource(resource)
    found = memory.replay(log_of(path, *lines), statistics, upstream_statistics=statistics)
    done = len(expected)
    assert [each[:2] for each in resource.seen[:done]] == [each[:2] for each in expected]
    assert sorted(nbytes for _, nbytes, _ in resource.seen[done:]) == outstanding
    pairs = {(logged, real) for (_, _, logged), (_, _, real) in zip(expected, resource.seen, strict=False)}
    used = {logged for _, _, logged in expected}
    assert len(pairs) == len(used)
    if len(used) == 1:
        assert {real for _, real in pairs} == {threading.get_ident()}
    else:
        assert threading.get_ident() not in {real for _, real in pairs}
    assert (found.peak_live_bytes, found.peak_reserved_bytes, found.fragmentation) == (peak, peak, 0)
    assert (found.left_count, found.left_bytes) == (len(outstanding), sum(outstanding))
    assert resource.live == {}
    trace = read_log(path)
    assert (trace.live_at_end_count, trace.live_at_end_bytes) == (len(outstanding), sum(outstanding))
    assert sorted(events_of(trace)[number][1] for number in trace.outstanding()) == outstanding


def work_of_threads(resource: memory.MemoryResource, count: int, turns: int) -> None:
    """Each frees what another allocated."""
    queues = [SimpleQueue() for _ in range(count)]

    def work(number: int) -> None:
        for turn in range(turns):
            queues[(number + 1) % count].put(resource.allocate(1 + turn % 3000))
            queues[number].get().free()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_our_own_log_again(tmp_path):
    """What a log of many threads says, logged again while it is played, is the same log but for its addresses."""
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    with memory.LoggingMemoryResource(memory.HostMemoryResource(), first, stacks=True) as resource:
        work_of_threads(resource, 8, 500)
    trace = read_log(first)
    assert (len(trace), len(trace.thread_names), trace.live_at_end_count) == (8000, 8, 0)
    tracking = memory.TrackingMemoryResource(memory.HostMemoryResource())
    with memory.LoggingMemoryResource(tracking, second) as resource:
        found = memory.replay(trace, resource)
    assert (tracking.errors(), tracking.outstanding()) == ([], [])
    again = read_log(second)
    assert events_of(again) == events_of(trace)
    threads = [numpy.frombuffer(each, EVENT)["thread"].tolist() for each in (trace, again)]
    assert threads[0] == threads[1]
    assert (found.threads, found.operations, found.peak_live_bytes) == (8, 8000, again.peak_live_bytes)


def test_many_threads_that_come_and_go(tmp_path):
    """Each begins when its first event comes: there never are more than a few."""
    lines = [each for n in range(1, 301) for each in (line("allocate", 256 * n, n, n), line("free", 256 * n, n, n))]
    resource = Watching()
    most = []
    resource.before = lambda _count: most.append(threading.active_count())
    assert memory.replay(log_of(tmp_path / "log.csv", *lines), resource).threads == 300
    assert resource.operations() == [each for n in range(1, 301) for each in (("allocate", n), ("free", n))]
    assert max(most) < 50


def test_a_thread_that_has_nothing_to_do(tmp_path):
    log = log_of(
        tmp_path / "log.csv",
        line("free", 9, 9, 1),
        line("allocate", 64, 8, 2),
        line("free", 64, 8, 2),
        line("free", 9, 9, 3),
    )
    resource = Watching()
    assert memory.replay(log, resource).skipped == 2
    assert resource.operations() == [("allocate", 8), ("free", 8)]


@pytest.mark.parametrize("lines", [[], [line("free", 9, 9)], [line("free", 9, 9, 1), line("free", 9, 9, 2)]])
def test_a_log_without_anything_to_do(lines, tmp_path):
    found = memory.replay(log_of(tmp_path / "log.csv", *lines), memory.HostMemoryResource())
    assert (found.operations, found.operation_ns, found.peak_live_bytes) == (0, 0, 0)
    assert str(found)


@pytest.mark.parametrize("threads", [1, 4])
def test_an_exception_gives_back_what_is_live(threads, tmp_path):
    lines = [line("allocate", 256 * (n + 1), n + 1, n % threads) for n in range(100)]
    log = log_of(tmp_path / "log.csv", *lines)
    error = LookupError("mine")

    def fail(count: int) -> None:
        if count == 60:
            raise error

    resource = Watching()
    resource.before = fail
    with pytest.raises(LookupError) as caught:
        memory.replay(log, resource)
    assert caught.value is error
    assert error.__notes__ == [f"replay: {log}, line 62, allocates 61 bytes"]
    assert resource.live == {}
    assert resource.asked == 60
    limited = memory.StatisticsMemoryResource(memory.LimitingMemoryResource(memory.HostMemoryResource(), 1000))
    with pytest.raises(kina.OutOfMemoryError, match="beyond the limit") as caught:
        memory.replay(log, limited)
    assert (caught.value.limit, caught.value.__notes__) == (1000, [f"replay: {log}, line 46, allocates 45 bytes"])
    assert limited.counts().current_bytes == 0
    assert limited.counts().total_count == 44
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kina replay")]


@pytest.fixture
def interruptible():
    """A process that was started in the background has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_interrupt_gives_back_what_is_live(threads, tmp_path, interruptible):
    lines = [line("allocate", 256 * (n + 1), 8, n % threads) for n in range(50_000)]
    log = log_of(tmp_path / "log.csv", *lines)
    resource = Watching()
    resource.before = lambda count: _thread.interrupt_main() if count == 10 else None
    with pytest.raises(KeyboardInterrupt):
        memory.replay(log, resource)
    assert resource.live == {}
    assert resource.asked < 50_000
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kina replay")]


def test_bad_arguments(tmp_path):
    log = log_of(tmp_path / "log.csv", *sample(1))
    host = memory.HostMemoryResource()
    with pytest.raises(kina.ArgumentError, match="a MemoryResource is needed, not int"):
        memory.replay(log, 3)
    with pytest.raises(kina.ArgumentError, match="a path is needed, not int"):
        memory.replay(3, host)
    with pytest.raises(kina.ArgumentError, match="the StatisticsMemoryResource below the pool, not HostMemoryResource"):
        memory.replay(log, host, upstream_statistics=host)
    with pytest.raises(kina.ArgumentError, match="read to its end"):
        memory.replay(memory.AllocationTrace(), host)


class Doubling(memory.MemoryResource):
    """As a pool does it: gets more than it gives, and keeps it."""

    def __init__(self, upstream: memory.MemoryResource) -> None:
        super().__init__(upstream=upstream)
        self.given = 0
        self.kept: dict[int, list[int]] = {}

    def _allocate(self, nbytes: int, stream: object) -> int:
        kept = self.kept.setdefault(nbytes, [])
        if kept:
            return kept.pop()
        self.given += 2 * nbytes
        return self.upstream.unsafe_allocate(2 * nbytes)

    def _deallocate(self, address: int, nbytes: int, stream: object) -> None:
        self.kept[nbytes].append(address)

    def trim(self) -> None:
        for nbytes, addresses in self.kept.items():
            for address in addresses:
                self.upstream.unsafe_deallocate(address, 2 * nbytes)
        self.kept.clear()


def rising_and_falling() -> list[str]:
    up = [line("allocate", 256 * n, n) for n in range(1, 101)]
    return up + [line("free", 256 * n, n) for n in range(1, 101)]


def test_reserved_bytes_of_the_statistics_below(tmp_path):
    below = memory.StatisticsMemoryResource(memory.HostMemoryResource())
    pool = Doubling(below)
    warm = pool.allocate(7)
    found = memory.replay(log_of(tmp_path / "log.csv", *rising_and_falling()), pool, upstream_statistics=below)
    assert (found.peak_live_bytes, found.peak_reserved_bytes) == (5050, 10100 + 14)
    assert found.fragmentation == pytest.approx(1 - 5050 / 10114)
    assert found.reserved_source == "upstream_statistics"
    warm.free()
    pool.trim()
    assert below.counts().current_bytes == 0


@pytest.mark.parametrize(("before", "expected"), [(None, 10_100), (10_500, 10_100), (0, 10_400)])
def test_reserved_bytes_of_a_pool_that_tells(before, expected, tmp_path):
    """Its own peak, which may have been short, unless that is of another time."""

    class Pool(Doubling):
        def stats(self) -> SimpleNamespace:
            peak = {} if before is None else {"peak_reserved_bytes": max(before, self.given and 10_400)}
            return SimpleNamespace(reserved_bytes=self.given, **peak)

    pool = Pool(memory.HostMemoryResource())
    top = memory.StatisticsMemoryResource(memory.LimitingMemoryResource(pool, 1 << 20))
    found = memory.replay(log_of(tmp_path / "log.csv", *rising_and_falling()), top)
    assert (found.peak_reserved_bytes, found.reserved_source) == (expected, "Pool.stats()")
    pool.trim()


def test_our_pool_tells(tmp_path):
    pool = memory.PoolMemoryResource(memory.HostMemoryResource())
    log = log_of(tmp_path / "log.csv", *rising_and_falling())
    found = memory.replay(log, memory.StatisticsMemoryResource(pool))
    assert found.peak_reserved_bytes == pool.stats().peak_reserved_bytes >= found.peak_live_bytes
    assert found.reserved_source == "PoolMemoryResource.stats()"
    assert pool.stats().live_bytes == 0


def test_reserved_bytes_are_looked_at_when_most_is_live(tmp_path):
    """A pool that gives everything back again has most right then."""

    class Giving(PythonResource):
        def stats(self) -> SimpleNamespace:
            return SimpleNamespace(reserved_bytes=sum(self.live.values()))

    found = memory.replay(log_of(tmp_path / "log.csv", *rising_and_falling()), Giving())
    assert found.peak_reserved_bytes == found.peak_live_bytes == 5050


def test_a_report_for_people_and_programs(tmp_path):
    log = log_of(tmp_path / "log.csv", *(50 * rising_and_falling()), line("allocate", 64, 3))
    host = memory.HostMemoryResource()
    found = memory.replay(log, memory.StatisticsMemoryResource(host))
    assert found.operations == 10_001
    assert found.seconds > 0
    assert min(found.allocate_ns, found.deallocate_ns, found.operation_ns) >= 0
    assert min(found.allocate_overhead_ns, found.deallocate_overhead_ns) > 0
    total = found.allocations * found.allocate_ns + found.deallocations * found.deallocate_ns
    assert total == pytest.approx(found.operations * found.operation_ns)
    assert total / 1e9 < found.seconds
    rows = dict(re.split(r"\s{2,}", row, maxsplit=1) for row in str(found).splitlines())
    assert list(rows) == [
        *("log", "resource", "threads, streams", "operations", "allocate", "deallocate", "both", "the loop itself"),
        *("peak live", "peak reserved", "fragmentation", "never freed"),
    ]
    assert rows["threads, streams"] == "1, 1"
    assert rows["never freed"] == "1 allocations, 3 bytes; given back at the end"
    assert rows["peak reserved"].startswith("not known")
    told = json.loads(json.dumps(found.as_dict()))
    assert (told["operations"], told["fragmentation"], told["left_bytes"]) == (10_001, None, 3)


@pytest.mark.cuda
@pytest.mark.parametrize("threads", [1, 3])
def test_each_stream_of_the_log_is_one_of_its_own(threads, tmp_path):
    """Allocations and frees are ordered on the streams that the log names for them; so is what was left."""

    class Streams(memory.MemoryResource):
        def __init__(self) -> None:
            super().__init__(supports_streams=True, upstream=memory.CudaAsyncMemoryResource(0))
            self.seen: list[tuple[str, int, int]] = []

        def _allocate(self, nbytes: int, stream: object) -> int:
            self.seen.append(("allocate", nbytes, stream.__cuda_stream__()[1]))
            return self.upstream.unsafe_allocate(nbytes, stream)

        def _deallocate(self, address: int, nbytes: int, stream: object) -> None:
            self.seen.append(("free", nbytes, stream.__cuda_stream__()[1]))
            self.upstream.unsafe_deallocate(address, nbytes, stream)

    names = ["0x0", "0x1", "0x7f8a38001020"]
    events = [("allocate", n + 1, names[n % 3]) for n in range(30)]
    events += [("free", n + 1, names[n % 2]) for n in range(27)]
    lines = [line(action, 256 * n, n, n % threads, stream) for action, n, stream in events]
    log = log_of(tmp_path / "log.csv", *lines)
    resource = Streams()
    assert memory.replay(log, resource).streams == 3
    assert [each[:2] for each in resource.seen[: len(events)]] == [each[:2] for each in events]
    events += [("free", n + 1, names[n % 3]) for n in range(27, 30)]
    assert sorted(each[:2] for each in resource.seen[57:]) == sorted(each[:2] for each in events[57:])
    last = {each[:2]: each for each in resource.seen[57:]}
    pairs = {(stream, real) for (_, _, stream), (_, _, real) in zip(events[:57], resource.seen, strict=False)}
    pairs |= {(stream, last[action, n][2]) for action, n, stream in events[57:]}
    assert len(pairs) == len({real for _, real in pairs}) == 3
    assert 0 not in {real for _, real in pairs}


@pytest.mark.cuda
@pytest.mark.parametrize(
    "kind", ["CudaMemoryResource", "CudaAsyncMemoryResource", "ManagedMemoryResource", "PinnedMemoryResource"]
)
@pytest.mark.parametrize("pooled", [False, True])
def test_cuda_resources(kind, pooled, tmp_path):
    lines = [
        line(action, 256 * n, 1000 * n, n % 4, f"0x{n % 5}") for action in ("allocate", "free") for n in range(1, 200)
    ]
    log = log_of(tmp_path / "log.csv", *lines, line("allocate", 256, 12345))
    below = memory.TrackingMemoryResource(getattr(memory, kind)(0))
    resource = memory.PoolMemoryResource(below) if pooled else below
    found = memory.replay(log, memory.StatisticsMemoryResource(resource))
    assert (found.operations, found.left_bytes, found.peak_live_bytes) == (399, 12345, 1000 * 199 * 100)
    if pooled:
        assert found.peak_reserved_bytes >= found.peak_live_bytes
        assert resource.stats().live_bytes == 0
    else:
        assert below.outstanding() == []
    assert below.errors() == []


def test_importing_memory_loads_none_of_it():
    run_python(
        """
        import sys
        before = set(sys.modules)
        import kina.memory
        heavy = {"numpy", "csv", "matplotlib", "gzip", "kina._core.replaying", "kina._core.allocation_trace"}
        assert not heavy & (set(sys.modules) - before), heavy & set(sys.modules)
        assert kina.memory.replay.__module__ == "kina.memory.log_replay"
        import kina.memory.log_replay
        assert callable(kina.memory.replay)
        assert {"replay", "ReplayReport", "read_log", "AllocationTrace"} <= set(dir(kina.memory))
        """
    )


# Reports --------------------------------------------------------------------------------------------------


def clock(micros: int) -> str:
    return f"10:{micros // 60_000_000:02}:{micros // 1_000_000 % 60:02}.{micros % 1_000_000:06}"


def test_the_figures_of_a_log(tmp_path):
    log = log_of(
        tmp_path / "log.csv",
        line("allocate", 0x100, 1000, 1, "0x0", clock(0)),
        line("allocate", 0x200, 1024, 2, "0x1", clock(500_000)),
        line("allocate failure", 0, 1 << 40, 2, "0x1", clock(600_000)),
        line("free", 0x100, 1000, 1, "0x0", clock(1_000_000)),
        line("allocate", 0x300, 3, 1, "0x0", clock(1_500_000)),
        line("allocate", 0x400, 3, 1, "0x0", clock(1_500_001)),
        line("allocate", 0, 0, 1, "0x0", clock(1_500_002)),
        line("free", 0x999, 1, 1, "0x0", clock(2_000_000)),
    )
    below = log_of(tmp_path / "below.csv", line("allocate", 0x100, 4096, time=clock(0)))
    found = report.summarize(log, reserved_from=below)
    assert found.events == {"allocate": 4, "free": 1, "failure": 1, "unknown free": 1, "empty": 1}
    assert (found.threads, found.streams, found.seconds, found.total_bytes) == (2, 2, 2.0, 2030)
    assert (found.peak_live_bytes, found.peak_live_line, found.peak_live_s) == (2024, 3, 0.5)
    assert (found.peak_reserved_bytes, found.fragmentation) == (4096, 1 - 2024 / 4096)
    assert (found.never_freed_count, found.never_freed_bytes) == (3, 1030)
    assert found.never_freed == [(1024, 1, 3), (3, 2, 6)]
    assert found.largest == [(1024, 3), (1000, 2), (3, 6), (3, 7)]
    assert found.sizes == [(2, 3, 2, 6), (512, 1023, 1, 1000), (1024, 2047, 1, 1024)]
    text = str(found)
    assert "4 allocations of 2,030 bytes (1.982 KiB), 1 frees, 1 failures" in text
    assert (
        "Never freed: 3 allocations, 1,030 bytes (1.006 KiB)\n  1 x 1,024 bytes (1 KiB), the first in line 3\n" in text
    )
    assert "  2 x 3 bytes, the first in line 6" in text
    assert "peak reserved  4,096 bytes" in text
    assert "reserved" not in str(report.summarize(log))


def test_sizes_at_powers_of_two(tmp_path):
    """Beyond 2**53 a logarithm of doubles is wrong."""
    sizes = [1, 2, 3, 4, (1 << 54) - 1, 1 << 54, (1 << 62) - 1, 1 << 62, (1 << 63) - 1]
    lines = [each for n in sizes for each in (line("allocate", 64, n), line("free", 64, n))]
    found = report.summarize(log_of(tmp_path / "log.csv", *lines))
    for least, most, count, nbytes in found.sizes:
        inside = [size for size in sizes if least <= size <= most]
        assert (len(inside), sum(inside) % 2**64) == (count, nbytes)
    assert sum(count for _, _, count, _ in found.sizes) == len(sizes)
    assert found.largest[0] == ((1 << 63) - 1, 18)


def test_only_the_largest_are_shown(tmp_path):
    lines = [line("allocate", 256 * n, n) for n in range(1, 1001)]
    found = report.summarize(log_of(tmp_path / "log.csv", *lines))
    assert found.largest == [(n, n + 1) for n in range(1000, 990, -1)]
    assert len(found.never_freed) == 1000
    assert "  and 990 more sizes" in str(found)


def test_no_peak_is_lost_in_the_drawing(tmp_path):
    """One moment of one event among many; the curve has as many points as asked for."""
    pairs = [each for n in range(20_000) for each in (("allocate", 64, 10), ("free", 64, 10))]
    pairs[2 * 7_777 : 2 * 7_777] = [("allocate", 128, 1_000_000), ("free", 128, 1_000_000)]
    lines = [line(*each, time=clock(n)) for n, each in enumerate(pairs)]
    trace = read_log(log_of(tmp_path / "log.csv", *lines))
    seconds, least, most = report.envelope(trace, 10 * 3600 * 1_000_000, 100)
    assert len(seconds) == len(least) == len(most) == 100
    assert most.max() == 1_000_000
    assert seconds[most.argmax()] == pytest.approx(2 * 7_777 / 1e6, abs=0.0005)
    assert sorted(most.tolist())[-2] == 10
    assert least.max() == 0
    exact = report.envelope(trace, 0, 10**6)
    assert len(exact[0]) == len(trace)


@pytest.mark.parametrize("lines", [rising_and_falling(), sample(1), [], [line("free", 9, 9)]])
def test_pictures(lines, tmp_path):
    log = log_of(tmp_path / "log <1> $x_.csv", *lines)
    report.draw(log, tmp_path / "live.PNG")
    report.draw(log, tmp_path / "both.png", reserved_from=log_of(tmp_path / "below.csv", *sample(300)))
    pictures = [(tmp_path / name).read_bytes() for name in ("live.PNG", "both.png")]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert pictures[0] != pictures[1]
    report.draw(str(log), str(tmp_path / "live.html"), reserved_from=log)
    page = (tmp_path / "live.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert page.count("<svg") == page.count("</svg>") == 1
    assert "log &lt;1&gt; $x_.csv" in page
    assert "Largest allocations" in page
    assert not re.search(r"""(src|href)=["'](?!#)|<script|@import|url\((?!#)""", page)


def test_what_cannot_be_drawn(tmp_path, monkeypatch):
    log = log_of(tmp_path / "log.csv", *sample(3))
    with pytest.raises(kina.InvalidConfigError, match=r"picture\.jpeg: a name in \.png or \.html is needed"):
        report.draw(log, tmp_path / "picture.jpeg")
    with pytest.raises(FileNotFoundError):
        report.draw(log, tmp_path / "missing" / "picture.png")
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(kina.UnavailableError, match=r"pip install 'kina\[report\]'"):
        report.draw(log, tmp_path / "picture.png")
    assert not (tmp_path / "picture.png").exists()
