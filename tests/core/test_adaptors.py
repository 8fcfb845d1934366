"""What each adaptor does beyond passing on; that they compose is in test_resources.py."""

from __future__ import annotations

import csv
import errno
import gc
import logging
import os
import re
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
from helpers.processes import run_python
from helpers.resources import PythonResource

import kina
from kina import memory
from kina._core import allocation_log


@pytest.fixture
def bottom() -> PythonResource:
    return PythonResource()


def in_threads(count: int, work) -> None:
    """Run work(0) ... work(count - 1) together; the first failure is raised."""
    failures = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# Limiting -------------------------------------------------------------------------------------------------


def test_the_limit_is_exact(bottom):
    resource = memory.LimitingMemoryResource(bottom, 100)
    assert (resource.limit_bytes, resource.live_bytes, resource.upstream) == (100, 0, bottom)
    first = resource.allocate(60)
    second = resource.allocate(40)
    assert resource.live_bytes == 100
    with pytest.raises(
        kina.OutOfMemoryError, match="1 bytes are beyond the limit: 100 of 100 bytes are live"
    ) as caught:
        resource.allocate(1)
    error = caught.value
    assert (error.requested, error.live, error.limit) == (1, 100, 100)
    assert (error.cached, error.pending, error.largest_free) == (None, None, None)
    assert bottom.asked == 2
    second.free()
    assert resource.live_bytes == 60
    resource.allocate(40).free()
    first.free()
    assert resource.live_bytes == 0
    with pytest.raises(kina.OutOfMemoryError):
        resource.allocate(2**63 - 1)


def test_a_failure_upstream_does_not_count_against_the_limit():
    inner = memory.LimitingMemoryResource(memory.HostMemoryResource(), 10)
    outer = memory.LimitingMemoryResource(inner, 1000)
    with pytest.raises(kina.OutOfMemoryError) as caught:
        outer.allocate(500)
    assert caught.value.limit == 10
    assert outer.live_bytes == 0


@pytest.mark.parametrize(
    ("limit", "error"), [(-1, kina.InvalidShapeError), (2**63, kina.InvalidShapeError), (1.5, kina.ArgumentError)]
)
def test_bad_limits(limit, error):
    with pytest.raises(error):
        memory.LimitingMemoryResource(memory.HostMemoryResource(), limit)


def test_the_limit_holds_with_many_threads():
    """16 places for 32 threads: never more, and everybody gets one in the end."""
    limiting = memory.LimitingMemoryResource(memory.HostMemoryResource(), 16 * 64)
    statistics = memory.StatisticsMemoryResource(limiting)

    def work(_number: int) -> None:
        served = 0
        while served < 200:
            try:
                statistics.allocate(64).free()
            except kina.OutOfMemoryError:
                continue
            served += 1

    in_threads(32, work)
    counts = statistics.counts()
    assert counts.peak_bytes <= 16 * 64
    assert (counts.current_bytes, limiting.live_bytes, counts.total_count) == (0, 0, 32 * 200)


# Statistics -----------------------------------------------------------------------------------------------


def test_counts():
    resource = memory.StatisticsMemoryResource(memory.LimitingMemoryResource(memory.HostMemoryResource(), 1000))
    assert resource.counts() == memory.AllocationCounts()
    first, second = resource.allocate(100), resource.allocate(300)
    first.free()
    with pytest.raises(kina.OutOfMemoryError):
        resource.allocate(900)
    third = resource.allocate(50)
    resource.allocate(0)
    assert resource.counts() == memory.AllocationCounts(
        current_bytes=350, peak_bytes=400, total_bytes=450, current_count=2, peak_count=2, total_count=3, failed_count=1
    )
    del second, third
    assert resource.counts()[:2] == (0, 400)


def test_scopes_nest_and_overlap():
    resource = memory.StatisticsMemoryResource(memory.HostMemoryResource())
    before = resource.allocate(1000)
    outer, other = resource.scope(), resource.scope()
    with outer:
        kept = resource.allocate(10)
        other.__enter__()
        with resource.scope() as inner:
            resource.allocate(200).free()
            assert inner.counts()[:3] == (0, 200, 200)
        resource.allocate(400).free()
        assert inner.counts()[:3] == (0, 200, 200)
        assert outer.counts()[:3] == (10, 410, 610)
        before.free()
        assert outer.counts()[:2] == (-990, 410)
    kept.free()
    other.__exit__(None, None, None)
    other.__exit__(None, None, None)
    assert outer.counts().current_bytes == -990
    assert other.counts()[:4] == (-1010, 400, 600, -2)
    assert resource.counts()[:3] == (0, 1410, 1610)


