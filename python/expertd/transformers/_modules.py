"""Modules that stand for MoE blocks or their experts and hold no weights of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .._errors import UnsupportedError
from .._torch import Remote

if TYPE_CHECKING:
    from .._native import MoeLayer


class _Remote(nn.Module):
    """Base class of the modules: a layer of a service, without training."""

    def __init__(self, remote: Remote, served: MoeLayer) -> None:
        super().__init__()
        self.remote = remote
        self.layer: int = served.layer
        self.num_experts: int = served.num_experts
        self.top_k: int = served.top_k
        self.by_token_id: bool = served.routes_by_token_id

    def call(
        self,
        rows: Tensor,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
        token_ids: Tensor | None = None,
        shared_experts: bool = False,
    ) -> Tensor:
        """Sends rows `[..., hidden]` through the service. The result has their shape, dtype and device."""
        if self.training:
            raise UnsupportedError(
                "the model is in training mode, and remote experts cannot be trained; call model.eval(), or load the model "
                "outside of remote_experts"
            )
        if not self.by_token_id:
            token_ids = None
        elif token_ids is not None:
            token_ids = token_ids.reshape(-1)
        elif topk_ids is not None:
            # The service requires token ids for this layer, but does not use them when the request has routing.
            token_ids = torch.zeros(topk_ids.shape[0], dtype=torch.int32, device=rows.device)
        return self.remote.call(self.layer, rows, topk_ids, topk_weights, token_ids, shared_experts)

    def extra_repr(self) -> str:
        return f"layer={self.layer}, address={self.remote.address!r}"


class RemoteExperts(_Remote):
    """The routed experts of one layer. The model's own gate chooses experts and weights."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Rows `[tokens, hidden]`, ids and weights `[tokens, k]`."""
        return self.call(hidden_states, top_k_index, top_k_weights)


class RemoteLlama4(_Remote):
    """Llama 4's block with its own gate and shared expert.

    Its experts take rows that are already multiplied by the gate's scores, one copy for each expert of the layer, so ids and
    weights are taken from the gate.
    """

    def __init__(self, remote: Remote, served: MoeLayer, block: nn.Module) -> None:
        super().__init__(remote, served)
        self.router = block.router
        self.shared_expert = block.shared_expert

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(rows)
        ids = torch.topk(logits, self.top_k, dim=-1).indices
        out = self.shared_expert(rows)
        return out + self.call(rows, ids, scores.gather(1, ids)), logits


class RemoteBlock(_Remote):
    """A whole MoE block: gate, routed and shared experts.

    `pair` says that the model's own block returns a second value, which decoder layers drop.
    """

    def __init__(self, remote: Remote, served: MoeLayer, pair: bool) -> None:
        super().__init__(remote, served)
        self.pair = pair

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None) -> Tensor | tuple[Tensor, None]:
        if self.by_token_id and input_ids is None:
            raise UnsupportedError(
                f"layer {self.layer} routes by token id; call the model with input_ids instead of inputs_embeds"
            )
        out = self.call(hidden_states, token_ids=input_ids, shared_experts=True)
        return (out, None) if self.pair else out
