"""What `kpt serve-bench` becomes: a trace through the engine, figures to the terminal and to files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

try:  # first: it says what is missing where torch is missing or old
    from .. import _torch as _torch
except ImportError as error:
    sys.exit(f"kpt: serve-bench: {error}")

import torch  # isort: skip

from .engine import Engine  # isort: skip
from .page import page  # isort: skip
from .trace import figures, make_trace, serve_trace  # isort: skip

_SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kpt serve-bench")
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="")
    parser.add_argument("--device", default="")
    parser.add_argument("--html", default="")
    parser.add_argument("--json", default="")
    return parser


def _model(folder: str, dtype: str, device: torch.device, longest: int) -> tuple[Any, str]:
    try:
        import transformers  # optional
    except ImportError:
        raise SystemExit("kpt: serve-bench: it serves models of transformers; run `pip install transformers`") from None
    if folder:
        if not Path(folder).is_dir():
            raise SystemExit(f"kpt: serve-bench: {folder} is no folder with a model")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        title = Path(folder).name
    else:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**_SMALL, max_position_embeddings=max(longest, 64))
        model = transformers.AutoModelForCausalLM.from_config(config)
        title = "A Llama of 4 small layers, random weights"
    kind = getattr(torch, dtype) if dtype else torch.bfloat16 if device.type == "cuda" else torch.float32
    return model.to(device, kind).eval(), f"{title}, {str(kind).split('.')[-1]} on {device.type}"


def main(words: list[str]) -> int:
    arguments = _parser().parse_args(words)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    longest = arguments.prompt + arguments.output
    model, title = _model(arguments.model, arguments.dtype, device, longest)
    engine = Engine(model, max_batch=arguments.batch, max_tokens=max(2048, arguments.batch), max_length=longest)
    serve_trace(engine, make_trace(min(4, arguments.batch), 0, arguments.prompt, arguments.output, 1), 1)  # warm
    trace = make_trace(arguments.requests, arguments.rate, arguments.prompt, arguments.output, arguments.seed)
    found = figures(trace, serve_trace(engine, trace, arguments.seed))
    print(title)
    print(f"{found['requests']} requests in {found['seconds']:.2f} s, {arguments.rate:g} a second arriving")
    print(f"{found['new_tokens_per_second']:10.1f} new tokens/s, {found['tokens_per_second']:.1f} with prompts")
    for name, key in (("first token", "first_token_seconds"), ("per token", "seconds_per_token")):
        spread = "   ".join(f"{part} {value * 1e3:.1f} ms" for part, value in found[key].items())
        print(f"{name:>12}: {spread or 'no request had two tokens'}")
    if arguments.json:
        requests = [{"at": a.at, "prompt": a.prompt, "came": a.came} for a in trace]
        Path(arguments.json).write_text(json.dumps({"title": title, **found, "trace": requests}, indent=1) + "\n")
    if arguments.html:
        Path(arguments.html).write_text(page(title, found, trace))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
