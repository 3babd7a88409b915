"""`python -m kernel_pytorch ...` becomes `kpt ...`: the program next to the package, or of the checkout's build.
Without words it is the doctor."""

from __future__ import annotations

import os
import sys

from ._paths import program_path

if __name__ == "__main__":
    try:
        program = str(program_path("kpt"))
    except ImportError as error:
        sys.exit(str(error))
    os.environ.setdefault("KERNEL_PYTORCH_PYTHON", sys.executable)
    os.execv(program, [program, *(sys.argv[1:] or ["doctor"])])
