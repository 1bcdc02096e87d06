"""Whether a service holds the checkpoint in a folder."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

from ._errors import ModelMismatchError, WeightVersionError
from ._serve import command

if TYPE_CHECKING:
    from ._native import Model


def check_weights(expected: str | None, served: Model) -> None:
    """Compares the fingerprint of the weights that a client expects, if any, with that of the served ones."""
    if expected not in (None, served.weight_fingerprint):
        raise WeightVersionError(
            f"weights with fingerprint {expected} are expected, {served.weight_fingerprint} are loaded",
            code="FAILED_PRECONDITION",
            reason="WEIGHT_VERSION_MISMATCH",
        )


def check_content(folder: str, served: Model, skip: str = "pass check_weights=False") -> None:
    """Compares the fingerprint of the weights, which the service computes from their contents.

    `skip` tells the reader of an error how to leave this check out.
    """
    whole = ["--verify-weights"] if served.weight_fingerprint.startswith("whole:") else []
    inspect = [command(), "inspect", "--json", *whole, folder]
    inspected = subprocess.run(inspect, capture_output=True, text=True, check=False)
    if inspected.returncode != 0:
        raise ModelMismatchError(
            f"cannot tell whether the service holds the checkpoint in {folder}: {inspected.stderr.strip()}; {skip} "
            "to compare dimensions only"
        )
    fingerprint = json.loads(inspected.stdout)["weight_fingerprint"]
    if fingerprint != served.weight_fingerprint:
        raise ModelMismatchError(
            f"the service holds weights with fingerprint {served.weight_fingerprint}, and the checkpoint in {folder} has "
            f"{fingerprint}: the same dimensions, but other weights or another config.json. Serve that checkpoint, or {skip} "
            "if you know that the weights are the same"
        )
