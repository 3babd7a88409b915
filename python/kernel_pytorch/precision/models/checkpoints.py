"""Models in few bits to and from safetensors: this library's own layout both ways, and the packed weights of others,
compressed-tensors (integers, NVFP4), ModelOpt (NVFP4) and GPTQ, read.

Whatever lays a weight out otherwise is unpacked once, when it is read, into what QuantizedLinear multiplies by.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..._modules import replace_modules
from ..._ops.quantized_matmul import FORMATS, QuantizedWeight
from ..quantized_linear import QuantizedLinear
from .conversion import QuantizedEmbedding

_KEY = "kernel_pytorch"  # of the file's metadata: formats by layer
_OWN = ("codes", "scales", "zeros", "tensor_scale")


def _safetensors() -> Any:
    try:
        import safetensors.torch  # optional: only whoever reads or writes such files needs it
    except ImportError as error:
        raise ImportError(
            "precision: safetensors files need the package safetensors; pip install safetensors"
        ) from error
    return safetensors


def save_quantized(model: nn.Module, path: str | Path) -> None:
    """Writes a model's state_dict as one safetensors file; formats of its quantised layers are in the metadata."""
    formats = {
        name: {"format": layer.format, "group": layer.group}
        for name, layer in model.named_modules()
        if isinstance(layer, (QuantizedLinear, QuantizedEmbedding))
    }
    tensors: dict[str, Tensor] = {}
    written: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    shared: dict[str, str] = {}
    for name, tensor in model.state_dict().items():
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and memory in written:
            shared[name] = written[memory]
            continue
        written[memory] = name
        tensors[name] = tensor.contiguous()
    text = json.dumps({"layers": formats, "shared": shared})
    _safetensors().torch.save_file(tensors, str(path), metadata={_KEY: text})


def load_quantized(model: nn.Module, path: str | Path, *, strict: bool = True) -> nn.Module:
    """Reads a file, or all files of a folder, into the model: linear layers whose weight is packed there become
    QuantizedLinear, everything else is loaded as load_state_dict does. In place; returns the model.

    Args:
        model: with layers of the names in the file. Those of this library's own file may be quantised already or not.
        path: a .safetensors file, or a folder of them with the config.json that Hugging Face's models have, whose
            quantization_config says what GPTQ's zeros mean.
        strict: names that are missing in the file, or unknown to the model, are an error.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"load_quantized: {path} has no .safetensors files")
    tensors: dict[str, Tensor] = {}
    notes: dict[str, Any] = {"layers": {}, "shared": {}}
    for file in files:
        with _safetensors().safe_open(str(file), "pt") as opened:
            for part, found in json.loads((opened.metadata() or {}).get(_KEY, "{}")).items():
                notes[part] |= found
            names = opened.keys()  # it is no mapping: that is a method of its own
            tensors |= {name: opened.get_tensor(name) for name in names}
    tensors |= {name: tensors[other] for name, other in notes["shared"].items()}
    config_file = path / "config.json" if path.is_dir() else path.with_name("config.json")
    config = json.loads(config_file.read_text()).get("quantization_config", {}) if config_file.exists() else {}
    made: dict[nn.Module, nn.Module] = {}
    for name, weight in _unpacked(tensors, notes["layers"], config).items():
        try:
            layer = model.get_submodule(name)
        except AttributeError:
            if strict:
                raise KeyError(
                    f'load_quantized: the file has a packed weight "{name}", the model has no such layer'
                ) from None
            continue
        made[layer] = _with_weight(name, layer, weight, tensors)
    model = replace_modules(model, made)
    missing, unknown = model.load_state_dict(tensors, strict=False)
    # What a packed layer holds was put there already.
    held = {f"{name}.{part}" for name, layer in model.named_modules() if layer in made.values() for part in _OWN}
    missing = [name for name in missing if name not in held]
    if strict and (missing or unknown):
        raise KeyError(f"load_quantized: missing in the file: {missing[:5]}; unknown to the model: {list(unknown)[:5]}")
    return model


def _with_weight(name: str, layer: nn.Module, weight: QuantizedWeight, tensors: dict[str, Tensor]) -> nn.Module:
    """The layer that multiplies by, or looks up in, the weight; its bias is taken from the file."""
    if isinstance(layer, (nn.Embedding, QuantizedEmbedding)):
        dtype = layer.dtype if isinstance(layer, QuantizedEmbedding) else layer.weight.dtype
        return QuantizedEmbedding(weight, dtype)
    if not isinstance(layer, (nn.Linear, QuantizedLinear)):
        raise TypeError(f'load_quantized: layer "{name}" is {type(layer).__name__}; a packed weight is for nn.Linear')
    if weight.shape != (layer.out_features, layer.in_features):
        raise ValueError(
            f'load_quantized: the packed weight of "{name}" is {list(weight.shape)}, the layer has '
            f"{[layer.out_features, layer.in_features]}"
        )
    kind = type(layer) if isinstance(layer, QuantizedLinear) else QuantizedLinear
    activation = layer.activation if isinstance(layer, QuantizedLinear) else None
    bias = tensors.get(f"{name}.bias")
    made = kind.from_quantized(weight, None if bias is None else nn.Parameter(bias, False), activation=activation)
    if hasattr(layer, "dropout"):
        made.dropout = layer.dropout
    return made.train(layer.training)


def _unpacked(
    tensors: dict[str, Tensor], own: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, QuantizedWeight]:
    """The packed weights, by layer; their tensors are taken out of the dictionary."""
    readers: dict[str, Callable[[str, dict[str, Tensor]], QuantizedWeight]] = {
        "codes": lambda name, parts: _own(name, parts, own),
        "weight_packed": _compressed,
        "weight_scale_2": _model_optimizer,
        "qweight": lambda name, parts: _gptq(name, parts, config),
    }
    found: dict[str, QuantizedWeight] = {}
    for key in list(tensors):
        name, _, last = key.rpartition(".")
        if last in readers and key in tensors:
            prefix = f"{name}."
            parts = {
                k.removeprefix(prefix): tensors[k]
                for k in tensors
                if k.startswith(prefix) and "." not in k[len(prefix) :]
            }
            found[name] = readers[last](name, parts)
            for part in parts:
                if part != "bias":
                    del tensors[prefix + part]
    return found


def _own(name: str, parts: Mapping[str, Tensor], formats: Mapping[str, Any]) -> QuantizedWeight:
    if name not in formats:
        raise ValueError(f'load_quantized: "{name}" has codes, and the file\'s metadata does not say of which format')
    kept = [parts.get(one) for one in _OWN]
    assert kept[0] is not None and kept[1] is not None
    return QuantizedWeight(kept[0], kept[1], kept[2], kept[3], formats[name]["format"], formats[name]["group"])


def _nibbles(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Unsigned numbers of `bits` out of int32 words, the lowest bits first, along a dimension."""
    count = 32 // bits
    shifts = torch.arange(count, device=packed.device, dtype=torch.int32) * bits
    parts: Tensor = (packed.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (packed.dim() - dim - 1))) & (2**bits - 1)
    return parts.flatten(dim, dim + 1).to(torch.uint8)


