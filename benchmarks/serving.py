"""Text generation by `serving.generate` against Hugging Face's own, on one model with random weights.

    python benchmarks/serving.py [--device cpu|cuda] [--layers N] [--batches 1,64] [--input 512] [--new 256]
                                 [--ways ours,hugging_face] [--limit SECONDS] [--output FILE]

The model has the shape of Llama-3.1 8B (--layers of its 32), on a CPU a small one. Hugging Face's generate has a
static cache and torch.compile(mode="reduce-overhead") of its decoding step, its fastest. Each way runs once before it
is timed, which compiles and captures, then --repeats times, and the fastest counts. tokens/s are new tokens by the
time of the whole call, prompts included. "step" is a decoding step in the middle of a text; "not reads" is the share
of it beyond the time that reading the weights and the cache takes at the rate at which this GPU reads the weights
alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import measure
import torch
from table import print_and_store
from torch_norms import describe_machine

from kernel_pytorch import functional, serving

THEIRS = "Hugging Face, static cache, compiled"
_SHAPES: dict[str, dict[str, Any]] = {
    "cuda": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "cpu": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
    },
}


def make_model(device: torch.device, layers: int, longest: int) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        **_SHAPES[device.type],
        num_hidden_layers=layers,
        max_position_embeddings=longest,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32
        ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def seconds_of(run: Any, device: torch.device, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def theirs(model: Any, prompts: torch.Tensor, new: int) -> Any:
    from transformers import CompileConfig

    settings: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    if prompts.is_cuda:
        settings |= {"cache_implementation": "static", "compile_config": CompileConfig(mode="reduce-overhead")}
    return model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), **settings)


def step_figures(engine: serving.Engine, batch: int, tokens: int) -> dict[str, float]:
    """A decoding step of `batch` requests of so many tokens, on a GPU: its time, and that of its reads alone."""
    model = engine.model
    decoder: Any = engine.decoder
    graph = decoder.graphs[next(size for size in decoder.sizes if size >= batch)]
    page = engine.cache.page_size
    pages = torch.arange(batch * (-(-tokens // page)), dtype=torch.int32, device=engine.device)
    decoder.tables[:batch, : -(-tokens // page)] = pages.view(batch, -1)
    times = []
    for _ in range(8):
        decoder.active.zero_()
        decoder.active[:batch] = 1
        decoder.positions[:batch] = tokens - 2
        decoder.seq_lens[:batch] = tokens - 1
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    decoder.active.zero_()
    decoder.seq_lens.zero_()
    weights = [p for name, p in model.named_parameters() if "embed_tokens" not in name or p is model.lm_head.weight]
    large = max(weights, key=lambda p: p.numel()).detach()
    rate = 0.0
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        large.view(torch.int32).amax()
        end.record()
        end.synchronize()
        rate = max(rate, large.numel() * large.element_size() / begin.elapsed_time(end))
    layers = engine.cache.layers
    cache = batch * tokens * sum(layer.heads * (layer.size + layer.value_size) for layer in layers) * 2
    read = sum(p.numel() * p.element_size() for p in weights) + cache
    times.sort()
    return {"step_ms": times[len(times) // 2], "reads_ms": read / rate, "read_tb_s": rate / 1e9}


def prefix_figures(device: torch.device, seconds: float) -> dict[str, Any]:
    """Decoding of 64 requests with 16,384 common keys and 512 own ones: all keys of each, or the common ones once."""
    requests, prefix, own, page = 64, 16384, 512, 64
    common, each = prefix // page, own // page
    shape = (common + requests * each, page, 8, 128)
    keys, values = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    query = torch.randn(requests, 64, 128, dtype=torch.bfloat16, device=device)
    table = torch.arange(common, dtype=torch.int32, device=device)[None]
    tables = common + torch.arange(requests * each, dtype=torch.int32, device=device).view(requests, each)
    whole = torch.cat([table.expand(requests, common), tables], 1).contiguous()
    lengths = torch.full((requests,), own, dtype=torch.int32, device=device)
    length = torch.full((1,), prefix, dtype=torch.int32, device=device)
    ways: dict[str, Any] = {
        "ours": lambda i: serving.shared_prefix_attention(query, keys, values, table, length, tables, lengths),
        "plain": lambda i: functional.paged_attention(query, keys, values, whole, lengths + prefix),
    }
    error = (ways["ours"](0).float() - ways["plain"](0).float()).abs().max().item()
    assert error < 0.02, f"shared prefix: off by {error}"
    times = measure.compare(ways, 1, device, seconds)
    ours, plain = times["ours"].median_us, times["plain"].median_us
    return {
        "what": "shared prefix of 16384 keys, 64 requests with 512 own, 64/8 heads: against plain paged_attention",
        "ours": f"{ours:.1f} µs; plain takes {plain / ours:.2f} times as long",
        "shared_us": ours,
        "plain_us": plain,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--ways", default="ours,hugging_face")
    parser.add_argument("--prefix", action="store_true", help="also attention over a shared prefix, on a GPU")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds, after which no other way is begun")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    started = time.perf_counter()
    device = torch.device(arguments.device)
    layers = arguments.layers or (32 if device.type == "cuda" else 4)
    longest = arguments.input + arguments.new
    model = make_model(device, layers, longest)
    print(f"model ready after {time.perf_counter() - started:.1f} s", flush=True)
    figures: list[dict[str, Any]] = []
    columns = ["what", "ours", THEIRS, "share of a step that is not reads"]

    def run() -> dict[str, Any]:
        """Texts for the table, and the numbers behind them."""
        texts = [{name: figure.get(name, "") for name in columns} for figure in figures]
        numbers = [{name: value for name, value in figure.items() if name not in columns} for figure in figures]
        return {"machine": describe_machine(device), "columns": columns, "figures": texts, "numbers": numbers}

    def store() -> None:
        if arguments.output is not None:
            arguments.output.write_text(json.dumps({"benchmark": "serving", "runs": [run()]}, indent=1) + "\n")

    batches = [int(batch) for batch in arguments.batches.split(",")]
    for way in arguments.ways.split(","):
        for number, batch in enumerate(batches):
            generator = torch.Generator().manual_seed(7)
            prompts = torch.randint(0, model.config.vocab_size, (batch, arguments.input), generator=generator)
            if len(figures) <= number:
                what = f"Llama 8B, {layers} of 32 layers" if device.type == "cuda" else f"Llama, {layers} small layers"
                figures.append({"what": f"{what}, B{batch}, {arguments.input} in, {arguments.new} new"})
            row = figures[number]
            if time.perf_counter() - started > arguments.limit:
                row.setdefault("ours" if way == "ours" else THEIRS, "not run: the time was up")
                continue
            texts = prompts.tolist()
            if way == "ours":
                engine = serving.Engine(model, max_batch=batch, max_tokens=8192, max_length=longest)
                # Prompts differ from run to run, so that none finds its pages in the cache.
                turn = [0]

                def ours(engine: Any = engine, texts: Any = texts, turn: Any = turn) -> None:
                    turn[0] += 1
                    moved = [[(token + turn[0]) % model.config.vocab_size for token in text] for text in texts]
                    made = serving.generate(model, moved, max_new_tokens=arguments.new, engine=engine)
                    assert all(len(completion.tokens) == arguments.new for completion in made)

                call = ours
            else:
                on_device = prompts.to(device)

                def call(on_device: Any = on_device) -> None:
                    made = theirs(model, on_device, arguments.new)
                    assert made.shape[1] == longest

            call()
            print(f"{row['what']}: {way} first call after {time.perf_counter() - started:.1f} s", flush=True)
            seconds = seconds_of(call, device, arguments.repeats)
            rate = batch * arguments.new / seconds
            row[f"{way}_seconds"] = seconds
            row["ours" if way == "ours" else THEIRS] = f"{rate:.0f} tokens/s, {seconds * 1e3:.0f} ms"
            if way == "ours" and device.type == "cuda":
                step = step_figures(engine, batch, arguments.input + arguments.new // 2)
                row |= step
                share = 1 - step["reads_ms"] / step["step_ms"]
                row["share of a step that is not reads"] = (
                    f"{share:.1%} of {step['step_ms']:.3f} milliseconds (reads at {step['read_tb_s']:.2f} TB/s)"
                )
            if "ours_seconds" in row and "hugging_face_seconds" in row:
                row[THEIRS] += f", {row['hugging_face_seconds'] / row['ours_seconds']:.2f}x"
            print(row, flush=True)
            store()
            if way == "ours":
                del engine, ours, call
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    if arguments.prefix:
        with torch.no_grad():
            figures.append(prefix_figures(device, 0.3))
    print_and_store(run(), arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
