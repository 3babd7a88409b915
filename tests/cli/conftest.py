"""kpt as a user runs it: the built program, a cache of its own, no terminal."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from kernel_pytorch._paths import program_path
from running import Kpt


@pytest.fixture(scope="session")
def program() -> str:
    return str(program_path("kpt"))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The caller's, without what it may have set for us, and with an empty cache."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KERNEL_PYTORCH_")}
    kept.pop("NO_COLOR", None)
    return {**kept, "KERNEL_PYTORCH_CACHE_DIR": str(tmp_path / "cache"), "TERM": "xterm"}


@pytest.fixture
def kpt(program: str, environment: dict[str, str]) -> Kpt:
    def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, *arguments],
            env={**environment, **changes},
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    return run
