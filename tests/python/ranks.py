"""Tests of several processes on this machine, over gloo. A file spawns them once: starting them takes the time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing

import kernel_pytorch

# One process imports these, and every rank is a fork of it: importing torch takes longer than most ranks' work.
_PRELOADED = ["torch.distributed", "kernel_pytorch.functional"]


def spawn(work: Callable[[int, str], None], folder: Path, members: int) -> None:
    """Runs work(rank, folder) in a process for each rank, and raises what one of them raises."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(kernel_pytorch.__file__).parents[1]), *sys.path])
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    multiprocessing.start_processes(work, (str(folder),), nprocs=members, start_method="forkserver")


def spawn_to_the_end(work: Callable[[int, str], None], folder: Path, members: int) -> None:
    """`spawn` of work inside `member`, every rank of which has to come to its end."""
    spawn(work, folder, members)
    assert all(Path(folder, f"{rank}").exists() for rank in range(members))


@contextmanager
def member(rank: int, folder: str, members: int) -> Iterator[None]:
    """A rank of a group of all, on one thread."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=members)
    yield
    Path(folder, f"{rank}").touch()
    distributed.barrier()
    distributed.destroy_process_group()
