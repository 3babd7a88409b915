"""Every function of kernel_pytorch.functional as on a device without kernels, compiled whole, with gradients: run by
test_portable.py in a process of its own, since portable.force() is for good.

Values and gradients are compared with fp64 as the fuzzer does. One call of each that is not refused.

python portable_compiled.py BACKEND FIRST STEP [NAMES]: every STEP-th function from the FIRST on, or those named.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from kernel_pytorch._ops import portable

from kernel_pytorch import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fuzz.generators import GENERATORS, draw_case, run_case

CALLS = 1
# What the way through a compiler cannot be asked of, and why.
NOT_COMPILED = dict.fromkeys(
    ("linear_attention_step_", "delta_rule_step_"),
    "torch's auto_functionalized takes no op that has an argument named mode",
)


def accepted_cases(name: str) -> list[Any]:
    found = []
    for call in range(60):
        case = draw_case(name, 5, call)
        if case.refused == "":
            found.append(case)
        if len(found) == CALLS:
            break
    assert found, name
    return found


def main() -> None:
    portable.force()
    torch._dynamo.config.recompile_limit = 64
    backend, wrong, runs = sys.argv[1], [], 0
    names = sys.argv[4:] or sorted(set(GENERATORS) - set(NOT_COMPILED))[int(sys.argv[2]) :: int(sys.argv[3])]
    for name in names:
        plain = getattr(functional, name)
        for case in accepted_cases(name):
            torch._dynamo.reset()
            setattr(functional, name, torch.compile(plain, backend=backend, fullgraph=True))
            try:
                outcome, text = run_case(name, case, lambda _: None)
            except Exception as error:  # a compiler's failure is a finding like another
                outcome, text = "finding", f"{type(error).__name__}: {str(error)[:600]}"
            setattr(functional, name, plain)
            runs += 1
            if outcome == "finding":
                wrong.append(f"{name}({case.text()}): {text}")
    print(f"{runs} calls of {len(names)} functions", *wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
