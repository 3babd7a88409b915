"""Parts of optimize by themselves: packed weights, losses, torch.compile, autocast, half precision."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
from kernel_pytorch._optimize import demo_models  # noqa: E402
from kernel_pytorch._optimize.changes import Changes, PackRows, SetForward  # noqa: E402
from kernel_pytorch._optimize.patterns import names  # noqa: E402
from kernel_pytorch._optimize.verify import row_error  # noqa: E402
from test_optimize import always, one_thread, optimize, patterns, untouched  # noqa: E402, F401
from torch import nn  # noqa: E402

import kernel_pytorch  # noqa: E402


def ways(result, pattern):
    return {one["to"] for one in result.report.data["replacements"] if one["pattern"] == pattern}


def test_packed_rows_are_the_same_parameters():
    layers = [nn.Linear(8, 6), nn.Linear(8, 6)]
    values = [layer.weight.detach().clone() for layer in layers]
    parameters = [layer.weight for layer in layers]
    pack = PackRows(parameters)
    assert not pack.holds()
    pack.apply()
    assert pack.holds()
    assert all(layer.weight is parameter for layer, parameter in zip(layers, parameters))
    assert all(torch.equal(a, b) for a, b in zip(parameters, values))
    assert all(one.is_contiguous() and one.untyped_storage().nbytes() == one.nbytes for one in parameters)
    with torch.no_grad():
        layers[1].weight.fill_(3.0)  # an optimizer's step, or a loaded checkpoint, reaches the packed tensor
    assert (pack.packed == 3.0).any(-1).sum() == 6
    layers[0].to(torch.float64)
    assert not pack.holds()
    pack.undo()
    assert parameters[0].dtype is torch.float64
    assert all(parameter.is_contiguous() for parameter in parameters)
    assert (layers[1].weight == 3.0).all()
    assert layers[1].weight.untyped_storage().nbytes() == 6 * 8 * 4


def llama():
    torch.manual_seed(0)
    return demo_models.Llama(32, 2, 4, 2, 96, 64).eval(), torch.randint(96, (2, 11))


def test_one_product_in_place_of_three(always):  # noqa: F811
    model, x = llama()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = model(x)
    result = optimize(model, x)
    assert patterns(result) >= {"qkv"}
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(x)
    names = [event.name for event in profile.events()]
    products = names.count("aten::mm") + names.count("kernel_pytorch::linear") + names.count("kernel_pytorch::matmul")
    assert products <= 2 * 5 + 1, names  # qkv, o, gate and up (maybe apart), down; and the head
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)  # with gradients: three products again
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    with torch.inference_mode():
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    with torch.no_grad():
        assert not model(x).any()
    model.load_state_dict(state)
    model.to(torch.float64).to(torch.float32)  # takes the weights out of their packed tensor
    with torch.no_grad():
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    kernel_pytorch.restore(model)
    assert untouched(model)
    assert torch.equal(model(x), before)
    assert not any(name.startswith("_kernel_pytorch") for part in model.modules() for name in vars(part))


def test_row_error_sees_one_bad_row():
    right = torch.randn(4096, 64)
    wrong = right.clone()
    wrong[4095, 63] += 0.5
    assert row_error(right, right) == (0.0, 0.0)
    assert row_error(wrong, right)[1] > 0.01
    wrong[0, 0] = float("nan")
    assert row_error(wrong, right)[1] == float("inf")
    right[0, 0] = float("nan")
    assert row_error(wrong, right)[1] < 1


def test_changes_are_undone_in_any_order():
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    before = module(x)
    changes = Changes()
    first = SetForward(module, lambda self, x: x + 1)
    second = SetForward(module, lambda self, x: x + 2)
    changes.apply(first)
    changes.apply(second)
    changes.undo(first)
    assert torch.equal(module(x), x + 2)
    with changes.suspended():
        assert torch.equal(module(x), before)
    assert torch.equal(module(x), x + 2)
    changes.undo_all()
    assert torch.equal(module(x), before)


def test_half_precision(always):  # noqa: F811
    model, x = llama()
    model.to(torch.bfloat16)
    before = model(x)
    result = optimize(model, x)
    assert {"residual + norm", "gated mlp"} <= patterns(result)
    assert row_error(model(x), before)[1] < 5e-2
    kernel_pytorch.restore(model)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("goal", ["inference", "train"])
def test_autocast(goal, always):  # noqa: F811
    model, x = llama()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = model(x)
        result = optimize(model, x, goal=goal)
        assert patterns(result)
        after = model(x)
        assert after.dtype is before.dtype
        assert row_error(after, before)[1] < 5e-2
        kernel_pytorch.restore(model)
        assert torch.equal(model(x), before)


class Taking(nn.Module):
    """Something a norm's output goes into: `uses` is what it does with it."""

    def __init__(self, uses):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.uses = uses

    def forward(self, x):
        return self.uses(self, x)


