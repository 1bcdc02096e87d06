"""Engines in processes of their own, one for many jobs, because starting vLLM takes most of a test's time."""

import json
import os
import pathlib
import subprocess
import sys

import expertd

HERE = pathlib.Path(__file__).parent


def serve(folder, ranks=2, **settings):
    """A service whose requests are smaller than what an engine sends at once, so that it has to split."""
    return expertd.serve(folder, ranks=ranks, max_tokens_per_step=64, max_tokens_per_request=40, **settings)


def run(jobs, folder, in_process=True, **environment):
    """Runs jobs of engine.py one after the other and returns their answers."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    whole = {
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "2",
        **environment,
    }
    done = subprocess.run(
        [sys.executable, HERE / "engine.py", folder / "jobs.json", folder / "answers.json"],
        env=whole,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return json.loads((folder / "answers.json").read_text()), done.stdout + done.stderr


def children(pid):
    lists = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for path in lists for child in path.read_text().split())
