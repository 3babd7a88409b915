"""tools/check_layers.py passes on this tree, and notices each kind of breach."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import check_layers  # noqa: E402
import python_layers  # noqa: E402


def test_the_tree_keeps_to_its_layers() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools/check_layers.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("device/a.cpp", "tuning/store.h"),
        ("cuda/tile/a.cuh", "base/error.h"),
        ("ops/support/a.h", "ops/rope/rope.h"),
        ("ops/support/a.cpp", "expression/text.h"),
        ("ops/engines/row_norm/a.cpp", "ops/rms_norm/rms_norm.h"),
        ("ops/engines/row_norm/a.cpp", "ops/engines/gemm/cublaslt.h"),
        ("ops/rope/rope.cpp", "ops/softmax/shapes.h"),
        ("ops/rope/rope.cpp", "ops/operations.h"),
        ("ops/rope/rope.cpp", "torch/op.h"),
        ("ops/operations.cpp", "ops/rope/rope.h"),
        ("ops/another_root.cpp", "base/error.h"),
        ("plan/a.cpp", "ops/rope/table.h"),
        ("torch/ops/matmul.cpp", "ops/engines/gemm/cublaslt.h"),
        ("torch/ops/matmul.cpp", "ops/support/cuda_support.h"),
        ("torch/ops/matmul.cpp", "ops/rope/table.h"),
        ("ops/rope/rope_test.cpp", "torch/op.h"),
    ],
)
def test_an_include_that_the_table_does_not_allow(path: str, target: str) -> None:
    layers = check_layers.read_layers()
    assert check_layers.check_include(f"kernel_pytorch/{path}", f"kernel_pytorch/{target}", layers)


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("device/cuda/a.cpp", "device/b.h"),
        ("cuda/tile/a.cuh", "base/fixed_width.h"),
        ("ops/rope/cuda/host.cpp", "ops/rope/table.h"),
        ("ops/rope/rope.cpp", "ops/softmax/softmax.h"),
        ("ops/rope/rope.cpp", "ops/engines/pointwise/cuda/math.cuh"),
        ("ops/operations.cpp", "registry/op_entry.h"),
        ("ops/engines/gemm/sm90/host.cpp", "ops/engines/pointwise/kind_cuda.h"),
        ("torch/ops/rope.cpp", "ops/rope/rope.h"),
        ("ops/rope/rope_test.cpp", "ops/softmax/shapes.h"),
    ],
)
def test_an_include_that_the_table_allows(path: str, target: str) -> None:
    layers = check_layers.read_layers()
    assert check_layers.check_include(f"kernel_pytorch/{path}", f"kernel_pytorch/{target}", layers) is None


def test_a_header_of_another_layer_s_library() -> None:
    layers = check_layers.read_layers()
    libraries = {row[0]: check_layers.entries(row[1]) for row in check_layers.read_table("Libraries")}
    assert check_layers.check_library("kernel_pytorch/plan/a.cpp", "nlohmann/json.hpp", layers, libraries)
    assert check_layers.check_library("kernel_pytorch/c/a.cpp", "nlohmann/json.hpp", layers, libraries) is None


STOREYS = [
    python_layers.Storey("low", ("__init__", "low/")),
    python_layers.Storey("high", ("high/", "low/listed")),
    python_layers.Storey("names", ("names",)),
]


def problems(tmp_path: Path, files: dict[str, str]) -> list[str]:
    """What the checker says of a package of these files."""
    paths = []
    for name, text in {"__init__.py": "", "low/__init__.py": "", "high/__init__.py": "", **files}.items():
        path = tmp_path / "python/kernel_pytorch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        paths.append(f"python/kernel_pytorch/{name}")
    return python_layers.check(tmp_path, paths, STOREYS)


def test_python_that_keeps_the_rules(tmp_path: Path) -> None:
    assert not problems(
        tmp_path,
        {
            "low/a.py": "import os\nfrom . import b\n",
            "low/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import a\n",
            "low/listed.py": "from ..high import c\n",
            "high/c.py": "from ..low.a import os\ndef f():\n    import json  # slow to load\n",
            "names.py": '"""Names."""\nfrom .high.c import f\n__all__ = ["f"]\n',
        },
    )


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"low/a.py": "from ..high import c\n", "high/c.py": ""}, "imports kernel_pytorch.high.c, which is high"),
        ({"low/a.py": "def f():\n    from ..high import c  # late\n", "high/c.py": ""}, "which is high"),
        ({"low/a.py": "from . import b\n", "low/b.py": "from .a import x\n"}, "import cycle"),
        # By way of a package that lists the module which imports it.
        ({"high/__init__.py": "from .c import x\n", "high/c.py": "from ..low.listed import y\n",
          "low/listed.py": "from ..high.d import z\n", "high/d.py": ""}, "import cycle"),
        ({"low/a.py": "def f():\n    import json\n"}, "an import inside a function"),
        ({"low/a.py": "def f():\n    import json  # isort: skip\n"}, "an import inside a function"),
        ({"names.py": "def f():\n    return 1\n"}, "holds more than imports"),
        ({"elsewhere.py": ""}, "is in no row"),
    ],
)  # fmt: skip
def test_python_that_breaks_a_rule(files: dict[str, str], expected: str, tmp_path: Path) -> None:
    found = problems(tmp_path, files)
    assert len(found) == 1 and expected in found[0], found
