"""generate against Hugging Face's own, the page cache, sampling's settings, and what is refused."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_pytorch.compat._latent import Expansion
from kernel_pytorch.serving.fused import Fused
from kernel_pytorch.serving.models import Plain, serve
from kernel_pytorch.serving.requests import Request

from kernel_pytorch import functional, serving

transformers = pytest.importorskip("transformers")

_SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_HEADS = {"head_dim": 16}
_GEMMA = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": _HEADS,
    "gemma2": {**_HEADS, **_GEMMA, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**_HEADS, **_GEMMA, "query_pre_attn_scalar": 16},
    "phi3": {"sliding_window": 9},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "olmo2": {},
    "granite": {"residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "gpt_oss": {**_HEADS, **_GEMMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "stablelm": {},
    "starcoder2": {"sliding_window": 8},
    "cohere": {},
    "deepseek_v2": {**_LATENT, "topk_method": "greedy"},
    "deepseek_v3": {**_LATENT, "q_lora_rank": None, "topk_group": 1, "n_group": 1},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon of one key head": {"new_decoder_architecture": False, "multi_query": True},
    "falcon of 4 and ALiBi": {"new_decoder_architecture": False, "multi_query": False, "alibi": True},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 128},
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 128},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4, "window_size": 8},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "mpt of 6 heads and clipped": {"d_model": 48, "n_heads": 6, "n_layers": 2, "attn_config": {"clip_qkv": 1.5}},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
    "qwen3_moe": {**_HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
_FUSED = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are small
    yield
    torch.set_num_threads(threads)


def model_of(kind: str, **more: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind.split(" ")[0], **{**_SMALL, **_CONFIGS[kind], **more})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # random logits that differ by more than rounding
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 97, (n,), generator=generator).tolist() for n in lengths]


def theirs(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    made = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **options
    )
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", _CONFIGS)
def test_greedy_tokens_are_hugging_faces(kind: str) -> None:
    model = model_of(kind)
    assert isinstance(serve(model), Fused if kind in _FUSED else Plain)
    prompts = prompts_of(5, 1, 23, 12)
    ours = serving.generate(model, prompts, max_new_tokens=[9, 14, 6, 11], max_batch=3, max_tokens=10, page_size=4)
    for prompt, completion, count in zip(prompts, ours, (9, 14, 6, 11)):
        assert completion.tokens == theirs(model, prompt, count)
        assert completion.reason == "length" and completion.prompt == prompt


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_latent_rows_are_kept_and_their_expansion_absorbed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"attend_pages": 0, "attend_expanded": 0}
    for name in calls:
        real = getattr(Expansion, name)

        def counted(*given: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            calls[name] += 1
            return real(*given, **options)

        monkeypatch.setattr(Expansion, name, counted)
    model = model_of(kind)
    served = serve(model)
    assert isinstance(served, Plain) and served.is_latent
    assert served.layers == [serving.LayerShape(1, 16, 4)] * 2  # 20 numbers a token, not 4 * (12 + 6)
    assert not any("expand_kv" in vars(module) for module in model.modules())
    calls.update(attend_pages=0, attend_expanded=0)
    (made,) = serving.generate(model, prompts_of(6), max_new_tokens=3)
    assert made.tokens == theirs(model, made.prompt, 3)
    assert calls["attend_expanded"] == 2 + 2 and calls["attend_pages"] > 4  # the check's first chunk, and the prompt
    with pytest.raises(ValueError, match="keeps latent rows"):
        serving.Engine(model, cache_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(("dtype", "least"), [(torch.float8_e4m3fn, 0.7), (torch.int8, 0.85)])
def test_caches_in_eight_bits_give_mostly_the_same_tokens(dtype: torch.dtype, least: float) -> None:
    model = model_of("llama")
    settings: dict[str, Any] = dict(max_new_tokens=1, page_size=4, max_tokens=32, max_batch=8)
    (front,) = prompts_of(12)
    prompts = prompts_of(*range(3, 43)) + [[*front, i] for i in range(8)]
    engine = serving.Engine(model, cache_dtype=dtype, page_size=4, max_tokens=32, max_batch=8)
    assert engine.cache.keys[0].dtype == dtype and len(engine.cache.key_scales) == (2 if dtype == torch.int8 else 0)
    whole = serving.generate(model, prompts, **settings)
    coded = serving.generate(model, prompts, max_new_tokens=1, engine=engine)
    agreed = sum(one.tokens == other.tokens for one, other in zip(whole, coded)) / len(prompts)
    assert agreed >= least, agreed
    assert engine.cache.allocator.shared_tokens() >= 12  # of prompts that begin alike
    (again,) = serving.generate(model, [prompts[-1]], max_new_tokens=1, engine=engine)
    assert again.tokens == coded[-1].tokens
    forked = engine.cache.fork(engine.cache.begin(front)[0])  # scales are copied with the rows
    engine.cache.extend(forked, [1])
    with pytest.raises(ValueError, match=r"cache_dtype is torch\.int32"):
        serving.Engine(model, cache_dtype=torch.int32)


def test_scales_of_tokens_that_are_not_kept_go_nowhere() -> None:
    cache = serving.PagedCache([serving.LayerShape(2, 3, 4)], 2, 4, dtype=torch.int8)
    key, value = torch.randn(3, 2, 3), torch.randn(3, 2, 4)
    scales = cache.append(0, key, value, torch.tensor([7, -1, 2]))
    found = cache.keys[0].view(8, 2, 3)[[7, 2]].float() * scales["key_scale"].view(8, 2, 1)[[7, 2]]
    assert (found - key[[0, 2]]).abs().max() < 0.02
    others = [slot for slot in range(8) if slot not in (7, 2)]
    assert bool((scales["value_scale"].view(8, 2)[others] == 1).all())


def test_a_model_is_left_as_it_was() -> None:
    model = model_of("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    serving.generate(model, prompts_of(6), max_new_tokens=3)
    assert model.training and model.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_cache_that_is_too_small_makes_requests_wait_and_begin_again() -> None:
    model = model_of("qwen3")
    prompts = prompts_of(9, 11, 8, 10)
    ours = serving.generate(model, prompts, max_new_tokens=12, cache_tokens=40, page_size=4, max_tokens=16, max_batch=4)
    assert [c.tokens for c in ours] == [theirs(model, prompt, 12) for prompt in prompts]


def test_prompts_that_begin_alike_share_pages() -> None:
    model = model_of("llama")
    (front,) = prompts_of(16)
    engine = serving.Engine(model, page_size=4)
    first = serving.generate(model, [[*front, 1, 2]], max_new_tokens=4, engine=engine)
    second = serving.generate(model, [[*front, 5], [*front, 1, 2]], max_new_tokens=4, engine=engine)
    assert engine.cache.allocator.shared_tokens() >= 32
    assert second[1].tokens == first[0].tokens
    assert second[0].tokens == theirs(model, [*front, 5], 4)


def test_sampling_is_seeded_and_independent_of_the_batch() -> None:
    model = model_of("llama")
    prompts = prompts_of(7, 4, 9)
    settings: dict[str, Any] = dict(max_new_tokens=8, temperature=1.3, top_k=20, top_p=0.9, min_p=0.01)
    together = serving.generate(model, prompts, seed=5, **settings)
    for i, prompt in enumerate(prompts):
        (alone,) = serving.generate(model, [prompt], seed=5 + i, **settings)
        assert alone.tokens == together[i].tokens
    others = serving.generate(model, prompts, seed=50, **settings)
    assert [c.tokens for c in others] != [c.tokens for c in together]
    mixed = serving.generate(model, prompts, seed=5, **{**settings, "temperature": [1.3, 0.0, 1.3]})
    assert mixed[0].tokens == together[0].tokens and mixed[1].tokens == theirs(model, prompts[1], 8)


def test_requests_can_be_cancelled() -> None:
    model = model_of("llama")
    engine = serving.Engine(model, page_size=4, max_batch=2)
    prompts = prompts_of(5, 6, 7)
    settings = serving.Sampling(max_new_tokens=6)
    stop_at_three = lambda number, _: engine.cancel(number) if len(engine.running[0].tokens) == 3 else None  # noqa: E731
    numbers = [engine.add(prompts[0], settings, stop_at_three), *(engine.add(p, settings) for p in prompts[1:])]
    engine.cancel(numbers[2])
    engine.run()
    made = [engine.completion(number) for number in numbers]
    assert [c.reason for c in made if c is not None] == ["cancelled", "length", "cancelled"]
    assert [len(c.tokens) for c in made if c is not None] == [3, 6, 0]
    assert engine.cache.allocator.available() == engine.cache.allocator.pages
    with pytest.raises(ValueError, match="vocabulary"):
        serving.generate(model, [[1, 2], [1000]], max_new_tokens=2, engine=engine)
    assert not engine.is_busy


class _Letters:
    """A tokenizer of one letter a token."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in tokens)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") for letter in text]}


