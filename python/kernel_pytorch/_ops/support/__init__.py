"""What the ops share: from a declaration to a torch function with gradients, batching, sharding and counts of FLOPs."""
