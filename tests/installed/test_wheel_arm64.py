"""The cross-compiled wheel: what it holds and asks for, and its program under qemu. `make wheel-arm64` makes it."""

from __future__ import annotations

import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLCHAIN = "aarch64-linux-gnu"
pytestmark = pytest.mark.wheel


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = sorted((ROOT / "dist").glob("kernel_pytorch-*_aarch64.whl"))
    if not found:
        pytest.skip("no arm64 wheel in dist/: run `make wheel-arm64`")
    assert re.search(r"-py3-none-manylinux_2_\d+_aarch64\.whl$", found[-1].name)
    where = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(found[-1]) as wheel:
        wheel.extractall(where)
    return where


def test_libraries_are_arm64s_and_ask_for_torch_where_they_need_it(unpacked: Path) -> None:
    needed = {}
    for library in unpacked.glob("kernel_pytorch/lib/*.so"):
        shown = subprocess.run(["readelf", "-hd", library], check=True, capture_output=True, text=True).stdout
        assert "AArch64" in shown, library.name
        needed[library.name] = set(re.findall(r"NEEDED.*\[(.*)\]", shown))
    assert needed.keys() == {f"libkernel_pytorch{name}.so" for name in ("", "_torch", "_jax")}
    assert "libtorch_cpu.so" in needed["libkernel_pytorch_torch.so"]
    assert not any("torch_cpu" in name for name in needed["libkernel_pytorch.so"] | needed["libkernel_pytorch_jax.so"])
    assert any(name.startswith("libsqlite3-") for name in needed["libkernel_pytorch.so"]), "SQLite is not grafted"
    assert not list(unpacked.rglob("libtorch*"))


def test_its_program_computes(unpacked: Path, tmp_path: Path) -> None:
    if shutil.which("qemu-aarch64") is None:
        pytest.skip("no qemu-aarch64: tools/setup --arm64 installs it")
    program = unpacked / "kernel_pytorch/bin/kpt"
    program.chmod(0o755)
    command = ["qemu-aarch64", "-L", f"/usr/{TOOLCHAIN}", program, "--cache-dir", tmp_path]
    for words in (["version"], ["verify", "rms_norm", "--shape", "5x100", "-q"]):
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
