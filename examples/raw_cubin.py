"""Launch code that was compiled ahead of time and lies in a file: y = a * x + y on 1024 elements.

    python examples/raw_cubin.py [FILE]

Without FILE, images/saxpy.fatbin: code for several architectures, and PTX for those to come. A CUBIN holds code for one
alone, as images/saxpy_sm80.cubin does, and is refused on another, before anything runs.
"""

import sys
from pathlib import Path

import numpy as np

import kina

IMAGES = Path(__file__).parent / "images"


def main(path: Path) -> None:
    with kina.session("cuda:0") as s, s.raw("saxpy") as raw:
        exact = "sm_{}{}".format(*s.device_info.compute_capability)
        saxpy = raw.module(path).function("saxpy", "mut f32[], f32[], f32, u32")  # a Path is a file, a str is source
        x = s.from_host(np.arange(1024, dtype=np.float32))
        y = s.zeros(1024, "float32")
        saxpy.launch(kina.LaunchConfig.linear(1024), y, x, 2.0, 1024)
        result = s.to_host(y)
        code = "sm_{}{}".format(*saxpy.binary_version)
        print(f"{path.name} on {exact}: its code for {code}, {saxpy.registers} registers, y[:4] = {result[:4]}")
        if not np.array_equal(result, 2 * np.arange(1024, dtype=np.float32)):
            sys.exit("raw_cubin: wrong result")
        try:
            raw.module(IMAGES / "saxpy_sm80.cubin")
        except kina.ModuleLoadError as error:
            print(f"saxpy_sm80.cubin: {error}")
        else:
            print(f"saxpy_sm80.cubin: runs on {exact} too")


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES / "saxpy.fatbin"
    try:
        main(path)
    except kina.UnavailableError as error:
        sys.exit(f"raw_cubin: {error}")
    except kina.ModuleLoadError as error:
        sys.exit(f"raw_cubin: {path.name}: {error}")
