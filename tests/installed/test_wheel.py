"""The wheel in fresh environments: beside torch, and where torch is not installed at all. `make wheel` makes it."""

from __future__ import annotations

import os
import subprocess
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.wheel

WITH_TORCH = """
import torch, kernel_pytorch.functional as F
x = torch.randn(8, 1000)
torch.testing.assert_close(F.rms_norm(x), torch.nn.functional.rms_norm(x, (1000,), eps=1e-6))
"""
WITHOUT_TORCH = """
import importlib.util, sys
assert importlib.util.find_spec("torch") is None
import kernel_pytorch
from kernel_pytorch.hardware import detect_available_devices
assert detect_available_devices(), "no device at all, not even the CPU"
assert kernel_pytorch.explain("rms_norm_forward", shape=[8, 1000], dtype="fp32")
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="session")
def wheel() -> Path:
    found = sorted((ROOT / "dist").glob("kernel_pytorch-*_x86_64.whl"))
    if not found:
        pytest.skip("no wheel in dist/: run `make wheel`")
    return found[-1]


@pytest.fixture(scope="session")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment that holds the wheel and nothing else."""
    where = tmp_path_factory.mktemp("environment")
    venv.create(where, with_pip=True)
    command = [where / "bin/pip", "install", "--quiet", "--no-index", wheel]
    subprocess.run(command, check=True, capture_output=True, cwd=where)
    return where


def run(environment: Path, *command: str | Path, **variables: str) -> str:
    # PYTHONPATH would let the checkout shine through.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    inherited["KERNEL_PYTORCH_CACHE_DIR"] = str(environment / "cache")
    done = subprocess.run(command, capture_output=True, text=True, cwd=environment, env={**inherited, **variables})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_tag_is_independent_of_the_python_version(wheel: Path) -> None:
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    assert "manylinux_2_34_x86_64" in wheel.name


def test_holds_no_torch_and_stays_small(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if "libtorch" in name or "libc10" in name]
    assert any(name.endswith("lib/libkernel_pytorch_torch.so") for name in names)
    assert wheel.stat().st_size < 12 * 1024 * 1024


def test_works_without_torch(environment: Path) -> None:
    run(environment, environment / "bin/python", "-c", WITHOUT_TORCH)


def test_works_beside_torch(environment: Path) -> None:
    """Lends the folder of the torch that runs the tests: installing it again would cost minutes."""
    import torch

    packages = Path(torch.__file__).parents[1]
    code = f"import sys; sys.path.append({str(packages)!r})\n{WITH_TORCH}"
    run(environment, environment / "bin/python", "-c", code, ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16")


def test_command_is_the_program_of_the_package(environment: Path) -> None:
    version = run(environment, environment / "bin/kpt", "version")
    assert version.strip()
    assert version == run(environment, environment / "bin/python", "-m", "kernel_pytorch", "version")
    with pytest.raises(AssertionError, match="no-such-command"):
        run(environment, environment / "bin/kpt", "no-such-command")


def test_find_package_works_inside_the_wheel(environment: Path, tmp_path: Path) -> None:
    package = next(environment.glob("lib/python*/site-packages/kernel_pytorch"))
    run(environment, "cmake", "-S", ROOT / "examples/cpp", "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={package}")
    run(environment, "cmake", "--build", tmp_path)
    assert "largest difference" in run(environment, tmp_path / "normalise")
