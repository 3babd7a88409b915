"""Optimizers on the project's kernels: torch.optim's interface and state_dict, one launch for a list of parameters."""

from .adamw import AdamW
from .lion import Lion
from .muon import Muon
from .norms import clip_grad_norm_
from .offload import Offload
from .release import release_gradients
from .sgd import SGD

__all__ = ["SGD", "AdamW", "Lion", "Muon", "Offload", "clip_grad_norm_", "release_gradients"]
