"""`optimize` on models that change their arguments, themselves or each other: caches, buffers, hooks, neutral weights.

Each test names a class of models that were wrong or raised before; parts that fail are refused, and the call goes on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from forced_clock import everything_is_kept
from kernel_pytorch._optimize.sites import Call
from kernel_pytorch._optimize.state import Repeated, copied, tensors_in
from torch import Tensor, nn

import kernel_pytorch

transformers = pytest.importorskip("transformers")


@pytest.fixture
def everything_pays() -> Iterator[None]:
    """Every way that verifies is kept: a faked clock says that it is faster."""
    with everything_is_kept():
        yield


def language_model(kind: str) -> Any:
    small: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128, "hidden_size": 32}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=128, bos_token_id=0, eos_token_id=1, resid_pdrop=0.0,
            attn_pdrop=0.0, embd_pdrop=0.0,
        )  # fmt: skip
    elif kind == "gpt_oss":
        config = transformers.GptOssConfig(
            **small, intermediate_size=32, num_key_value_heads=2, head_dim=8, num_local_experts=4, pad_token_id=0,
            eos_token_id=1,
        )  # fmt: skip
    elif kind == "falcon":
        config = transformers.FalconConfig(**small, bos_token_id=0, eos_token_id=1)
    elif kind == "gemma2":
        config = transformers.Gemma2Config(**small, intermediate_size=64, num_key_value_heads=2, head_dim=8)
    else:
        config = transformers.LlamaConfig(**small, intermediate_size=64, num_key_value_heads=2)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("goal", ["inference", "train"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_oss", "falcon"])
def test_default_caches_are_a_runs_own(kind: str, goal: str, everything_pays: None) -> None:
    model = language_model(kind)
    ids = torch.randint(0, 128, (2, 12))
    inputs = {"input_ids": ids} if goal == "inference" else {"input_ids": ids, "labels": ids}
    with torch.no_grad():
        before = model(**inputs)
    result = kernel_pytorch.optimize(model, inputs, goal, budget_seconds=20, tune="off")
    with torch.no_grad():
        after = model(**inputs)
    torch.testing.assert_close(after.logits, before.logits, rtol=1e-4, atol=1e-4)
    ours = model.generate(ids[:, :4], max_new_tokens=6, do_sample=False)
    theirs = result.restore().generate(ids[:, :4], max_new_tokens=6, do_sample=False)
    assert torch.equal(ours, theirs)


def test_a_dropout_inside_an_mlp_is_heard(everything_pays: None) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16), nn.Dropout(0.1)).eval()
    x = torch.randn(4, 16)
    kernel_pytorch.optimize(model, x, budget_seconds=5, tune="off")
    for part in (model[2], model[4]):
        heard: list[int] = []
        handle = part.register_forward_hook(lambda *_, heard=heard: heard.append(1))
        model(x)
        handle.remove()
        assert heard == [1]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_optimised_model_is_saved_like_any_other(kind: str, everything_pays: None, tmp_path: Path) -> None:
    """Packed weights are contiguous, each with a storage of its own: what looks at storages sees nothing shared."""
    from safetensors.torch import load_file, save_model

    model = language_model(kind)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    kernel_pytorch.optimize(model, {"input_ids": torch.randint(0, 128, (2, 12))}, budget_seconds=20, tune="off")
    assert kind == "gpt2" or any("_kernel_pytorch_pack" in vars(part) for part in model.modules())
    save_model(model, tmp_path / "model.safetensors")
    assert all(torch.equal(value, state[name]) for name, value in load_file(tmp_path / "model.safetensors").items())
    model.save_pretrained(tmp_path / "pretrained")
    loaded = type(model).from_pretrained(tmp_path / "pretrained").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    vector = nn.utils.parameters_to_vector(model.parameters())
    assert len(vector) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # two norms, and four
def test_a_residual_norm_next_to_a_cache_is_kept(kind: str, everything_pays: None) -> None:
    model = language_model(kind)
    result = kernel_pytorch.optimize(
        model, {"input_ids": torch.randint(0, 128, (2, 12))}, budget_seconds=20, tune="off"
    )
    assert "residual + norm" in str(result.report)
    assert type(model.model.layers[0]).forward is not model.model.layers[0].forward.__func__, (
        "the block was not replaced"
    )


@pytest.mark.parametrize("goal", ["inference", "train"])
def test_packed_experts_are_sorted_by_expert(goal: str, everything_pays: None) -> None:
    """Values of a batch that was not the sample, in which experts get no row, and gradients of all parameters."""
    model = language_model("gpt_oss")
    ids, one = torch.randint(0, 128, (2, 12)), torch.randint(0, 128, (1, 1))
    parameters = list(model.parameters())

    def found() -> tuple[Tensor, tuple[Tensor, ...]]:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        return model(input_ids=one).logits, torch.autograd.grad(loss, parameters)

    logits, gradients = found()
    result = kernel_pytorch.optimize(model, {"input_ids": ids, "labels": ids}, goal, budget_seconds=30, tune="off")
    kept = [row["path"] for row in result.report.data["replacements"] if row["pattern"].startswith("experts")]
    assert kept == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"], result.report.data["refusals"]
    ours = found()
    torch.testing.assert_close(ours[0], logits, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(ours[1], gradients):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_a_cache_of_the_sample_stays_as_it_was() -> None:
    model = language_model("llama")
    with torch.no_grad():
        cache = model(torch.randint(0, 128, (1, 6)), use_cache=True).past_key_values
    length = cache.get_seq_length()
    sample = {"input_ids": torch.randint(0, 128, (1, 1)), "past_key_values": cache}
    kernel_pytorch.optimize(model, sample, budget_seconds=3, tune="off")
    assert cache.get_seq_length() == length


class ScaledBlock(nn.Module):
    """A block with a residual scale of its own, which is neutral as long as it is one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attn = nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale * x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def test_a_blocks_own_parameter_is_not_lost(everything_pays: None) -> None:
    torch.manual_seed(0)
    block = ScaledBlock(32).eval()
    x = torch.randn(2, 8, 32)
    kernel_pytorch.optimize(block, x, budget_seconds=10, tune="off")
    with torch.no_grad():
        block.scale.fill_(0.5)
        found = block(x)
        expected = kernel_pytorch.restore(block)(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_parts_are_verified_with_other_parameters_too() -> None:
    from kernel_pytorch._optimize.verify import results_of, verify

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))
            self.ignores = False

        def forward(self, x: Tensor) -> Tensor:
            return x if self.ignores else x * self.scale

    part = Scaled()
    kept = part.scale.detach().clone()

    def original(inputs: Call, seed: int, is_perturbed: bool) -> Any:
        part.ignores = False
        try:
            return results_of(part, inputs, False, seed)
        finally:
            part.ignores = True

    part.ignores = True
    call = Call((torch.randn(4, 16),), {})
    assert all(one.ok for one in verify("part", call, part, original, "exact", False))
    assert not all(one.ok for one in verify("part", call, part, original, "exact", False, perturbs=True))
    assert torch.equal(part.scale, kept)


