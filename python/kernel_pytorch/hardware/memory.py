"""What a step of a model needs in memory, found by running it without data: fake tensors stand for the real ones, and
every storage that is born or dies is noted in order. The peak of that record is C++'s (plan/memory_plan).

Limits: what a kernel allocates for itself is not seen (the library's workspace on a CPU stays from call to call and
grows with its cores and caches), nor is what libraries take outside torch.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .. import _library
from .. import _torch as _torch  # first: it says what is missing where torch is missing or old

import torch  # isort: skip
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .._optimize.costs import moved_bytes, runs
from .._optimize.flops import product_flops
from .throughput import Work

__all__ = ["MemoryEstimate", "dry_run", "guess_inputs"]

_PARAMETERS, _GRADIENTS, _OPTIMIZER, _INPUTS, _ACTIVATIONS = range(5)
# Copies of the parameters that an optimizer keeps, by torch's names.
_STATES = {"none": 0, "sgd": 0, "momentum": 1, "rmsprop": 1, "adagrad": 1, "adam": 2, "adamw": 2}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a step at its peak, and what they are made of at that moment. `flops` (of products) and `operations` are
    of all of it, `work` is what each operation does and `update` what the optimizer's step does."""

    peak_bytes: int
    parameters: int
    gradients: int
    optimizer: int
    inputs: int
    activations: int
    flops: float
    operations: int
    work: tuple[Work, ...] = field(default=(), repr=False)
    update: Work = field(default=Work(0.0, 0.0), repr=False)


