"""Checks of calls before an engine gives out what a step computed.

Replays of CUDA graphs raise nothing, and a call that failed leaves NaN, from which engines sample tokens. So a method that hands over a step's
results is followed or preceded by a check, at a place where the engine has waited for the GPU: a failed call is known by then.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

# A method of the package has this attribute.
MARK = "_expertd_check"

logger = logging.getLogger(__name__)


def checked(original: Any, check: Callable[[], None]) -> Any:
    """`original`, followed by a check."""

    @functools.wraps(original)
    def followed(*args: Any, **kwargs: Any) -> Any:
        try:
            output = original(*args, **kwargs)
        except Exception:
            # Rows that are NaN may make the step itself fail; the exception of the call has the cause.
            check()
            raise
        check()
        return output

    setattr(followed, MARK, check)
    return followed


def preceded(original: Any, check: Callable[[], None]) -> Any:
    """`original`, preceded by a check."""

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        check()
        return original(*args, **kwargs)

    setattr(guarded, MARK, check)
    return guarded


def replace(
    engine: str,
    places: Iterable[tuple[str, str, tuple[str, ...]]],
    check: Callable[[], None],
    how: Callable[[Any, Callable[[], None]], Any],
) -> bool:
    """Replaces methods, given as module, class and names, by `how` of each. False, and nothing is done, if the engine lacks one of them."""
    found: list[tuple[type, str]] = []
    for module, name, methods in places:
        try:
            owner = getattr(importlib.import_module(module), name)
            found += [(owner, method) for method in methods if callable(getattr(owner, method))]
        except (ImportError, AttributeError) as error:
            logger.warning(
                "expertd cannot check the results of steps, because this %s differs (%s). If a call fails in a CUDA graph, the process ends.",
                engine,
                error,
            )
            return False
    for owner, method in found:
        original = getattr(owner, method)
        if getattr(original, MARK, None) is None:
            setattr(owner, method, how(original, check))
    return True
