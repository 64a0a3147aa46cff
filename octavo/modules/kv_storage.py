"""Where a layer's keys and values lie: a buffer that grows in steps, or one made once, and which of it a token sees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch

from octavo.base.errors import ConfigError, ShapeError
from octavo.ops.attention import TOKEN_HEAD, CachedKV, append

Granularity = Literal["tensor", "token-head", "16bit"]
STEP = 256  # tokens by which a buffer grows


@contextmanager
def lasting() -> Iterator[None]:
    """Tensors made inside can be written to outside torch.inference_mode, too, even if that is on now."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@dataclass
class KVStorage:
    """Keys and values of one layer.

    granularity: `tensor`, E4M3 with `scales` = (keys, values); `token-head`, E4M3 with a scale for each token and head;
    `16bit`, as they come. capacity: tokens that there is room for, all allocated at once; 0 grows. window: a token sees
    itself and so many less one before it; older ones are dropped. 0 sees all.

    kv: the buffer, None until something is written. Tokens [first, last) of it are what the next one sees beside
    itself; `total` were written in all. recording: nothing is dropped until `crop`.
    """

    granularity: Granularity = "token-head"
    scales: tuple[float, float] = (1.0, 1.0)
    capacity: int = 0
    window: int = 0
    kv: CachedKV | None = None
    first: int = 0
    last: int = 0
    total: int = 0
    recording: bool = False

    def __post_init__(self) -> None:
        for side, scale in zip(("keys", "values"), self.scales, strict=True):
            if not (math.isfinite(scale) and scale > 0):
                fix = "Calibrate again, or use granularity 'token-head'."
                raise ConfigError(f"FP8 KV cache: scale of the {side}", got=str(scale), need="above 0", fix=fix)

    @property
    def kept(self) -> int:
        """Tokens that the next one sees beside itself."""
        return min(self.last - self.first, self.window - 1) if self.window else self.last - self.first

    @property
    def nbytes(self) -> int:
        """Of the buffer, with what of it is not yet used."""
        parts = (self.kv.keys, self.kv.values, self.kv.k_scale, self.kv.v_scale) if self.kv else ()
        return sum(part.nbytes for part in parts if part is not None)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> CachedKV:
        """Write k, v [B, H, n, D] behind the last. Returns what the new tokens see, oldest first: views."""
        count = k.shape[2]
        seen_from = self.last - self.kept
        kv = self._room(k, v, count)
        seen_from -= self.moved
        append(kv, k, v, self.last)
        self.last, self.total = self.last + count, self.total + count
        seen = kv.between(seen_from, self.last)
        self._drop()
        return seen

    def crop(self, tokens: int) -> None:
        """Take back the last `tokens`. Of a window that has moved on only while recording: ConfigError."""
        if tokens > self.total or (
            tokens and self.window and not self.recording and self.total > self.last - self.first
        ):
            need = "at most what was written, and with a window only while recording"
            raise ConfigError(f"KV cache: taking back {tokens} of {self.total} tokens", need=need)
        self.last, self.total = self.last - tokens, self.total - tokens
        self._drop(cropped=True)

    def select(self, rows: torch.Tensor) -> None:
        """Rows of the batch, int64 [B'], in this order."""
        if self.kv is None:
            return
        kv, rows = self.kv, rows.to(self.kv.keys.device)
        names = ("keys", "values") + (("k_scale", "v_scale") if kv.kind == TOKEN_HEAD else ())
        with lasting():
            self.kv = replace(kv, **{name: getattr(kv, name).index_select(0, rows) for name in names})

    def reset(self) -> None:
        """Nothing is in it; a buffer made once stays."""
        self.first = self.last = self.total = 0
        if not self.capacity:
            self.kv = None
        elif self.kv is not None and self.kv.nans is not None:
            self.kv.nans.zero_()

    def _room(self, k: torch.Tensor, v: torch.Tensor, count: int) -> CachedKV:
        """A buffer with room for `count` tokens behind the last; `moved` says by how much its tokens went forward."""
        self.moved = 0
        if self.kv is None or (not self.last and self.kv.keys.shape[:2] != k.shape[:2]):
            self.kv = self.allocate(k, v, self._size(count))
        batch, heads, room, _ = self.kv.keys.shape
        if (batch, heads) != tuple(k.shape[:2]):
            raise ShapeError("KV cache", got=f"keys {list(k.shape)}", need=f"[{batch}, {heads}, ...] as before")
        if self.last + count > room:
            if self.capacity and not self.first:
                fix = "Give it a larger capacity."
                raise ShapeError("KV cache is full", got=f"{self.last + count} tokens", need=f"{room}", fix=fix)
            self._move(k, v, self._size(self.last - self.first + count))
        return self.kv

    def _size(self, tokens: int) -> int:
        if self.capacity:
            return self.capacity
        return -(-(tokens + (STEP // 2 if self.window else 0)) // STEP) * STEP

    def _move(self, k: torch.Tensor, v: torch.Tensor, room: int) -> None:
        """Tokens [first, last) to the front of a new buffer."""
        assert self.kv is not None
        old, count = self.kv.between(self.first, self.last), self.last - self.first
        self.kv = self.allocate(k, v, room)
        for name in ("keys", "values") + (("k_scale", "v_scale") if old.kind == TOKEN_HEAD else ()):
            getattr(self.kv, name)[:, :, :count] = getattr(old, name)
        if old.nans is not None:
            self.kv = replace(self.kv, nans=old.nans)
        self.moved, self.first, self.last = self.moved + self.first, 0, count

    def _drop(self, cropped: bool = False) -> None:
        """What no later token sees; after a long prompt the buffer shrinks to the window."""
        if not self.window or self.kv is None or (self.recording and not cropped):
            return
        self.first = max(self.first, self.last - self.kept)
        if not self.capacity and self.kv.keys.shape[2] > self._size(self.window) + STEP:
            self._move(self.kv.keys, self.kv.values, self._size(self.kept))

    @lasting()
    def allocate(self, k: torch.Tensor, v: torch.Tensor, room: int) -> CachedKV:
        """An empty buffer for keys and values like k and v [B, H, ..., D]."""
        sixteen_bit = self.granularity == "16bit"
        shapes = [(*x.shape[:2], room, x.shape[3]) for x in (k, v)]
        keys, values = (
            torch.zeros(shape, dtype=x.dtype if sixteen_bit else torch.uint8, device=x.device)
            for shape, x in zip(shapes, (k, v), strict=True)
        )
        if sixteen_bit:
            return CachedKV(keys, values)
        if self.granularity == "tensor":
            k_scale, v_scale = (torch.tensor(scale, dtype=torch.float32, device=k.device) for scale in self.scales)
        else:
            k_scale, v_scale = (torch.ones(shapes[0][:3], device=k.device) for _ in self.scales)
        return CachedKV(keys, values, k_scale, v_scale, torch.zeros(1, dtype=torch.int32, device=k.device))