def test_stop_conditions_and_streaming() -> None:
    model = model_of("llama")
    (prompt,) = prompts_of(6)
    tokens = theirs(model, prompt, 12)
    end = tokens[5]
    (stopped,) = serving.generate(model, [prompt], max_new_tokens=12, eos_token_id=end)
    assert stopped.tokens == tokens[: tokens.index(end) + 1] and stopped.reason == "stop_token"
    text = _Letters().decode(tokens)
    came: list[tuple[int, int]] = []
    (stopped,) = serving.generate(
        model,
        [prompt],
        max_new_tokens=12,
        stop_strings=text[3:5],
        tokenizer=_Letters(),
        on_token=lambda *a: came.append(a),
    )
    assert stopped.reason == "stop_string" and _Letters().decode(stopped.tokens).endswith(text[3:5])
    assert came == [(0, token) for token in stopped.tokens]
    (read,) = serving.generate(model, ["abc"], tokenizer=_Letters(), max_new_tokens=2)
    assert read.prompt == [0, 1, 2] and len(read.tokens) == 2


class _Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("stop", ["€😀", "é", "cd"])
def test_a_stop_string_ends_a_text_whose_tokens_are_bytes(stop: str) -> None:
    text = "ab€😀écd, more"
    request = Request(0, [1], serving.Sampling(stop_strings=(stop,)))
    fed = [byte for byte in text.encode() if not request.reason and (request.take(byte, _Bytes()) or True)]
    assert request.reason == "stop_string" and bytes(fed).decode() == text[: text.index(stop) + len(stop)]


