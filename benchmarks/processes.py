"""Processes of a benchmark, one for each of its models: all of them prepare at once, which is compiling mostly; then
one after the other measures, alone on the machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_READY, _GO = "ready", "go"


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def wait_for_turn() -> bool:
    """Of a process that has prepared: True when it is its turn to measure, False where it is not wanted any more."""
    print(_READY, flush=True)
    return sys.stdin.readline().strip() == _GO


class Process:
    """The script itself, run again with `options` and --output FILE, where it keeps a list of its results so far."""

    def __init__(self, name: str, options: list[str], output: Path) -> None:
        self.name, self.output = name, output
        output.unlink(missing_ok=True)
        command = [sys.executable, *sys.argv, *options, "--output", str(output)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.is_ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == _READY:
                self.is_ready.set()
        self.is_ready.set()  # it has ended

    def measure(self, seconds: float) -> list[dict[str, Any]]:
        """Lets it measure, for so long at most; what it has then."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{_GO}\n")
            self.process.stdin.flush()
            self.process.wait(timeout=max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            log(f"{self.name}: its {seconds:.0f} seconds are over")
        except BrokenPipeError:
            log(f"{self.name}: its process has ended by itself")
        self.end()
        return json.loads(self.output.read_text()) if self.output.exists() else []

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def measured(
    names: list[str], options: Callable[[str], list[str]], folder: Path, seconds: tuple[float, float, float]
) -> Iterator[list[dict[str, Any]]]:
    """The results of each name's process, in order. Seconds: to prepare, all of them; to measure, each; for all."""
    to_prepare, each, limit = seconds
    began = time.monotonic()
    processes = [Process(name, options(name), folder / f"{index}.json") for index, name in enumerate(names)]
    try:
        for one in processes:
            if not one.is_ready.wait(max(min(to_prepare, limit) - (time.monotonic() - began), 0.0)):
                log(f"{one.name}: it was not prepared in time")
                one.end()
        for one in processes:
            yield one.measure(min(each, limit - (time.monotonic() - began)))
    finally:
        for one in processes:
            one.end()
