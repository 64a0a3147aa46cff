"""What the ranks of a run agree on, over a CPU group of their own: never the training's, never while anybody writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from octavo.base.errors import OctavoError


class Ranks:
    """rank, world; (0, 1) without torch.distributed. Every method is a collective: all ranks call it alike."""

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            if self.world > 1:
                self.group = dist.new_group(backend="gloo")
        self._flags: tuple[torch.Tensor, Any] | None = None

    def tell(self, text: str) -> str:
        """The text of rank 0."""
        if self.group is None:
            return text
        size = torch.tensor([len(text.encode())])
        dist.broadcast(size, 0, self.group)
        data = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == 0:
            data.copy_(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))
        dist.broadcast(data, 0, self.group)
        return bytes(data.tolist()).decode()

    def all_of(self, value: bool) -> bool:
        """True where it is on every rank."""
        if self.group is None:
            return value
        flag = torch.tensor([int(value)])
        dist.all_reduce(flag, dist.ReduceOp.MIN, self.group)
        return bool(flag)

    def first(self, action: Callable[[], str]) -> str:
        """Rank 0 does it and tells; what it raises is raised on all."""
        if self.group is None:
            return action()
        error: Exception | None = None
        text = ""
        if self.rank == 0:
            try:
                text = "=" + action()
            except Exception as raised:
                error, text = raised, f"!{raised}"
        text = self.tell(text)
        if error is not None:
            raise error
        if text.startswith("!"):
            raise OctavoError(f"rank 0: {text[1:]}")
        return text[1:]

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """Which flags some rank had at the last call. Costs no waiting: the answer travelled during a whole step.

        Alone, the answer is of now.
        """
        if self.group is None:
            return flags
        last = self._flags
        mine = torch.tensor([int(flag) for flag in flags])
        if last is not None:
            last[1].wait()
        self._flags = mine, dist.all_reduce(mine, dist.ReduceOp.MAX, self.group, async_op=True)
        return tuple(bool(flag) for flag in last[0]) if last is not None else tuple(False for _ in flags)

    def settle(self) -> None:
        """Take in the last any_of, so that no collective is left open at the end."""
        if self._flags is not None:
            self._flags[1].wait()
            self._flags = None
