"""torch's functions as a `Chain` knows them, by all their names, and the mode that sees a model call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..calls import runs_attention, scaled_dot_product_attention
from .chain import Chain
from .scores import OF_SCORES, Scores, call

__all__ = ["Deferring"]

_NUMBERS = (int, float)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _is_plain(*values: Any) -> bool:
    return all(type(one) is Tensor or type(one) is nn.Parameter for one in values)


def begin(query: Any, transposed: Any) -> Chain | None:
    """Of `query @ transposed`, which may be scores: a batch of matrices."""
    if not _is_plain(query, transposed) or query.dtype not in _FLOATS or query.dtype is not transposed.dtype:
        return None
    if query.dim() < 3 or query.dim() != transposed.dim() or query.shape[-1] != transposed.shape[-2]:
        return None
    if query.device != transposed.device or query.device.type not in ("cpu", "cuda"):
        return None
    try:
        leading = torch.broadcast_shapes(query.shape[:-2], transposed.shape[:-2])  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    query = query.expand(*leading, *query.shape[-2:])
    key = transposed.transpose(-1, -2).expand(*leading, transposed.shape[-1], transposed.shape[-2])
    return Chain(query, key, tuple((size,) if size != 1 else () for size in leading))


class Deferring(TorchFunctionMode):
    """Products of batches of matrices inside are Scores, which become our attention where they are attention. `listen`
    is called with each call of ours."""

    def __init__(self, listen: Callable[[Any], None] | None = None, place: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.listen, self.place = listen, place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if Scores in types:
            return call(func, args, kwargs, self)
        starts = _STARTS.get(func)
        if starts is None:
            return func(*args, **kwargs)
        found = starts(self, func, args, kwargs)
        return func(*args, **kwargs) if found is None else found

    def heard(self, *begun: Any) -> None:
        if self.listen is not None:
            self.listen(begun)


def _scores(
    mode: Deferring | None, chain: Chain | None, dtype: torch.dtype, func: Any, args: Any, kwargs: Any
) -> Scores | None:
    if chain is None:
        return None
    made = Scores.make(chain, dtype, func, args, kwargs)
    before = next((one for one in args if type(one) is Scores), None)
    vars(made)["place"] = (
        vars(before).get("place") if before is not None else mode.place() if mode is not None and mode.place else None
    )
    return made


# Functions of plain tensors.


def _matmul(mode: Deferring, func: Any, args: Any, kwargs: Any) -> Any:
    if kwargs or len(args) != 2:
        return None
    chain = begin(*args)
    return None if chain is None else _scores(mode, chain, args[0].dtype, func, args, kwargs)


def _baddbmm(mode: Deferring, func: Any, args: Any, kwargs: Any) -> Any:
    named = dict(zip(("input", "batch1", "batch2"), args)) | kwargs
    beta, alpha = named.pop("beta", 1), named.pop("alpha", 1)
    if named.keys() != {"input", "batch1", "batch2"} or not isinstance(beta, _NUMBERS):
        return None
    chain = begin(named["batch1"], named["batch2"])
    if chain is None or not isinstance(alpha, _NUMBERS) or not _is_plain(named["input"]):
        return None
    chain = chain.times(float(alpha))
    if chain is not None and beta != 0:
        chain = chain.plus(named["input"] if beta == 1 else named["input"] * beta)
    return _scores(mode, chain, named["batch1"].dtype, func, args, kwargs)


def _einsum(mode: Deferring, func: Any, args: Any, kwargs: Any) -> Any:
    read = _read_einsum(args)
    if read is None:
        return None
    (first, second, result), (one, other) = read
    shared = [label for label in first if label in second]
    contracted = [label for label in shared if label not in result]
    if len(contracted) != 1 or len(result) < 3 or len(set(first)) != len(first) or len(set(second)) != len(second):
        return None
    leading, row, column = list(result[:-2]), result[-2], result[-1]
    if set(leading) != set(shared) - set(contracted) or not _is_plain(one, other):
        return None
    if row in second and row not in first:
        first, second, one, other = second, first, other, one
    if row not in first or column not in second or column in first or row in second:
        return None
    if len(first) != len(second) or len(first) != len(leading) + 2:
        return None
    query = one.permute([first.index(label) for label in (*leading, row, *contracted)])
    transposed = other.permute([second.index(label) for label in (*leading, *contracted, column)])
    chain = begin(query, transposed)
    return None if chain is None else _scores(mode, chain, one.dtype, func, args, kwargs)


def _read_einsum(args: Any) -> Any:
    """((labels of the first, of the second, of the result), operands) of a plain product of two."""
    operands = args[1:] if len(args) != 2 or not isinstance(args[1], (tuple, list)) else tuple(args[1])
    if not args or not isinstance(args[0], str) or len(operands) != 2:
        return None
    left, arrow, result = args[0].replace(" ", "").partition("->")
    labels = left.split(",")
    if not arrow or len(labels) != 2 or not all(isinstance(one, Tensor) for one in operands):
        return None
    if "." in args[0]:
        hidden = operands[0].dim() - len(labels[0].replace(".", ""))
        if not all(text.startswith("...") for text in (*labels, result)) or hidden < 0:
            return None
        names = "".join(chr(ord("A") + index) for index in range(hidden))  # such letters stand for no other dimension
        labels, result = [text.replace("...", names) for text in labels], result.replace("...", names)
        if any(text.count(name) != 1 for text in (*labels, result) for name in names):
            return None
    if any(len(text) != one.dim() for text, one in zip(labels, operands)):
        return None
    return (labels[0], labels[1], result), operands


def _fused(mode: Deferring, func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) < 3:
        args, kwargs = _positional(args, kwargs)
    if len(args) < 3 or not _is_plain(*args[:3]) or not runs_attention(*(_last_four(one) for one in args[:3])):
        return None
    output = scaled_dot_product_attention(*args, **kwargs)
    mode.heard(mode.place() if mode.place else None)
    return output


def _positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """query, key and value by position."""
    left, found = dict(kwargs), list(args)
    for name in ("query", "key", "value")[len(args) :]:
        if name not in left:
            break
        found.append(left.pop(name))
    return tuple(found), left


def _last_four(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0) if tensor.dim() == 3 else tensor.flatten(0, -4)


_STARTS: dict[Any, Any] = {
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm), _matmul),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), _baddbmm),
    torch.einsum: _einsum,
    torch_functional.scaled_dot_product_attention: _fused,
}


# Functions of scores.


def _changes(step: Callable[..., Any]) -> Any:
    """A handler of a function whose first argument is Scores: step(scores, *args, **kwargs) is the next chain, or the
    next chain and its type, or None."""

    def handler(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        scores = args[0] if args else None
        if type(scores) is not Scores or scores.value is not None:
            return None
        try:
            found = step(scores, *args[1:], **kwargs)
        except TypeError:  # other arguments than those that are known here
            return None
        if found is None or found is scores:
            return found
        chain, dtype = found if isinstance(found, tuple) else (found, scores.dtype)
        made = _scores(mode, chain, dtype, _NOT_IN_PLACE.get(func, func), args, kwargs)
        if made is None or func not in _NOT_IN_PLACE:
            return made
        older = Scores.make(scores.chain, scores.dtype, *scores.made_by)
        older.versions = scores.versions
        made.made_by = (made.made_by[0], (older, *args[1:]), kwargs)
        return scores.become(made)

    return handler


def _add(scores: Scores, other: Any, *, alpha: Any = 1) -> Any:
    if isinstance(other, _NUMBERS):
        return scores.chain if other == 0 and not scores.chain.is_normed else None
    if isinstance(other, Tensor) and alpha == 1 and _is_plain(other) and _fits(scores, other):
        return scores.chain.plus(other), torch.promote_types(scores.dtype, other.dtype)
    return None


def _fits(scores: Scores, other: Tensor) -> bool:
    return other.device == scores.device and other.is_floating_point()


def _sub(scores: Scores, other: Any, *, alpha: Any = 1) -> Any:
    if isinstance(other, Tensor) and alpha == 1 and _is_plain(other) and _fits(scores, other):
        return scores.chain.plus(-other), torch.promote_types(scores.dtype, other.dtype)
    return None


def _mul(scores: Scores, other: Any) -> Any:
    if isinstance(other, _NUMBERS) and not isinstance(other, bool):
        return scores.chain.times(float(other))
    if isinstance(other, Tensor) and _is_plain(other):
        if other.dim() == 0 and other.device.type == "cpu":
            return scores.chain.times(other.item())
        return scores.chain.times_rows(other)
    return None


def _div(scores: Scores, other: Any) -> Any:
    if isinstance(other, _NUMBERS) and not isinstance(other, bool):
        return scores.chain.times(1.0 / other) if other else None
    if isinstance(other, Tensor) and _is_plain(other) and other.is_floating_point():
        if other.dim() == 0 and other.device.type == "cpu":
            return scores.chain.times(1.0 / other.item()) if other.item() else None
        return scores.chain.times_rows(other.reciprocal())
    return None


def _masked_fill(scores: Scores, mask: Any, value: Any) -> Any:
    number = _number(value)
    if number is None or not _is_plain(mask):
        return None
    return scores.chain.hidden_again(mask) if number == 0.0 else scores.chain.filled(mask, number, scores.dtype)


def _number(value: Any) -> float | None:
    if isinstance(value, _NUMBERS):
        return float(value)
    is_known = _is_plain(value) and value.numel() == 1 and value.device.type == "cpu"
    return float(value.item()) if is_known else None


def _where(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) != 3 or kwargs or not _is_plain(args[0]) or args[0].dtype is not torch.bool:
        return None
    condition, one, other = args
    if type(one) is Scores and one.value is None:
        number = _number(other)
        chain = None if number is None else one.chain.filled(~condition, number, one.dtype)
        return _scores(mode, chain, one.dtype, func, args, kwargs)
    if type(other) is Scores and other.value is None:
        number = _number(one)
        chain = None if number is None else other.chain.filled(condition, number, other.dtype)
        return _scores(mode, chain, other.dtype, func, args, kwargs)
    return None


def _softmax(scores: Scores, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    if dim not in (-1, scores.dim() - 1):
        return None
    return scores.chain.normed(), dtype or scores.dtype


def _cast(scores: Scores, *args: Any, **kwargs: Any) -> Any:
    given = [*args, *kwargs.values()]
    dtypes = [one for one in given if isinstance(one, torch.dtype)]
    dtypes += [one.dtype for one in given if isinstance(one, Tensor)]
    others = [one for one in given if not isinstance(one, (torch.dtype, Tensor, torch.device, bool))]
    devices = [one for one in given if isinstance(one, torch.device)]
    devices += [one.device for one in given if isinstance(one, Tensor)]
    if others or len(dtypes) > 1 or any(one != scores.device for one in devices):
        return None
    dtype = dtypes[0] if dtypes else scores.dtype
    if dtype not in _FLOATS or kwargs.get("copy"):
        return None
    return scores if dtype is scores.dtype else (scores.chain, dtype)


def _view(scores: Scores, *shape: Any, **kwargs: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if kwargs or not all(isinstance(size, int) for size in sizes):
        return None
    return scores.chain.viewed(list(sizes))


def _same(scores: Scores) -> Any:
    return scores


def _dropout(scores: Scores, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return None if training and p > 0.0 else scores


def _nan_to_num(scores: Scores, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    """Probabilities of ours are zeros where nothing is seen."""
    return scores if scores.chain.is_normed and not nan else None


def _like(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Functions that ask their Scores for a shape and a type: x.expand_as(scores), torch.zeros_like(scores)."""
    scores = args[-1] if func in (Tensor.expand_as, Tensor.type_as) else args[0] if args else None
    if type(scores) is not Scores or len(args) != (2 if func in _OF_ANOTHER else 1):
        return None
    if func in _OF_ANOTHER:
        if not _is_plain(args[0]):
            return None
        return args[0].expand(scores.shape) if func is Tensor.expand_as else args[0].to(scores.dtype)
    return func(torch.empty((), dtype=scores.dtype, device=scores.device).expand(scores.shape), **kwargs)


