"""torch.compile on top of an optimised model."""
