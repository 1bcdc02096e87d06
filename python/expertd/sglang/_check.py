"""What SGLang must be started with so that its experts can be remote.

Arguments are SGLang's objects; they are only read, so this module does not import SGLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._engines.check import refuse, softmax_gate
from .._errors import UnsupportedError

if TYPE_CHECKING:
    from .._native import MoeLayer

_LOAD_FORMATS = ("auto", "safetensors")
# With other runners SGLang's gate leaves the choice of experts to the kernels that compute them.
_RUNNERS = ("auto", "triton")
# Blocks that compute `experts(rows, topk(rows, gate(rows)[0]))` and need scores and choice for nothing else.
_BLOCKS = ("Qwen3MoeSparseMoeBlock",)


def check_engine(arguments: Any) -> None:
    """Refuses what cannot work with remote experts, and what was not tried. `arguments` are SGLang's ServerArgs."""

    def more_than_one(name: str) -> bool:
        return (getattr(arguments, name, None) or 1) > 1

    untried = "was not tried with remote experts"
    refuse(
        {
            "tensor parallelism (tp_size)": (more_than_one("tp_size"), untried),
            "expert parallelism (ep_size)": (more_than_one("ep_size"), "spreads experts over SGLang's ranks, and the service holds them all"),
            "data parallelism (dp_size)": (more_than_one("dp_size"), f"{untried}; start one SGLang for each replica, all with this service"),
            "pipeline parallelism (pp_size)": (
                more_than_one("pp_size"),
                "is not supported, because each stage would hold some of the layers that the service serves",
            ),
            "context parallelism (attn_cp_size)": (more_than_one("attn_cp_size"), untried),
            "an all-to-all backend (moe_a2a_backend)": (
                arguments.moe_a2a_backend != "none",
                "moves rows between SGLang's ranks, and the service moves them to its own",
            ),
            "EPLB (enable_eplb)": (arguments.enable_eplb, "moves experts between SGLang's ranks, and the service holds them"),
            "LoRA (enable_lora, lora_paths)": (bool(arguments.enable_lora or arguments.lora_paths), untried),
            "speculative decoding (speculative_algorithm)": (arguments.speculative_algorithm is not None, untried),
            "overlap of batches (enable_two_batch_overlap, enable_single_batch_overlap)": (
                arguments.enable_two_batch_overlap or arguments.enable_single_batch_overlap,
                untried,
            ),
            "torch.compile (enable_torch_compile)": (arguments.enable_torch_compile, untried),
            "disaggregation of prefill and decode (disaggregation_mode)": (arguments.disaggregation_mode != "null", untried),
            "experts on CPUs (kt_weight_path)": (
                arguments.kt_weight_path is not None,
                "holds experts in SGLang's process; the service has CPU ranks",
            ),
            "paged experts (enable_paged_experts)": (
                bool(getattr(arguments, "enable_paged_experts", False)),
                "holds experts in SGLang's process",
            ),
        }
    )
    if arguments.load_format not in _LOAD_FORMATS:
        raise UnsupportedError(f"load_format is {arguments.load_format!r}; remote experts need one of {', '.join(_LOAD_FORMATS)}")
    if arguments.moe_runner_backend not in _RUNNERS:
        raise UnsupportedError(
            f"moe_runner_backend is {arguments.moe_runner_backend!r}, with which SGLang's gate chooses no experts; start SGLang with "
            "--moe-runner-backend triton"
        )


def check_gate(block: Any, arguments: Any, served: MoeLayer) -> None:
    """Refuses the service's gate for an MoE block unless it chooses and weighs experts as the block's own."""
    name = type(block).__name__
    if name not in _BLOCKS:
        raise UnsupportedError(f"EXPERTD_GATE=service was not tried with {name}; unset it, so that SGLang's gate chooses the experts")
    mine = block.topk.topk_config
    is_plain, renormalises = softmax_gate(served)
    is_own = (
        mine.scoring_func == "softmax"
        and not mine.use_grouped_topk
        and mine.custom_routing_function is None
        and mine.correction_bias is None
        and mine.routed_scaling_factor in (None, 1.0)
        and block.experts.quant_method.scale == 1.0
        and not mine.num_fused_shared_experts
    )
    refuse(
        {
            f"EXPERTD_GATE=service for layer {served.layer}, whose gate at the service is {served.gate!r},": (
                not (is_plain and is_own) or renormalises != mine.renormalize,
                "needs the same softmax gate on both sides, without groups, bias of the choice and scale",
            ),
        }
        | {
            f"{name} with EXPERTD_GATE=service": (
                bool(getattr(arguments, name, None)),
                "needs a choice of experts that SGLang would not have",
            )
            for name in ("enable_return_routed_experts", "expert_distribution_recorder_mode", "enable_expert_distribution_metrics")
        }
        | {
            "the prefill backend tc_piecewise with EXPERTD_GATE=service": (
                getattr(arguments, "cuda_graph_backend_prefill", None) == "tc_piecewise",
                "was not tried; start SGLang with another --cuda-graph-backend-prefill",
            ),
        }
    )
