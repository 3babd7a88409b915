"""Hugging Face's layers of linear attention: Gated DeltaNet (Qwen3-Next and its kin), KDA (Kimi-Linear), Mamba-2.

Their forward stays, line for line: caches, projections and norms are the model's. The functions of the model's own file
that it calls for the recurrence and for the short convolution are ours instead. A function is taken for one of them by
its arguments' names and proved by its numbers; calls with what was not proved (packed sequences) are its own.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...._rebind import reached, rebind
from ....functional import causal_conv1d, delta_rule, ssd
from ...changes import SetForward, mark
from ...sites import Call, Found, Proposal, Refusal, Way
from ...verify import row_error
from ..context import Context, undisturbed, why_not_around

NAME = "linear attention (Hugging Face)"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_PACKED = ("cu_seqlens", "seq_idx")
_WIDTHS = (2, 3, 4)


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    # accelerate's hooks of a child whose weights are used without a call of it are a decorator around the forward.
    forward = inspect.unwrap(type(module).forward)
    table = _table(forward)
    names = reached(forward, table) if table else []
    if not names:
        return None
    reason = why_not_around(module)
    if reason is None and any(hasattr(part, "_hf_hook") for part in module.modules()):
        reason = "accelerate moves its weights"
    if reason:
        return Refusal(path, NAME, reason)
    ways = [
        Way(
            f"the same forward on kernel_pytorch's {', '.join(sorted({table[one].__name__ for one in table}))}",
            lambda: SetForward(module, mark(rebind(forward, table))),
        )
    ]
    return Proposal(NAME, path, module, f"{type(module).__name__} calling {', '.join(names)}", ways)


def _table(forward: Any) -> dict[Any, Any]:
    """Our functions by those of the model's file that the forward calls."""
    table: dict[Any, Any] = {}
    if not isinstance(forward, types.FunctionType):
        return table
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if isinstance(function, types.FunctionType) and (ours := _ours(function)) is not None:
            table[function] = ours
    return table


@functools.cache
def _ours(function: Any) -> Any:
    """What stands for a function, if its arguments' names and its numbers are those of one that we have."""
    try:
        names = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    for wanted, make, probes in _KINDS:
        if wanted <= names and (proved := _proved(function, make(function), probes)) is not None:
            return proved
    return None


def _proved(function: Any, ours: Any, probes: Callable[[], Iterator[tuple[list[Any], dict[str, Any]]]]) -> Any:
    with undisturbed():
        for args, kwargs in probes():
            try:
                expected = function(*args, **kwargs)
            except Exception:  # another function after all
                return None
            found = ours(*args, **kwargs)
            pairs = list(zip(_results(found), _results(expected), strict=False))
            if len(_results(found)) != len(_results(expected)):
                return None
            if any(a.shape != b.shape or a.dtype != b.dtype or row_error(a, b)[1] > 1e-4 for a, b in pairs):
                return None
    ours.__name__ = ours.__wrapped__.__name__
    return ours


def _results(result: Any) -> list[Tensor]:
    return [one for one in (result if isinstance(result, tuple) else (result,)) if one is not None]


