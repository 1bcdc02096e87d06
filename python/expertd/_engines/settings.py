"""Settings of the plugins. They come from the environment, because engines pass no arguments to plugins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .._client import Credentials

if TYPE_CHECKING:
    from .._types import Session

_FLAGS = {"0": False, "false": False, "1": True, "true": True}


@dataclass(frozen=True)
class Settings:
    """What the environment says.

    Attributes:
        address: the service, `HOST:PORT` or `unix:/PATH`, or several separated by commas (`EXPERTD_ADDRESS`).
        credentials: certificates and token (`EXPERTD_CLIENT_CA`, `…_CERT`, `…_KEY`, `…_SERVER_NAME`, `…_TOKEN_FILE`, `…_INSECURE`).
        check_weights: compare the weights' fingerprints (`EXPERTD_CHECK_WEIGHTS`, by default 1).
        any_version: accept versions of the engine that were not tried (`EXPERTD_VLLM_ANY_VERSION`, `EXPERTD_SGLANG_ANY_VERSION`, by default 0).
        session: None; "host" or "cuda": a session with the service whose session socket the address names; "network": a session with one
            on another host, whose address is that of gRPC (`EXPERTD_SESSION`).
        follow_weights: go on when the service moves to other weights (`EXPERTD_FOLLOW_WEIGHTS`, by default 0).
        service_gate: the service's gate chooses and weighs experts, not the engine's (`EXPERTD_GATE`, service or by default engine).
    """

    address: str
    credentials: Credentials | None = None
    check_weights: bool = True
    any_version: bool = False
    session: Session | None = None
    follow_weights: bool = False
    service_gate: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, engine: str = "vLLM") -> Settings | None:
        """The settings for an engine; None if `EXPERTD_ADDRESS` is not set or empty."""
        address = environment.get("EXPERTD_ADDRESS", "")
        if not address:
            return None
        session = environment.get("EXPERTD_SESSION") or None
        if session not in (None, "host", "cuda", "network"):
            raise ValueError(f"EXPERTD_SESSION is {session!r}; expected host, cuda, network, or nothing")
        gate = environment.get("EXPERTD_GATE") or "engine"
        if gate not in ("engine", "service"):
            raise ValueError(f"EXPERTD_GATE is {gate!r}; expected engine or service")
        names = ("ca", "cert", "key", "server_name", "token_file")
        given = {name: environment.get(f"EXPERTD_CLIENT_{name.upper()}") or None for name in names}
        insecure = _flag(environment, "EXPERTD_CLIENT_INSECURE", False)
        return cls(
            address,
            Credentials(**given, insecure=insecure) if any(given.values()) or insecure else None,
            _flag(environment, "EXPERTD_CHECK_WEIGHTS", True),
            _flag(environment, f"EXPERTD_{engine.upper()}_ANY_VERSION", False),
            session,
            _flag(environment, "EXPERTD_FOLLOW_WEIGHTS", False),
            gate == "service",
        )


def _flag(environment: Mapping[str, str], name: str, default: bool) -> bool:
    found = environment.get(name)
    if not found:
        return default
    if found.lower() not in _FLAGS:
        raise ValueError(f"{name} is {found!r}; expected 0 or 1")
    return _FLAGS[found.lower()]
