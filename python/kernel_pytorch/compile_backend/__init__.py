"""The backend of torch.compile by the name "kernel_pytorch".

An installed package is found by its entry point (torch_dynamo_backends), and nothing needs to be imported. Importing
this module registers the name where the package runs from a checkout.
"""

from __future__ import annotations

import torch._dynamo

from .choice import forget
from .entry import backend
from .explain import explain_compile
from .patterns import PATTERNS

__all__ = ["PATTERNS", "backend", "explain_compile", "forget"]

# Entry points are known by now, so that a name that one of them brings is not registered a second time.
if "kernel_pytorch" not in torch._dynamo.list_backends(exclude_tags=()):
    torch._dynamo.register_backend(backend, name="kernel_pytorch")
