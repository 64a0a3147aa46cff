"""Being asked to stop: SIGTERM, SIGINT, or the notice a cloud gives before it takes a spot machine back."""

from __future__ import annotations

import signal
import threading
import urllib.error
import urllib.request
from types import FrameType
from typing import Any

AWS = "http://169.254.169.254"
_NOTICE, _TOKEN = "/latest/meta-data/spot/instance-action", "/latest/api/token"


class StopRequest:
    """`reason` is set once somebody asks. A second SIGINT or SIGTERM acts as it would without us.

    Handlers can only be set in the main thread; elsewhere only `ask` and the spot watch work.
    """

    def __init__(self, spot: str | None = None, *, every: float = 5.0) -> None:
        """spot: address of the metadata service, signals.AWS on EC2; None: do not ask. every: seconds."""
        self.reason: str | None = None
        self._before: dict[int, Any] = {}
        self._ended = threading.Event()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._on_signal)
        if spot is not None:
            threading.Thread(target=self._watch, args=(spot, every), name="octavo-spot", daemon=True).start()

    def ask(self, reason: str) -> None:
        self.reason = self.reason or reason

    def close(self) -> None:
        """Put the handlers back."""
        self._ended.set()
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.ask(signal.Signals(number).name)
        signal.signal(number, self._before.get(number, signal.SIG_DFL))

    def _watch(self, address: str, every: float) -> None:
        while not self._ended.is_set():
            notice = spot_notice(address)
            if notice is not None:
                self.ask(f"spot notice {notice}")
                return
            self._ended.wait(every)


def spot_notice(address: str) -> str | None:
    """What the metadata service (IMDSv2) says about taking the machine back; None while it stays."""
    token_request = urllib.request.Request(
        address + _TOKEN, method="PUT", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(token_request, timeout=2) as answer:
            token = answer.read().decode()
        request = urllib.request.Request(address + _NOTICE, headers={"X-aws-ec2-metadata-token": token})
        with opener.open(request, timeout=2) as answer:
            return " ".join(answer.read().decode(errors="replace").split())
    except (urllib.error.URLError, OSError, ValueError):
        return None
