"""Optimizers of optax's form: `init` and `update` make a GradientTransformation, and `step` returns the parameters
themselves. optax is not needed.

optimizer = adamw(3e-4)
state = optimizer.init(parameters)
parameters, state = optimizer.step(parameters, gradients, state)   # one pass; donate parameters and state
updates, state = optimizer.update(gradients, state, parameters)    # for optax.chain and apply_updates
"""

from . import plain as plain  # its formulas
from .lists import Optimizer, OptimizerState, adamw, lion, sgd
from .muon import MuonState, muon

__all__ = ["MuonState", "Optimizer", "OptimizerState", "adamw", "lion", "muon", "sgd"]
