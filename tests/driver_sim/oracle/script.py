"""Write scenarios: a Script turns calls of its methods into steps, which are plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["KERNELS", "SCENARIOS", "Scenario", "Script", "scenario"]

KERNELS = {"file": "kernels.ptx"}

#: Flags of cuStreamWaitValue32: wait until the word is at least the value.
AT_LEAST = 0


@dataclass
class Scenario:
    name: str
    about: str
    devices: int
    steps: list[dict[str, Any]] = field(default_factory=list)


SCENARIOS: list[Scenario] = []


def scenario(about: str, *, devices: int = 1) -> Callable[[Callable[[Script], None]], Callable[[Script], None]]:
    """Register the function that writes a scenario; its name becomes the scenario's."""

    def register(write: Callable[[Script], None]) -> Callable[[Script], None]:
        script = Script()
        write(script)
        SCENARIOS.append(Scenario(write.__name__, about, devices, script.steps))
        return write

    return register


class Script:
    """Steps in the order of the calls. ``s.cuStreamCreate("&s1", 1)`` is the call of that driver function."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.gates = 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *args, **more: self.call(name, *args, **more)

    def call(self, name: str, *args: Any, **more: Any) -> None:
        """A driver call. `on`: its thread. `gate`: the word that is set if the call does not return before.

        `either` lists results of which any may come; `any` names what is not compared at all.
        """
        self.steps.append({"call": name, "args": list(args), **more})

    def step(self, **step: Any) -> None:
        self.steps.append(step)

    # Beginnings ------------------------------------------------------------------------------------------

    def start(self, device: int = 0, ctx: str = "ctx0") -> None:
        """The primary context of the device, current in the main thread; pinned words for gates at $words."""
        self.cuInit(0)
        self.cuDevicePrimaryCtxRetain(f"&{ctx}", device)
        self.cuCtxSetCurrent(f"${ctx}")
        self.cuMemHostAlloc("&words", 16384, 1)

    def module(self, *functions: str) -> None:
        """The kernels that both drivers know, each loaded under its name."""
        self.cuModuleLoadData("&module", KERNELS)
        for name in functions:
            self.cuModuleGetFunction(f"&{name}", "$module", name)
            self.cuFuncLoad(f"${name}")

    def restart(self, about: str) -> None:
        """Go on in a new process: symbols and gates begin anew."""
        self.gates = 0
        self.step(restart=about)

    # Gates -----------------------------------------------------------------------------------------------

    def gate(self, stream: str, **more: Any) -> str:
        """Hold the stream until a word is set; returns the word, for `open` and for a call's `gate`."""
        word = f"$words+{64 * self.gates}"
        self.gates += 1
        self.cuStreamWaitValue32(stream, word, 1, AT_LEAST, **more)
        return word

    def open(self, word: str) -> None:
        self.step(write=word, value=1)

    def read(self, place: str, count: int = 1, kind: str = "u32", **more: Any) -> None:
        self.step(read=place, count=count, type=kind, **more)

    def buffer(self, name: str, nbytes: int = 4096, fill: int = 0) -> None:
        """Pageable host memory."""
        self.step(buffer=name, nbytes=nbytes, fill=fill)

    def callback(self, name: str, *calls: tuple[Any, ...], **more: Any) -> None:
        """A host function that notes that it ran; `calls` are made inside it."""
        do = [{"call": call[0], "args": list(call[1:])} for call in calls]
        self.step(callback=name, **({"do": do} if do else {}), **more)

    def log(self, entries: int, **more: Any) -> None:
        """What ran so far, after waiting for so many entries."""
        self.step(log=entries, **more)

    # Work ------------------------------------------------------------------------------------------------

    def launch(
        self, function: str, stream: Any, params: list[Any], blocks: int = 1, threads: int = 32, **more: Any
    ) -> None:
        self.cuLaunchKernel(f"${function}", blocks, 1, 1, threads, 1, 1, 0, stream, params, None, **more)

    def fill(self, stream: Any, address: str, value: float, n: int = 16, **more: Any) -> None:
        self.launch("fill", stream, [["ptr", address], ["f32", value], ["u32", n]], **more)

    def trap(self, stream: Any, **more: Any) -> None:
        self.launch("trap", stream, [], **more)
