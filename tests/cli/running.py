"""The type of the `kpt` fixture, for the test files beside it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

Kpt = Callable[..., subprocess.CompletedProcess[str]]
