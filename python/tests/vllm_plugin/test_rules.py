"""What the plugin accepts and refuses. These tests need neither vLLM nor torch."""

import json
import types

import pytest

import expertd
from expertd._engines.check import check_layers, is_expert_tensor, slow_prefill
from expertd._engines.settings import Settings
from expertd._engines.versions import refuse_other_versions
from expertd.vllm import TRIED, register
from expertd.vllm._check import check_engine, check_gate, check_layer, check_model

of = types.SimpleNamespace


def test_without_an_address_the_plugin_does_nothing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    for address in (None, ""):
        if address is None:
            monkeypatch.delenv("EXPERTD_ADDRESS", raising=False)
        else:
            monkeypatch.setenv("EXPERTD_ADDRESS", address)
        register()
    monkeypatch.setenv("EXPERTD_ADDRESS", "unix:/run/expertd.sock")
    with pytest.raises(ImportError):
        register()


def test_settings_come_from_the_environment():
    assert Settings.from_environment({}) is None
    assert Settings.from_environment({"EXPERTD_ADDRESS": "a:1"}) == Settings("a:1")
    given = {
        "EXPERTD_ADDRESS": "a:1",
        "EXPERTD_CLIENT_CA": "ca.pem",
        "EXPERTD_CLIENT_TOKEN_FILE": "token",
        "EXPERTD_CHECK_WEIGHTS": "0",
        "EXPERTD_VLLM_ANY_VERSION": "1",
        "EXPERTD_FOLLOW_WEIGHTS": "1",
    }
    found = Settings.from_environment(given)
    assert found == Settings("a:1", expertd.Credentials(ca="ca.pem", token_file="token"), False, True, follow_weights=True)
    assert Settings.from_environment(given, engine="SGLang").any_version is False
    given = {**given, "EXPERTD_VLLM_ANY_VERSION": "0", "EXPERTD_SGLANG_ANY_VERSION": "1"}
    assert Settings.from_environment(given, engine="SGLang").any_version is True
    host = {"EXPERTD_ADDRESS": "unix:/run/session.sock", "EXPERTD_SESSION": "host"}
    assert Settings.from_environment(host) == Settings("unix:/run/session.sock", session="host")
    network = {"EXPERTD_ADDRESS": "a:1", "EXPERTD_SESSION": "network", "EXPERTD_CLIENT_INSECURE": "1"}
    assert Settings.from_environment(network) == Settings("a:1", expertd.Credentials(insecure=True), session="network")
    assert Settings.from_environment({**host, "EXPERTD_GATE": "service"}).service_gate is True
    assert Settings.from_environment({**host, "EXPERTD_GATE": "engine"}).service_gate is False
    with pytest.raises(ValueError, match="EXPERTD_GATE is 'both'"):
        Settings.from_environment({**host, "EXPERTD_GATE": "both"})
    with pytest.raises(ValueError, match="EXPERTD_SESSION is 'yes'"):
        Settings.from_environment({**host, "EXPERTD_SESSION": "yes"})
    # An empty variable is as one that is not set: weights are compared.
    assert Settings.from_environment({"EXPERTD_ADDRESS": "a:1", "EXPERTD_CHECK_WEIGHTS": ""}) == Settings("a:1")
    with pytest.raises(ValueError, match="EXPERTD_CHECK_WEIGHTS is 'maybe'"):
        Settings.from_environment({"EXPERTD_ADDRESS": "a:1", "EXPERTD_CHECK_WEIGHTS": "maybe"})


def test_other_versions_are_refused_by_name():
    for version in TRIED:
        refuse_other_versions("vLLM", version, TRIED, any_version=False)
        refuse_other_versions("vLLM", f"{version}+cpu", TRIED, any_version=False)
    for version in ("0.31.9", "0.32.1", "0.32.0rc1", "0.32.0.dev3+g1", "1.0", "dev"):
        with pytest.raises(expertd.UnsupportedError, match=version.replace("+", r"\+")):
            refuse_other_versions("vLLM", version, TRIED, any_version=False)
        refuse_other_versions("vLLM", version, TRIED, any_version=True)


