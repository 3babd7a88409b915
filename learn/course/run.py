"""Runs a step's program and reads what it says; checks exercises."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from . import build
from .catalog import Step
from .lines import Result, parse

GPU_ARCHITECTURE = "sm_90a"  # what a CUDA step is compiled for where there is no GPU


def has_gpu() -> bool:
    # Imported late: the C++ steps do not need torch.
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def run(step: Step, quick: bool, hear: Callable[[str], None] = lambda line: None) -> Result:
    """Compiles and runs it; a CUDA step needs a GPU here (see preview). `hear` gets each line as it comes."""
    words = ["--quick"] if quick else []
    if step.source.endswith(".cpp"):
        command = [str(build.compile_cpp(step.path / step.source, build.STEP)), *words]
    else:
        program = "run.py" if step.needs_gpu else step.source
        command = [sys.executable, str(step.path / program), *words]
    said = []
    # Threads that spin while they wait are faster on a quiet machine; a quick run may share its cores.
    environment = {**os.environ, **({"OMP_WAIT_POLICY": "passive"} if quick else {})}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            hear(line.rstrip("\n"))
    result = parse("".join(said))
    if process.returncode != 0 and not result.failure:
        result.failure = f"step {step.number} ended with exit code {process.returncode}"
    return result


def preview(step: Step) -> Result:
    """A CUDA step without a GPU: its result where a CPU can run it thread by thread, and what the compiler says."""
    result = Result()
    if step.runs_on_cpu:
        program = build.compile_cpp(step.path / "on_cpu.cpp", build.ON_CPU)
        done = subprocess.run([program], capture_output=True, text=True, check=False)
        result = parse(done.stdout)
        if done.returncode != 0:
            result.failure = f"step {step.number}: the kernel's result is wrong on the CPU"
    try:
        _, report = build.compile_cuda(step.path / step.source, step.entries[0], GPU_ARCHITECTURE)
    except build.NoCompilerError as error:
        result.notes.append(str(error))
        return result
    result.notes.append(
        f"{', '.join(step.entries)} compiled for {GPU_ARCHITECTURE}: {report['registers']} registers per thread, "
        f"{report['spill_bytes']} bytes spilled"
    )
    return result


def check(step: Step, file: Path) -> int:
    """0 when all three exercises are solved; prints a line for each."""
    if not file.exists():
        raise RuntimeError(f"learn: {file} is not there; copy {step.exercises} and solve it")
    if step.exercises.suffix == ".py":
        environment = {**os.environ, "PYTHONPATH": f"{build.LEARN}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, str(step.path / "check.py"), str(file.resolve())]
        return subprocess.run(command, env=environment, check=False).returncode
    program = build.compile_cpp(step.path / "check.cpp", build.CHECK, includes=file)
    return subprocess.run([program], check=False).returncode
