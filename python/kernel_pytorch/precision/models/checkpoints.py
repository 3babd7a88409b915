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

from ..._ops.quantized_matmul import FORMATS, QuantizedWeight, columns_of, pack_codes, unpack_codes
from ...mixture_of_experts.layers import MoELayer
from ..int8_linear import Int8Linear
from ..quantized_linear import QuantizedLinear
from ..ultra import UltraPrecisionModule
from .conversion import QuantizedEmbedding
from .experts import QuantizedExperts, QuantizedMatrices, is_packed_experts, matrix_shape
from .opened import OpenConv1D, OpenMultiheadAttention, open_layers, replace_layers

_KEY = "kernel_pytorch"  # of the file's metadata: formats by layer
_OWN = ("codes", "scales", "zeros", "tensor_scale")
_W8A8 = "w8a8"  # the format of Int8Linear

# A packed weight, and the order of its columns where they were sorted.
Packed = tuple[QuantizedWeight, Tensor | None]


def _safetensors() -> Any:
    try:
        import safetensors.torch  # optional: only whoever reads or writes such files needs it
    except ImportError as error:
        raise ImportError(
            "precision: safetensors files need the package safetensors; pip install safetensors"
        ) from error
    return safetensors


def save_quantized(model: nn.Module, path: str | Path) -> None:
    """Writes a model's state_dict as one safetensors file; formats of its quantised layers are in the metadata. Of an
    UltraPrecisionModule it is the model inside.
    """
    if isinstance(model, UltraPrecisionModule):
        model = model.base_module
    formats = {
        name: {"format": _W8A8}
        if isinstance(layer, Int8Linear)
        else {"format": layer.format, "group": layer.group, "columns": layer.quantized_weight.shape[1]}
        for name, layer in model.named_modules()
        if isinstance(layer, (QuantizedLinear, QuantizedEmbedding, QuantizedMatrices, Int8Linear))
    }
    opened = {
        name: type(layer).__name__
        for name, layer in model.named_modules()
        if isinstance(layer, (OpenConv1D, OpenMultiheadAttention))
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
    text = json.dumps({"layers": formats, "opened": opened, "shared": shared})
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
    notes: dict[str, Any] = {"layers": {}, "opened": {}, "shared": {}}
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
    placed: list[nn.Module] = []
    packed_layers = _unpacked(tensors, notes["layers"], config)
    known = [*packed_layers, *notes["layers"]]

    def is_opened(name: str) -> bool:
        inside = f"{name}." if name else ""
        return name in notes["opened"] or name in known or any(one.startswith(inside) for one in known)

    model = open_layers(model, wanted=is_opened)
    for name, packed in packed_layers.items():
        try:
            layer = model.get_submodule(name)
        except AttributeError:
            experts = _experts_in(model, name, packed[0])
            if experts is not None:
                placed.append(experts)
            elif strict:
                raise KeyError(
                    f'load_quantized: the file has a packed weight "{name}", the model has no such layer'
                ) from None
            continue
        made[layer] = _with_weight(name, layer, packed, tensors)
    for name, note in notes["layers"].items():
        if note["format"] == _W8A8:
            made |= _integer_layer(model, name, tensors, strict)
    model = replace_layers(model, made)
    placed += made.values()
    missing, unknown = model.load_state_dict(tensors, strict=False)
    # What a packed layer holds was put there already.
    held = {f"{name}.{part}" for name, layer in model.named_modules() if layer in placed for part in (*_OWN, "order")}
    missing = [name for name in missing if name not in held]
    if strict and (missing or unknown):
        raise KeyError(f"load_quantized: missing in the file: {missing[:5]}; unknown to the model: {list(unknown)[:5]}")
    return model


def _experts_in(model: nn.Module, name: str, weight: QuantizedWeight) -> nn.Module | None:
    """The codes, put into the place of a parameter of experts; None where the name is none."""
    owner, _, last = name.rpartition(".")
    try:
        layer = model.get_submodule(owner)
    except AttributeError:
        return None
    if is_packed_experts(layer):
        before, layer = layer, QuantizedExperts(layer, {})
        replace_layers(model, {before: layer})
    plain = layer.plain if isinstance(layer, QuantizedExperts) else layer
    kept = plain._parameters.get(last)
    if not isinstance(layer, (MoELayer, QuantizedExperts)) or kept is None:
        return None
    made, shape = QuantizedMatrices(weight, len(kept), kept.dtype), matrix_shape(plain, last)
    if made.shape != shape:
        raise ValueError(
            f'load_quantized: the packed weight of "{name}" is {list(made.shape)}, the layer has {list(shape)}'
        )
    del plain._parameters[last]
    layer.add_module(last, made)
    return made


def _integer_layer(model: nn.Module, name: str, tensors: dict[str, Tensor], strict: bool) -> dict[nn.Module, nn.Module]:
    """The layer of this name, and what it becomes."""
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        if strict:
            raise KeyError(
                f'load_quantized: the file has int8 products of "{name}", the model has no such layer'
            ) from None
        return {}
    if not isinstance(layer, (nn.Linear, Int8Linear)):
        raise TypeError(f'load_quantized: layer "{name}" is {type(layer).__name__}; int8 products are for nn.Linear')
    activation = layer.activation if isinstance(layer, Int8Linear) else None
    made = Int8Linear(layer.in_features, layer.out_features, False, activation=activation, device="meta")
    made.weight, made.scale = tensors[f"{name}.weight"].clone(), tensors[f"{name}.scale"].clone()
    bias = tensors.get(f"{name}.bias")
    made.bias = None if bias is None else nn.Parameter(bias.clone(), False)
    return {layer: made.train(layer.training)}


def _with_weight(name: str, layer: nn.Module, packed: Packed, tensors: dict[str, Tensor]) -> nn.Module:
    """The layer that multiplies by, or looks up in, the weight; its bias is taken from the file."""
    weight, order = packed
    if isinstance(layer, QuantizedMatrices):
        return QuantizedMatrices(weight, layer.shape[0], layer.dtype)
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
    bias = None if bias is None else nn.Parameter(bias, False)
    made = kind.from_quantized(weight, bias, activation=activation, order=order)
    if hasattr(layer, "dropout"):
        made.dropout = layer.dropout
    return made.train(layer.training)


def _unpacked(tensors: dict[str, Tensor], own: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Packed]:
    """The packed weights, by layer; their tensors are taken out of the dictionary."""
    readers: dict[str, Callable[[str, dict[str, Tensor]], Packed]] = {
        "codes": lambda name, parts: _own(name, parts, own),
        "weight_packed": _compressed,
        "weight_scale_2": _model_optimizer,
        "qweight": lambda name, parts: _gptq(name, parts, config),
    }
    found: dict[str, Packed] = {}
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


def _own(name: str, parts: Mapping[str, Tensor], formats: Mapping[str, Any]) -> Packed:
    if name not in formats:
        raise ValueError(f'load_quantized: "{name}" has codes, and the file\'s metadata does not say of which format')
    kept = [parts.get(one) for one in _OWN]
    assert kept[0] is not None and kept[1] is not None
    note = formats[name]
    weight = QuantizedWeight(kept[0], kept[1], kept[2], kept[3], note["format"], note["group"], note.get("columns"))
    return weight, parts.get("order")


def _fields(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Unsigned numbers of `bits` out of int32 words, as many as one holds, the lowest bits first, along a dimension."""
    count = 32 // bits
    shifts = torch.arange(count, device=packed.device, dtype=torch.int32) * bits
    parts: Tensor = (packed.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (packed.dim() - dim - 1))) & (2**bits - 1)
    return parts.flatten(dim, dim + 1).to(torch.uint8)


def _stream(packed: Tensor, bits: int) -> Tensor:
    """Unsigned numbers of `bits` along the last dimension of int32 words, where they may lie in two of them."""
    row = packed.contiguous().view(torch.uint8)
    return unpack_codes(row, bits, row.shape[-1] * 8 // bits)


def _grouped(name: str, columns: int, scales: Tensor, format: str) -> tuple[int, int]:
    """The size of groups, and how often each scale is repeated: groups may be several of ours, or a whole row."""
    groups, sizes = scales.shape[1], FORMATS[format][0]
    for size in sizes:
        if -(-columns // size) == groups:
            return size, 1
    for size in sizes:
        each = -(-columns // groups)
        if groups == 1 or (columns % groups == 0 and each % size == 0):
            return size, -(-each // size)
    raise ValueError(
        f'load_quantized: "{name}" has a scale for {columns / groups:g} columns; {format} has groups of '
        f"{', '.join(map(str, sizes))}, or of several of these: dequantise it with the library that made it"
    )


def _integers(
    name: str, codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, groups: Tensor | None = None
) -> Packed:
    """Of codes [rows, columns] with an unsigned zero; that of the middle needs none. groups: of each column, where they
    do not lie behind each other."""
    format = f"int{bits}"
    if format not in FORMATS:
        known = ", ".join(one for one in FORMATS if one.startswith("int"))
        raise ValueError(f'load_quantized: "{name}" has {bits} bits; {known} are read')
    order = None
    if groups is not None and not _ascends(groups):
        order = torch.argsort(groups, stable=True)
        codes = codes[:, order]
        wanted = torch.arange(len(groups), device=groups.device) // -(-len(groups) // scales.shape[1])
        if not torch.equal(groups[order].to(wanted.dtype), wanted):
            raise ValueError(f'load_quantized: "{name}" has groups of different sizes; dequantise it with its library')
    group, times = _grouped(name, codes.shape[1], scales, format)
    if zeros is not None and bool((zeros == 2 ** (bits - 1)).all()):
        zeros = None
    kept = -(-codes.shape[1] // group)
    scales = scales.repeat_interleave(times, 1)[:, :kept].contiguous()
    zeros = None if zeros is None else zeros.repeat_interleave(times, 1)[:, :kept].contiguous()
    return QuantizedWeight(pack_codes(codes, bits), scales, zeros, None, format, group, codes.shape[1]), order


def _compressed(name: str, parts: Mapping[str, Tensor]) -> Packed:
    """compressed-tensors: nvfp4-pack-quantized, whose global scale divides, and pack-quantized integers."""
    packed, scales = parts["weight_packed"], parts["weight_scale"]
    if "weight_global_scale" in parts:
        factor = 1.0 / parts["weight_global_scale"].float().reshape(1)
        codes = packed.view(torch.uint8)
        columns = int(parts["weight_shape"][1]) if "weight_shape" in parts else columns_of("nvfp4", codes.shape[1])
        return QuantizedWeight(codes, scales.contiguous(), None, factor, "nvfp4", 16, columns), None
    rows, columns = (int(n) for n in parts["weight_shape"])
    bits = next((n for n in range(8, 1, -1) if -(-columns // (32 // n)) == packed.shape[1]), 0)
    if not bits:
        raise ValueError(f'load_quantized: "{name}" has {packed.shape[1]} words for {columns} columns; no width fits')
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        zeros = _fields(zeros, bits, 0)[:rows].contiguous()
    codes = _fields(packed, bits, 1)[:, :columns]
    return _integers(name, codes, scales, zeros, bits, parts.get("weight_g_idx"))


def _model_optimizer(name: str, parts: Mapping[str, Tensor]) -> Packed:
    """ModelOpt's NVFP4: the same codes, and a second scale that multiplies."""
    factor = parts["weight_scale_2"].float().reshape(1)
    return QuantizedWeight(parts["weight"].view(torch.uint8), parts["weight_scale"], None, factor, "nvfp4", 16), None


def _ascends(groups: Tensor) -> bool:
    return bool((groups[1:] >= groups[:-1]).all())


def _gptq(name: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> Packed:
    """GPTQ: words along the inputs, [columns * bits / 32, rows]; zeros are stored less one, but for gptq_v2."""
    words, scales = parts["qweight"], parts["scales"].t().contiguous()
    rows = words.shape[1]
    bits = int(config.get("bits", 0)) or 32 * parts["qzeros"].shape[1] // rows
    zeros = _stream(parts["qzeros"], bits)[:, :rows].t().contiguous()
    if config.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = (zeros + 1) & (2**bits - 1)
    columns = len(parts["g_idx"]) if "g_idx" in parts else words.shape[0] * 32 // bits
    codes = _stream(words.t(), bits)[:, :columns]
    return _integers(name, codes, scales, zeros, bits, parts.get("g_idx"))
