"""What a caller asks for, what he gets, and a request on its way from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

OnToken = Callable[[int, int], None]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and when a text ends.

    Args:
        max_new_tokens: at most so many.
        temperature: 0 takes the likeliest token.
        top_k, top_p, min_p: as in `functional.sample`.
        seed: of this request: equal seeds and logits give equal tokens, whatever else is in the batch.
        stop_tokens: tokens that end the text; the last one is part of it.
        stop_strings: texts that end it; they need a tokenizer.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"Sampling: max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"Sampling: temperature is {self.temperature}; it must be 0 (greedy) or more")
        if self.top_k < 0:
            raise ValueError(f"Sampling: top_k is {self.top_k}; it must be 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Sampling: top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"Sampling: min_p is {self.min_p}; it must be 0 to 1")
        if not all(self.stop_strings):
            raise ValueError("Sampling: a stop string is empty, which every text has in it; leave it out")


@dataclass(frozen=True)
class Completion:
    """The tokens after a prompt, and why they end: "length", "stop_token", "stop_string" or "cancelled"."""

    prompt: list[int]
    tokens: list[int]
    reason: str


@dataclass
class Request:
    """A request in the engine. `computed` of its tokens are in the cache; the last one is not until it is fed."""

    number: int
    prompt: list[int]
    sampling: Sampling
    on_token: OnToken | None = None
    tokens: list[int] = field(default_factory=list)  # new ones
    handle: int = 0  # of the cache; 0: none
    computed: int = 0
    reason: str = ""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def next_tokens(self, count: int) -> list[int]:
        """The next tokens to feed, at most `count`."""
        first, last = self.computed, min(self.computed + count, self.length)
        size = len(self.prompt)
        if first >= size:
            return self.tokens[first - size : last - size]
        return self.prompt[first:last] + self.tokens[: max(0, last - size)]

    def take(self, token: int, tokenizer: Any = None) -> bool:
        """A new token; whether the text ends with it."""
        self.tokens.append(token)
        if self.on_token is not None:
            self.on_token(self.number, token)  # which may cancel it
        if self.reason:
            return True
        if token in self.sampling.stop_tokens:
            self.reason = "stop_token"
        elif self.sampling.stop_strings and self._has_stop(tokenizer):
            self.reason = "stop_string"
        elif len(self.tokens) >= self.sampling.max_new_tokens:
            self.reason = "length"
        return self.reason != ""

    def _has_stop(self, tokenizer: Any) -> bool:
        # A stop string of n bytes has at most n tokens that matter; one more may end in its middle.
        longest = max(len(text.encode()) for text in self.sampling.stop_strings)
        text = tokenizer.decode(self.tokens[-(longest + 1) :])
        return any(stop in text for stop in self.sampling.stop_strings)

    def completion(self) -> Completion:
        return Completion(self.prompt, self.tokens, self.reason)


def check_prompt(prompt: Sequence[int], vocabulary: int, longest: int, sampling: Sampling) -> list[int]:
    tokens = [int(token) for token in prompt]
    if not tokens:
        raise ValueError("generate: a prompt has no tokens; give at least one, the beginning of a text")
    wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise ValueError(f"generate: a prompt has the token {wrong}, the model's vocabulary {vocabulary} tokens")
    if len(tokens) + sampling.max_new_tokens > longest:
        raise ValueError(
            f"generate: a prompt of {len(tokens)} tokens and {sampling.max_new_tokens} new ones are more than the "
            f"{longest} that this model and cache have room for; shorten it, or ask for fewer"
        )
    return tokens
