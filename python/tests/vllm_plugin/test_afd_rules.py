"""The connector of vLLM's AFD plugin against stubs of that plugin's interface. These tests need neither plugin nor vLLM."""

import importlib
import sys
import types

import numpy as np
import pytest

import expertd
from expertd.vllm._afd import NAME, register_connector, remote_layers
from expertd.vllm._check import check_afd, check_afd_model

import afd_stubs
from test_rules import engine

of = types.SimpleNamespace
GATE = '{"scores": {"kind": "sigmoid"}, "normalise": {"kind": "sum", "epsilon": 1e-20}, "groups": {"groups": 2}}'
SERVED = of(
    family="deepseek_v3", hidden=64,
    moe_layers=[of(layer=n, num_experts=8, top_k=4, expert_width=32, gate_json=GATE, gate="in words") for n in (1, 2)],
)
MODEL = dict(
    n_routed_experts=8, num_experts_per_tok=4, moe_intermediate_size=32, hidden_size=64, scoring_func="sigmoid", norm_topk_prob=True,
    n_group=2, first_k_dense_replace=1,
)


def afd(**changes):
    return of(**{**dict(role="attention", compute_gate_on_attention=True, num_attention_ranks=1, num_ffn_ranks=1), **changes})


def config(model=(), dtype="torch.bfloat16", extra=None, **changes):
    """A VllmConfig."""
    hf = of(model_type="deepseek_v3", **{**MODEL, **dict(model)})
    whole = engine(**changes)
    whole.model_config = of(hf_config=hf, hf_text_config=hf, dtype=dtype, get_hidden_size=lambda: hf.hidden_size)
    whole.additional_config = {"afd": {"connector_extra_config": extra}}
    return whole


@pytest.mark.parametrize(
    "given, whole, words",
    [
        (dict(role="ffn"), {}, 'role "ffn".* the service computes experts'),
        (dict(compute_gate_on_attention=False), {}, "compute_gate_on_attention=false the plugin sends rows of dense layers.* set it to true"),
        ({}, dict(tensor_parallel_size=2), "tensor parallelism.* the same rows"),
        ({}, dict(dtype="torch.float16"), "float16.* scales its rows"),
    ],
)
def test_what_the_connector_cannot_do_is_refused_with_the_reason(given, whole, words):
    check_afd(afd(), config())
    check_afd(afd(compute_gate_on_attention=False), config(dict(first_k_dense_replace=0)))
    with pytest.raises(expertd.UnsupportedError, match=words):
        check_afd(afd(**given), config(**whole))


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(n_routed_experts=16), "num_experts 16"),
        (dict(moe_intermediate_size=48), "expert_width 48"),
        (dict(norm_topk_prob=False), "layer 1 of the service has .*in words"),
        (dict(scoring_func="softmax"), "'softmax', True, True"),
        (dict(n_group=None), "'sigmoid', True, False"),
    ],
)
def test_a_service_with_other_layers_or_gates_is_refused(changes, words):
    check_afd_model(of(**MODEL), SERVED)
    with pytest.raises(expertd.ModelMismatchError, match=words):
        check_afd_model(of(**{**MODEL, **changes}), SERVED)


def test_the_name_is_added_to_the_plugins_once(monkeypatch):
    known = afd_stubs.install(monkeypatch)
    register_connector()
    register_connector()
    assert known.SUPPORTED_AFD_CONNECTORS == ("P2pNcclAFDConnector", NAME)
    module, name = afd_stubs.AFDConnectorFactory.registered[NAME]
    assert (module, name) == ("expertd.vllm._afd_connector", NAME)


def test_another_plugin_has_no_connector_and_keeps_vllm_running(monkeypatch, caplog):
    afd_stubs.install(monkeypatch)
    monkeypatch.delattr(sys.modules["afd_plugin.connectors"], "AFDConnectorFactory")
    register_connector()
    assert NAME in caplog.text and "differs" in caplog.text
    monkeypatch.delitem(sys.modules, "afd_plugin")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    register_connector()


def test_layers_of_other_connectors_are_not_the_services(monkeypatch):
    class RemoteFFNProxy:
        layer_idx = 3

    models = of(RemoteFFNProxy=RemoteFFNProxy)
    monkeypatch.setitem(sys.modules, "afd_plugin.model_executor.models.deepseek_v2", models)
    parts = lambda: [RemoteFFNProxy(), object()]  # noqa: E731
    assert remote_layers(of(afd_config=of(connector=NAME), modules=parts)) == {3}
    assert remote_layers(of(afd_config=of(connector="P2pNcclAFDConnector"), modules=parts)) == set()
    assert remote_layers(of(modules=parts)) == set()


@pytest.fixture
def connector(monkeypatch):
    """`connector(config, **afd)`: one of the class that the plugin would import."""
    pytest.importorskip("torch", reason="the connector passes tensors of torch")
    afd_stubs.install(monkeypatch)

    def made(config, **given):
        cls = importlib.import_module("expertd.vllm._afd_connector").ExpertdAFDConnector
        return cls(0, 0, config, afd(**given), 0)

    return made


def test_a_stage_receives_the_block_of_the_rows_it_sent(connector, golden, monkeypatch):
    import torch

    found = golden("deepseek_v3")
    served = found.model.moe_layers[0]
    monkeypatch.setenv("EXPERTD_ADDRESS", found.arguments["address"])
    monkeypatch.setenv("EXPERTD_SESSION", found.session or "")
    sizes = dict(
        n_routed_experts=served.num_experts, num_experts_per_tok=served.top_k, moe_intermediate_size=served.expert_width,
        hidden_size=found.model.hidden, n_group=2 if '"groups":{' in served.gate_json.replace(" ", "") else 1,
    )
    made = connector(config(sizes))
    assert made.control_plane is not None and not made.is_initialized
    rows = [torch.randn(n, found.model.hidden) for n in (3, 5)]

    def context(stage):
        return of(metadata=of(layer_idx=served.layer, stage_idx=stage))

    with pytest.raises(RuntimeError, match="init_afd_connector"):
        made.send_attn_output(rows[0], context(0))
    made.init_afd_connector()
    assert made.is_initialized
    for stage in (0, 1):
        made.send_attn_output(rows[stage], context(stage), router_logits=torch.zeros(rows[stage].shape[0], 8))
    for stage in (1, 0):
        whole = found.client.forward(served.layer, rows[stage], shared_experts="include")
        out = made.recv_ffn_output(torch.empty(0), ubatch_idx=stage)
        np.testing.assert_allclose(out.numpy(), np.asarray(whole.rows), rtol=1e-5, atol=1e-6)
    with pytest.raises(expertd.UnsupportedError, match="attention processes only"):
        made.recv_attn_output()
    made.close()
    assert not made.is_initialized


def test_the_connector_needs_an_address_and_no_other_settings(connector, monkeypatch):
    monkeypatch.delenv("EXPERTD_ADDRESS", raising=False)
    with pytest.raises(expertd.UnsupportedError, match="set EXPERTD_ADDRESS"):
        connector(config()).init_afd_connector()
    with pytest.raises(ValueError, match="EXPERTD_SESSION"):
        connector(config(extra={"session": "cuda"}))
    monkeypatch.setenv("EXPERTD_ADDRESS", "unix:/nothing-here.sock")
    with pytest.raises(expertd.UnsupportedError, match="overlap of batches"):
        connector(config(use_ubatching=True)).init_afd_connector()
    with pytest.raises(expertd.ConnectError):
        connector(config()).init_afd_connector()
