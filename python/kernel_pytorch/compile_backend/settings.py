"""What a user may set: torch.compile's `mode` and `options`, of which those that begin with our name are ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .patterns import PATTERNS

_PREFIX = "kernel_pytorch."
_CHOICES = ("timed", "always", "never")


@dataclass
class Settings:
    """`inductor` are Inductor's own options; `inner` is what compiles the rewritten graph. `budget_seconds`: for the
    timings of one graph; None: 20, and 45 where it has gradients, whose parts take twice as long to compile.
    """

    patterns: tuple[str, ...] = tuple(PATTERNS)
    choose: str = "timed"
    budget_seconds: float | None = None
    inner: str | Callable[..., Any] = "inductor"
    inductor: dict[str, Any] = field(default_factory=dict)

    def budget(self, wants_gradient: bool) -> float:
        if self.budget_seconds is not None:
            return self.budget_seconds
        return 45.0 if wants_gradient else 20.0

    def compile(self, module: torch.fx.GraphModule, inputs: Any, in_trial: bool = False) -> Callable[..., Any]:
        """The graph compiled by `inner`. A trial has no CUDA graphs of Inductor's: it is captured as a whole."""
        if self.inner == "inductor":
            from torch._inductor.compile_fx import compile_fx  # slow to load

            patches = {**self.inductor, "triton.cudagraphs": False} if in_trial else self.inductor
            return compile_fx(module, inputs, config_patches=patches or None)  # type: ignore[return-value]
        if callable(self.inner):
            return self.inner(module, inputs)  # type: ignore[no-any-return]
        from torch._dynamo.backends.registry import lookup_backend  # slow to load

        return lookup_backend(self.inner)(module, inputs)


def settings_of(mode: str | None = None, options: dict[str, Any] | None = None) -> Settings:
    """Raises ValueError where an option is unknown, with those that are known."""
    found = Settings()
    if mode is not None and mode != "default":
        from torch._inductor import list_mode_options  # slow to load

        found.inductor.update(list_mode_options(mode))
    for name, given in (options or {}).items():
        if not name.startswith(_PREFIX):
            found.inductor[name] = given
            continue
        key = name.removeprefix(_PREFIX)
        if key not in ("patterns", "choose", "budget_seconds", "inner"):
            known = ", ".join(f"{_PREFIX}{one}" for one in ("patterns", "choose", "budget_seconds", "inner"))
            raise ValueError(f"torch.compile: there is no option {name}; there are {known}")
        setattr(found, key, tuple(given) if key == "patterns" else given)
    unknown = [one for one in found.patterns if one not in PATTERNS]
    if unknown:
        raise ValueError(f"torch.compile: there is no pattern {unknown[0]!r}; there are {', '.join(PATTERNS)}")
    if found.choose not in _CHOICES:
        raise ValueError(f"torch.compile: {_PREFIX}choose is {found.choose!r}; it is one of {', '.join(_CHOICES)}")
    return found
