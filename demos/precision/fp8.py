"""FP8 training: the same model trained in its own precision and in FP8, losses side by side."""

import copy
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from common import Demo
from kernel_pytorch.precision import FP8Format, create_fp8_trainer, fp8_layers

demo = Demo("FP8 training: e4m3 forward, e5m2 backward")
on_gpu = demo.device.type == "cuda"
width, batch, steps = (64, 64, 60) if demo.quick else (4096, 8192, 100) if on_gpu else (256, 256, 200)
dtype = torch.bfloat16 if on_gpu else torch.float32
teacher = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width)).to(
    demo.device
)
plain = torch.nn.Sequential(torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width))
plain = plain.to(demo.device, dtype)
trainer = create_fp8_trainer(copy.deepcopy(plain), FP8Format.E4M3, FP8Format.E5M2)
losses: dict[str, list[float]] = {"plain": [], "FP8": []}
times = dict.fromkeys(losses, 0.0)
optimizers = {
    "plain": torch.optim.AdamW(plain.parameters(), 3e-3),
    "FP8": torch.optim.AdamW(trainer.model.parameters(), 3e-3),
}
with trainer:
    for _ in range(steps):
        x = torch.randn(batch, width, device=demo.device)
        with torch.no_grad():
            y = teacher(x).to(dtype)
        x = x.to(dtype)
        start = time.perf_counter()
        loss = torch.nn.functional.mse_loss(plain(x).float(), y.float())
        optimizers["plain"].zero_grad()
        loss.backward()
        optimizers["plain"].step()
        losses["plain"].append(float(loss.detach()))
        middle = time.perf_counter()
        optimizers["FP8"].zero_grad()
        losses["FP8"].append(float(trainer.training_step(x, y).detach()))
        trainer.optimizer_step(optimizers["FP8"])
        times["plain"] += middle - start
        times["FP8"] += time.perf_counter() - middle
    converted = len(dict(fp8_layers(trainer.model)))
first, last = losses["plain"][0], {name: sum(each[-5:]) / 5 for name, each in losses.items()}
print(f"  {converted} layers in FP8; loss {first:.4f} at first, after {steps} steps:")
print(f"  plain {last['plain']:.4f}, FP8 {last['FP8']:.4f}")
demo.require("FP8 learns", last["FP8"] < 0.7 * first, f"{last['FP8']:.4f} of {first:.4f}")
demo.require(
    "as plain does", last["FP8"] < 1.25 * last["plain"] + 0.01 * first, f"{last['FP8']:.4f} and {last['plain']:.4f}"
)
print(f"  plain {times['plain'] / steps * 1e3:.2f} ms, FP8 {times['FP8'] / steps * 1e3:.2f} ms per step")
if not on_gpu:
    print("  On a CPU the codes are decoded and multiplied in fp32: this tries the recipe, not its speed.")
demo.finish()
