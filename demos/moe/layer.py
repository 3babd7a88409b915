"""A mixture of experts: grouped products over the experts, against a loop over experts in torch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import torch.nn.functional as F
from common import Demo
from kernel_pytorch.mixture_of_experts import MoELayer

demo = Demo("Mixture of experts: top 2 of 8")
on_gpu = demo.device.type == "cuda"
width, inner, tokens = (64, 128, 256) if demo.quick else (2048, 4096, 8192) if on_gpu else (512, 1024, 1024)
experts, top_k = 8, 2
layer = MoELayer(width, inner, experts, top_k, activation="swiglu").to(demo.device, torch.bfloat16 if on_gpu else None)
x = torch.randn(1, tokens, width, device=demo.device).to(layer.down.dtype)


def by_loop(x: torch.Tensor) -> torch.Tensor:
    """Softmax over all experts, the best two with weights that sum to one, one expert after another."""
    flat = x.flatten(0, 1)
    weights, chosen = (flat.float() @ layer.router.weight.float().T).softmax(-1).topk(top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    output = torch.zeros_like(flat)
    for expert in range(experts):
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up = F.linear(flat[rows], layer.gate_up[expert]).chunk(2, -1)
        result = F.linear(F.silu(gate) * up, layer.down[expert])
        output.index_add_(0, rows, result * weights[rows, place, None].to(result.dtype))
    return output.view_as(x)


with torch.no_grad():
    demo.check("output", layer(x), by_loop(x), 2e-2 if on_gpu else 1e-4)
    demo.compare({"a loop over experts": lambda: by_loop(x), "MoELayer": lambda: layer(x)})
output, losses = layer(x, return_losses=True)
(output.float().square().mean() + losses["load_balance_loss"] + losses["router_z_loss"]).backward()
demo.require(
    "gradients", all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters()), "all finite"
)
demo.finish()