class _Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every storage that a call makes, and when it goes."""

    def __init__(self, granule: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[list[int]] = []  # bytes, kind
        self.operations = 0
        self.work: list[Work] = []
        self._granule = granule
        self._kind = _ACTIVATIONS
        self._known: dict[int, tuple[weakref.ref[Any], int, list[list[int]]]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.operations += 1
        if runs(function):
            flops = product_flops(function, args, kwargs or {}, result)
            self.work.append(Work(flops or 0.0, moved_bytes(args, kwargs, result)))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.note(leaf)
        if function is torch.ops.aten._transformer_encoder_layer_fwd.default:
            # torch's whole layer for inference as one op; inside, the widest moment is the feed-forward's.
            source, up = args[0], args[14]
            inside = source.numel() // source.shape[-1] * (up.shape[0] + source.shape[-1]) * source.element_size()
            self.reserve(inside, _ACTIVATIONS)
            self.reserve(-inside, _ACTIVATIONS)
        return result

    def note(self, tensor: Tensor, kind: int | None = None) -> None:
        """Its storage, if new; with a kind, also what it is from now on and was from its beginning."""
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            size = -(-storage.nbytes() // self._granule) * self._granule
            shared = [self._add(size, _ACTIVATIONS)]
            reference = weakref.ref(storage, lambda _: self._gone(key))
            self._known[key] = (reference, size, shared)
        if kind is not None:
            for event in self._known[key][2]:
                event[1] = kind

    def reserve(self, size: int, kind: int) -> list[int]:
        """Bytes without a tensor."""
        return self._add(size, kind)

    def _add(self, size: int, kind: int) -> list[int]:
        event = [size, kind]
        self.events.append(event)
        return event

    def _gone(self, key: int) -> None:
        _, size, shared = self._known.pop(key)
        if size:
            self._add(-size, shared[0][1])

    def plan(self) -> dict[str, Any]:
        merged: list[list[int]] = []
        for size, kind in self.events:
            if merged and merged[-1][1] == kind and (merged[-1][0] > 0) == (size > 0):
                merged[-1][0] += size
            else:
                merged.append([size, kind])
        answer: dict[str, Any] = _library.call(
            "memory_plan", request={"bytes": [size for size, _ in merged], "kinds": [kind for _, kind in merged]}
        )
        return answer


def dry_run(
    model: nn.Module,
    inputs: Any,
    *,
    training: bool,
    optimizer: str = "adamw",
    loss: Callable[[Any], Tensor] | None = None,
    device: torch.device | None = None,
) -> MemoryEstimate:
    """One step, the second of a run: the optimizer's state is there, gradients are not yet.

    Args:
        inputs: as optimize's: a tensor, a tuple or a dict; their values are not read.
        training: forward, backward and the optimizer's step; otherwise forward without gradients.
        optimizer: "none", "sgd", "momentum", "rmsprop", "adagrad", "adam" or "adamw".
        loss: from the output to a scalar; by default every floating-point output is given a gradient of its size.
        device: where it would run; None is where the model is.
    """
    if optimizer not in _STATES:
        raise ValueError(f"memory: optimizer is {optimizer!r}; known are {', '.join(_STATES)}")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        fake = copy.deepcopy(model)
    fake.train(training)
    with mode:
        if device is not None:
            _move(fake, device)
        where = next((parameter.device for parameter in fake.parameters()), device or torch.device("cpu"))
        args, kwargs = _arguments(_map_tensors(inputs, lambda tensor: torch.empty_like(tensor, device=where)))
    record = _Record(512 if where.type == "cuda" else 1)
    for tensor in (*fake.parameters(), *fake.buffers()):
        record.note(tensor, _PARAMETERS)
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            record.note(leaf, _INPUTS)
    if where.type == "cuda":
        record.reserve(_workspace_bytes(), _ACTIVATIONS)
    with _naming_the_model(model), mode, record:
        if training:
            _train(fake, args, kwargs, optimizer, loss, record, where)
        else:
            with torch.no_grad():
                output = fake(*args, **kwargs)
                del output
    plan = record.plan()
    return MemoryEstimate(
        plan["peak_bytes"],
        **plan["at_peak"],
        flops=sum(one.flops for one in record.work),
        operations=record.operations,
        work=tuple(record.work),
        update=Work(0.0, _update_bytes(fake, optimizer) if training else 0.0),
    )


def _update_bytes(model: nn.Module, optimizer: str) -> float:
    """Bytes of an optimizer step: it reads the gradient, and reads and writes the parameter and each of its states."""
    passes = 0 if optimizer == "none" else 1 + 2 * (1 + _STATES[optimizer])
    return float(passes * sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad))


def _move(fake: nn.Module, device: torch.device) -> None:
    """To where it would run: from another device, or from none. Shared parameters stay shared."""
    moved: dict[int, Tensor] = {}
    for module in fake.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or tensor.device == device:
                    continue
                if id(tensor) not in moved:
                    there = torch.empty_like(tensor, device=device)
                    is_parameter = isinstance(tensor, nn.Parameter) or tensor.requires_grad
                    moved[id(tensor)] = nn.Parameter(there, tensor.requires_grad) if is_parameter else there
                table[name] = moved[id(tensor)]  # type: ignore[assignment]


def _train(
    fake: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    optimizer: str,
    loss: Callable[[Any], Tensor] | None,
    record: _Record,
    device: torch.device,
) -> None:
    trained = [parameter for parameter in fake.parameters() if parameter.requires_grad]
    sizes = [parameter.nbytes for parameter in trained]
    record.reserve(_STATES[optimizer] * sum(sizes), _OPTIMIZER)
    output = fake(*args, **kwargs)
    if loss is not None:
        loss(output).backward()  # type: ignore[no-untyped-call]
    else:
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
        del leaves
    del output
    for parameter in trained:
        if parameter.grad is not None:
            record.note(parameter.grad, _GRADIENTS)
    if _STATES[optimizer] == 2:  # torch's Adam: the denominators of a list at once on CUDA, of one parameter elsewhere
        temporary = sum(sizes) if device.type == "cuda" else 2 * max(sizes, default=0)
        record.reserve(temporary, _OPTIMIZER)
        record.reserve(-temporary, _OPTIMIZER)


@contextlib.contextmanager
def _naming_the_model(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            f"memory: {type(model).__name__} does not run without data ({type(error).__name__}: {error}); give "
            "sample_inputs that fit it, or measure it where it branches on values"
        ) from error


def _workspace_bytes() -> int:
    """That torch gives cuBLAS on the first product."""
    return (32 << 20) if torch.cuda.get_device_capability()[0] >= 9 else 8519680


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def _map_tensors(inputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    return pytree.tree_map_only(Tensor, function, inputs)


def with_batch(inputs: Any, batch: int) -> Any:
    """The inputs, without values, at another size of their first dimension; scalars stay."""
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not leaves:
        raise ValueError("memory: sample_inputs have no tensor with a batch dimension")
    old = leaves[0].shape[0]

    def resized(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != old:
            return tensor
        # An expanded element: a batch of any size costs nothing here.
        one = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
        return one.expand(batch, *tensor.shape[1:])

    return _map_tensors(inputs, resized)


def guess_inputs(model: nn.Module) -> Any:
    """Inputs of one sample by the model's first layer: 128 tokens or positions, an image of 224 x 224."""
    dummy = getattr(model, "dummy_inputs", None)  # Hugging Face
    if isinstance(dummy, dict) and dummy:
        return {name: value for name, value in dummy.items() if isinstance(value, Tensor)}
    for module in model.modules():
        if isinstance(module, (nn.TransformerEncoderLayer, nn.MultiheadAttention)):
            attention = module.self_attn if isinstance(module, nn.TransformerEncoderLayer) else module
            shape = (1, 128, attention.embed_dim)
            return torch.zeros(shape, dtype=attention.out_proj.weight.dtype)
        if isinstance(module, nn.Embedding):
            return torch.zeros((1, 128), dtype=torch.int64)
        if isinstance(module, nn.Linear):
            return torch.zeros((1, module.in_features), dtype=module.weight.dtype)
        if isinstance(module, nn.modules.conv._ConvNd) and not module.transposed:
            dims = module.weight.dim() - 2
            return torch.zeros((1, module.in_channels, *([224, 224, 16][:dims])), dtype=module.weight.dtype)
    raise ValueError(
        f"memory: what {type(model).__name__} is called with cannot be told from its layers; give sample_inputs"
    )
