"""Play the steps of a scenario on the libcuda.so.1 that the loader finds, and say what was seen.

    python tests/driver_sim/oracle/machine.py < steps.json

reads ``{"steps": [...], "patience_ms": 800}`` and writes one JSON line before and one after each step, so that what was
seen before a crash is not lost. The README of this folder describes steps. Nothing but the standard library is
needed: the same file runs where a GPU is and where the simulation is.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from driver_sim.oracle.prototypes import (
    ALLOCATES,
    BY_NAME,
    DESTROYS,
    HANDLES,
    IDS,
    POINTER_ATTRIBUTES,
    SCALARS,
    STRUCTURES,
    VERSION,
)

SIM = Path(__file__).resolve().parents[1]
HANG_S = 30.0  # making a context takes seconds where several processes do
NOT_READY = 600

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
STREAM_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)

JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES = 5, 6
LAUNCH_BUFFER, LAUNCH_BUFFER_SIZE = 1, 2
ATTRIBUTES = {"cluster": 4, "cooperative": 2, "priority": 8}
VALUE_TYPES = {**SCALARS, "f64": ctypes.c_double}


class Unbound(Exception):
    """A step names a symbol that an earlier, failed step did not make."""


class Driver:
    """Functions of the driver by name, in their form of CUDA 13.0."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._find = self._library.cuGetProcAddress_v2
        self._find.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]
        self._functions: dict[str, Callable[..., int]] = {}

    def __getitem__(self, name: str) -> Callable[..., int]:
        if name not in self._functions:
            address = ctypes.c_void_p()
            result = self._find(name.encode(), ctypes.byref(address), VERSION, 0, None)
            if result or not address.value:
                raise LookupError(f"the driver has no {name} (result {result})")
            types: list[Any] = []
            for word in BY_NAME[name]:
                if word == "jit":
                    types += [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p]
                else:
                    types.append(SCALARS.get(word, ctypes.c_void_p))
            self._functions[name] = ctypes.CFUNCTYPE(ctypes.c_int, *types)(address.value)
        return self._functions[name]


