"""What the plugin for SGLang accepts and refuses. These tests need neither SGLang nor torch."""

import json
import sys
import types

import pytest

import expertd
from expertd.sglang import TRIED, register
from expertd.sglang._check import check_engine, check_gate

ONE_RANK = dict(
    tp_size=1, ep_size=1, dp_size=1, pp_size=1, attn_cp_size=1, moe_a2a_backend="none", enable_eplb=False, enable_lora=None,
    lora_paths=None, speculative_algorithm=None, enable_two_batch_overlap=False, enable_single_batch_overlap=False,
    enable_torch_compile=False, disaggregation_mode="null", kt_weight_path=None, load_format="auto", moe_runner_backend="auto",
)


def test_without_an_address_the_plugin_does_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.delenv("EXPERTD_ADDRESS", raising=False)
    register()
    monkeypatch.setenv("EXPERTD_ADDRESS", "unix:/run/expertd.sock")
    with pytest.raises(ImportError):
        register()


@pytest.mark.parametrize("version", ["0.5.16", "0.5.17.post1", "0.6.0"])
def test_a_version_that_was_not_tried_ends_the_process(monkeypatch, version):
    """SGLang would log an exception of a plugin and go on with its own experts."""
    assert version not in TRIED
    pytest.importorskip("torch", reason="the plugin imports it")
    stub = types.ModuleType("sglang")
    stub.__version__ = version
    monkeypatch.setitem(sys.modules, "sglang", stub)
    monkeypatch.setenv("EXPERTD_ADDRESS", "unix:/run/expertd.sock")
    with pytest.raises(SystemExit, match=f"SGLang {version} is installed"):
        register()


@pytest.mark.parametrize("name, value", [("EXPERTD_SESSION", "gpu"), ("EXPERTD_GATE", "both"), ("EXPERTD_CHECK_WEIGHTS", "maybe")])
def test_a_wrong_variable_ends_the_process(monkeypatch, name, value):
    monkeypatch.setenv("EXPERTD_ADDRESS", "unix:/run/expertd.sock")
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=f"{name} is '{value}'"):
        register()


class Qwen3MoeSparseMoeBlock:
    """A block of SGLang's with this name, as far as its gate is concerned."""

    def __init__(self, scale=1.0, **changes):
        own = dict(
            scoring_func="softmax", use_grouped_topk=False, custom_routing_function=None, correction_bias=None,
            routed_scaling_factor=None, num_fused_shared_experts=0, renormalize=True,
        )
        self.topk = types.SimpleNamespace(topk_config=types.SimpleNamespace(**{**own, **changes}))
        self.experts = types.SimpleNamespace(quant_method=types.SimpleNamespace(scale=scale))


def served(**changes):
    gate = dict(
        scores=dict(kind="softmax"), normalise=dict(kind="sum", epsilon=0.0), groups=None, correction_bias=False, scale=1.0,
        choice=dict(kind="scores"),
    )
    return types.SimpleNamespace(layer=1, gate="in words", gate_json=json.dumps({**gate, **changes}))


def test_a_gate_that_chooses_alike_can_be_the_services():
    check_gate(Qwen3MoeSparseMoeBlock(), types.SimpleNamespace(), served())
    check_gate(Qwen3MoeSparseMoeBlock(renormalize=False), types.SimpleNamespace(), served(normalise=dict(kind="no")))


@pytest.mark.parametrize(
    "mine, theirs",
    [
        (dict(scoring_func="sigmoid"), {}),
        (dict(use_grouped_topk=True), {}),
        (dict(custom_routing_function=print), {}),
        (dict(correction_bias=[0.0]), {}),
        (dict(routed_scaling_factor=2.5), {}),
        (dict(scale=2.5), {}),
        (dict(num_fused_shared_experts=1), {}),
        (dict(renormalize=False), {}),
        ({}, dict(normalise=dict(kind="no"))),
        ({}, dict(scores=dict(kind="sigmoid"))),
        ({}, dict(correction_bias=True)),
        ({}, dict(scale=2.5)),
    ],
)
def test_other_gates_stay_sglangs(mine, theirs):
    with pytest.raises(expertd.UnsupportedError, match="layer 1, .*'in words', needs the same softmax gate"):
        check_gate(Qwen3MoeSparseMoeBlock(**mine), types.SimpleNamespace(), served(**theirs))


def test_the_services_gate_is_refused_for_other_blocks_and_where_the_choice_is_returned():
    with pytest.raises(expertd.UnsupportedError, match="was not tried with SimpleNamespace"):
        check_gate(types.SimpleNamespace(), types.SimpleNamespace(), served())
    with pytest.raises(expertd.UnsupportedError, match="enable_return_routed_experts"):
        check_gate(Qwen3MoeSparseMoeBlock(), types.SimpleNamespace(enable_return_routed_experts=True), served())


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(tp_size=2), "tensor parallelism"),
        (dict(ep_size=2), "expert parallelism.* holds them all"),
        (dict(dp_size=2), "data parallelism.*one SGLang for each replica"),
        (dict(pp_size=2), "pipeline parallelism.* some of the layers"),
        (dict(attn_cp_size=2), "context parallelism"),
        (dict(moe_a2a_backend="deepep"), "all-to-all backend"),
        (dict(enable_eplb=True), "EPLB.* moves experts"),
        (dict(enable_lora=True), "LoRA"),
        (dict(lora_paths=["a"]), "LoRA"),
        (dict(speculative_algorithm="EAGLE"), "speculative decoding"),
        (dict(enable_two_batch_overlap=True), "overlap of batches"),
        (dict(enable_torch_compile=True), "torch.compile"),
        (dict(disaggregation_mode="decode"), "disaggregation"),
        (dict(kt_weight_path="/weights"), "experts on CPUs"),
        (dict(enable_paged_experts=True), "paged experts"),
        (dict(load_format="dummy"), "'dummy'"),
        (dict(moe_runner_backend="flashinfer_trtllm"), "--moe-runner-backend triton"),
    ],
)
def test_what_cannot_work_or_was_not_tried_is_refused_with_the_reason(changes, words):
    check_engine(types.SimpleNamespace(**ONE_RANK))
    with pytest.raises(expertd.UnsupportedError, match=words):
        check_engine(types.SimpleNamespace(**{**ONE_RANK, **changes}))
