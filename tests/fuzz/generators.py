"""Every generator, by the name of its function."""

from . import blocks, elementwise, experts, few_bits, float8, losses, pages, pieces, positions, products, rows  # noqa: F401
from .run import GENERATORS, draw_case, run_case

__all__ = ["GENERATORS", "draw_case", "run_case"]
