"""Every generator, by the name of its function."""

from . import (  # noqa: F401
    blocks,
    elementwise,
    experts,
    few_bits,
    float8,
    linear_attentions,
    losses,
    pages,
    pieces,
    positions,
    products,
    rows,
    sparse_attentions,
    sparsity,
)
from .run import GENERATORS, draw_case, run_case

__all__ = ["GENERATORS", "draw_case", "run_case"]
