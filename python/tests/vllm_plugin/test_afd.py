"""The AFD plugin (vllm-project/afd-plugin) on a CPU, with a service in place of its FFN process: the tokens of stock vLLM."""

import contextlib
import importlib.util
import os
import pathlib
import re

import pytest

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("afd_plugin") is None:
    pytest.skip("these tests need vLLM 0.26.0 and its AFD plugin (docs/vllm.md)", allow_module_level=True)

from conftest_engine import run, serve
from models import AFD_FAMILIES, make_checkpoint, prompts

HERE = pathlib.Path(__file__).parent
TOKENS = 24
# vLLM's latent attention has no kernels for processors.
ENVIRONMENT = {"VLLM_MLA_DISABLE": "1", "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}


def options(**changes):
    """An engine's options that choose the connector."""
    afd = {"connector": "ExpertdAFDConnector", "role": "attention", "compute_gate_on_attention": True, **changes}
    return dict(worker_cls="afd_on_cpu.Worker", additional_config=dict(afd=afd))


class Engines:
    """What vLLM answered for each family with its own experts, and with experts at a service."""

    def __init__(self, folder, services):
        self.folder, self.prompts = folder, prompts()
        self.folders = {family: folder / family for family in AFD_FAMILIES}
        for family, checkpoint in self.folders.items():
            make_checkpoint(family, checkpoint, **AFD_FAMILIES[family])
        make_checkpoint("deepseek_v2", folder / "other", **AFD_FAMILIES["deepseek_v2"])
        self.services = {family: services.enter_context(serve(path)) for family, path in self.folders.items()}
        local, _ = self.run([self.job(family, None) for family in AFD_FAMILIES])
        self.local = dict(zip(AFD_FAMILIES, local, strict=True))
        v2, v3 = (self.services[family] for family in ("deepseek_v2", "deepseek_v3"))
        jobs = {(family, None): self.job(family, s.address, options()) for family, s in self.services.items()}
        jobs |= {
            (family, "host"): self.job(family, s.session_address, options(), session="host") for family, s in self.services.items()
        }
        jobs["killed"] = self.job("deepseek_v3", v3.address, options(), kill_at=7, service_pid=v3.process.pid)
        jobs["another model"] = self.job("deepseek_v2", v3.address, options())
        jobs["other weights"] = {**jobs["deepseek_v2", None], "folder": str(folder / "other")}
        jobs["dense layers"] = self.job("deepseek_v2", v2.address, options(compute_gate_on_attention=False))
        jobs["extra"] = self.job("deepseek_v2", v2.address, options(connector_extra_config=dict(address="a:1")))
        jobs["another connector"] = self.job("deepseek_v2", v2.address, options(connector="CAMP2pAFDConnector"))
        remote, self.log = self.run(list(jobs.values()))
        self.remote = dict(zip(jobs, remote, strict=True))

    def run(self, jobs):
        return run(jobs, self.folder, **ENVIRONMENT)

    def job(self, family, address, options=None, **more):
        folder = str(self.folders[family])
        return dict(folder=folder, address=address, prompts=self.prompts, tokens=TOKENS, options=options or {}, **more)


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    with contextlib.ExitStack() as services:
        yield Engines(tmp_path_factory.mktemp("afd"), services)


@pytest.mark.parametrize("session", [None, "host"])
@pytest.mark.parametrize("family", list(AFD_FAMILIES))
def test_tokens_are_those_of_stock_vllm(engines, family, session):
    local, remote = engines.local[family], engines.remote[family, session]
    assert "error" not in local and "error" not in remote, (local, remote)
    assert local["expert_bytes"] > 0 and remote["expert_bytes"] == 0
    assert remote["tokens"] == local["tokens"]
    # The first layer is dense and stays in the engine.
    assert sum(remote["calls"]) == sum(len(prompt) + TOKENS - 1 for prompt in engines.prompts)


def test_generation_goes_on_when_a_rank_is_killed(engines):
    assert engines.remote["killed"].get("tokens") == engines.local["deepseek_v3"]["tokens"], engines.remote["killed"]
    assert engines.services["deepseek_v3"].client().model().generation > 1


@pytest.mark.parametrize(
    "job, words",
    [
        ("another model", "family deepseek_v3, and vLLM's of deepseek_v2"),
        ("other weights", "EXPERTD_CHECK_WEIGHTS=0"),
        ("dense layers", "compute_gate_on_attention=false the plugin sends rows of dense layers"),
        ("extra", r"connector_extra_config has \['address'\]"),
    ],
)
def test_refusals_reach_the_caller(engines, job, words):
    assert re.search(words, engines.remote[job]["error"])


def test_another_connector_is_not_taken_for_this_one(engines):
    assert "error" in engines.remote["another connector"]