def test_a_scope_is_used_once():
    resource = memory.StatisticsMemoryResource(memory.HostMemoryResource())
    scope = resource.scope()
    with scope:
        pass
    with pytest.raises(kina.ArgumentError, match="entered before"):
        scope.__enter__()
    with pytest.raises(TypeError):
        memory.StatisticsScope()


def test_an_open_scope_may_be_dropped():
    resource = memory.StatisticsMemoryResource(memory.HostMemoryResource())
    scope = resource.scope()
    scope.__enter__()
    last = resource.scope()
    last.__enter__()
    del scope
    gc.collect()
    resource.allocate(5)
    del resource
    assert last.counts().total_bytes == 5


def test_statistics_of_many_threads():
    resource = memory.StatisticsMemoryResource(memory.HostMemoryResource())

    def work(number: int) -> None:
        for _ in range(50):
            with resource.scope() as scope:
                buffers = [resource.allocate(number + 1) for _ in range(5)]
                assert scope.counts().total_count >= 5
                del buffers

    in_threads(32, work)
    counts = resource.counts()
    assert (counts.current_bytes, counts.current_count) == (0, 0)
    assert (counts.total_count, counts.total_bytes) == (32 * 250, 250 * sum(range(1, 33)))


def test_a_million_cycles_leave_nothing_behind():
    """Through every native adaptor: counts back to zero, and the process no larger."""
    run_python(
        """
        import resource as process, threading
        from kina import memory
        top = memory.TrackingMemoryResource(memory.HostMemoryResource())
        top = memory.StatisticsMemoryResource(memory.LimitingMemoryResource(top, 1 << 30))
        def work(turns):
            allocate = top.allocate
            for turn in range(turns):
                allocate(1 + turn % 4096)
        def run(total):
            threads = [threading.Thread(target=work, args=(total // 8,)) for _ in range(8)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
        def high_water():
            return process.getrusage(process.RUSAGE_SELF).ru_maxrss
        run(40_000)
        before = high_water()
        run(1_000_000)
        counts = top.counts()
        assert (counts.current_bytes, counts.current_count, counts.total_count) == (0, 0, 1_040_000), counts
        assert top.upstream.upstream.outstanding() == []
        grown = (high_water() - before) / 1024
        assert grown < 16, f"{grown} MiB more"
        """,
        timeout=300,
    )


# Tracking -------------------------------------------------------------------------------------------------


def test_what_is_outstanding():
    resource = memory.TrackingMemoryResource(memory.HostMemoryResource())
    buffers = [resource.allocate(nbytes) for nbytes in (10, 3000, 20)]
    buffers.pop(0).free()
    found = resource.outstanding()
    assert [(each.number, each.nbytes, each.stack) for each in found] == [(2, 3000, None), (3, 20, None)]
    assert found[0].age_s >= found[1].age_s >= 0
    assert found[0].thread == found[1].thread > 0
    report = resource.report()
    assert report.startswith("2 allocations outstanding, 3020 bytes\n  #2: 3000 bytes, ")
    assert "wrong frees" not in report
    assert (resource.errors(), resource.error_count) == ([], 0)
    buffers.clear()
    assert resource.outstanding() == []


def test_stacks_say_where():
    resource = memory.TrackingMemoryResource(memory.HostMemoryResource(), stacks=True)

    def from_here():
        return resource.allocate(8)

    line = from_here.__code__.co_firstlineno + 1
    kept = from_here()
    [found] = resource.outstanding()
    assert found.stack.startswith(f"{__file__}:{line} from_here <- {__file__}:")
    assert found.stack.count(" <- ") <= 31
    assert f"from {found.stack}" in resource.report()
    del kept
    with pytest.raises(kina.ArgumentError, match="stacks"):
        memory.TrackingMemoryResource(resource, stacks=1)


