"""Runs calls and says on standard output, a line each, which one begins and what came of it.

A call that takes longer than LIMIT_SECONDS ends the process with the stacks of its threads on standard error; whoever
reads the lines knows which call that was, as for a crash.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import traceback

LIMIT_SECONDS = 5.0
FINISHED = "finished"


def main(arguments: list[str]) -> None:
    seed, first, calls = (int(word) for word in arguments[:3])
    names = arguments[3:]
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    with tempfile.TemporaryDirectory(prefix="kernel_pytorch_fuzz_") as directory:
        os.environ["KERNEL_PYTORCH_CACHE_DIR"] = directory
        import torch

        torch.set_num_threads(1)
        faulthandler.enable()
        from .generators import draw_case, run_case

        def timed(begins: bool) -> None:
            if begins:
                faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
            else:
                faulthandler.cancel_dump_traceback_later()

        def attempt(name: str, seed: int, call: int) -> tuple[str, str]:
            try:
                case = draw_case(name, seed, call)
                outcome, text = run_case(name, case, timed)
            except Exception:  # of a generator or a comparison, or one that no refusal is: seen, not passed over
                timed(False)
                return "finding", traceback.format_exc()[-1500:]
            return outcome, f"{text}; called with {case.text()}" if text else ""

        for name in names:
            for call in range(first, first + calls):
                say({"begins": [name, call]})
                outcome, text = attempt(name, seed, call)
                say({"outcome": outcome, "text": text})
        say({"outcome": FINISHED})


def say(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
