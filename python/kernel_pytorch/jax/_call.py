"""Calls of declared ops from JAX: arguments to buffers and attributes, results from the op's list of fields, vmap.

`call` is a function of arrays that JAX traces like any other. What it computes it does not differentiate: gradients are
in _gradients.py.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from .._shape_rules import declared, misfit, outputs_of
from . import _plain, _workspace
from ._dimensions import folded
from ._forward_mode import refuse
from ._registration import PREFIX
from ._sharding import has_mesh, partitioned

Array = jax.Array

_DTYPES = {
    "fp32": jnp.float32,
    "fp64": jnp.float64,
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "int8": jnp.int8,
    "int32": jnp.int32,
    "int64": jnp.int64,
    "bool": jnp.bool_,
}
_NAMES = {jnp.dtype(dtype): name for name, dtype in _DTYPES.items()}
_NAMES[jnp.dtype(jnp.uint32)] = "int64"  # pairs of words, see int64_words
_KERNEL = "kernel"  # an option of every call: the kernel that it has to run
# Results carry the manual axes of shard_map that their arguments vary over; jax 0.10.2 renamed the argument.
_VARYING = next(
    name for name in ("manual_axis_type", "vma") if name in inspect.signature(jax.ShapeDtypeStruct).parameters
)


class TracedCall(NamedTuple):
    """A call while it is traced, as `_workspace.explained` takes it."""

    op: str
    tensors: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]


# "kernel" or "kernel config" by `call_name`: what calls traced inside have to run (tier Override).
_kernels: contextvars.ContextVar[tuple[tuple[str, str], ...]] = contextvars.ContextVar("kernels", default=())
_heard: contextvars.ContextVar[list[TracedCall] | None] = contextvars.ContextVar("heard", default=None)


def call_name(op: str) -> str:
    """attention for `attention` and `attention_forward`, which compute the same, attention_backward for that."""
    return op.removesuffix("_forward")


def kernels_in_use() -> tuple[tuple[str, str], ...]:
    return _kernels.get()


@contextlib.contextmanager
def using_kernels(kernels: Mapping[str, str]) -> Iterator[None]:
    token = _kernels.set(tuple({**dict(_kernels.get()), **kernels}.items()))
    try:
        yield
    finally:
        _kernels.reset(token)


def made_once(make: Any) -> Any:
    """functools.lru_cache for functions that jax traces. Where calls are heard each is made anew: jax keeps traces of
    functions that it knows (0.11 does of custom_vjp and custom_vmap), and a kept trace calls nothing."""
    kept = functools.lru_cache(maxsize=4096)(make)

    @functools.wraps(make)
    def made(*arguments: Any) -> Any:
        return (kept if _heard.get() is None else make)(*arguments)

    return made


@contextlib.contextmanager
def hearing() -> Iterator[list[TracedCall]]:
    """The calls that are traced inside."""
    calls: list[TracedCall] = []
    token = _heard.set(calls)
    try:
        yield calls
    finally:
        _heard.reset(token)


def dtype_name(array: Any) -> str:
    """The core's name of an array's type; raises for those that no op takes."""
    return name_of_dtype(array.dtype)


def check_type(owner: str, name: str, array: Any) -> None:
    if array.dtype not in _NAMES:
        raise TypeError(f"{owner}: {name} is {array.dtype}, which no op takes; convert it to another type")


def name_of_dtype(dtype: Any) -> str:
    name = _NAMES.get(jnp.dtype(dtype))
    if name is None:
        raise TypeError(f"kernel_pytorch: {jnp.dtype(dtype)} is a type that no op takes; it is one of {list(_DTYPES)}")
    return name


def int64_words(array: Array) -> Array:
    """Integers as the pairs of 32-bit words, the lower first, that stand for 64-bit ones: JAX has none without x64."""
    if array.dtype == jnp.int64:
        return array
    wide = array.astype(jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.stack([wide, wide >> 31], axis=-1), jnp.uint32)


def parameter_for(x: Array, parameter: Any) -> Any:
    """A parameter in a type that ops take next to x: x's own, or fp32 next to 16 bits."""
    if parameter is None:
        return None
    parameter = jnp.asarray(parameter)
    if parameter.dtype == x.dtype or (parameter.dtype == jnp.float32 and x.dtype != jnp.float64):
        return parameter
    return parameter.astype(x.dtype)


def same_type(x: Array, other: Array) -> tuple[Array, Array]:
    dtype = jnp.promote_types(x.dtype, other.dtype)
    return x.astype(dtype), other.astype(dtype)


def seed_words(op: str, seed: Any) -> Array:
    """A key of jax.random, or two 64-bit integers (seed and offset), as the op takes them."""
    if seed is None:
        raise ValueError(f"{op}: dropout needs a seed; give a key of jax.random as seed=")
    seed = jnp.asarray(seed)
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return jax.random.bits(seed, (2, 2), jnp.uint32)
    if seed.dtype == jnp.uint32 and seed.shape == (2,):
        return jax.random.bits(jax.random.wrap_key_data(seed), (2, 2), jnp.uint32)
    if seed.shape == (2,) and jnp.issubdtype(seed.dtype, jnp.integer):
        return int64_words(seed)
    raise ValueError(
        f"{op}: seed has shape {list(seed.shape)} and type {seed.dtype}; give a key of jax.random, or two integers"
    )


