"""Block fusion by the names of the seeds, on kernel_pytorch.optimize: parts of a model become fused kernels where that
was measured faster and verified; launches are counted by the profiler, accuracy is measured, nothing is assumed.

The given model stays as it is: what is fused is a second model of the same parameters. Its first call is the sample
that it is fused for, so that call takes up to `budget_seconds` more.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .. import _torch as _torch  # first: it says what is missing where torch is missing or old

import torch  # isort: skip
import torch.nn.functional as F  # isort: skip
from torch import Tensor, nn  # isort: skip

from .._modules import hide_name
from .._ops.support.masks import mask_options
from .._optimize.changes import Changes, put_on, take_off
from ..core._names import accepts_mask_names
from .fusion_stats import FusionPerformanceStats, benchmark_fusion_performance

__all__ = [
    "FusionConfig",
    "FusionPerformanceStats",
    "FusionStrategy",
    "OptimizationLevel",
    "UnifiedAttentionFusion",
    "benchmark_fusion_performance",
    "create_unified_attention_fusion",
]


class FusionStrategy(Enum):
    """Which parts of a block are looked at."""

    ATTENTION_NORM = "attention_norm"
    FFN_NORM = "ffn_norm"
    ATTENTION_FFN = "attention_ffn"
    FULL_BLOCK = "full_block"
    CUSTOM = "custom"  # FusionConfig.patterns says


class OptimizationLevel(Enum):
    """How far to go. Whatever is replaced was verified and measured faster."""

    CONSERVATIVE = "conservative"  # norms and activations only: no product is computed in another order
    BALANCED = "balanced"  # every part of the strategy, in the model's precision
    AGGRESSIVE = "aggressive"  # products may be narrower where the device gains by it: accuracy="tolerant"
    ADAPTIVE = "adaptive"  # balanced in training, aggressive in evaluation
    DEBUG = "debug"  # balanced, with each step reported on standard error


_MOST_GROWTH = 0.05
_POINTWISE = ("norms", "activations")
_PATTERNS: dict[FusionStrategy, tuple[str, ...] | None] = {
    FusionStrategy.ATTENTION_NORM: ("norms", "calls", "transformers_attention", "outputs"),
    FusionStrategy.FFN_NORM: ("norms", "activations", "perceptrons", "outputs"),
    FusionStrategy.ATTENTION_FFN: ("activations", "perceptrons", "calls", "transformers_attention"),
    FusionStrategy.FULL_BLOCK: None,
}


@dataclass(frozen=True)
class FusionConfig:
    """What to fuse and how far to go.

    Attributes:
        enable_mixed_precision: whether AGGRESSIVE and ADAPTIVE may use narrower products.
        enable_memory_optimization: undo a fusion with which parameters and peak memory together are more than 5 % above
            the original's.
        target_sequence_length: of the sample that `fuse()` makes up where it is given none.
        patterns: for FusionStrategy.CUSTOM, names of kernel_pytorch.optimize's patterns.
        budget_seconds: about how long fusing may take.
    """

    strategy: FusionStrategy = FusionStrategy.FULL_BLOCK
    optimization_level: OptimizationLevel = OptimizationLevel.BALANCED
    enable_mixed_precision: bool = True
    enable_memory_optimization: bool = True
    target_sequence_length: int = 512
    patterns: tuple[str, ...] = ()
    budget_seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.strategy is FusionStrategy.CUSTOM and not self.patterns:
            raise ValueError("FusionConfig: strategy is CUSTOM and patterns is empty; name what is to be fused")
        if self.target_sequence_length < 1:
            raise ValueError(f"FusionConfig: target_sequence_length is {self.target_sequence_length}")

    def pattern_names(self) -> tuple[str, ...] | None:
        """As kernel_pytorch.optimize takes them."""
        names = self.patterns if self.strategy is FusionStrategy.CUSTOM else _PATTERNS[self.strategy]
        if self.optimization_level is OptimizationLevel.CONSERVATIVE:
            return tuple(name for name in _POINTWISE if names is None or name in names)
        return names

    def accuracy(self, goal: str) -> str:
        level = self.optimization_level
        narrow = level is OptimizationLevel.AGGRESSIVE or (level is OptimizationLevel.ADAPTIVE and goal == "inference")
        return "tolerant" if narrow and self.enable_mixed_precision else "exact"


@dataclass
class _Fusion:
    """For one goal: the report, and the changes while they are not in force."""

    report: Any
    changes: Changes | None = None


class UnifiedAttentionFusion(nn.Module):
    """A model and its fused form, of the same parameters and with the same state_dict.

    Training and evaluation are fused each for itself, at the first call of either: what makes a step of training faster
    may cost evaluation more than it saves. Copies (copy.deepcopy, pickle, torch.save) hold the model unfused and fuse
    at their own first call.

    Attributes:
        model: the fused one. Before the first call (or `fuse`) nothing in it is replaced.
        report: kernel_pytorch.optimize's report of the fusion in force, None before.
    """

    def __init__(self, model: nn.Module, config: FusionConfig | None = None) -> None:
        super().__init__()
        self.config = config or FusionConfig()
        self.model = _with_the_same_parameters(model)
        self.training = model.training
        self._goal: str | None = None  # of the fusion in force
        self._fusions: dict[str, _Fusion] = {}  # by goal
        hide_name(self, "model")

    @property
    def report(self) -> Any:
        return None if self._goal is None else self._fusions[self._goal].report

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives. The first call, and the first one in training, fuse it for their arguments."""
        if not torch.compiler.is_compiling():
            from .._optimize.first_call import goal_now  # slow to load: only who fuses a model waits for it

            goal = goal_now(self)
            if goal != self._goal:
                self._use(goal, args, kwargs)
        return self.model(*args, **kwargs)

    def fuse(self, *args: Any, **kwargs: Any) -> UnifiedAttentionFusion:
        """Fuses for these arguments of the model, in its mode; again after `restore` or for other arguments.

        Without arguments a sample is made up: random, one sequence of config.target_sequence_length, for a model whose
        first norm or linear layer tells the number of features.
        """
        from .._optimize.first_call import (  # slow to load: only who fuses a model waits for it
            apart_from_the_call,
            goal_now,
            sample_inputs_of,
        )
        from .._optimize.optimize import optimize, restore  # slow to load: only who fuses a model waits for it

        if not args and not kwargs:
            args = (_random_sample(self.model, self.config.target_sequence_length),)
        goal = goal_now(self)
        self._lift()
        self._fusions.pop(goal, None)
        inputs = sample_inputs_of(self.model, args, kwargs)
        progress = _say if self.config.optimization_level is OptimizationLevel.DEBUG else None
        with apart_from_the_call(self.model):
            result = optimize(
                self.model,
                inputs,
                goal,
                self.config.budget_seconds,
                self.config.accuracy(goal),
                patterns=self.config.pattern_names(),
                progress=progress,
            )
        report = result.report
        grown = _memory_growth(self.model, report)
        if self.config.enable_memory_optimization and grown > _MOST_GROWTH:
            restore(self.model)
            report = _undone(report, f"with it the model needs {100 * grown:.0f} % more memory")
        self._fusions[goal] = _Fusion(report)
        self._goal = goal
        return self

    def restore(self) -> None:
        """The model as it was given; the next call fuses again."""
        self._lift()
        self._fusions.clear()

    def _use(self, goal: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The fusion for a goal in force, made now where there is none."""
        self._lift()
        if goal not in self._fusions:
            self.fuse(*args, **kwargs)
            return
        put_on(self.model, self._fusions[goal].changes)
        self._goal = goal

    def _lift(self) -> None:
        """The model as it was given; the fusion in force is kept for later."""
        if self._goal is not None:
            self._fusions[self._goal].changes = take_off(self.model)
            self._goal = None

    def __getstate__(self) -> dict[str, Any]:
        """Without what was fused: replacements are of this process and of this object."""
        return {**self.__dict__, "_goal": None, "_fusions": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        take_off(self.model)  # a copy within the process still has them

    def extra_repr(self) -> str:
        level, strategy = self.config.optimization_level.value, self.config.strategy.value
        return (
            f"strategy={strategy}, optimization_level={level}, fused for {' and '.join(self._fusions) or 'nothing yet'}"
        )

    def get_fusion_analysis(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What was fused, what was left alone, and why; fuses first where arguments are given or nothing was yet."""
        if args or kwargs or self.report is None:
            self.fuse(*args, **kwargs)
        data = self.report.data
        return {
            "strategy": self.config.strategy.value,
            "optimization_level": self.config.optimization_level.value,
            "fused": data["replacements"],
            "left_alone": data["refusals"],
            "measurements": data["measurements"],
            "numerics": data["numerics"],
            "notes": data["notes"],
        }


def create_unified_attention_fusion(
    model: nn.Module | int | None = None,
    fusion_strategy: FusionStrategy | int = FusionStrategy.FULL_BLOCK,
    optimization_level: OptimizationLevel | int | None = OptimizationLevel.BALANCED,
    dropout: float = 0.0,
    *,
    config: FusionConfig | None = None,
    d_model: int | None = None,
    n_heads: int | None = None,
    d_ff: int | None = None,
    strategy: FusionStrategy | None = None,
    device: torch.device | str | None = None,
) -> UnifiedAttentionFusion:
    """A fused form of the model, of the same parameters: create_unified_attention_fusion(model, FULL_BLOCK, BALANCED).

    Args:
        model: any nn.Module; it stays as it is. Or a number of features: (d_model, n_heads, d_ff, dropout), by place or
            by name, makes a new pre-norm block of causal attention and a GELU MLP, on `device`, and fuses that.
        fusion_strategy: which parts; `strategy` is the same by another name.
        optimization_level: how far to go.
        config: instead of both.
    """
    what = "create_unified_attention_fusion"
    features = model if d_model is None and not isinstance(model, nn.Module) else d_model
    if isinstance(model, nn.Module):
        sizes = {"d_model": d_model, "n_heads": n_heads, "d_ff": d_ff, "dropout": dropout or None, "device": device}
        given = [name for name, value in sizes.items() if value is not None]
        if given:
            raise TypeError(
                f"{what}: {', '.join(given)} and a model were given; they are a new block's, leave them out"
            )
        inner = model
    else:
        heads = fusion_strategy if isinstance(fusion_strategy, int) else n_heads
        hidden = optimization_level if isinstance(optimization_level, int) else d_ff
        if not isinstance(features, int) or heads is None:
            raise TypeError(
                f"{what}: d_model is {features} and n_heads is {heads}; give an nn.Module, or both for a new block"
            )
        inner = CausalBlock(features, heads, hidden, dropout, device)
    if config is None:
        chosen = strategy or (fusion_strategy if isinstance(fusion_strategy, FusionStrategy) else None)
        level = optimization_level if isinstance(optimization_level, OptimizationLevel) else None
        config = FusionConfig(chosen or FusionStrategy.FULL_BLOCK, level or OptimizationLevel.BALANCED)
    return UnifiedAttentionFusion(inner, config)


class CausalBlock(nn.Module):
    """x + attention(norm1(x)), then x + mlp(norm2(x)), in torch's own modules: what a new block's fusion is made of."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_ff: int | None = None,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if n_heads < 1 or d_model % n_heads != 0:
            raise ValueError(f"create_unified_attention_fusion: d_model {d_model} is no multiple of n_heads {n_heads}")
        self.d_model, self.n_heads, self.dropout = d_model, n_heads, dropout
        hidden = 4 * d_model if d_ff is None else d_ff
        self.norm1 = nn.LayerNorm(d_model, device=device)
        self.qkv = nn.Linear(d_model, 3 * d_model, device=device)
        self.proj = nn.Linear(d_model, d_model, device=device)
        self.norm2 = nn.LayerNorm(d_model, device=device)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, hidden, device=device), nn.GELU(), nn.Linear(hidden, d_model, device=device)
        )

    @accepts_mask_names
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """x [batch, sequence, d_model] -> the same shape.

        attention_mask applies in addition to the causal mask: bool or integers (True and 1 keep), or floating numbers
        (added to the scores); [batch, sequence] is of the keys.
        """
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ValueError(
                f"CausalBlock: x has shape {list(x.shape)}; it must be [batch, sequence, d_model] with d_model "
                f"{self.d_model}"
            )
        batch, length, features = x.shape
        query, key, value = self.qkv(self.norm1(x)).view(batch, length, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        drop = self.dropout if self.training else 0.0
        mask = self._with_causal(attention_mask, x)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=drop, is_causal=mask is None
        )
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, features))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]

    def _with_causal(self, attention_mask: Tensor | None, x: Tensor) -> Tensor | None:
        """One mask of both; None where the causal one is alone."""
        batch, length, _ = x.shape
        sizes = {"batch": batch, "heads": self.n_heads, "queries": length, "keys": length}
        options = mask_options("CausalBlock", attention_mask, **sizes)
        if not options:
            return None
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mask: Tensor = (
            options["mask"] & causal
            if "mask" in options
            else options["bias"].to(x.dtype).masked_fill(~causal, float("-inf"))
        )
        return mask

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, n_heads={self.n_heads}, dropout={self.dropout}"


def _with_the_same_parameters(model: nn.Module) -> nn.Module:
    """A copy of the modules, not of what they hold: training one trains both."""
    held = [*model.parameters(), *model.buffers()]
    try:
        return copy.deepcopy(model, {id(tensor): tensor for tensor in held})
    except Exception as error:
        raise TypeError(
            f"create_unified_attention_fusion: {type(model).__name__} cannot be copied ({error}); "
            f"kernel_pytorch.optimize(model, inputs) works in place"
        ) from error


def _random_sample(model: nn.Module, length: int) -> Tensor:
    """One random sequence for the first layer that tells what it takes."""
    tensor = next(model.parameters())
    generator = torch.Generator().manual_seed(0)
    for part in model.modules():
        if isinstance(part, nn.Embedding):
            return torch.randint(part.num_embeddings, (1, length), generator=generator).to(tensor.device)
        features = getattr(part, "in_features", None) or getattr(part, "embed_dim", None)
        if features is None and isinstance(part, (nn.LayerNorm, nn.RMSNorm)):
            features = part.normalized_shape[-1]
        if features is not None:
            shape = (1, length, features) if getattr(part, "batch_first", True) else (length, 1, features)
            return torch.randn(shape, generator=generator).to(tensor.device, tensor.dtype)
    raise ValueError(f"fuse: no sample can be made up for {type(model).__name__}; give the arguments of a call")


def _memory_growth(model: nn.Module, report: Any) -> float:
    """Growth of parameters plus peak memory, as a share of the original; 0 if the peak was not measured."""
    rows = [report.measurement(name) for name in ("before", "after")]
    peaks = [row["peak_bytes"] if row else None for row in rows]
    if peaks[0] is None or peaks[1] is None:
        return 0.0
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    return float((held + peaks[1]) / max(held + peaks[0], 1) - 1)


def _undone(report: Any, reason: str) -> Any:
    """The report of a fusion that was taken back."""
    taken = [
        {"path": row["path"], "pattern": row["pattern"], "reason": f"undone: {reason}"}
        for row in report.data["replacements"]
    ]
    tuned = [
        {**row, "kept": False, "reason": f"undone: {reason}"} if row["kept"] else row for row in report.data["tuning"]
    ]
    changed = {"replacements": [], "refusals": [*report.data["refusals"], *taken], "tuning": tuned}
    notes = [*report.data["notes"], f"undone: {reason}; `after` is what was measured with the fusion"]
    return type(report)({**report.data, **changed, "notes": notes})


def _say(line: str) -> None:
    print(f"fusion: {line}", file=sys.stderr)
