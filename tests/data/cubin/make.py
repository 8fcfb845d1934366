"""Make the binary images of this folder again.

    python tests/data/cubin/make.py --ptxas PTXAS --ptxas12 PTXAS --fatbinary FATBINARY

The committed ones were made with ptxas and fatbinary of CUDA 13.0.88 (PyPI: nvidia-cuda-nvcc==13.0.88) and, for the
older format of the file, with ptxas of CUDA 12.4.131 (PyPI: nvidia-cuda-nvcc-cu12==12.4.131).
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "driver_sim" / "kernels.ptx"
LAYOUTS = HERE / "layouts.ptx"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for tool in ("ptxas", "ptxas12", "fatbinary"):
        parser.add_argument(f"--{tool}", required=True)
    tools = parser.parse_args()

    def assemble(tool: str, arch: str, source: Path, name: str) -> None:
        subprocess.run([tool, f"-arch={arch}", source, "-o", HERE / name], check=True)

    assemble(tools.ptxas, "sm_80", KERNELS, "kernels_sm80.cubin")
    assemble(tools.ptxas, "sm_90", KERNELS, "kernels_sm90.cubin")
    assemble(tools.ptxas, "sm_90a", KERNELS, "kernels_sm90a.cubin")
    assemble(tools.ptxas, "sm_90", LAYOUTS, "layouts_sm90.cubin")
    assemble(tools.ptxas12, "sm_90", LAYOUTS, "layouts_sm90_cuda12.cubin")
    fatbin = [tools.fatbinary, "-64", "--compress-mode=none"]
    cubins = [f"--image3=kind=elf,sm={sm},file={HERE / f'kernels_sm{sm}.cubin'}" for sm in (80, 90)]
    ptx = f"--image3=kind=ptx,sm=75,file={KERNELS}"
    subprocess.run([*fatbin, "--create", HERE / "kernels_sm80_sm90.fatbin", *cubins], check=True)
    subprocess.run([*fatbin, "--create", HERE / "kernels_sm80_ptx.fatbin", cubins[0], ptx], check=True)


if __name__ == "__main__":
    main()
