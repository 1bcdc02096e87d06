"""The connections of this process, and the operator through which a model calls a service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch import Remote
from ._guard import guard_outputs
from ._settings import Settings

if TYPE_CHECKING:
    from .._types import GraphFailure

# In the order in which they were made. An engine loads one model, so the number of its connection is 0 in every process, and
# compiled graphs, which contain the number, can be kept on disk.
_connections: list[tuple[Settings, Remote]] = []


def connect(settings: Settings) -> tuple[int, Remote]:
    """The number and the connection for these settings, made at the first call.

    With a CUDA session the outputs of vLLM's steps are checked first. Where that is not possible, the process ends when a call fails in
    a CUDA graph.
    """
    for number, (known, remote) in enumerate(_connections):
        if known == settings:
            return number, remote
    is_guarded = settings.session == "cuda" and guard_outputs(verify)
    on_graph_failure: GraphFailure = "raise" if is_guarded else "abort"
    remote = Remote(settings.address, settings.credentials, settings.session, on_graph_failure, settings.follow_weights)
    if is_guarded:
        remote.end_with_session()
    _connections.append((settings, remote))
    return len(_connections) - 1, _connections[-1][1]


def verify() -> None:
    """Raises the exception of a call that failed in this process, each time."""
    for _, remote in _connections:
        remote.verify()


@torch.library.custom_op("expertd::vllm_experts", mutates_args=())
def vllm_experts(rows: Tensor, topk_ids: Tensor, topk_weights: Tensor, connection: int, layer: int) -> Tensor:
    """Computes the routed experts of one layer.

    Arguments:
        rows: `[tokens, hidden]`; the result has this shape, this dtype and this device.
        topk_ids: `[tokens, k]`, int32 or int64; −1 means no expert.
        topk_weights: `[tokens, k]`, floats.
        connection: number of the connection.
        layer: number of the decoder layer.
    """
    remote = _connections[connection][1]
    # The service requires token ids for layers that route by token id, but does not use them when the request has routing.
    by_token_id = remote.layer(layer).routes_by_token_id
    token_ids = torch.zeros(rows.shape[0], dtype=torch.int32, device=rows.device) if by_token_id else None
    return remote.forward(layer, rows, topk_ids, topk_weights, token_ids, shared_experts=False)


@vllm_experts.register_fake
def _(rows: Tensor, *_others: Any) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)
