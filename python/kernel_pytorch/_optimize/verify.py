"""Whether a replaced part computes what the original did: outputs and gradients, on the sample and on random inputs.

The difference of two tensors is that of their worst row, relative to the row or to the average row where that is
larger: one wrong row among thousands is not averaged away. Modules run in evaluation mode, so that dropout, whose
random numbers are nobody's to compare, is off; where dropout stands in a part is proved when the part is recognised.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._modules import evaluating
from .record import choosing
from .sites import Call
from .state import attributes_kept, states_of, tensors_in

# Of a row, what a replacement may differ from a wider run beyond 1.25 times what the original differs: one rounding of
# another order of sums.
_FLOORS = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
_SHARE_OF_ERROR = 1.25
_MOST_WIDE_BYTES = 1 << 31  # of a part's parameters in the wider type
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
TOLERANT = 0.25  # with accuracy="tolerant": FP8's two or three significant bits, through a part or a model
# A gradient below this share of a part's largest gradient may be pure rounding, such as that of a key's bias, which is
# zero in exact arithmetic.
_NOISE = 0.05
_CHUNK = 1 << 25  # elements
WHOLE = 3.0  # a model may differ by this many times what a part may: errors of its parts add up


@dataclass(frozen=True)
class Difference:
    """The difference in one quantity of one part; the path "" is the whole model."""

    path: str
    quantity: str
    max_abs: float
    relative: float
    tolerance: float
    ok: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Results:
    """Outputs of a run, and gradients by name; of a model with experts also which of them were chosen."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    structure: str
    choices: list[Tensor] = field(default_factory=list)


Reference: TypeAlias = "Callable[[Call, int, bool], Results]"


class Mismatch(Exception):
    """Outputs of another shape, type or structure: the part is not what it was taken for."""


def tolerance_for(tensors: list[Tensor], accuracy: str, is_whole: bool) -> float:
    """By the narrowest type in play, autocast's included."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    dtypes |= {torch.get_autocast_dtype(d) for d in {t.device.type for t in tensors} if torch.is_autocast_enabled(d)}
    exact = max((_TOLERANCES.get(dtype, 5e-2) for dtype in dtypes), default=0.0) * (WHOLE if is_whole else 1.0)
    return max(exact, TOLERANT) if accuracy == "tolerant" else exact


def results_of(
    module: nn.Module, call: Call, gradients: bool, seed: int = 0, choices: Sequence[Tensor] = ()
) -> Results:
    """Runs module(call) on copies of the arguments; with gradients also backward from random ones. What the call left
    in its arguments (keys and values in a cache) counts as output. Its routers repeat `choices`."""
    call = call.fresh()
    on_gpus = {tensor.device for tensor in (*call.tensors(), *module.parameters()) if tensor.is_cuda}
    with evaluating(module), torch.set_grad_enabled(gradients), torch.random.fork_rng(devices=list(on_gpus)):
        torch.manual_seed(seed)  # a model that draws numbers draws the same ones in every run
        first = call.differentiated() if gradients else None
        with choosing(module, choices) as made:
            output = call.run(module)
        leaves, structure = pytree.tree_flatten(output)
        outputs = [_looked_at(one) for one in tensors_in([output, *states_of((call.args, call.kwargs))])]
        found = _gradients(module, first, outputs, seed) if gradients else {}
    kinds = _kinds([*leaves, *outputs]) + str(structure)
    return Results([whole(tensor.detach()) for tensor in outputs], found, kinds, [] if made is None else made.made)


def _looked_at(tensor: Any) -> Tensor:
    """A tensor that waits to be computed (deferred/scores.py) as whoever uses it gets it, with its gradient."""
    return tensor.compute() if getattr(type(tensor), "is_deferred", False) else tensor  # type: ignore[no-any-return]


def _kinds(leaves: list[Any]) -> str:
    return " ".join(f"{tuple(x.shape)}{x.dtype}" if isinstance(x, Tensor) else type(x).__name__ for x in leaves)


def _gradients(module: nn.Module, first: Tensor | None, outputs: list[Tensor], seed: int) -> dict[str, Tensor]:
    wanted: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if first is not None:
        wanted["input"] = first
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    if not roots or not wanted:
        return {}
    grads = [random_like(tensor, seed + i) for i, tensor in enumerate(roots)]
    values = torch.autograd.grad(roots, list(wanted.values()), grads, allow_unused=True)
    return {name: whole(value) for name, value in zip(wanted, values) if value is not None}


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that several processes hold, or the tensor."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def random_like(tensor: Any, seed: int) -> Tensor:
    """Normal numbers of a tensor's shape, type and device, and cut as it is where ranks share it."""
    generator = torch.Generator(device=tensor.device).manual_seed(seed)
    drawn = torch.randn(tensor.shape, generator=generator, device=tensor.device).to(tensor.dtype)
    if not hasattr(tensor, "placements"):
        return drawn
    from torch.distributed.tensor import Replicate, distribute_tensor  # slow to load, and few models have DTensors

    placements = [Replicate() if one.is_partial() else one for one in tensor.placements]
    return distribute_tensor(drawn, tensor.device_mesh, placements, src_data_rank=None)


