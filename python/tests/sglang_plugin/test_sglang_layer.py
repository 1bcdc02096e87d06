"""A layer of SGLang whose experts are at a service. SGLang's modules are stand-ins unless a distribution of it is installed."""

import importlib
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="SGLang's layers are modules of torch")

import sglang_stubs as sg  # noqa: E402

import expertd  # noqa: E402
from expertd.sglang import register  # noqa: E402


@pytest.fixture
def engine(golden, monkeypatch):
    """The service's model, with the plugin registered for it and hooks applied."""
    service = golden("qwen3_moe").service
    monkeypatch.setenv("EXPERTD_ADDRESS", service.address)
    monkeypatch.setattr(sg, "SERVER", sg.arguments())
    register()
    sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry.apply_hooks()
    with service.client() as client:
        return client.model(), service


def layer_of(model, number=0, **changes):
    served = model.moe_layers[number]
    given = dict(
        num_experts=served.num_experts, hidden_size=model.hidden, intermediate_size=served.expert_width, layer_id=served.layer,
        top_k=served.top_k, prefix=f"model.layers.{served.layer}.mlp.experts",
    )
    return sys.modules[sg.LAYER].FusedMoE(**{**given, **changes})


def routing(served, tokens=11):
    ids = torch.stack([torch.randperm(served.num_experts)[: served.top_k] for _ in range(tokens)]).int()
    topk = sys.modules["sglang.srt.layers.moe.topk"]
    return topk.StandardTopKOutput(torch.rand(tokens, served.top_k), ids, torch.zeros(tokens, served.num_experts))


@pytest.mark.parametrize("scale", [None, 2.5])
def test_a_layer_holds_no_weights_and_applies_the_gates_choice(engine, scale):
    model, service = engine
    layer = layer_of(model, routed_scaling_factor=scale)
    assert list(layer.parameters()) == [] and layer.quant_config is None
    served = model.moe_layers[0]
    rows, choice = torch.randn(11, model.hidden), routing(served)
    choice.topk_ids[3:5] = -1
    found = layer(rows, choice)
    with service.client() as client:
        answer = client.forward(
            served.layer, rows, topk_ids=choice.topk_ids, topk_weights=choice.topk_weights * (scale or 1.0), shared_experts="exclude"
        )
    np.testing.assert_allclose(found.numpy(), np.asarray(answer.rows), rtol=1e-5, atol=1e-6)
    assert torch.count_nonzero(found[3:5]) == 0


def test_without_an_address_a_layer_has_its_own_experts(engine, monkeypatch):
    if sg.INSTALLED:
        pytest.skip("the distribution's own experts need its kernels")
    monkeypatch.delenv("EXPERTD_ADDRESS")
    assert [name for name, _ in layer_of(engine[0]).named_parameters()] == ["w13_weight"]


def test_models_load_everything_but_remote_experts(engine):
    model, _ = engine

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ModuleList(layer_of(model, n) for n in range(len(model.moe_layers)))
            self.loaded = []

        def load_weights(self, weights):
            self.loaded = [name for name, _ in weights]

    number = model.moe_layers[0].layer
    gate = f"model.layers.{number}.mlp.gate.weight"
    names = [gate, f"model.layers.{number}.mlp.experts.0.up_proj.weight", "model.norm.weight"]
    loader = sys.modules[sg.LOADER].DefaultModelLoader
    loading = Model()
    loader.load_weights_and_postprocess(loading, ((name, torch.zeros(1)) for name in names), torch.device("cpu"))
    assert loading.loaded == [gate, "model.norm.weight"]
    loading.experts = loading.experts[1:]
    with pytest.raises(expertd.ModelMismatchError, match="has MoE layers"):
        loader.load_weights_and_postprocess(loading, iter(()), torch.device("cpu"))


