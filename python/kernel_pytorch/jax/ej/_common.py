"""What ejKernel's functions share: masks, sinks, windows, checks of their options, the way to the executor."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._call import Array
from ._configs import OperationConfig
from ._executor import executor
from ._registry import kernel_registry


class MaskInfo(NamedTuple):
    """Which scores count: a mask (True attends), segment ids (equal ones attend, -1 is padding), or both."""

    attention_mask: Array | None = None
    q_segment_ids: Array | None = None
    kv_segment_ids: Array | None = None

    @classmethod
    def from_segments(cls, q_segment_ids: Array, kv_segment_ids: Array | None = None) -> MaskInfo:
        return cls(None, q_segment_ids, q_segment_ids if kv_segment_ids is None else kv_segment_ids)

    @classmethod
    def from_attention_mask(cls, attention_mask: Array) -> MaskInfo:
        """[batch, keys] (padding), [batch, queries, keys] or [batch, 1 or heads, queries, keys]."""
        mask = jnp.asarray(attention_mask) != 0
        shapes = {2: lambda: mask[:, None, None], 3: lambda: mask[:, None], 4: lambda: mask}
        if mask.ndim not in shapes:
            raise ValueError(f"MaskInfo: attention_mask has {mask.ndim} dimensions; it has two, three or four")
        return cls(shapes[mask.ndim]())


def checked(name: str, platform: Any, cfg: Any, kind: type[Any] = OperationConfig, **others: Any) -> None:
    if cfg is not None and not isinstance(cfg, kind):
        raise TypeError(f"{name}: cfg is a {type(cfg).__name__}; give a {kind.__name__}, or leave it out")
    kernel_registry.get(name, platform if cfg is None or platform is not None else cfg.platform)
    for option, value in others.items():
        if value:
            raise ValueError(f"{name}: {option} is not supported; leave it out")


def allows_tf32(name: str, precision: Any) -> bool:
    """A request as jax.lax takes it. Products of fp32 are exact unless tf32 is named: DEFAULT rounds nothing here."""
    text = str(getattr(precision, "name", precision)).lower()
    if text in ("none", "default", "high", "highest", "float32"):
        return False
    if text in ("tensorfloat32", "tf32_tf32_f32"):
        return True
    raise ValueError(f"{name}: precision is {precision}; it is one of jax.lax.Precision's, or tensorfloat32")


def run(
    name: str,
    function: Any,
    tensors: tuple[Any, ...],
    cfg: Any = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Any:
    """function(tensors) by the executor, under shard_map where a mesh and both specs, of the tensors given, are."""
    if mesh is None:
        return executor(function, *tensors, cfg=cfg)
    if cfg is not None:
        raise ValueError(f"{name}: cfg is given with a mesh; kernels are chosen on each device, leave it out")
    if in_specs is None or out_specs is None:
        raise ValueError(f"{name}: a mesh is given without in_specs and out_specs; give all three")
    places = [place for place, tensor in enumerate(tensors) if tensor is not None]
    if len(in_specs) == len(tensors):
        in_specs = tuple(in_specs[place] for place in places)

    def local(*parts: Array) -> Any:
        whole: list[Any] = [None] * len(tensors)
        for place, part in zip(places, parts):
            whole[place] = part
        return function(*whole)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs)
    return mapped(*(tensors[place] for place in places))


def sinks_of(softmax_aux: Any, heads: int) -> Any:
    """[sinks] or [heads, sinks]: several stand for the logarithm of their exponentials' sum."""
    if softmax_aux is None:
        return None
    one = jax.nn.logsumexp(jnp.asarray(softmax_aux, jnp.float32), axis=-1)
    return jnp.broadcast_to(one, (heads,)) if one.ndim == 0 else jnp.repeat(one, heads // one.shape[0])


def window_of(sliding_window: Any, causal: bool) -> Any:
    if sliding_window is None or isinstance(sliding_window, tuple):
        return sliding_window
    return (int(sliding_window), 0 if causal else int(sliding_window))


def masks_of(mask_info: MaskInfo | None) -> dict[str, Any]:
    if mask_info is None:
        return {}
    return {
        "mask": mask_info.attention_mask,
        "query_segment_ids": mask_info.q_segment_ids,
        "key_segment_ids": mask_info.kv_segment_ids,
    }


def segments_of(lengths: Any, size: int) -> Array:
    """Segment ids: 0 up to each sequence's length, -1 behind."""
    return jnp.where(jnp.arange(size)[None] < jnp.asarray(lengths)[:, None], 0, -1)
