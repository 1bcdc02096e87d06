"""The connector's class. The AFD plugin imports this module when a configuration names the connector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afd_plugin.connectors import AFDConnectorBase, AFDControlPlane, ConnectorExtraInfo
from torch import Tensor
from vllm.platforms import current_platform

from .._engines.connection import connect
from .._engines.settings import Settings
from .._errors import UnsupportedError
from ._check import check_afd, check_afd_model, check_engine, check_model
from ._connection import vllm_experts
from ._guard import guard_outputs

_NO_FFN_SIDE = "a service takes the place of FFN processes; start attention processes only"


class ExpertdAFDConnector(AFDConnectorBase):
    """Has a service compute the MoE blocks of a model: gate, routed and shared experts.

    The plugin's other connectors send rows, and receive the output of a process that the plugin runs. Here a call of the service does both,
    and its output waits in `send_attn_output`'s stage for `recv_ffn_output`.
    """

    def __init__(self, rank: int, local_rank: int, vllm_config: Any, afd_config: Any, role_rank: int) -> None:
        super().__init__(rank, local_rank, vllm_config, afd_config, role_rank)
        self.control_plane = _NothingToSend()
        self.attn_size, self.ffn_size = afd_config.num_attention_ranks, afd_config.num_ffn_ranks
        self._connection: int | None = None
        # Of the stages (parts of a batch) whose rows were sent.
        self._outputs: dict[int, Tensor] = {}

    @classmethod
    def parse_extra_config(cls, raw: Mapping[str, Any] | None) -> ConnectorExtraInfo:
        """Accepts an empty configuration; settings are environment variables."""
        if raw:
            raise ValueError(
                f"connector_extra_config has {sorted(raw)}; this connector is set up by the variables EXPERTD_ADDRESS, EXPERTD_SESSION, …"
            )
        return ConnectorExtraInfo()

    def init_afd_connector(self) -> None:
        """Connects to the service.

        Raises:
            UnsupportedError: the engine has a feature that the connector does not.
            ModelMismatchError: the service holds another model.
            ConnectError: nothing answers at the address.
        """
        settings = Settings.from_environment()
        if settings is None:
            raise UnsupportedError("the connector needs the address of a service; set EXPERTD_ADDRESS")
        config = self.vllm_config
        check_afd(self.afd_config, config)
        check_engine(config, current_platform.is_cpu(), settings.session)
        number, remote = connect(settings, guard_outputs)
        check_model(config.model_config, remote.model)
        check_afd_model(config.model_config.hf_text_config, remote.model)
        self._connection = number

    @property
    def is_initialized(self) -> bool:
        return self._connection is not None

    def close(self) -> None:
        """Forgets outputs that were not received. The connection is the process's, and ends with it."""
        self._connection = None
        self._outputs.clear()

    def send_attn_output(self, hidden_states: Tensor, context: Any, **_routing: Any) -> None:
        """Calls the service with rows `[tokens, hidden]` of one layer. The service's gate chooses experts, so that the engine's scores are not used."""
        if self._connection is None:
            raise RuntimeError("init_afd_connector was not called, or close was")
        layer, stage = context.metadata.layer_idx, context.metadata.stage_idx
        self._outputs[stage] = vllm_experts(hidden_states, None, None, self._connection, layer, True)

    def recv_ffn_output(self, ref_tensor: Tensor, ubatch_idx: int = 0, **_options: Any) -> Tensor:
        """The output for the rows that this stage sent last, with their shape and dtype."""
        return self._outputs.pop(ubatch_idx)

    def recv_attn_output(self, ubatch_idx: int = 0, **_options: Any) -> Any:
        raise UnsupportedError(_NO_FFN_SIDE)

    def send_ffn_output(self, ffn_output: Tensor, context: Any, **_options: Any) -> None:
        raise UnsupportedError(_NO_FFN_SIDE)


class _NothingToSend(AFDControlPlane):
    """FFN processes have to be told the sizes of batches; a call has its own."""

    def update_state_from_dp_metadata(self, payload: Any) -> None:
        pass

    def send_dp_metadata_list(self, payload: Any) -> None:
        pass

    def recv_dp_metadata_list(self) -> Any:
        raise UnsupportedError(_NO_FFN_SIDE)
