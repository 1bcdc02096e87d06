"""Refuses versions of an engine that were not tried: plugins replace methods that are not a stable interface."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .._errors import UnsupportedError


def refuse_other_versions(engine: str, found: str, tried: Mapping[str, str], any_version: bool) -> None:
    """Raises UnsupportedError if `found` is not in `tried`, which says where each version ran. A local part such as `+cpu` is ignored."""
    match = re.match(r"\d+(?:\.\d+)*(?:(?:a|b|rc|\.post|\.dev)\d+)*", found)
    if any_version or (match and match[0] in tried):
        return
    known = ", ".join(f"{version} ({where})" for version, where in tried.items())
    raise UnsupportedError(
        f"{engine} {found} is installed; remote experts were tried with {known}. Install such a version, set "
        f"EXPERTD_{engine.upper()}_ANY_VERSION=1 to go on without a test, or unset EXPERTD_ADDRESS to load the experts into {engine}"
    )
