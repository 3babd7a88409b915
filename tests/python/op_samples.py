"""A valid call of every op of torch.ops.kernel_pytorch, recorded while the public functions run and differentiate.

Tests that hold for every op and every tensor argument walk these: what is added to the namespace without a sample fails
`test_every_op_has_a_sample` (test_torch_border.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from kernel_pytorch._ops import gradient_code, optimizer_step
from kernel_pytorch._ops.delayed_scales import delayed_scales_
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_pytorch import expression, functional

ops = torch.ops.kernel_pytorch

Sample = tuple[Any, ...]


def op_names() -> list[str]:
    """The ops of the library; test_torch_declare.py adds some of its own."""
    names = (schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("kernel_pytorch::"))
    return sorted({name.split("::")[1] for name in names if "::declare_" not in name})


def tensor_paths(args: Sample) -> Iterator[tuple[int, int | None]]:
    """Where the tensors of a call are: (argument, position in its list)."""
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor):
            yield i, None
        elif isinstance(arg, list | tuple):
            yield from ((i, j) for j, item in enumerate(arg) if isinstance(item, Tensor))


def tensor_at(args: Sample, path: tuple[int, int | None]) -> Tensor:
    i, j = path
    found: Tensor = args[i] if j is None else args[i][j]
    return found


def with_tensor(args: Sample, path: tuple[int, int | None], tensor: Tensor) -> Sample:
    """A copy of the call, every tensor cloned, with another one at `path`."""
    copied = map_tensors(args, clone)
    i, j = path
    if j is None:
        return (*copied[:i], tensor, *copied[i + 1 :])
    items = list(copied[i])
    items[j] = tensor
    return (*copied[:i], items, *copied[i + 1 :])


def map_tensors(args: Sample, change: Callable[[Tensor], Tensor]) -> Sample:
    def of(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return change(arg)
        return [of(item) for item in arg] if isinstance(arg, list | tuple) else arg

    return tuple(of(arg) for arg in args)


def clone(tensor: Tensor) -> Tensor:
    """With its strides, which clone() drops where there are gaps."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def argument_name(op: str, path: tuple[int, int | None]) -> str:
    i, j = path
    name: str = getattr(ops, op).default._schema.arguments[i].name
    return name if j is None else f"{name}[{j}]"


def is_written(op: str, path: tuple[int, int | None]) -> bool:
    alias = getattr(ops, op).default._schema.arguments[path[0]].alias_info
    return alias is not None and alias.is_write


