"""Slices to threads, shards to the disk: reading, computing and writing overlap.

One worker more than there are cores, each with single-threaded torch operations (which release the GIL): while one
waits for the disk the others compute. One more thread starts data on its way to the disk as it comes, so that little is
left for the fsync that ends a shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from octavo.base.log import Advance
from octavo.store.writer import ShardWriter

FLUSH = 128 << 20  # bytes of the source between two flushes
Task = Callable[[], int]


def default_workers() -> int:
    """Threads of a conversion: torch's own number and one to wait for the disk."""
    return torch.get_num_threads() + 1


@contextmanager
def worker_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads whose torch operations use one core each; torch's setting for the others is put back."""
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, "octavo-slice", initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(before)


def run_tasks(pool: ThreadPoolExecutor, tasks: Iterable[Task], workers: int) -> Iterator[int]:
    """Run tasks in order with a short queue, and yield what they return. The first error stops the rest."""
    pending: deque[Future[int]] = deque()
    try:
        for task in tasks:
            pending.append(pool.submit(task))
            if len(pending) > 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def write_shards(
    writer: ShardWriter, tasks_of: Callable[[str], Iterable[Task]], workers: int, advance: Advance
) -> list[str]:
    """Fill every shard that is not done yet and finish it. Returns the shards that were done before."""
    resumed = []
    flusher = ThreadPoolExecutor(1, "octavo-flush")
    finishing: list[Future[None]] = []
    try:
        with worker_pool(workers) as pool:
            for file in writer.shards:
                if writer.done(file):
                    resumed.append(file)
                    continue
                writer.open_shard(file)
                unflushed, flush = 0, None
                for written in run_tasks(pool, tasks_of(file), workers):
                    advance(written)
                    unflushed += written
                    if unflushed >= FLUSH and (flush is None or flush.done()):
                        if flush is not None:
                            flush.result()
                        flush, unflushed = flusher.submit(writer.sync, file), 0
                finishing.append(flusher.submit(_finish, writer, file, flush))
            for future in finishing:
                future.result()
    finally:
        flusher.shutdown(wait=True, cancel_futures=True)
        writer.close()
    return resumed


def _finish(writer: ShardWriter, file: str, flush: Future[None] | None) -> None:
    """A write error is reported once, to whoever syncs first: a failed flush must not end in a successful fsync."""
    if flush is not None:
        flush.result()
    writer.finish_shard(file)
