"""The connections of a process, for the layers of a model that an engine has loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .._torch import Remote
from .settings import Settings

if TYPE_CHECKING:
    from .._types import GraphFailure

# In the order in which they were made. A process that loads one model has the number 0, whatever the address, so that compiled graphs,
# which contain the number, can be kept on disk.
_connections: list[tuple[Settings, Remote]] = []


def number_of(settings: Settings) -> int:
    """The number that the connection for these settings has, or will have if it is the next one."""
    return next((number for number, (known, _) in enumerate(_connections) if known == settings), len(_connections))


def connect(settings: Settings, guard: Callable[[Callable[[], None]], bool]) -> tuple[int, Remote]:
    """The number and the connection for these settings, made at the first call.

    With a CUDA session `guard(verify)` has the results of the engine's steps checked before they are given out. If it cannot do that and
    returns False, the process ends when a call fails in a CUDA graph.
    """
    number = number_of(settings)
    if number < len(_connections):
        return number, _connections[number][1]
    is_guarded = settings.session == "cuda" and guard(verify)
    on_graph_failure: GraphFailure = "raise" if is_guarded else "abort"
    try:
        remote = Remote(settings.address, settings.credentials, settings.session, on_graph_failure, settings.follow_weights)
    except Exception as error:
        error.add_note(
            f"An engine's address is EXPERTD_ADDRESS (here {settings.address!r}), session= is EXPERTD_SESSION (here {settings.session}), and "
            "credentials are EXPERTD_CLIENT_CA, …_CERT, …_KEY, …_SERVER_NAME, …_TOKEN_FILE, …_INSECURE."
        )
        raise
    if is_guarded:
        remote.end_with_session()
    _connections.append((settings, remote))
    return number, remote


def connection(number: int) -> Remote:
    """The connection with this number."""
    return _connections[number][1]


def verify() -> None:
    """Raises the exception of a call that failed in this process, each time."""
    for _, remote in _connections:
        remote.verify()
