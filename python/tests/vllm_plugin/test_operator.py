"""The operator through which vLLM's layers call a service. These tests need torch, and no vLLM."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the operator of expertd.vllm is one of torch")

import expertd  # noqa: E402
from conftest import recorded  # noqa: E402
from expertd._engines.connection import connect, number_of  # noqa: E402
from expertd._engines.settings import Settings  # noqa: E402
from expertd.vllm._connection import vllm_experts  # noqa: E402
from expertd.vllm._guard import guard_outputs  # noqa: E402



@pytest.fixture
def layer(golden):
    """The connection's number, the first layer, and random rows, ids and weights for it."""
    service = golden("qwen3_moe").service
    number, remote = connect(Settings(service.address), guard_outputs)
    assert connect(Settings(service.address), guard_outputs) == (number, remote)
    served = remote.model.moe_layers[0]
    tokens = 11
    rows = torch.randn(tokens, remote.model.hidden)
    ids = torch.stack([torch.randperm(served.num_experts)[: served.top_k] for _ in range(tokens)]).int()
    return number, served.layer, rows, ids, torch.rand(tokens, served.top_k), service


@pytest.mark.parametrize("session", [None, "host"])
def test_a_service_that_is_missing_is_told_with_the_variables_to_set(session):
    with pytest.raises(expertd.ConnectError, match="nothing-here.sock") as failed:
        connect(Settings("unix:/nothing-here.sock", session=session), guard_outputs)
    [note] = failed.value.__notes__
    assert f"EXPERTD_ADDRESS (here 'unix:/nothing-here.sock'), session= is EXPERTD_SESSION (here {session})" in note


def test_the_operator_applies_the_given_routing_without_shared_experts(layer):
    number, index, rows, ids, weights, service = layer
    with service.client() as client:
        answer = client.forward(index, rows, topk_ids=ids, topk_weights=weights, shared_experts="exclude")
    found = vllm_experts(rows, ids, weights, number, index)
    assert found.dtype == rows.dtype and found.shape == rows.shape
    np.testing.assert_allclose(found.numpy(), np.asarray(answer.rows), rtol=1e-5, atol=1e-6)
    assert vllm_experts(rows[:0], ids[:0], weights[:0], number, index).shape == (0, rows.shape[1])


def test_without_a_choice_the_services_gate_chooses(layer):
    number, index, rows, _, _, service = layer
    with service.client() as client:
        answer = client.forward(index, rows, shared_experts="exclude")
    np.testing.assert_allclose(vllm_experts(rows, None, None, number, index).numpy(), np.asarray(answer.rows), rtol=1e-5, atol=1e-6)


def test_rows_without_experts_get_zero(layer):
    """Padding rows: ids −1, and whatever weights."""
    number, index, rows, ids, weights, _ = layer
    expected = vllm_experts(rows, ids, weights, number, index)
    ids[3:5], weights[3:5] = -1, 0.5
    found = vllm_experts(rows, ids, weights, number, index)
    assert torch.count_nonzero(found[3:5]) == 0
    kept = [n for n in range(rows.shape[0]) if n not in (3, 4)]
    torch.testing.assert_close(found[kept], expected[kept])


def test_large_batches_are_split(layer):
    number, index, rows, ids, weights, service = layer
    with expertd.serve(recorded("qwen3_moe"), ranks=1, max_tokens_per_step=8, max_tokens_per_request=4) as small:
        # vLLM names compiled graphs by the number, before and after the connection is made.
        expected = number_of(Settings(small.address))
        other, remote = connect(Settings(small.address), guard_outputs)
        assert other == expected == number_of(Settings(small.address)) and number_of(Settings(service.address)) == number != other
        assert remote.model.limits.max_tokens_per_request < rows.shape[0]
        found = vllm_experts(rows, ids, weights, other, index)
    torch.testing.assert_close(found, vllm_experts(rows, ids, weights, number, index))


def test_the_fake_implementation_has_the_shape_of_the_real_one(layer):
    number, index, rows, ids, weights, _ = layer
    torch.library.opcheck(vllm_experts, (rows, ids, weights, number, index))
    torch.library.opcheck(vllm_experts, (rows, None, None, number, index))
