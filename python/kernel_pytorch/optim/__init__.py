"""Optimizers on the project's kernels: torch.optim's interface and state_dict, one launch for a list of parameters."""

from .adamw import AdamW
from .deep_states import (
    CPUGPUHybridOptimizer,
    DeepOptimizerStates,
    InterleaveOffloadingOptimizer,
    MemoryConfig,
    PerformanceModel,
)
from .lion import Lion
from .muon import Muon
from .norms import clip_grad_norm_
from .offload import Offload
from .overlap import overlap_forward
from .release import release_gradients
from .sgd import SGD

__all__ = [
    "SGD",
    "AdamW",
    "CPUGPUHybridOptimizer",
    "DeepOptimizerStates",
    "InterleaveOffloadingOptimizer",
    "Lion",
    "MemoryConfig",
    "Muon",
    "Offload",
    "PerformanceModel",
    "clip_grad_norm_",
    "overlap_forward",
    "release_gradients",
]
