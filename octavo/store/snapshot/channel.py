"""Messages between a training process and its writer: JSON behind a length, over a socket that can carry handles."""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]


class Channel:
    """send may be called from several threads; receive from one at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._handles: list[int] = []

    def send(self, message: Message, handles: Sequence[int] = ()) -> None:
        """OSError when the other side is gone."""
        data = json.dumps(message).encode()
        with self._sending:
            first = struct.pack("<Q", len(data))
            if handles:
                socket.send_fds(self._socket, [first], list(handles))
            else:
                self._socket.sendall(first)
            self._socket.sendall(data)

    def receive(self) -> Message | None:
        """The next message, or None when the other side is gone. Handles that came along: `take_handles`."""
        length = self._read(8)
        data = None if length is None else self._read(struct.unpack("<Q", length)[0])
        if data is None:
            return None
        message: Message = json.loads(data)
        return message

    def take_handles(self) -> list[int]:
        taken, self._handles = self._handles, []
        return taken

    def waiting(self, seconds: float) -> bool:
        """True once there is something to receive, the end included."""
        return bool(select.select([self._socket], [], [], seconds)[0])

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytes | None:
        parts = b""
        while len(parts) < size:
            try:
                data, handles, _, _ = socket.recv_fds(self._socket, min(size - len(parts), 1 << 20), 8)
            except ConnectionResetError:
                return None
            self._handles += handles
            if not data:
                return None
            parts += data
        return parts