def test_partial_rotary_tables_turn_a_part_of_the_head() -> None:
    from kernel_pytorch._optimize.patterns.calls import rotary_table
    from transformers.models.gpt_neox import modeling_gpt_neox as neox
    from transformers.models.llama import modeling_llama as llama

    query, key = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
    angles = torch.randn(1, 5, 4)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    for function in (neox.apply_rotary_pos_emb, llama.apply_rotary_pos_emb):

        def forward(self: Any, *args: Any, function: Any = function) -> Any:
            return apply_rotary(*args)  # type: ignore[name-defined] # noqa: F821

        made = type(forward)(forward.__code__, {"apply_rotary": function}, "forward")
        (ours,) = rotary_table(made).values()
        try:
            expected = function(query, key, cos, sin)
        except RuntimeError:  # it takes whole tables alone: so does ours
            with pytest.raises(RuntimeError):
                ours(query, key, cos, sin)
            continue
        for mine, theirs in zip(ours(query, key, cos, sin), expected):
            torch.testing.assert_close(mine, theirs)


def test_hooks_between_the_layers_of_an_mlp_fire(everything_pays: None) -> None:
    heard: list[int] = []
    for registers_first in (True, False):
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Identity(), nn.Linear(32, 16)).eval()
        x = torch.randn(4, 16)
        if registers_first:
            model[1].register_forward_hook(lambda *_: heard.append(1))
        kernel_pytorch.optimize(model, x, budget_seconds=5, tune="off")
        if not registers_first:
            model[1].register_forward_hook(lambda *_: heard.append(1))
        heard.clear()
        model(x)
        assert heard == [1], f"registered first: {registers_first}"


def test_buffers_and_random_numbers_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)).train()
    before = copy.deepcopy(model.state_dict())
    held = model[1].running_mean
    torch.manual_seed(7)
    state = torch.get_rng_state()
    kernel_pytorch.optimize(model, torch.randn(16, 8), "train", budget_seconds=3, tune="off")
    torch.set_rng_state(state)
    assert model[1].running_mean is held
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.manual_seed(7)
    sample = torch.randn(16, 8)
    state = torch.get_rng_state()
    kernel_pytorch.optimize(kernel_pytorch.restore(model), sample, "train", budget_seconds=2, tune="off")
    assert torch.equal(torch.get_rng_state(), state)