class _Viewed:
    """An array's shape as the op sees it."""

    def __init__(self, array: Any) -> None:
        self.shape = array.shape[:-1] if array.dtype == jnp.uint32 else array.shape
        self.dtype = array.dtype


def call(
    op: str,
    tensors: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    *,
    wanted: Sequence[str] = (),
    types: Mapping[str, Any] | None = None,
    written: Mapping[str, jax.ShapeDtypeStruct] | None = None,
) -> dict[str, Any]:
    """Outputs of an op by name; those that the arguments do not call for are missing.

    Tensors that the op updates in place are outputs too, lists of them as lists; XLA copies those that live on.

    Args:
        tensors: arrays by argument, lists of arrays for lists; None where absent.
        options: numbers, flags and texts, known while tracing; None keeps the op's default.
        wanted: flags that ask for outputs, as the list of fields names them.
        types: the options that choose outputs' types.
        written: tensors that the op fills in place whatever they held, by shape and type.
    """
    given = {name: value for name, value in tensors.items() if value is not None and not _is_empty_list(value)}
    plain = _plain.computed(op, {**given, **(options or {}), **(types or {}), "op": op})
    if plain is not None:
        return plain
    names = tuple((name, len(value) if isinstance(value, list | tuple) else -1) for name, value in given.items())
    flat = [array for value in given.values() for array in (value if isinstance(value, list | tuple) else [value])]
    arrays = [jnp.asarray(array) for array in flat]
    for name, array in zip((name for name, count in names for _ in range(abs(count))), arrays):
        check_type(call_name(op), name, array)
    site = _site(
        op,
        names,
        tuple(with_kernel(op, options or {}).items()),
        tuple(wanted),
        tuple(sorted((name, name_of_dtype(dtype)) for name, dtype in (types or {}).items() if dtype is not None)),
        tuple((name, tuple(one.shape), name_of_dtype(one.dtype)) for name, one in (written or {}).items()),
    )
    return site(*arrays)  # type: ignore[no-any-return]


def _is_empty_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and not value


