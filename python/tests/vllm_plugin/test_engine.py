"""vLLM on a CPU: the same greedy tokens as with its own experts, and no experts in its memory."""

import contextlib
import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("these tests need a distribution of vLLM (docs/vllm.md)", allow_module_level=True)

from conftest_engine import run, serve
from models import FAMILIES, make_checkpoint, prompts

TOKENS = 24
# Families that are also tried through a session.
HOST = ["qwen3_moe", "mixtral", "gpt_oss"]
# Families whose gate the service can have.
GATE = ["qwen3_moe", "olmoe", "gpt_oss"]


class Engines:
    """What vLLM answered for each family with its own experts, and with experts at a service."""

    def __init__(self, folder, services):
        self.folder = folder
        self.folders = {family: folder / family for family in FAMILIES}
        for family, checkpoint in self.folders.items():
            make_checkpoint(family, checkpoint)
        self.prompts = prompts()
        self.services = {f: services.enter_context(serve(path)) for f, path in self.folders.items()}
        local, _ = run([self.job(f, None) for f in FAMILIES], folder)
        self.local = dict(zip(FAMILIES, local, strict=True))
        before = self.generation("qwen3_moe")
        jobs = {f: self.job(f, self.services[f].address) for f in FAMILIES}
        jobs |= {(f, "host"): self.job(f, self.services[f].session_address, session="host") for f in HOST}
        jobs |= {(f, "gate"): {**self.job(f, self.services[f].session_address, session="host"), "gate": "service"} for f in GATE}
        jobs |= {(f, "compared"): self.job(f, self.services[f].address, compare=True) for f in GATE}
        jobs["gate"] = self.job("glm4_moe", self.services["glm4_moe"].address, gate="service")
        killed = self.services["qwen3_moe"]
        jobs["killed"] = self.job("qwen3_moe", killed.address, kill_at=31, service_pid=killed.process.pid)
        jobs["another model"] = self.job("qwen3_moe", self.services["mixtral"].address)
        jobs["other weights"] = {**jobs["mixtral"], "folder": str(folder / "other")}
        make_checkpoint("mixtral", folder / "other")
        jobs["lora"] = self.job("mixtral", jobs["mixtral"]["address"], options=dict(enable_lora=True))
        drafts = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=1)
        jobs["ngram"] = self.job("mixtral", jobs["mixtral"]["address"], options=dict(speculative_config=drafts))
        remote, self.log = run(list(jobs.values()), folder)
        self.remote = dict(zip(jobs, remote, strict=True))
        self.generations = (before, self.generation("qwen3_moe"))

    def generation(self, family):
        return self.services[family].client().model().generation

    def job(self, family, address, **more):
        return dict(folder=str(self.folders[family]), address=address, prompts=self.prompts, tokens=TOKENS, **more)


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    with contextlib.ExitStack() as services:
        yield Engines(tmp_path_factory.mktemp("vllm"), services)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_tokens_are_those_of_stock_vllm(engines, family):
    local, remote = engines.local[family], engines.remote[family]
    assert "error" not in local and "error" not in remote, (local, remote)
    assert local["calls"] == [] and local["expert_bytes"] > 0
    assert remote["tokens"] == local["tokens"]
    # Logits that are NaN would give one token.
    assert len({token for tokens in remote["tokens"] for token in tokens}) > 4
    if family in HOST:
        through_session = engines.remote[family, "host"]
        assert through_session.get("tokens") == local["tokens"], through_session
        assert through_session["expert_bytes"] == 0 and through_session["calls"] == remote["calls"]
    assert [len(tokens) for tokens in remote["tokens"]] == [TOKENS] * len(engines.prompts)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_no_experts_are_held_and_every_layer_calls(engines, family):
    remote = engines.remote[family]
    assert remote["expert_bytes"] == 0
    layers = len(engines.services[family].client().model().moe_layers)
    # Each layer computes each token once: prompts whole, and all generated tokens except the last.
    rows = sum(len(prompt) + TOKENS - 1 for prompt in engines.prompts)
    assert sum(remote["calls"]) == layers * rows
    # Larger than what the service takes in one request, so it was split.
    assert max(remote["calls"]) > engines.services[family].client().model().limits.max_tokens_per_request
    # Requests run together: at the end each call has a row of every prompt.
    assert remote["calls"][-1] == len(engines.prompts)


@pytest.mark.parametrize("family", GATE)
def test_the_services_gate_chooses_as_vllms_does(engines, family):
    # Weights of an expert that only one side has chosen would differ by more.
    compared = engines.remote[family, "compared"]
    assert compared.get("difference", 1) < 1e-5, compared
    chosen = engines.remote[family, "gate"]
    assert chosen.get("tokens") == engines.local[family]["tokens"], chosen
    assert chosen["calls"] == engines.remote[family]["calls"] and chosen["expert_bytes"] == 0


def test_drafts_from_the_tokens_so_far_change_no_token(engines):
    drafted = engines.remote["ngram"]
    assert drafted.get("tokens") == engines.local["mixtral"]["tokens"], drafted
    # Steps check several tokens of a request at once, and some of them are wrong.
    assert sum(drafted["calls"]) > sum(engines.remote["mixtral"]["calls"])


def test_generation_goes_on_when_a_rank_is_killed(engines):
    killed = engines.remote["killed"]
    assert killed["tokens"] == engines.local["qwen3_moe"]["tokens"]
    before, after = engines.generations
    assert after > before


@pytest.mark.parametrize(
    "job, words",
    [
        ("another model", "family mixtral, and vLLM's of qwen3_moe"),
        ("other weights", "EXPERTD_CHECK_WEIGHTS=0"),
        ("lora", "LoRA"),
        ("gate", "needs a softmax gate"),
    ],
)
def test_refusals_reach_the_caller(engines, job, words):
    assert words in engines.remote[job]["error"]


@pytest.mark.parametrize("session", [None, "host"])
def test_an_engine_in_a_process_of_its_own(engines, session):
    """vLLM's default; the plugin is loaded in both processes. Compiled, as vLLM does by default, too."""
    service = engines.services["qwen3_moe"]
    address = service.session_address if session else service.address
    job = engines.job("qwen3_moe", address, session=session, eager=False)
    (answer,), log = run([job], engines.folder, in_process=False)
    assert answer.get("tokens") == engines.local["qwen3_moe"]["tokens"], (answer, log[-4000:])
    assert "The routed experts of 2 layers are served by" in log
