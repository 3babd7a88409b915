"""Runs every demo and says which failed: python3 run_all_demos.py --quick"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import runpy
import sys
import time
from pathlib import Path

# Before torch is loaded: its oneDNN dies on some virtual machines that show AMX (docs/setup.md).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
import common  # noqa: F401  finds the package in a clone
import kernel_pytorch.functional  # noqa: F401  every demo is a fork: loading takes longer than most of them

DEMOS = Path(__file__).resolve().parent


def run(demo: Path, words: list[str]) -> None:
    sys.argv = [str(demo), *words]
    runpy.run_path(str(demo), run_name="__main__")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute on two cores")
    parser.add_argument("--validate", action="store_true", help="no timing")
    words = [f"--{name}" for name, given in vars(parser.parse_args()).items() if given]
    failed, start = [], time.perf_counter()
    demos = sorted(path for path in DEMOS.glob("*/*.py"))
    for demo in demos:
        began = time.perf_counter()
        process = multiprocessing.get_context("fork").Process(target=run, args=(demo, words))
        process.start()
        process.join()
        took = time.perf_counter() - began
        print(f"  {demo.relative_to(DEMOS)}: exit {process.exitcode}, {took:.1f} s\n", flush=True)
        if process.exitcode != 0:
            failed.append(str(demo.relative_to(DEMOS)))
    passed = f"{len(demos) - len(failed)} of {len(demos)} demos passed in {time.perf_counter() - start:.0f} s"
    print(passed + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
