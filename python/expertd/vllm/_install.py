"""Replaces four methods of vLLM. `RoutedExperts` holds the routed experts of every model, subclasses included."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import vllm
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from .._content import check_content
from .._engines.check import check_layers, is_expert_tensor, slow_prefill
from .._engines.connection import connect, number_of
from .._engines.settings import Settings
from .._engines.versions import refuse_other_versions
from . import TRIED
from ._afd import remote_layers
from ._check import check_engine, check_gate, check_layer, check_model
from ._guard import guard_outputs
from ._method import RemoteExpertsMethod, RemoteGateMethod

logger = init_logger(f"vllm.{__name__}")


@functools.cache
def install() -> None:
    """Hooks into vLLM. The hooks do nothing for models that are loaded while `EXPERTD_ADDRESS` is not set."""
    RoutedExperts._get_quant_method = _method(RoutedExperts._get_quant_method)
    RoutedExperts.load_weights = _discarding(RoutedExperts.load_weights)
    DefaultModelLoader.get_all_weights = _without_experts(DefaultModelLoader.get_all_weights)
    VllmConfig.compute_hash = _distinct_hash(VllmConfig.compute_hash)


def _method(original: Any) -> Any:
    """Each MoE layer of a model asks here for the method that holds and applies its weights."""

    @functools.wraps(original)
    def get_quant_method(self: RoutedExperts, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        settings = Settings.from_environment()
        if settings is None:
            return original(self, prefix, quant_config, moe_config)
        # Other versions got here with the AFD plugin, whose models have no such layers.
        refuse_other_versions("vLLM", vllm.__version__, TRIED, settings.any_version)
        config = get_current_vllm_config()
        check_engine(config, current_platform.is_cpu(), settings.session)
        number, remote = connect(settings, guard_outputs)
        check_model(config.model_config, remote.model)
        if slow := slow_prefill(config.scheduler_config.max_num_batched_tokens, remote.model.limits.max_tokens_per_step):
            logger.warning_once(slow)
        served = check_layer(prefix, moe_config, self.expert_map_manager.num_fused_shared_experts, remote.model)
        if not settings.service_gate:
            return RemoteExpertsMethod(moe_config, number, served.layer)
        check_gate(self, config, served)
        return RemoteGateMethod(moe_config, number, served.layer, config.compilation_config.static_forward_context)

    return get_quant_method


def _discarding(original: Any) -> Any:
    """Experts whose checkpoint names are known to their model alone arrive here."""

    @functools.wraps(original)
    def load_weights(self: RoutedExperts, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
        if not isinstance(self.quant_method, RemoteExpertsMethod):
            return original(self, weights)
        for _ in weights:
            pass
        return ()

    return load_weights


def _without_experts(original: Any) -> Any:
    """Models that load weights by hand must not see experts' tensors, because there are no parameters to load them into."""

    @functools.wraps(original)
    def get_all_weights(self: DefaultModelLoader, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        weights = original(self, model_config, model)
        settings = Settings.from_environment()
        if settings is None:
            return weights
        methods = [m.quant_method for m in model.modules() if isinstance(m, RoutedExperts)]
        layers = {method.layer for method in methods if isinstance(method, RemoteExpertsMethod)} | remote_layers(model)
        _, remote = connect(settings, guard_outputs)
        check_layers("vLLM", layers, remote.model)
        if settings.check_weights and os.path.isdir(model_config.model):
            check_content(model_config.model, remote.model, "set EXPERTD_CHECK_WEIGHTS=0")
        logger.info("The routed experts of %d layers are served by %s.", len(layers), settings.address)
        return ((name, tensor) for name, tensor in weights if not is_expert_tensor(name, layers))

    return get_all_weights


def _distinct_hash(original: Any) -> Any:
    """Keeps graphs that were compiled with remote experts apart from others in vLLM's cache, also those of other connections of a process."""

    @functools.wraps(original)
    def compute_hash(self: VllmConfig, *args: Any, **kwargs: Any) -> str:
        found: str = original(self, *args, **kwargs)
        settings = Settings.from_environment()
        if settings is None:
            return found
        return hashlib.sha256(f"{found} expertd {settings.service_gate} {number_of(settings)}".encode()).hexdigest()[: len(found)]

    return compute_hash