def randomised(call: Call, seed: int) -> Call:
    """The same call with its first floating tensor drawn anew, as large as it was, or its first numbers (token ids)
    shuffled where it has none; masks and tables stay.
    """
    first = call.first()
    if first is None:
        first = next(iter(call.tensors()), None)
    if first is None or first.numel() == 0:
        return call
    if first.is_floating_point():
        deviation = whole(first.detach()).float().std(correction=0).clamp(min=1e-2)
        drawn = random_like(first, seed) * deviation.item()
    else:
        order = torch.randperm(first.numel(), generator=torch.Generator().manual_seed(seed))
        drawn = first.flatten()[order.to(first.device)].view(first.shape)

    def swap(leaf: Any) -> Any:
        return drawn if leaf is first else leaf

    return call.of(pytree.tree_map(swap, call.args), pytree.tree_map(swap, call.kwargs))


def compare(path: str, ours: Results, theirs: Results, tolerance: float) -> list[Difference]:
    """One entry for outputs, one for gradients; raises Mismatch where they cannot be compared."""
    if ours.structure != theirs.structure:
        raise Mismatch(f"its output is {theirs.structure}, and replaced it would be {ours.structure}")
    if ours.gradients.keys() != theirs.gradients.keys():
        missing = theirs.gradients.keys() ^ ours.gradients.keys()
        raise Mismatch(f"gradients of {', '.join(sorted(missing))} exist on one side only")
    found = [_worst(path, "output", list(zip(ours.outputs, theirs.outputs)), tolerance)]
    if theirs.gradients:
        pairs = [(ours.gradients[name], theirs.gradients[name]) for name in theirs.gradients]
        found.append(_worst(path, "gradient", pairs, tolerance))
    return found


def wider_results(module: nn.Module, call: Call, gradients: bool, seed: int) -> Results | None:
    """Of a copy of the module and its arguments in a wider type, fp32 or, of fp32, fp64: what both the original and its
    replacement round. None where there is none to be had: a part too large, of a wide type already, or that cannot be
    copied or widened.
    """
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    dtypes |= {tensor.dtype for tensor in call.tensors() if tensor.is_floating_point()}
    autocast = any(torch.is_autocast_enabled(tensor.device.type) for tensor in call.tensors())
    if autocast or not dtypes or not dtypes <= _FLOORS.keys():
        return None
    wide = torch.float64 if dtypes == {torch.float32} else torch.float32
    if sum(p.numel() for p in module.parameters()) * wide.itemsize > _MOST_WIDE_BYTES:
        return None

    def widened(leaf: Any) -> Any:
        return leaf.to(wide) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    try:
        copied_module = copy.deepcopy(module).to(wide)
        return results_of(copied_module, call.of(*pytree.tree_map(widened, (call.args, call.kwargs))), gradients, seed)
    except Exception:  # a module may refuse to be copied, or another type, in any way: then tolerances decide
        return None