@pytest.mark.parametrize(
    "name, remote",
    [
        ("model.layers.0.mlp.experts.3.gate_proj.weight", True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", True),
        ("model.layers.0.block_sparse_moe.experts.11.w2.weight_scale_inv", True),
        ("layers.0.ffn.experts.1.w1.weight", True),
        ("language_model.model.layers.0.feed_forward.experts.down_proj", True),
        ("model.layers.2.mlp.experts.3.gate_proj.weight", False),
        ("model.layers.0.mlp.shared_experts.gate_proj.weight", False),
        ("model.layers.0.mlp.shared_expert.gate_proj.weight", False),
        ("model.layers.0.mlp.gate.weight", False),
        ("model.layers.0.mlp.gate.e_score_correction_bias", False),
        ("model.layers.0.mlp.experts.e_score_correction_bias", False),
        ("model.embed_tokens.weight", False),
    ],
)
def test_tensors_of_remote_experts_are_told_by_name(name, remote):
    assert is_expert_tensor(name, {0, 1}) is remote


def engine(**changes):
    parallel = dict(
        data_parallel_size=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        prefill_context_parallel_size=1,
        use_ubatching=False,
        enable_expert_parallel=False,
        enable_eplb=False,
    )
    whole = dict(lora_config=None, speculative_config=None)
    load_format, mode = changes.pop("load_format", "auto"), changes.pop("cudagraph_mode", "NONE")
    for name, value in changes.items():
        (parallel if name in parallel else whole)[name] = value
    return of(
        parallel_config=of(**parallel),
        load_config=of(load_format=load_format),
        compilation_config=of(cudagraph_mode=of(name=mode)),
        **whole,
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(data_parallel_size=2, tensor_parallel_size=2), "at once.* was not tried"),
        (dict(pipeline_parallel_size=2), "pipeline parallelism.* some of the layers"),
        (dict(prefill_context_parallel_size=2), "prefill context parallelism.* adds up"),
        (dict(enable_expert_parallel=True), "expert parallelism.* holds them all"),
        (dict(use_ubatching=True), "overlap of batches.* all-to-all backend"),
        (dict(enable_eplb=True), "EPLB.* moves experts"),
        (dict(lora_config=of(target_modules=None)), "LoRA.* weights that adapters would change.*lora_target_modules"),
        (dict(lora_config=of(target_modules=["o_proj", "experts"])), "LoRA on experts"),
        (dict(speculative_config=of(method="eagle3")), "speculative decoding.* experts of a draft model"),
        (dict(speculative_config=of(method="suffix")), "speculative decoding.* needs one of the methods ngram: others were not tried"),
        (dict(load_format="tensorizer"), "'tensorizer'"),
        (dict(cudagraph_mode="PIECEWISE"), "--enforce-eager"),
    ],
)
def test_what_cannot_work_or_was_not_tried_is_refused_with_the_reason(changes, words):
    check_engine(engine(), cpu=False)
    with pytest.raises(expertd.UnsupportedError, match=words):
        check_engine(engine(**changes), cpu=False)


@pytest.mark.parametrize(
    "changes",
    [dict(data_parallel_size=2), dict(tensor_parallel_size=2), dict(lora_config=of(target_modules=["qkv_proj", "o_proj"]))],
)
def test_parallel_engines_and_adapters_of_attention_are_accepted(changes):
    check_engine(engine(**changes), cpu=True)


def test_drafts_from_the_tokens_so_far_need_no_experts():
    check_engine(engine(speculative_config=of(method="ngram")), cpu=False)


def test_a_processor_captures_no_graphs():
    check_engine(engine(cudagraph_mode="PIECEWISE"), cpu=True)
    check_engine(engine(cudagraph_mode="PIECEWISE"), cpu=False, session="cuda")


LAYERS = [of(layer=n, num_experts=8, top_k=2, expert_width=64) for n in (1, 2)]
SERVED = of(family="mixtral", hidden=128, moe_layers=LAYERS)


def moe(**changes):
    return of(**{**dict(num_experts=8, experts_per_token=2, intermediate_size=64, hidden_dim=128), **changes})


def test_a_prefill_of_several_steps_is_told():
    assert slow_prefill(2048, 2048) is None and slow_prefill(None, 2048) is None
    said = slow_prefill(8193, 2048)
    assert "5 steps for a prefill of 8193 tokens" in said and "--max-tokens-per-step 8193`" in said


def test_a_service_with_the_same_model_is_accepted():
    config = of(model_type="mixtral")
    check_model(of(hf_config=config, hf_text_config=config, get_hidden_size=lambda: 128), SERVED)
    assert check_layer("model.layers.2.mlp.experts", moe(), 0, SERVED) is LAYERS[1]
    check_layers("vLLM", {1, 2}, SERVED)


