"""kernel_pytorch.optimize on torch's own transformer modules."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
from test_optimize import always, one_thread, optimize, patterns, untouched  # noqa: E402, F401
from torch import nn  # noqa: E402

import kernel_pytorch  # noqa: E402


@pytest.mark.parametrize("goal", ["inference", "train"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layers(norm_first, goal, always):  # noqa: F811
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        32, 4, 64, dropout=0.1, activation="gelu", batch_first=True, norm_first=norm_first
    )
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for parameter in model.parameters():  # torch begins with zero biases and equal layers
        nn.init.normal_(parameter, std=0.3)
    model.train(goal == "train")
    reference = copy.deepcopy(model).eval()
    x = torch.randn(2, 9, 32)
    result = optimize(model, x, goal=goal)
    assert "encoder layer" in patterns(result), result.report
    model.eval()
    causal = nn.Transformer.generate_square_subsequent_mask(9)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    for options in (
        {},
        {"mask": causal, "is_causal": True},
        {"mask": torch.isinf(causal)},
        {"src_key_padding_mask": padding},
    ):
        mine, theirs = model(x, **options), reference(x, **options)
        keeps = ~padding if "src_key_padding_mask" in options else torch.ones_like(padding)
        torch.testing.assert_close(mine[keeps], theirs[keeps], rtol=1e-4, atol=1e-5)
    kernel_pytorch.restore(model)
    assert untouched(model)
    with torch.no_grad():
        assert torch.equal(model(x), reference(x))


def test_multihead_attention(always):  # noqa: F811
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    model, x = Attends(), torch.randn(2, 9, 32)
    before = model(x)
    assert "attention" in patterns(optimize(model, x, goal="train"))
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    _, weights = model.attention(x, x, x)  # what the sample did not show
    assert weights.shape == (2, 9, 9)
    kernel_pytorch.restore(model)
    assert torch.equal(model(x), before)
