"""Compiles a step: C++ with the reader's g++, CUDA C++ with NVRTC through `kpt compile`. Results are kept by text."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

LEARN = Path(__file__).resolve().parents[1]
FLAGS = ["-std=c++20", "-Wall", "-Wextra"]
STEP = [*FLAGS, "-O3", "-march=native", "-fopenmp"]
# A CUDA source for the CPU: shared memory needs addresses of 32 bits, and headers of support/on_cpu come first.
ON_CPU = [*FLAGS, "-O1", "-fno-pie", "-no-pie", "-Wno-unknown-pragmas", f"-I{LEARN / 'support/on_cpu'}"]
CHECK = [*ON_CPU, "-O0"]  # exercises are small, and the reader waits for the compiler


class NoCompilerError(RuntimeError):
    """There is no NVRTC on this machine; the message has the cure."""


def cache_folder() -> Path:
    named = os.environ.get("KERNEL_PYTORCH_CACHE_DIR")
    general = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = (Path(named) if named else Path(general) / "kernel_pytorch") / "learn"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _shipped_headers() -> list[str]:
    """-I for #include "kernel_pytorch/...": the checkout, or the wheel's include folder."""
    return [
        f"-I{folder}" for folder in (LEARN.parent, LEARN.parent / "include") if (folder / "kernel_pytorch").is_dir()
    ]


def _name_of(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _support() -> bytes:
    return b"".join(path.read_bytes() for path in sorted((LEARN / "support").rglob("*")) if path.is_file())


def compile_cpp(source: Path, flags: list[str], includes: Path | None = None) -> Path:
    """The program, compiled where this text was not compiled before. Raises RuntimeError with the compiler's words.
    `includes` is a file that the source includes as EXERCISES."""
    compiler = os.environ.get("CXX", "g++")
    words = [*flags, *_shipped_headers()]
    if includes is not None:
        words.append(f'-DEXERCISES="{includes.resolve()}"')
    texts = [path.read_bytes() for path in sorted(source.parent.iterdir()) if path.suffix in (".cpp", ".cu", ".h")]
    own = includes.read_bytes() if includes is not None else b""
    machine = Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0] if Path("/proc/cpuinfo").exists() else b""
    kept = re.sub(rb"(cpu MHz|bogomips)[^\n]*", b"", machine)
    key = _name_of(" ".join([compiler, *words]).encode(), str(source).encode(), *texts, own, _support(), kept)
    program = cache_folder() / key
    if program.exists():
        return program
    unfinished = program.with_suffix(f".{os.getpid()}")
    try:
        done = subprocess.run(
            [compiler, *words, str(source), "-o", str(unfinished)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise RuntimeError(f"{compiler} is not there; install g++ 11 or later, or name another in CXX") from None
    if done.returncode != 0:
        raise RuntimeError(f"{source.name} does not compile:\n{done.stderr}")
    unfinished.replace(program)
    return program


def device_text(source: Path) -> str:
    """A CUDA source with its includes of ../support written out: NVRTC only knows the shipped device sources."""

    def written_out(found: re.Match[str]) -> str:
        return (source.parent / found[1]).read_text()

    return re.sub(r'^#include "(\.\./[^"]+)"$', written_out, source.read_text(), flags=re.MULTILINE)


def compile_cuda(source: Path, entry: str, architecture: str) -> tuple[Path, dict[str, Any]]:
    """The cubin, which holds every kernel of the source, and what the compiler said: registers, spill_bytes."""
    # Imported late: compiling C++ does not need the package.
    from kernel_pytorch._paths import program_path

    program = program_path("kpt")
    text = device_text(source)
    key = _name_of(text.encode(), architecture.encode(), str(program.stat().st_mtime_ns).encode())
    cubin, report = cache_folder() / f"{key}.cubin", cache_folder() / f"{key}.json"
    if not report.exists():
        inlined = cache_folder() / f"{key}.{os.getpid()}.cu"
        inlined.write_text(text)
        words = ["compile", "--source", inlined, "--entry", entry, "--arch", architecture, "--output", cubin, "--json"]
        done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
        inlined.unlink()
        if "no NVRTC" in done.stderr:
            raise NoCompilerError(f"{source.name} was not compiled: {done.stderr.strip()}")
        if done.returncode != 0:
            raise RuntimeError(f"{source.name} does not compile: {done.stderr.strip()}")
        report.write_text(done.stdout)
    kernel: dict[str, Any] = json.loads(report.read_text())["kernels"][0]
    return cubin, kernel
