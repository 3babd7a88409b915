"""A C++ user's way in: install, find_package, include, link, run; against a tree that knows nothing of the checkout."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--prefix", where)
    return where


def test_example_builds_and_runs(prefix: Path, tmp_path: Path) -> None:
    run("cmake", "-S", ROOT / "examples/cpp", "-B", tmp_path, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path)
    assert "largest difference" in run(tmp_path / "normalise", KERNEL_PYTORCH_CACHE_DIR=str(tmp_path / "cache"))


def test_torch_modules_agree_with_torch_and_learn(prefix: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "CMakeLists.txt").write_text((ROOT / "examples/libtorch/CMakeLists.txt").read_text())
    (tmp_path / "train.cpp").write_text(f'#include "{ROOT}/tests/installed/torch_modules_check.cpp"\n')
    paths = f"-DCMAKE_PREFIX_PATH={prefix};{torch.utils.cmake_prefix_path}"
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", "-G", "Ninja", "-DCMAKE_CXX_FLAGS=-O0", paths)
    run("cmake", "--build", tmp_path / "build")
    shown = run(tmp_path / "build/train", KERNEL_PYTORCH_CACHE_DIR=str(tmp_path / "cache"), OMP_NUM_THREADS="1")
    assert "0 of the comparisons failed" in shown and shown.count("step 299: loss") == 2


def test_every_installed_header_compiles_without_the_checkout(prefix: Path) -> None:
    include = prefix / "include"
    headers = sorted(path.relative_to(include) for path in include.rglob("*.h"))
    assert Path("kernel_pytorch/ops/rms_norm/rms_norm.h") in headers
    public = [h for h in headers if h.parts[1] == "ops" and (len(h.parts) == 3 or h.stem == h.parts[2])]
    text = "".join(f'#include "{header}"\n' for header in public)
    command = ["g++", "-std=c++20", "-fsyntax-only", "-I", str(include), "-x", "c++", "-"]
    # From a folder without our sources: a quoted include looks there first.
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=prefix)
    assert done.returncode == 0, done.stderr


def test_installed_tool_runs_from_another_place(prefix: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    prefix.rename(moved)
    try:
        assert run(moved / "bin" / "kpt", "version").strip()
    finally:
        moved.rename(prefix)


def test_no_path_of_this_machine_in_the_installed_cmake_files(prefix: Path) -> None:
    for path in (prefix / "lib/cmake/kernel_pytorch").glob("*.cmake"):
        assert str(ROOT) not in path.read_text(), path.name
