"""What kernels take is the core's to say: one question, which Python asks instead of deciding by lists of its own."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from kernel_pytorch._supports import runs_fast  # noqa: E402
from kernel_pytorch.core import _products  # noqa: E402
from kernel_pytorch.core._products import product, runs_here  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import kernel_pytorch  # noqa: E402
from kernel_pytorch import _library, tuning  # noqa: E402

CPU = torch.device("cpu")


# Sizes of a request, by the beginning of the op's name; the longest that fits counts. The others take rows and columns.
SHAPES = {
    "attention": (2, 8, 16, 16, 16),
    "attention_fp8": (2, 8, 16, 16),
    **dict.fromkeys(("linear_attention", "delta_rule", "native_sparse_attention", "lightning_indexer"), (2, 8, 2, 16)),
    "rope": (2, 8, 16, 16),
    "norm_rope": (2, 8, 16, 16),
    **dict.fromkeys(("linear", "matmul", "causal_conv1d", "mean_pool", "chunk_mean_pool", "group_sums"), (2, 8, 16)),
    **dict.fromkeys(("mlp", "grouped_matmul"), (2, 8, 16, 8)),
    **dict.fromkeys(("moe_combine", "moe_activation"), (8, 2, 16)),
    "moe_mlp": (8, 2, 16, 8, 4),
    "paged_attention": (2, 1, 4, 16),
    "append_kv": (3, 2, 16),
    "plan_decode": (4,),
    "delayed_scales": (2, 3, 16),
    "int8_matmul": (4, 8, 16),
    "mla_decode": (2, 1, 4),
    "merge_attention": (3, 2, 16),
    "sparse_matmul": (4, 8, 16),
}


def test_every_kernel_of_every_op_answers():
    for op, kernels in tuning.kernels().items():
        if op.startswith(("block_list", "block_select", "scaled_", "quantize")):
            continue  # shapes and types of their own, below
        shape = SHAPES.get(max((name for name in SHAPES if op.startswith(name)), key=len, default=""), (8, 16))
        options = {"chunk": 4} if op.startswith("chunk") else {}
        dtype = "int32" if op == "moe_permute" else "fp32"  # a permutation is of experts' numbers
        answers = tuning.supports(op, shape, dtype, **options)
        assert [one.kernel for one in answers] == kernels, op
        assert answers[-1].supported and answers[-1].fallback, op
        assert all(one.supported == (one.reason == "") for one in answers), op
    assert tuning.supports("quantize", (8, 16))[-1].supported
    assert tuning.supports("scaled_matmul", (8, 16, 32), "bf16")[-1].supported
    assert tuning.supports("scaled_grouped_matmul", (8, 16, 32, 2), "bf16")[-1].supported
    assert tuning.supports("block_list", (1, 2, 4, 4), "int8")[-1].supported
    assert tuning.supports("block_select", (1, 2, 128, 128, 16))[-1].supported


@pytest.mark.parametrize(
    "op, shape, options, words",
    [
        ("rms_norm_forward", (8, 16), {"dtype": "int64"}, "rms_norm: x is int64"),
        ("matmul", (8,), {}, 'matmul: the shape is [8]; it gives the sizes "... m n k"'),
        ("softmax_forward", (8, 16), {"mask": "red"}, "option mask=red: unknown"),
        ("dropout", (8, 16), {"p": 2}, "dropout: dropout_p is 2"),
    ],
)
def test_what_the_op_refuses_is_no_answer(op, shape, options, words):
    with pytest.raises(kernel_pytorch.KernelPyTorchError) as refusal:
        tuning.supports(op, shape, **options)
    assert words in str(refusal.value)


def test_a_product_in_fp64_is_torchs():
    assert runs_here(torch.randn(2, 3)) and runs_here(torch.randn(2, 3, dtype=torch.bfloat16))
    assert not runs_here(torch.randn(2, 3, dtype=torch.float64)) and not runs_here(torch.randn(2, 3, device="meta"))
    assert not runs_fast("matmul", (128, 128, 128), torch.float64, CPU)
    assert any(one.supported for one in tuning.supports("matmul", (128, 128, 128), "fp64"))


def test_a_product_in_fp32_on_a_gpu_is_asked_for_by_its_sizes(monkeypatch):
    asked = []
    monkeypatch.setattr(_products, "runs_fast", lambda *request: (asked.append(request[1]), True)[1])
    with FakeTensorMode():
        x, weight = torch.empty(3, 100, 512, device="cuda"), torch.empty(256, 512, device="cuda")
        assert _products._runs_large_fp32(x, weight) and asked == [(256, 256, 512)]
        narrow = torch.empty_strided((100, 512), (513, 1), device="cuda")  # rows begin anywhere
        half = torch.empty(100, 512, device="cuda", dtype=torch.bfloat16)
        for other in (narrow, torch.empty(0, 512, device="cuda"), half, torch.empty(100, 512)):
            assert not _products._runs_large_fp32(other, weight)
        monkeypatch.setattr(_products, "torch_allows_tf32", lambda: True)
        assert not _products._runs_large_fp32(x, weight)
    assert len(asked) == 1


def test_the_question_is_asked_once(monkeypatch):
    asked = []
    call = _library.call
    monkeypatch.setattr(_library, "call", lambda name, **rest: (asked.append(name), call(name, **rest))[1])
    shape = (8, 24, 40)
    assert all(runs_fast("matmul", shape, torch.float32, CPU) for _ in range(3))
    assert asked == ["supports"]


def test_a_compiled_layer_knows_the_answer():
    def two(x, weight):
        return product(x, weight, activation="gelu")

    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    compiled = torch.compile(two, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, weight), two(x, weight))
