"""The C interface from C programs (a test of every function, and the example of calling an op), compiled here as C11,
plain and (where the compiler can) with AddressSanitizer's leak check on the program, which sees every text that was not
handed back."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from kernel_pytorch._paths import library_path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [Path(__file__).with_name("c_interface.c"), ROOT / "examples" / "c" / "normalise.c"]
INCLUDE = (
    library_path("kernel_pytorch").parents[1] / "include"
)  # of an installed package; the checkout's root otherwise


@pytest.mark.parametrize("flags", [[], ["-fsanitize=address"]], ids=["plain", "asan"])
@pytest.mark.parametrize("source", SOURCES, ids=["every_function", "example"])
def test_c_program(tmp_path: Path, environment: dict[str, str], source: Path, flags: list[str]) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = library_path("kernel_pytorch")
    program = tmp_path / "c_interface"
    include = ROOT if (ROOT / "kernel_pytorch" / "c").exists() else INCLUDE
    command = [compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-g", f"-I{include}", *flags]
    subprocess.run(
        [*command, str(source), str(library), f"-Wl,-rpath,{library.parent}", "-lm", "-o", str(program)], check=True
    )
    result = subprocess.run([str(program)], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