_OF_ANOTHER = (Tensor.expand_as, Tensor.type_as)


def _type_as(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    own = args and type(args[0]) is Scores
    return _changes(_cast)(mode, func, args, kwargs) if own else _like(mode, func, args, kwargs)


def _product(mode: Deferring | None, func: Any, args: Any, kwargs: Any) -> Any:
    if kwargs or len(args) != 2 or type(args[0]) is not Scores or not _is_plain(args[1]):
        return None
    return _attended(mode, args[0], args[1])


def _attended(mode: Deferring | None, scores: Scores, value: Tensor) -> Tensor | None:
    chain = scores.chain
    is_right = chain.is_normed and scores.value is None and scores.dtype is value.dtype
    if not is_right or value.device != scores.device or value.dim() != scores.dim():
        return None
    leading = chain.shape[:-2]
    if value.shape[:-2] != leading:
        if any(size not in (1, full) for size, full in zip(value.shape, leading)):
            return None
        value = value.expand(*leading, *value.shape[-2:])
    scores.check()
    output = chain.attend(value)
    if output is not None and mode is not None:
        mode.heard(vars(scores).get("place"), mode.place() if mode.place else None)
    return output


def _einsum_of_scores(mode: Deferring | None, func: Any, args: Any, kwargs: Any) -> Any:
    read = _read_einsum(args)
    if read is None:
        return None
    (first, second, result), (scores, value) = read
    if type(value) is Scores:
        first, second, scores, value = second, first, value, scores
    if type(scores) is not Scores or not _is_plain(value) or len(first) < 3:
        return None
    leading, row, column = list(first[:-2]), first[-2], first[-1]
    size = [label for label in second if label not in first]
    is_product = len(size) == 1 and set(second) == {*leading, column, *size} and len(second) == len(first)
    if not is_product or set(result) != {*leading, row, *size} or len(result) != len(first):
        return None
    found = _attended(mode, scores, value.permute([second.index(label) for label in (*leading, column, *size)]))
    names = [*leading, row, *size]
    return None if found is None else found.permute([names.index(label) for label in result])


_NOT_IN_PLACE: dict[Any, Any] = {
    Tensor.add_: Tensor.add,
    Tensor.__iadd__: Tensor.add,
    Tensor.sub_: Tensor.sub,
    Tensor.__isub__: Tensor.sub,
    Tensor.mul_: Tensor.mul,
    Tensor.__imul__: Tensor.mul,
    Tensor.div_: Tensor.div,
    Tensor.__itruediv__: Tensor.div,
    Tensor.masked_fill_: Tensor.masked_fill,
}


def _either(step: Callable[..., Any]) -> Any:
    """The handler of a function of two arguments whose order does not matter."""
    first = _changes(step)

    def handler(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if len(args) == 2 and type(args[0]) is not Scores and func not in _NOT_IN_PLACE:
            found = first(mode, func, (args[1], args[0]), kwargs)
            if type(found) is Scores:
                found.made_by = (func, args, kwargs)
            return found
        if len(args) == 2 and type(args[1]) is Scores:
            args = (args[0], args[1].compute())
        return first(mode, func, args, kwargs)

    return handler


OF_SCORES.update(
    {
        **dict.fromkeys(
            (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__), _either(_add)
        ),
        **dict.fromkeys((torch.sub, Tensor.sub, Tensor.__sub__, Tensor.sub_, Tensor.__isub__), _changes(_sub)),
        **dict.fromkeys(
            (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__), _either(_mul)
        ),
        **dict.fromkeys(
            (torch.div, torch.true_divide, Tensor.div, Tensor.__truediv__, Tensor.div_, Tensor.__itruediv__),
            _changes(_div),
        ),
        **dict.fromkeys((torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_), _changes(_masked_fill)),
        torch.where: _where,
        **dict.fromkeys((torch.tanh, Tensor.tanh), _changes(lambda scores: scores.chain.capped())),
        **dict.fromkeys((torch_functional.softmax,), _changes(_softmax)),
        **dict.fromkeys(
            (torch.softmax, Tensor.softmax), _changes(lambda scores, dim, dtype=None: _softmax(scores, dim, 3, dtype))
        ),
        **dict.fromkeys((Tensor.to, Tensor.type), _changes(_cast)),
        Tensor.type_as: _type_as,
        **dict.fromkeys((Tensor.expand_as, torch.zeros_like, torch.ones_like), _like),
        Tensor.float: _changes(lambda scores: _cast(scores, torch.float32)),
        Tensor.half: _changes(lambda scores: _cast(scores, torch.float16)),
        Tensor.bfloat16: _changes(lambda scores: _cast(scores, torch.bfloat16)),
        **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _changes(_view)),
        Tensor.contiguous: _changes(_same),
        torch_functional.dropout: _changes(_dropout),
        torch.dropout: _changes(lambda scores, p, train: _dropout(scores, p, train)),
        **dict.fromkeys((torch.nan_to_num, Tensor.nan_to_num), _changes(_nan_to_num)),
        **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm), _product),
        torch.einsum: _einsum_of_scores,
    }
)
