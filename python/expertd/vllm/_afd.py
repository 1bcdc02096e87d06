"""The AFD plugin of vLLM (vllm-project/afd-plugin), with a service in place of its FFN processes.

The plugin's models hold attention and dense layers and hand the rows of MoE layers to a connector, which this package adds to the plugin's.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from typing import Any

NAME = "ExpertdAFDConnector"

logger = logging.getLogger(__name__)


def is_installed() -> bool:
    """Whether this process can import the AFD plugin."""
    return importlib.util.find_spec("afd_plugin") is not None


def register_connector() -> None:
    """Makes the connector's name known to the AFD plugin, if that is installed."""
    if not is_installed():
        return
    try:
        config = importlib.import_module("afd_plugin.config")
        factory = importlib.import_module("afd_plugin.connectors").AFDConnectorFactory
        # The plugin has a registry of connectors, and a list of the names that its configuration accepts.
        if NAME not in config.SUPPORTED_AFD_CONNECTORS:
            config.SUPPORTED_AFD_CONNECTORS = (*config.SUPPORTED_AFD_CONNECTORS, NAME)
        factory.register_connector(NAME, "expertd.vllm._afd_connector", NAME, replace=True)
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning("There is no connector %s, because this AFD plugin differs from the one that was tried (%s).", NAME, error)


def remote_layers(model: Any) -> set[int]:
    """The numbers of the decoder layers whose rows a model of the AFD plugin hands to the connector."""
    models = sys.modules.get("afd_plugin.model_executor.models.deepseek_v2")
    if models is None or getattr(getattr(model, "afd_config", None), "connector", None) != NAME:
        return set()
    return {module.layer_idx for module in model.modules() if isinstance(module, models.RemoteFFNProxy)}
