"""Captures and graphs: of a session's own, and of libraries whose stream a session adopts."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import numpy as np
import pytest
from helpers.cuda import (
    KERNELS,
    ForeignStream,
    driver,
    during_a_capture,
    in_thread,
    ok,
    on_stack,
    primary_context,
    run_body,
    stalled,
    unchanged,
    until,
    view,
)
from helpers.managed import CUDA, Producer

import kina
from kina import memory

N = 1000
CONFIG = kina.LaunchConfig.linear(N)
MIB = 1 << 20


class Kernels:
    """The kernels of the tests' module, in raw blocks of their own."""

    def __init__(self, session):
        self.session = session

    def launch(self, name, signature, *arguments):
        with self.session.raw(name) as raw:
            raw.module(KERNELS).function(name, signature).launch(CONFIG, *arguments)

    def add_one(self, y):
        self.launch("add_one", "mut f32[], u32", y, N)

    def copy(self, to, source):
        self.launch("copy", "mut f32[], f32[], u32", to, source, N)


def kernels(session):
    return Kernels(session)


def host(session, tensor):
    return session.to_host(tensor)


# What a graph is ------------------------------------------------------------------------------------------


def test_what_was_captured_runs_when_it_is_launched(session):
    x = session.zeros(N)
    with session.capture() as graph:
        kernels(session).add_one(x)
        kernels(session).add_one(x)
        y = session.copy(x)
        kernels(session).add_one(y)
    assert graph.nodes == 4
    assert host(session, x).tolist() == [0.0] * N  # nothing has run
    for turn in range(1, 4):
        graph.launch(session)
        assert host(session, x).tolist() == [2.0 * turn] * N
        assert host(session, y).tolist() == [2.0 * turn + 1] * N


def test_fills_are_captured(session):
    with session.capture() as graph:
        made = [session.zeros(N), session.full(N, 2.5), session.full(N, 7, "int16"), session.full(N, 1.5, "float64")]
    graph.launch(session)
    assert [float(host(session, tensor)[-1]) for tensor in made] == [0.0, 2.5, 7.0, 1.5]


def test_what_comes_after_a_launch_sees_what_it_did(session):
    x = session.zeros(N)
    with session.capture() as graph:
        kernels(session).add_one(x)
    with stalled(session):
        for _ in range(10):
            graph.launch(session)
        kernels(session).add_one(x)
        copied = session.copy(x)
    assert host(session, copied).tolist() == [11.0] * N


def test_a_capture_of_nothing(session):
    with session.capture() as graph:
        pass
    assert graph.nodes == 0
    graph.launch(session)
    session.synchronize()


def test_two_graphs_of_a_session(session):
    x = session.zeros(N)
    with session.capture() as one:
        kernels(session).add_one(x)
    with session.capture() as three:
        for _ in range(3):
            kernels(session).add_one(x)
    for graph in (one, three, one):
        graph.launch(session)
    assert host(session, x).tolist() == [5.0] * N


def test_the_launch_waits_for_nothing(session):
    x = session.zeros(N)
    with session.capture() as graph:
        kernels(session).add_one(x)
    session.synchronize()
    before = session.counters()
    for _ in range(100):
        graph.launch(session)
    after = session.counters()
    assert after.graph_launches - before.graph_launches == 100
    assert after.leases - before.leases <= 2  # one in a segment
    for same in ("host_waits", "event_queries", "synchronizations", "events_recorded", "launches"):
        assert getattr(after, same) == getattr(before, same), same


def test_the_context_comes_back(session):
    x = session.zeros(N)
    with unchanged():
        with session.capture() as graph:
            kernels(session).add_one(x)
        graph.launch(session)


def test_it_runs_in_later_sessions(runtime):
    with kina.session(runtime) as session:
        x = session.zeros(N)
        with session.capture() as graph:
            kernels(session).add_one(x)
    with kina.session(runtime) as session:
        graph.launch(session)
        assert host(session, x).tolist() == [1.0] * N

    def elsewhere():
        with kina.session(runtime) as session:
            graph.launch(session)
            return host(session, x).tolist()

    assert in_thread(elsewhere) == [2.0] * N


def test_it_belongs_to_its_runtime(session):
    x = session.zeros(N)
    with session.capture() as graph:
        kernels(session).add_one(x)
    with kina.session(kina.Runtime(0)) as other, pytest.raises(kina.ForeignRuntimeError, match="captured on another"):
        graph.launch(other)


