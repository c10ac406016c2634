"""The reducer of torch.distributed: processes that torchrun started, over gloo on the CPU and NCCL on CUDA."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ntk_laplace.errors import ProcessLostError, UnsupportedError, first_line, is_number
from ntk_laplace.runtime.reduction import Reducer

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class ProcessGroupReducer(Reducer):
    """The processes of a group of torch.distributed.

    Attributes
    ----------
    group : torch.distributed.ProcessGroup, optional
        The default group if it is left out. Tensors travel by the backend of their device.

    Raises
    ------
    UnsupportedError
        If torch.distributed is not initialized, or this process does not belong to the group.
    ProcessLostError
        From every method, if another process died.
    """

    group: Any = None

    def __post_init__(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise UnsupportedError(
                "an initialized group of torch.distributed", "none",
                "Start the script with torchrun --nproc-per-node 2 SCRIPT, and call "
                'torch.distributed.init_process_group("gloo") in it, or use "with ntk_laplace.process_group() as '
                'group", which gives None to a script that runs alone.',
            )
        if self.group is not None and not isinstance(self.group, dist.ProcessGroup):
            raise UnsupportedError("process_group= a group of torch.distributed that this process belongs to",
                                   repr(self.group), "Pass dist.new_group(...), or distributed=True for the default.")

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)

    def sum_(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            whole = tensor.contiguous()  # the tensor itself, where it is
            with _lost_processes():
                dist.all_reduce(whole, group=self.group)
            if whole is not tensor:
                tensor.copy_(whole)

    def gather(self, value: _Value) -> list[_Value]:
        """The values of all processes in rank order; they travel pickled, and tensors of a GPU arrive on the CPU.

        Unpickled by torch.distributed they would take memory of the sender's GPU, in every process.
        """
        packed, found = io.BytesIO(), [b""] * self.world_size
        torch.save(value, packed)
        with _lost_processes():
            dist.all_gather_object(found, packed.getvalue(), group=self.group)
        del packed
        found.reverse()  # each is freed when it is read
        return [torch.load(io.BytesIO(found.pop()), map_location="cpu", weights_only=False)
                for _ in range(self.world_size)]

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Callable[[], None]:
        """Begin to overwrite a contiguous tensor by that of the rank `source`; the result waits for the end."""
        group: Any = dist.group.WORLD if self.group is None else self.group
        with _lost_processes():
            work: Any = dist.broadcast(tensor, dist.get_global_rank(group, source), group=group, async_op=True)

        def wait() -> None:
            with _lost_processes():
                work.wait()

        return wait


@contextlib.contextmanager
def process_group(timeout: float | timedelta = 1800.0) -> Iterator[Any]:
    """The group of the processes that torchrun started; None in a script that runs alone.

    ``with ntk_laplace.process_group() as group: ... Settings(process_group=group)`` runs alone, on one machine and on
    a cluster. Where CUDA is available each process takes the device of its local rank. A group that the caller has
    initialized is taken as it is, and not ended.

    Parameters
    ----------
    timeout : float or timedelta
        Seconds that a process waits for the others in one operation. A process that dies is noticed at once; this is
        for one that stops without dying, and must be longer than the slowest share of a pass over the data.

    Yields
    ------
    torch.distributed.ProcessGroup or None
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not is_number(seconds, above=0):
        raise UnsupportedError("a positive timeout in seconds, or as a timedelta", repr(timeout), "Leave it out.")
    if dist.is_available() and dist.is_initialized():
        yield dist.group.WORLD
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield None
        return
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=seconds))
    # a process that left at once would close connections that others still make
    dist.all_reduce(torch.zeros(1, device="cpu"))
    yield dist.group.WORLD
    dist.destroy_process_group()  # not after an error: it could wait for a process that died


@contextlib.contextmanager
def _lost_processes() -> Iterator[None]:
    try:
        yield
    except RuntimeError as cause:  # of the backend: a closed connection, or the timeout
        words = first_line(cause).partition(". ")[0]
        raise ProcessLostError(
            "an answer of all processes of the group", f"none of at least one ({words})",
            "Look at the messages of the others. A structured fit with Settings(checkpoint=path) continues with "
            "Settings(resume=path), with any number of processes.",
        ) from cause
