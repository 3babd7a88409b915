"""Every model type of the installed transformers: a causal language model where there is one, else the base model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from . import shrink
from .case import Case, NotBuilt, call, seeded

_MOST_PARAMETERS = {False: 30_000_000, True: 20_000_000}  # of models whose widths are kept


def names() -> list[str]:
    from transformers.models.auto import modeling_auto as auto

    return sorted({*auto.MODEL_MAPPING_NAMES, *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES})


def build(name: str) -> Case:
    import transformers
    from transformers.models.auto import modeling_auto as auto

    table = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    tables = [auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES]
    classes = [(table[name], True)] if name in table else []
    classes += [(one[name], False) for one in (auto.MODEL_MAPPING_NAMES, *tables) if name in one]
    reasons: list[str] = []
    for class_name, is_causal in classes:
        class_name = class_name[0] if isinstance(class_name, (tuple, list)) else class_name
        for mildly in (False, True):
            try:
                return _build(getattr(transformers, class_name), is_causal, mildly)
            except Exception as error:  # a model type may refuse small numbers in any way; the next class is tried
                reasons.append(f"{class_name}: {type(error).__name__}: {str(error)[:200]}")
    raise NotBuilt("; ".join(reasons) or "there is no class for it")


def _build(cls: Any, is_causal: bool, mildly: bool) -> Case:
    config = shrink.shrunk(cls.config_class(), mildly=mildly)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(config).parameters())
    if size > _MOST_PARAMETERS[mildly]:
        raise NotBuilt(f"it has {size} parameters when shrunk")
    with seeded():
        model = cls(config).eval()
    inputs = _first_that_runs(model, config)
    other = None if "grid_thw" in inputs else {key: _other(key, value) for key, value in inputs.items()}
    causal = is_causal and "input_ids" in inputs and hasattr(model, "generate")
    return Case(model, inputs, other, causal)


def _first_that_runs(model: nn.Module, config: Any) -> dict[str, Any]:
    reasons = []
    for inputs in _candidates(model, config):
        try:
            with torch.no_grad(), seeded():
                call(model, inputs)
            return inputs
        except Exception as error:  # other inputs may be the right ones
            reasons.append(f"{'+'.join(inputs)}: {type(error).__name__}: {str(error).strip()[:150]}")
    raise NotBuilt("; ".join(reasons[:4]))


def _candidates(model: nn.Module, config: Any) -> Iterator[dict[str, Any]]:
    taken = set(inspect.signature(model.forward).parameters)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, 90, (2, 12), generator=generator)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    vision = next(
        (v for v in (getattr(config, "vision_config", None), config) if _has(v, "image_size", "patch_size")), config
    )
    channels = getattr(vision, "num_channels", None) or getattr(config, "num_channels", None) or 3
    channels = channels if isinstance(channels, int) else 3
    size = getattr(vision, "image_size", None) or shrink.IMAGE
    size = size if isinstance(size, int) else (size[0] if isinstance(size, (list, tuple)) else shrink.IMAGE)
    mels = next(
        (
            getattr(config, n)
            for n in ("num_mel_bins", "input_dim", "feature_size", "input_feat_per_channel", "n_mels")
            if type(getattr(config, n, None)) is int
        ),
        16,
    )
    text: dict[str, Any] = {"input_ids": ids}
    decoder: dict[str, Any] = {"decoder_input_ids": ids[:, :6]} if "decoder_input_ids" in taken else {}
    images: dict[str, Any] = {"pixel_values": drawn(2, channels, size, size)}
    audios = [
        {"input_values": drawn(2, 4000)},
        {"input_features": drawn(2, mels, 64)},
        {"input_features": drawn(2, 64, mels)},
        {"input_values": drawn(2, 1, 4000)},
        {"input_values": drawn(2, 64, mels)},
        {"input_features": drawn(2, mels, 3000)},
    ]
    series = [
        {
            "past_values": drawn(
                2, getattr(config, "context_length", 32) or 32, getattr(config, "num_input_channels", 1) or 1
            )
        },
        {"past_values": drawn(2, 128)},
        {"hidden_states": drawn(2, 12, shrink.WIDTH)},
        {"inputs": drawn(2, 12, shrink.WIDTH)},
    ]
    larger = [{"pixel_values": drawn(2, channels, s, s)} for s in (64, 224) if s != size]
    boxes = {"bbox": torch.zeros(2, 12, 4, dtype=torch.long)}
    if "input_ids" in taken:
        yield {**text, **decoder}
        yield text
        yield {**text, **boxes}
    for image in (images, *larger):
        if "pixel_values" in taken:
            yield image
            yield {**image, **decoder}
            if "input_ids" in taken:
                yield {**text, **image}
    if "grid_thw" in taken:
        patch = int(getattr(config, "patch_size", 8)) ** 2 * int(getattr(config, "temporal_patch_size", 1) or 1)
        grid = torch.tensor([[1, 4, 4]])
        yield {
            ("hidden_states" if "hidden_states" in taken else "pixel_values"): drawn(16, channels * patch),
            "grid_thw": grid,
        }
    if "pixel_values" in taken:
        yield {"pixel_values": drawn(1, getattr(config, "num_frames", 8) or 8, channels, size, size)}
        yield {"pixel_values": drawn(1, 2, channels, 64, 64)}
    if "pixel_values_videos" in taken:
        yield {"pixel_values_videos": drawn(1, 8, channels, size, size)}
    for audio in (*audios, *series):
        if set(audio) <= taken:
            yield {**audio, **decoder}
            if "input_ids" in taken:
                yield {**text, **audio}


def _has(config: Any, *names: str) -> bool:
    return config is not None and any(hasattr(config, name) for name in names)


def _other(name: str, value: torch.Tensor) -> torch.Tensor:
    """The same with other numbers: a batch of three, and shorter text."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.arange(3) % value.shape[0]
    if not value.is_floating_point():
        shorter = value[rows][:, : max(value.shape[1] - 3, 1)]
        return shorter if value.dim() != 2 else shorter.flip(1)
    return value[rows] + 0.1 * torch.randn(value[rows].shape, generator=generator)