def judge(path: str, ours: Results, theirs: Results, wide: Results, dtype: torch.dtype) -> list[Difference] | None:
    """As `compare`, by errors against the wider run: ours may be little more than the original's. None where the wider
    run is no measure: another structure, or the original is far from it (it rounds inside, whatever the type)."""
    kinds = [("output", list(zip(ours.outputs, theirs.outputs, wide.outputs)))]
    if len(wide.outputs) != len(theirs.outputs) or wide.gradients.keys() != theirs.gradients.keys():
        return None
    if theirs.gradients:
        names = list(theirs.gradients)
        kinds.append(("gradient", [(ours.gradients[n], theirs.gradients[n], wide.gradients[n]) for n in names]))
    found = []
    for quantity, triples in kinds:
        floating = [triple for triple in triples if triple[1].is_floating_point()]
        if any(one.shape != other.shape for one, _, other in floating):
            return None
        floor = _NOISE * max((_rms(exact) for _, _, exact in floating), default=0.0)
        worst = Difference(path, quantity, 0.0, 0.0, _FLOORS[dtype], True)
        for mine, original, exact in floating:
            absolute, relative = row_error(mine, exact, floor)
            own = row_error(original, exact, floor)[1]
            if own > _TOLERANCES[dtype]:
                return None
            allowed = _SHARE_OF_ERROR * own + _FLOORS[dtype]
            if relative / allowed >= worst.relative / worst.tolerance:
                worst = Difference(path, quantity, absolute, relative, allowed, relative <= allowed)
        found.append(worst)
    return found


def _worst(path: str, quantity: str, pairs: list[tuple[Tensor, Tensor]], tolerance: float) -> Difference:
    worst_abs, worst_relative = 0.0, 0.0
    floor = _NOISE * max((_rms(theirs) for _, theirs in pairs if theirs.is_floating_point()), default=0.0)
    for mine, theirs in pairs:
        if not theirs.is_floating_point():
            equal = torch.equal(mine, theirs)
            worst_abs, worst_relative = (worst_abs, worst_relative) if equal else (float("inf"), float("inf"))
            continue
        absolute, relative = row_error(mine, theirs, floor)
        worst_abs, worst_relative = max(worst_abs, absolute), max(worst_relative, relative)
    return Difference(path, quantity, worst_abs, worst_relative, tolerance, worst_relative <= tolerance)


def _rms(tensor: Tensor) -> float:
    """Of the finite elements."""
    if tensor.numel() == 0:
        return 0.0
    norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
    count = tensor.numel()
    if not math.isfinite(norm):
        finite = torch.isfinite(tensor)
        norm = float(torch.linalg.vector_norm(torch.where(finite, tensor, 0.0), dtype=torch.float64))
        count = max(int(finite.sum()), 1)
    return norm / math.sqrt(count)


