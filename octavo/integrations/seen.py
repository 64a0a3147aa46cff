"""Which tensor was that: by identity, without keeping it alive."""

from __future__ import annotations

import weakref

import torch


class Seen:
    """One tensor to recognize, not kept alive; a copy of it recognizes nothing."""

    def __init__(self) -> None:
        self.set(None)

    def set(self, x: torch.Tensor | None) -> None:
        self.reference = None if x is None else weakref.ref(x)

    def is_(self, x: torch.Tensor) -> bool:
        return self.reference is not None and self.reference() is x

    def lives(self) -> bool:
        return self.reference is not None and self.reference() is not None

    def __reduce__(self) -> tuple[type[Seen], tuple[()]]:
        return Seen, ()
