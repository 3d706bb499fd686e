"""A TCP proxy in the test's process whose connections can be reset, as the network may."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading

BUFFER_BYTES = 1 << 16
LOOK_S = 0.05
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: `close` sends a reset (tcp(7), socket(7))."""


class Proxy:
    """Carries every connection to `target` (`host:port`).

    Attributes:
        address: where it listens.
        carried: how many connections there have been.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.carried = 0
        self._lock = threading.Lock()
        self._other: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def reset(self) -> int:
        """Reset all present connections on both sides; how many there were."""
        with self._lock:
            found = list(self._other)
            for sock in found:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                self._drop(sock)
        return len(found) // 2

    def close(self) -> None:
        self._closed = True
        self._thread.join(10.0)
        self.reset()
        self._listener.close()
        self._selector.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(LOOK_S):
                assert isinstance(key.fileobj, socket.socket)
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._other:
                        self._carry(key.fileobj)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._target, timeout=10.0)
        except OSError:
            near.close()
            return
        self.carried += 1
        self._other[near], self._other[far] = far, near
        for sock in (near, far):
            self._selector.register(sock, selectors.EVENT_READ)

    def _carry(self, sock: socket.socket) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = sock.recv(BUFFER_BYTES)
        other = self._other[sock]
        if not data:
            self._drop(other)
            self._drop(sock)
            return
        with contextlib.suppress(OSError):
            other.sendall(data)

    def _drop(self, sock: socket.socket) -> None:
        if self._other.pop(sock, None) is not None:
            self._selector.unregister(sock)
            sock.close()