def _grouped(names: Sequence[tuple[str, int]], arrays: Sequence[Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    begin = 0
    for name, count in names:
        values[name] = arrays[begin] if count < 0 else list(arrays[begin : begin + count])
        begin += abs(count)
    return values


@made_once
def _site(op: str, names: Any, options: Any, wanted: Any, types: Any, written: Any) -> Any:
    """(arrays) -> outputs by name, for one set of static arguments."""
    fields = {argument["name"]: argument for argument in declared()[op]["arguments"]}
    for name, *_ in (*names, *options, *written):
        if name not in fields and name != _KERNEL:
            raise TypeError(f"{op}: it has no argument {name!r}; it has {', '.join(fields)}")
    attributes = attributes_of(op, dict(options))
    static = {**dict(options), **dict(types), **dict.fromkeys(wanted, True)}
    each = tuple(name for name, count in names for _ in range(abs(count)))
    updated = [place for place, name in enumerate(each) if fields[name]["updated"]]

    def local(*arrays: Array) -> dict[str, Any]:
        values = {**static, **_grouped(names, [_Viewed(array) for array in arrays])}
        described = outputs_of(op, values, dtype_name)
        if any(output.is_undetermined for output in described) and (words := misfit(op, values)):
            raise ValueError(f"{call_name(op)}: {words}")
        outputs = [output for output in described if output.shape is not None]
        made_here = [(output.name, output.shape, output.dtype) for output in outputs] + list(written)
        results = [result_like(shape, _DTYPES[dtype], arrays) for _, shape, dtype in made_here]
        if not updated and all(0 in one.shape for one in results):
            # Nothing is computed. XLA refuses to capture a call that launches nothing.
            return {name: jnp.zeros(one.shape, one.dtype) for (name, *_), one in zip(made_here, results)}
        operands = [((Part(name),), array) for name, array in zip(each, arrays)]
        wanted_here = [((Part(name),), one) for (name, *_), one in zip(made_here, results)]
        made = emit(op, operands, wanted_here, attributes, updated)
        changed = iter(made[len(made_here) :])
        in_place = {
            name: next(changed) if count < 0 else [next(changed) for _ in range(count)]
            for name, count in names
            if fields[name]["updated"]
        }
        return {**dict(zip((name for name, *_ in made_here), made[: len(made_here)])), **in_place}

    @custom_vmap
    def run(*arrays: Array) -> dict[str, Any]:
        if has_mesh() and not updated and not written:
            return partitioned(op, each, static, local, arrays)
        return local(*arrays)

    @run.def_vmap
    def batch(size: int, mapped: Sequence[bool], *arrays: Array) -> tuple[dict[str, Any], dict[str, Any]]:
        values = {**static, **_grouped(names, arrays)}
        in_one = None if written else folded(op, each, values, size, mapped, arrays)
        outputs = looped(run, mapped, arrays) if in_one is None else in_one(run)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return undifferentiated(op, run)


class Part(NamedTuple):
    """A tensor of an op in a buffer of XLA's: all of it, or a slice of its last dimension but one."""

    name: str
    begin: int = 0
    size: int = -1  # all

    @property
    def word(self) -> str:
        return self.name if self.size < 0 else f"{self.name}@{self.begin}:{self.size}"

    def described(self, buffer: Any) -> tuple[Any, ...]:
        """Name, type and shape as the op sees them, and strides where they are a slice's."""
        shape = tuple(_Viewed(buffer).shape)
        if self.size < 0:
            return self.name, dtype_name(buffer), shape
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return self.name, dtype_name(buffer), (*shape[:-2], self.size, shape[-1]), strides


Buffer = tuple[tuple[Part, ...], Any]  # the op's tensors in it; an array, or a result's shape and type


def emit(
    op: str,
    operands: Sequence[Buffer],
    results: Sequence[Buffer],
    attributes: Mapping[str, Any],
    updated: Sequence[int] = (),
) -> Any:
    """The call itself, rehearsed: buffers of the results, then of the updated operands.

    Args:
        attributes: options as `attribute` makes them.
        updated: places of operands that are written in place.
    """
    arrays, structs = [array for _, array in operands], [struct for _, struct in results]
    tensors = tuple(part.described(buffer) for parts, buffer in (*operands, *results) for part in parts)
    options = tuple(attributes.items())
    if (heard := _heard.get()) is not None:
        heard.append(TracedCall(op, tensors, options))
    scratch = _workspace.bytes_for(op, tensors, options)
    names = [["+".join(part.word for part in parts) for parts, _ in buffers] for buffers in (operands, results)]
    aliases = {place: len(structs) + i for i, place in enumerate(updated)}
    structs += [result_like(arrays[place].shape, arrays[place].dtype, arrays) for place in updated]
    names[1] += [names[0][place] for place in updated]
    if _plain.is_needed():
        return _plain.hosted(op, operands, results, structs, attributes, updated)
    if scratch:
        structs.append(result_like((scratch,), jnp.uint8, arrays))
        names[1].append(_workspace.NAME)
    called = jax.ffi.ffi_call(PREFIX + op, structs, vmap_method="sequential", input_output_aliases=aliases)
    words = {"op": op, "tensors": " ".join(names[0]), "results": " ".join(names[1]), **attributes}
    return called(*arrays, site=_hash_of(words), **words)


def with_kernel(op: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that say something, sorted; the kernel that calls have to run here is one."""
    chosen = {**options, _KERNEL: dict(_kernels.get()).get(call_name(op))}
    return {name: value for name, value in sorted(chosen.items()) if value is not None}


def attributes_of(op: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as the attributes of a call."""
    kinds = {argument["name"]: argument["kind"] for argument in declared()[op]["arguments"]} | {_KERNEL: "text"}
    return {name: attribute(op, name, kinds[name], value) for name, value in options.items()}


def undifferentiated(op: str, run: Any) -> Any:
    """A function of arrays that refuses to be differentiated with our sentence."""
    function = jax.custom_jvp(run)
    function.defjvp(functools.partial(refuse, op=op))
    return function


def _hash_of(attributes: Mapping[str, Any]) -> Any:
    """What the handler finds a call's attributes by; the same in every process."""
    text = repr(sorted((name, type(value).__name__, str(value)) for name, value in attributes.items()))
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), np.int64)[0]


def looped(run: Any, mapped: Sequence[bool], arrays: Sequence[Array]) -> dict[str, Array]:
    """One call per sample, one after another."""
    moving = [array for array, is_mapped in zip(arrays, mapped) if is_mapped]

    def one(parts: Sequence[Array]) -> dict[str, Array]:
        rest = iter(parts)
        return run(*(next(rest) if is_mapped else array for array, is_mapped in zip(arrays, mapped)))  # type: ignore[no-any-return]

    return jax.lax.map(one, moving)  # type: ignore[no-any-return]


def attribute(op: str, name: str, kind: str, value: Any) -> Any:
    """A static value as the attribute that the handler reads: i1, i64, f64 or a text."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{op}: {name} is traced; it must be known while tracing, make it a static argument of jit")
    if kind == "flag":
        return np.bool_(value)
    if kind == "integer":
        return np.int64(value)
    if kind == "number":
        return np.float64(value)
    return str(value)


def result_like(shape: Any, dtype: Any, arrays: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """A result of a call of these arrays, on the manual axes of shard_map that they vary over."""
    axes = [getattr(jax.typeof(array), _VARYING, None) for array in arrays]
    varying = frozenset().union(*(getattr(one, "varying", one) or () for one in axes))
    if not varying:
        return jax.ShapeDtypeStruct(shape, dtype)
    # jax looks for these axes in a mesh that it does not fill in by itself.
    whole = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec())
    value = varying if _VARYING == "vma" else jax.sharding.ManualAxisType(varying=varying)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=whole, **{_VARYING: value})
