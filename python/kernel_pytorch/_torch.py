"""Loads the torch adapter, once, after checking that this torch can carry it: `torch.ops.kernel_pytorch.*` exists then.

One library serves every torch from 2.11 on (LibTorch's stable ABI). An older one would fail to load with a symbol name
that helps nobody, hence the check.
"""

from __future__ import annotations

from . import __version__
from ._paths import library_path

MINIMUM_TORCH = (2, 11)
_MINIMUM = ".".join(map(str, MINIMUM_TORCH))
_BUILD = "pip install ."


class TorchUnavailable(ImportError):
    """What is missing, in one sentence; `cure` is the command that helps."""

    def __init__(self, problem: str, cure: str, then: str = "") -> None:
        super().__init__(f"kernel_pytorch {__version__}: {problem}; run `{cure}`{then}")
        self.cure = cure


def absence_of_torch(has_adapter: bool) -> TorchUnavailable:
    then = f", then `{_BUILD}` in the checkout: this installation was built without torch and has no adapter for it"
    problem = "this part needs torch, which is not installed"
    return TorchUnavailable(problem, f"pip install 'torch>={_MINIMUM}'", "" if has_adapter else then)


def absence_of_adapter(version: str) -> TorchUnavailable:
    problem = f"torch {version} is here, but this installation was built without torch and has no adapter for it"
    return TorchUnavailable(
        problem, _BUILD, " in the checkout again, which builds it (without an installation: `make build`)"
    )


def check_torch_version(version: str) -> None:
    """Raises TorchUnavailable, naming both versions and the cure, where `version` is too old for the adapter."""
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_TORCH:
        cure = f"pip install --upgrade 'torch>={_MINIMUM}'"
        raise TorchUnavailable(f"it needs torch {_MINIMUM} or later, this is torch {version}", cure)


def _adapter() -> str:
    """Path of the adapter; "" where this installation was built without torch."""
    try:
        return str(library_path("kernel_pytorch_torch"))
    except ImportError:
        return ""


ADAPTER = _adapter()
try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise  # torch is there and lacks something of its own
    raise absence_of_torch(bool(ADAPTER)) from error
check_torch_version(torch.__version__)
if not ADAPTER:
    raise absence_of_adapter(torch.__version__)
torch.ops.load_library(ADAPTER)  # type: ignore[no-untyped-call]
