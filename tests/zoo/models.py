"""All models of the zoo by name: library/model."""

from __future__ import annotations

from . import hugging_face, libraries, torch_models
from .case import Case

_TRANSFORMERS = "transformers/"


def prepare() -> None:
    """Before the first model of a process."""
    libraries.name_missing_ops()
    import transformers

    transformers.logging.set_verbosity_error()


def names() -> list[str]:
    return [*torch_models.names(), *(_TRANSFORMERS + name for name in hugging_face.names()), *libraries.names()]


def build(name: str) -> Case:
    if name.startswith(_TRANSFORMERS):
        return hugging_face.build(name.removeprefix(_TRANSFORMERS))
    return torch_models.build(name) if name.startswith("torch/") else libraries.build(name)
