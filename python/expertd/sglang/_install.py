"""Registers hooks with SGLang's registry. `FusedMoE` holds the routed experts of every model, subclasses included."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

from torch import nn

from .._content import check_content
from .._engines.check import check_layer, check_layers, check_model, is_expert_tensor, slow_prefill
from .._engines.connection import connect
from .._engines.guard import preceded, replace
from .._engines.settings import Settings
from .._errors import UnsupportedError
from ._check import check_engine, check_gate

_LAYER = ("sglang.srt.layers.moe.fused_moe_triton.layer", "FusedMoE", "__init__")
_LOADER = ("sglang.srt.model_loader.loader", "DefaultModelLoader", "load_weights_and_postprocess")
# Called once SGLang has waited for a step, before its tokens leave the scheduler. An exception ends the server.
_OUTPUTS = (("sglang.srt.managers.scheduler_components.output_streamer", "SchedulerOutputStreamer", ("stream_output",)),)

logger = logging.getLogger(__name__)


@functools.cache
def install() -> None:
    """Registers the hooks, which do nothing for models that are loaded while `EXPERTD_ADDRESS` is not set.

    Raises:
        UnsupportedError: this SGLang has no such classes; its registry would only log that.
    """
    try:
        registry = importlib.import_module("sglang.srt.plugins.hook_registry")
        for module, owner, method in (_LAYER, _LOADER):
            getattr(getattr(importlib.import_module(module), owner), method)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"this SGLang differs from those that were tried ({error}); unset EXPERTD_ADDRESS") from error
    for place, hook in ((_LAYER, _with_remote_experts), (_LOADER, _without_expert_tensors)):
        registry.HookRegistry.register(".".join(place), hook, registry.HookType.AROUND)


def guard_outputs(check: Callable[[], None]) -> bool:
    """Has `check` called before tokens leave the scheduler. False, and nothing is done, if SGLang lacks the place."""
    return replace("SGLang", _OUTPUTS, check, preceded)


class _Remote:
    """Stands for a configuration of quantisation, which a layer asks for the method that holds and applies its weights."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def get_name(self) -> str:
        return "expertd"

    def get_quant_method(self, _layer: nn.Module, _prefix: str) -> Any:
        return self.method


def _with_remote_experts(original: Any, self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Builds an MoE layer that holds no weights."""
    settings = Settings.from_environment(engine="SGLang")
    if settings is None:
        original(self, *args, **kwargs)
        return
    from sglang.srt.runtime_context import get_server_args

    from ._method import RemoteExpertsMethod

    check_engine(get_server_args())
    number, remote = connect(settings, guard_outputs)
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    dimensions = {
        "num_experts": given["num_experts"] - given["num_fused_shared_experts"],
        "top_k": given["top_k"],
        "expert_width": given["intermediate_size"],
        "hidden size": given["hidden_size"],
    }
    if given["num_fused_shared_experts"]:
        # The gate then chooses shared experts as well.
        dimensions["top_k"] -= given["num_fused_shared_experts"]
    check_layer("SGLang", given["prefix"], given["layer_id"], dimensions, given["num_fused_shared_experts"], remote.model)
    config = given["quant_config"]
    given["quant_config"] = _Remote(RemoteExpertsMethod(number, given["layer_id"]))
    # Some models of newer versions choose the method themselves.
    if "quant_method" in given:
        given["quant_method"] = None
    original(*bound.args, **bound.kwargs)
    self.quant_config = config


def _without_expert_tensors(original: Any, model: nn.Module, weights: Any, target_device: Any) -> Any:
    """Models must not see experts' tensors, because there are no parameters to load them into."""
    settings = Settings.from_environment(engine="SGLang")
    if settings is None:
        return original(model, weights, target_device)
    from sglang.srt.runtime_context import get_server_args

    from ._method import RemoteExpertsMethod

    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    layers = {method.layer for method in methods if isinstance(method, RemoteExpertsMethod)}
    _, remote = connect(settings, guard_outputs)
    config = getattr(model, "config", None)
    if hasattr(config, "model_type") and hasattr(config, "hidden_size"):
        check_model("SGLang", {config.model_type}, config.hidden_size, remote.model)
    check_layers("SGLang", layers, remote.model)
    if settings.service_gate:
        _without_gates(model, layers, remote)
    folder = get_server_args().model_path
    if settings.check_weights and os.path.isdir(folder):
        check_content(folder, remote.model, "set EXPERTD_CHECK_WEIGHTS=0")
    logger.info("The routed experts of %d layers are served by %s.", len(layers), settings.address)
    if slow := slow_prefill(get_server_args().chunked_prefill_size, remote.model.limits.max_tokens_per_step):
        logger.warning(slow)
    kept: Any = ((name, tensor) for name, tensor in weights if not is_expert_tensor(name, layers))
    return original(model, kept, target_device)


def _without_gates(model: nn.Module, layers: set[int], remote: Any) -> None:
    """The blocks of these layers compute no scores and choose no experts. They keep their modules, which have the checkpoint's weights."""
    from sglang.srt.runtime_context import get_server_args

    from ._method import NoChoice, RemoteExpertsMethod

    found = set()
    for block in list(model.modules()):
        method = getattr(getattr(block, "experts", None), "quant_method", None)
        if not isinstance(method, RemoteExpertsMethod):
            continue
        check_gate(block, get_server_args(), remote.layer(method.layer))
        found.add(method.layer)
        block.gate.forward = lambda rows: (None, None)
        block.topk.forward = lambda rows, scores, **_: NoChoice()
    if found != layers:
        raise UnsupportedError(f"EXPERTD_GATE=service does not know the gates of layers {sorted(layers - found)}; unset it")