class Qwen3MoeSparseMoeBlock(torch.nn.Module):
    """SGLang's block of this name, without parallelism."""

    def __init__(self, model, number):
        super().__init__()
        self.gate = torch.nn.Linear(model.hidden, model.moe_layers[number].num_experts, bias=False)
        self.topk = torch.nn.Identity()
        self.topk.topk_config = sg.of(
            scoring_func="softmax", use_grouped_topk=False, custom_routing_function=None, correction_bias=None, routed_scaling_factor=None,
            num_fused_shared_experts=0, renormalize=True,
        )
        self.experts = layer_of(model, number)

    def forward(self, rows):
        scores, _ = self.gate(rows)
        return self.experts(rows, self.topk(rows, scores))


def test_with_the_services_gate_a_block_computes_no_scores(engine, monkeypatch):
    model, service = engine
    monkeypatch.setenv("EXPERTD_GATE", "service")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(Qwen3MoeSparseMoeBlock(model, n) for n in range(len(model.moe_layers)))

        def load_weights(self, weights):
            list(weights)

    loading, loader = Model(), sys.modules[sg.LOADER].DefaultModelLoader
    loader.load_weights_and_postprocess(loading, iter(()), torch.device("cpu"))
    rows = torch.randn(11, model.hidden)
    for block, served in zip(loading.blocks, model.moe_layers, strict=True):
        with service.client() as client:
            answer = client.forward(served.layer, rows, shared_experts="exclude")
        np.testing.assert_allclose(block(rows).numpy(), np.asarray(answer.rows), rtol=1e-5, atol=1e-6)
    other = torch.nn.Module()
    other.layers = torch.nn.ModuleList(layer_of(model, n) for n in range(len(model.moe_layers)))
    other.load_weights = list
    with pytest.raises(expertd.UnsupportedError, match="does not know the gates of layers"):
        loader.load_weights_and_postprocess(other, iter(()), torch.device("cpu"))


def test_another_model_and_fused_shared_experts_are_refused(engine, monkeypatch):
    model, _ = engine
    served = model.moe_layers[0]
    with pytest.raises(expertd.ModelMismatchError, match="expert_width"):
        layer_of(model, intermediate_size=served.expert_width * 2)
    with pytest.raises(expertd.UnsupportedError, match="1 shared experts"):
        layer_of(model, num_experts=served.num_experts + 1, top_k=served.top_k + 1, num_fused_shared_experts=1)
    monkeypatch.setattr(sg, "SERVER", sg.arguments(tp_size=2))
    with pytest.raises(expertd.UnsupportedError, match="tensor parallelism"):
        layer_of(model)


def test_other_forms_of_a_choice_are_refused(engine):
    model, _ = engine
    layer = layer_of(model)
    with pytest.raises(expertd.UnsupportedError, match="--moe-runner-backend triton"):
        layer.quant_method.apply(
            layer, sg.StandardDispatchOutput(torch.zeros(1, model.hidden), torch.ones(1), routing(model.moe_layers[0], 1))
        )
    with pytest.raises(expertd.UnsupportedError, match="scales their results"):
        layer_of(model, routed_scaling_factor=2.5, apply_router_weight_on_input=True)


def test_tokens_of_a_failed_step_do_not_leave_the_scheduler():
    from expertd.sglang._install import guard_outputs

    failures, given = [], []

    def check():
        if failures:
            raise expertd.UnavailableError("the session has ended")

    streamer = importlib.import_module(sg.STREAMER).SchedulerOutputStreamer
    original = streamer.stream_output
    # The distribution's method needs a scheduler; what it is given does not matter here.
    streamer.stream_output = lambda self, reqs, return_logprob: reqs.append("given out")
    try:
        assert guard_outputs(check) and guard_outputs(check)
        hand_over = streamer.stream_output
        hand_over(None, given, False)
        failures.append(1)
        for _ in range(2):
            with pytest.raises(expertd.UnavailableError):
                hand_over(None, given, False)
        assert given == ["given out"]
    finally:
        streamer.stream_output = original