class Symbols:
    """The names of values, of which some have ended."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.kinds: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.ended: set[str] = set()

    def bind(self, name: str, kind: str, value: int, size: int = 0) -> None:
        self.values[name], self.kinds[name], self.sizes[name] = value, kind, size
        self.ended.discard(name)

    def resolve(self, text: str) -> int:
        name, _, offset = text[1:].partition("+")
        if name not in self.values:
            raise Unbound(name)
        return self.values[name] + int(offset or 0)

    def of_kind(self, kind: str) -> list[str]:
        return [name for name, found in self.kinds.items() if found == kind]

    def handle(self, kind: str, value: int, *, but: str = "") -> str | None:
        """The first name of a living object: the driver may give the value of an ended one to a new one."""
        for name in self.of_kind(kind):
            if self.values[name] == value and name != but and name not in self.ended:
                return name
        return None

    def ended_handle(self, kind: str, value: int) -> str | None:
        return next((n for n in self.of_kind(kind) if self.values[n] == value and n in self.ended), None)

    def address(self, value: int, *, but: str = "") -> str | None:
        for name in reversed(self.of_kind("ptr")):
            offset = value - self.values[name]
            if name != but and name not in self.ended and 0 <= offset < max(1, self.sizes[name]):
                return f"{name}+{offset}" if offset else name
        return None

    def ended_address(self, value: int, *, but: str = "") -> str | None:
        for name in reversed(self.of_kind("ptr")):
            if name != but and name in self.ended and self.values[name] == value:
                return name
        return None


class Arguments:
    """The arguments of one call, and what of them to look at afterwards."""

    def __init__(self, machine: Machine, name: str, given: list[Any]) -> None:
        self.machine = machine
        self.name = name
        self.passed: list[Any] = []
        self.kept: list[Any] = []  # memory that the call reads
        self.outputs: list[tuple[str, str, Any]] = []  # symbol, kind, place
        self.log: Any = None
        kinds = BY_NAME[name]
        if len(given) != len(kinds):
            raise ValueError(f"{name} takes {len(kinds)} arguments: {kinds}")
        for index, (kind, value) in enumerate(zip(kinds, given, strict=True)):
            if kind == "&attribute":
                kind = "&" + POINTER_ATTRIBUTES.get(int(given[index + 1]), "u64")
            self.add(kind, value)

    def number(self, value: Any) -> Any:
        if isinstance(value, str) and value.startswith("$"):
            return self.machine.symbols.resolve(value)
        return 0 if value is None else value

    def keep(self, thing: Any) -> int:
        self.kept.append(thing)
        return ctypes.addressof(thing)

    def add(self, kind: str, value: Any) -> None:
        if kind == "jit":
            self.add_jit(value)
        elif kind == "characters":
            self.add_characters(value)
        elif kind[0] in "&*":
            self.add_output(kind[1:], value)
        elif kind == "text":
            self.passed.append(None if value is None else self.keep(ctypes.create_string_buffer(value.encode())))
        elif kind == "image":
            self.passed.append(None if value is None else self.keep(ctypes.create_string_buffer(image(value))))
        elif kind == "struct":
            self.passed.append(None if value is None else self.keep(self.structure(value)))
        elif kind == "params":
            self.passed.append(None if value is None else self.parameters(value))
        elif kind == "extra":
            self.passed.append(None if value is None else self.extra(value))
        elif kind == "fn":
            self.passed.append(None if value is None else self.machine.callbacks[value[1:]][1])
        elif kind in SCALARS:
            self.passed.append(self.number(value))
        else:
            self.passed.append(self.number(value) or None)

    def add_output(self, kind: str, value: Any) -> None:
        initial = 0
        if isinstance(value, list):
            initial, value = value
        if value is None:
            self.passed.append(None)
            return
        if kind == "uuid":
            place: Any = ctypes.create_string_buffer(16)
        elif kind == "text":
            place = ctypes.c_char_p()
        else:
            place = SCALARS.get(kind, ctypes.c_uint64)(self.number(initial))
        self.passed.append(self.keep(place))
        self.outputs.append((value.removeprefix("&"), kind, place))

    def add_characters(self, value: Any) -> None:
        place = ctypes.create_string_buffer(256)
        self.passed.append(None if value is None else self.keep(place))
        if value is not None:
            self.outputs.append((value.removeprefix("&"), "characters", place))

    def add_jit(self, value: Any) -> None:
        if value is None:
            self.passed += [0, None, None]
            return
        self.log = ctypes.create_string_buffer(int(value["log"]))
        options = (ctypes.c_int * 2)(JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES)
        values = (ctypes.c_uint64 * 2)(ctypes.addressof(self.log), len(self.log))
        self.passed += [2, self.keep(options), self.keep(values)]

    def structure(self, value: dict[str, Any]) -> Any:
        ((name, fields),) = value.items()
        thing = STRUCTURES[name]()
        for field, content in fields.items():
            if field == "attributes":
                rows = (STRUCTURES["CUlaunchAttribute"] * len(content))()
                for row, (attribute, numbers) in zip(rows, content, strict=True):
                    row.id = ATTRIBUTES[attribute]
                    for i, number in enumerate(numbers):
                        row.value[i] = number
                thing.attributes, thing.count = self.keep(rows), len(content)
            elif isinstance(content, list):
                for i, number in enumerate(content):
                    getattr(thing, field)[i] = number
            else:
                setattr(thing, field, self.number(content))
        return thing

    def typed(self, value: list[Any]) -> Any:
        kind, content = value
        return VALUE_TYPES[kind](self.number(content))

    def parameters(self, values: list[Any]) -> int:
        places = [self.keep(self.typed(value)) for value in values]
        return self.keep((ctypes.c_void_p * (len(places) + 1))(*places))

    def extra(self, value: dict[str, Any]) -> int:
        buffer = bytearray()
        for item in map(self.typed, value["values"]):
            size = ctypes.sizeof(item)
            buffer += bytes(-len(buffer) % size) + bytes(item)
        place = ctypes.create_string_buffer(bytes(buffer) + bytes(4096))
        size_place = ctypes.c_size_t(value.get("size", len(buffer)))
        words = (ctypes.c_uint64 * 5)(LAUNCH_BUFFER, self.keep(place), LAUNCH_BUFFER_SIZE, self.keep(size_place), 0)
        return self.keep(words)

    def seen(self, result: int) -> dict[str, Any]:
        """What the call gave: outputs of a call that failed mean nothing, but for the log."""
        found: dict[str, Any] = {}
        symbols = self.machine.symbols
        ends = DESTROYS.get(self.name)
        if result == 0 and ends is not None:
            value = self.passed[ends]
            kind = BY_NAME[self.name][ends]
            for name in symbols.of_kind(kind):
                if symbols.values[name] == value:
                    symbols.ended.add(name)
        if result == 0:
            _, size, reuses = ALLOCATES.get(self.name, (0, None, False))
            nbytes = 0 if size is None else int(self.passed[size])
            for symbol, kind, place in self.outputs:
                if symbol != "_":
                    found[symbol] = self.described(symbol, kind, place, nbytes, reuses)
        if self.log is not None:
            found["log"] = self.log.value.decode(errors="replace")
        return found

    def described(self, symbol: str, kind: str, place: Any, nbytes: int, reuses: bool) -> Any:
        symbols = self.machine.symbols
        if kind == "uuid":
            return "16 bytes"
        if kind in ("text", "characters"):
            return None if place.value is None else place.value.decode()
        value = place.value
        if kind == "entry":
            return "found" if value else None
        if kind == "f32":
            return "a number" if value == value and value >= 0 else "no number"
        if kind in IDS:
            earlier = [symbols.values[name] for name in symbols.of_kind(kind) if name != symbol]
            symbols.bind(symbol, kind, value)
            return self.compared(kind, value, earlier)
        if kind == "ptr":
            known = symbols.address(value, but=symbol)
            before = symbols.ended_address(value, but=symbol) if reuses else None
            symbols.bind(symbol, kind, value, nbytes)
            return None if not value else known or (f"was {before}" if before else "new")
        if kind in HANDLES:
            known = symbols.handle(kind, value, but=symbol)
            symbols.bind(symbol, kind, value)
            return None if not value else known or "new"
        return value

    def compared(self, kind: str, value: int, earlier: list[int]) -> str:
        if not earlier:
            return "first"
        if kind == "free_bytes":
            last = earlier[-1]
            return "same" if value == last else "less" if value < last else "more"
        if value in earlier:
            (name, *_) = [n for n in self.machine.symbols.of_kind(kind) if self.machine.symbols.values[n] == value]
            return f"same as {name}"
        return "greater than before" if value > max(earlier) else "different"


def image(value: dict[str, str]) -> bytes:
    if "file" in value:
        return (SIM / value["file"]).read_bytes()
    return value["text"].encode()


class Machine:
    """Symbols, host threads, callbacks; plays one step after the other."""

    def __init__(self, patience_ms: float, emit: Callable[[dict[str, Any]], None]) -> None:
        self.patience_s = patience_ms / 1000
        self.emit = emit
        self.driver = Driver()
        self.symbols = Symbols()
        self.callbacks: dict[str, tuple[Any, int]] = {}
        self.log: list[Any] = []
        self.threads: dict[str, queue.SimpleQueue[Any]] = {}
        self.buffers: list[Any] = []

    def play(self, steps: list[dict[str, Any]]) -> None:
        for index, step in enumerate(steps):
            self.emit({"begin": index})
            try:
                saw = self.play_step(step)
            except Unbound as missing:
                saw = {"left_out": f"there is no {missing}"}
            self.emit({"step": index, "saw": saw})
            if saw.get("hung"):
                os._exit(0)

    def play_step(self, step: dict[str, Any]) -> dict[str, Any]:
        for kind in ("call", "callback", "log", "read", "write", "buffer", "sleep", "end_thread", "restart"):
            if kind in step:
                found: dict[str, Any] = getattr(self, f"do_{kind}")(step)
                return found
        raise ValueError(f"unknown step {step}")

    # Calls ---------------------------------------------------------------------------------------------

    def do_call(self, step: dict[str, Any]) -> dict[str, Any]:
        answer = self.on_thread(step.get("on", "main"), lambda: self.call(step))
        gate = step.get("gate")
        try:
            if gate is None:
                return finished(answer.get(timeout=HANG_S))
            try:
                patience = step.get("patience_ms", self.patience_s * 1000) / 1000
                saw = finished(answer.get(timeout=patience))
                return {**saw, "returned": "before the gate opened"}
            except queue.Empty:
                self.store(self.symbols.resolve(gate), 1)
                return {**finished(answer.get(timeout=HANG_S)), "returned": "after the gate opened"}
        except queue.Empty:
            return {"hung": True}

    def on_thread(self, name: str, work: Callable[[], Any]) -> queue.SimpleQueue[Any]:
        if name not in self.threads:
            self.threads[name] = queue.SimpleQueue()
            threading.Thread(target=self.serve, args=(self.threads[name],), daemon=True).start()
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.threads[name].put((work, answer))
        return answer

    def serve(self, jobs: queue.SimpleQueue[Any]) -> None:
        while (job := jobs.get()) is not None:
            work, answer = job
            try:
                answer.put(work())
            except BaseException as error:
                answer.put(error)

    def current(self) -> str:
        place = ctypes.c_uint64()
        result = self.driver["cuCtxGetCurrent"](ctypes.addressof(place))
        if result:
            return f"error {result}"
        if not place.value:
            return "none"
        if name := self.symbols.handle("ctx", place.value):
            return name
        ended = self.symbols.ended_handle("ctx", place.value)
        return f"{ended}, destroyed" if ended else "unknown"

    def call(self, step: dict[str, Any]) -> dict[str, Any]:
        before = self.current()
        saw = self.plain_call(step)
        after = self.current()
        saw["context"] = before if before == after else f"{before} -> {after}"
        return saw

    def plain_call(self, step: dict[str, Any]) -> dict[str, Any]:
        name = step["call"]
        function = self.driver[name]
        arguments = Arguments(self, name, step["args"])
        result = function(*arguments.passed)
        until = time.monotonic() + step.get("ready_within_ms", HANG_S * 1000) / 1000
        while step.get("until_ready") and result == NOT_READY and time.monotonic() < until:
            time.sleep(0.001)
            result = function(*arguments.passed)
        saw: dict[str, Any] = {"result": result}
        if found := arguments.seen(result):
            saw["out"] = found
        return saw

    # What is no call -------------------------------------------------------------------------------------

    def do_callback(self, step: dict[str, Any]) -> dict[str, Any]:
        """A C function that notes that it ran, and may hold its stream until a word is set or call the driver."""

        def run(status: int | None = None) -> None:
            entry: dict[str, Any] = {"ran": step["callback"]}
            if status is not None:
                entry["status"] = status
            until = time.monotonic() + HANG_S
            gate = step.get("waits_for")
            while gate and not self.load(self.symbols.resolve(gate)) and time.monotonic() < until:
                time.sleep(0.001)
            calls = [{"call": inner["call"], **self.plain_call(inner)} for inner in step.get("do", [])]
            self.log.append({**entry, "calls": calls} if calls else entry)

        if step.get("kind") == "stream":
            function: Any = STREAM_CALLBACK(lambda _stream, status, _data: run(status))
        else:
            function = HOST_FUNCTION(lambda _data: run())
        self.callbacks[step["callback"]] = function, ctypes.cast(function, ctypes.c_void_p).value or 0
        return {}

    def do_log(self, step: dict[str, Any]) -> dict[str, Any]:
        until = time.monotonic() + step.get("within_ms", 2000) / 1000
        while len(self.log) < step["log"] and time.monotonic() < until:
            time.sleep(0.001)
        found, self.log[:] = list(self.log), []
        return {"log": found}

    def do_read(self, step: dict[str, Any]) -> dict[str, Any]:
        kind = VALUE_TYPES[step.get("type", "u32")]
        values = (kind * step.get("count", 1)).from_address(self.symbols.resolve(step["read"]))
        return {"values": list(values)}

    def do_write(self, step: dict[str, Any]) -> dict[str, Any]:
        self.store(self.symbols.resolve(step["write"]), step["value"])
        return {}

    def do_buffer(self, step: dict[str, Any]) -> dict[str, Any]:
        memory = mmap.mmap(-1, step["nbytes"])
        memory.write(bytes([step.get("fill", 0)]) * step["nbytes"])
        place = (ctypes.c_char * step["nbytes"]).from_buffer(memory)
        self.buffers.append((memory, place))
        self.symbols.bind(step["buffer"], "ptr", ctypes.addressof(place), step["nbytes"])
        return {}

    def do_sleep(self, step: dict[str, Any]) -> dict[str, Any]:
        time.sleep(step["sleep"] / 1000)
        return {}

    def do_end_thread(self, step: dict[str, Any]) -> dict[str, Any]:
        self.threads.pop(step["end_thread"]).put(None)
        time.sleep(0.05)
        return {}

    def do_restart(self, step: dict[str, Any]) -> dict[str, Any]:
        """The first step of a new process."""
        return {}

    @staticmethod
    def store(address: int, value: int) -> None:
        ctypes.c_uint32.from_address(address).value = value

    @staticmethod
    def load(address: int) -> int:
        return ctypes.c_uint32.from_address(address).value


def finished(answer: Any) -> dict[str, Any]:
    if isinstance(answer, BaseException):
        raise answer
    found: dict[str, Any] = answer
    return found


def main() -> int:
    request = json.load(sys.stdin)

    def emit(line: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    Machine(request["patience_ms"], emit).play(request["steps"])
    # Gates may be closed and threads inside the driver: leave without a word to either.
    os._exit(0)


if __name__ == "__main__":
    main()
