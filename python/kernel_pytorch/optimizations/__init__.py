"""Import paths of the seeds; what they name lives in kernel_pytorch.attention and its neighbours."""
