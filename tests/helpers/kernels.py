"""PTX for tests, and what it takes to launch it.

The texts are made here so that a parameter list, a shared array or a name can be what a test needs. All of it
is valid PTX for hardware; an entry whose name begins with one that the simulated driver knows (`fill`,
`write_args`, ...) and whose parameters begin alike runs there too, any other only loads.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from helpers.cuda import KERNELS, simulation

__all__ = [
    "CLUSTER_IDS",
    "KERNELS",
    "LAYOUTS",
    "MIXED",
    "borrowed",
    "element",
    "fill_entry",
    "grid_count",
    "hungry_entry",
    "many_pointers",
    "module_text",
    "nothing_enqueued",
    "offsets_of",
    "sized_entry",
    "write_args_entry",
]

#: Bytes of a parameter of each kind.
LAYOUTS = {
    "u8": 1, "i8": 1, "bool": 1, "u16": 2, "i16": 2, "f16": 2, "bf16": 2,
    "u32": 4, "i32": 4, "f32": 4, "u64": 8, "i64": 8, "f64": 8, "c64": 8,
}  # fmt: skip

#: One of each, ordered so that sizes and alignments alternate.
MIXED = (
    "u8",
    "u16",
    "f64",
    "f16",
    "bf16",
    "bool",
    "i64",
    "i8",
    "u32",
    "i16",
    "f32",
    "u8",
    "u64",
    "i32",
    "c64",
)


def module_text(*entries: str, version: str = "7.0", target: str = "sm_70") -> str:
    """A module of these entries."""
    return "\n".join([f".version {version}", f".target {target}", ".address_size 64", *entries, ""])


def offsets_of(kinds: Sequence[str], first: int = 8) -> list[int]:
    """Where the parameters after a pointer lie: each aligned to its size."""
    offsets = []
    end = first
    for kind in kinds:
        size = LAYOUTS[kind]
        end = -(-end // size) * size
        offsets.append(end)
        end += size
    return offsets


def write_args_entry(name: str, kinds: Sequence[str]) -> str:
    """`name(u8 *to, ...)`: copies each parameter to its offset from `to`. The name begins with write_args."""
    parameters = [f".param .u64 {name}_to"]
    body = [f"ld.param.u64 %to, [{name}_to];", "st.global.u64 [%to], %to;"]
    for i, (kind, offset) in enumerate(zip(kinds, offsets_of(kinds), strict=True)):
        size = LAYOUTS[kind]
        width, register = {1: ("u8", "%h"), 2: ("u16", "%h"), 4: ("u32", "%r"), 8: ("u64", "%d")}[size]
        declared = {"f32": "f32", "f64": "f64"}.get(kind, width)
        parameters.append(f".param .{declared} {name}_{i}")
        body.append(f"ld.param.{width} {register}, [{name}_{i}];")
        body.append(f"st.global.{width} [%to+{offset}], {register};")
    return (
        f".visible .entry {name}({', '.join(parameters)})\n{{\n"
        "  .reg .b16 %h;\n  .reg .b32 %r;\n  .reg .b64 %d;\n  .reg .b64 %to;\n  " + "\n  ".join(body) + "\n  ret;\n}\n"
    )


def fill_entry(name: str = "fill", *, static_bytes: int = 0, limit: str = "") -> str:
    """`name(float *y, float value, u32 n)`, which also touches its static and its last dynamic shared byte.

    `limit` is a performance directive such as ``.maxntid 128, 1, 1``.
    """
    static = f".shared .align 1 .b8 {name}_static[{static_bytes}];" if static_bytes else ""
    use = f"mov.u32 %r6, {name}_static;\n  st.volatile.shared.u8 [%r6+{static_bytes - 1}], %h1;" if static_bytes else ""
    return f"""
.extern .shared .align 1 .b8 {name}_dynamic[];
.visible .entry {name}(.param .u64 {name}_y, .param .f32 {name}_value, .param .u32 {name}_n) {limit}
{{
  {static}
  .reg .pred %p<3>;
  .reg .f32 %f1;
  .reg .b16 %h1;
  .reg .b32 %r<8>;
  .reg .b64 %d<4>;
  mov.u16 %h1, 1;
  {use}
  mov.u32 %r1, %dynamic_smem_size;
  setp.eq.u32 %p2, %r1, 0;
  mov.u32 %r7, {name}_dynamic;
  add.u32 %r7, %r7, %r1;
  @!%p2 st.volatile.shared.u8 [%r7+-1], %h1;
  ld.param.u64 %d1, [{name}_y];
  ld.param.f32 %f1, [{name}_value];
  ld.param.u32 %r1, [{name}_n];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.u32 %r5, %r2, %r3, %r4;
  setp.ge.u32 %p1, %r5, %r1;
  @%p1 bra {name}_end;
  mul.wide.u32 %d2, %r5, 4;
  add.u64 %d3, %d1, %d2;
  st.global.f32 [%d3], %f1;
{name}_end:
  ret;
}}
"""


def hungry_entry(name: str = "fill_hungry", *, values: int = 200, registers: int = 224) -> str:
    """`name(float *y, float value, u32 n)`, which fills, and holds so many values of `y` at once while it does.

    `y` has at least so many elements. They are read in an order that nobody may change, and used from the last to the
    first, so that each needs a register until then.
    """
    loads = "\n  ".join(f"ld.volatile.global.f32 %v{i}, [%d1+{4 * i}];" for i in range(values))
    uses = "\n  ".join(f"fma.rn.f32 %f2, %f2, %v{i}, %f1;" for i in reversed(range(values)))
    return f"""
