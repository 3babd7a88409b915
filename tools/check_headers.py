"""Compiles every header alone, so that none leans on what its includer happened to include first.

Device code (.cuh) is compiled by NVRTC instead: `kpt compile --all`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", help="torch's package folder, for the headers under torch/")
    parser.add_argument("--xla", help="the folder of XLA's headers, for the headers under jax/")
    parser.add_argument("--compiler", default="g++")
    arguments = parser.parse_args()

    headers = sorted(path.relative_to(ROOT) for path in (ROOT / "kernel_pytorch").rglob("*.h"))
    headers.remove(Path("kernel_pytorch/torch_modules.h"))  # all of torch's headers; tests/installed compiles it first
    flags = [
        "-std=c++20",
        "-fvisibility=hidden",
        "-fsyntax-only",
        "-Wall",
        "-Wextra",
        "-Werror",
        '-DKP_VERSION="0"',
        "-I",
        str(ROOT),
    ]
    level = (
        ["-march=x86-64-v3", "-DKP_ISA=v3", "-DKP_ISA_v3=1"]
        if os.uname().machine == "x86_64"
        else ["-DKP_ISA=neon", "-DKP_ISA_neon=1"]
    )

    def compile_alone(header: Path) -> str:
        extra = list(level) if header.parts[1] == "cpu" or header.name.endswith("_isa.h") else []
        if header.parts[1] == "torch":
            if not arguments.torch:
                return ""
            extra += ["-isystem", f"{arguments.torch}/include", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
        if header.parts[1] == "jax":
            if not arguments.xla:
                return ""
            extra += ["-isystem", arguments.xla]
        done = subprocess.run(
            [arguments.compiler, *flags, *extra, "-x", "c++", "-"],
            input=f'#include "{header}"\n',
            capture_output=True,
            text=True,
        )
        return f"{header}:\n{done.stderr}" if done.returncode else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = [failure for failure in pool.map(compile_alone, headers) if failure]
    for failure in failures:
        print(failure, file=sys.stderr)
    print(f"check_headers: {len(headers)} headers, {len(failures)} do not compile alone")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