def test_a_double_free_is_named_and_frees_nothing(bottom, caplog):
    resource = memory.TrackingMemoryResource(bottom)
    address = resource.unsafe_allocate(48)
    resource.unsafe_deallocate(address, 48)
    assert bottom.live == {}
    reused = bottom.unsafe_allocate(48)
    with caplog.at_level(logging.ERROR, "kina.memory"):
        resource.unsafe_deallocate(address, 48)
        resource.unsafe_deallocate(12345 * 256, 7)
    assert bottom.live == {reused: 48}
    bottom.unsafe_deallocate(reused, 48)
    first, second = resource.errors()
    assert first == f"free of {address:#x} (48 bytes), which is not outstanding: freed twice, or never allocated here"
    assert f"{12345 * 256:#x} (7 bytes)" in second
    assert resource.error_count == 2
    assert [record.getMessage() for record in caplog.records] == [f"TrackingMemoryResource: {first}"]
    assert f"2 wrong frees\n  {first}" in resource.report()


def test_a_wrong_size_is_named_and_made_right(bottom, caplog):
    resource = memory.TrackingMemoryResource(bottom, stacks=True)
    address = resource.unsafe_allocate(48)
    with caplog.at_level(logging.ERROR, "kina.memory"):
        resource.unsafe_deallocate(address, 47)
    assert bottom.live == {}
    [error] = resource.errors()
    assert error.startswith(f"free of {address:#x} as 47 bytes, which was allocated as 48 bytes at {__file__}:")


def test_errors_are_bounded(caplog):
    resource = memory.TrackingMemoryResource(memory.HostMemoryResource())
    with caplog.at_level(logging.ERROR, "kina.memory"):
        for number in range(1, 101):
            resource.unsafe_deallocate(number * 256, 1)
    assert (resource.error_count, len(resource.errors()), len(caplog.records)) == (100, 64, 1)


def test_a_table_of_many(host):
    """Growth and removal in every order; addresses that share places."""
    resource = memory.TrackingMemoryResource(memory.HostMemoryResource())
    buffers = {number: resource.allocate(1 + number % 7) for number in range(5000)}
    for step in (3, 7, 2, 5):
        for number in [number for number in buffers if number % step == 0]:
            buffers.pop(number).free()
        assert [each.number - 1 for each in resource.outstanding()] == sorted(buffers)
    buffers.clear()
    assert (resource.outstanding(), resource.errors()) == ([], [])


def test_tracking_many_threads():
    resource = memory.TrackingMemoryResource(memory.HostMemoryResource(), stacks=True)
    kept = defaultdict(list)

    def work(number: int) -> None:
        for turn in range(100):
            buffer = resource.allocate(turn + 1)
            if turn % 10 == 0:
                kept[number].append(buffer)

    in_threads(16, work)
    found = resource.outstanding()
    assert len(found) == 160
    assert len({each.thread for each in found}) == 16
    kept.clear()
    assert resource.outstanding() == []


# Failure callback -----------------------------------------------------------------------------------------


def test_the_callback_makes_room():
    limiting = memory.LimitingMemoryResource(memory.HostMemoryResource(), 100)
    cache = [limiting.allocate(40), limiting.allocate(40)]
    asked = []

    def drop_one(nbytes):
        asked.append(nbytes)
        if not cache:
            return False
        cache.pop().free()
        return True

    resource = memory.FailureCallbackMemoryResource(limiting, drop_one)
    kept = resource.allocate(90)
    assert (asked, cache) == ([90, 90], [])
    with pytest.raises(kina.OutOfMemoryError) as caught:
        resource.allocate(11)
    assert (asked, caught.value.requested, caught.value.live) == ([90, 90, 11], 11, 90)
    del kept


def test_the_failure_survives_what_the_callback_does():
    limiting = memory.LimitingMemoryResource(memory.HostMemoryResource(), 100)
    other = memory.LimitingMemoryResource(memory.HostMemoryResource(), 5)

    def busy(_nbytes):
        with pytest.raises(kina.OutOfMemoryError):
            other.allocate(6)
        return False

    with pytest.raises(kina.OutOfMemoryError) as caught:
        memory.FailureCallbackMemoryResource(limiting, busy).allocate(200)
    assert (caught.value.limit, caught.value.requested) == (100, 200)


