"""Whether a service holds an engine's model, and which tensors of a checkpoint its experts are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .._errors import ModelMismatchError, UnsupportedError

if TYPE_CHECKING:
    from .._native import Model, MoeLayer

_EXPERT = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?experts\.")


def is_expert_tensor(name: str, layers: set[int]) -> bool:
    """Whether a checkpoint's tensor belongs to routed experts of one of these layers. Biases of gates do not."""
    match = _EXPERT.search(name)
    return match is not None and int(match[1]) in layers and not name.endswith("e_score_correction_bias")


def refuse(features: Mapping[str, tuple[bool, str]]) -> None:
    """Raises UnsupportedError for the first feature in use; each has a flag for its use and the reason why remote experts exclude it."""
    for feature, (wanted, reason) in features.items():
        if wanted:
            raise UnsupportedError(f"{feature} {reason}; turn it off, or unset EXPERTD_ADDRESS")


def slow_prefill(rows: int | None, rows_of_a_step: int) -> str | None:
    """What to say of an engine that prefills up to `rows` rows at once, if the service's steps hold fewer: each reads the experts again."""
    if rows is None or rows <= rows_of_a_step:
        return None
    return (
        f"The service takes {-(-rows // rows_of_a_step)} steps for a prefill of {rows} tokens, and reads the experts for each; "
        f"`expertd serve --max-tokens-per-step {rows}` takes one, with larger buffers."
    )


def check_model(engine: str, families: set[str], hidden: int, served: Model) -> None:
    """Compares family and hidden size with those of the service's model."""
    if served.family not in families:
        raise ModelMismatchError(
            f"the service's model is of the family {served.family}, and {engine}'s of {' or '.join(sorted(families))}; connect to a "
            "service that holds the same checkpoint"
        )
    if served.hidden != hidden:
        raise ModelMismatchError(
            f"the service's model has hidden size {served.hidden}, and {engine}'s {hidden}; connect to a service that holds the "
            "same checkpoint"
        )


def check_layer(
    engine: str,
    name: str,
    number: int,
    dimensions: Mapping[str, int],
    fused_shared_experts: int,
    served: Model,
) -> MoeLayer:
    """Compares one layer with the service's, which is returned.

    `dimensions` has the engine's values of `num_experts`, `top_k`, `expert_width` and `hidden size`, as far as it knows them.
    """
    theirs = next((layer for layer in served.moe_layers if layer.layer == number), None)
    if theirs is None:
        raise ModelMismatchError(
            f"{engine}'s model has an MoE layer {number} ({name}), and the service has MoE layers "
            f"{[layer.layer for layer in served.moe_layers]}; connect to a service that holds the same checkpoint"
        )
    for field, mine in dimensions.items():
        other = served.hidden if field == "hidden size" else getattr(theirs, field)
        if mine != other:
            raise ModelMismatchError(
                f"{name} has {field} {mine}, and layer {number} of the service has {other}; connect to a service that "
                "holds the same checkpoint"
            )
    if fused_shared_experts:
        raise UnsupportedError(
            f"{name} computes {fused_shared_experts} shared experts together with the routed ones, which remote experts do "
            "not support; turn that fusion off, or unset EXPERTD_ADDRESS"
        )
    return theirs


def check_layers(engine: str, layers: set[int], served: Model, otherwise: str = "unset EXPERTD_ADDRESS") -> None:
    """Compares the numbers of all MoE layers, once the engine has built its model. `otherwise` tells how to go on without the service."""
    theirs = {layer.layer for layer in served.moe_layers}
    if layers != theirs:
        raise ModelMismatchError(
            f"the service has MoE layers {sorted(theirs)}, and {engine}'s model has {sorted(layers)} whose experts can be remote; "
            f"connect to a service that holds the same checkpoint, or {otherwise}"
        )


def softmax_gate(served: MoeLayer) -> tuple[bool, bool]:
    """Whether the service's gate is a softmax without groups, bias of the choice and scale, and whether the chosen weights have the sum 1."""
    gate = json.loads(served.gate_json)
    scores, normalise = gate["scores"]["kind"], gate["normalise"]
    # A softmax over the chosen experts is a softmax over all of them whose chosen weights are divided by their sum.
    renormalises = scores == "softmax_of_chosen" or normalise == {"kind": "sum", "epsilon": 0.0}
    is_plain = (
        (scores == "softmax_of_chosen" or (scores == "softmax" and (renormalises or normalise["kind"] == "no")))
        and gate["groups"] is None
        and not gate["correction_bias"]
        and gate["scale"] == 1.0
        and gate["choice"]["kind"] != "token_ids"
    )
    return is_plain, renormalises