def test_words(session):
    graph = session.capture()
    assert repr(graph) == "<kina.Graph, not begun>"
    with pytest.raises(kina.UnsupportedError, match="is not over"):
        graph.launch(session)
    with graph as same:
        assert same is graph
        assert repr(graph) == "<kina.Graph, recording>"
        session.zeros(N)
        with pytest.raises(kina.UnsupportedError, match="is not over"):
            graph.launch(session)
    assert repr(graph) == "<kina.Graph, 1 nodes>"
    with pytest.raises(kina.SessionClosedError, match="entered once"), graph:
        pass
    with pytest.raises(TypeError):
        kina.cuda.Graph()
    for act in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="pickled or copied"):
            act(graph)
    with pytest.raises(TypeError):
        graph.launch(None)


# Memory ---------------------------------------------------------------------------------------------------


def test_memory_of_a_capture_is_the_graphs(session):
    """Nobody else gets it while the graph lives, whoever dropped its tensor when."""
    x = session.zeros(N)
    with session.capture() as graph:
        middle = session.copy(x)
        kernels(session).add_one(middle)
        kernels(session).copy(x, middle)
        inside = view(session, middle)
        del middle
    assert graph.reserved_bytes() >= 4 * N
    others = [session.full(N, 9.0) for _ in range(64)]
    assert inside not in {view(session, other) for other in others}
    graph.launch(session)
    graph.launch(session)
    assert host(session, x).tolist() == [2.0] * N
    assert {float(host(session, other)[0]) for other in others} == {9.0}


def test_memory_that_is_dropped_in_a_capture_serves_it_again(session):
    addresses = set()
    with session.capture() as graph:
        for _ in range(50):
            made = session.full(MIB, 1.0)
            addresses.add(view(session, made))
            del made
    assert len(addresses) == 1
    assert graph.nodes == 50
    assert graph.reserved_bytes() < 16 * MIB


@pytest.mark.simulated
def test_memory_is_short_after_a_capture(sim, session):
    """Every pool of the device gives back what it does not use: the graph's is in use, whoever dropped its tensors."""
    x = session.zeros(N)
    with session.capture() as graph:
        middle = session.copy(x)
        kernels(session).add_one(middle)
        kernels(session).copy(x, middle)
        del middle
    with kina.session(kina.Runtime(0)) as other:
        with pytest.raises(kina.OutOfMemoryError):
            other.empty(1 << 46, "uint8")
        others = [other.full(N, 9.0) for _ in range(64)]
        graph.launch(session)
        assert host(session, x).tolist() == [1.0] * N
        assert {float(host(other, tensor)[0]) for tensor in others} == {9.0}


def test_a_tensor_of_a_capture_outlives_its_graph(session):
    with session.capture() as graph:
        made = session.full(N, 3.0)
    graph.launch(session)
    del graph
    session.synchronize()
    others = [session.full(N, 9.0) for _ in range(64)]
    assert host(session, made).tolist() == [3.0] * N
    del others


