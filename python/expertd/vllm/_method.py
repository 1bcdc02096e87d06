"""How an MoE layer of vLLM computes its routed experts if they are remote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from .._engines.method import WithoutWeights
from ._connection import vllm_experts


class RemoteExpertsMethod(WithoutWeights, FusedMoEMethodBase):
    """A method whose layer holds no weights. vLLM's gate chooses and weighs experts, and the service applies the choice.

    vLLM adds shared experts and multiplies by scaling factors itself.
    """

    def __init__(self, moe: FusedMoEConfig, connection: int, layer: int) -> None:
        super().__init__(moe)
        self.connection = connection
        self.layer = layer
        # Tensor-parallel ranks have the same rows, and vLLM adds up their results: one rank calls, the others add zero.
        self.calls = get_tensor_model_parallel_rank() == 0

    @property
    def supports_internal_mk(self) -> bool:
        """True: vLLM then leaves the rows of data-parallel engines where they are, and each engine calls the service with its own."""
        return True

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: FusedMoEParallelConfig,
    ) -> tuple[int, int]:
        """Rows are sent as they are; no kernel needs larger sizes."""
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        return None

    def apply(
        self,
        layer: torch.nn.Module,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Rows `[tokens, hidden]`, weights and ids `[tokens, k]`; the result has the shape and dtype of the rows."""
        if not self.calls:
            return torch.zeros_like(x)
        return vllm_experts(x, topk_ids, topk_weights, self.connection, self.layer)


class RemoteGateMethod(RemoteExpertsMethod):
    """As `RemoteExpertsMethod`, and the service's gate chooses and weighs the experts."""

    def __init__(self, moe: FusedMoEConfig, connection: int, layer: int, runners: Mapping[str, Any]) -> None:
        super().__init__(moe, connection, layer)
        # The layer around each RoutedExperts, by the name that they share.
        self.runners = runners

    @property
    def is_monolithic(self) -> bool:
        """True: vLLM then hands over rows instead of a choice of experts."""
        return True

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Takes the gate from the layer's runner, which would compute scores for nothing. The model keeps its module."""
        self.runners[layer.layer_name].gate = None

    def apply_monolithic(self, layer: torch.nn.Module, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """Rows `[tokens, hidden]`; the result has their shape and dtype."""
        return vllm_experts(x, None, None, self.connection, self.layer) if self.calls else torch.zeros_like(x)
