"""Graphs: launches and their order, memory nodes, user objects."""

from __future__ import annotations

from driver_sim.oracle.scenarios.calls import prepare
from driver_sim.oracle.script import Script, scenario

RELAXED = 2


def captured_fill(s: Script, value: float = 4.0) -> None:
    s.cuStreamBeginCapture("$s1", RELAXED)
    s.fill("$s1", "$a", value)
    s.cuStreamEndCapture("$s1", "&graph")


@scenario("instantiate, launch, destroy; null handles")
def graph_life(s: Script) -> None:
    prepare(s)
    captured_fill(s)
    s.cuGraphGetNodes("$graph", None, [0, "&count"])
    s.cuGraphInstantiateWithFlags("&exec", "$graph", 0)
    s.cuGraphInstantiateWithFlags("&exec2", "$graph", 1 << 40)
    s.cuGraphDestroy("$graph")
    s.cuMemsetD8("$a", 0, 64)
    s.cuMemcpyDtoH("$buffer", "$a", 64)
    s.read("$buffer", kind="f32")
    word = s.gate("$s2")
    s.cuGraphLaunch("$exec", "$s2", gate=word)
    s.cuStreamQuery("$s2")
    s.cuGraphExecDestroy("$exec", gate=word)
    s.open(word)
    s.cuStreamSynchronize("$s2")
    s.cuMemcpyDtoH("$buffer", "$a", 64)
    s.read("$buffer", kind="f32")
    s.cuGraphCreate("&g", 1)
    s.cuGraphCreate("&g", 0, on="bare")
    s.cuGraphInstantiateWithFlags("&empty", "$g", 0, on="bare")
    s.cuGraphInstantiateWithFlags("&empty", "$g", 0)
    s.cuGraphLaunch("$empty", "$s1", on="bare")
    s.cuGraphLaunch("$empty", "$s1")
    s.cuGraphLaunch("$empty", 0)
    s.cuGraphLaunch("$empty", 2)
    s.cuCtxSynchronize(None)
    s.cuGraphExecDestroy("$empty", on="bare")
    s.cuGraphDestroy("$g", on="bare")
    s.cuGraphLaunch(None, "$s2")
    s.cuGraphDestroy(None)
    s.cuGraphExecDestroy(None)
    s.cuGraphInstantiateWithFlags("&exec", None, 0)


@scenario("two launches of one graph in two streams follow each other")
def graph_launch_order(s: Script) -> None:
    prepare(s)
    s.cuStreamBeginCapture("$s1", RELAXED)
    s.cuStreamWaitValue32("$s1", "$host", 1, 0)
    s.cuStreamWriteValue32("$s1", "$host+64", 1, 0)
    s.cuStreamEndCapture("$s1", "&graph")
    s.cuGraphInstantiateWithFlags("&exec", "$graph", 0)
    s.cuGraphLaunch("$exec", "$s1")
    s.cuGraphLaunch("$exec", "$s2")
    s.cuStreamQuery("$s1")
    s.cuStreamQuery("$s2")
    s.read("$host+64")
    s.open("$host")
    s.cuCtxSynchronize(None)
    s.read("$host+64")


@scenario("memory allocated and freed inside a graph")
def graph_memory(s: Script) -> None:
    prepare(s)
    s.cuStreamBeginCapture("$s1", RELAXED)
    s.cuMemAllocAsync("&inside", 4096, "$s1")
    s.fill("$s1", "$inside", 5.0)
    s.cuMemcpyDtoDAsync("$a", "$inside", 64, "$s1")
    s.cuMemFreeAsync("$inside", "$s1")
    s.cuStreamEndCapture("$s1", "&graph")
    s.cuGraphGetNodes("$graph", None, [0, "&count"])
    s.cuPointerGetAttribute("&kind", 2, "$inside")
    s.cuGraphInstantiateWithFlags("&exec", "$graph", 0)
    s.cuGraphInstantiateWithFlags("&exec2", "$graph", 0)
    s.cuGraphLaunch("$exec", "$s1")
    s.cuGraphLaunch("$exec", "$s1")
    s.cuStreamSynchronize("$s1")
    s.cuMemcpyDtoH("$buffer", "$a", 64)
    s.read("$buffer", kind="f32")
    s.cuGraphExecDestroy("$exec")
    s.cuGraphDestroy("$graph")


