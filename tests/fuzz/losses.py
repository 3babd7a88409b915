"""Cross entropy: of logits, in place, over parts of a vocabulary, and of a head's product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch import functional as F

from .case import Case, difference
from .draw import Draw
from .run import generates


def rows_of(logits: Tensor, target: Tensor, weight: Any, ignore_index: int, label_smoothing: float, z_loss: float,
            softcap: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The rows' losses, and what each adds to the mean's divisor."""
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    target = target.long()
    counted = target != ignore_index
    safe = target.masked_fill(~counted, 0)
    if logits.shape[-1] == 0:
        return logits.sum(-1), counted.to(logits)
    lse = torch.logsumexp(logits, -1)
    logs = logits - lse[..., None]
    weights = logits.new_ones(logits.shape[-1]) if weight is None else weight.detach()
    own = weights[safe]
    losses = -(1 - label_smoothing) * own * logs.gather(-1, safe[..., None])[..., 0]
    losses = losses - label_smoothing / logits.shape[-1] * (logs * weights).sum(-1)
    losses = losses + z_loss * lse.square()
    return torch.where(counted, losses, 0.0), torch.where(counted, own, 0.0)


def reference(logits: Tensor, target: Tensor, weight: Any = None, ignore_index: int = -100, label_smoothing: float = 0,
              z_loss: float = 0.0, softcap: Any = None, reduction: str = "mean") -> Tensor:  # fmt: skip
    losses, counts = rows_of(logits, target, weight, ignore_index, label_smoothing, z_loss, softcap)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


def _drawn(d: Draw, dtype: torch.dtype, reductions: tuple[str, ...]) -> tuple[list[int], Tensor, dict[str, Any]]:
    classes = d.size(300, empty=0.0)
    lead = d.shape(0, 3, 100)
    ignored = d.choice((-100, -100, -1, 0))
    target = d.integers(lead, 0, classes, d.choice((torch.int64, torch.int64, torch.int32)))
    target = torch.where(torch.rand(target.shape, generator=d.generator) < 0.2, ignored, target).to(target.dtype)
    options = {
        "ignore_index": ignored,
        "label_smoothing": d.choice((0.0, 0.0, 0.1, 1.0)),
        "z_loss": d.choice((0.0, 0.0, 1e-3)),
        "softcap": d.choice((None, None, 5.0)),
        "reduction": d.choice(reductions),
    }
    return [*lead, classes], target, options


def _spoil(d: Draw, case: Case, classes: int) -> Case:
    if not d.maybe(0.12):
        return case
    args, way = list(case.args), d.between(0, 4)
    place = next(i for i, value in enumerate(args) if isinstance(value, Tensor) and not value.is_floating_point())
    target = args[place]
    if way == 0 and target.numel():
        bad = target.contiguous().clone()
        bad.view(-1)[d.between(0, bad.numel() - 1)] = d.choice((classes, classes + 9, -7))
        args[place], case.refused = bad, "a target is no class"
    elif way == 1:
        case.options["reduction"], case.refused = "median", "the reduction is unknown"
    elif way == 2:
        case.options["label_smoothing"], case.refused = d.choice((-0.1, 1.5, float("nan"))), "smoothing is no share"
    elif way == 3:
        case.options["softcap"], case.refused = d.choice((0.0, -1.0)), "the cap is not positive"
    else:
        args[place], case.refused = torch.zeros([*target.shape, 2], dtype=torch.int64), "the target has another shape"
    case.args = tuple(args)
    if target.numel() == 0 and way in (2, 3):
        case.refused = case.reference = case.check = None  # of no rows no option is asked
    return case


@generates("cross_entropy")
def cross_entropy(d: Draw, name: str) -> Case:
    dtype = d.dtype()
    shape, target, options = _drawn(d, dtype, ("mean", "sum", "none"))
    options["weight"] = d.some(d.tensor([shape[-1]], d.choice((dtype, torch.promote_types(dtype, torch.float32)))), 0.3)
    if options["weight"] is not None:
        options["weight"] = options["weight"].abs() + 0.1
    case = Case(
        (d.tensor(shape, dtype, scale=d.choice((1.0, 10.0))), target), options, reference, roundings=4, least_top=0.1
    )
    case.terms = max(shape[-1], target.numel(), 1)
    return _spoil(d, case, shape[-1])


@generates("cross_entropy_")
def cross_entropy_in_place(d: Draw, name: str) -> Case:
    dtype = d.dtype()
    shape, target, options = _drawn(d, dtype, ("mean", "sum"))
    logits = d.tensor(shape, dtype, dense=True)
    kept = logits.double().clone().requires_grad_()

    def check(loss: Tensor, case: Case) -> str | None:
        wanted = reference(kept, target, **options)
        if wrong := difference(loss, wanted, case, "the loss"):
            return wrong
        if not bool(wanted.isfinite()):
            return None
        (grad,) = torch.autograd.grad(wanted, kept)
        return difference(logits, grad, case, "the gradient in the logits")

    case = Case(
        (logits, target), options, check=check, gradients=False, roundings=4, names=("cross_entropy",), least_top=0.1
    )
    case.terms = max(shape[-1], target.numel(), 1)
    return _spoil(d, case, shape[-1])


