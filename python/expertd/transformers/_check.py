"""Whether the service holds the model that is being loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .._engines import check

if TYPE_CHECKING:
    import torch

    from .._native import Model

# The other side of a comparison in messages.
_HERE = "this process"


def check_model(model: Any, layers: Mapping[str, int], served: Model) -> None:
    """Compares family, hidden size, MoE layers and their dimensions. `layers` has the numbers of the layers' blocks, by name."""
    text = model.config.get_text_config()
    check.check_model(_HERE, {model.config.model_type, text.model_type}, text.hidden_size, served)
    check.check_layers(_HERE, set(layers.values()), served, otherwise="load the model outside of remote_experts")
    for name, number in layers.items():
        check.check_layer(_HERE, name, number, _dimensions(model.get_submodule(name)), 0, served)


def _dimensions(block: torch.nn.Module) -> dict[str, int]:
    """The dimensions that a block states, under one of the names that models use."""

    def value(owner: Any, *names: str) -> int | None:
        return next((found for name in names if (found := getattr(owner, name, None)) is not None), None)

    dimensions = {
        "num_experts": value(block.experts, "num_experts"),
        "expert_width": value(block.experts, "intermediate_dim", "expert_dim", "intermediate_size"),
        "top_k": value(getattr(block, "gate", None) or getattr(block, "router", None), "top_k"),
    }
    return {field: known for field, known in dimensions.items() if known is not None}
