"""API.md is the map of the package: every public function and class of it stands there, by name."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

import kernel_pytorch

WORDS = set(re.findall(r"\w+", (Path(__file__).resolve().parents[2] / "API.md").read_text()))
# Packages, and modules that stand beside them at the top; what a package's own files share among each other is theirs.
PACKAGES = [
    found.name
    for found in pkgutil.walk_packages(kernel_pytorch.__path__, "kernel_pytorch.")
    if (found.ispkg or found.name.count(".") == 1 or ".compat." in found.name) and "._" not in found.name
]


def is_a_result_or_setting(value: object) -> bool:
    """Results and settings: whoever returns or takes them is named, and their fields are in their docstrings."""
    return isinstance(value, type) and (dataclasses.is_dataclass(value) or issubclass(value, tuple))


@pytest.mark.parametrize("package", ["kernel_pytorch", *PACKAGES])
def test_every_public_name_is_on_the_map(package: str) -> None:
    module = importlib.import_module(package)
    public = [name for name in getattr(module, "__all__", []) if not name.startswith("__")]
    missing = [name for name in public if name not in WORDS and not is_a_result_or_setting(getattr(module, name))]
    assert not missing, f"{package}: API.md does not name {', '.join(missing)}"
