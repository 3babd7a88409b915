"""Every public module of kernel_pytorch.attention, .core and .advanced_memory: copies, files, processes, reprs."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle

import pytest

torch = pytest.importorskip("torch")

import kernel_pytorch.advanced_memory  # noqa: E402
import kernel_pytorch.attention  # noqa: E402
import kernel_pytorch.attention.distributed  # noqa: E402
import kernel_pytorch.core  # noqa: E402
from kernel_pytorch.advanced_memory import SegmentedAttentionMemory  # noqa: E402
from kernel_pytorch.attention import FlexAttentionMaskMods as MaskMods  # noqa: E402
from kernel_pytorch.attention import FlexAttentionScoreMods as ScoreMods  # noqa: E402

from kernel_pytorch import attention as A  # noqa: E402
from kernel_pytorch import core as C  # noqa: E402

CONFIG = A.AttentionConfig(32, 4, kv_heads=2, pattern="sliding_window", sliding_window_size=9, soft_cap=7.0, alibi=True)
IDS = torch.arange(20) // 7
TABLE = torch.linspace(-1, 1, 4 * 7).view(4, 7)
SCORE_MODS = {
    "causal": lambda: ScoreMods.causal,
    "sliding_window": lambda: ScoreMods.sliding_window(5),
    "causal_sliding_window": lambda: ScoreMods.causal_sliding_window(5),
    "local": lambda: ScoreMods.local(5),
    "alibi": lambda: ScoreMods.alibi(4),
    "relative_position_bias": lambda: ScoreMods.relative_position_bias(TABLE),
    "document_masking": lambda: ScoreMods.document_masking(IDS),
    "prefix_lm": lambda: ScoreMods.prefix_lm(3),
    "soft_cap": lambda: ScoreMods.soft_cap(5.0),
}
MASK_MODS = {
    "causal": lambda: MaskMods.causal,
    "sliding_window": lambda: MaskMods.sliding_window(5),
    "causal_sliding_window": lambda: MaskMods.causal_sliding_window(5),
    "local": lambda: MaskMods.local(5),
    "prefix_lm": lambda: MaskMods.prefix_lm(3),
    "document": lambda: MaskMods.document(IDS),
}

# name -> how to make one, and what its repr must say.
MODULES = {
    "FlashAttention3": (
        lambda: A.FlashAttention3(CONFIG),
        ["32", "num_heads=4", "kv_heads=2", "pattern=sliding_window", "sliding_window_size=9", "soft_cap=7.0", "alibi"],
    ),
    **{
        f"FlexAttentionLayer score_mod {name}": (
            lambda make=make: A.FlexAttentionLayer(A.AttentionConfig(32, 4), make()),
            [f"score_mod={name.removeprefix('causal_').removesuffix('_masking')}", "mask_mod=None"],
        )
        for name, make in SCORE_MODS.items()
    },
    **{
        f"FlexAttentionLayer mask_mod {name}": (
            lambda make=make: A.FlexAttentionLayer(A.AttentionConfig(32, 4), mask_mod=make()),
            [f"mask_mod={name.removeprefix('causal_')}", "score_mod=None"],
        )
        for name, make in MASK_MODS.items()
    },
    **{
        f"DynamicSparseAttention {pattern.value}": (
            lambda pattern=pattern: A.DynamicSparseAttention(32, 4, 0.5, pattern, causal=True, block_size=4),
            ["32", "num_heads=4", "sparsity_ratio=0.5", f"pattern={pattern.value}", "causal=True", "block_size=4"],
        )
        for pattern in A.SparsePattern
    },
    "RingAttentionLayer": (
        lambda: A.create_ring_attention(32, 4, chunk_size=7, max_sequence_length=99),
        ["32", "num_heads=4", "chunk_size=7", "max_sequence_length=99", "causal=False"],
    ),
    "ContextParallelAttention": (
        lambda: A.create_context_parallel_attention(32, 4, schedule="zigzag", causal=True),
        ["32", "num_heads=4", "context_parallel_size=1", "schedule=zigzag", "causal=True"],
    ),
    "GatedDeltaNet": (lambda: A.GatedDeltaNet(32, 4, num_key_heads=2), ["32", "num_heads=4", "num_key_heads=2"]),
    "GatedLinearAttention": (lambda: A.GatedLinearAttention(32, 4), ["32", "num_heads=4"]),
    "LightningAttention": (lambda: A.LightningAttention(32, 4), ["32", "num_heads=4"]),
    "SegmentedAttentionMemory": (
        lambda: SegmentedAttentionMemory(32, 4, segment_length=8, memory_length=4),
        ["segment_length=8", "memory_length=4"],
    ),
    "AttentionLayer": (lambda: C.AttentionLayer(32, 4, dropout=0.0), ["32", "num_heads=4", "dropout=0.0"]),
    "CompilerOptimizedMultiHeadAttention": (
        lambda: C.CompilerOptimizedMultiHeadAttention(32, 4),
        ["32", "num_heads=4", "bias=True"],
    ),
    "OptimizedMultiHeadAttention": (
        lambda: C.OptimizedMultiHeadAttention(32, 4, dropout=0.0),
        ["32", "num_heads=4"],
    ),
    "OptimizedTransformerBlock": (
        lambda: C.OptimizedTransformerBlock(32, 4, dropout=0.0),
        ["num_heads=4", "in_features=32"],
    ),
    "OptimizedMLP": (lambda: C.OptimizedMLP(32), ["in_features=32", "out_features=128"]),
    "OptimizedLinear": (lambda: C.OptimizedLinear(32, 8), ["in_features=32", "out_features=8"]),
    "FusedLinearActivation": (lambda: C.FusedLinearActivation(32, 8, "silu"), ["in_features=32", "silu"]),
    "OptimizedLayerNorm": (lambda: C.OptimizedLayerNorm(32), ["32"]),
    "OptimizedRMSNorm": (lambda: C.OptimizedRMSNorm(32), ["32"]),
    "FusedLayerNormActivation": (lambda: C.FusedLayerNormActivation(32), ["32"]),
    "FusedGELU": (lambda: C.FusedGELU(), ["FusedGELU"]),
    "FusedReLU": (lambda: C.FusedReLU(), ["FusedReLU"]),
    "FusedSwiGLU": (lambda: C.FusedSwiGLU(32), ["32"]),
    "OptimizedEmbedding": (lambda: C.OptimizedEmbedding(50, 32), ["50", "32"]),
    "RotaryPositionalEncoding": (lambda: C.RotaryPositionalEncoding(32), ["32"]),
}


def test_every_public_module_is_here():
    packages = (
        kernel_pytorch.attention,
        kernel_pytorch.attention.distributed,
        kernel_pytorch.core,
        kernel_pytorch.advanced_memory,
    )
    public = {
        name
        for package in packages
        for name in package.__all__
        if isinstance(item := getattr(package, name), type) and issubclass(item, torch.nn.Module)
    }
    public -= {"UnifiedAttentionFusion", "NativeSparseAttention"}  # their own files test them
    assert public == {name.split()[0] for name in MODULES}


@pytest.mark.parametrize("namespace, mods", [(ScoreMods, SCORE_MODS), (MaskMods, MASK_MODS)])
def test_every_mod_is_here(namespace, mods):
    assert {name for name in vars(namespace) if not name.startswith("_")} == set(mods)


def _input(module):
    if isinstance(module, C.OptimizedEmbedding):
        return torch.arange(20)
    return torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(1))


def _run(module):
    output = module(_input(module))
    return output[0] if isinstance(output, tuple) else output


def _saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": _saved_and_loaded,
}


@pytest.mark.parametrize("way", list(COPIES))
@pytest.mark.parametrize("name", list(MODULES))
def test_modules_are_copied_before_and_after_a_forward(name, way):
    torch.manual_seed(0)
    module = MODULES[name][0]()
    before = COPIES[way](module)
    output = _run(module)
    if output.requires_grad:
        output.square().sum().backward()  # a copy must not hold on to a graph either
    after = COPIES[way](module)
    for one in (before, after):
        assert type(one) is type(module) and repr(one) == repr(module)
        assert torch.equal(_run(one), output)
    for mine, theirs in zip(module.parameters(), after.parameters(), strict=True):
        assert mine is not theirs and mine.data_ptr() != theirs.data_ptr()


@pytest.mark.parametrize("name", list(MODULES))
def test_reprs_say_what_a_module_was_made_with(name):
    make, words = MODULES[name]
    text = repr(make())
    assert type(make()).__name__ in text
    assert [word for word in words if word not in text] == []


def _answer(module, pipe):
    pipe.send(_run(module).detach().numpy())
    pipe.close()


def test_modules_travel_to_a_spawned_process():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        *(MODULES[name][0]() for name in MODULES if "Attention" in name and "Memory" not in name)
    ).eval()
    expected = _run(layers).detach()
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(layers, theirs))
    process.start()
    assert mine.poll(120)
    answer = torch.from_numpy(mine.recv())
    process.join(60)
    torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-6)


def test_a_copy_reads_its_own_table():
    """A closure would keep reading the original's parameter."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(TABLE.clone())
            mod = ScoreMods.relative_position_bias(self.table)
            self.layer = A.FlexAttentionLayer(A.AttentionConfig(32, 4), mod)

    model = Model()
    other = copy.deepcopy(model)
    x = torch.randn(1, 9, 32)
    other.layer(x).square().sum().backward()
    assert other.table.grad is not None and model.table.grad is None
    with torch.no_grad():
        other.table.zero_()
        assert not torch.allclose(other.layer(x), model.layer(x), atol=1e-4)


