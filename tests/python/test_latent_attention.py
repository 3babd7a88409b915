"""DeepSeek's layers of Hugging Face under optimize and under its own loop: absorbed where few tokens decode, expanded
where prompts or gradients want it; and the example that gives transformers a cache of pages."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_pytorch.compat import _latent
from kernel_pytorch.compat.transformers import register
from test_optimize import always, one_thread  # noqa: F401
from test_serving import model_of

import kernel_pytorch

transformers = pytest.importorskip("transformers")


@pytest.fixture
def absorbed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Queries of each call that was absorbed."""
    calls: list[int] = []
    real = _latent.Expansion.attend_rows

    def counted(self: Any, query: Any, *others: Any) -> Any:
        calls.append(query.shape[2])
        return real(self, query, *others)

    monkeypatch.setattr(_latent.Expansion, "attend_rows", counted)
    return calls


def padded() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 97, (3, 7), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[2, :6] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_optimized_models_absorb_decoding_alone(kind: str, absorbed: list[int], always: Any) -> None:  # noqa: F811
    model, inputs = model_of(kind), padded()
    plain = {"input_ids": inputs["input_ids"]}
    options: dict[str, Any] = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    before = [model.generate(**given, **options) for given in (inputs, plain)]
    kernel_pytorch.optimize(model, plain, goal="inference")
    layers = [part for part in model.modules() if _latent.is_latent(part)]
    assert len(layers) == 2 and all(_latent.gives_rows(layer) for layer in layers)
    absorbed.clear()
    for given, expected in zip((inputs, plain), before):
        assert torch.equal(model.generate(**given, **options), expected)
    assert absorbed == [1] * (2 * 2 * 4)  # two models' runs, two layers, the four steps behind the prompt
    kernel_pytorch.restore(model)
    assert not any(_latent.gives_rows(layer) for layer in layers)
    assert torch.equal(model.generate(**plain, **options), before[1])


def test_gradients_and_prompts_are_expanded(absorbed: list[int]) -> None:
    model, inputs = model_of("deepseek_v3"), padded()
    register()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(input_ids=inputs["input_ids"], labels=inputs["input_ids"]).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients()
    model.set_attn_implementation("kernel_pytorch")
    with _latent.latent_rows(model):
        found = gradients()
        with torch.no_grad():
            model(**inputs)
    assert absorbed == [] and len(found) == len(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


def test_the_cache_of_pages_gives_transformers_own_tokens(capfd: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parents[2] / "examples" / "serving" / "huggingface_cache.py"
    example = runpy.run_path(str(path))
    assert example["main"]() == 0
    assert "the same tokens as transformers' own cache" in capfd.readouterr().out
    model = model_of("mistral", pad_token_id=0)  # whose window is shorter than its texts
    inputs = padded()
    options: dict[str, Any] = dict(max_new_tokens=9, do_sample=False)
    expected = model.generate(**inputs, **options)
    model.set_attn_implementation(example["NAME"])
    cache = example["PagesCache"](batch=3, max_tokens=16, page_size=4)
    assert torch.equal(model.generate(**inputs, past_key_values=cache, **options), expected)
    with pytest.raises(ValueError, match="made for a batch of 3"):
        cache.reset()
        for layer in cache.layers:
            layer.is_initialized = False
        model.generate(inputs["input_ids"][:2], past_key_values=cache, **options)
    with pytest.raises(ValueError, match="padding behind tokens"):
        cache = example["PagesCache"](batch=3, max_tokens=16)
        model.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"].flip(1), past_key_values=cache, **options
        )
    with pytest.raises(RuntimeError, match="needs past_key_values"):
        model(inputs["input_ids"], use_cache=False)
