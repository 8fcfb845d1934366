"""Pass structs by value: NumPy's structured scalars, whose bytes are the struct's.

Needs NVRTC: pip install 'kina[nvrtc]'.
"""

import sys

import numpy as np

import kina

SOURCE = r"""
struct Body { float position[3]; double mass; unsigned char kind; };
struct Step { float seconds; Body body; };

extern "C" __global__ void move(float *x, double *momentum, Step step, float speed, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    x[i] = step.body.position[i % 3] + speed * step.seconds * i;
    momentum[i] = step.body.kind == 7 ? step.body.mass * speed : -1.0;
}
"""

# align=True lays the fields out as a C compiler does: the gaps are part of the struct.
BODY = np.dtype([("position", "f4", 3), ("mass", "f8"), ("kind", "u1")], align=True)
STEP = np.dtype([("seconds", "f4"), ("body", BODY)], align=True)


def main() -> None:
    step = np.array((0.5, ([1.0, 2.0, 3.0], 4.0, 7)), STEP)[()]
    count = 1000
    with kina.session("cuda:0") as s, s.raw("structs") as raw:
        x, momentum = s.zeros(count, "f32"), s.zeros(count, "f64")
        signature = f"out f32[], out f64[], bytes[{STEP.itemsize}], f32, u32"
        # The driver tells where each parameter lies and how large it is: a signature of another size is refused.
        move = raw.module(SOURCE).function("move", signature)
        offset, nbytes = move.parameters[2]
        print(f"Step: {nbytes} bytes at byte {offset} of the parameters, {STEP.itemsize} in NumPy")
        move.launch(kina.LaunchConfig.linear(count), x, momentum, step, 2.0, count)
        try:
            move.launch(kina.LaunchConfig.linear(count), x, momentum, step["body"], 2.0, count)
        except kina.ArgumentError as error:
            print(f"a Body instead: {error}")
        i = np.arange(count, dtype=np.float32)
        right = np.array_equal(s.to_host(x), step["body"]["position"][np.arange(count) % 3] + i)
        print(f"x[:3] = {s.to_host(x)[:3]}, momentum = {s.to_host(momentum)[0]}")
        if not right or (s.to_host(momentum) != 8.0).any():
            sys.exit("struct_args: wrong result")


if __name__ == "__main__":
    try:
        main()
    except kina.UnavailableError as error:
        sys.exit(f"struct_args: {error}")
