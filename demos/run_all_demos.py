"""Runs every demo and says which failed: python3 run_all_demos.py --quick"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

DEMOS = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute on two cores")
    parser.add_argument("--validate", action="store_true", help="no timing")
    words = [f"--{name}" for name, given in vars(parser.parse_args()).items() if given]
    failed, start = [], time.perf_counter()
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")}
    demos = sorted(path for path in DEMOS.glob("*/*.py"))
    for demo in demos:
        began = time.perf_counter()
        done = subprocess.run([sys.executable, str(demo), *words], env=environment, check=False)
        print(f"  {demo.relative_to(DEMOS)}: exit {done.returncode}, {time.perf_counter() - began:.1f} s\n", flush=True)
        if done.returncode != 0:
            failed.append(str(demo.relative_to(DEMOS)))
    passed = f"{len(demos) - len(failed)} of {len(demos)} demos passed in {time.perf_counter() - start:.0f} s"
    print(passed + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
