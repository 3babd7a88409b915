"""Where the package's libraries and programs are: next to it when installed, in the checkout's build/ otherwise."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_BUILD = _PACKAGE.parents[1] / "build"


def _find(file: str, folders: tuple[Path, ...]) -> Path:
    for folder in folders:
        if (folder / file).exists():
            return folder / file
    searched = " and ".join(str(folder) for folder in folders)
    raise ImportError(
        f"kernel_pytorch: {file} is not in {searched}; run `pip install .` or `make build` in the checkout"
    )


def library_path(name: str) -> Path:
    """Path of lib<name>.so. Raises ImportError naming the folders searched and the cure."""
    return _find(f"lib{name}.so", (_PACKAGE / "lib", _BUILD))


def program_path(name: str) -> Path:
    """Path of a program of the package. Raises ImportError as library_path does."""
    return _find(name, (_PACKAGE / "bin", _BUILD))