USES = {
    "one product": (lambda self, x: self.layers[0](x.reshape(-1, 16)), (True, True)),
    "two products": (lambda self, x: self.layers[0](x) * self.layers[1](x), (False, True)),  # fp32 sum of gradients
    "fp32 beside a product": (lambda self, x: self.layers[0](x) * x.mean(-1, keepdim=True), (False, False)),
    "its type": (lambda self, x: self.layers[0](x).to(x.dtype), (False, False)),
    "made for fp32": (lambda self, x: torch.lerp(x, torch.ones(16), 0.5), (False, False)),
}


@pytest.mark.parametrize("name", USES)
def test_what_takes_a_norm_in_autocasts_type(name):
    from kernel_pytorch._optimize.patterns.narrowing import takes_narrow

    uses, (trains, infers) = USES[name]
    torch.manual_seed(0)
    part, x = Taking(uses), torch.randn(3, 5, 16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        output = part(x)
        assert takes_narrow(part, (x,), {}, output, x, True) is trains
        assert takes_narrow(part, (x,), {}, output, x, False) is infers
    assert not takes_narrow(part, (x,), {}, part(x), x, False)  # no autocast


def test_norms_of_a_block_write_autocasts_type(always):  # noqa: F811
    """GPT-2's norms go into one product each: no cast of an activation is left around them."""
    pytest.importorskip("transformers")
    from optimize_models import HUGGING_FACE

    torch.manual_seed(0)
    model, inputs = HUGGING_FACE["gpt2"]()
    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = optimize(model, inputs, goal="train")
        assert "residual + norm" in patterns(result)
        block = next(m for m in model.modules() if type(m).__name__ == "GPT2Block")
        hook = block.mlp.c_fc.register_forward_pre_hook(lambda _, a: seen.append(a[0].dtype))
        second = block.attn.register_forward_pre_hook(
            lambda _, a, k: seen.append((a[0] if a else k["hidden_states"]).dtype), with_kwargs=True
        )
        model(**inputs) if isinstance(inputs, dict) else model(inputs)
        hook.remove(), second.remove()
    assert seen and set(seen) == {torch.bfloat16}
    kernel_pytorch.restore(model)


def test_under_torch_compile(always, monkeypatch):  # noqa: F811
    from kernel_pytorch._optimize import compiled as sets

    monkeypatch.setattr(sets, "_best", lambda timings: "everything")  # whatever is faster today
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = demo_models.Llama(32, 1, 4, 2, 96, 64).eval(), torch.randint(96, (2, 11))
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    result = optimize(compiled, x, goal="train")
    assert result.model is compiled
    assert patterns(result), result.report
    assert any("compiled and timed in turns" in note for note in result.report.data["notes"])
    torch.testing.assert_close(compiled(x), reference(x), rtol=1e-4, atol=1e-5)
    assert torch._dynamo.explain(model)(x).graph_break_count == 0
    kernel_pytorch.restore(compiled)
    assert untouched(model)
    torch.testing.assert_close(compiled(x), reference(x), rtol=1e-4, atol=1e-5)


def test_losses_of_hugging_face(always):  # noqa: F811
    pytest.importorskip("transformers")
    from optimize_models import HUGGING_FACE

    torch.manual_seed(0)
    model, inputs = HUGGING_FACE["gpt2"]()
    labels = inputs["input_ids"].clone()
    labels[0, 3] = -100
    inputs["labels"] = labels
    model.eval()
    before = model(**inputs).loss
    counted = model(**inputs, num_items_in_batch=7).loss
    result = optimize(model, inputs, goal="train")
    assert "cross entropy (Hugging Face)" in patterns(result)
    torch.testing.assert_close(model(**inputs).loss, before)
    torch.testing.assert_close(model(**inputs, num_items_in_batch=7).loss, counted)
    kernel_pytorch.restore(model)
    assert torch.equal(model(**inputs).loss, before)
    assert "_loss_function" not in vars(model)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_attention_written_out(causal, outside, always):  # noqa: F811
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads = 4
            self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x):
            batch, length, _ = x.shape
            shape = (self.num_heads, 3, 8) if outside else (3, self.num_heads, 8)
            q, k, v = self.qkv(x).view(batch, length, *shape).unbind(3 if outside else 2)
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5
            if causal:
                scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
            return self.proj(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2))

    torch.manual_seed(0)
    model, x = nn.Sequential(Written()).eval(), torch.randn(2, 11, 32)
    before = model(x)
    result = optimize(model, x)
    assert "attention" in patterns(result), result.report
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    kernel_pytorch.restore(model)
    assert torch.equal(model(x), before)