def _is_foreign(tensors: tuple[Tensor, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is none that was proved."""
    is_packed = any(kwargs.get(name) is not None for name in _PACKED)
    return is_packed or any(type(one) not in (Tensor, nn.Parameter) or one.dtype not in _FLOATS for one in tensors)


def _delta(function: Any) -> Any:
    mode = "auto" if "chunk_size" in inspect.signature(function).parameters else "recurrent"

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *args: Any,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        same = query.dtype is key.dtype is value.dtype
        if args or not same or _is_foreign((query, key, value, g, beta), kwargs):
            options = {"initial_state": initial_state, "output_final_state": output_final_state, **kwargs}
            return function(  # type: ignore[no-any-return]
                query, key, value, g, beta, *args, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **options
            )
        output, state = delta_rule(
            query,
            key,
            value,
            beta if beta.dtype is query.dtype else beta.float(),
            gate=g if g.dtype is query.dtype else g.float(),
            normalize_qk=use_qk_l2norm_in_kernel,
            initial_state=None if initial_state is None else initial_state.float(),
            return_state=True,
            mode=mode,
        )
        return output, state if output_final_state else None

    rule.__wrapped__ = delta_rule  # type: ignore[attr-defined]
    return rule


def _probes_of_gates(*channels: int) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    make = torch.Generator().manual_seed(0)
    normal = functools.partial(torch.randn, generator=make)
    heads = [normal(2, 5, 2, 8), normal(2, 5, 2, 8), normal(2, 5, 2, 4)]
    options = {"g": -normal(2, 5, 2, *channels).abs(), "beta": normal(2, 5, 2).sigmoid(), "output_final_state": True}
    for state in (None, normal(2, 2, 8, 4)):
        yield heads, options | {"initial_state": state, "use_qk_l2norm_in_kernel": True}


def _convolution(function: Any) -> Any:
    def convolve(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        tensors = (hidden_states, weight) if bias is None else (hidden_states, weight, bias)
        is_known = activation in (None, "silu", "swish") and weight.shape[-1] in _WIDTHS and hidden_states.dim() == 3
        same = all(one.dtype is hidden_states.dtype for one in tensors)
        if not is_known or not same or _is_foreign(tensors, kwargs):
            return function(hidden_states, weight, bias, activation=activation, **kwargs)  # type: ignore[no-any-return]
        output = causal_conv1d(hidden_states.transpose(1, 2), weight, bias, activation="silu" if activation else None)
        return output.transpose(1, 2)  # type: ignore[no-any-return]

    convolve.__wrapped__ = causal_conv1d  # type: ignore[attr-defined]
    return convolve


def _convolution_probes() -> Iterator[tuple[list[Any], dict[str, Any]]]:
    make = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=make) for shape in ((2, 6, 5), (6, 4), (6,)))
    yield [x, weight, bias], {"activation": "silu"}
    yield [x, weight[:, 1:].contiguous(), None], {}


def _scan(function: Any) -> Any:
    def scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        *args: Any,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        z: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if args or z is not None or _is_foreign((hidden_states, dt, A, B, C), kwargs):
            options: dict[str, Any] = {
                "D": D,
                "dt_bias": dt_bias,
                "initial_states": initial_states,
                "dt_softplus": dt_softplus,
            }
            options |= {"dt_limit": dt_limit, "return_final_states": return_final_states, **kwargs}
            options |= {} if z is None else {"z": z}
            return function(hidden_states, dt, A, B, C, chunk_size, *args, **options)
        # As the model does: everything but dt in fp32.
        output, state = ssd(
            hidden_states.float(),
            dt if dt_bias is None else dt + dt_bias.to(dt.dtype),
            A.float(),
            B.float(),
            C.float(),
            D=D,
            dt_softplus=dt_softplus,
            dt_limit=(dt_limit[0], dt_limit[1]),
            initial_state=initial_states,
            return_state=True,
        )
        return (output, state) if return_final_states else output

    scan.__wrapped__ = ssd  # type: ignore[attr-defined]
    return scan


def _scan_probes() -> Iterator[tuple[list[Any], dict[str, Any]]]:
    make = torch.Generator().manual_seed(0)
    normal = functools.partial(torch.randn, generator=make)
    tensors = [normal(2, 7, 4, 3), normal(2, 7, 4), -normal(4).exp(), normal(2, 7, 2, 5), normal(2, 7, 2, 5)]
    options = {"chunk_size": 4, "D": normal(4), "dt_bias": normal(4), "dt_softplus": True, "return_final_states": True}
    yield tensors, options
    yield tensors, options | {"initial_states": normal(2, 4, 3, 5), "dt_limit": (0.1, 1.0), "D": None}


_DELTA = {"query", "key", "value", "g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"}
# Names that a function's arguments must have, what stands for it, and calls that prove it.
_KINDS: tuple[tuple[set[str], Any, Any], ...] = (
    (_DELTA, _delta, lambda: _probes_of_gates()),
    (_DELTA, _delta, lambda: _probes_of_gates(8)),
    ({"hidden_states", "dt", "A", "B", "C", "chunk_size", "return_final_states"}, _scan, _scan_probes),
    ({"hidden_states", "weight", "bias", "activation", "kwargs"}, _convolution, _convolution_probes),
)