@generates("linear_cross_entropy")
def linear_cross_entropy(d: Draw, name: str) -> Case:
    dtype, size = d.dtype(), d.size(60, empty=0.02)
    shape, target, options = _drawn(d, dtype, ("mean", "sum"))
    options["class_weight"] = d.some(d.tensor([shape[-1]], dtype).abs() + 0.1, 0.2)
    options["chunk_bytes"] = d.choice((1, 4096, 2**18, 2**40))
    if d.maybe(0.2):
        options["accumulate_dtype"] = torch.promote_types(dtype, torch.float32)

    def of_product(hidden: Tensor, weight: Tensor, target: Tensor, class_weight: Any, chunk_bytes: int,
                   accumulate_dtype: Any = None, **rest: Any) -> Tensor:  # fmt: skip
        return reference(hidden @ weight.transpose(0, 1), target, class_weight, **rest)

    args = (d.tensor([*shape[:-1], size], dtype, scale=0.5), d.tensor([shape[-1], size], dtype, scale=0.5), target)
    # Logits are rounded to their type, and the weight's gradient once for each chunk.
    case = Case(args, options, of_product, roundings=16, names=("cross_entropy",), least_top=1.0)
    case.terms = max(shape[-1], size, target.numel(), 1)
    if target.numel() == 0 and options["reduction"] == "mean":
        case.refused = "there is no mean of no rows"
        return case
    if dtype in (torch.bfloat16, torch.float16) and target.numel() > 16 and options["chunk_bytes"] <= 4096:
        case.roundings *= 4
    if dtype in (torch.bfloat16, torch.float16):
        case.precision = dtype
        case.check = _only_finite
        case.reference = None if options["z_loss"] or options["class_weight"] is not None else case.reference
    return _spoil(d, case, shape[-1])


def _only_finite(loss: Tensor, case: Case) -> str | None:
    target, ignored = case.args[2], case.options["ignore_index"]
    if bool((target == ignored).all()) or loss.isfinite():
        return None
    return f"the loss is {float(loss)}"


@generates("cross_entropy_partials", "combine_cross_entropy_partials", "parallel_cross_entropy")
def parts(d: Draw, name: str) -> Case:
    dtype = d.dtype()
    shape, target, options = _drawn(d, dtype, ("none",))
    options.pop("reduction")
    shape[-1] += 1
    vocabulary = shape[-1]
    cut = d.between(1, vocabulary - 1)
    logits = d.tensor(shape, dtype)
    if name == "parallel_cross_entropy":
        other = F.cross_entropy_partials(
            logits.detach()[..., cut:], target, vocabulary=vocabulary, first_column=cut,
            ignore_index=options["ignore_index"], softcap=options["softcap"],
        )  # fmt: skip
        options |= {"vocabulary": vocabulary, "first_column": 0, "gather": lambda mine: torch.stack([mine, other])}
        rest = logits.detach().double()[..., cut:]

        def whole(
            mine: Tensor, target: Tensor, vocabulary: int, first_column: int, gather: Any, **others: Any
        ) -> Tensor:
            return reference(torch.cat([mine, rest], -1), target, reduction="none", **others)

        names = ("cross_entropy",)
        case = Case(
            (logits[..., :cut].detach(), target),
            options,
            whole,
            roundings=4,
            terms=vocabulary,
            names=names,
            least_top=1.0,
        )
        if d.maybe(0.1):
            case.options["first_column"], case.refused = vocabulary + 1, "the columns are outside the vocabulary"
        return case
    if name == "cross_entropy_partials":
        smaller = {k: options[k] for k in ("ignore_index", "softcap")}
        smaller |= {"vocabulary": vocabulary, "first_column": cut}
        case = Case((logits[..., cut:], target), smaller, check=_check_partials, gradients=False, terms=vocabulary)
        case.names = ("cross_entropy",)
        if d.maybe(0.1):
            case.options["first_column"], case.refused = cut + 1, "the columns leave the vocabulary"
        return case
    pieces = [
        F.cross_entropy_partials(part, target, vocabulary=vocabulary, first_column=first,
                                 ignore_index=options["ignore_index"], softcap=options["softcap"])
        for part, first in ((logits[..., :cut], 0), (logits[..., cut:], cut))
    ]  # fmt: skip
    kept = dict(options)
    options.pop("softcap")
    options["vocabulary"] = vocabulary

    def check(outputs: Any, case: Case) -> str | None:
        wanted = reference(logits.detach().double(), target, reduction="none", **kept)
        return difference(outputs[0], wanted, case, "losses")

    return Case((torch.stack(pieces), target), options, check=check, gradients=False, terms=vocabulary, roundings=4)


def _check_partials(partials: Tensor, case: Case) -> str | None:
    logits, target = case.args
    cap, first = case.options["softcap"], case.options["first_column"]
    logits = logits.detach().double()
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    counted = (target != case.options["ignore_index"])[..., None]
    if logits.shape[-1] == 0:
        return None
    top = logits.amax(-1)
    place = target.long() - first
    inside = (place >= 0) & (place < logits.shape[-1])
    own = logits.gather(-1, place.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0].masked_fill(~inside, 0.0)
    wanted = torch.stack([top, (logits - top[..., None]).exp().sum(-1), own, logits.sum(-1)], -1)
    return difference(partials.masked_fill(~counted, 0.0), wanted.masked_fill(~counted, 0.0), case, "partials")
