"""Whether the service holds the model that is being loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._errors import ModelMismatchError

if TYPE_CHECKING:
    import torch

    from .._native import Model, MoeLayer


def check_model(model: Any, served: Model, layers: set[int]) -> None:
    """Compares family, hidden size and the numbers of MoE layers."""
    config = model.config
    text = config.get_text_config()
    families = {config.model_type, text.model_type}
    if served.family not in families:
        raise ModelMismatchError(
            f"the service holds a {served.family} model, and this one is {' or '.join(sorted(families))}; connect to a "
            "service that holds the same checkpoint"
        )
    if served.hidden != text.hidden_size:
        raise ModelMismatchError(
            f"the service's model has hidden size {served.hidden}, and this one {text.hidden_size}; connect to a service "
            "that holds the same checkpoint"
        )
    theirs = {layer.layer for layer in served.moe_layers}
    if theirs != layers:
        raise ModelMismatchError(
            f"the service has MoE layers {sorted(theirs)}, and this model has {sorted(layers)}; connect to a service that "
            "holds the same checkpoint"
        )


def check_layer(name: str, block: torch.nn.Module, served: MoeLayer) -> None:
    """Compares the number of experts, experts per token and the experts' width of one layer."""
    experts = block.experts
    gate = getattr(block, "gate", None) or getattr(block, "router", None)
    mine = {
        "num_experts": getattr(experts, "num_experts", None),
        "expert_width": next(
            (getattr(experts, a) for a in ("intermediate_dim", "expert_dim", "intermediate_size") if hasattr(experts, a)),
            None,
        ),
        "top_k": getattr(gate, "top_k", None),
    }
    for field, value in mine.items():
        theirs = getattr(served, field)
        if value is not None and value != theirs:
            raise ModelMismatchError(
                f"{name} has {field} {value}, and layer {served.layer} of the service has {theirs}; connect to a service "
                "that holds the same checkpoint"
            )