def test_layers_with_attention_of_their_own_are_left_as_they_were() -> None:
    model = model_of("falcon")
    assert [(shape.heads, shape.size) for shape in serve(model).layers] == [(2, 8)] * 2  # key heads, not query heads
    attention = model.transformer.h[0].self_attention
    assert "forward" not in attention.__dict__
    attention.forward = before = attention.forward  # somebody's hook
    prompts = prompts_of(5)
    found = serving.generate(model, prompts, max_new_tokens=4)[0].tokens
    assert found == theirs(model, prompts[0], 4) and attention.__dict__["forward"] is before


def test_a_fork_is_copied_before_it_differs() -> None:
    cache = serving.PagedCache([serving.LayerShape(1, 2, 3)], 4, 4, dtype=torch.float32)
    request, shared = cache.begin([5, 6])
    slots = cache.extend(request, [5, 6])
    assert (shared, slots) == (0, [slots[0], slots[0] + 1])
    page = slots[0] // 4
    cache.keys[0][page, :2] = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    forked = cache.fork(request)
    (slot,) = cache.extend(forked, [9])
    assert slot // 4 != page and torch.equal(cache.keys[0][slot // 4, :2], cache.keys[0][page, :2])
    assert cache.table([request, forked], 2).tolist() == [[page, -1], [slot // 4, -1]]
    cache.release(request)
    cache.release(forked)
    assert cache.allocator.available() == 4


@pytest.mark.parametrize("counts", [[1, 1, 1], [2, 0, 3]])
def test_a_shared_prefix_is_attended_once(counts: list[int]) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(9, 4, 2, 16), torch.randn(9, 4, 2, 16)
    query, sinks = torch.randn(sum(counts), 4, 16), torch.randn(4)
    prefix = torch.tensor([[6, 2]], dtype=torch.int32)
    own = torch.tensor([[0, 1], [3, 4], [5, 7]], dtype=torch.int32)
    lengths = torch.tensor([5, 1, 8], dtype=torch.int32)
    ragged: dict[str, Any] = {"softcap": 9.0, "sinks": sinks, "return_lse": True}
    if counts != [1, 1, 1]:
        ragged["cu_seqlens_q"] = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    length = torch.tensor([8], dtype=torch.int32)
    found = serving.shared_prefix_attention(query, keys, values, prefix, length, own, lengths, **ragged)
    tables = torch.cat([prefix.expand(3, 2), own], 1).contiguous()
    expected = functional.paged_attention(query, keys, values, tables, lengths + 8, **ragged)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        ("openai-gpt", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "use Hugging Face's attention interface"),
        ("mamba", {}, "cannot be served over pages"),
    ],
)
def test_what_cannot_be_served_is_refused(kind: str, config: dict[str, Any], reason: str) -> None:
    settings = {**_SMALL, "num_kv_heads": 4, **config}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **settings)).eval()
    with pytest.raises(ValueError, match=f"{type(model).__name__} cannot be served over pages"):
        serving.generate(model, [[1, 2]], max_new_tokens=2)
    with pytest.raises(ValueError, match=reason):
        serve(model)


