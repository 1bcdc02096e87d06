"""64 requests in vLLM on a CPU while ranks fail and services change: none fails, and their tokens are those of stock vLLM."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("these tests need a distribution of vLLM (docs/vllm.md)", allow_module_level=True)

from models import make_checkpoint, prompts

HERE = pathlib.Path(__file__).parent
FAULTS = ["kill_rank", "stop_rank", "reload"]


@pytest.mark.parametrize("services, session, events", [(1, "host", FAULTS), (2, None, [*FAULTS, "upgrade"])], ids=["host", "replicas"])
def test_requests_do_not_see_faults_reloads_and_upgrades(tmp_path, services, session, events):
    folder = tmp_path
    make_checkpoint("qwen3_moe", folder / "model")
    job = dict(
        folder=str(folder / "model"), sockets=str(folder), services=services, session=session, events=events,
        prompts=[prompt for _ in range(16) for prompt in prompts()], tokens=48,
    )
    (folder / "job.json").write_text(json.dumps(job))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, HERE / "engine_events.py", folder / "job.json", folder / "answer.json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-8000:]
    answer = json.loads((folder / "answer.json").read_text())
    assert "error" not in answer, (answer, (done.stdout + done.stderr)[-4000:])
    [expected] = answer["stock"]["rounds"]
    for event in ["undisturbed", *events]:
        assert all(found == expected for found in answer[event]["rounds"]), event
        print(f"{event}: the longest pause between two tokens of a request was {answer[event]['pause']:.2f} s")
    for fault in {"kill_rank", "stop_rank"} & set(events):
        before, after = answer[fault]["generations"]
        assert after[0] > before[0], fault
