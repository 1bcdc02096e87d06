"""vLLM on a CPU with several processes, and with adapters: the same greedy tokens as without a service."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("these tests need a distribution of vLLM (docs/vllm.md)", allow_module_level=True)

from adapters import make_adapter
from conftest_engine import serve
from models import make_checkpoint, prompts

HERE = pathlib.Path(__file__).parent
LORA = dict(enable_lora=True, max_lora_rank=8, lora_target_modules=["qkv_proj", "o_proj"])


class Engine:
    """A checkpoint, an adapter of its attention, a service, and the tokens of stock vLLM."""

    def __init__(self, folder, service):
        self.folder, self.service, self.prompts = folder, service, prompts()

    def run(self, address, adapter=None, checkpoint="model", **options):
        folder = str(self.folder / checkpoint)
        job = dict(folder=folder, address=address, prompts=self.prompts, tokens=16, options=options, adapter=adapter)
        (self.folder / "job.json").write_text(json.dumps(job))
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, HERE / "engine_parallel.py", self.folder / "job.json", self.folder / "answer.json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-8000:]
        return json.loads((self.folder / "answer.json").read_text()), done.stdout + done.stderr


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    make_checkpoint("qwen2_moe", folder / "model")
    make_adapter(folder / "model", folder / "adapter", folder / "merged")
    with serve(folder / "model") as service:
        made = Engine(folder, service)
        made.stock, _ = made.run(None)
        yield made


@pytest.mark.parametrize("options", [dict(tensor_parallel_size=2), dict(data_parallel_size=2)], ids=lambda options: next(iter(options)))
def test_processes_share_a_service(engine, options):
    """The model has shared experts, which tensor-parallel ranks compute in parts."""
    answer, log = engine.run(engine.service.address, **options)
    assert answer.get("tokens") == engine.stock["tokens"], (answer, log[-4000:])


def test_adapters_of_attention_run_beside_remote_experts(engine):
    """Stock vLLM computes experts beside adapters with Triton, so that it gets a checkpoint that contains the adapter."""
    stock, log = engine.run(None, checkpoint="merged")
    assert "tokens" in stock and stock["tokens"] != engine.stock["tokens"], (stock, log[-4000:])
    answer, log = engine.run(engine.service.address, str(engine.folder / "adapter"), **LORA)
    assert answer.get("tokens") == stock["tokens"], (answer, log[-4000:])


def test_adapters_of_everything_are_refused(engine):
    answer, log = engine.run(engine.service.address, enable_lora=True, max_lora_rank=8)
    assert "LoRA on experts" in answer["error"] + log