def test_bad_arguments_are_refused() -> None:
    model = model_of("llama")
    for wrong, sentence in (
        (dict(prompts=[[]]), "a prompt has no tokens"),
        (dict(prompts=[[1, 97]]), "has the token 97, the model's vocabulary 97 tokens"),
        (dict(prompts=[[1]], max_new_tokens=500), "more than the 128"),
        (dict(prompts=["a"]), "give a tokenizer"),
        (dict(prompts="a"), "prompts is a text; give a list of texts"),
        (dict(prompts=[1, 2]), "a prompt is 1; prompts are a list of lists"),
        (dict(prompts=torch.tensor([1, 2])), r"a prompt is tensor\(1\)"),
        (dict(prompts={"input_ids": [[1]]}), "prompts is a dict"),
        (dict(prompts=[[1]], stop_strings="a"), "stop strings need a tokenizer"),
        (dict(prompts=[[1]], stop_strings=["a", ""]), "a stop string is empty"),
        (dict(prompts=[[1]], top_p=0.0), "top_p is 0.0"),
        (dict(prompts=[[1]], temperature=[1.0, 2.0]), "temperature has 2 values, there are 1 prompts"),
        (dict(prompts=[[1]], max_batch=0), "max_batch is 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            serving.generate(model, **wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no model of Hugging Face"):
        serving.generate(torch.nn.Linear(2, 2), [[1]])


def test_the_example_serves(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parents[2] / "examples" / "serving" / "huggingface.py"
    monkeypatch.setattr(sys, "argv", [path.name])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    shown = capfd.readouterr().out
    assert "tokens of prompts were found in the cache" in shown and "\n0 tokens" not in shown


def test_serve_bench_writes_its_figures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from kernel_pytorch.serving.__main__ import main

    words = ["--requests", "3", "--rate", "0", "--prompt", "9", "--output", "4", "--device", "cpu"]
    assert main([*words, "--html", str(tmp_path / "page.html"), "--json", str(tmp_path / "figures.json")]) == 0
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["requests"] == 3 and found["new_tokens"] == sum(len(one["came"]) for one in found["trace"])
    assert found["new_tokens_per_second"] == pytest.approx(found["new_tokens"] / found["seconds"])
    assert (tmp_path / "page.html").read_text().count("<rect") == 3
    assert "new tokens/s" in capfd.readouterr().out
