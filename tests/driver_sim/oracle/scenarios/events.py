"""Events: unrecorded, recorded again, timed, destroyed."""

from __future__ import annotations

from driver_sim.oracle.script import Script, scenario


@scenario("flags of events")
def event_flags(s: Script) -> None:
    s.start()
    for flags in range(17):
        s.cuEventCreate(f"&e{flags}", flags)
    s.cuEventCreate(None, 0)


@scenario("an event that was never recorded")
def event_unrecorded(s: Script) -> None:
    s.start()
    s.cuStreamCreate("&s1", 1)
    s.cuEventCreate("&e", 0)
    s.cuEventCreate("&f", 0)
    s.cuEventQuery("$e")
    s.cuEventSynchronize("$e")
    s.cuStreamWaitEvent("$s1", "$e", 0)
    s.cuStreamSynchronize("$s1")
    s.cuEventElapsedTime("&ms", "$e", "$f")
    s.cuEventRecord("$f", "$s1")
    s.cuEventElapsedTime("&ms", "$e", "$f")
    s.cuEventDestroy("$e")
    s.cuEventDestroy("$f")


@scenario("recording again moves the event; waits keep the place that they were given")
def event_recorded_again(s: Script) -> None:
    s.start()
    s.cuMemHostAlloc("&host", 4096, 1)
    for name in ("s1", "s2", "s3"):
        s.cuStreamCreate(f"&{name}", 1)
    s.cuEventCreate("&e", 2)
    s.cuEventRecord("$e", "$s1")
    s.cuEventSynchronize("$e")
    first = s.gate("$s1")
    s.cuEventRecord("$e", "$s1")
    s.cuEventQuery("$e")
    s.cuStreamWaitEvent("$s3", "$e", 0)
    s.cuStreamWriteValue32("$s3", "$host", 1, 0)
    s.cuEventRecord("$e", "$s2")
    s.cuEventQuery("$e", until_ready=True)
    s.cuStreamQuery("$s3")
    s.read("$host")
    s.open(first)
    s.cuStreamSynchronize("$s3")
    s.read("$host")


@scenario("elapsed time: without timing, pending, reversed, the same event")
def event_elapsed(s: Script) -> None:
    s.start()
    s.cuStreamCreate("&s1", 1)
    for name, flags in (("a", 0), ("b", 0), ("untimed", 2)):
        s.cuEventCreate(f"&{name}", flags)
    s.cuEventRecord("$a", "$s1")
    s.cuEventRecord("$untimed", "$s1")
    word = s.gate("$s1")
    s.cuEventRecord("$b", "$s1")
    s.cuEventElapsedTime("&ms", "$a", "$b")
    s.cuEventElapsedTime("&ms", "$b", "$a")
    s.open(word)
    s.cuStreamSynchronize("$s1")
    s.cuEventElapsedTime("&ms", "$a", "$b")
    s.cuEventElapsedTime("&ms", "$a", "$a")
    s.cuEventElapsedTime("&reversed", "$b", "$a")
    s.cuEventElapsedTime("&ms", "$a", "$untimed")
    s.cuEventElapsedTime("&ms", "$untimed", "$untimed")
    s.cuEventElapsedTime(None, "$a", "$b")


@scenario("destroying an event that is pending: a wait for it keeps its place")
def event_destroy_pending(s: Script) -> None:
    s.start()
    s.cuMemHostAlloc("&host", 4096, 1)
    s.cuStreamCreate("&s1", 1)
    s.cuStreamCreate("&s2", 1)
    s.cuEventCreate("&e", 2)
    word = s.gate("$s1")
    s.cuEventRecord("$e", "$s1")
    s.cuStreamWaitEvent("$s2", "$e", 0)
    s.cuStreamWriteValue32("$s2", "$host", 1, 0)
    s.cuEventDestroy("$e", gate=word)
    s.cuStreamQuery("$s2")
    s.read("$host")
    s.open(word)
    s.cuStreamSynchronize("$s2")
    s.read("$host")


@scenario("flags of records and waits")
def event_record_flags(s: Script) -> None:
    s.start()
    s.cuStreamCreate("&s1", 1)
    s.cuEventCreate("&e", 2)
    for flags in (0, 1, 2):
        s.cuEventRecordWithFlags("$e", "$s1", flags)
        s.cuStreamWaitEvent("$s1", "$e", flags)
    s.cuEventRecord("$e", 0)
    s.cuEventRecord("$e", 2)
    s.cuEventSynchronize("$e")
    s.cuCtxRecordEvent("$ctx0", "$e")
    s.cuEventSynchronize("$e")


USES = [
    ("cuEventQuery", "$dead"),
    ("cuEventSynchronize", "$dead"),
    ("cuEventRecord", "$dead", "$s1"),
    ("cuStreamWaitEvent", "$s1", "$dead", 0),
    ("cuEventDestroy", "$dead"),
    ("cuEventQuery", None),
    ("cuEventSynchronize", None),
    ("cuEventDestroy", None),
    ("cuEventRecord", None, "$s1"),
    ("cuStreamWaitEvent", "$s1", None, 0),
    ("cuEventElapsedTime", "&ms", None, "$e"),
]


@scenario("calls with an event that was destroyed, or is null")
def dead_event_uses(s: Script) -> None:
    for use in USES:
        s.restart(" ".join(map(str, use)))
        s.start()
        s.cuStreamCreate("&s1", 1)
        s.cuEventCreate("&e", 2)
        s.cuEventCreate("&dead", 2)
        s.cuEventDestroy("$dead")
        s.call(*use)


@scenario("two contexts of one device: events and streams of each other")
def event_of_another_context(s: Script) -> None:
    s.start()
    s.cuStreamCreate("&s1", 1)
    s.cuEventCreate("&e", 2)
    s.cuCtxCreate("&c", None, 0, 0)
    s.cuStreamCreate("&s2", 1)
    s.cuEventCreate("&f", 2)
    s.cuEventRecord("$e", "$s1")
    s.cuEventRecord("$e", "$s2")
    s.cuEventRecord("$f", "$s1")
    s.cuEventRecord("$f", "$s2")
    s.cuEventRecord("$e", 0)
    s.cuEventRecord("$f", 0)
    s.cuStreamWaitEvent("$s2", "$e", 0)
    s.cuStreamWaitEvent("$s1", "$f", 0)
    s.cuEventQuery("$e", until_ready=True)
    s.cuEventSynchronize("$e")
    s.cuStreamSynchronize("$s1")
    s.cuStreamQuery("$s2")
