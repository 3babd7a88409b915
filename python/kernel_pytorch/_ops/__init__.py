"""The ops for torch, one file per op: signature, casts, gradient. Arguments and shapes are declared in C++
(kernel_pytorch/ops/<op>/<op>.h); how a call reaches the kernels is in support/declare.py.
"""
