"""Training forms: layers of one input with one gradient of it, and their FP8 form, which a CPU computes in fp32."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from kernel_pytorch._optimize import demo_models  # noqa: E402
from kernel_pytorch._optimize.patterns import float8  # noqa: E402
from kernel_pytorch._optimize.verify import row_error  # noqa: E402
from test_optimize import always, one_thread, optimize, patterns  # noqa: E402, F401

import kernel_pytorch  # noqa: E402

PARTS = ["norms", "perceptrons", "projections", "blocks"]


def sample(dim=64, heads=4, key_heads=2, hidden=96, length=24):
    torch.manual_seed(0)
    block = demo_models.LlamaBlock(dim, heads, key_heads, hidden)
    x = torch.randn(2, length, dim)
    angles = torch.outer(torch.arange(length), 1e4 ** (-torch.arange(0, dim // heads, 2) / (dim // heads)))
    return block, (x, *(torch.cat([f(angles)] * 2, -1)[None] for f in (torch.cos, torch.sin)))


def gradients(block, inputs):
    x = inputs[0].clone().requires_grad_()
    output = block(x, *inputs[1:])
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    values = torch.autograd.grad(output, [x, *block.parameters()], grad)
    return [output, *values]


def assert_alike(mine, theirs, tolerance):
    for a, b in zip(mine, theirs, strict=True):
        assert row_error(a, b)[1] < tolerance


def test_layers_that_share_an_input(always) -> None:  # noqa: F811
    block, inputs = sample()
    before, state = gradients(block, inputs), copy.deepcopy(block.state_dict())
    result = optimize(block, inputs, goal="train", patterns=PARTS)
    assert {"qkv", "gated mlp", "residual + norm"} <= patterns(result), result.report
    assert_alike(gradients(block, inputs), before, 1e-4)
    nodes = set()
    walk = [block(inputs[0].clone().requires_grad_(), *inputs[1:]).grad_fn]
    while walk:
        node = walk.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            walk += [after for after, _ in node.next_functions]
    names = [type(node).__name__ for node in nodes]
    assert names.count("_LinearsBackward") == 2 and names.count("_RmsNormBackward") == 1, names
    for name, value in block.state_dict().items():
        assert torch.equal(value, state[name]) and value.is_contiguous()
    kernel_pytorch.restore(block)
    assert all(torch.equal(a, b) for a, b in zip(gradients(block, inputs), before, strict=True))


def test_a_copy_has_weights_of_its_own(always) -> None:  # noqa: F811
    for goal in ("train", "inference"):
        block, inputs = sample()
        optimize(block, inputs, goal=goal, patterns=PARTS)
        other = copy.deepcopy(block)
        with torch.no_grad():
            other.self_attn.k_proj.weight.mul_(-1)
            changed = other(*inputs)
            block.self_attn.k_proj.weight.mul_(-1)
            assert row_error(block(*inputs), changed)[1] < 1e-4
        shared, _ = vars(other.self_attn.q_proj)["_kernel_pytorch_shared"]
        assert shared.layers[1] is other.self_attn.k_proj  # the copy has the form too, of its own layers


def test_hooks_on_a_layer_are_heard(always) -> None:  # noqa: F811
    block, inputs = sample()
    optimize(block, inputs, goal="train", patterns=PARTS)
    expected = gradients(block, inputs)
    seen = []
    for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"):
        block.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    assert_alike(gradients(block, inputs), expected, 1e-5)
    assert seen == ["self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"]


def test_inputs_that_differ(always) -> None:  # noqa: F811
    """The layers are alone again once they are called with other tensors, as a cache of keys may do."""
    block, inputs = sample()
    optimize(block, inputs, goal="train", patterns=PARTS)
    layers, x, y = block.self_attn, torch.randn(3, 64), torch.randn(3, 64)
    for expected, layer, value in ((x, layers.q_proj, x), (y, layers.k_proj, y), (x, layers.v_proj, x)):
        torch.testing.assert_close(layer(value), torch.nn.functional.linear(expected, layer.weight))
    assert_alike(layers.q_proj(x), torch.nn.functional.linear(x, layers.q_proj.weight), 1e-4)


@pytest.fixture
def float8_pays(monkeypatch):
    monkeypatch.setattr(float8, "why_not", lambda context, shapes, tokens: None)


def test_float8_of_layers_that_share_an_input(always, float8_pays) -> None:  # noqa: F811
    block, inputs = sample()
    before = gradients(block, inputs)
    state = copy.deepcopy(block.state_dict())
    result = optimize(block, inputs, goal="train", accuracy="tolerant", patterns=["narrow", *PARTS])
    ways = {one["path"]: one["to"] for one in result.report.data["replacements"]}
    assert "FP8" in ways["mlp"] and "FP8" in ways["self_attn"], result.report
    assert not {"mlp.gate_proj", "self_attn.q_proj"} & ways.keys()  # covered, and lifted where they were in force
    after = gradients(block, inputs)
    assert_alike(after, before, 0.25)
    assert row_error(after[0], before[0])[1] > 1e-4  # FP8 indeed
    block(*inputs).sum().backward()
    gate, up = block.mlp.gate_proj.weight, block.mlp.up_proj.weight
    assert gate.grad.shape == gate.shape and gate.grad.is_contiguous()
    assert up.data_ptr() == gate.data_ptr() + gate.nbytes  # one after the other, nothing kept twice
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    optimizer.step()
    moved = block(*inputs)
    other = copy.deepcopy(block)  # computes its own weights, in full precision
    assert 1e-5 < row_error(moved, other(*inputs))[1] < 0.25
    block.load_state_dict(state)
    kernel_pytorch.restore(block)
    assert all(torch.equal(a, b) for a, b in zip(gradients(block, inputs), before, strict=True))


def test_float8_layers_with_hooks_are_called(always, float8_pays) -> None:  # noqa: F811
    block, inputs = sample()
    optimize(block, inputs, goal="train", accuracy="tolerant", patterns=["narrow", *PARTS])
    seen = []
    block.mlp.down_proj.register_forward_hook(lambda *_: seen.append("down"))
    block(*inputs)
    assert seen == ["down"]


def test_the_samples_gradients_are_left_alone(always) -> None:  # noqa: F811
    block, inputs = sample()
    x = inputs[0].clone().requires_grad_()
    inputs = (x * 1, *inputs[1:])  # with a history of its own
    optimize(block, inputs, goal="train", patterns=["norms"])
    assert x.grad is None and all(parameter.grad is None for parameter in block.parameters())
    inputs[0].sum().backward()  # which is still there
    assert torch.equal(x.grad, torch.ones_like(x))


def test_a_model_may_want_the_gradient_of_its_input_itself() -> None:
    """As speech models do that freeze their first layers; only a leaf lets them."""

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x[:, None]
            if self.training:
                rows.requires_grad = True
            return self.layer(self.norm(rows))

    model = Encoder().train()
    result = kernel_pytorch.optimize(model, torch.randn(8, 64), "train", budget_seconds=2)
    assert "raised" not in str(result.report), result.report
    model(torch.randn(8, 64)).sum().backward()
