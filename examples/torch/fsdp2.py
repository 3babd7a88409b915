"""Trains a small language model whose parameters are sharded over all processes (FSDP2), in plain PyTorch.

    torchrun --nproc-per-node 2 examples/torch/fsdp2.py --steps 20

The layers, the loss and the optimizer are this package's; sharding and the loop are torch's. GPUs use NCCL, CPUs gloo.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from kernel_pytorch.core import OptimizedEmbedding, OptimizedRMSNorm, OptimizedTransformerBlock
from kernel_pytorch.functional import cross_entropy
from kernel_pytorch.optim import AdamW
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = OptimizedEmbedding(vocabulary, width)
        self.blocks = nn.ModuleList(OptimizedTransformerBlock(width, heads, dropout=0.0) for _ in range(layers))
        self.norm = OptimizedRMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, is_causal=True)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    words = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, kind = dist.get_rank(), "cuda" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(kind, (dist.get_world_size(),))

    torch.manual_seed(0)  # the same parameters in every process before they are sharded
    vocabulary = 32
    model = LanguageModel(vocabulary, words.width, 4, 2).to(kind)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), 1e-2, max_grad_norm=10.0)

    generator = torch.Generator().manual_seed(1 + rank)  # other data in every process
    for step in range(words.steps):
        start = torch.randint(0, vocabulary, (8, 1), generator=generator)
        ids = ((start + torch.arange(33)) % vocabulary).to(kind)  # counting: easy to learn
        loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        if rank == 0 and (step % 5 == 0 or step == words.steps - 1):
            print(f"step {step}: loss {float(mean) / dist.get_world_size():.3f}", flush=True)
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in model.parameters())
    print(f"rank {rank} holds {local:,} of {whole:,} parameters", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
