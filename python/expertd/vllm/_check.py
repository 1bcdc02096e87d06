"""What an engine must be so that its experts can be remote, and whether the service holds its model.

Arguments are vLLM's configuration objects; they are only read, so this module does not import vLLM.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .._errors import ModelMismatchError, UnsupportedError

if TYPE_CHECKING:
    from .._native import Model, MoeLayer
    from .._types import Session

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?experts\.")
_LOAD_FORMATS = ("auto", "hf", "safetensors", "dummy")
# Methods of speculative decoding that draft from the tokens so far.
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


def is_expert_tensor(name: str, layers: set[int]) -> bool:
    """Whether a checkpoint's tensor belongs to routed experts of one of these layers. Biases of gates do not."""
    match = _EXPERT.search(name)
    return match is not None and int(match[1]) in layers and not name.endswith("e_score_correction_bias")


def check_engine(config: Any, cpu: bool, session: Session | None = None) -> None:
    """Refuses what cannot work with remote experts, and features of vLLM that were not tried. `config` is a VllmConfig."""
    parallel = config.parallel_config
    refused = {
        "data parallelism (data_parallel_size)": (
            parallel.data_parallel_size > 1,
            "was not tried with remote experts; start one vLLM for each replica, all with this service",
        ),
        "tensor parallelism (tensor_parallel_size)": (
            parallel.tensor_parallel_size > 1,
            "is not supported, because vLLM adds up what its ranks compute, and each rank would get the whole result",
        ),
        "pipeline parallelism (pipeline_parallel_size)": (
            parallel.pipeline_parallel_size > 1,
            "is not supported, because each stage would hold some of the layers that the service serves",
        ),
        "prefill context parallelism (prefill_context_parallel_size)": (
            parallel.prefill_context_parallel_size > 1,
            "is not supported, because vLLM adds up what its ranks compute, and each rank would get the whole result",
        ),
        "EPLB (enable_eplb)": (parallel.enable_eplb, "moves experts between vLLM's ranks, and the service holds them"),
        "LoRA (enable_lora)": (
            config.lora_config is not None,
            "is not supported, because vLLM wraps MoE layers to add adapters to weights that the service holds",
        ),
        "speculative decoding (speculative_config)": (
            config.speculative_config is not None and config.speculative_config.method not in _DRAFTS_WITHOUT_MODEL,
            f"needs a method without a model of its own, one of {', '.join(_DRAFTS_WITHOUT_MODEL)}: the service does not hold the "
            "experts of a draft model",
        ),
    }
    for feature, (wanted, reason) in refused.items():
        if wanted:
            raise UnsupportedError(f"{feature} {reason}; turn it off, or unset EXPERTD_ADDRESS")
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
    if served.family not in families:
        raise ModelMismatchError(
            f"the service's model is of the family {served.family}, and vLLM's of {' or '.join(sorted(families))}; connect to a "
            "service that holds the same checkpoint"
        )
    hidden = model_config.get_hidden_size()
    if served.hidden != hidden:
        raise ModelMismatchError(
            f"the service's model has hidden size {served.hidden}, and vLLM's {hidden}; connect to a service that holds the "
            "same checkpoint"
        )


def check_layer(prefix: str, moe_config: Any, fused_shared_experts: int, served: Model) -> MoeLayer:
    """Compares one layer with the service's, which is returned. `moe_config` is a FusedMoEConfig."""
    number = layer_number(prefix)
    theirs = next((layer for layer in served.moe_layers if layer.layer == number), None)
    if theirs is None:
        raise ModelMismatchError(
            f"vLLM's model has an MoE layer {number} ({prefix}), and the service has MoE layers "
            f"{[layer.layer for layer in served.moe_layers]}; connect to a service that holds the same checkpoint"
        )
    for field, mine, other in (
        ("num_experts", moe_config.num_experts, theirs.num_experts),
        ("top_k", moe_config.experts_per_token, theirs.top_k),
        ("expert_width", moe_config.intermediate_size, theirs.expert_width),
        ("hidden size", moe_config.hidden_dim, served.hidden),
    ):
        if mine != other:
            raise ModelMismatchError(
                f"{prefix} has {field} {mine}, and layer {number} of the service has {other}; connect to a service that "
                "holds the same checkpoint"
            )
    if fused_shared_experts:
        raise UnsupportedError(
            f"{prefix} computes {fused_shared_experts} shared experts together with the routed ones, which remote experts do "
            "not support; turn that fusion off, or unset EXPERTD_ADDRESS"
        )
    return theirs


def check_layers(engine: set[int], served: Model) -> None:
    """Compares the numbers of all MoE layers, once vLLM has built its model."""
    theirs = {layer.layer for layer in served.moe_layers}
    if engine != theirs:
        raise ModelMismatchError(
            f"the service has MoE layers {sorted(theirs)}, and vLLM's model has {sorted(engine)} whose experts can be remote; "
            "connect to a service that holds the same checkpoint, or unset EXPERTD_ADDRESS"
        )