def test_narrow_layers_stay_inside_larger_parts(always):  # noqa: F811
    model, x = llama()
    before = model(x)
    others = [name for name in names() if name != "linears"]  # which would take their place
    result = optimize(model, x, accuracy="tolerant", patterns=others)
    narrow = {one["path"] for one in result.report.data["replacements"] if one["pattern"] == "narrow product"}
    assert {"layers.0.mlp.down_proj", "layers.1.self_attn.o_proj"} <= narrow, result.report
    assert any(
        one["pattern"] == "narrow product" and one["path"] == "lm_head" for one in result.report.data["refusals"]
    )
    assert 1e-4 < row_error(model(x), before)[1] < 0.25  # bf16 operands
    kernel_pytorch.restore(model)
    assert torch.equal(model(x), before)


def test_a_saving_that_no_clock_can_tell():
    from kernel_pytorch._optimize.measure import Timing
    from kernel_pytorch._optimize.verdicts import PartVerdict, judge, pays

    before = Timing(100e3, 99e3, 101e3, 5)
    assert not pays(before, before)
    assert judge([[(before, before)]], 200.0) == PartVerdict(None, maybe=0)
    assert judge([[(before, before)]], 5.0) == PartVerdict(None)  # too little to matter
    assert judge([[(before, Timing(110e3, 109e3, 111e3, 5))]], 200.0) == PartVerdict(None)  # measured slower
    assert pays(before, Timing(90e3, 89e3, 91e3, 5))


def test_turns_side_by_side_tell_what_noise_hides():
    from kernel_pytorch._optimize.measure import sure_gain, timing_of
    from kernel_pytorch._optimize.verdicts import faster, pays

    noise = [1.0, 1.4, 1.1, 1.3, 1.0, 1.2, 1.5, 1.05, 1.25]  # of a busy machine, the same for both of a turn
    before, after = timing_of([100.0 * one for one in noise]), timing_of([95.0 * one for one in noise])
    assert after.high_us > before.low_us  # by their quartiles no one can tell
    assert sure_gain(before, after) == pytest.approx(100 / 95)
    assert pays(before, after) and not faster(after, before)
    shuffled = timing_of([95.0 * one for one in reversed(noise)])
    assert sure_gain(before, shuffled) < 1.0 and not faster(before, shuffled)
    assert sure_gain(timing_of([100.0] * 4), timing_of([50.0] * 4)) == 0.0  # too few to exclude chance


