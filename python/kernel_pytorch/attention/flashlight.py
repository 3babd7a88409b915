"""Score and mask functions in, an attention kernel out: FlashLightKernelCompiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..expression import trace
from ..functional import attention
from .score_mods import name_of_mod

Mod = Callable[..., Any]


class CompiledAttention:
    """attention(query, key, value) with the functions it was compiled for. `score_program` and `mask_program` are what
    they became (kernel_pytorch.expression); empty for none.
    """

    def __init__(
        self, score_mod: Mod | None, mask_mod: Mod | None, captured: Sequence[Tensor], options: dict[str, Any]
    ) -> None:
        self.score_mod, self.mask_mod, self.captured, self.options = score_mod, mask_mod, tuple(captured), options
        has_mods = score_mod is not None or mask_mod is not None
        programs = trace(score_mod, mask_mod, self.captured) if has_mods else None
        self.score_program = programs.score_mod if programs is not None else ""
        self.mask_program = programs.mask_mod if programs is not None else ""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """As functional.attention; options add to those of the compiler, and replace them."""
        mods = {"score_mod": self.score_mod, "mask_mod": self.mask_mod, "captured": self.captured}
        return attention(query, key, value, **{**mods, **self.options, **options})

    def __repr__(self) -> str:
        return f"CompiledAttention(score_mod={name_of_mod(self.score_mod)}, mask_mod={name_of_mod(self.mask_mod)})"


class FlashLightKernelCompiler:
    """Compiles attention for score and mask functions written in Python with torch's operations.

    The functions are traced into programs when `compile` is called, so what a program cannot do is an error there. On a
    GPU the kernel is built for the types and sizes of `sample` at once; without one, at the first call.

    Args:
        options: arguments of functional.attention that every kernel gets: scale, causal, window and others.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def compile(
        self, score_mod: Mod | None = None, mask_mod: Mod | None = None, *, captured: Sequence[Tensor] = (),
        sample: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> CompiledAttention:  # fmt: skip
        """The kernel of these functions.

        Args:
            score_mod: (score, batch, head, q, k, *captured) -> the new score.
            mask_mod: (batch, head, q, k, *captured) -> whether the score is kept.
            captured: tensors that the functions read; those of floating types get gradients.
            sample: query, key and value like those of later calls. Their forward, and where one of them wants a
                gradient their backward, is run once, which builds the kernels.
        """
        kernel = CompiledAttention(score_mod, mask_mod, captured, self.options)
        if sample is not None:
            wanted = [tensor for tensor in sample if tensor.requires_grad]
            with torch.set_grad_enabled(bool(wanted)):
                output = kernel(*sample)
            output = output[0] if isinstance(output, tuple) else output
            if wanted:
                torch.autograd.grad(output, wanted, torch.zeros_like(output))
        return kernel

    compile_attention_kernel = compile
