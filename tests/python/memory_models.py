"""Models for the tests of fit_memory: each with what a block may do that a plan must survive."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernel_pytorch import functional


class Block(nn.Module):
    """A transformer block on torch's functions; `dropout`, in-place ops and buffers are optional."""

    def __init__(self, size: int = 64, heads: int = 4, dropout: float = 0.0, in_place: bool = False) -> None:
        super().__init__()
        self.heads, self.dropout, self.in_place = heads, dropout, in_place
        self.norms = nn.ModuleList([nn.LayerNorm(size), nn.LayerNorm(size)])
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.gate, self.up, self.down = nn.Linear(size, 3 * size), nn.Linear(size, 3 * size), nn.Linear(3 * size, size)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        batch, length, size = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + F.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, size)), self.dropout)
        y = self.norms[1](x)
        gated = F.silu(self.gate(y)) * self.up(y)
        if self.in_place:
            gated = torch.relu_(gated * 1.5)
        return x + scale * self.down(gated)


class OwnBlock(nn.Module):
    """A block on this library's ops."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(size)), nn.Parameter(torch.ones(size))])
        self.gate, self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.softmax(functional.rms_norm(x, self.weights[0])) + x
        y = functional.rms_norm(x, self.weights[1])
        return x + self.down(functional.swiglu(self.gate(y), self.up(y)))


class Convolutions(nn.Module):
    """With a batch norm, whose running statistics must move once a step."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.layer = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return x + y


class Model(nn.Module):
    """Words, blocks, words."""

    def __init__(self, blocks: list[nn.Module], size: int = 64, words: int = 50) -> None:
        super().__init__()
        self.table, self.blocks, self.head = nn.Embedding(words, size), nn.ModuleList(blocks), nn.Linear(size, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def tokens_for(device: str = "cpu", batch: int = 2, length: int = 96) -> Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)


def gradients(model: nn.Module, inputs: Tensor, seed: int = 3) -> list[Tensor]:
    """Of one step with fixed random numbers."""
    torch.manual_seed(seed)
    model.zero_grad()
    model(inputs).square().mean().backward()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found
