"""Models on a GPU whose experts are reached through a session in the GPU's memory."""

import functools
import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from conftest_hf import expert_parameters, greedy, make_checkpoint, prompts  # noqa: E402

import expertd  # noqa: E402
from expertd.transformers import remote_experts  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and a service with GPU ranks")


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_models_on_a_gpu_generate_what_grpc_gives(tmp_path, family):
    """Through gRPC and through the session the same ranks compute, so that the tokens are the same."""
    make_checkpoint(family, tmp_path)
    device = {"": torch.cuda.device_count() - 1}
    with expertd.serve(tmp_path, device="cuda", ranks=1) as service:
        for mode in ("block", "experts"):
            models = []
            for address, session in ((service.address, None), (service.session_address, "cuda")):
                with remote_experts(address, mode=mode, session=session):
                    models.append(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, device_map=device))
            grpc, cuda = models
            assert not expert_parameters(cuda)
            for batch in (1, 4):
                ids, mask = (tensor.to(cuda.device) for tensor in prompts(batch))
                with torch.no_grad():
                    expected = grpc(input_ids=ids, attention_mask=mask).logits
                    found = cuda(input_ids=ids, attention_mask=mask).logits
                assert (found - expected)[mask.bool()].abs().max() <= 1e-4
                expected = greedy(grpc, ids, mask)
                assert torch.equal(greedy(cuda, ids, mask), expected)


@pytest.mark.parametrize("mode", ["block", "experts"])
def test_a_static_cache_compiles_the_model_into_graphs(tmp_path, mode):
    """With a static cache, `generate` compiles the decode step, and captures it in CUDA graphs."""
    make_checkpoint("qwen3_moe", tmp_path)
    device = {"": torch.cuda.device_count() - 1}
    with expertd.serve(tmp_path, device="cuda", ranks=1) as service:
        with remote_experts(service.session_address, mode=mode, session="cuda"):
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, device_map=device)
        ids, mask = (tensor.to(model.device) for tensor in prompts(4))
        expected = greedy(model, ids, mask)
        # Compiled attention rounds differently, which may change a token and those that follow it.
        found = greedy(model, ids, mask, cache_implementation="static")
        assert (found == expected).float().mean() > 0.9


def test_a_quarter_of_the_experts_in_slots(tmp_path):
    """A mixed group gives the local model's tokens. Where a sequence differs first, the local model's own rounding could decide."""
    hidden, experts, layers, width = 512, 32, 4, 256
    sizes = {"hidden_size": hidden, "num_experts": experts, "num_hidden_layers": layers, "moe_intermediate_size": width, "head_dim": 64, "vocab_size": 1024}
    make_checkpoint("qwen3_moe", tmp_path, dtype=torch.bfloat16, **sizes)
    placement = {"ranks": 2, "layers": [{"layer": layer, "experts": [[0], list(range(1, experts))]} for layer in range(layers)]}
    (tmp_path / "placement.json").write_text(json.dumps(placement))
    slots = f"{(experts // 4) * layers * 3 * hidden * width * 2 // 2**20}MiB"
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, tmp_path, device_map={"": 0})
    local, exact = load(dtype=torch.bfloat16), load(dtype=torch.float32)
    settings = {"device": "cuda,cpu", "ranks": "1,1", "placement": tmp_path / "placement.json", "slot_memory": slots}
    with expertd.serve(tmp_path, **settings) as service:
        with remote_experts(service.session_address, session="cuda"):
            remote = load(dtype=torch.bfloat16)
        ids, mask = (tensor.to(remote.device) for tensor in prompts(16))
        expected, found = greedy(local, ids, mask), greedy(remote, ids, mask)
        for row in range(16):
            differs = (found[row] != expected[row]).nonzero()
            if len(differs) == 0:
                continue
            at = int(differs[0])
            visible = torch.cat([mask[row], torch.ones(at - ids.shape[1], dtype=mask.dtype, device=mask.device)])
            with torch.no_grad():
                rounded, right = (
                    model(input_ids=expected[None, row, :at], attention_mask=visible[None]).logits[0, -1].float() for model in (local, exact)
                )
            gap = right[expected[row, at]] - right[found[row, at]]
            assert gap <= 2 * (rounded - right).abs().max(), f"row {row}, token {at - ids.shape[1]}"
