"""What vLLM must be configured as so that its experts can be remote, and whether the service holds its model.

Arguments are vLLM's configuration objects; they are only read, so this module does not import vLLM.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from .._engines import check
from .._errors import ModelMismatchError, UnsupportedError

if TYPE_CHECKING:
    from .._native import Model, MoeLayer
    from .._types import Session

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_LOAD_FORMATS = ("auto", "hf", "safetensors", "dummy")
# Methods of speculative decoding that were tried. They draft from the tokens so far.
_DRAFTS_WITHOUT_MODEL = ("ngram",)


def layer_number(prefix: str) -> int:
    """The decoder layer's number in the name of a module."""
    match = _LAYER.search(prefix)
    if match is None:
        raise UnsupportedError(
            f"the MoE layer {prefix!r} has no decoder layer's number in its name; unset EXPERTD_ADDRESS to load its experts "
            "into vLLM"
        )
    return int(match[1])


def adapts_experts(lora_config: Any) -> bool:
    """Whether adapters may change routed experts. vLLM wraps the modules in `target_modules`, and all that it can if that is not set."""
    if lora_config is None:
        return False
    targets = lora_config.target_modules
    return not targets or any("experts" in target for target in targets)


def check_engine(config: Any, cpu: bool, session: Session | None = None) -> None:
    """Refuses what cannot work with remote experts, and features of vLLM that were not tried. `config` is a VllmConfig."""
    parallel = config.parallel_config
    check.refuse(
        {
            "data and tensor parallelism at once (data_parallel_size, tensor_parallel_size)": (
                parallel.data_parallel_size > 1 and parallel.tensor_parallel_size > 1,
                "was not tried with remote experts; choose one of them",
            ),
            "pipeline parallelism (pipeline_parallel_size)": (
                parallel.pipeline_parallel_size > 1,
                "is not supported, because each stage would hold some of the layers that the service serves",
            ),
            "prefill context parallelism (prefill_context_parallel_size)": (
                parallel.prefill_context_parallel_size > 1,
                "is not supported, because vLLM adds up what its ranks compute, and each rank would get the whole result",
            ),
            "expert parallelism (enable_expert_parallel)": (
                parallel.enable_expert_parallel,
                "spreads experts over vLLM's ranks, and the service holds them all",
            ),
            "overlap of batches (enable_dbo, ubatch_size)": (
                bool(getattr(parallel, "use_ubatching", False)),
                "needs an all-to-all backend (DeepEP, NIXL EP), in whose place the service is",
            ),
            "EPLB (enable_eplb)": (parallel.enable_eplb, "moves experts between vLLM's ranks, and the service holds them"),
            "LoRA on experts (enable_lora)": (
                adapts_experts(config.lora_config),
                "is not supported, because the service holds the weights that adapters would change; name other modules in "
                "lora_target_modules (--lora-target-modules), for example qkv_proj and o_proj, or turn LoRA off",
            ),
            "speculative decoding (speculative_config)": (
                config.speculative_config is not None and config.speculative_config.method not in _DRAFTS_WITHOUT_MODEL,
                f"needs one of the methods {', '.join(_DRAFTS_WITHOUT_MODEL)}: others were not tried, or have a draft model, and the service "
                "does not hold the experts of a draft model",
            ),
        }
    )
    if config.load_config.load_format not in _LOAD_FORMATS:
        raise UnsupportedError(
            f"load_format is {config.load_config.load_format!r}; remote experts need one of {', '.join(_LOAD_FORMATS)}"
        )
    if not cpu and session != "cuda" and config.compilation_config.cudagraph_mode.name != "NONE":
        raise UnsupportedError(
            "a call of remote experts goes through host memory and cannot be captured in a CUDA graph; start vLLM with "
            "--enforce-eager (enforce_eager=True), or set EXPERTD_SESSION=cuda and the session socket of a service on this host"
        )


def check_model(model_config: Any, served: Model) -> None:
    """Compares family and hidden size. `model_config` is a ModelConfig."""
    families = {model_config.hf_config.model_type, model_config.hf_text_config.model_type}
    check.check_model("vLLM", families, model_config.get_hidden_size(), served)


