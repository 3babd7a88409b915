"""Loads the torch adapter, once, after checking that this torch can carry it: `torch.ops.kernel_pytorch.*` exists then.

One library serves every torch from 2.11 on (LibTorch's stable ABI). An older one would fail to load with a symbol name
that helps nobody, hence the check.
"""

from __future__ import annotations

from . import __version__
from ._paths import library_path

MINIMUM_TORCH = (2, 11)

try:
    import torch
except ImportError as error:
    raise ImportError(
        f"kernel_pytorch {__version__}: this part needs torch, which is not installed; "
        f"run `pip install 'torch>={MINIMUM_TORCH[0]}.{MINIMUM_TORCH[1]}'`"
    ) from error


def check_torch_version(version: str) -> None:
    """Raises ImportError, naming both versions and the cure, where `version` is older than the adapter supports."""
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_TORCH:
        minimum = ".".join(map(str, MINIMUM_TORCH))
        raise ImportError(
            f"kernel_pytorch {__version__} needs torch {minimum} or later, this is torch {version}; "
            f"run `pip install --upgrade 'torch>={minimum}'`"
        )


check_torch_version(torch.__version__)
torch.ops.load_library(str(library_path("kernel_pytorch_torch")))  # type: ignore[no-untyped-call]