def test_mods_are_traced_once():
    from kernel_pytorch import expression

    traced = [expression.trace(ScoreMods.sliding_window(5)).score_mod for _ in range(2)]
    assert traced[0] == traced[1] != expression.trace(ScoreMods.sliding_window(6)).score_mod
    known = len(expression._cache._traces)
    expression.trace(ScoreMods.sliding_window(5))
    assert len(expression._cache._traces) == known


PLAIN = [
    (ScoreMods.causal, (5, 3), 1.0),
    (ScoreMods.causal, (3, 5), -torch.inf),
    (ScoreMods.sliding_window(3), (5, 3), 1.0),
    (ScoreMods.sliding_window(2), (5, 3), -torch.inf),
    (ScoreMods.causal_sliding_window(3), (3, 5), -torch.inf),
    (ScoreMods.local(3), (3, 5), 1.0),
    (ScoreMods.alibi(4, [1.0, 2.0, 3.0, 4.0]), (3, 5), -1.0),
    (ScoreMods.relative_position_bias(torch.arange(20.0).view(4, 5)), (3, 9), 5.0),
    (ScoreMods.document_masking(torch.tensor([0, 0, 1])), (0, 2), -torch.inf),
    (ScoreMods.prefix_lm(2), (0, 1), 1.0),
    (ScoreMods.soft_cap(2.0), (0, 0), 2.0 * torch.tanh(torch.tensor(0.5)).item()),
]


@pytest.mark.parametrize("mod, places, wanted", PLAIN)
@pytest.mark.parametrize("score", [1.0, torch.tensor(1.0)])
def test_mods_take_plain_numbers(mod, places, wanted, score):
    assert float(mod(score, 0, 0, *places)) == pytest.approx(wanted)
