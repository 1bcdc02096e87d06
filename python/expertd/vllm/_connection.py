"""The operator through which a model of vLLM calls a service."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._engines.connection import connection as connection_of


@torch.library.custom_op("expertd::vllm_experts", mutates_args=())
def vllm_experts(
    rows: Tensor,
    topk_ids: Tensor | None,
    topk_weights: Tensor | None,
    connection: int,
    layer: int,
    shared_experts: bool = False,
) -> Tensor:
    """Computes the experts of one layer.

    Arguments:
        rows: `[tokens, hidden]`; the result has this shape, this dtype and this device.
        topk_ids: `[tokens, k]`, int32 or int64; −1 means no expert. None: the service's gate chooses and weighs experts.
        topk_weights: `[tokens, k]`, floats; None if `topk_ids` is.
        connection: number of the connection.
        layer: number of the decoder layer.
        shared_experts: add the output of shared experts to that of the routed ones.
    """
    return connection_of(connection).routed(layer, rows, topk_ids, topk_weights, shared_experts)


@vllm_experts.register_fake
def _(rows: Tensor, *_others: Any) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)
