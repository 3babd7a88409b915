"""What torch needs of each op besides its kernels: shape functions, gradients, batching rules. One module per op."""