@scenario("memory allocated in a graph and freed outside; launched again before the free")
def graph_memory_left(s: Script) -> None:
    prepare(s)
    s.cuStreamBeginCapture("$s1", RELAXED)
    s.cuMemAllocAsync("&inside", 4096, "$s1")
    s.fill("$s1", "$inside", 5.0)
    s.cuStreamEndCapture("$s1", "&graph")
    s.cuGraphInstantiateWithFlags("&exec", "$graph", 0)
    s.cuGraphLaunch("$exec", "$s1")
    s.cuGraphLaunch("$exec", "$s1")
    s.cuMemcpyDtoDAsync("$a", "$inside", 64, "$s1")
    s.cuMemFreeAsync("$inside", "$s1")
    s.cuStreamSynchronize("$s1")
    s.cuGraphLaunch("$exec", "$s1")
    s.cuMemFree("$inside")
    s.cuCtxSynchronize(None)


@scenario("memory from outside freed inside a graph")
def graph_free(s: Script) -> None:
    prepare(s)
    s.cuStreamBeginCapture("$s1", RELAXED)
    s.cuMemFreeAsync("$async", "$s1")
    s.cuStreamEndCapture("$s1", "&graph")
    s.cuGraphInstantiateWithFlags("&exec", "$graph", 0)


@scenario("a user object of a graph lives until its graphs and their launches are gone")
def graph_user_objects(s: Script) -> None:
    prepare(s)
    s.callback("gone")
    s.cuUserObjectCreate("&o", None, "$gone", 1, 1)
    captured_fill(s)
    s.cuGraphRetainUserObject("$graph", "$o", 0, 1)
    s.cuGraphRetainUserObject("$graph", "$o", 1, 2)
    s.cuGraphRetainUserObject("$graph", "$o", 1, 1)
    s.cuGraphInstantiateWithFlags("&exec", "$graph", 0)
    s.cuGraphDestroy("$graph")
    s.log(1, within_ms=50)
    word = s.gate("$s2")
    s.cuGraphLaunch("$exec", "$s2")
    s.cuGraphExecDestroy("$exec")
    s.log(1, within_ms=100)
    s.open(word)
    s.cuStreamSynchronize("$s2")
    s.log(1)


@scenario("a user object given to the graph of a capture that is still open; the capture ends or dies")
def graph_user_object_of_capture(s: Script) -> None:
    prepare(s)
    s.callback("gone")
    s.cuUserObjectCreate("&o", None, "$gone", 1, 1)
    s.cuStreamBeginCapture("$s1", RELAXED)
    s.cuStreamGetCaptureInfo("$s1", "&status", "&_", "&graph", None, None, "&_")
    s.cuGraphRetainUserObject("$graph", "$o", 1, 1)
    s.cuStreamQuery("$s1")
    s.log(1, within_ms=50)
    s.cuStreamEndCapture("$s1", "&ended")
    s.log(1)


@scenario("a host function in a graph; a graph with a wait for an external event")
def graph_host_function(s: Script) -> None:
    prepare(s)
    s.cuStreamBeginCapture("$s1", RELAXED)
    s.cuLaunchHostFunc("$s1", "$note", None)
    s.fill("$s1", "$a", 1.0)
    s.cuLaunchHostFunc("$s1", "$note", None)
    s.cuEventRecordWithFlags("$e1", "$s1", 1)
    s.cuStreamEndCapture("$s1", "&graph")
    s.cuGraphInstantiateWithFlags("&exec", "$graph", 0)
    s.cuEventQuery("$e1")
    for _ in range(2):
        word = s.gate("$s1")
        s.cuGraphLaunch("$exec", "$s1")
        s.cuEventQuery("$e1")
        s.open(word)
        s.cuStreamSynchronize("$s1")
        s.cuEventQuery("$e1")
        s.log(2)
