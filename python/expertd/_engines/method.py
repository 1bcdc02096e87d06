"""What the methods of engines' MoE layers share if their experts are remote."""

from __future__ import annotations

from typing import Any


class WithoutWeights:
    """A method that holds no weights. To be named before an engine's base class, which demands `create_weights`."""

    def create_weights(self, layer: Any, *_sizes: Any, **_attributes: Any) -> None:
        """Allocates nothing."""