@functools.cache
def samples() -> dict[str, list[Sample]]:
    """By op, one call for each set of tensors that a call was given."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with _Recorder() as recorder:
            _call_everything()
    calls: dict[str, list[Sample]] = {}
    for (name, _), args in recorder.calls.items():
        calls.setdefault(name, []).append(args)
    return calls


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, Sample] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "kernel_pytorch":
            name = func._schema.name.split("::")[1]
            given = (name, tuple(tensor_paths(args)))
            if given not in self.calls:
                self.calls[given] = map_tensors(args, lambda tensor: clone(tensor.detach()))
        return func(*args, **(kwargs or {}))


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def _both(function: Callable[..., Any], *tensors: Any, **options: Any) -> None:
    """Without a graph, and with one that is differentiated."""
    with torch.no_grad():
        function(*tensors, **options)
    outputs = function(*tensors, **options)
    outputs = [outputs] if isinstance(outputs, Tensor) else [output for output in outputs if output is not None]
    sum(output.float().square().sum() for output in outputs).backward()


def _call_everything() -> None:
    seed = torch.tensor([3, 4])
    _rows(seed)
    _products()
    _attention(seed)
    _tables_and_losses()
    _float8(seed)
    _pages()
    _optimizer(seed)
    _gradient_codes()


def _rows(seed: Tensor) -> None:
    random = dict(dropout_p=0.5, seed=seed)
    for residual in (None, leaf(2, 3, 8)):
        _both(functional.rms_norm, leaf(2, 3, 8), leaf(8), residual=residual)
        _both(functional.layer_norm, leaf(2, 3, 8), leaf(8), leaf(8), residual=residual)
    _both(functional.rms_norm, leaf(2, 3, 8), leaf(8), activation="gelu")
    _both(functional.layer_norm, leaf(2, 3, 8), leaf(8), leaf(8), activation="silu")
    _both(functional.activation, leaf(2, 3, 8), "gelu", bias=leaf(8), residual=leaf(2, 3, 8), **random)
    biases = dict(gate_bias=leaf(8), up_bias=leaf(8))
    _both(functional.gated_activation, leaf(2, 3, 8), leaf(2, 3, 8), "silu", residual=leaf(2, 3, 8), **biases, **random)
    packed = dict(bias=leaf(8), residual=leaf(2, 3, 4))
    _both(functional.gated_activation_packed, leaf(2, 3, 8), "silu", **packed, **random)
    _both(functional.dropout, leaf(2, 3, 8), 0.5, seed=seed)
    _both(functional.softmax, leaf(2, 3, 8), mask=torch.randn(2, 3, 8))
    functional.softmax_(torch.randn(2, 3, 8), mask=torch.randn(2, 3, 8))
    _both(functional.mean_pool, leaf(6, 2, 3), torch.tensor([0, 2, 6]))
    _both(functional.chunk_mean_pool, leaf(2, 6, 3), 2)
    _linear_attention()
    _sparse_attention()


def _linear_attention() -> None:
    heads = leaf(1, 6, 2, 4), leaf(1, 6, 2, 4), leaf(1, 6, 2, 3)
    options = dict(decay=leaf(2), initial_state=leaf(2, 2, 4, 3), cu_seqlens=torch.tensor([0, 2, 6]))
    for gate in (leaf(1, 6, 2), leaf(1, 6, 2, 4)):
        _both(functional.linear_attention, *heads, gate=gate, return_state=True, **options)
    step = [torch.randn(1, 1, 2, size) for size in (4, 4, 3)]
    beta = leaf(1, 6, 2)
    del options["decay"]
    for gate in (leaf(1, 6, 2), leaf(1, 6, 2, 4)):
        _both(functional.delta_rule, *heads, beta, gate=gate, return_state=True, **options)
    pool, index = torch.randn(3, 2, 4, 3), torch.tensor([2])
    gates = dict(gate=torch.randn(1, 1, 2), state_index=index, cu_seqlens=torch.tensor([0, 1]))
    functional.linear_attention_step_(*step, pool, decay=torch.randn(2), **gates)
    states = dict(initial_state=leaf(2, 3, 5), cu_seqlens=torch.tensor([0, 2, 6]))
    taps = leaf(5, 4), leaf(5)
    _both(functional.causal_conv1d, leaf(1, 6, 5), *taps, activation="silu", return_state=True, **states)
    functional.causal_conv1d_step_(torch.randn(2, 1, 5), torch.randn(5, 3), torch.randn(2, 2, 5), torch.randn(5))
    functional.delta_rule_step_(*step, torch.rand(1, 1, 2), pool, **gates)


def _sparse_attention() -> None:
    heads = leaf(1, 6, 2, 4), leaf(1, 6, 1, 4), leaf(1, 6, 1, 3)
    gates = [leaf(1, 6, 2) for _ in range(3)]
    sizes = dict(block_size=2, blocks=2, window=2, compress_block=2, compress_stride=1)
    means = dict(compressed_key=leaf(1, 5, 1, 4), compressed_value=leaf(1, 5, 1, 3))
    lists = dict(block_indices=torch.zeros(1, 6, 1, 2, dtype=torch.int32))
    _both(functional.native_sparse_attention, *heads, gates=gates, **sizes, **means, **lists)
    _both(functional.native_sparse_attention, *heads, gates=gates, **sizes, cu_seqlens=torch.tensor([0, 2, 6]))
    pages = dict(key_lengths=torch.tensor([3, 4]), block_tables=torch.tensor([[1, 0], [0, 2]]))
    query, weights = torch.randn(2, 1, 2, 4), torch.rand(2, 1, 2)
    functional.lightning_indexer(query, torch.randn(3, 2, 4), weights, top_k=2, key_scale=torch.rand(3, 2), **pages)


def _products() -> None:
    _both(functional.matmul, leaf(2, 3, 4), leaf(2, 4, 5))
    ops.matmul_add_(torch.zeros(3, 5), torch.randn(3, 4), torch.randn(4, 5), 1.0)
    _both(functional.linear, leaf(2, 3, 8), leaf(4, 8), leaf(4), activation="gelu", residual=leaf(2, 3, 4))
    _both(functional.mlp, leaf(2, 3, 8), leaf(6, 8), leaf(4, 6), leaf(6), leaf(4), residual=leaf(2, 3, 4))
    _experts()


def _experts() -> None:
    offsets, gather = torch.tensor([1, 4], dtype=torch.int32), torch.tensor([2, 0, 1, 1], dtype=torch.int32)
    _both(functional.grouped_matmul, leaf(3, 8), leaf(2, 8, 4), offsets, bias=leaf(2, 4), gather=gather)
    _both(functional.grouped_matmul, leaf(4, 8), leaf(2, 4, 8), offsets, transpose_weight=True)
    ops.group_sums(torch.randn(3, 4), offsets, gather, torch.rand(4), None)
    routing = functional.route(leaf(3, 4), 2, bias=torch.randn(4))
    (routing.weights.square().sum() + routing.aux_loss + routing.z_loss).backward()
    with torch.no_grad():
        routing = functional.route(torch.randn(3, 4), 2, bias=torch.randn(4))
    functional.route_chosen(torch.tensor([[0, 2], [3, 1]]), torch.rand(2, 2), 4)
    _both(functional.moe_combine, leaf(6, 8), routing._replace(weights=leaf(3, 2)))
    biases = dict(gate_up_bias=leaf(4, 8), down_bias=leaf(4, 6))
    _both(functional.moe_mlp, leaf(3, 6), routing._replace(weights=leaf(3, 2)), leaf(4, 6, 8), leaf(4, 4, 6), **biases)


def _attention(seed: Tensor) -> None:
    query, key, value = leaf(2, 2, 4, 8), leaf(2, 2, 4, 8), leaf(2, 2, 4, 8)
    captured = leaf(2)
    lists = functional.block_lists(torch.ones(1, 1, 2, 2, dtype=torch.bool), 2)
    functional.select_blocks(query, key, block_size=2, key_parts=1)
    functional.select_by_scores(
        torch.randn(2, 2, 2, 2), 4, 4, block_size=2, query_lengths=torch.tensor([4, 3], dtype=torch.int32)
    )
    segments = torch.zeros(2, 4, dtype=torch.int32)
    options = dict(
        bias=leaf(2, 2, 4, 4), sinks=leaf(2), alibi_slopes=torch.rand(2), mask=torch.ones(2, 1, 4, 4).bool(),
        query_segment_ids=segments, key_segment_ids=segments, key_lengths=torch.tensor([4, 3]), dropout_p=0.5,
        seed=seed,
    )  # fmt: skip
    _both(functional.attention, query, key, value, return_lse=True, **options)
    _both(functional.attention, query, key, value, block_mask=lists)
    functional.attention_fp8(*(x.detach() for x in (query, key, value)), rotate=True, return_lse=True)
    packed = [leaf(7, 2, 8) for _ in range(3)]
    offsets = torch.tensor([0, 3, 7])
    _both(functional.attention, *packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=4, max_seqlen_k=4)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any) -> Any:
        return score + slopes[h] * (q - k)

    _both(functional.attention, query, key, value, score_mod=score_mod, captured=(captured,))
    trace = expression.trace(score_mod, None, (captured.detach(),))
    expression.evaluate(trace.score_mod, torch.randn(1, 2, 3, 4), trace.captured)

    whole = [x.detach() for x in (query, key, value)]
    output, lse = torch.zeros(2, 2, 4, 8), torch.full((2, 2, 4), float("-inf"))
    some = dict(bias=torch.randn(2, 2, 4, 4), key_lengths=torch.tensor([4, 3]))
    functional.attention_part_(output, lse, *whole, **some)
    gradients = [torch.zeros(2, 2, 4, 8) for _ in range(3)]
    functional.attention_part_backward_(*gradients, torch.randn(2, 2, 4, 8), *whole, output, lse, lse * 0 + 1, **some)
    cos, sin = functional.rope_tables(4, 8)
    _both(functional.rope, leaf(2, 4, 2, 8), leaf(2, 4, 2, 8), cos, sin, positions=torch.arange(4))
    _both(functional.norm_rope, leaf(2, 4, 2, 8), leaf(8), cos, sin)
    functional.rope_(torch.randn(2, 4, 2, 8), torch.randn(2, 4, 2, 8), cos, sin, positions=torch.arange(4))
    _both(functional.rope_from_frequencies, leaf(2, 4, 2, 8), leaf(2, 4, 2, 8), functional.rope_frequencies(8)[0])


def _tables_and_losses() -> None:
    _both(functional.embedding, torch.tensor([[0, 2], [1, 1]]), leaf(3, 4))
    target = torch.tensor([[1, 0, 4], [2, 3, 1]])
    for reduction in ("mean", "none"):
        _both(functional.cross_entropy, leaf(2, 3, 5), target, weight=torch.rand(5), reduction=reduction)
    functional.cross_entropy_(torch.randn(2, 3, 5), target, weight=torch.rand(5))
    functional.cross_entropy_partials(torch.randn(2, 3, 5), target, vocabulary=5, first_column=0)
    _both(functional.linear_cross_entropy, leaf(2, 3, 8), leaf(5, 8), target, class_weight=torch.rand(5))
    with torch.no_grad():
        ops.linear_cross_entropy(*_plain_linear_cross_entropy(target))
        logits, weight = torch.randn(2, 3, 5), torch.rand(5)
        ops.cross_entropy_forward(logits, target, weight, -100, 0.0, 0.0, 0.0, True)


def _plain_linear_cross_entropy(target: Tensor) -> Sample:
    tensors = (torch.randn(2, 3, 8), torch.randn(5, 8), target, torch.rand(5))
    return (*tensors, -100, 0.0, 0.0, 0.0, 1 << 20, False, False, False)


def _float8(seed: Tensor) -> None:
    one = dict(amax=torch.zeros(1), found_nonfinite=torch.zeros(1), seed=seed, transposed=True)
    made = functional.quantize(torch.randn(4, 6), granularity="row", **one)
    functional.rms_norm_quantized(torch.randn(4, 6), torch.rand(6), residual=torch.randn(4, 6), with_output=True, **one)
    gate = [torch.randn(4, 6) for _ in range(3)]
    functional.gated_activation_quantized(*gate[:2], with_output=True, **one)
    functional.gated_activation_backward_quantized(*gate, with_output=True, **one)
    functional.scaled_matmul(made.codes, made.codes, made.scales, made.scales, bias=torch.randn(4))
    whole = functional.quantize(torch.randn(4, 6), scale=torch.ones(1))
    products = (whole.codes, whole.codes, whole.scales, whole.scales)
    ends = torch.tensor([1, 4], dtype=torch.int32)
    functional.scaled_grouped_matmul(whole.codes, torch.stack([whole.codes] * 2), *products[2:], ends)
    functional.scaled_matmul(*products, output_scale=torch.ones(1), dtype=torch.float8_e4m3fn)
    coded = functional.quantize_weight(torch.randn(4, 32), "int4", group=32, asymmetric=True, seed=seed)
    coded.dequantize(torch.float32)
    _both(functional.quantized_matmul, leaf(2, 3, 32), coded, bias=leaf(4))
    functional.quantize_weight(torch.randn(4, 32), "nvfp4").dequantize(torch.float32)
    grouped = dict(gather=torch.tensor([1, 0, 2, 2], dtype=torch.int32), bias=leaf(2, 2))
    _both(functional.quantized_grouped_matmul, leaf(3, 32), coded, ends[:1].repeat(2), **grouped)
    functional.quantized_grouped_matmul(torch.randn(3, 32), functional.quantize_weight(torch.randn(4, 32)), ends[:1])
    integers = torch.ones(4, 32, dtype=torch.int8)
    _both(functional.int8_matmul, leaf(2, 3, 32), integers, torch.rand(4), bias=leaf(4))
    functional.int8_matmul(integers, integers, torch.rand(4), scale_x=torch.rand(4))
    layers = [[torch.rand(2) for _ in range(2)] for _ in range(2)]
    delayed_scales_(torch.rand(3, 4), *layers, torch.rand(4), torch.rand(4))
    sparse = functional.sparse_compress(torch.randn(4, 32))
    sparse.to_dense()
    _both(functional.sparse_matmul, leaf(2, 3, 32), sparse, bias=leaf(4))


def _pages() -> None:
    cache = torch.randn(4, 2, 1, 8)
    tables, lengths = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)
    parts = dict(sinks=torch.randn(2), alibi_slopes=torch.rand(2), mask=torch.ones(2, 2, 2, dtype=torch.bool))
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    scales = dict(key_scale=torch.rand(1), value_scale=torch.rand(1))
    functional.paged_attention(
        torch.randn(3, 2, 8), cache, cache.clone(), tables, lengths, cu_seqlens_q=offsets, max_seqlen_q=2,
        return_lse=True, **parts, **scales,
    )  # fmt: skip
    new = torch.randn(2, 1, 8)
    rotation = {"cos": torch.randn(9, 4), "sin": torch.randn(9, 4), "positions": torch.tensor([7, 2])}
    functional.append_kv(new, new.clone(), cache, cache.clone(), torch.tensor([5, 1]), **scales, **rotation)
    plain = (torch.randn(2, 2, 8), cache, cache.clone(), tables, lengths)
    functional.paged_attention(*plain, out=torch.empty(2, 2, 8), return_lse=True)
    plan = functional.plan_decode(lengths, heads=2, key_heads=1, cu_seqlens_q=torch.arange(3, dtype=torch.int32))
    functional.plan_decode(lengths, heads=2, key_heads=1, out=plan)
    functional.mla_decode(torch.randn(2, 2, 8), cache[:, :, 0], tables, lengths, head_size_v=6, return_lse=True)
    functional.merge_attention(torch.randn(3, 2, 8), torch.randn(2, 3), torch.randn(3, 2, 8), torch.randn(2, 3))
    functional.sample(torch.randn(2, 9), temperature=1.0, top_k=3, top_p=0.9, min_p=0.1, seeds=5, positions=7)


def _optimizer(seed: Tensor) -> None:
    parameters = [torch.randn(5), torch.randn(2, 3)]
    lists = [[p.clone().abs() for p in parameters] for _ in range(4)]
    steps = [torch.zeros(()), torch.ones(())]
    scalars = (torch.tensor(1e-3), torch.tensor(1.0), torch.tensor(0.0), torch.tensor(2.0))
    rates = (1e-3, 0.9, 0.99, 1e-8, 0.01, 0.0, 1.0, False, False)
    step, plain = optimizer_step.optimizer_step_, ("adamw", "plain", *rates)
    gradients, *states = lists
    step(parameters, gradients, [], [], *states, [], [], steps, *scalars, None, *plain)
    narrow = [p.bfloat16() for p in parameters]
    gradients = [p.clone() for p in narrow]
    step(narrow, gradients, [], parameters, *states[:2], [], [], [], steps, *(None,) * 5, *plain)
    states = [[p.clone().abs() for p in narrow] for _ in range(2)]
    step(narrow, gradients, [], [], *states, [], [], [], steps, *(None,) * 4, seed, *plain)
    corrections, *codes = [[torch.zeros_like(p, dtype=torch.int8) for p in parameters] for _ in range(3)]
    scales = [[torch.ones(-(-p.numel() // 64)) for p in parameters] for _ in range(2)]
    step(narrow, gradients, corrections, [], *codes, [], *scales, steps, *scalars, None, "adamw", "companded", *rates)
    optimizer_step.reduce_norm(parameters)


def _gradient_codes() -> None:
    x, error, codes, scales = (
        torch.randn(300),
        torch.randn(300),
        torch.zeros(2, 256, dtype=torch.int8),
        torch.ones(2, 1),
    )
    gradient_code.gradient_encode_(x, error, codes, scales, "int8", True, 1.0)
    gradient_code.gradient_decode_(codes, scales, x, "int8", False, True)
