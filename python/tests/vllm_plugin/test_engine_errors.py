"""Errors of log-probabilities against transformers in float32: with a service's experts they are those of stock vLLM.

Weights and prompts are new in each run. `pytest -s` prints the errors of each checkpoint.
"""

import contextlib
import importlib.util
import pathlib

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("these tests need a distribution of vLLM (docs/vllm.md)", allow_module_level=True)

import torch
import transformers
from conftest_engine import run, serve
from models import make_checkpoint, make_quantised, prompts

# Families for which stock vLLM in float32 and transformers agree.
FAMILIES = ["qwen3_moe", "olmoe", "mixtral", "qwen2_moe", "glm4_moe", "granitemoe", "gpt_oss", "dots1"]
QUANTISED = {"fp8": "qwen3_moe", "int4": "qwen3_moe", "int4-awq": "qwen3_moe", "int4-gptq": "qwen3_moe", "mxfp4": "gpt_oss"}
CHECKPOINTS = [(family, "bf16") for family in FAMILIES] + [(family, dtype) for dtype, family in QUANTISED.items()]
# vLLM multiplies with INT4 weights of its own on processors with AVX-512 only.
INT4_ATTENTION = "avx512f" in pathlib.Path("/proc/cpuinfo").read_text()
SIZES = dict(hidden_size=256, num_attention_heads=8)
PROMPTS = 17
# Limits of errors with the service's experts to stock vLLM's: of all checkpoints, and of one, where single choices of experts weigh more.
# One layer's output times 1.01 gives 1.12 (mean) and 1.18 (median) over four checkpoints.
MOST, MOST_OF_ONE = 1.08, 1.2


def log_probabilities(folder, rows):
    """Those of each token of the prompts but the first ones, from transformers in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in rows:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            scores = torch.log_softmax(model(input_ids=ids).logits[0, :-1], dim=-1)
        found.append(scores.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(found)


class Engines:
    """Of each checkpoint, vLLM's answers and the errors of their log-probabilities, with its own experts and with a service's."""

    def __init__(self, root, services):
        self.rows, jobs, plain, exact = prompts(PROMPTS), {}, {}, {}
        for key in CHECKPOINTS + ["attention"] * INT4_ATTENTION:
            family, dtype = ("qwen3_moe", "int4") if key == "attention" else key
            folder = plain[key] = root / str(len(plain))
            if dtype == "bf16":
                make_checkpoint(family, folder, torch.bfloat16, **SIZES)
            else:
                # On x86 vLLM has experts in these formats with AMX only. It computes with the same weights in bf16.
                plain[key] = root / f"{folder.name}-plain"
                make_quantised(family, dtype, folder, plain[key], attention=key == "attention")
            exact[key] = log_probabilities(plain[key], self.rows)
            jobs[key] = self.job(folder, services.enter_context(serve(folder)))
        remote, _ = run(list(jobs.values()), root)
        stock, _ = run([self.job(folder) for folder in plain.values()], root)
        self.remote, self.stock = (dict(zip(jobs, answers, strict=True)) for answers in (remote, stock))
        self.errors = {key: [self.errors_of(answers[key], exact[key]) for answers in (self.remote, self.stock)] for key in jobs}

    def job(self, folder, service=None):
        address = dict(address=service.session_address, session="host") if service else {}
        return dict(folder=str(folder), dtype="bfloat16", prompts=self.rows, tokens=2, logprobs=True, **address)

    def errors_of(self, answer, exact):
        if "error" in answer:
            return None
        return (torch.tensor([value for prompt in answer["logprobs"] for value in prompt]) - exact).abs()

    def ratios(self, key):
        """Those of mean and median."""
        remote, stock = self.errors[key]
        for how, value in (("mean", torch.mean), ("median", torch.median)):
            print(f"\n{key}: {how} {value(remote):.4f}, stock {value(stock):.4f}", end="")
        return torch.stack([remote.mean() / stock.mean(), remote.median() / stock.median()])


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    with contextlib.ExitStack() as services:
        yield Engines(tmp_path_factory.mktemp("errors"), services)


@pytest.mark.parametrize("key", CHECKPOINTS, ids="-".join)
def test_every_layer_of_the_service_is_called_and_near(engines, key):
    remote, stock = engines.remote[key], engines.stock[key]
    assert "error" not in remote and "error" not in stock, (remote.get("error"), stock.get("error"))
    assert remote["methods"] == {"qkv_proj": "UnquantizedLinearMethod", "routed_experts": "RemoteExpertsMethod"}
    assert remote["expert_bytes"] == 0 and stock["expert_bytes"] > 0
    layers = 1 if key[0] in ("glm4_moe", "dots1") else 2
    assert sum(remote["calls"]) == layers * sum(len(prompt) + 1 for prompt in engines.rows)
    assert stock["calls"] == []
    # Stock vLLM computes the model of the reference.
    assert engines.errors[key][1].median() < 0.1
    assert max(ratios := engines.ratios(key).tolist()) <= MOST_OF_ONE, ratios


def test_errors_of_all_are_those_of_stock_vllm(engines):
    means = torch.stack([engines.ratios(key) for key in CHECKPOINTS]).log().mean(0).exp().tolist()
    print(f"\nratios of all: mean {means[0]:.3f}, median {means[1]:.3f}")
    assert max(means) <= MOST, means


@pytest.mark.skipif(not INT4_ATTENTION, reason="vLLM has no INT4 attention on this processor")
def test_vllm_reads_attention_in_int4_beside_remote_experts(engines):
    remote = engines.remote["attention"]
    assert "error" not in remote, remote
    assert remote["methods"] == {"qkv_proj": "CompressedTensorsLinearMethod", "routed_experts": "RemoteExpertsMethod"}
    # Stock vLLM has attention in bf16.
    assert max(ratios := engines.ratios("attention").tolist()) <= 2 * MOST_OF_ONE, ratios
