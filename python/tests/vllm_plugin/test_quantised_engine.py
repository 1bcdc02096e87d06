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


def reference(folder, address, rows, dtype):
    """Log-probabilities of prompts from transformers, with the service's experts."""
    with remote_experts(address, session="host", check_weights=False):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    found = []
    for prompt in rows:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            scores = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), dim=-1)
        found += scores.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return torch.tensor(found)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """For each checkpoint: vLLM's answer, and median errors of its log-probabilities and of those of transformers in bf16.

    Where a rounded score changes a choice of experts, which happens at few places, errors are large.
    """
    root, answers, rows = tmp_path_factory.mktemp("quantised"), {}, prompts()
    with contextlib.ExitStack() as services:
        jobs, expected = {}, {}
        for family, dtype, _ in CHECKPOINTS:
            folder, plain = root / f"{family}-{dtype}", root / f"{family}-{dtype}-plain"
            make_quantised(family, dtype, folder, plain)
            service = services.enter_context(serve(folder))
            addresses = dict(address=service.session_address, session="host")
            jobs[family, dtype] = dict(folder=str(folder), dtype="bfloat16", prompts=rows, tokens=8, logprobs=True, **addresses)
            expected[family, dtype] = [reference(plain, service.session_address, rows, kind) for kind in (torch.float32, torch.bfloat16)]
        found, _ = run(list(jobs.values()), root)
        for key, answer in zip(jobs, found, strict=True):
            exact, rounded = expected[key]
            mine = torch.tensor([value for prompt in answer.get("logprobs", []) for value in prompt])
            errors = None if "error" in answer else [(values - exact).abs().median().item() for values in (mine, rounded)]
            answers[key] = answer, errors
    return answers


@pytest.mark.parametrize("family, dtype, attention", CHECKPOINTS)
def test_log_probabilities_are_as_near_as_those_of_transformers(engines, family, dtype, attention):
    if attention == "CompressedTensorsLinearMethod" and "avx512f" not in pathlib.Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM multiplies with INT4 weights of its own on processors with AVX-512 only")
    answer, errors = engines[family, dtype]
    assert "error" not in answer, answer
    assert answer["methods"] == {"qkv_proj": attention, "routed_experts": "RemoteExpertsMethod"}
    assert answer["expert_bytes"] == 0 and len(answer["tokens"][0]) == 8
    mine, theirs = errors
    # Both round rows to bf16, at different places.
    assert mine <= 3 * theirs + 0.02, errors
