"""nn.Embedding: rows of a table by their index, with a gradient summed in a fixed order."""

from __future__ import annotations

from torch import Tensor, nn

from ...functional import embedding
from ..changes import SetForward, mark
from ..sites import Call, Found, Proposal, Refusal, Way
from .context import Context, single_input, weight_reason, why_not_plain

NAME = "embedding"


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return None
    reason = why_not_plain("", module) or weight_reason(module) or _asks_for_more(module)
    if reason:
        return Refusal(path, NAME, reason)
    forward = mark(single_input(_look_up, "input", nn.Embedding.forward))
    return Proposal(
        NAME,
        path,
        module,
        f"nn.Embedding, {module.num_embeddings} rows of {module.embedding_dim}",
        [Way("kernel_pytorch embedding", lambda: SetForward(module, forward))],
        pointwise=True,
        opaque=True,  # torch's gradient is one op that sorts, counts and sums
    )


def _look_up(module: nn.Module, indices: Tensor) -> Tensor:
    assert isinstance(module, nn.Embedding)
    return embedding(indices, module.weight, module.padding_idx)


def _asks_for_more(module: nn.Embedding) -> str | None:
    if module.max_norm is not None:
        return "max_norm rewrites the table in forward"
    if module.sparse:
        return "its gradient is sparse"
    return "scale_grad_by_freq divides gradients by counts" if module.scale_grad_by_freq else None
