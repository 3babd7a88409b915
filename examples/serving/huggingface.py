"""Serving a Hugging Face model on this machine: from a folder, or a small random one.

    python examples/serving/huggingface.py [FOLDER]

`serving.generate` takes prompts at once; `serving.Engine` takes them as they come.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers

from kernel_pytorch import serving


def load(folder: str | None) -> tuple[Any, Any]:
    if folder is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        return model.eval(), tokenizer
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=256,
        max_position_embeddings=256,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval(), None


def main() -> int:
    model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    prompts = ["The sea is", "Two plus two"] if tokenizer is not None else [[1, 2, 3], [4, 5, 6, 7, 8, 9]]

    # Prompts at once, tokens as they come.
    came: list[tuple[int, int]] = []
    made = serving.generate(
        model, prompts, max_new_tokens=12, tokenizer=tokenizer, on_token=lambda *token: came.append(token)
    )
    for completion in made:
        print(tokenizer.decode(completion.tokens) if tokenizer is not None else completion.tokens, completion.reason)
    assert len(came) == sum(len(completion.tokens) for completion in made)

    # Requests that come while others are served; the second begins as the first does and finds its pages.
    engine = serving.Engine(model, tokenizer=tokenizer, page_size=4)
    front = list(made[0].prompt) + made[0].tokens
    first = engine.add(front, serving.Sampling(max_new_tokens=4))
    engine.step()
    second = engine.add([*front[:-1], 7], serving.Sampling(max_new_tokens=4, temperature=0.8, top_p=0.9, seed=1))
    engine.run()
    for number in (first, second):
        completion = engine.completion(number)
        assert completion is not None
        print(completion.tokens, completion.reason)
    print(f"{engine.cache.allocator.shared_tokens()} tokens of prompts were found in the cache")
    return 0


if __name__ == "__main__":
    sys.exit(main())
