"""A small GPT, trained on bundled text to a stated loss by torch and by this package's layers, then served."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import torch.nn.functional as F
from common import Demo
from kernel_pytorch.core import OptimizedTransformerBlock
from kernel_pytorch.optim import AdamW
from torch import Tensor, nn

from kernel_pytorch import functional as kp

demo = Demo("Production: train a small language model, then serve it")
text = (Path(__file__).resolve().parents[2] / "LICENSE").read_bytes()  # 11 KB of English that every clone has
tokens = torch.tensor(list(text), device=demo.device)
width, heads, layers, length, batch = (64, 4, 2, 64, 16) if demo.quick else (256, 8, 4, 128, 32)
steps, goal = (120, 2.4) if demo.quick else (300, 1.2)  # nats per character; without any training 5.5


class Gpt(nn.Module):
    def __init__(self, block) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(128, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class TorchBlock(nn.Module):
    """norm, attention, norm, MLP, with the parameters of OptimizedTransformerBlock."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = OptimizedTransformerBlock(width, heads, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        part = self.inner
        y = F.layer_norm(x, (width,), part.norm1.weight, part.norm1.bias, part.norm1.eps)
        qkv = F.linear(y, part.attn.in_proj_weight, part.attn.in_proj_bias)
        q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.linear(y, part.attn.out_proj.weight, part.attn.out_proj.bias)
        return x + part.mlp(F.layer_norm(x, (width,), part.norm2.weight, part.norm2.bias, part.norm2.eps))


class OurBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = OptimizedTransformerBlock(width, heads, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, is_causal=True)


def train(model: Gpt, optimizer: torch.optim.Optimizer, loss_of) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(1)
    last, start = [], time.perf_counter()
    for _ in range(steps):
        first = torch.randint(0, len(tokens) - length - 1, (batch,), generator=generator).tolist()
        ids = torch.stack([tokens[i : i + length + 1] for i in first])
        optimizer.zero_grad()
        loss = loss_of(model.hidden(ids[:, :-1]).flatten(0, 1), model.head.weight, ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        last.append(loss.detach())
    return float(torch.stack(last[-10:]).mean()), (time.perf_counter() - start) / steps


torch.manual_seed(0)
by_torch = Gpt(TorchBlock).to(demo.device)
torch.manual_seed(0)
ours = Gpt(OurBlock).to(demo.device)
ids = tokens[:length][None]
demo.check("the same model", ours.hidden(ids), by_torch.hidden(ids), 1e-4)
results = {
    "torch": train(
        by_torch, torch.optim.AdamW(by_torch.parameters(), 3e-3), lambda x, w, y: F.cross_entropy(F.linear(x, w), y)
    ),
    "kernel_pytorch": train(ours, AdamW(ours.parameters(), 3e-3), kp.linear_cross_entropy),
}
for name, (loss, seconds) in results.items():
    print(f"  {name:15} loss {loss:.3f} after {steps} steps, {seconds * 1e3:.2f} ms per step")
demo.require(
    "loss", results["kernel_pytorch"][0] < goal, f"{results['kernel_pytorch'][0]:.3f}, the goal is below {goal}"
)
demo.require("as torch", abs(results["kernel_pytorch"][0] - results["torch"][0]) < 0.1, "both losses within 0.1")

written = list(b"The ")
with torch.no_grad():
    for _ in range(40):
        logits = ours.head(ours.hidden(torch.tensor([written[-length:]], device=demo.device)))[0, -1]
        written.append(int(logits.argmax()))
print(f"  it writes: {bytes(written).decode('ascii', 'replace')!r}")
demo.require("served", len(written) == 44, "40 characters")
demo.finish()
