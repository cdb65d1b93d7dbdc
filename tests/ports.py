"""Ports for servers and meetings of tests."""

import secrets
import socket

_GIVEN: set[int] = set()
"""Ports that this process was given: a server takes several of them some time after it was given the first."""


def free_port() -> int:
    """A port that nobody listens on, given once, and that Linux gives to no connection meanwhile."""
    while True:
        port = 10_000 + secrets.randbelow(22_000)  # connections get those from 32,768 on
        if port in _GIVEN:
            continue
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        _GIVEN.add(port)
        return port
