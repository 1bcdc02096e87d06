"""Two engines on one service at once: each has the tokens that it has alone, whatever happens to the service or to the other one."""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("these tests need a distribution of vLLM (docs/vllm.md)", allow_module_level=True)

import torch
import transformers
from conftest_engine import children, run, serve
from models import make_checkpoint, prompts

from expertd.transformers import remote_experts

HERE = pathlib.Path(__file__).parent
TOKENS = 24


class Engine:
    """A process that generates in rounds until it is killed."""

    def __init__(self, folder, name, service, prompts, session=None, gate=""):
        self.rounds, self.log = folder / f"{name}.jsonl", folder / f"{name}.log"
        address = service.session_address if session else service.address
        job = dict(
            folder=str(folder / "model"), address=address, session=session, prompts=prompts, tokens=TOKENS, parent=os.getpid(),
        )
        (folder / f"{name}.json").write_text(json.dumps(job))
        self.rounds.write_text("")
        environment = {
            **os.environ,
            # The plugin is loaded with the engine, and needs the variable for that.
            "EXPERTD_ADDRESS": address,
            "EXPERTD_GATE": gate,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
        }
        with open(self.log, "w") as log:
            command = [sys.executable, HERE / "engine_beside.py", folder / f"{name}.json", self.rounds]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def tokens(self):
        """Every prompt's tokens, in each round that is done."""
        text = self.rounds.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def kill(self):
        self.process.kill()
        self.process.wait()


def wait_for_rounds(*engines, more=2, seconds=300):
    """Returns when each of them has done `more` rounds from now on, so that at least one of these began after now."""
    until, wanted = time.monotonic() + seconds, [(engine, len(engine.tokens()) + more) for engine in engines]
    while any(len(engine.tokens()) < rounds for engine, rounds in wanted):
        for engine in engines:
            assert engine.process.poll() is None, engine.log.read_text()[-8000:]
        assert time.monotonic() < until, [(len(engine.tokens()), engine.log.read_text()[-2000:]) for engine in engines]
        time.sleep(0.05)


def sessions(service):
    """How many sessions the service has."""
    with urllib.request.urlopen(service.metrics_url, timeout=10) as page:
        found = re.search(r"^expertd_sessions (\S+)$", page.read().decode(), re.M)
    return int(found[1]) if found else 0


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A checkpoint's folder, the prompts of two engines, and the tokens that stock vLLM has for them."""
    folder = tmp_path_factory.mktemp("at-once")
    make_checkpoint("qwen3_moe", folder / "model")
    asked = [prompts(), prompts()]
    answers, _ = run([dict(folder=str(folder / "model"), prompts=one, tokens=TOKENS) for one in asked], folder)
    assert all("tokens" in answer for answer in answers), answers
    return folder, asked, [answer["tokens"] for answer in answers]


@pytest.fixture
def start(stock):
    """`start(service, number, **options)`: an engine with the prompts of this number."""
    folder, asked, _ = stock
    with contextlib.ExitStack() as running:

        def of(service, number, **options):
            engine = Engine(folder, f"engine-{number}", service, asked[number], **options)
            running.callback(engine.kill)
            return engine

        yield of


WAYS = {
    "grpc-host": (dict(), dict(session="host")),
    "host-host": (dict(session="host"), dict(session="host")),
    "grpc-gate": (dict(), dict(gate="service")),
}


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS.keys())
def test_each_has_its_own_tokens_whatever_happens(stock, start, ways):
    folder, _, expected = stock
    with serve(folder / "model") as service:
        pair = [start(service, number, **options) for number, options in enumerate(ways)]
        # Afterwards both are at work.
        wait_for_rounds(*pair, more=1)
        wait_for_rounds(*pair)
        before = service.client().model().generation
        os.kill(children(service.process.pid)[-1], signal.SIGKILL)
        wait_for_rounds(*pair)
        assert service.client().model().generation > before
        pair[0].kill()
        wait_for_rounds(pair[1])
        found = [engine.tokens() for engine in pair]
        for rounds, tokens in zip(found, expected, strict=True):
            assert all(one == tokens for one in rounds)
        # What the engine that was killed held is freed.
        left = sum("session" in options for options in ways[1:])
        until = time.monotonic() + 300
        while sessions(service) != left:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_transformers_beside_vllm(stock, start):
    folder, asked, expected = stock
    load = transformers.AutoModelForCausalLM.from_pretrained
    with serve(folder / "model") as service:
        engine = start(service, 0, session="host")
        with remote_experts(service.session_address, session="host"):
            model = load(folder / "model", dtype=torch.float32)
        wait_for_rounds(engine, more=1)
        before = len(engine.tokens())
        rounds = 0
        while len(engine.tokens()) < before + 2:
            assert engine.process.poll() is None, engine.log.read_text()[-8000:]
            for prompt, tokens in zip(asked[1], expected[1], strict=True):
                out = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
                assert out[0, len(prompt) :].tolist() == tokens
            rounds += 1
        print(f"rounds {len(engine.tokens()) - before} of vLLM, {rounds} of transformers")
        assert all(one == expected[0] for one in engine.tokens())
