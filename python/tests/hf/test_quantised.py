"""Quantised checkpoints: transformers dequantises what is local, and the service computes with the quantised experts."""

import subprocess

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from conftest_hf import expert_parameters, golden_script, greedy, prompts  # noqa: E402

import expertd  # noqa: E402
from expertd.transformers import remote_experts  # noqa: E402

# transformers finds no scales for granitemoe's stacked experts and refuses an FP8 gpt_oss. Llama 4 is quantised by
# compressed-tensors, which is a package of its own. Mistral 4 has no class for text alone that AutoModelForCausalLM knows.
NOT_FP8 = {"granitemoe", "gpt_oss", "llama4_text", "mistral4"}
CHECKPOINTS = [("gpt_oss", "mxfp4"), *((family, "fp8") for family in golden_script.FAMILIES if family not in NOT_FP8)]


def make(family, dtype, folder):
    """A random checkpoint of MoE blocks, and a function that loads it with everything local dequantised."""
    synth = [expertd.command(), "synth", "--family", family, "--dtype", dtype, "--out", str(folder)]
    subprocess.run([*synth, "--hidden", "128", "--width", "128"], check=True, capture_output=True)
    quantised = transformers.AutoConfig.from_pretrained(folder).quantization_config
    kind = {"fp8": transformers.FineGrainedFP8Config, "mxfp4": transformers.Mxfp4Config}[dtype]
    keep = {name: value for name, value in quantised.items() if name in ("modules_to_not_convert", "weight_block_size")}

    def load(dtype):
        config = kind(**keep, dequantize=True)
        return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)

    return load


@pytest.mark.parametrize(("family", "dtype"), CHECKPOINTS, ids="-".join)
def test_tokens_are_those_of_the_dequantised_model(tmp_path, family, dtype):
    """In float32 transformers dequantises without rounding, as the service does."""
    load = make(family, dtype, tmp_path / "model")
    local = load(torch.float32).float()
    with expertd.serve(tmp_path / "model", ranks=2, max_tokens_per_step=64) as service:
        for mode, address, session in (("experts", service.address, None), ("block", service.session_address, "host")):
            with remote_experts(address, mode=mode, session=session):
                remote = load(torch.float32).float()
            assert not expert_parameters(remote)
            # Both have drawn what is not in the checkpoint, such as attention.
            missing, _ = remote.load_state_dict(local.state_dict(), strict=False)
            assert not missing
            ids, mask = prompts(4)
            with torch.no_grad():
                expected = local(input_ids=ids, attention_mask=mask).logits
                found = remote(input_ids=ids, attention_mask=mask).logits
            assert (found - expected)[mask.bool()].abs().max() <= 1e-4
            assert torch.equal(greedy(remote, ids, mask), greedy(local, ids, mask))


@pytest.mark.parametrize(("family", "dtype"), [("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4")])
def test_blocks_in_bf16_are_close(tmp_path, family, dtype):
    """In bf16 transformers rounds the local experts' weights and the service does not, so blocks are compared, not tokens."""
    load = make(family, dtype, tmp_path / "model")
    local = load(torch.bfloat16)
    with expertd.serve(tmp_path / "model", ranks=2) as service:
        for address, session in ((service.address, None), (service.session_address, "host")):
            with remote_experts(address, session=session):
                remote = load(torch.bfloat16)
            assert not expert_parameters(remote)
            for mine, theirs in zip(remote.model.layers, local.model.layers, strict=True):
                rows = torch.randn(1, 5, 128, dtype=torch.bfloat16)
                with torch.no_grad():
                    found, expected = mine.mlp(rows), theirs.mlp(rows)
                if isinstance(expected, tuple):
                    found, expected = found[0], expected[0]
                assert (found - expected).float().norm() / expected.float().norm() < 2e-2
