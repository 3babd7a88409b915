"""States of optimizers in the host's memory: slabs, the pipeline of a step, rates of this machine and the plan."""

from .pipeline import Offload

__all__ = ["Offload"]