def _group(name: str, columns: int, groups: int, format: str) -> int:
    size = columns // groups
    if size * groups != columns or size not in FORMATS[format][0]:
        raise ValueError(
            f'load_quantized: "{name}" has a scale for {columns / groups:g} columns; {format} has groups of '
            f"{', '.join(map(str, FORMATS[format][0]))}: dequantise it with the library that made it"
        )
    return size


def _integers(name: str, codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> QuantizedWeight:
    """Of codes [rows, columns] with an unsigned zero; 8, or 128, needs none."""
    format = f"int{bits}"
    group = _group(name, codes.shape[1], scales.shape[1], format)
    if zeros is not None and bool((zeros == 2 ** (bits - 1)).all()):
        zeros = None
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return QuantizedWeight(codes.contiguous(), scales.contiguous(), zeros, None, format, group)


def _compressed(name: str, parts: Mapping[str, Tensor]) -> QuantizedWeight:
    """compressed-tensors: nvfp4-pack-quantized, whose global scale divides, and pack-quantized integers."""
    packed, scales = parts["weight_packed"], parts["weight_scale"]
    if "weight_global_scale" in parts:
        factor = 1.0 / parts["weight_global_scale"].float().reshape(1)
        return QuantizedWeight(packed.view(torch.uint8), scales.contiguous(), None, factor, "nvfp4", 16)
    if "weight_g_idx" in parts and not _ascends(parts["weight_g_idx"]):
        raise ValueError(f'load_quantized: "{name}" has columns in the order of their activations, which has no kernel')
    rows, columns = (int(n) for n in parts["weight_shape"])
    bits = 32 * packed.shape[1] // columns
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        zeros = _nibbles(zeros, bits, 0)[:rows].contiguous()
    return _integers(name, _nibbles(packed, bits, 1)[:, :columns], scales, zeros, bits)


def _model_optimizer(name: str, parts: Mapping[str, Tensor]) -> QuantizedWeight:
    """ModelOpt's NVFP4: the same codes, and a second scale that multiplies."""
    factor = parts["weight_scale_2"].float().reshape(1)
    return QuantizedWeight(parts["weight"].view(torch.uint8), parts["weight_scale"], None, factor, "nvfp4", 16)


def _ascends(groups: Tensor) -> bool:
    return bool((groups[1:] >= groups[:-1]).all())


def _gptq(name: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> QuantizedWeight:
    """GPTQ: words along the inputs, [columns / 8, rows]; zeros are stored less one, but for gptq_v2."""
    if "g_idx" in parts and not _ascends(parts["g_idx"]):
        raise ValueError(f'load_quantized: "{name}" has columns in the order of their activations, which has no kernel')
    words, scales = parts["qweight"], parts["scales"].t().contiguous()
    rows = words.shape[1]
    bits = int(config.get("bits", 0)) or 32 * parts["qzeros"].shape[1] // rows
    if bits not in (4, 8):
        raise ValueError(f'load_quantized: "{name}" has {bits} bits; 4 and 8 are read')
    zeros = _nibbles(parts["qzeros"], bits, 1)[:, :rows].t().contiguous()
    if config.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = (zeros + 1) & (2**bits - 1)
    return _integers(name, _nibbles(words, bits, 0).t().contiguous(), scales, zeros, bits)
