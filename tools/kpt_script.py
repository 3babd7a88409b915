#!/usr/bin/env python3
"""The wheel's `kpt`: becomes the C++ program inside the package, without importing the package (or torch)."""

import importlib.util
import os
import sys

spec = importlib.util.find_spec("kernel_pytorch")
if spec is None or not spec.submodule_search_locations:
    sys.exit("kpt: the package kernel_pytorch is not installed for " + sys.executable)
program = os.path.join(spec.submodule_search_locations[0], "bin", "kpt")
os.environ.setdefault("KERNEL_PYTORCH_PYTHON", sys.executable)
os.execv(program, [program, *sys.argv[1:]])