.visible .entry {name}(.param .u64 {name}_y, .param .f32 {name}_value, .param .u32 {name}_n) .maxnreg {registers}
{{
  .reg .pred %p<3>;
  .reg .f32 %f<3>;
  .reg .f32 %v<{values}>;
  .reg .b32 %r<6>;
  .reg .b64 %d<4>;
  ld.param.u64 %d1, [{name}_y];
  ld.param.f32 %f1, [{name}_value];
  ld.param.u32 %r1, [{name}_n];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.u32 %r5, %r2, %r3, %r4;
  {loads}
  mov.f32 %f2, 0f00000000;
  {uses}
  setp.ge.u32 %p1, %r5, %r1;
  @%p1 bra {name}_end;
  setp.eq.f32 %p2, %f2, 0f4640E6B7;
  @%p2 bra {name}_end;
  mul.wide.u32 %d2, %r5, 4;
  add.u64 %d3, %d1, %d2;
  st.global.f32 [%d3], %f1;
{name}_end:
  ret;
}}
"""


def sized_entry(name: str, *sizes: int) -> str:
    """An entry with parameters of these sizes that does nothing (the simulation cannot launch it)."""
    types = {1: ".b8", 2: ".b16", 4: ".b32", 8: ".b64"}
    parameters = [
        f".param {types[size]} {name}_{i}" if size in types else f".param .align 8 .b8 {name}_{i}[{size}]"
        for i, size in enumerate(sizes)
    ]
    return f".visible .entry {name}({', '.join(parameters)}) {{ ret; }}\n"


def grid_count() -> str:
    """`grid_count(u32 *seen)`: every block counts itself in seen[0], waits for all, and writes what it saw.

    To seen[1 + its number]. Ends only if all blocks are resident at once.
    """
    return """
.visible .entry grid_count(.param .u64 grid_count_seen)
{
  .reg .pred %p1;
  .reg .b32 %r<5>;
  .reg .b64 %d<4>;
  ld.param.u64 %d1, [grid_count_seen];
  atom.global.add.u32 %r1, [%d1], 1;
  mov.u32 %r2, %nctaid.x;
grid_count_wait:
  ld.volatile.global.u32 %r3, [%d1];
  setp.lt.u32 %p1, %r3, %r2;
  @%p1 bra grid_count_wait;
  mov.u32 %r4, %ctaid.x;
  mul.wide.u32 %d2, %r4, 4;
  add.u64 %d3, %d1, %d2;
  st.global.u32 [%d3+4], %r3;
  ret;
}
"""


#: `cluster_ids(u32 *to)`: block b writes the number of its cluster and its rank in it: to[2b], to[2b + 1].
CLUSTER_IDS = module_text(
    """
.visible .entry cluster_ids(.param .u64 cluster_ids_to)
{
  .reg .b32 %r<4>;
  .reg .b64 %d<4>;
  ld.param.u64 %d1, [cluster_ids_to];
  mov.u32 %r1, %ctaid.x;
  mul.wide.u32 %d2, %r1, 8;
  add.u64 %d3, %d1, %d2;
  mov.u32 %r2, %clusterid.x;
  mov.u32 %r3, %cluster_ctarank;
  st.global.u32 [%d3], %r2;
  st.global.u32 [%d3+4], %r3;
  ret;
}
""",
    version="7.8",
    target="sm_90",
)


def many_pointers(raw: Any) -> Any:
    """A function of twenty tensors."""
    kinds = ("u64",) * 19
    image = module_text(write_args_entry("write_args_pointers", kinds))
    return raw.module(image).function("write_args_pointers", ", ".join(["mut u8[]"] * 20))


def borrowed(session: Any, count: int) -> list[Any]:
    """Adopted tensors, each of which a launch leases: their owner is another Runtime. Releases go to the driver."""
    import kina

    with kina.session(kina.Runtime(0, memory=kina.memory.CudaAsyncMemoryResource(0))) as theirs:
        parts = [theirs.zeros(200, "u8") for _ in range(count)]
        theirs.synchronize()
    return [session.adopt(part) for part in parts]


@contextlib.contextmanager
def nothing_enqueued(session: Any) -> Iterator[None]:
    """The block launches nothing: neither by the session's counters nor by the simulated driver's trace."""
    sim = simulation()
    since = sim.position if sim is not None else 0
    before = session.counters().launches
    yield
    assert session.counters().launches == before
    if sim is not None:
        assert not [record for record in sim.trace(since) if record["name"].startswith("cuLaunch")]


def element(kind: str, value: Any) -> bytes:
    """The bytes of a value, by Python's own `struct` and ml_dtypes, as the device must see them."""
    if kind == "bf16":
        import ml_dtypes

        return ml_dtypes.bfloat16(value).tobytes()
    if kind == "c64":
        return struct.pack("<ff", value.real, value.imag)
    codes = {"u8": "B", "i8": "b", "bool": "?", "u16": "H", "i16": "h", "f16": "e", "u32": "I", "i32": "i",
             "f32": "f", "u64": "Q", "i64": "q", "f64": "d"}  # fmt: skip
    return struct.pack("<" + codes[kind], value)
