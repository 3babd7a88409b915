"""Tensors between modules: how they lie in memory, and which module's result goes into which."""
