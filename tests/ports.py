"""Ports for servers of tests."""

import secrets
import socket


def free_port() -> int:
    """A port of this computer that nobody listens on now, and that Linux gives to no connection meanwhile."""
    while True:
        port = 10_000 + secrets.randbelow(22_000)  # connections get those from 32,768 on
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