def test_the_callback_sees_memory_errors_of_python_and_no_others():
    asked = []

    def resource_of(error):
        def fail(_nbytes, _stream):
            raise error

        below = memory.CallbackMemoryResource(fail, lambda *_: None)
        return memory.FailureCallbackMemoryResource(below, lambda nbytes: asked.append(nbytes))

    for error, expected in ((MemoryError("full"), [8]), (LookupError("odd"), [])):
        with pytest.raises(type(error)) as caught:
            resource_of(error).allocate(8)
        assert caught.value is error
        assert asked == expected
        asked.clear()


def test_exceptions_of_the_callback_pass_through(host):
    error = LookupError("mine")

    def fail(_nbytes):
        raise error

    limiting = memory.LimitingMemoryResource(memory.HostMemoryResource(), 10)
    resource = memory.StatisticsMemoryResource(memory.FailureCallbackMemoryResource(limiting, fail))
    for attempt in (lambda: resource.allocate(11), lambda: host.zeros(11, memory=resource)):
        with pytest.raises(LookupError) as caught:
            attempt()
        assert caught.value is error
    assert resource.counts().failed_count == 2


def test_the_callback_may_allocate_from_its_own_resource():
    """No lock is held, in whatever it is wrapped."""
    limiting = memory.LimitingMemoryResource(memory.HostMemoryResource(), 100)
    kept = []

    def again(_nbytes):
        kept.append(top.allocate(10))
        assert tracking.report()
        return False

    tracking = memory.TrackingMemoryResource(memory.FailureCallbackMemoryResource(limiting, again))
    top = memory.StatisticsMemoryResource(tracking)
    with pytest.raises(kina.OutOfMemoryError):
        top.allocate(101)
    assert top.counts()[:1] == (10,)
    with pytest.raises(kina.ArgumentError, match="callable"):
        memory.FailureCallbackMemoryResource(limiting, None)


# Logging --------------------------------------------------------------------------------------------------

COLUMNS = ["Thread", "Time", "Action", "Pointer", "Size", "Stream"]


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as lines:
        return list(csv.DictReader(lines))


def test_the_columns(tmp_path):
    path = tmp_path / "log.csv"
    limiting = memory.LimitingMemoryResource(memory.HostMemoryResource(), 100)
    with memory.LoggingMemoryResource(limiting, path) as resource:
        assert (resource.path, resource.records, resource.closed) == (str(path), 0, False)
        buffer = resource.allocate(64)
        address = buffer.unsafe_address()
        with pytest.raises(kina.OutOfMemoryError):
            resource.allocate(65)
        resource.allocate(0)
        buffer.free()
        assert resource.records == 3
    assert resource.closed
    assert path.read_text().splitlines()[0].split(",") == COLUMNS
    rows = rows_of(path)
    assert [(row["Action"], int(row["Pointer"], 16), int(row["Size"]), row["Stream"]) for row in rows] == [
        ("allocate", address, 64, "0x0"),
        ("allocate failure", 0, 65, "0x0"),
        ("free", address, 64, "0x0"),
    ]
    assert len({row["Thread"] for row in rows}) == 1
    now = time.localtime()
    for row in rows:
        assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{6}", row["Time"])
    hours, minutes = map(int, rows[0]["Time"].split(":")[:2])
    assert (now.tm_hour * 60 + now.tm_min - hours * 60 - minutes) % 1440 <= 1


def test_flushing(tmp_path):
    path = tmp_path / "log.csv"
    resource = memory.LoggingMemoryResource(memory.HostMemoryResource(), str(path))
    resource.flush()
    assert rows_of(path) == []
    for count in (1, 10, 1000):
        before = resource.records
        for _ in range(count):
            resource.allocate(8)
        resource.flush()
        assert len(rows_of(path)) == before + 2 * count == resource.records
    resource.close()
    resource.close()
    resource.flush()
    kept = resource.allocate(8)
    kept.free()
    assert len(rows_of(path)) == resource.records == 2022