def test_memory_goes_back_with_the_graph(session):
    """To where the device's Runtimes have theirs from: the next graph has the very same."""
    left = []
    for _ in range(3):
        with session.capture() as graph:
            session.full(64 * MIB // 4, 1.0)
        graph.launch(session)
        assert graph.reserved_bytes() >= 64 * MIB
        del graph
        session.synchronize()
        with on_stack(primary_context()):
            left.append(int(ok(driver.cuMemGetInfo())[0]))
    assert left[1] == left[2]


def test_tensors_from_before_the_capture_are_held(session):
    x, y = session.full(N, 1.0), session.zeros(N)
    with session.capture() as graph:
        kernels(session).copy(y, x)
        copied = session.copy(x)
    del x
    session.synchronize()
    others = [session.full(N, 9.0) for _ in range(64)]
    graph.launch(session)
    assert host(session, y).tolist() == [1.0] * N
    assert host(session, copied).tolist() == [1.0] * N
    del others


def test_refs_without_a_signature_are_held_too(session):
    x, y = session.full(N, 1.0), session.zeros(N)
    with session.capture() as graph, session.raw() as raw:
        raw.module(KERNELS).function("copy").launch(CONFIG, raw.mut(y), raw.ref(x), kina.u32(N))
    del x
    session.synchronize()
    others = [session.full(N, 9.0) for _ in range(64)]
    graph.launch(session)
    assert host(session, y).tolist() == [1.0] * N
    del others


def test_modules_are_held(runtime):
    """Their cache lets go of them, their faces are gone: the graph's kernels are still there."""
    with kina.session(runtime) as session:
        x = session.zeros(N)
        with session.capture() as graph:
            kernels(session).add_one(x)
        with session.raw() as raw:
            for turn in range(100):  # the cache has room for 64
                raw.module(f"{KERNELS}\n// {turn}\n")
        session.synchronize()
        assert session.counters().modules_evicted > 0
        graph.launch(session)
        assert host(session, x).tolist() == [1.0] * N


def test_a_module_of_the_segment_before_is_held(session):
    """Leased for an eager launch just before, it is leased to the graph all the same."""
    x = session.zeros(N)
    with session.raw() as raw:
        function = raw.module(f"{KERNELS}\n// mine\n").function("add_one", "mut f32[], u32")
        function.launch(CONFIG, x, N)
        with session.capture() as graph:
            function.launch(CONFIG, x, N)
        function.launch(CONFIG, x, N)
        del function
        for turn in range(100):
            raw.module(f"{KERNELS}\n// {turn}\n")
    session.synchronize()
    graph.launch(session)
    assert host(session, x).tolist() == [3.0] * N


def test_workspaces_are_the_graphs(session):
    y = session.zeros(N)
    with session.capture() as graph, session.raw() as raw:
        module = raw.module(KERNELS)
        scratch = raw.workspace(4 * N)
        module.function("fill", "ptr, f32, u32").launch(CONFIG, scratch, 5.0, N)
        module.function("copy", "mut f32[], ptr, u32").launch(CONFIG, y, scratch, N)
        address = raw.unsafe_address(scratch)
    with session.raw() as raw:
        assert address not in {raw.unsafe_address(raw.workspace(4 * N)) for _ in range(64)}
    graph.launch(session)
    assert host(session, y).tolist() == [5.0] * N


@pytest.mark.simulated
def test_foreign_memory_is_leased_to_the_graph(sim, session):
    with on_stack(primary_context()):
        address = int(ok(driver.cuMemAlloc(4 * N)))
    sim.write(address, np.full(N, 2.0, np.float32).tobytes())
    producer = Producer((N,), device=(CUDA, 0), data=address)
    lent = session.adopt(producer)
    y = session.zeros(N)
    with session.capture() as graph:
        kernels(session).copy(y, lent)
    del lent
    session.synchronize()
    assert producer.deleted == 0
    graph.launch(session)
    assert host(session, y).tolist() == [2.0] * N
    with stalled(session):
        graph.launch(session)
        del graph
        assert producer.deleted == 0
    session.synchronize()
    until(lambda: producer.deleted > 0)
    assert producer.deleted == 1
    with on_stack(primary_context()):
        ok(driver.cuMemFree(address))


def test_a_graph_may_be_dropped_while_it_runs(session):
    x = session.zeros(N)
    with session.capture() as graph:
        between = session.copy(x)
        kernels(session).add_one(between)
        kernels(session).copy(x, between)
        del between
    with stalled(session):
        graph.launch(session)
        del graph
        gc.collect()
        others = [session.full(N, 9.0) for _ in range(64)]
    assert host(session, x).tolist() == [1.0] * N
    del others


@pytest.mark.parametrize(
    "make", [memory.CudaMemoryResource, memory.CudaAsyncMemoryResource, memory.PoolMemoryResource, None]
)
def test_memory_of_a_chosen_resource(session, make):
    """Each in the block has its memory from where it would have it outside."""
    chosen = memory.StatisticsMemoryResource(
        make(memory.CudaAsyncMemoryResource())
        if make is memory.PoolMemoryResource
        else make()
        if make
        else memory.CudaAsyncMemoryResource()
    )
    with session.capture() as graph:
        own = session.full(N, 1.0)
        mine = session.full(N, 2.0, memory=chosen)
        with memory.using(chosen):
            used = session.copy(mine)
            kernels(session).add_one(used)
    assert chosen.counts().current_bytes >= 8 * N
    graph.launch(session)
    assert [float(host(session, tensor)[-1]) for tensor in (own, mine, used)] == [1.0, 2.0, 3.0]
    del graph, own, mine, used
    session.synchronize()
    session.empty(N, memory=chosen)
    session.synchronize()
    assert chosen.counts().current_bytes == 0


class Own(memory.MemoryResource):
    """In Python."""

    def __init__(self):
        super().__init__(device="cuda:0")
        self.below = memory.CudaAsyncMemoryResource()
        self.kept = {}

    def _allocate(self, nbytes, stream):
        buffer = self.below.allocate(nbytes, stream)
        self.kept[buffer.address] = buffer
        return buffer.address

    def _deallocate(self, address, nbytes, stream):
        self.kept.pop(address).free(stream)


@pytest.mark.parametrize("over", [False, True])
def test_memory_of_a_resource_in_python_is_refused(session, over):
    chosen = memory.LimitingMemoryResource(Own(), 1 << 30) if over else Own()
    with session.capture() as graph:
        with pytest.raises(kina.UnsupportedError, match="resource in Python"):
            session.empty(N, memory=chosen)
        made = session.full(N, 1.0)
    graph.launch(session)
    assert host(session, made).tolist() == [1.0] * N


def test_no_room(session):
    limited = memory.LimitingMemoryResource(memory.CudaAsyncMemoryResource(), MIB)
    with session.capture() as graph:
        made = session.full(N, 1.0)
        with pytest.raises(kina.OutOfMemoryError):
            session.empty(64 * MIB, memory=limited)
        kernels(session).add_one(made)
    graph.launch(session)
    assert host(session, made).tolist() == [2.0] * N


def test_memory_that_the_driver_orders_is_not_freed_into_the_graph(session):
    """A free of cuMemFreeAsync in the block would become a part of the graph."""
    chosen = memory.CudaAsyncMemoryResource()
    x = session.zeros(N)
    dropped = session.full(N, 1.0, memory=chosen)
    session.synchronize()
    with session.capture() as graph:
        del dropped
        kernels(session).add_one(x)
    assert graph.nodes == 1
    graph.launch(session)
    graph.launch(session)
    assert host(session, x).tolist() == [2.0] * N
    assert chosen.live_bytes == 0


def test_memory_is_short_in_a_capture(session):
    """What the device's other pools keep comes back for it, and what waits for the captured stream stays out of it."""
    other = kina.Runtime(0)
    with kina.session(other) as lender:
        lender.empty(64 * MIB, "uint8")
    x = session.zeros(N)
    dropped = session.full(MIB, 1.0)
    del dropped
    with session.capture() as graph:
        with pytest.raises(kina.OutOfMemoryError):
            session.empty(1 << 46, "uint8")
        kernels(session).add_one(x)
    graph.launch(session)
    assert host(session, x).tolist() == [1.0] * N


# What cannot be captured ----------------------------------------------------------------------------------


class Lent:
    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **wishes):
        return self.tensor.__dlpack__(**wishes)


