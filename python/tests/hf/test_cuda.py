"""Models on a GPU whose experts are reached through a session in the GPU's memory."""

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
