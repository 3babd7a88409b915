"""Models that generate serves while they are in training mode, or with layers in few bits."""

from __future__ import annotations

import pytest
import torch
from test_serving import model_of, one_thread, prompts_of, theirs  # noqa: F401

from kernel_pytorch import precision, serving

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_model_in_training_drops_nothing_out_and_its_parts_keep_their_modes() -> None:
    model = model_of("gptj", resid_pdrop=0.5, embd_pdrop=0.5)
    prompts = prompts_of(6)
    expected = theirs(model, prompts[0], 8)
    model.train()
    model.transformer.h[0].eval()
    modes = [part.training for part in model.modules()]
    engine = serving.Engine(model)
    assert [part.training for part in model.modules()] == modes
    assert serving.generate(model, prompts, max_new_tokens=8, engine=engine)[0].tokens == expected
    assert [part.training for part in model.modules()] == modes
    number = engine.add(prompts[0], serving.Sampling(max_new_tokens=8))
    while engine.is_busy:
        engine.step()
    completion = engine.completion(number)
    assert completion is not None and completion.tokens == expected
    assert [part.training for part in model.modules()] == modes


@pytest.mark.parametrize("kind", ["bloom", "falcon of 4 and ALiBi"])
def test_layers_with_slopes_are_served_in_few_bits(kind: str) -> None:
    model = precision.convert_model(model_of(kind), "int8", skip=("lm_head",))
    attention = next(part for part in model.modules() if type(part).__name__.endswith("Attention"))
    attention.dense = precision.QuantizedLinear.from_linear(torch.nn.Linear(32, 32))  # FalconLinear stays by itself
    prompts = prompts_of(5)
    assert serving.generate(model, prompts, max_new_tokens=6)[0].tokens == theirs(model, prompts[0], 6)