REFUSED = {
    "synchronize": lambda session, x, other: session.synchronize(),
    "completion": lambda session, x, other: session.completion(),
    "to_host": lambda session, x, other: session.to_host(x),
    "from_host": lambda session, x, other: session.from_host(np.ones(3)),
    "adopt": lambda session, x, other: session.adopt(other),
    "adopt, by DLPack": lambda session, x, other: session.adopt(Lent(other)),
    "capture": lambda session, x, other: session.capture().__enter__(),
    "export to another stream": lambda session, x, other: x.__dlpack__(stream=1),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_captured_is_refused_before_it_does_harm(session, what):
    with kina.session(kina.Runtime(0)) as lender:
        other = lender.zeros(3)
        lender.synchronize()
    x = session.zeros(N)
    with session.capture() as graph:
        kernels(session).add_one(x)
        with pytest.raises(kina.UnsupportedError, match="captured"):
            REFUSED[what](session, x, other)
        kernels(session).add_one(x)
    graph.launch(session)
    assert host(session, x).tolist() == [2.0] * N


def test_a_graph_is_not_captured(session):
    x = session.zeros(N)
    with session.capture() as inner:
        kernels(session).add_one(x)
    with session.capture() as outer, pytest.raises(kina.UnsupportedError, match="captured"):
        inner.launch(session)
    assert outer.nodes == 0


def test_memory_resources_refuse_the_stream(session, runtime):
    ordered = memory.CudaAsyncMemoryResource()
    with session.capture(), pytest.raises(kina.UnsupportedError, match="captured"):
        ordered.allocate(1, runtime)


def test_the_legacy_stream_cannot_be_captured():
    with (
        kina.session("cuda:0", stream=ForeignStream(0)) as session,
        pytest.raises(kina.UnsupportedError, match="cannot be captured"),
        session.capture(),
    ):
        pass


def test_what_somebody_else_does_to_it_is_told_at_the_end():
    def body():
        config = kina.LaunchConfig.linear(1000)
        with kina.session(0) as session, session.raw() as raw:
            add_one = raw.module(KERNELS).function("add_one", "mut f32[], u32")
            x = session.zeros(1000)
            graph = session.capture().__enter__()
            add_one.launch(config, x, 1000)
            driver.cuStreamSynchronize(driver.CUstream(raw.unsafe_stream_handle()))
            with pytest.raises(kina.UnsupportedError, match="come to nothing") as caught:
                graph.__exit__(None, None, None)
            assert caught.value.driver_error.code == 901
            with pytest.raises(kina.UnsupportedError, match="capture failed"):
                graph.launch(session)
            add_one.launch(config, x, 1000)
            assert session.to_host(x).tolist() == [1.0] * 1000

    run_body(body)


# Ends -----------------------------------------------------------------------------------------------------


def test_an_exception_drops_what_was_recorded(session):
    x = session.zeros(N)
    held = session.full(N, 1.0)
    graph = session.capture()

    def fail():
        with graph:
            kernels(session).copy(x, held)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert repr(graph) == "<kina.Graph, failed>"
    with pytest.raises(kina.UnsupportedError, match="failed"):
        graph.launch(session)
    assert graph.reserved_bytes() == 0
    kernels(session).add_one(x)
    assert host(session, x).tolist() == [1.0] * N


def test_a_session_that_is_left_drops_its_capture(runtime):
    session = kina.session(runtime)
    session.__enter__()
    x = session.zeros(N)
    graph = session.capture()
    graph.__enter__()
    kernels(session).add_one(x)
    session.close()
    with pytest.raises(kina.SessionClosedError, match="in the middle"):
        graph.__exit__(None, None, None)
    with kina.session(runtime) as again:
        kernels(again).add_one(x)
        assert host(again, x).tolist() == [1.0] * N


def test_an_inner_session_may_be_left(session, runtime):
    x = session.zeros(N)
    with session.capture() as graph, kina.session(runtime) as inner:
        kernels(inner).add_one(x)
    graph.launch(session)
    assert host(session, x).tolist() == [1.0] * N


def test_an_abandoned_capture_ends(runtime):
    session = kina.session(runtime)
    session.__enter__()
    x = session.zeros(N)
    graph = session.capture()
    graph.__enter__()
    kernels(session).add_one(x)
    del session, graph
    gc.collect()
    with kina.session(runtime) as again:
        kernels(again).add_one(x)
        assert host(again, x).tolist() == [1.0] * N


def test_a_capture_that_is_abandoned_in_another_thread_ends(runtime):
    session = kina.session(runtime)
    session.__enter__()
    x = session.zeros(N)
    boxes = [session.capture()]
    boxes[0].__enter__()
    kernels(session).add_one(x)
    del session
    in_thread(boxes.clear)
    with kina.session(runtime) as again:
        kernels(again).add_one(x)
        assert host(again, x).tolist() == [1.0] * N


def test_the_process_ends_in_the_middle_of_a_capture():
    def body():
        session = kina.session(0)
        session.__enter__()
        graph = session.capture()
        graph.__enter__()
        threading.kept = [session, graph, session.full(10, 1.0)]

    run_body(body)


@pytest.mark.parametrize("open_still", [True, False])
def test_another_thread_cannot_end_a_capture(runtime, open_still):
    """It is told so; and a session that another thread gives up leaves no capture behind for the next one."""
    session = kina.session(runtime)
    session.__enter__()
    x = session.zeros(N)
    graph = session.capture().__enter__()
    kernels(session).add_one(x)

    def elsewhere():
        with pytest.raises(kina.WrongThreadError, match="in the thread that began it"):
            graph.__exit__(None, None, None)
        if not open_still:
            with pytest.raises(kina.WrongThreadError, match="given up"):
                session.close()
            with kina.session(runtime) as next_one:
                y = next_one.full(N, 7.0)
                assert host(next_one, y).tolist() == [7.0] * N

    in_thread(elsewhere)
    if open_still:
        kernels(session).add_one(x)
        graph.__exit__(None, None, None)
        graph.launch(session)
        assert host(session, x).tolist() == [2.0] * N
        session.close()
    else:
        with pytest.raises(kina.SessionClosedError, match="in the middle"):
            graph.__exit__(None, None, None)
        with kina.session(0):
            pass  # puts right what the other thread could not: the stack of contexts


def test_a_thread_that_ends_leaves_no_capture(runtime):
    kept = []

    def elsewhere():
        session = kina.session(runtime)
        session.__enter__()
        graph = session.capture().__enter__()
        session.full(N, 1.0)
        kept.extend([session, graph])

    in_thread(elsewhere)
    with kina.session(runtime) as session:
        y = session.full(N, 7.0)
        assert host(session, y).tolist() == [7.0] * N
    with pytest.raises(kina.SessionClosedError, match="in the middle"):
        kept[1].__exit__(None, None, None)


class Nosy:
    """A number whose conversion does something else first."""

    def __init__(self, act):
        self.act = act

    def __index__(self):
        self.act()
        return N


def test_what_another_thread_asks_of_a_graph_meanwhile(session):
    """How much memory it has, while its capture allocates."""
    seen = []
    over = threading.Event()
    chosen = [memory.StatisticsMemoryResource(memory.CudaAsyncMemoryResource()) for _ in range(50)]
    with session.capture() as graph:

        def ask():
            while not over.is_set():
                seen.append(graph.reserved_bytes())

        thread = threading.Thread(target=ask)
        thread.start()
        for resource in chosen:
            session.full(N, 1.0, memory=resource)
        over.set()
        thread.join()
    assert graph.reserved_bytes() >= max(seen)


# Others ---------------------------------------------------------------------------------------------------


def test_a_tensor_of_a_captured_runtime_is_not_adopted(session):
    """The adopting stream would come into the capture."""
    x = session.full(N, 3.0)
    with kina.session(kina.Runtime(0)) as other:
        with session.capture() as graph:
            kernels(session).add_one(x)
            with pytest.raises(kina.UnsupportedError, match="captured"):
                other.adopt(x)
            y = other.full(N, 5.0)
            assert host(other, other.copy(y)).tolist() == [5.0] * N
        graph.launch(session)
        assert host(other, other.adopt(x)).tolist() == [4.0] * N


def test_other_threads_go_on(session):
    x = session.zeros(N)
    done = []

    def elsewhere():
        with kina.session(kina.Runtime(0)) as other:
            for turn in range(20):
                y = other.full(N, float(turn))
                kernels(other).add_one(y)
                done.append(float(host(other, y)[-1]))

    with session.capture() as graph:
        kernels(session).add_one(x)
        in_thread(elsewhere)
        kernels(session).add_one(x)
    assert done == [turn + 1.0 for turn in range(20)]
    graph.launch(session)
    assert host(session, x).tolist() == [2.0] * N


def test_a_capture_of_another_thread_lives(session):
    x = session.zeros(N)

    def act():
        with session.capture() as graph:
            kernels(session).add_one(x)
            session.full(MIB, 1.0)
        graph.launch(session)
        session.synchronize()

    during_a_capture(act)
    assert host(session, x).tolist() == [1.0] * N


def test_threads_capture_at_once():
    def one(results):
        with kina.session(kina.Runtime(0)) as session:
            x = session.zeros(N)
            for _ in range(10):
                with session.capture() as graph:
                    middle = session.copy(x)
                    kernels(session).add_one(middle)
                    kernels(session).copy(x, middle)
                    del middle
                graph.launch(session)
                graph.launch(session)
            results.append(float(host(session, x)[0]))

    results = []
    threads = [threading.Thread(target=one, args=(results,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [20.0] * 4


def test_exported_memory_is_kept_until_after_the_capture(session):
    """Its consumer's stream is not known: the whole device would have to be waited for, which ends the capture."""
    exported = session.full(N, 1.0)
    capsule = exported.__dlpack__(stream=-1)
    del exported, capsule
    x = session.zeros(N)
    with session.capture() as graph:
        kernels(session).add_one(x)
        with kina.session(kina.Runtime(0)) as other:
            other.synchronize()
    graph.launch(session)
    assert host(session, x).tolist() == [1.0] * N


# Captures of others ---------------------------------------------------------------------------------------


class Capture:
    """Another library captures a stream, as PyTorch does, and replays the graph."""

    def __init__(self, stream, mode=0):
        self.stream, self.mode = stream, driver.CUstreamCaptureMode(mode)
        self.handle = driver.CUstream(stream.handle)
        self.executable = None

    def __enter__(self):
        with on_stack(primary_context()):
            ok(driver.cuStreamBeginCapture(self.handle, self.mode))
        return self

    def __exit__(self, *exception):
        with on_stack(primary_context()):
            graph = ok(driver.cuStreamEndCapture(self.handle))
            self.executable = ok(driver.cuGraphInstantiate(graph, 0))
            ok(driver.cuGraphDestroy(graph))

    def replay(self):
        with on_stack(primary_context()):
            ok(driver.cuGraphLaunch(self.executable, self.handle))

    def drop(self):
        with on_stack(primary_context()):
            ok(driver.cuGraphExecDestroy(self.executable))


@pytest.fixture
def stream():
    made = ForeignStream()
    yield made
    made.synchronize()


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "thread-local", "relaxed"])
@pytest.mark.parametrize("known", [True, False], ids=["a known stream", "a new stream"])
def test_a_session_on_a_captured_stream(stream, mode, known):
    if known:
        with kina.session("cuda:0", stream=stream) as session:
            identity = session.runtime_identity
    with Capture(stream, mode) as capture, kina.session("cuda:0", stream=stream) as session:
        if known:
            assert session.runtime_identity == identity
        x = session.zeros(N)
        kernels(session).add_one(x)
        y = session.copy(x)
        kernels(session).add_one(y)
    for _ in range(2):
        capture.replay()
    with kina.session("cuda:0", stream=stream) as after:
        assert after.runtime_identity == session.runtime_identity
        assert host(after, x).tolist() == [1.0] * N
        assert host(after, y).tolist() == [2.0] * N
        others = [after.full(N, 9.0) for _ in range(64)]
        capture.replay()
        assert {float(host(after, other)[0]) for other in others} == {9.0}
    capture.drop()


def test_what_a_captured_session_used_is_the_graphs(stream):
    with kina.session("cuda:0", stream=stream) as session:
        x, y = session.full(N, 3.0), session.zeros(N)
        session.synchronize()
    with Capture(stream) as capture, kina.session("cuda:0", stream=stream) as session:
        kernels(session).copy(y, x)
        scratch = session.copy(x)
        kernels(session).copy(y, scratch)
        del scratch
    del x
    with kina.session("cuda:0", stream=stream) as session:
        session.synchronize()
        with session.raw() as raw:
            for turn in range(100):
                raw.module(f"{KERNELS}\n// {turn}\n")
        others = [session.full(N, 9.0) for _ in range(64)]
        capture.replay()
        assert host(session, y).tolist() == [3.0] * N
        capture.drop()
        session.synchronize()
        del others


def test_a_graph_of_others_gives_back_what_it_held(stream):
    with kina.session("cuda:0", stream=stream) as session:
        kept = memory.StatisticsMemoryResource(memory.CudaAsyncMemoryResource())
        x = session.full(N, 1.0, memory=kept)
        y = session.zeros(N)
    with Capture(stream) as capture, kina.session("cuda:0", stream=stream, memory=kept) as session:
        kernels(session).copy(y, x)
        session.full(MIB, 2.0)
    assert kept.counts().current_bytes > MIB
    del x
    with kina.session("cuda:0", stream=stream) as session:
        capture.replay()
        session.synchronize()
        assert kept.counts().current_bytes > MIB
        capture.drop()
        until(lambda: (session.synchronize(), kept.counts().current_bytes)[1] == 0)


def test_a_session_left_in_a_capture_records_nothing(stream):
    """Leases from before the capture stay for the next session: an event in a capture tells nothing."""
    with kina.session(kina.Runtime(0)) as lender:
        lent = lender.full(N, 1.0)
        lender.synchronize()
    with kina.session("cuda:0", stream=stream) as session:
        adopted = session.adopt(lent)
        copied = session.copy(adopted)
        with Capture(stream) as capture:
            session.close()
            with kina.session("cuda:0", stream=stream) as again:
                made = again.copy(copied)
    assert session.closed
    capture.replay()
    with kina.session("cuda:0", stream=stream) as session:
        assert session.counters().pending > 0
        assert host(session, made).tolist() == [1.0] * N
        assert session.counters().pending == 0
    capture.drop()


def test_a_capture_that_begins_and_ends_in_an_open_session(stream):
    with kina.session("cuda:0", stream=stream) as session, session.raw() as raw:
        add_one = raw.module(KERNELS).function("add_one", "mut f32[], u32")
        x = session.zeros(N)
        add_one.launch(CONFIG, x, N)
        with Capture(stream) as first:
            add_one.launch(CONFIG, x, N)
        add_one.launch(CONFIG, x, N)
        with Capture(stream) as second:
            made = session.copy(x)
            add_one.launch(CONFIG, made, N)
        assert host(session, x).tolist() == [2.0] * N
        first.replay()
        second.replay()
        assert host(session, x).tolist() == [3.0] * N
        assert host(session, made).tolist() == [4.0] * N
        with Capture(stream), pytest.raises(kina.UnsupportedError, match="captured"):
            session.to_host(x)
        first.drop()
        second.drop()


def test_a_launch_follows_a_capture_by_itself(stream):
    """Two captures in a row, with nothing but launches of kina in them: each graph holds the module."""
    with kina.session("cuda:0", stream=stream) as session, session.raw() as raw:
        x = session.zeros(N)
        function = raw.module(f"{KERNELS}\n// twice\n").function("add_one", "mut f32[], u32")
        with Capture(stream) as first:
            function.launch(CONFIG, x, N)
        with Capture(stream) as second:
            function.launch(CONFIG, x, N)
        del function
        for turn in range(100):
            raw.module(f"{KERNELS}\n// {turn}\n")
        session.synchronize()
        first.drop()
        session.synchronize()
        session.synchronize()
        second.replay()
        assert host(session, x).tolist() == [1.0] * N
        second.drop()


def test_a_graph_of_others_is_no_longer_held_once_its_session_is_left(stream):
    """Nothing of the Runtime is used any more, and its memory goes all the same."""
    kept = memory.StatisticsMemoryResource(memory.CudaAsyncMemoryResource())
    with Capture(stream) as capture, kina.session("cuda:0", stream=stream, memory=kept) as session:
        session.full(MIB, 2.0)
    assert kept.counts().current_bytes > MIB
    capture.drop()
    with kina.session(0) as other:
        until(lambda: (other.synchronize(), kept.counts().current_bytes)[1] == 0)


def test_an_argument_whose_conversion_begins_a_capture(stream):
    """What is launched then is the graph's, and leased to it."""
    with kina.session("cuda:0", stream=stream) as session, session.raw() as raw:
        fill = raw.module(KERNELS).function("fill", "mut f32[], f32, u32")
        x = session.zeros(N)
        session.synchronize()
        capture = Capture(stream)
        fill.launch(CONFIG, x, 2.0, Nosy(capture.__enter__))
        capture.__exit__(None, None, None)
        del x
        session.synchronize()
        others = [session.full(N, 9.0) for _ in range(64)]
        capture.replay()
        assert {float(host(session, other)[0]) for other in others} == {9.0}
        capture.drop()


def test_a_capture_that_has_failed_is_told():
    def body():
        stream = ForeignStream()
        handle = driver.CUstream(stream.handle)
        with on_stack(primary_context()):
            ok(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode(0)))
            driver.cuStreamSynchronize(handle)
        with pytest.raises(kina.UnsupportedError, match="failed already"), kina.session("cuda:0", stream=stream):
            pass
        with on_stack(primary_context()):
            assert int(driver.cuStreamEndCapture(handle)[0]) == 901
        with kina.session("cuda:0", stream=stream) as session:
            assert session.to_host(session.full(3, 1.0)).tolist() == [1.0] * 3

    run_body(body)


def test_a_session_captures_a_stream_of_others(stream):
    with kina.session("cuda:0", stream=stream) as session:
        x = session.zeros(N)
        with session.capture() as graph:
            kernels(session).add_one(x)
        graph.launch(session)
        assert host(session, x).tolist() == [1.0] * N


# PyTorch --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.torch
def test_kina_in_a_capture_of_torch():
    import torch

    side = torch.cuda.Stream()
    a = torch.zeros(N, device="cuda")
    with kina.session("cuda:0", stream=side) as session:
        adopted = session.adopt(a)
        kernels(session).add_one(adopted)
        session.synchronize()
    assert a.tolist() == [1.0] * N
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        a.mul_(2)
        with kina.session("cuda:0", stream=side) as session:
            kernels(session).add_one(adopted)
            scratch = session.copy(adopted)
            kernels(session).add_one(scratch)
            made = session.copy(scratch)
            del scratch
        doubled = a * 2
    assert a.tolist() == [1.0] * N
    for expected in (3.0, 7.0):
        graph.replay()
        torch.cuda.synchronize()
        assert a.tolist() == [expected] * N
        assert doubled.tolist() == [2 * expected] * N
        with kina.session("cuda:0", stream=side) as session:
            assert host(session, made).tolist() == [expected + 1] * N
            others = [session.full(N, 9.0) for _ in range(64)]
            session.synchronize()
            del others
    with kina.session("cuda:0", stream=side) as session:
        del graph, made, adopted
        session.synchronize()


@pytest.mark.gpu
@pytest.mark.torch
def test_torch_captures_while_kina_works(runtime):
    """In PyTorch's own mode, global, in another thread: nothing that kina does ends it, and nothing of kina fails."""
    import torch

    begun, over = threading.Event(), threading.Event()
    values = []

    def capture():
        graph = torch.cuda.CUDAGraph()
        x = torch.zeros(N, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            x.add_(1)
            begun.set()
            over.wait(60)
            x.add_(1)
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        values.append(x.tolist())

    torch.zeros(1, device="cuda")
    thread = threading.Thread(target=capture)
    thread.start()
    try:
        assert begun.wait(60)
        for turn in range(20):
            with kina.session(runtime) as session:
                x = session.from_host(np.zeros(N, np.float32))
                big = session.empty(8 * MIB * (turn + 1), "uint8", memory=memory.CudaMemoryResource())
                kernels(session).add_one(x)
                witness = session.completion()
                del big
                with session.capture() as graph:
                    kernels(session).add_one(x)
                graph.launch(session)
                with session.raw() as raw:
                    raw.module(f"{KERNELS}\n// torch {turn}\n")
                witness.wait()
                assert host(session, x).tolist() == [2.0] * N
                session.synchronize()
    finally:
        over.set()
        thread.join(60)
    assert values == [[4.0] * N]
