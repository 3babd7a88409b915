"""Random calls of every function of kernel_pytorch.functional, compared with plain torch in fp64.

    PYTHONPATH=python:tests python -m fuzz --calls 2000 [--only NAME ...] [--seed N] [--call I] [--jobs N]

A generator (one per function) draws shapes, strides, types and options, among them some that must be refused. Calls run
in worker processes, so that a crash, and a call of more than five seconds, are findings as well as a wrong value.
"""