def check_afd(afd: Any, config: Any) -> None:
    """Refuses what the connector of the AFD plugin cannot do. `afd` is an AFDConfig, `config` a VllmConfig."""
    model = config.model_config.hf_text_config
    all_are_moe = not getattr(model, "first_k_dense_replace", 0) and getattr(model, "moe_layer_freq", 1) == 1
    check.refuse(
        {
            'role "ffn" with this connector': (afd.role != "attention", "has nothing to compute, because the service computes experts"),
            "tensor parallelism (tensor_parallel_size)": (
                config.parallel_config.tensor_parallel_size > 1,
                "is not supported with this connector, because each rank would call the service with the same rows",
            ),
            "dtype float16": (
                str(config.model_config.dtype) == "torch.float16",
                "is not supported with this connector, because vLLM scales its rows between layers",
            ),
        }
    )
    if not (afd.compute_gate_on_attention or all_are_moe):
        raise UnsupportedError(
            "with compute_gate_on_attention=false the plugin sends rows of dense layers, too, and the service holds MoE layers only; set it to true"
        )


def check_afd_model(config: Any, served: Model) -> None:
    """Compares layers and gates of a model with MoE blocks of DeepSeek. `config` is the model's."""
    dimensions = {
        "num_experts": config.n_routed_experts,
        "top_k": config.num_experts_per_tok,
        "expert_width": config.moe_intermediate_size,
        "hidden size": config.hidden_size,
    }
    for layer in served.moe_layers:
        check.check_layer("vLLM", f"layer {layer.layer}", layer.layer, dimensions, 0, served)
        gate = json.loads(layer.gate_json)
        mine = (getattr(config, "scoring_func", None) or "softmax", bool(config.norm_topk_prob), (getattr(config, "n_group", None) or 1) > 1)
        theirs = (gate["scores"]["kind"], gate["normalise"]["kind"] != "no", gate["groups"] is not None)
        if mine != theirs:
            raise ModelMismatchError(
                f"vLLM's gates have scores, renormalised weights and groups {mine}, and layer {layer.layer} of the service has {theirs} "
                f"({layer.gate}), so that they would choose other experts; unset EXPERTD_ADDRESS"
            )


def check_layer(prefix: str, moe_config: Any, fused_shared_experts: int, served: Model) -> MoeLayer:
    """Compares one layer with the service's, which is returned. `moe_config` is a FusedMoEConfig."""
    dimensions = {
        "num_experts": moe_config.num_experts,
        "top_k": moe_config.experts_per_token,
        "expert_width": moe_config.intermediate_size,
        "hidden size": moe_config.hidden_dim,
    }
    return check.check_layer("vLLM", prefix, layer_number(prefix), dimensions, fused_shared_experts, served)


def check_gate(experts: Any, config: Any, served: MoeLayer) -> None:
    """Refuses the service's gate for a layer unless it chooses and weighs experts as vLLM does. `experts` is a RoutedExperts.

    Both are compared as functions of logits, which vLLM computes in the model's dtype and the service in float32. Only softmax gates are
    compared: vLLM splits others between its router and the layers around it.
    """
    is_served, renormalises = check.softmax_gate(served)
    is_own = (
        experts.scoring_func == "softmax"
        and not experts.use_grouped_topk
        and experts.custom_routing_function is None
        and experts.e_score_correction_bias is None
        and experts.routed_scaling_factor == 1.0
        and not experts.apply_router_weight_on_input
    )
    name = f"EXPERTD_GATE=service for {experts.layer_name}, whose gate at the service is {served.gate!r},"
    adapted = (config.lora_config and config.lora_config.target_modules) or ()
    outputs = getattr(config, "aux_output_config", None)
    check.refuse(
        {
            name: (
                not (is_served and is_own),
                "needs a softmax gate without groups, bias of the choice and scale on both sides",
            ),
            f"{name} with renormalised weights {experts.renormalize} in vLLM": (
                is_served and is_own and renormalises != experts.renormalize,
                "needs the same on both sides",
            ),
            "LoRA on gates with EXPERTD_GATE=service": (
                any(module.rpartition(".")[2] == "gate" for module in adapted),
                "adapts weights that vLLM would not use",
            ),
            "enable_return_routed_experts with EXPERTD_GATE=service": (
                bool(getattr(outputs, "enable_return_routed_experts", False)),
                "needs a choice of experts that vLLM would not have",
            ),
        }
    )
