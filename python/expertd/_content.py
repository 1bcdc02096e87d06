"""Whether a service holds the checkpoint in a folder."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

from ._errors import ModelMismatchError
from ._serve import command

if TYPE_CHECKING:
    from ._native import Model


def check_content(folder: str, served: Model, skip: str = "pass check_weights=False") -> None:
    """Compares the weight version, which the service computes from the content of the checkpoint's files.

    `skip` tells the reader of an error how to leave this check out.
    """
    inspected = subprocess.run([command(), "inspect", "--json", folder], capture_output=True, text=True, check=False)
    if inspected.returncode != 0:
        raise ModelMismatchError(
            f"cannot tell whether the service holds the checkpoint in {folder}: {inspected.stderr.strip()}; {skip} "
            "to compare dimensions only"
        )
    version = json.loads(inspected.stdout)["weight_version"]
    if version != served.weight_version:
        raise ModelMismatchError(
            f"the service holds weight version {served.weight_version}, and the checkpoint in {folder} has {version}: the "
            f"same dimensions, but other weights or another config.json. Serve that checkpoint, or {skip} if you know that the "
            "weights are the same"
        )
