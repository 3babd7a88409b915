"""Ops that the core declares by a list of fields: their schemas are a contract, and both readers of the lists agree."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from kernel_pytorch._ops.attention import AttentionOptions, attention_options  # noqa: E402
from kernel_pytorch._ops.support.declared import declared, shapes_of  # noqa: E402

from kernel_pytorch import functional  # noqa: E402 (declares the ops to torch)

# The order of arguments is that of a list's lines: whoever moves one breaks positional callers and exported graphs.
SCHEMAS = Path(__file__).with_name("declared_schemas.txt")


def test_schemas_are_these():
    assert [declaration["schema"] for declaration in declared().values()] == SCHEMAS.read_text().splitlines()
    for name in declared():
        assert getattr(torch.ops.kernel_pytorch, name).default._schema.name == f"kernel_pytorch::{name}"


def described(outputs):
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs or ()
    return [(one.shape, one.dtype, one.stride()) for one in outputs]


def compare(name, *arguments):
    """The C++ reader of the list makes the outputs, Python's the fake ones."""
    fake = described(shapes_of(name)(*arguments))
    assert described(getattr(torch.ops.kernel_pytorch, name)(*arguments)) == fake, name


def _layers(x, given):
    """Linear layers with 6 rows in their weights, or 6 pairs; `given`: with biases, an activation, a gate."""

    def rows(columns):
        return torch.randn((*x.shape[:-1], columns)).to(x.dtype)

    kind, inner = ("silu", 12) if given else ("identity", 6)
    first, second = torch.randn(x.shape[-1], inner).to(x.dtype).t(), torch.randn(3, 6).to(x.dtype)
    biases = [torch.randn(inner).to(x.dtype), torch.randn(3).to(x.dtype)] if given else [None, None]
    kept = rows(inner) if given else x.new_empty((0,))
    layers = (first, biases[0], second, biases[1])
    return {
        "linear": (x, first, biases[0], None, kind, given, "full", None),
        "linear_forward": (x, first, biases[0], rows(6), kind, given, "full", None),
        "linear_backward": (rows(6), x, first, biases[0], kept, kind, given, "full", True, True, given, None),
        "mlp": (x, *layers, rows(3), kind, given, "full"),
        "mlp_forward": (x, *layers, None, kind, given, "full"),
        "mlp_backward": (rows(3), x, *layers, rows(6), kept, kind, given, "full", given, True, given, True, given),
    }


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 0, 4), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("given", [True, False])
def test_fake_outputs_are_like_real_ones_of_rows(shape, dtype, given):
    x, vector = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    parameter, residual, seed = vector if given else None, x if given else None, torch.tensor([1, 2])
    rows = torch.ones(shape[:-1], dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    compare("rms_norm", x, parameter, 1e-6, 0.0, None)
    compare("rms_norm_forward", x, parameter, 1e-6, 0.0, torch.bfloat16 if dtype is torch.float32 else None)
    compare("add_rms_norm", x, x, parameter, 1e-6, 0.0, None)
    compare("add_rms_norm_forward", x, x, parameter, 1e-6, 0.0, None)
    compare("rms_norm_activation", x, parameter, 1e-6, 0.0, "gelu", None)
    compare("rms_norm_activation_forward", x, parameter, 1e-6, 0.0, "silu", None)
    compare("rms_norm_backward", x, x, parameter, rows, None, 0.0, given, True)
    compare("layer_norm", x, parameter, parameter, 1e-5, None)
    compare("layer_norm_forward", x, parameter, parameter, 1e-5, None)
    compare("add_layer_norm", x, x, parameter, parameter, 1e-5, None)
    compare("add_layer_norm_forward", x, x, parameter, parameter, 1e-5, None)
    compare("layer_norm_activation", x, parameter, parameter, 1e-5, "tanh", None)
    compare("layer_norm_activation_forward", x, parameter, parameter, 1e-5, "relu", None)
    compare("layer_norm_backward", x, x, parameter, parameter, rows, rows, x, True, given, True)
    for name, arguments in _layers(x, given).items():
        compare(name, *arguments)
    compare("softmax", x, residual, 2.0, False, True)
    compare("softmax_", x.clone(), residual, 2.0, False, False)
    compare("softmax_backward", x, x, 2.0, False, given)
    compare("dropout", x, seed, 0.5)
    compare("dropout_backward", x, seed, 0.5)
    compare("activation", x, parameter, residual, seed, "relu", 0.5)
    compare("activation_backward", x, x, parameter, None, "gelu", 0.0, True)
    compare("gated_activation", x, x, parameter, None, residual, None, "silu", 0.0)
    compare("gated_activation_backward", x, x, x, parameter, parameter, None, "silu", 0.0, given, False)
    packed, bias = torch.cat([x, x], -1), torch.cat([vector, vector]) if given else None
    compare("gated_activation_packed", packed, bias, residual, None, "silu", 0.0)
    compare("gated_activation_packed_backward", x, packed, bias, None, "silu", 0.0, True)


# Packed, heads before the sequence, after it, and before it in shape alone.
@pytest.mark.parametrize("layout", ["packed", "bhsd", "bshd", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fake_outputs_are_like_real_ones_of_attention(layout, dtype):
    number = torch.float64 if dtype is torch.float64 else torch.float32
    sizes = {"query": (4, 5, 8), "key": (2, 6, 8), "value": (2, 6, 16)}  # heads, sequence, size

    def tensor(heads, sequence, size):
        if layout == "packed":
            return torch.randn(sequence, heads, size).to(dtype)
        made = torch.randn(2, *((heads, sequence) if layout == "bhsd" else (sequence, heads)), size).to(dtype)
        return made.transpose(1, 2) if layout == "transposed" else made

    query, key, value = (tensor(*size) for size in sizes.values())
    is_packed = layout == "packed"
    options = AttentionOptions(
        bias=torch.randn(4, 1, 6).to(dtype),
        sinks=torch.randn(4, dtype=number),
        cu_seqlens_q=torch.tensor([0, 2, 5], dtype=torch.int32) if is_packed else None,
        cu_seqlens_k=torch.tensor([0, 4, 6], dtype=torch.int32) if is_packed else None,
        heads_first=layout != "bshd",
        score_mod="expression 1\ncapture fp32 1\n%0 = score\n%1 = head\n%2 = load 0 %1\n%3 = add %0 %2\nreturn %3\n",
        captured=[torch.randn(4)],
    )
    for return_lse in (False, True):
        compare("attention", query, key, value, *options, return_lse)
        compare("attention_forward", query, key, value, *options, return_lse)
    output, lse = torch.ops.kernel_pytorch.attention_forward(query, key, value, *options, True)
    assert output.stride() == shapes_of("attention")(query, key, value, *options, True)[0].stride()
    if layout == "transposed":
        assert output.transpose(1, 2).is_contiguous()
    for wants in (False, True):
        tensors = (torch.randn_like(output), query, key, value, output, lse, lse if wants else None)
        compare("attention_backward", *tensors, int(wants), *options, wants, not wants)
    if is_packed:
        return
    compare("attention_part_", query, key, value, 0, 0, *options, output.to(number), lse)
    grads = [x.to(number, copy=True) for x in (query, key, value)]
    compare("attention_part_backward_", *tensors, 1, 3, 2, False, *options, *grads, True, True)


def test_attention_options_are_the_cores():
    """The names are the list's, the defaults those of the C++ struct."""
    options = AttentionOptions()
    assert options.heads_first is True and options.window_left == -1 and options.scale is None and options.softcap == 0
    assert options.bias is None and list(options.blocks) == [] and options.score_mod == ""
    query = torch.randn(2, 4, 5, 8)
    made = attention_options(query, query, deterministic=False, allow_tf32=False)
    assert made._replace(blocks=options.blocks, captured=options.captured) == options
    with pytest.raises(TypeError, match="return_lse is no option of a part"):
        attention_options(query, query, return_lse=True)
    with pytest.raises(TypeError, match="colour"):
        functional.attention(query, query, query, colour=1)


def test_a_choice_that_does_not_exist():
    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError, match='activation: kind is "cube"; known are gelu, gelu_tanh'):
        torch.ops.kernel_pytorch.activation(x, None, None, None, "cube", 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("heads_first", [True, False])
def test_fake_outputs_of_rope(dtype, heads_first):
    query, key = torch.randn(2, 6, 6, 8).to(dtype), torch.randn(2, 6, 6, 8).to(dtype)
    cos, positions = torch.randn(9, 4).to(dtype), torch.arange(6)
    for one, other in ((query, key), (query.mT.contiguous().mT[0], None)):
        options = (cos, cos, None, positions, 1.0, 0, False, heads_first)
        compare("rope_forward", one, other, *options)
        compare("rope_backward", one, other, *options)
        compare("rope_in_place", one.contiguous().clone(), other if other is None else other.clone(), *options, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fake_outputs_of_tables_and_means(dtype):
    indices, weight = torch.tensor([[1, 0, 3]]), torch.randn(5, 7).to(dtype)
    compare("embedding", indices, weight, 5, -1)
    compare("embedding_backward", torch.randn(1, 3, 7).to(dtype), indices, 5, 2)
    offsets, x = torch.tensor([0, 2, 2, 5]), torch.randn(5, 3, 8).to(dtype)
    compare("mean_pool", x, offsets, 5)
    compare("mean_pool_backward", torch.randn(3, 3, 8).to(dtype), offsets, 5)
    compare("mean_pool", x, None, 3)
    compare("mean_pool_backward", torch.randn(5, 8).to(dtype), None, 3)
    compare("chunk_mean_pool", x[None], 2, 5)
    compare("chunk_mean_pool_backward", torch.randn(1, 3, 3, 8).to(dtype), 2, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("given", [True, False])
def test_fake_outputs_of_losses_and_lists(dtype, given):
    logits, target = torch.randn(2, 3, 7).to(dtype), torch.tensor([[0, 1, 6], [2, -100, 3]])
    weight, options = torch.rand(7).to(dtype) if given else None, (-100, 0.1, 0.0, 0.0)
    compare("cross_entropy", logits, target, weight, *options, given)
    compare("cross_entropy_forward", logits, target, weight, *options, given)
    compare("cross_entropy_", logits.clone(), target, weight, *options, given)
    compare("cross_entropy_rows_forward", logits, target, weight, *options)
    rows = torch.ones(2, 3, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    compare("cross_entropy_rows_backward", rows, logits, target, weight, rows, *options, 7, 0)
    compare("cross_entropy_partials", logits, target, -100, 0.0, 14, 7)
    hidden, table = torch.randn(2, 3, 4).to(dtype), torch.randn(7, 4).to(dtype)
    compare("linear_cross_entropy", hidden, table, target, weight, *options, 1000, given, True, given)
    compare("linear_cross_entropy_forward", hidden, table, target, weight, *options, 1000, given, True, given)
    compare("reduce_norm", [hidden, table])
    block_map = torch.randint(0, 3, (2, 1, 3, 4), dtype=torch.int8)
    compare("block_list", block_map, True, given, not given)
    scores = torch.randn(2, 1, 3, 4)
    compare("block_select", None, None, scores, None, None, 40, 60, 16, 16, 1, given, None, 0.5, -1.0, 1, 1, given)
    pooled = (torch.randn(2, 4, 3, 8).to(dtype), torch.randn(2, 2, 8, 8).to(dtype))
    compare("block_select", *pooled, None, None, None, 40, 60, 16, 16, 2, given, 3, 0.5, -1.0, 1, 1, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("leading", [(), (2,), (2, 3), (0,)])
def test_fake_outputs_are_like_real_ones_of_matmul(dtype, leading):
    a, b = torch.randn(*leading, 3, 4).to(dtype), torch.randn(*leading, 5, 4).to(dtype).mT
    compare("matmul", a, b, "full")
    compare("matmul_forward", a, b, "full")
    compare("matmul_add_", torch.zeros(*leading, 3, 5, dtype=dtype), a, b, 0.5)


@pytest.mark.parametrize("word, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_fake_outputs_are_like_real_ones_of_scaled_matmul(word, dtype):
    codes, one = torch.ones(3, 16).to(torch.float8_e4m3fn), torch.ones(1)
    compare("scaled_matmul", codes, codes, one, one, None, None, word, True)
    assert torch.ops.kernel_pytorch.scaled_matmul(codes, codes, one, one, None, None, word, True).dtype is dtype


def test_matmul_says_which_sizes_do_not_fit():
    ops = torch.ops.kernel_pytorch
    with pytest.raises(RuntimeError, match=r"matmul: a has shape \[4\], b has \[4, 5\]; they must have equally many"):
        ops.matmul(torch.randn(4), torch.randn(4, 5), "full")
    with pytest.raises(RuntimeError, match=r"matmul: b has shape \[3, 4, 5\]; its leading sizes must be a's, \[2\]"):
        ops.matmul(torch.randn(2, 3, 4), torch.randn(3, 4, 5), "full")
    with pytest.raises(RuntimeError, match='matmul: precision is "fp8"; known are full, tf32, bf16, bf16x3'):
        ops.matmul(torch.randn(3, 4), torch.randn(4, 5), "fp8")