def test_stacks_are_quoted(tmp_path):
    path = tmp_path / "log.csv"
    with memory.LoggingMemoryResource(memory.HostMemoryResource(), path, stacks=True) as resource:
        make = eval(compile("lambda: resource.allocate(8)", 'a "strange", name', "eval"), {"resource": resource})
        make()
    assert path.read_text().splitlines()[0].split(",") == [*COLUMNS, "Stack"]
    allocated, freed = rows_of(path)
    assert allocated["Stack"].startswith(f'a "strange", name:1 <lambda> <- {__file__}:')
    assert freed["Stack"].startswith(f"{__file__}:")


@pytest.mark.parametrize("ring_records", [2, 16, 65536])
def test_nothing_is_lost_and_each_thread_keeps_its_order(tmp_path, ring_records):
    """Sizes number the turns of a thread, so the file shows what is missing and what is out of order."""
    path = tmp_path / "log.csv"
    resource = memory.LoggingMemoryResource(memory.HostMemoryResource(), path, ring_records=ring_records)

    def work(_number: int) -> None:
        for turn in range(1, 501):
            resource.allocate(turn)

    in_threads(32, work)
    resource.close()
    assert resource.records == 32 * 1000
    by_thread = defaultdict(list)
    for row in rows_of(path):
        by_thread[row["Thread"]].append((row["Action"], int(row["Size"])))
    expected = [(action, turn) for turn in range(1, 501) for action in ("allocate", "free")]
    assert len(by_thread) == 32
    assert all(found == expected for found in by_thread.values())
    if ring_records == 2:
        assert resource.waits > 0


def microseconds(row: dict[str, str]) -> int:
    """Of the day."""
    hours, minutes, seconds = row["Time"].split(":")
    return round(((int(hours) * 60 + int(minutes)) * 60 + float(seconds)) * 1e6)


