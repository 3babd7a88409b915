"""optimize(weights=...): codes next to a layer's parameters, made again with them, and gone after restore."""

from __future__ import annotations

import pytest
import torch
from kernel_pytorch._optimize.patterns import few_bits
from torch import nn

import kernel_pytorch
from kernel_pytorch import functional as F


@pytest.mark.parametrize("format", few_bits.FORMATS)
def test_a_layer_reads_codes_of_its_weight_as_it_is(format) -> None:
    layer = nn.Linear(64, 48)
    x = torch.randn(3, 64)
    before = layer(x)
    change = few_bits._change(layer, format)
    change.apply()
    for _ in range(2):  # and again after the weight has changed
        expected = F.quantized_matmul(x, F.quantize_weight(layer.weight, format), bias=layer.bias)
        torch.testing.assert_close(layer(x), expected)
        assert set(layer.state_dict()) == {"weight", "bias"}
        with torch.no_grad():
            layer.weight.mul_(2)
    with torch.no_grad():
        layer.weight.div_(4)
    change.undo()
    assert few_bits._KEY not in vars(layer)
    torch.testing.assert_close(layer(x), before)


def test_the_report_says_what_became_of_the_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).eval()
    x = torch.randn(1, 512)
    before = model(x)
    result = kernel_pytorch.optimize(
        model, x, accuracy="tolerant", weights="auto", budget_seconds=3, patterns=["few_bits"], tune="off"
    )
    assert "few bits" in str(result.report)
    assert float((model(x) - before).detach().norm() / before.detach().norm()) < 0.25
    result.restore()
    assert torch.equal(model(x), before)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": "int3", "accuracy": "tolerant"}, "int3"),
        ({"weights": "int4"}, "tolerant"),
        ({"weights": "int4", "accuracy": "tolerant", "goal": "train"}, "inference"),
    ],
)
def test_bad_requests_are_named(options, words) -> None:
    with pytest.raises(ValueError, match=words):
        kernel_pytorch.optimize(nn.Linear(4, 4), torch.randn(1, 4), **options)
