"""transformers' own ways in: `experts_implementation="expertd"`, and continuous batching."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from conftest_hf import expert_parameters, greedy, prompts  # noqa: E402

import expertd  # noqa: E402
from expertd._torch import Remote  # noqa: E402
from expertd.transformers import remote_experts  # noqa: E402

load = transformers.AutoModelForCausalLM.from_pretrained


def small():
    """A cache of 16 blocks; without limits it takes most of the memory."""
    configuration = pytest.importorskip("transformers.generation.configuration_utils")
    return configuration.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)


def greedy_config(tokens):
    return transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)


SESSIONS = pytest.mark.parametrize("session", [None, "host"], ids=["grpc", "host"])


def way(service, session):
    """The service's address for this way to it."""
    return service.session_address if session else service.address


@SESSIONS
def test_a_name_of_transformers_stands_for_the_service_at_expertd_address(served, monkeypatch, session):
    folder, service = served("qwen3_moe")
    local = load(folder, dtype=torch.float32)
    monkeypatch.delenv("EXPERTD_ADDRESS", raising=False)
    with pytest.raises(expertd.UnsupportedError, match="set EXPERTD_ADDRESS"):
        load(folder, experts_implementation="expertd")
    monkeypatch.setenv("EXPERTD_ADDRESS", way(service, session))
    monkeypatch.setenv("EXPERTD_GATE", "service")
    with pytest.raises(expertd.UnsupportedError, match="EXPERTD_GATE=service is for vLLM and SGLang.*mode=\"block\""):
        load(folder, experts_implementation="expertd")
    monkeypatch.delenv("EXPERTD_GATE")
    monkeypatch.setenv("EXPERTD_SESSION", session or "")
    remote = load(folder, dtype=torch.float32, experts_implementation="expertd")
    assert not expert_parameters(remote)
    ids, mask = prompts(4)
    assert torch.equal(greedy(remote, ids, mask), greedy(local, ids, mask))
    # Without the name the variable alone changes nothing.
    assert expert_parameters(load(folder))


def test_experts_that_are_here_already_do_not_become_remote(served):
    folder, _ = served("qwen3_moe")
    local = load(folder, dtype=torch.float32)
    local.set_experts_implementation("expertd")
    ids, mask = prompts(1)
    with pytest.raises(expertd.UnsupportedError, match="holds its weights in this process"):
        local(input_ids=ids, attention_mask=mask)


@SESSIONS
def test_continuous_batching_gives_the_tokens_of_the_local_model(served, session):
    folder, service = served("qwen3_moe")
    local = load(folder, dtype=torch.float32)
    with remote_experts(way(service, session), session=session):
        remote = load(folder, dtype=torch.float32)
    inputs = [torch.randint(3, local.config.vocab_size, (length,)).tolist() for length in (3, 9, 17, 5)]
    answers = []
    for model in (local, remote):
        found = model.generate_batch(inputs, generation_config=greedy_config(12), continuous_batching_config=small())
        answers.append([found[key].generated_tokens for key in sorted(found)])
    assert [len(tokens) for tokens in answers[0]] == [12] * len(inputs)
    assert answers[1] == answers[0]


def test_a_call_that_fails_in_continuous_batching_fails_its_requests(served, monkeypatch):
    folder, service = served("qwen3_moe")
    with remote_experts(service.address):
        remote = load(folder, dtype=torch.float32)
    calls, forward = [], Remote.forward

    def failing(*args, **options):
        calls.append(args)
        if len(calls) > 11:
            raise expertd.UnavailableError("the service is gone", code="UNAVAILABLE")
        return forward(*args, **options)

    monkeypatch.setattr(Remote, "forward", failing)
    found = remote.generate_batch([[3, 4, 5], [6, 7, 8, 9]], generation_config=greedy_config(12), continuous_batching_config=small())
    assert [answer.error for answer in found.values()] == ["the service is gone"] * 2
    assert all(len(answer.generated_tokens) < 12 for answer in found.values())