def test_blocks_in_every_spelling(always):  # noqa: F811
    from kernel_pytorch._optimize.patterns.blocks import _SPELLINGS

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(16, 16)

        def forward(self, x):
            return self.out(x.flip(1))

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.rand(16))

        def forward(self, x):
            return x * self.factor

    class Block(nn.Module):
        def __init__(self, names):
            super().__init__()
            self.names = names
            mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            for name, part in zip(names, (nn.LayerNorm(16), Mixing(), nn.LayerNorm(16), mlp, Scale(), Scale())):
                setattr(self, name, part)

        def forward(self, x):
            parts = [getattr(self, name) for name in self.names] + [nn.Identity()] * (6 - len(self.names))
            x = x + parts[4](parts[1](parts[0](x)))
            return x + parts[5](parts[3](parts[2](x)))

    x = torch.randn(2, 5, 16)
    for spelling in _SPELLINGS:
        block = Block(spelling).eval()
        expected = block(x)
        result = optimize(block, x, patterns=("norms", "perceptrons", "blocks"))
        assert "residual + norm" in patterns(result), (spelling, str(result.report))
        torch.testing.assert_close(block(x), expected)
        kernel_pytorch.restore(block)


@pytest.mark.parametrize("bias", [False, True])
def test_padded_products(bias):
    from kernel_pytorch._optimize.patterns.linears import ALIGNMENT, padded_product

    torch.manual_seed(0)
    layer, x = nn.Linear(12, 29, bias=bias), torch.randn(2, 5, 12, requires_grad=True)
    parameters = [x, *layer.parameters()]
    expected = layer(x)
    found = padded_product(x, layer.weight, layer.bias)
    torch.testing.assert_close(found, expected)
    assert found.stride(-2) % ALIGNMENT == 0
    assert found.view(-1, 29).shape == (10, 29)  # rows stay one dimension, as losses want them
    grad = torch.randn_like(expected)
    theirs = torch.autograd.grad(expected, parameters, grad)
    for mine, other in zip(torch.autograd.grad(found, parameters, grad), theirs):
        torch.testing.assert_close(mine, other)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert padded_product(x, layer.weight, layer.bias).dtype is torch.bfloat16


@pytest.mark.parametrize("bias", [False, True])
def test_a_loss_of_a_padded_product_takes_its_padding_along(bias):
    from kernel_pytorch._optimize.patterns.hugging_face.transformers_loss import causal_loss
    from kernel_pytorch._optimize.patterns.linears import padded_of, padded_product

    torch.manual_seed(0)
    layer, x = nn.Linear(12, 29, bias=bias), torch.randn(2, 5, 12, requires_grad=True)
    parameters = [x, *layer.parameters()]
    labels = torch.randint(29, (2, 5))
    labels[0, 2] = -100
    logits = padded_product(x, layer.weight, layer.bias)
    padded = padded_of(logits)
    assert padded.shape == (2, 5, 32) and padded.is_contiguous() and padded_of(padded) is padded
    assert padded_of(logits[:1]).shape[-1] == 29 and padded_of(logits.clone()).shape[-1] == 29
    loss = causal_loss(logits, labels, 29)
    expected = nn.functional.cross_entropy(layer(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)
    ours = torch.autograd.grad(loss, parameters, retain_graph=True)
    for mine, other in zip(ours, torch.autograd.grad(expected, parameters)):
        torch.testing.assert_close(mine, other)
    # Logits that are wanted themselves as well.
    mixed = torch.autograd.grad(loss + logits.square().mean(), parameters)
    for mine, alone, rest in zip(mixed, ours, torch.autograd.grad(layer(x).square().mean(), parameters)):
        torch.testing.assert_close(mine, alone + rest)