def test_a_service_with_another_model_is_refused():
    for family, hidden, words in (("olmoe", 128, "family mixtral"), ("mixtral", 64, "hidden size 128")):
        config = of(model_type=family)
        with pytest.raises(expertd.ModelMismatchError, match=words):
            check_model(of(hf_config=config, hf_text_config=config, get_hidden_size=lambda: hidden), SERVED)
    for prefix, changes, words in (
        ("model.layers.0.mlp.experts", dict(), r"MoE layers \[1, 2\]"),
        ("model.layers.1.mlp.experts", dict(num_experts=9), "num_experts 9"),
        ("model.layers.1.mlp.experts", dict(experts_per_token=3), "top_k 3"),
        ("model.layers.1.mlp.experts", dict(intermediate_size=65), "expert_width 65"),
        ("model.layers.1.mlp.experts", dict(hidden_dim=64), "hidden size 64"),
    ):
        with pytest.raises(expertd.ModelMismatchError, match=words):
            check_layer(prefix, moe(**changes), 0, SERVED)
    for layers in (set(), {1}, {1, 2, 3}):
        with pytest.raises(expertd.ModelMismatchError, match=r"MoE layers \[1, 2\]"):
            check_layers("vLLM", layers, SERVED)
    with pytest.raises(expertd.UnsupportedError, match="2 shared experts"):
        check_layer("model.layers.1.mlp.experts", moe(), 2, SERVED)
    with pytest.raises(expertd.UnsupportedError, match="no decoder layer's number"):
        check_layer("moe.experts", moe(), 0, SERVED)


SOFTMAX = dict(
    scores=dict(kind="softmax"), choice=dict(kind="scores"), logit_bias=False, correction_bias=False, groups=None,
    normalise=dict(kind="sum", epsilon=0.0), scale=1.0,
)
OF_CHOSEN = dict(scores=dict(kind="softmax_of_chosen"), choice=dict(kind="logits"), normalise=dict(kind="no"), logit_bias=True)


def gate(mine, theirs, **config):
    """A layer of vLLM with some options of its gate, vLLM's configuration, and the service's layer."""
    experts = dict(
        layer_name="layers.1.experts", scoring_func="softmax", use_grouped_topk=False, custom_routing_function=None,
        e_score_correction_bias=None, routed_scaling_factor=1.0, apply_router_weight_on_input=False, renormalize=True,
    )
    whole = dict(lora_config=None, aux_output_config=of(enable_return_routed_experts=False))
    served = of(gate_json=json.dumps({**SOFTMAX, **theirs}), gate="in words")
    return of(**{**experts, **mine}), of(**{**whole, **config}), served


@pytest.mark.parametrize(
    "mine, theirs", [({}, {}), (dict(renormalize=False), dict(normalise=dict(kind="no"))), ({}, OF_CHOSEN), ({}, dict(logit_bias=True))]
)
def test_a_gate_that_chooses_alike_can_be_the_services(mine, theirs):
    check_gate(*gate(mine, theirs))
    check_gate(*gate(mine, theirs, lora_config=of(target_modules=["gate_proj", "o_proj"])))


@pytest.mark.parametrize(
    "mine, theirs, words",
    [
        (dict(scoring_func="sigmoid"), {}, "layers.1.experts.*'in words', needs a softmax gate"),
        (dict(use_grouped_topk=True), {}, "needs a softmax gate"),
        (dict(custom_routing_function=print), {}, "needs a softmax gate"),
        (dict(e_score_correction_bias=[0.0]), {}, "needs a softmax gate"),
        (dict(routed_scaling_factor=2.5), {}, "needs a softmax gate"),
        (dict(apply_router_weight_on_input=True), {}, "needs a softmax gate"),
        (dict(renormalize=False), {}, "renormalised weights False in vLLM needs the same"),
        (dict(renormalize=False), OF_CHOSEN, "renormalised weights False"),
        ({}, dict(normalise=dict(kind="no")), "renormalised weights True"),
        ({}, dict(normalise=dict(kind="sum", epsilon=1e-20)), "needs a softmax gate"),
        ({}, dict(scores=dict(kind="sigmoid")), "needs a softmax gate"),
        ({}, dict(correction_bias=True), "needs a softmax gate"),
        ({}, dict(groups=dict(groups=4, kept=2, by="max")), "needs a softmax gate"),
        ({}, dict(scale=2.5), "needs a softmax gate"),
        ({}, dict(choice=dict(kind="token_ids", vocab=9)), "needs a softmax gate"),
    ],
)
def test_other_gates_stay_vllms(mine, theirs, words):
    with pytest.raises(expertd.UnsupportedError, match=words):
        check_gate(*gate(mine, theirs))


def test_the_services_gate_is_refused_where_vllms_choice_matters():
    with pytest.raises(expertd.UnsupportedError, match="LoRA on gates"):
        check_gate(*gate({}, {}, lora_config=of(target_modules=["mlp.gate"])))
    with pytest.raises(expertd.UnsupportedError, match="enable_return_routed_experts"):
        check_gate(*gate({}, {}, aux_output_config=of(enable_return_routed_experts=True)))
