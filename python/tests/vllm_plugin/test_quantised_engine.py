"""Quantised checkpoints: the experts are the service's, and vLLM reads what it holds itself as the checkpoint says."""

import contextlib
import importlib.util
import pathlib

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("these tests need a distribution of vLLM (docs/vllm.md)", allow_module_level=True)

import torch
import transformers
from conftest_engine import run, serve
from models import make_quantised, prompts

from expertd.transformers import remote_experts

# Family, format, and vLLM's method for attention.
CHECKPOINTS = [
    ("qwen3_moe", "fp8", "UnquantizedLinearMethod"),
    ("qwen3_moe", "int4", "CompressedTensorsLinearMethod"),
    ("qwen3_moe", "int4-awq", "UnquantizedLinearMethod"),
    ("qwen3_moe", "int4-gptq", "UnquantizedLinearMethod"),
    ("gpt_oss", "mxfp4", "UnquantizedLinearMethod"),
]


# Runs of transformers in bf16, each with other roundings.
RUNS = 12
# The share of places that may lie farther from float32 than every one of them: choices of experts that none of these roundings changed.
STRAYS = 0.05


def log_probabilities(model, rows):
    """Those of each token of the prompts but the first ones."""
    found = []
    for prompt in rows:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            scores = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), dim=-1)
        found += scores.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return torch.tensor(found)


def references(folder, address, rows):
    """Log-probabilities from transformers with the service's experts: in float32, and of `RUNS` runs in bf16.

    In each of the latter the embeddings have errors as if they were rounded to bf16 once more. A rounded score can change a choice of
    experts, and errors are large there. Of places where that is near, one of the runs shows it.
    """
    found = []
    for kind in (torch.float32, torch.bfloat16):
        with remote_experts(address, session="host", check_weights=False):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind)
        if kind == torch.bfloat16:
            model.get_input_embeddings().register_forward_hook(lambda _, __, out: out * (1 + (torch.rand_like(out) - 0.5) / 128))
        found.append([log_probabilities(model, rows) for _ in range(1 if kind == torch.float32 else RUNS)])
    [exact], rounded = found
    return exact, torch.stack(rounded)


def strays(values, exact, rounded):
    """The share of places where values are farther from the exact ones than three times the worst of the rounded runs, and a little."""
    return ((values - exact).abs() > 3 * (rounded - exact).abs().amax(0) + 0.05).float().mean().item()


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """For each checkpoint: vLLM's answer, its log-probabilities or None, and the references."""
    root, answers, rows = tmp_path_factory.mktemp("quantised"), {}, prompts(10)
    with contextlib.ExitStack() as services:
        jobs, expected = {}, {}
        for family, dtype, _ in CHECKPOINTS:
            folder, plain = root / f"{family}-{dtype}", root / f"{family}-{dtype}-plain"
            make_quantised(family, dtype, folder, plain)
            service = services.enter_context(serve(folder))
            addresses = dict(address=service.session_address, session="host")
            jobs[family, dtype] = dict(folder=str(folder), dtype="bfloat16", prompts=rows, tokens=8, logprobs=True, **addresses)
            expected[family, dtype] = references(plain, service.session_address, rows)
        found, _ = run(list(jobs.values()), root)
        for key, answer in zip(jobs, found, strict=True):
            mine = None if "error" in answer else torch.tensor([value for prompt in answer["logprobs"] for value in prompt])
            answers[key] = answer, mine, expected[key]
    return answers


@pytest.mark.parametrize("family, dtype, attention", CHECKPOINTS)
def test_log_probabilities_are_as_near_as_those_of_transformers(engines, family, dtype, attention):
    if attention == "CompressedTensorsLinearMethod" and "avx512f" not in pathlib.Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM multiplies with INT4 weights of its own on processors with AVX-512 only")
    answer, mine, (exact, rounded) = engines[family, dtype]
    assert "error" not in answer, answer
    assert answer["methods"] == {"qkv_proj": attention, "routed_experts": "RemoteExpertsMethod"}
    assert answer["expert_bytes"] == 0 and len(answer["tokens"][0]) == 8
    # Both round rows to bf16, at different places.
    medians = [(values - exact).abs().median().item() for values in (mine, rounded[0])]
    assert medians[0] <= 3 * medians[1] + 0.02, medians
    assert (share := strays(mine, exact, rounded)) <= STRAYS, share
    # Every tenth token with the log-probability of its neighbour would be seen.
    wrong = mine.clone()
    wrong[::10] = mine.roll(1)[::10]
    assert strays(wrong, exact, rounded) > STRAYS
