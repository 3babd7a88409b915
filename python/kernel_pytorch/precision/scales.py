"""Scales of delayed scaling: one update for all layers of a model, joined over processes; and which layers overflowed.

A step records magnitudes in its layers; the update puts them into the history, takes the largest of it, and writes the
scales of the next step. Nothing of it is in a model's state_dict; fp8_state_dict has it, and a checkpoint may lack it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from .._ops.delayed_scales import delayed_scales_
from .linear import FP8LinearLayer

_LEAST, _MOST = 2.0**-126, 2.0**126


def fp8_layers(model: nn.Module) -> dict[str, FP8LinearLayer]:
    """The FP8 layers of a model by name, each once."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, FP8LinearLayer)}


class _Histories:
    """The magnitudes of earlier steps of some layers, as one tensor, the oldest first."""

    def __init__(self, layers: list[FP8LinearLayer]) -> None:
        self.layers = layers
        config = layers[0].fp8_config
        self.values = layers[0].fp8_amax.new_zeros(config.amax_history_len, len(layers), 3)
        largest = [
            [layer.fp8_config.forward_format.largest] * 2 + [layer.fp8_config.backward_format.largest]
            for layer in layers
        ]
        headroom = [[2.0**layer.fp8_config.margin] for layer in layers]
        self.factors = self.values.new_tensor(headroom) / self.values.new_tensor(largest)

    def update(self, group: Any) -> None:
        """By the device alone, in one launch: a CUDA graph can hold it."""
        amax = [layer.fp8_amax for layer in self.layers]
        joined = torch.stack(amax) if _is_shared(group) else None
        if joined is not None:
            _join(joined, group)
        delayed_scales_(self.values, amax, [layer.fp8_scale for layer in self.layers], self.factors, joined)
        for layer in self.layers:
            layer.fp8_ready = True

    def write_scales(self) -> None:
        """Of histories that were read from a file."""
        peaks = self.values.amax(0)
        scales = torch.where(peaks > 0, (peaks * self.factors).clamp(_LEAST, _MOST), 1.0)
        torch._foreach_copy_([layer.fp8_scale for layer in self.layers], list(scales.unbind()))
        for layer in self.layers:
            layer.fp8_ready = True


def _histories_of(model: nn.Module, layers: list[FP8LinearLayer]) -> _Histories:
    """Kept with the model, made anew where its layers have changed or moved."""
    known: _Histories | None = model.__dict__.get("_fp8_histories")
    if known is not None and known.layers == layers and known.values.device == layers[0].fp8_amax.device:
        return known
    made = _Histories(layers)
    if known is not None and known.layers == layers:
        made.values.copy_(known.values)
    model.__dict__["_fp8_histories"] = made
    return made


def _delayed(model: nn.Module) -> list[FP8LinearLayer]:
    return [layer for layer in fp8_layers(model).values() if layer.fp8_config.recipe == "delayed"]


@torch.no_grad()
def update_fp8_scales(model: nn.Module, group: Any = None) -> int:
    """Ends a step: scales of delayed layers follow from what was seen, joined over `group` (None: the default group).

    Every process of the group must call it. Returns how many layers it updated. FP8TrainingEngine.optimizer_step calls
    it; in a loop of your own call it after the optimizer's step.
    """
    layers = _delayed(model)
    if layers:
        _histories_of(model, layers).update(group or layers[0].fp8_config.amax_group)
    return len(layers)


@torch.no_grad()
def take_overflows(model: nn.Module, group: Any = None) -> list[str]:
    """Names of layers whose input, weight or gradient had an infinity or a NaN since the last call, on any process."""
    layers = fp8_layers(model)
    if not layers:
        return []
    flags = torch.stack([layer.fp8_nonfinite for layer in layers.values()])
    _join(flags, group)
    torch._foreach_zero_([layer.fp8_nonfinite for layer in layers.values()])
    return [name for name, found in zip(layers, flags.amax(1).tolist()) if found]


def _join(values: Tensor, group: Any) -> None:
    if _is_shared(group):
        distributed.all_reduce(values, distributed.ReduceOp.MAX, group)


def _is_shared(group: Any) -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size(group) > 1


def fp8_state_dict(model: nn.Module) -> dict[str, Any]:
    """The scales and histories of delayed layers by name; empty where there are none yet."""
    names = {layer: name for name, layer in fp8_layers(model).items()}
    layers = _delayed(model)
    if not layers or not all(layer.fp8_ready for layer in layers):
        return {}
    histories = _histories_of(model, layers)
    return {names[layer]: {"amax_history": histories.values[:, i].clone()} for i, layer in enumerate(layers)}


@torch.no_grad()
def load_fp8_state_dict(model: nn.Module, state: dict[str, Any]) -> list[str]:
    """Puts histories back; returns the names of delayed layers that have none there, which start anew.

    A history shorter or longer than the layers' is cut or padded at its old end.
    """
    names = {layer: name for name, layer in fp8_layers(model).items()}
    layers = _delayed(model)
    missing = [names[layer] for layer in layers if names[layer] not in state]
    if not layers or missing:
        return missing  # scales of some layers alone: all start anew, by their own magnitudes
    histories = _histories_of(model, layers)
    histories.values.zero_()
    for i, layer in enumerate(layers):
        known = state[names[layer]]["amax_history"].to(histories.values)[-len(histories.values) :]
        histories.values[len(histories.values) - len(known) :, i] = known
    histories.write_scales()
    return []
