"""Shuffled interleavings: any program of sessions, exports, frees and re-allocations gives what NumPy gives.

A Hypothesis state machine makes programs, and knows of each operation what it must give: it keeps the contents of all
memory as NumPy arrays, and which work is ordered after which (helpers/happens_before.py). Only programs without a race
of their own are made, so whatever order the device chooses must give the same values, without a fault, a leak or a
hang. At the end of an example its program runs in a process of its own (helpers/programs.py) on the simulated driver,
in an order drawn from the example's seed, with streams that stand still where the example says so.

A failure prints the program and what Hypothesis needs to make it again. The examples are the same in every run;
``KINA_HYPOTHESIS_PROFILE=long`` makes many more, longer ones, and others each time; ``short`` a few, where all that
counts is which lines run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from helpers.forks import Forks
from helpers.happens_before import Clock, Memory, Order, Stream
from helpers.programs import HOST_THREADS, VIEWS, Operation
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

pytestmark = [pytest.mark.simulated, pytest.mark.multi_gpu]  # each example has a process of its own, with up to two

LONG = os.environ.get("KINA_HYPOTHESIS_PROFILE") == "long"
SHORT = os.environ.get("KINA_HYPOTHESIS_PROFILE") == "short"
PROFILE = settings(
    max_examples=10_000 if LONG else 50 if SHORT else 300,
    stateful_step_count=20 if LONG else 10,
    derandomize=not LONG,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)

#: Few shapes, so that memory is reused for the next tensor; the last one goes through large pinned blocks.
SHAPES = [(64,), (4, 16), (7,), (1,), (20_000,)]
NUMBERS = [0.0, 1.0, 2.0, -3.0, 0.5]
MOST_RUNTIMES, MOST_STREAMS, MOST_SESSIONS = 4, 4, 6
MOST_UPLOADS = 13  # under way when nothing can say any more whether the next one waits for a pinned block

#: What a program is made of, and how often.
OPERATIONS = [
    *("make", "make", "make", "launch", "launch", "launch", "copy", "copy", "read", "read", "view"),
    *("adopt", "adopt", "pass_on", "pass_on", "pass_on", "lend", "upload_again_and_again"),
    *("export", "export", "consumer_reads", "consumer_reads", "consumer_writes", "consumer_checks"),
    *("consumer_forgets", "consumer_forgets"),
    *("drop", "drop", "drop", "replace", "replace", "replace", "enter", "enter", "leave", "leave", "abandon"),
    *("stall", "stall", "stall", "step", "resume", "synchronize", "complete", "wait", "ask", "count", "collect"),
    *("new_stream", "order_streams", "new_runtime", "adopting_runtime", "close_runtime", "drop_runtime"),
    *("drop_functions", "churn_modules", "drop_what_runs"),
    *("trim_pools", "use_after_the_end", "use_in_another_thread", "use_of_another_runtime", "overlapping_arguments"),
]
REFUSED = ["synchronize", "completion", "counters", "raw"]  # calls of a session that must not be used


@dataclass(eq=False)
class Runtime:
    number: int
    device: int
    stream: Stream
    thread: int | None = None  # that has it open
    opened: int = 0
    closed: bool = False
    urgent: bool = False  # something is leased that the end of a session seals
    functions: bool = False  # loaded and held
    uploads: int = 0  # since the host waited for all of it
    launches: int = 0
    allocations: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0


@dataclass(eq=False)
class Session:
    number: int
    runtime: Runtime
    thread: int
    state: str = "open"  # or "left", "abandoned"


@dataclass(eq=False)
class Block(Memory):
    """Memory that kina knows."""

    home: Runtime | None = None  # that allocated it, or took it in from another library
    lent: bool = False  # by another library
    unknown_users: bool = False  # exported to streams that cannot be fenced one by one


@dataclass(eq=False)
class Tensor:
    number: int
    runtime: Runtime
    memory: Block
    values: np.ndarray  # a view of the memory's
    adopted: bool = False
    readonly: bool = False

    @property
    def compact(self) -> bool:
        return bool(self.values.flags.c_contiguous)


@dataclass(eq=False)
class Capsule:
    number: int
    memory: Block
    values: np.ndarray
    readonly: bool
    stream: Stream | None  # the only one that may use it; None: any, for kina waits for the whole device


class Interleavings(RuleBasedStateMachine):
    forks: Forks
    data: st.DataObject

    def __init__(self) -> None:
        super().__init__()
        self.program: list[Operation] = []
        self.numbers = 0
        self.ending = False
        self.order = Order()
        self.named: set[Any] = set()  # keys of streams whose handle the program knows
        self.stalled: set[Any] = set()
        self.runtimes: list[Runtime] = []  # that the program holds
        self.every_runtime: list[Runtime] = []
        self.threads_own: dict[tuple[int, Any], Runtime] = {}  # by thread, and device or adopted stream
        self.sessions: list[Session] = []
        self.tensors: list[Tensor] = []
        self.capsules: list[Capsule] = []
        self.buffers: dict[int, Memory] = {}
        self.witnesses: list[tuple[int, Runtime, Clock]] = []
        # Where kina may wait for more than the program says:
        self.retired: set[Any] = set()  # keys of streams whose Runtime was dropped: another one may be on them by now
        self.fenced = False  # any stream may wait for a legacy one, whose users' memory was released
        self.whole_devices: set[int] = set()  # where memory may be in quarantine, or a dead module waits

    # -------------------------------------------------------------------------------- one example

    @initialize(
        devices=st.integers(1, 2),
        seed=st.integers(0, 2**32 - 1),
        memory=st.sampled_from(["own", "driver", "shared"]),
        stacks=st.tuples(*[st.lists(st.sampled_from(["first", "last", "foreign"]), max_size=2)] * HOST_THREADS),
    )
    def begin(self, devices: int, seed: int, memory: str, stacks: tuple[list[str], ...]) -> None:
        self.devices, self.seed = devices, seed
        self.memory = memory
        if memory != "own":
            self.do(0, "share_pools" if memory == "shared" else "share_drivers_memory", devices=devices)
        for device in range(devices):
            self.order.add(("legacy", device), device, legacy=True)
        for thread, stack in enumerate(stacks):
            self.do(thread, "set_stack", contexts=stack)
        for _ in range(2):
            runtime = self.add_runtime(0)
            self.add_session(0, runtime, runtime.number)

    @rule(data=st.data(), names=st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=16))
    def operate(self, data: st.DataObject, names: list[str]) -> None:
        # One rule for all, for Hypothesis leaves rules out of an example, and half of the examples would be of nothing.
        self.data = data
        for name in names:
            length = len(self.program)
            getattr(self, name)()
            if len(self.program) == length:  # impossible now: something else, and more is possible
                (self.enter if not self.open_sessions() else self.make if len(self.tensors) < 4 else self.replace)()

    def teardown(self) -> None:
        if not self.program:
            return
        self.resume()
        self.ending = True
        for session in reversed(self.open_sessions()):
            self.end_session(session, "close")
        for thread in range(HOST_THREADS):
            # What abandoned sessions owe to the stack, the next one of the thread pays.
            self.end_session(self.add_session(thread, self.own_runtime(thread, 0), "cuda:0"), "close")
            self.do(thread, "check_stack")
            self.do(thread, "clear_stack")
        outcome = self.forks.run(
            "run_program", self.devices, self.seed, self.program,
            env={"KINA_SIM_DEVICES": str(self.devices), "KINA_SIM_TIMEOUT_MS": "10000", "KINA_SIM_QUIET_MS": "0"},
        )  # fmt: skip
        if outcome.status or outcome.result:
            steps = "\n".join(f"   {i}: {operation}" for i, operation in enumerate(self.program))
            words = outcome.result or f"{steps}\nexit status {outcome.status}\n{outcome.error}"
            pytest.fail(f"seed {self.seed}, {self.devices} device(s)\n{words}\n{outcome.stderr}", pytrace=False)

    # -------------------------------------------------------------------------------- bookkeeping

    def do(self, thread: int, name: str, raises: str | None = None, **arguments: Any) -> None:
        self.program.append(Operation(thread, name, arguments, raises))

    def fresh(self) -> int:
        self.numbers += 1
        return self.numbers

    def pick(self, what: str, among: Sequence[Any]) -> Any:
        """One of them; None if there is none."""
        return among[self.data.draw(st.integers(0, len(among) - 1), label=what)] if among else None

    def any_thread(self) -> int:
        return self.pick("thread", range(HOST_THREADS))

    def any_device(self) -> int:
        return self.pick("device", range(self.devices))

    def any_session(self) -> Session | None:
        return self.pick("session", self.open_sessions())

    def open_sessions(self) -> list[Session]:
        return [s for s in self.sessions if s.state == "open"]

    def foreign_streams(self, device: int | None = None) -> list[Stream]:
        """Streams that are not kina's, the legacy ones among them."""
        streams = self.order.streams.values()
        return [s for s in streams if (s.legacy or s.key[0] == "foreign") and device in (None, s.device)]

    def readable(self, session: Session) -> list[Tensor]:
        clock = self.order.before(session.runtime.stream)
        return [t for t in self.tensors if t.runtime is session.runtime and t.memory.readable(clock)]

    def writable(self, session: Session) -> list[Tensor]:
        clock = self.order.before(session.runtime.stream)
        own = [t for t in self.tensors if t.runtime is session.runtime and t.compact and not t.readonly]
        return [t for t in own if t.memory.writable(clock)]

    def host_waits(self, stream: Stream, clock: Clock | None = None) -> None:
        """The host is about to wait for a stream, or for what is in the clock: nothing of that stands still."""
        clock = self.order.before(stream) if clock is None else clock
        waiting = self.order.waits_for(clock) | {stream.key}
        self.resume(None if self.fenced or waiting & self.retired else waiting)
        self.order.host_waits(clock)

    def host_waits_for(self, device: int) -> None:
        """The host is about to wait for a whole device, as when a module is loaded."""
        self.resume({s.key for s in self.order.streams.values() if s.device == device})

    def host_may_wait_for(self, device: int) -> None:
        """Or will, if memory is in quarantine there, or a module is dead."""
        if device in self.whole_devices:
            self.host_waits_for(device)

    def add_tensor(self, runtime: Runtime, memory: Block, values: np.ndarray, **what: Any) -> Tensor:
        tensor = Tensor(self.fresh(), runtime, memory, values, **what)
        self.tensors.append(tensor)
        return tensor

    # -------------------------------------------------------------------------------- streams and Runtimes

    def stall(self) -> None:
        key = self.pick("stream", sorted(self.named - self.stalled))
        if key is not None:
            self.stalled.add(key)
            self.do(0, "stall", stream=key)

    def step(self) -> None:
        key = self.pick("stream", sorted(self.stalled))
        if key is not None:
            self.do(0, "step", stream=key, operations=self.pick("operations", range(1, 5)))

    def resume(self, keys: set[Any] | None = None) -> None:
        """These streams go on, or all of them."""
        keys = set(self.stalled) if keys is None else keys & self.stalled
        if keys:
            self.stalled -= keys
            self.do(0, "resume", streams=sorted(keys))

    def new_stream(self) -> None:
        if len(self.foreign_streams()) < MOST_STREAMS + self.devices:
            self.add_stream(self.any_device())

    def add_stream(self, device: int) -> Stream:
        blocking = self.data.draw(st.booleans(), label="blocking")
        stream = self.order.add(("foreign", self.fresh()), device, blocking=blocking)
        self.named.add(stream.key)
        self.do(0, "new_stream", stream=stream.key, device=device, blocking=blocking)
        return stream

    def order_streams(self) -> None:
        """Another library orders any stream after any other, kina's too, whose handles it was told."""
        device = self.any_device()
        known = [s for s in self.order.streams.values() if s.device == device and (s.legacy or s.key in self.named)]
        first, then = self.pick("first", known), self.pick("then", known)
        if first is not then:
            self.order.order(first, then)
            self.do(0, "foreign_order", device=device, first=first.key, then=then.key)

    def add_runtime(self, device: int, stream: Stream | None = None) -> Runtime:
        number = self.fresh()
        runtime = Runtime(number, device, stream or self.order.add(("own", number), device))
        self.runtimes.append(runtime)
        self.every_runtime.append(runtime)
        self.do(0, "new_runtime", runtime=number, device=device, stream=None if stream is None else stream.key)
        return runtime

    def own_runtime(self, thread: int, target: int | Any, stream: Stream | None = None) -> Runtime:
        """What the thread keeps for itself: its default Runtime of a device, or that of a stream which it adopted."""
        found = self.threads_own.get((thread, target))
        if found is None:
            number = self.fresh()
            home = stream or self.order.add(("own", number), target)
            found = self.threads_own[thread, target] = Runtime(number, home.device, home)
            self.every_runtime.append(found)
        return found

    def new_runtime(self) -> None:
        if len(self.runtimes) < MOST_RUNTIMES:
            self.add_runtime(self.any_device())

    def adopting_runtime(self) -> None:
        if len(self.runtimes) < MOST_RUNTIMES:
            stream = self.pick("stream", self.foreign_streams())
            self.add_runtime(stream.device, stream)

    def drop_runtime(self) -> None:
        runtime = self.pick("runtime", [r for r in self.runtimes if r.opened == 0])
        if runtime is None:
            return
        if runtime.stream.key[0] == "own":
            # Its stream may serve another Runtime next, under another key.
            self.resume({runtime.stream.key})
            self.named.discard(runtime.stream.key)
            self.retired.add(runtime.stream.key)
        self.runtimes.remove(runtime)
        self.whole_devices.add(runtime.device)
        self.do(0, "drop_runtime", runtime=runtime.number)

    def close_runtime(self) -> None:
        runtime = self.pick("runtime", [r for r in self.runtimes if not r.closed])
        if runtime is None:
            return
        runtime.functions = False
        self.whole_devices.add(runtime.device)
        if runtime.opened:
            self.do(0, "close_runtime", "RuntimeBusyError", runtime=runtime.number)
            return
        self.host_may_wait_for(runtime.device)
        self.host_waits(runtime.stream)
        runtime.closed, runtime.urgent, runtime.uploads = True, False, 0
        self.do(0, "close_runtime", runtime=runtime.number)

    # -------------------------------------------------------------------------------- sessions

    def add_session(self, thread: int, runtime: Runtime, target: int | str, stream: Any = None) -> Session:
        session = Session(self.fresh(), runtime, thread)
        self.sessions.append(session)
        runtime.thread = thread
        runtime.opened += 1
        if not runtime.stream.legacy:
            self.named.add(runtime.stream.key)
        self.do(thread, "enter", session=session.number, target=target, stream=stream, key=runtime.stream.key)
        if not runtime.functions and not self.ending:
            self.load_functions(session)  # now, for it waits, and the launches to come shall find streams at a stand
        return session

    def enter(self) -> None:
        if len(self.open_sessions()) == MOST_SESSIONS:
            return
        thread, kind = self.any_thread(), self.pick("kind", ["own", "own", "default", "adopting"])
        runtime, stream = self.pick("runtime", self.runtimes), None
        if kind == "default":
            runtime = self.own_runtime(thread, self.any_device())
        elif kind == "adopting":
            home = self.pick("stream", self.foreign_streams())
            stream = home.key
            runtime = self.own_runtime(thread, stream, home)
        if runtime is None:
            return
        target = runtime.number if kind == "own" else f"cuda:{runtime.device}"
        if runtime.closed or (runtime.opened and runtime.thread != thread):
            raises = "SessionClosedError" if runtime.closed else "RuntimeBusyError"
            self.do(thread, "enter", raises, session=0, target=target, stream=stream, key=None)
        else:
            self.add_session(thread, runtime, target, stream)

    def end_session(self, session: Session, how: str) -> None:
        runtime = session.runtime
        if how == "abandon":  # the last reference goes, in whichever thread
            self.do(self.any_thread(), "abandon", session=session.number)
        else:
            seals = runtime.urgent if runtime.stream.key[0] == "own" else None
            self.do(session.thread, "leave", session=session.number, how=how, seals=seals)
            runtime.urgent = False
        session.state = "abandoned" if how == "abandon" else "left"
        runtime.opened -= 1

    def leave(self) -> None:
        session = self.any_session()
        if session is not None:
            self.end_session(session, self.pick("how", ["close", "exit", "raise"]))

    def abandon(self) -> None:
        session = self.any_session()
        if session is not None:
            self.end_session(session, "abandon")

    def use_after_the_end(self) -> None:
        session = self.pick("session", [s for s in self.sessions if s.state == "left"])
        if session is not None:
            what = self.pick("what", ["zeros", *REFUSED])
            self.do(session.thread, "use", "SessionClosedError", session=session.number, what=what)

    def use_in_another_thread(self) -> None:
        session = self.any_session()
        if session is not None:
            what = self.pick("what", ["empty", *REFUSED])
            other = (session.thread + 1) % HOST_THREADS
            self.do(other, "use", "WrongThreadError", session=session.number, what=what)

    # -------------------------------------------------------------------------------- tensors

    def make(self) -> None:
        session = self.any_session()
        if session is not None:
            self.make_tensor(session, self.pick("kind", ["zeros", "full", "from_host"]), self.pick("shape", SHAPES))

    def make_tensor(self, session: Session, kind: str, shape: tuple[int, ...]) -> None:
        runtime = session.runtime
        values = np.full(shape, 0.0 if kind == "zeros" else self.pick("value", NUMBERS), np.float32)
        if kind == "from_host":
            values += np.arange(values.size, dtype=np.float32).reshape(shape) % 100
            self.count_upload(runtime)
            runtime.urgent = True
            runtime.bytes_to_device += values.nbytes
        memory = Block(values, runtime.device, home=runtime)
        runtime.allocations += 1
        self.order.enqueue(runtime.stream, writes=(memory,))
        tensor = self.add_tensor(runtime, memory, values)
        self.do(session.thread, "make", session=session.number, tensor=tensor.number, kind=kind, values=values.copy())

    def upload_again_and_again(self) -> None:
        """Without a wait between them, so that pinned blocks come back only when the device is past them."""
        session = self.any_session()
        if session is not None:
            shape = self.pick("shape", SHAPES)
            for _ in range(4):
                self.make_tensor(session, "from_host", shape)
                self.complete_in(session)

    def count_upload(self, runtime: Runtime) -> None:
        """A session with copies of its own under way waits for the oldest when the pinned blocks are all taken."""
        for other in self.every_runtime:
            if self.order.is_done(other.stream):
                other.uploads = 0
        if sum(other.uploads for other in self.every_runtime) >= MOST_UPLOADS:
            self.resume()
        runtime.uploads += 1

    def view(self) -> None:
        source = self.pick("tensor", [t for t in self.tensors if t.values.shape[0] > 1])
        if source is None:
            return
        how = self.pick("how", [*VIEWS, "readonly"] if source.compact else ["rest", "even", "readonly"])
        values = source.values if how == "readonly" else VIEWS[how](source.values)
        tensor = self.add_tensor(
            source.runtime, source.memory, values,
            adopted=source.adopted, readonly=source.readonly or how == "readonly",
        )  # fmt: skip
        self.do(0, "view", tensor=tensor.number, source=source.number, how=how)

    def copy(self) -> None:
        session = self.any_session()
        source = session and self.pick("source", self.readable(session))
        if source is not None and source.compact:
            self.copy_tensor(session, source)
        elif source is not None:
            self.do(
                session.thread, "copy", "NonContiguousError", session=session.number, tensor=0, source=source.number
            )

    def copy_tensor(self, session: Session, source: Tensor) -> None:
        runtime = session.runtime
        memory = Block(source.values.copy(), runtime.device, home=runtime)
        runtime.allocations += 1
        runtime.urgent |= source.adopted
        self.order.enqueue(runtime.stream, reads=(source.memory,), writes=(memory,))
        tensor = self.add_tensor(runtime, memory, memory.values)
        self.do(session.thread, "copy", session=session.number, tensor=tensor.number, source=source.number)

    def launch(self) -> None:
        session = self.any_session()
        target = session and self.pick("target", self.writable(session))
        if target is None:
            return
        size = target.values.size
        sources = [
            t
            for t in self.readable(session)
            if t.compact and t.values.size >= size and t.memory is not target.memory
        ]  # fmt: skip
        entry = self.pick("entry", ["fill", "add_one", "saxpy", "copy"] if sources else ["fill", "add_one"])
        numbers = [self.pick("number", NUMBERS)] if entry in ("fill", "saxpy") else []
        given = [target]
        if entry in ("saxpy", "copy"):
            given.append(self.pick("source", sources))
            values = given[1].values.reshape(-1)[:size].reshape(target.values.shape)
        if entry == "fill":
            target.values[...] = numbers[0]
        elif entry == "add_one":
            target.values[...] += np.float32(1)
        elif entry == "saxpy":
            target.values[...] += np.float32(numbers[0]) * values
        else:
            target.values[...] = values
        runtime = session.runtime
        if not runtime.functions:
            self.load_functions(session)
        runtime.launches += 1
        runtime.urgent |= any(t.adopted for t in given)
        self.order.enqueue(runtime.stream, reads=tuple(t.memory for t in given[1:]), writes=(target.memory,))
        self.do(
            session.thread, "launch", session=session.number, runtime=runtime.number, entry=entry,
            tensors=[t.number for t in given], numbers=numbers, refs=self.data.draw(st.booleans(), label="refs"),
        )  # fmt: skip

    def read(self) -> None:
        session = self.any_session()
        tensor = session and self.pick("tensor", self.readable(session))
        if tensor is not None:
            self.read_tensor(session, tensor)

    def read_tensor(self, session: Session, tensor: Tensor) -> None:
        runtime = session.runtime
        low, high = np.lib.array_utils.byte_bounds(tensor.values)
        runtime.bytes_to_host += high - low
        runtime.urgent = False
        self.order.enqueue(runtime.stream, reads=(tensor.memory,))
        self.host_waits(runtime.stream)
        self.do(session.thread, "read", session=session.number, tensor=tensor.number, expected=tensor.values.copy())

    def adopt(self) -> None:
        session = self.any_session()
        runtime = session and session.runtime
        source = session and self.pick("source", [t for t in self.tensors if t.runtime is not runtime])
        if source is None:
            return
        if source.runtime.device != runtime.device:
            arguments = {"session": session.number, "source": source.number}
            self.do(session.thread, "adopt", "ForeignDeviceError", tensor=0, **arguments)
        else:
            self.adopt_tensor(session, source)

    def adopt_tensor(self, session: Session, source: Tensor) -> Tensor:
        runtime = session.runtime
        self.order.order(source.runtime.stream, runtime.stream)
        memory = source.memory
        # Handed back to where it was allocated, it is what it was before.
        adopted = memory.lent or memory.home is not runtime
        tensor = self.add_tensor(runtime, memory, source.values, adopted=adopted, readonly=source.readonly)
        self.do(session.thread, "adopt", session=session.number, tensor=tensor.number, source=source.number)
        return tensor

    def pass_on(self) -> None:
        """A tensor is taken over by another Runtime and used there at once, its work still under way here."""
        session = self.any_session()
        runtime = session and session.runtime
        sources = [
            t for t in self.tensors if t.runtime is not runtime and session and t.runtime.device == runtime.device
        ]
        source = self.pick("source", sources)
        if source is not None:
            tensor = self.adopt_tensor(session, source)
            use = self.pick("use", [self.read_tensor, self.copy_tensor])
            if tensor in self.readable(session) and (tensor.compact or use == self.read_tensor):
                use(session, tensor)

    def use_of_another_runtime(self) -> None:
        session = self.any_session()
        tensor = session and self.pick("tensor", [t for t in self.tensors if t.runtime is not session.runtime])
        if tensor is not None:
            same = tensor.runtime.device == session.runtime.device
            what = self.pick("what", ["copy", "to_host", "launch"])
            self.host_waits_for(session.runtime.device)  # a module is loaded
            raises = "ForeignRuntimeError" if same else "ForeignDeviceError"
            self.do(session.thread, "use", raises, session=session.number, what=what, tensor=tensor.number)

    def overlapping_arguments(self) -> None:
        """Written and read in one launch, or written under a borrow."""
        session = self.any_session()
        tensor = session and self.pick(
            "tensor", [t for t in self.tensors if t.runtime is session.runtime and t.compact]
        )
        if tensor is not None:
            what = self.pick("what", ["saxpy on itself", "borrowed"])
            self.host_waits_for(session.runtime.device)  # a module is loaded
            # What comes before the argument that is refused is leased already.
            session.runtime.urgent |= what == "saxpy on itself" and tensor.adopted and not tensor.readonly
            self.do(
                session.thread, "use", "InvalidLayoutError",
                session=session.number, what=what, tensor=tensor.number,
            )  # fmt: skip

    def drop_names(self, thread: int, names: list[Tensor | Capsule]) -> None:
        tensors = [name for name in names if isinstance(name, Tensor)]
        capsules = [name for name in names if isinstance(name, Capsule)]
        self.tensors = [t for t in self.tensors if t not in tensors]
        self.capsules = [c for c in self.capsules if c not in capsules]
        self.whole_devices |= {name.memory.device for name in names if name.memory.unknown_users}
        self.do(thread, "drop", tensors=[t.number for t in tensors], capsules=[c.number for c in capsules])

    def names_of(self, memory: Memory) -> list[Tensor | Capsule]:
        return [name for name in (*self.tensors, *self.capsules) if name.memory is memory]

    def drop(self) -> None:
        """One name, or every name of some memory."""
        name = self.pick("name", [*self.tensors, *self.capsules])
        if name is not None:
            every = self.data.draw(st.booleans(), label="every name")
            self.drop_names(self.any_thread(), self.names_of(name.memory) if every else [name])

    def replace(self) -> None:
        """Drop every name of some memory, and allocate as much at once, with other contents."""
        session = self.any_session()
        tensor = session and self.pick("tensor", self.tensors)
        if tensor is not None:
            self.drop_names(self.any_thread(), self.names_of(tensor.memory))
            self.make_tensor(session, self.pick("kind", ["full", "from_host"]), tensor.memory.values.shape)

    # -------------------------------------------------------------------------------- modules, waiting, counters

    def load_functions(self, session: Session) -> None:
        runtime = session.runtime
        self.host_waits_for(runtime.device)
        runtime.functions = True
        self.do(session.thread, "load_functions", session=session.number, runtime=runtime.number)

    def drop_functions(self) -> None:
        runtime = self.pick("runtime", [r for r in self.every_runtime if r.functions])
        if runtime is not None:
            runtime.functions = False
            self.do(0, "drop_functions", runtime=runtime.number)

    def churn_modules(self) -> None:
        """All modules of the Runtime go, with launches from them under way or not."""
        session = self.any_session()
        if session is not None:
            runtime = session.runtime
            self.host_waits_for(runtime.device)
            self.do(session.thread, "churn_modules", session=session.number, runtime=runtime.number)
            runtime.functions = False
            self.whole_devices.add(runtime.device)

    def drop_what_runs(self) -> None:
        device = self.any_device()
        self.resume()
        self.whole_devices.add(device)
        self.do(self.any_thread(), "drop_what_runs", device=device)

    def synchronize(self) -> None:
        session = self.any_session()
        if session is not None:
            self.synchronize_in(session)

    def synchronize_in(self, session: Session) -> None:
        self.host_may_wait_for(session.runtime.device)
        self.host_waits(session.runtime.stream)
        session.runtime.urgent = False
        self.do(session.thread, "synchronize", session=session.number)

    def complete(self) -> None:
        session = self.any_session()
        if session is not None:
            self.complete_in(session)

    def complete_in(self, session: Session) -> None:
        runtime, number = session.runtime, self.fresh()
        self.order.enqueue(runtime.stream)
        runtime.urgent = False
        self.witnesses.append((number, runtime, dict(runtime.stream.clock)))
        self.do(session.thread, "complete", session=session.number, witness=number)

    def wait(self) -> None:
        witness = self.pick("witness", self.witnesses)
        if witness is not None:
            number, runtime, clock = witness
            self.host_waits(runtime.stream, clock)
            self.do(self.any_thread(), "wait", witness=number)

    def ask(self) -> None:
        witness = self.pick("witness", self.witnesses)
        if witness is not None:
            number, runtime, clock = witness
            done = self.order.is_done(runtime.stream, clock[runtime.stream.key])
            self.do(self.any_thread(), "ask", witness=number, must_be_done=done)

    def count(self) -> None:
        session = self.any_session()
        if session is not None:
            names = ["launches", "allocations", "bytes_to_device", "bytes_to_host"]
            expected = {name: getattr(session.runtime, name) for name in names}
            self.do(session.thread, "count", session=session.number, expected=expected)

    def trim_pools(self) -> None:
        if self.memory == "shared":
            self.do(self.any_thread(), "trim_pools", keep_bytes=self.pick("MiB", range(8)) << 20)

    def collect(self) -> None:
        self.do(self.any_thread(), "collect")

    # -------------------------------------------------------------------------------- another library

    def add_buffer(self, memory: Memory) -> int:
        number = self.fresh()
        self.do(0, "new_buffer", buffer=number, device=memory.device, values=memory.values.copy())
        return number

    def fill_foreign(self, stream: Stream, where: tuple[str, int], memory: Memory, values: np.ndarray) -> None:
        value = self.pick("value", NUMBERS) + 500
        self.order.enqueue(stream, writes=(memory,))
        values[...] = value
        self.do(0, "foreign_fill", device=stream.device, stream=stream.key, to=where, value=value, size=values.size)

    def lend(self) -> None:
        """A session adopts another library's memory, whose contents are still on their way."""
        session = self.any_session()
        if session is None:
            return
        runtime = session.runtime
        stream = self.pick("stream", self.foreign_streams(runtime.device))
        values = np.zeros(np.prod(self.pick("shape", SHAPES)), np.float32)
        memory = Block(values, runtime.device, home=runtime, lent=True)
        buffer = self.add_buffer(memory)
        self.fill_foreign(stream, ("buffer", buffer), memory, values)
        self.order.order(stream, runtime.stream)
        tensor = self.add_tensor(runtime, memory, values, adopted=True)
        self.do(
            session.thread, "lend", session=session.number, tensor=tensor.number, buffer=buffer,
            device=runtime.device, size=values.size, stream=stream.key,
        )  # fmt: skip

    def export(self) -> None:
        tensor = self.pick("tensor", [t for t in self.tensors if t.compact])
        if tensor is not None:
            # None: the consumer says that it will order its work itself.
            self.export_to(self.pick("stream", [None, *self.foreign_streams(tensor.memory.device)]), tensor)

    def export_to(self, stream: Stream | None, tensor: Tensor) -> Capsule:
        memory, home = tensor.memory, tensor.runtime.stream
        known = stream is not None and not tensor.adopted and (stream is home or stream.legacy)
        if stream is not None and stream is not home:
            self.order.order(home, stream)
            self.fenced |= stream.legacy
        memory.unknown_users |= not known
        capsule = Capsule(self.fresh(), memory, tensor.values, tensor.readonly, stream if known else None)
        self.capsules.append(capsule)
        key = None if stream is None else stream.key
        self.do(0, "export", capsule=capsule.number, tensor=tensor.number, stream=key)
        return capsule

    def users(self, capsule: Capsule) -> list[Stream]:
        return self.foreign_streams(capsule.memory.device) if capsule.stream is None else [capsule.stream]

    def consumer_reads(self) -> None:
        """A consumer copies what it was given to memory of its own."""
        capsule = self.pick("capsule", self.capsules)
        if capsule is None:
            return
        memory = capsule.memory
        stream = self.pick("stream", [s for s in self.users(capsule) if memory.readable(self.order.before(s))])
        if stream is not None:
            self.copy_out(stream, capsule)

    def copy_out(self, stream: Stream, capsule: Capsule) -> None:
        memory = capsule.memory
        target = Memory(np.zeros(capsule.values.size, np.float32), memory.device)
        buffer = self.add_buffer(target)
        self.buffers[buffer] = target
        self.order.enqueue(stream, reads=(memory,), writes=(target,))
        target.values[...] = capsule.values.reshape(-1)
        self.do(
            0, "foreign_copy", device=memory.device, stream=stream.key, to=("buffer", buffer),
            source=("capsule", capsule.number), nbytes=target.values.nbytes,
        )  # fmt: skip

    def consumer_forgets(self) -> None:
        """It copies from all that there is of some memory, lets go of it at once, and is waited for by nobody."""
        session = self.any_session()
        tensor = session and self.pick("tensor", [t for t in self.tensors if t.compact])
        if tensor is None:
            return
        device = tensor.memory.device
        streams = [s for s in self.foreign_streams(device) if not s.legacy and s is not tensor.runtime.stream]
        stream = self.pick("stream", streams) or self.add_stream(device)
        capsule = self.export_to(stream, tensor)
        if tensor.memory.readable(self.order.before(stream)):
            self.copy_out(stream, capsule)
        self.drop_names(self.any_thread(), self.names_of(tensor.memory))
        if self.data.draw(st.booleans(), label="synchronize"):
            self.synchronize_in(session)
        self.make_tensor(session, "full", tensor.memory.values.shape)

    def consumer_writes(self) -> None:
        capsule = self.pick("capsule", [c for c in self.capsules if not c.readonly])
        if capsule is None:
            return
        memory = capsule.memory
        stream = self.pick("stream", [s for s in self.users(capsule) if memory.writable(self.order.before(s))])
        if stream is not None:
            self.fill_foreign(stream, ("capsule", capsule.number), memory, capsule.values)

    def consumer_checks(self) -> None:
        """The consumer waits for its stream, and looks at what it copied."""
        buffer = self.pick("buffer", sorted(self.buffers))
        if buffer is None:
            return
        memory = self.buffers[buffer]
        assert memory.written is not None
        stream = self.order.streams[memory.written[0]]
        self.host_waits(stream)
        self.do(
            0, "foreign_read", device=memory.device, stream=stream.key, buffer=buffer, expected=memory.values.copy()
        )


def test_interleavings() -> None:
    with Forks("helpers.programs") as Interleavings.forks:
        run_state_machine_as_test(Interleavings, settings=PROFILE)
