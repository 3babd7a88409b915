"""A Llama-style model on a mesh: FSDP2, tensor and context parallel together, blocks as torchtitan writes them.

    torchrun --nproc-per-node 4 examples/torch/mesh.py --tensor 2 --context 2
    torchrun --nproc-per-node 8 examples/torch/mesh.py --tensor 2 --context 2 --replicate 2

The mesh and the order of wrapping are kernel_pytorch.distributed_scale's; norms, rope, attention and loss are this
package's kernels. GPUs use NCCL, CPUs gloo. Every arrangement gives the same losses.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from kernel_pytorch.attention.distributed import context_parallel_attention, shard_sequence
from kernel_pytorch.core import OptimizedRMSNorm
from kernel_pytorch.distributed_scale import create_device_mesh, parallelize
from kernel_pytorch.functional import cross_entropy, rope, swiglu
from kernel_pytorch.optim import AdamW
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

SCHEDULE = "zigzag"  # equal work for causal attention
TENSOR_PLAN = {
    f"layers.*.{name}": style()
    for style, names in {
        ColwiseParallel: ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"),
        RowwiseParallel: ("attention.wo", "feed_forward.w2"),
    }.items()
    for name in names
}


class Attention(nn.Module):
    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim, self.group = head_dim, None
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, places: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))  # this rank's heads
        q, k = rope(q, k, cos, sin, positions=places)
        output = context_parallel_attention(q, k, v, group=self.group, schedule=SCHEDULE, causal=True)
        return self.wo(output.flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(dim, hidden_dim, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x)))


class TransformerBlock(nn.Module):
    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(dim, head_dim), FeedForward(dim, 2 * dim)
        self.attention_norm, self.ffn_norm = OptimizedRMSNorm(dim), OptimizedRMSNorm(dim)

    def forward(self, x: Tensor, *table: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), *table)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, vocab: int, dim: int, layers: int, head_dim: int = 16) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(TransformerBlock(dim, head_dim) for _ in range(layers))
        self.norm, self.output = OptimizedRMSNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor, places: Tensor, length: int) -> Tensor:
        angles = torch.outer(
            torch.arange(length, device=ids.device),
            10000.0 ** -(torch.arange(0, self.head_dim, 2, device=ids.device) / self.head_dim),
        )
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin(), places)
        return self.output(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("replicate", "context", "tensor"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=64)
    words = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    kind, rank = "cuda" if on_gpu else "cpu", dist.get_rank()
    mesh = create_device_mesh(replicate=words.replicate, context=words.context, tensor=words.tensor, device=kind)
    print(f"rank {rank}: {mesh}", flush=True)

    torch.manual_seed(0)  # the same parameters in every process
    vocab = 32
    model = Transformer(vocab, 64, 2).to(kind)
    group = mesh.get_group("context") if words.context > 1 else None
    for layer in model.layers:
        layer.attention.group = group
    model = parallelize(model, mesh, tensor_plan=TENSOR_PLAN if words.tensor > 1 else None)
    optimizer = AdamW(model.parameters(), 1e-2)

    batch, sharing = 16, words.context * words.tensor  # members of a context or a product have the same samples
    sets = dist.get_world_size() // sharing
    mine = slice(rank // sharing * batch // sets, (rank // sharing + 1) * batch // sets)

    def part(x: Tensor, dim: int) -> Tensor:
        return x if group is None else shard_sequence(x, dim, group=group, schedule=SCHEDULE)

    generator = torch.Generator().manual_seed(1)
    for step in range(words.steps):
        start = torch.randint(0, vocab, (batch, 1), generator=generator)
        ids = ((start + torch.arange(words.length + 1)) % vocab)[mine].to(kind)  # counting: easy to learn
        places = part(torch.arange(words.length, device=kind), 0)
        logits = model(part(ids[:, :-1], 1), places, words.length)
        loss = cross_entropy(logits.flatten(0, 1), part(ids[:, 1:], 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and (step % 5 == 0 or step == words.steps - 1):
            print(f"step {step}: loss {float(total) / dist.get_world_size():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