def row_error(mine: Tensor, theirs: Tensor, floor: float = 0.0) -> tuple[float, float]:
    """The largest difference, and the worst row's; NaN on one side only is infinite.

    An element of a row counts as at least `floor` large.
    """
    if theirs.numel() == 0:
        return 0.0, 0.0
    columns = theirs.shape[-1] if theirs.dim() else 1
    a, b = (x.detach().reshape(-1, columns) for x in (mine, theirs))
    step = max(_CHUNK // columns, 1)  # in parts: logits as fp64 would be many gigabytes
    absolute, errors, norms = 0.0, [], []
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    for begin in range(0, len(a), step):
        x, y = (value[begin : begin + step].to(wide) for value in (a, b))
        difference = x - y
        if not difference.sum().isfinite():
            same = torch.isnan(x) & torch.isnan(y) | (x == y)  # equal infinities too
            difference = torch.where(same, 0.0, difference)
            y = torch.where(torch.isfinite(y), y, 0.0)
        errors.append(torch.linalg.vector_norm(difference, dim=-1, dtype=torch.float64))
        norms.append(torch.linalg.vector_norm(y, dim=-1, dtype=torch.float64))
        absolute = max(absolute, difference.abs().max().item())
    rows = torch.cat(norms)
    scale = torch.maximum(rows, rows.mean()).clamp(min=max(floor * columns**0.5, 1e-30))
    relative = (torch.cat(errors) / scale).max().item()
    return (absolute, relative) if relative == relative else (float("inf"), float("inf"))


def _can_perturb(module: nn.Module) -> bool:
    """Whether the parameters are plain tensors in memory, which may be written and put back."""
    return all(type(p) is nn.Parameter and type(p.data) is Tensor and not p.is_meta for p in module.parameters())


@contextmanager
def perturbed(module: nn.Module) -> Iterator[None]:
    """Other parameters for a while, where they lie: each plus noise of a quarter of its deviation, or of a tenth of its
    size where it is constant. Autograd is not told: a graph of the user's that saved one finds what it saved."""
    kept = [(p, p.detach().clone()) for p in module.parameters() if p.is_floating_point() and p.numel()]
    try:
        with torch.no_grad():
            for index, (parameter, value) in enumerate(kept):
                wide = value.float()
                deviation, mean = wide.std(correction=0).item(), wide.abs().mean().item()
                scale = 0.25 * deviation if deviation > 1e-3 * mean else 0.1 * max(mean, 1.0)
                parameter.data.add_((_noise(value, index) * scale).to(value.dtype))
        with attributes_kept(module):  # what it derives from these parameters and keeps
            yield
    finally:
        with torch.no_grad():
            for parameter, value in kept:
                parameter.data.copy_(value)


def _noise(like: Tensor, seed: int) -> Tensor:
    """Normal numbers, a few thousand of them over and over: a large matrix takes seconds to draw."""
    drawn = torch.randn(4093, generator=torch.Generator().manual_seed(seed)).to(like.device)
    return drawn.repeat(-(-like.numel() // 4093))[: like.numel()].view(like.shape)


def verify(
    path: str,
    call: Call,
    module: nn.Module,
    reference: Reference,
    accuracy: str,
    gradients: bool,
    is_whole: bool = False,
    perturbs: bool = False,
    wider: Callable[[Call, int, bool], Results | None] = lambda *_: None,
    is_brief: bool = False,
) -> list[Difference]:
    """Differences of the module now from `reference`, which runs the original, on the sample and on random inputs; with
    `perturbs` these come with other parameters, since ones and zeros hide what a replacement leaves out; `is_brief` is
    the sample alone, where a module that does the same work was verified. `reference` and `wider`, the original in a
    wider type or None, take (inputs, seed, with other parameters): errors are judged against the wider run where there
    is one, and else differences by fixed tolerances."""
    dtypes = [one.dtype for one in (*call.tensors(), *module.parameters()) if one.is_floating_point()]
    narrowest = min(dtypes, key=lambda one: torch.finfo(one).bits, default=torch.float32)
    tolerance = tolerance_for([*call.tensors(), *module.parameters()], accuracy, is_whole)
    worst: dict[str, Difference] = {}
    trials = [(call, False)]
    if not is_brief:
        trials.append((randomised(call, 1001), perturbs and _can_perturb(module)))
    for seed, (inputs, is_perturbed) in enumerate(trials):
        with perturbed(module) if is_perturbed else nullcontext():
            theirs = reference(inputs, seed, is_perturbed)
            ours = results_of(module, inputs, gradients, seed, theirs.choices)
            wide = wider(inputs, seed, is_perturbed)
        differences = compare(path, ours, theirs, tolerance)
        if wide is not None and narrowest in _FLOORS:
            differences = judge(path, ours, theirs, wide, narrowest) or differences
        for difference in differences:
            known = worst.get(difference.quantity)
            share = difference.relative / max(difference.tolerance, 1e-30)
            if known is None or share > known.relative / max(known.tolerance, 1e-30):
                worst[difference.quantity] = difference
    return list(worst.values())
