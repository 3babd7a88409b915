"""Texts from prompts, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from .engine import Engine
from .requests import Completion, OnToken, Sampling


def _tokens_of(prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("generate: a prompt is text; give a tokenizer, or lists of tokens")
        return list(tokenizer(prompt)["input_ids"])
    if isinstance(prompt, Tensor) and prompt.dim() > 0:
        return [int(token) for token in prompt.reshape(-1).tolist()]
    if not isinstance(prompt, Iterable) or (isinstance(prompt, Tensor) and prompt.dim() == 0):
        raise ValueError(f"generate: a prompt is {prompt!r}; prompts are a list of lists of tokens, or of texts")
    return list(prompt)


def _stop_tokens(model: Any, eos_token_id: int | Sequence[int] | None) -> tuple[int, ...]:
    if eos_token_id is None:
        settings = getattr(model, "generation_config", None)
        eos_token_id = getattr(settings, "eos_token_id", None)
    if eos_token_id is None:
        return ()
    return (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)


def _each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"generate: {name} has {len(value)} values, there are {count} prompts; give one for each")
    return list(value)


def generate(
    model: Any,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
    eos_token_id: int | Sequence[int] | None = None,
    stop_strings: str | Sequence[str] = (),
    tokenizer: Any = None,
    on_token: OnToken | None = None,
    engine: Engine | None = None,
    **options: Any,
) -> list[Completion]:
    """Completions of prompts by a causal language model of Hugging Face's transformers, batched continuously.

    One machine, one model, one thread. Greedy unless a temperature is given. A model that cannot be computed over pages
    as it computes itself is refused with the reason.

    Args:
        model: on its device; float32, bfloat16 or float16.
        prompts: lists or tensors of tokens, or texts with a tokenizer.
        max_new_tokens, temperature, top_k, top_p, min_p, seed: as in `Sampling`: one for all, or one for each. One seed
            for all gives prompt i the seed plus i.
        eos_token_id: tokens that end a text; None: those of model.generation_config.
        stop_strings: texts that end it; they need the tokenizer.
        tokenizer: of Hugging Face's kind.
        on_token: called with (number of the prompt, token) as tokens come.
        engine: one that is kept between calls, with its cache and graphs; `model` and `options` are then its own.
        options: of `Engine`.
    """
    if isinstance(prompts, (str, Mapping)):
        what = "a text" if isinstance(prompts, str) else f"a {type(prompts).__name__}"
        raise ValueError(f"generate: prompts is {what}; give a list of texts or of lists of tokens")
    if engine is None:
        engine = Engine(model, tokenizer=tokenizer, **options)
    elif options:
        raise ValueError(f"generate: {', '.join(options)} belong to the engine that was given")
    count = len(prompts)
    stops = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    seeds = [seed + i for i in range(count)] if isinstance(seed, int) else _each("seed", seed, count)
    columns = {
        "max_new_tokens": _each("max_new_tokens", max_new_tokens, count),
        "temperature": _each("temperature", temperature, count),
        "top_k": _each("top_k", top_k, count),
        "top_p": _each("top_p", top_p, count),
        "min_p": _each("min_p", min_p, count),
        "seed": seeds,
    }
    ends = _stop_tokens(model, eos_token_id)
    first = engine.next_number
    report = None if on_token is None else lambda number, token: on_token(number - first, token)
    added: list[int] = []
    try:
        for i, prompt in enumerate(prompts):
            values = {name: column[i] for name, column in columns.items()}
            sampling = Sampling(**values, stop_tokens=ends, stop_strings=stops)
            added.append(engine.add(_tokens_of(prompt, tokenizer), sampling, report))
        engine.run()
    except BaseException:  # an engine that is kept must not go on with the others
        for number in added:
            engine.cancel(number)
        raise
    completions = [engine.completion(number) for number in added]
    return [completion for completion in completions if completion is not None]
