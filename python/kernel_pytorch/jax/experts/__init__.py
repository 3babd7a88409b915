"""Mixtures of experts: routing, grouped products, the experts' MLPs."""

from __future__ import annotations

from . import plain as plain  # its formulas
from .grouped import grouped_matmul as grouped_matmul
from .grouped import ragged_dot as ragged_dot
from .mixture import Routing as Routing
from .mixture import moe_combine as moe_combine
from .mixture import moe_mlp as moe_mlp
from .mixture import route as route
from .mixture import route_chosen as route_chosen
from .parallel import expert_parallel_mlp as expert_parallel_mlp
from .quantized import quantized_grouped_matmul as quantized_grouped_matmul