@pytest.mark.parametrize("source", ["tsc", "hpet", ""])
def test_times_are_those_of_the_clock(tmp_path, monkeypatch, source):
    """Whether producers read the processor's counter or, where the kernel does not trust it, the clock."""
    monkeypatch.setattr(allocation_log, "_clock_source", lambda: source)
    path = tmp_path / "log.csv"
    looks = []
    with memory.LoggingMemoryResource(memory.HostMemoryResource(), path, ring_records=64) as resource:
        # Within a look of the writer, some looks apart, after it fell asleep; and with a ring that is full.
        for pause, count in ((0, 1), (0.003, 50), (0.05, 5), (1.5, 1), (0, 500), (0.001, 20)):
            for _ in range(count):
                time.sleep(pause)
                before = time.time_ns()
                kept = resource.allocate(8)
                looks.append((before, time.time_ns()))
                kept.free()
    allocated = [row for row in rows_of(path) if row["Action"] == "allocate"]
    assert len(allocated) == len(looks)
    for row, (before, after) in zip(allocated, looks, strict=True):
        local = time.localtime(before // 10**9)
        day = ((local.tm_hour * 60 + local.tm_min) * 60 + local.tm_sec) * 10**6 + before % 10**9 // 1000
        late = (microseconds(row) - day + 43_200 * 10**6) % (86_400 * 10**6) - 43_200 * 10**6
        assert -200 <= late <= (after - before) / 1000 + 200


@pytest.mark.parametrize("ring_records", [16, 65536])
def test_times_of_a_thread_do_not_go_back(tmp_path, ring_records):
    path = tmp_path / "log.csv"
    with memory.LoggingMemoryResource(memory.HostMemoryResource(), path, ring_records=ring_records) as resource:
        in_threads(8, lambda _number: [resource.allocate(8) for _ in range(2000)].clear())
    last = {}
    for row in rows_of(path):
        passed = microseconds(row) - last.get(row["Thread"], 0)
        assert passed >= 0 or passed < -43_200 * 10**6  # midnight
        last[row["Thread"]] = microseconds(row)
    assert len(last) == 8


def test_an_address_is_never_out_twice(tmp_path):
    """A free is in the log before the allocation that gets its memory."""
    path = tmp_path / "log.csv"
    resource = memory.LoggingMemoryResource(memory.HostMemoryResource(), path, ring_records=64)
    in_threads(8, lambda _number: [resource.allocate(64) for _ in range(500)].clear())
    resource.close()
    out = set()
    for row in rows_of(path):
        (out.remove if row["Action"] == "free" else add_new(out))(row["Pointer"])
    assert out == set()


def add_new(out: set):
    def add(pointer: str) -> None:
        assert pointer not in out
        out.add(pointer)

    return add


def test_the_writer_comes_with_the_first_record_and_goes_with_the_log(tmp_path):
    run_python(
        f"""
        import os, time
        from kina import memory
        def threads():
            return len(os.listdir("/proc/self/task"))
        def settle(wanted):
            # The kernel lists a thread for a moment after it was joined.
            for _ in range(500):
                if threads() == wanted:
                    break
                time.sleep(0.01)
            assert threads() == wanted
        alone = threads()
        first = memory.LoggingMemoryResource(memory.HostMemoryResource(), {str(tmp_path / "a.csv")!r})
        assert threads() == alone
        first.allocate(8)
        assert threads() == alone + 1
        first.close()
        settle(alone)
        second = memory.LoggingMemoryResource(memory.HostMemoryResource(), {str(tmp_path / "b.csv")!r})
        buffer = second.allocate(8)
        del second
        assert threads() == alone + 1
        del buffer  # the resource goes here, and nobody waits for its writer
        settle(alone)
        """
    )
    for name in ("a.csv", "b.csv"):
        assert [row["Action"] for row in rows_of(tmp_path / name)] == ["allocate", "free"]


def test_a_writer_that_sleeps_wakes_up(tmp_path):
    path = tmp_path / "log.csv"
    resource = memory.LoggingMemoryResource(memory.HostMemoryResource(), path)
    resource.allocate(8)
    time.sleep(1.5)  # longer than it looks for more
    resource.allocate(16)
    for _ in range(500):
        if len(rows_of(path)) == 4:
            break
        time.sleep(0.01)
    assert len(rows_of(path)) == 4
    time.sleep(1.5)
    resource.allocate(32)
    resource.close()
    assert len(rows_of(path)) == 6


def test_a_log_that_cannot_be_written(tmp_path):
    host = memory.HostMemoryResource()
    with pytest.raises(FileNotFoundError):
        memory.LoggingMemoryResource(host, tmp_path / "missing" / "log.csv")
    with pytest.raises(TypeError):
        memory.LoggingMemoryResource(host, 3)
    for records in (0, 1, 3, 2**27):
        with pytest.raises(kina.InvalidConfigError, match="power of two"):
            memory.LoggingMemoryResource(host, tmp_path / "log.csv", ring_records=records)
    with pytest.raises(kina.ArgumentError, match="stacks"):
        memory.LoggingMemoryResource(host, tmp_path / "log.csv", "yes")


def is_open_on(number: str, path: Path) -> bool:
    return os.path.realpath(f"/proc/self/fd/{number}") == str(path)


@pytest.mark.parametrize("ending", ["flush", "close"])
def test_a_full_disk_is_told_and_stops_nobody(ending, tmp_path):
    path = tmp_path / "log.csv"
    resource = memory.LoggingMemoryResource(memory.HostMemoryResource(), path, ring_records=16)
    # The file of the log is replaced by a device that is always full.
    [descriptor] = [int(number) for number in os.listdir("/proc/self/fd") if is_open_on(number, path)]
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, descriptor, inheritable=False)
    os.close(full)
    for _ in range(100):
        resource.allocate(8)
    with pytest.raises(OSError, match="No space left") as caught:
        getattr(resource, ending)()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert resource.allocate(8).nbytes == 8


def test_signals_are_not_for_the_writer(tmp_path):
    run_python(
        f"""
        import os, pathlib, re, signal
        from kina import memory
        before = set(os.listdir("/proc/self/task"))
        resource = memory.LoggingMemoryResource(memory.HostMemoryResource(), {str(tmp_path / "a.csv")!r})
        resource.allocate(8)
        [writer] = set(os.listdir("/proc/self/task")) - before
        status = pathlib.Path(f"/proc/self/task/{{writer}}/status").read_text()
        blocked = int(re.search("SigBlk:\\\\s*([0-9a-f]+)", status)[1], 16)
        assert blocked >> (signal.SIGINT - 1) & 1
        """
    )
