"""What the connector uses of vLLM's AFD plugin, with the names and signatures of its commit 2e4378f, for tests without that plugin."""

import abc
import dataclasses
import sys
import types


@dataclasses.dataclass(frozen=True)
class ConnectorExtraInfo:
    pass


class AFDConnectorBase(abc.ABC):
    control_plane = None

    def __init__(self, rank, local_rank, vllm_config, afd_config, role_rank):
        self.rank, self.local_rank, self.role_rank = rank, local_rank, role_rank
        self.vllm_config, self.afd_config = vllm_config, afd_config
        self.extra_info = self.parse_extra_config(vllm_config.additional_config["afd"].get("connector_extra_config"))

    @classmethod
    @abc.abstractmethod
    def parse_extra_config(cls, raw): ...

    @abc.abstractmethod
    def close(self): ...

    @abc.abstractmethod
    def init_afd_connector(self): ...

    @property
    @abc.abstractmethod
    def is_initialized(self): ...

    @abc.abstractmethod
    def send_attn_output(self, hidden_states, context, **kwargs): ...

    @abc.abstractmethod
    def recv_ffn_output(self, ref_tensor, ubatch_idx=0, **kwargs): ...

    @abc.abstractmethod
    def recv_attn_output(self, ubatch_idx=0, **kwargs): ...

    @abc.abstractmethod
    def send_ffn_output(self, ffn_output, context, **kwargs): ...


class AFDControlPlane(abc.ABC):
    @abc.abstractmethod
    def update_state_from_dp_metadata(self, payload): ...

    @abc.abstractmethod
    def send_dp_metadata_list(self, payload): ...

    @abc.abstractmethod
    def recv_dp_metadata_list(self): ...


class AFDConnectorFactory:
    registered = {}

    @classmethod
    def register_connector(cls, name, module_path, class_name, *, replace=False):
        if name in cls.registered and not replace:
            raise ValueError(f"connector {name!r} is already registered")
        cls.registered[name] = (module_path, class_name)


def install(monkeypatch):
    """Puts the plugin's modules, and the one of vLLM that the connector imports, where imports find them."""
    config = types.SimpleNamespace(SUPPORTED_AFD_CONNECTORS=("P2pNcclAFDConnector",))
    connectors = dict(
        AFDConnectorBase=AFDConnectorBase, AFDConnectorFactory=AFDConnectorFactory, AFDControlPlane=AFDControlPlane,
        ConnectorExtraInfo=ConnectorExtraInfo,
    )
    contents = {
        "afd_plugin": {},
        "afd_plugin.config": vars(config),
        "afd_plugin.connectors": connectors,
        "vllm": {},
        "vllm.platforms": dict(current_platform=types.SimpleNamespace(is_cpu=lambda: True)),
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(name=name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "expertd.vllm._afd_connector", raising=False)
    return sys.modules["afd_plugin.config"]
