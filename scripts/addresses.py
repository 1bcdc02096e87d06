"""Addresses of this host for the programs that a script starts."""

import contextlib
import socket


def free(count: int) -> list[str]:
    """Addresses with ports that nothing uses now. Fixed ports could be those of a connection to another program."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