class Failing(nn.Module):
    """An MLP whose second run raises, as a model does that keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs % 5 == 4:
            raise RuntimeError("once is enough")
        return self.second(torch.nn.functional.gelu(self.first(x)))


def test_a_part_that_raises_is_refused_and_the_call_goes_on() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.norm = Failing(), nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            self.part.runs = 0  # a call of the model as a whole is fine
            return self.norm(self.part(x))

    model = Model().eval()
    result = kernel_pytorch.optimize(model, torch.randn(4, 16), budget_seconds=5, tune="off")
    assert result.model is model


@dataclass
class Output:
    hidden: Tensor
    extra: list[Tensor]


def test_tensors_of_dataclasses_are_compared() -> None:
    value = Output(torch.ones(2), [torch.zeros(3), torch.zeros(4)])
    assert [tuple(one.shape) for one in tensors_in(value)] == [(2,), (3,), (4,)]


def test_lazy_modules_and_nested_tensors() -> None:
    lazy = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(4)).eval()
    kernel_pytorch.optimize(lazy, torch.randn(3, 5), budget_seconds=2, tune="off")
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    sample = {"src": torch.randn(2, 6, 16), "src_key_padding_mask": padding}
    kernel_pytorch.optimize(encoder, sample, budget_seconds=3, tune="off")


def test_copies_share_what_was_shared_and_leave_the_model_alone() -> None:
    class Cache:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.keys = model, [torch.zeros(2)]

    model = nn.Linear(2, 2)
    x = torch.randn(2, requires_grad=True)
    cache = Cache(model)
    (first, second), named = copied(((x, x), {"cache": cache, "also": cache}))
    assert first is second and first is not x and first.requires_grad
    assert named["cache"] is named["also"] and named["cache"] is not cache
    assert named["cache"].model is model and named["cache"].keys[0] is not cache.keys[0]


def test_runs_on_states_get_copies_made_ahead() -> None:
    class Counter:
        def __init__(self) -> None:
            self.calls = 0

    def count(call: Call) -> int:
        call.args[0].calls += 1
        return int(call.args[0].calls)

    run = Repeated(Call((Counter(),), {}), count)
    run.prepare(3)
    assert [run() for _ in range(5)] == [1] * 5


@pytest.mark.parametrize("is_causal", [True, False])
def test_padding_keeps_its_causality(is_causal: bool) -> None:
    """A mask says itself what is seen, whatever the layer's is_causal says of calls without one."""
    from kernel_pytorch.compat.transformers import attention_forward, attention_mask
    from transformers import masking_utils

    function = masking_utils.causal_mask_function if is_causal else masking_utils.bidirectional_mask_function
    padding = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    query, key, value = (torch.randn(2, 2, 5, 8) for _ in range(3))
    for layer_says in (True, False):
        module = nn.Module()
        module.is_causal = layer_says  # type: ignore[assignment]
        mask = attention_mask(2, 5, 5, 0, 0, function, padding)
        found, _ = attention_forward(module, query, key, value, mask, is_causal=layer_says)
        whole = masking_utils.sdpa_mask(2, 5, 5, 0, 0, function, padding.bool(), allow_is_causal_skip=False)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, whole).transpose(1, 2)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[0, :4], expected[0, :4], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_part_that_is_wrong_by_five_percent_is_refused(dtype: torch.dtype) -> None:
    """Against a wider run a right part is as far off as the original, in whatever type; a wrong one is not."""
    from kernel_pytorch._optimize.verify import results_of, verify, wider_results

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(256, 256)
            self.factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.factor

    torch.manual_seed(0)
    part = Product().to(dtype)
    call = Call((torch.randn(32, 256).to(dtype),), {})

    def by_original(function: Any) -> Any:
        def run(inputs: Call, seed: int, *_: Any) -> Any:
            factor, part.factor = part.factor, 1.0
            try:
                return function(part, inputs, True, seed)
            finally:
                part.factor = factor

        return run

    original, wider = by_original(results_of), by_original(wider_results)
    for factor, is_right in ((1.0, True), (1.05, False)):
        part.factor = factor
        found = verify("part", call, part, original, "exact", True, perturbs=True, wider=wider)
        assert all(one.ok for one in found) == is_right, found
