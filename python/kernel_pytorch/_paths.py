"""Where the package's shared libraries are: beside it when installed, in the checkout's build/ folder otherwise."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_FOLDERS = (_PACKAGE / "lib", _PACKAGE.parents[1] / "build")


def library_path(name: str) -> Path:
    """Path of lib<name>.so. Raises ImportError naming the folders searched and the cure."""
    file = f"lib{name}.so"
    for folder in _FOLDERS:
        if (folder / file).exists():
            return folder / file
    searched = " and ".join(str(folder) for folder in _FOLDERS)
    raise ImportError(
        f"kernel_pytorch: {file} is not in {searched}; run `pip install .` or `make build` in the checkout"
    )
