"""How an MoE layer of SGLang computes its routed experts if they are remote."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase

from .._engines.connection import connection
from .._engines.method import WithoutWeights
from .._errors import UnsupportedError


class NoChoice:
    """In place of a choice of experts, which is the service's."""


class RemoteExpertsMethod(WithoutWeights, FusedMoEMethodBase):
    """A method whose layer holds no weights. SGLang's gate chooses and weighs experts, and the service applies the choice or makes it.

    SGLang adds shared experts itself. Scaling factors of routed experts are the method's part.
    """

    def __init__(self, connection: int, layer: int) -> None:
        self.connection = connection
        self.layer = layer
        self.scale = 1.0

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: Any) -> None:
        """Takes over what the layer's runner would have to apply to results."""
        self.scale = 1.0 if moe_runner_config.routed_scaling_factor is None else moe_runner_config.routed_scaling_factor
        if self.scale != 1.0 and moe_runner_config.apply_router_weight_on_input:
            raise UnsupportedError(
                f"layer {self.layer} weighs its experts' inputs and scales their results, which remote experts do not support; unset "
                "EXPERTD_ADDRESS"
            )

    def apply(self, layer: torch.nn.Module, dispatch_output: Any) -> StandardCombineInput:
        """Rows `[tokens, hidden]` with the experts that the gate chose; the result has the shape and dtype of the rows."""
        rows, routing = dispatch_output.hidden_states, dispatch_output.topk_output
        chosen = not isinstance(routing, NoChoice)
        if (chosen and not TopKOutputChecker.format_is_standard(routing)) or dispatch_output.hidden_states_scale is not None:
            raise UnsupportedError(
                f"layer {self.layer} got rows or a choice of experts in a form for SGLang's own kernels; start SGLang with "
                "--moe-runner-backend triton"
            )
        remote = connection(self.connection)
        if remote.session != "cuda" and rows.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a call of remote experts goes through host memory and cannot be captured in a CUDA graph; start SGLang with "
                "--disable-cuda-graph, or set EXPERTD_SESSION=cuda and the session socket of a service on this host"
            )
        if not chosen:
            return StandardCombineInput(hidden_states=remote.routed(self.layer, rows, None, None))
        weights = routing.topk_weights if self.scale == 1.0 else routing.topk_weights * self.scale
        return StandardCombineInput(hidden_states=remote.routed(self.layer, rows, routing.topk_ids, weights))
