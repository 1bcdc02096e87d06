"""The programs in loadtest/peers/engines, with a stand-in for the engine: no process outlives them, and no cell holds up the others."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import checkpoint
import jobs
import numpy as np
import processes
import pytest
import tokens
from safetensors import safe_open

import expertd

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "loadtest/peers/engines"


def side(*sequences, spread=0.5):
    """Tokens, with log-probabilities that make each of them the likeliest and the next number the second."""
    likely = [[{str(token): -1.0, str(token + 1): -1.0 - spread} for token in sequence] for sequence in sequences]
    return {"tokens": [list(sequence) for sequence in sequences], "logprobs": likely}


def test_equal_tokens_have_no_differences():
    found = tokens.compare(side([3, 5], [4, 4]), side([3, 5], [4, 4]))
    assert found == {"sequences": 2, "equal": 2, "ties": 0, "differences": [], "largest_error": 0.0}


@pytest.mark.parametrize("spread, tie", [(0.0, True), (2.0**-5, True), (0.04, False)])
def test_a_first_difference_says_whether_stock_had_a_tie_there(spread, tie):
    found = tokens.compare(side([3, 5, 7], [4, 4, 4], spread=spread), side([3, 6, 9], [4, 4, 4]))
    [here] = found["differences"]
    assert (here["sequence"], here["step"], here["tie"], here["is_stocks_second"]) == (0, 1, tie, True)
    assert (here["stock_gap"], here["gap"], found["equal"], found["ties"]) == (spread, 0.5, 1, int(tie))
    assert not tokens.compare(side([3, 5]), side([3, 9]))["differences"][0]["is_stocks_second"]


def test_errors_count_up_to_the_first_difference_only():
    other = side([3, 6, 7])
    other["logprobs"][0][0]["3"], other["logprobs"][0][2]["7"] = -1.25, -9.0
    assert tokens.compare(side([3, 5, 7]), other)["largest_error"] == 0.25


def test_fewer_tokens_or_sequences_are_not_equal():
    assert tokens.compare(side([3, 5]), side([3]))["differences"] == [{"sequence": 0, "step": 1}]
    with pytest.raises(ValueError, match="2 sequences"):
        tokens.compare(side([3], [4]), side([3]))


def lives(pid):
    try:
        return "State:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until(true, seconds=120):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


# Ignores SIGTERM, and has a child in a session of its own that does so as well.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("grace", [0.0, 0.3])
def test_children_and_theirs_are_killed(tmp_path, grace):
    children = processes.Children(tmp_path)
    child = children.start("stubborn", [sys.executable, "-c", STUBBORN])
    wait_until(lambda: child.text().endswith("\n"))
    grandchild = int(child.text())
    assert lives(child.pid) and lives(grandchild)
    children.end(child, grace)
    assert child.status() == -signal.SIGKILL and children.all == []
    wait_until(lambda: not lives(grandchild))


def test_a_command_that_takes_too_long_or_fails_is_told_with_its_output(tmp_path):
    children = processes.Children(tmp_path)
    with pytest.raises(SystemExit, match="(?s)did not end within 10 s.*begun"):
        children.run("slow", ["sh", "-c", "echo begun; sleep 100"], 10)
    with pytest.raises(SystemExit, match="(?s)failed with 3:.*why"):
        children.run("fails", ["sh", "-c", "echo why; exit 3"], 120)
    assert "EXPERTD_ADDRESS" not in children.run("variables", ["env"], 120, EXPERTD_GATE=None)
    assert children.all == []


def test_a_checkpoint_of_another_shape_is_not_used(tmp_path):
    config = checkpoint.config_of("tiny", 2, 8192)
    assert not checkpoint.whole(tmp_path, config)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(SystemExit, match="has another checkpoint"):
        checkpoint.whole(tmp_path, config)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not checkpoint.whole(tmp_path, config), "without its index a checkpoint is not whole"
    (tmp_path / checkpoint.INDEX).write_text("{}")
    assert checkpoint.whole(tmp_path, config)
    (tmp_path / checkpoint.INDEX).unlink()
    with pytest.raises(SystemExit, match="num_hidden_layers 2 instead of 3"):
        checkpoint.whole(tmp_path, checkpoint.config_of("tiny", 3, 8192))


# An engine that takes a millisecond a step, hangs in the batch 7, and is killed in the batch 9.
ENGINE = """
import os, signal, sys, time
sys.path.insert(0, {folder!r})
import cells
from jobs import Run, serve_job

class Engine:
    version = "0"
    def __init__(self, job):
        if {broken!r}:
            raise RuntimeError("no such engine")
    def run(self, prompts, tokens, logprobs=None, at_half=None):
        drawn = [[sum(prompt) % 100 + step for step in range(tokens)] for prompt in prompts]
        return Run(drawn, [[{{str(token): -1.0, "0": -2.0}} for token in one] for one in drawn])
    def decode(self, prompts, tokens):
        if len(prompts) == 7:
            time.sleep(1000)
        if len(prompts) == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.001 * len(prompts)
    def prefill(self, prompts):
        return 0.5

if sys.argv[1] == "--job":
    serve_job(sys.argv[2], Engine)
args = cells.parser("").parse_args()
args.device, args.gate = "cpu", ["engine"]
cells.main(args, "stand-in", __file__, lambda job: {{}})
"""


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of the tiny shape with two layers."""
    folder = tmp_path / "checkpoint"
    config = checkpoint.config_of("tiny", 2, 8192)
    sizes = ["--hidden", config["hidden_size"], "--experts", config["num_experts"], "--top-k", config["num_experts_per_tok"]]
    sizes += ["--width", config["moe_intermediate_size"], "--layers", 2]
    command = [expertd.command(), "synth", "--family", "qwen3_moe", "--out", folder, *sizes]
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
    [file] = folder.glob("*.safetensors")
    with safe_open(file, "np") as tensors:
        places = dict.fromkeys(tensors.keys(), file.name)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / checkpoint.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def test_ranks_are_found_and_steps_counted(folder):
    # No generation ends because the machine is busy.
    with expertd.serve(folder, ranks=2, liveness_timeout_ms=30_000) as service, service.client() as client:
        url, router = service.metrics_url, service.process.pid
        before, rows = processes.figures_of(url), np.ones((3, 128), np.float32)
        client.forward(1, rows)
        expected = {"rows": before["rows"] + 3, "steps": before["steps"] + 1, "generation": before["generation"]}
        wait_until(lambda: processes.figures_of(url) == expected)
        first, second = (processes.rank_of(router, rank) for rank in (0, 1))
        assert None not in (first, second) and first != second and processes.rank_of(router, 2) is None
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: processes.figures_of(url)["generation"] == before["generation"] + 1)
        client.forward(1, rows)
        assert processes.rank_of(router) not in (None, first)


class Caller:
    """An engine whose tokens follow from the service's answers."""

    def __init__(self, client):
        self.client = client

    def run(self, prompts, tokens, logprobs=None, at_half=None):
        found, rows = jobs.Run([[] for _ in prompts]), np.array(prompts, np.float32)[:, :1] * np.ones((1, 128), np.float32)
        for step in range(tokens):
            answer = self.client.forward(step % 2, rows / np.abs(rows).max())
            rows = rows + np.asarray(answer.rows)
            for sequence, row in zip(found.tokens, rows):
                sequence.append(float(row.sum()))
            found.times.append((time.perf_counter(), len(prompts)))
            if at_half and step + 1 == tokens // 2:
                at_half()
        return found


@pytest.mark.parametrize("kind", processes.FAULTS)
def test_faults_strike_a_service_whose_answers_stay_the_same(folder, kind):
    with expertd.serve(folder, ranks=1, liveness_timeout_ms=2000) as service, service.client() as client:
        before = processes.figures_of(service.metrics_url)["generation"]
        job = dict(seed=5, vocabulary=100, prompt=1, tokens=400, service_pid=service.process.pid, admin_address=service.admin_address)
        found = jobs.fault(Caller(client), job, {"id": f"{kind}-3", "kind": kind, "batch": 3})
        assert found["equal"] == found["sequences"] == 3 * found["runs"] and found["all_tokens"]
        assert processes.figures_of(service.metrics_url)["generation"] > before
        # A rank that is stopped counts as lost after the timeout, and the calls wait for that.
        assert kind != "stop" or found["pause_ms"] > 1800


def test_intervals_begin_with_the_output_that_has_so_many_tokens():
    run = jobs.Run([], times=[(0.0, 2), (1.0, 2), (3.0, 1), (7.0, 1)])
    assert (jobs.intervals(run), jobs.intervals(run, 4), jobs.intervals(run, 5)) == ([1.0, 2.0, 4.0], [2.0, 4.0], [4.0])


@pytest.fixture
def compare(folder, tmp_path):
    """`compare(batches, broken)`: the command that runs stock with the stand-in."""

    def command(batches, broken=False):
        script = tmp_path / "engine.py"
        script.write_text(textwrap.dedent(ENGINE).format(folder=str(FOLDER), broken=broken))
        made = [sys.executable, script, "--checkpoint", folder, "--shape", "tiny", "--layers", "2", "--logs", tmp_path / "logs"]
        return [*made, "--mode", "stock", "--prompt", "4", "--tokens", "4", "--repeat", "2", "--batch", *map(str, batches)]

    return command


def lines_of(text):
    return {line["cell"]: line for line in map(json.loads, (t for t in text.splitlines() if t.startswith("{"))) if "cell" in line}


def test_cells_that_hang_or_crash_are_told_and_the_others_go_on(compare):
    done = subprocess.run([*compare([1, 7, 9, 3]), "--limit", "20"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stderr
    found = lines_of(done.stdout)
    assert list(found) == ["decode-1", "decode-7", "decode-9", "decode-3", "prefill-64", "tokens-8"]
    assert "no end within 20 s" in found["decode-7"]["error"] and found["decode-7"]["cut_off"]
    assert f"status {-signal.SIGKILL}" in found["decode-9"]["error"]
    assert (found["decode-3"]["median_ms"], found["decode-3"]["tokens_per_second"], found["prefill-64"]["median_ms"]) == (3.0, 1000.0, 500.0)
    assert found["tokens-8"]["equal_to_itself"] == 8
    assert "| stock | 1.00 (1.00 to 1.00) | - | - | 3.00 (3.00 to 3.00) | 500.00 (500.00 to 500.00) |" in done.stdout


def test_an_engine_that_does_not_start_fails_all_its_cells_at_once(compare):
    done = subprocess.run(compare([1, 3], broken=True), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    found = lines_of(done.stdout)
    assert len(found) == 4 and all("does not start: RuntimeError: no such engine" in line["error"] for line in found.values())


def test_an_engine_that_never_calls_the_service_cannot_pass_for_one_that_does(compare):
    command = [*compare([1]), "--mode", "apart", "--prefill", "0", "--compare", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stderr
    assert "the service computed no rows" in lines_of(done.stdout)["decode-1"]["error"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_engine_too(compare, tmp_path, number):
    # Shells let jobs in the background ignore SIGINT, which children inherit.
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    running = subprocess.Popen(compare([1, 7]), stdout=subprocess.PIPE, text=True, preexec_fn=heed)
    engines, results = tmp_path / "logs/stock-engine-0-0.jsonl", tmp_path / "logs/cells.jsonl"
    wait_until(lambda: engines.exists() and "decode-7" in engines.read_text() and "decode-1" in results.read_text())
    [engine] = processes.children_of(running.pid)
    os.kill(running.pid, number)
    text, _ = running.communicate(timeout=300)
    wait_until(lambda: not lives(engine))
    assert running.returncode != 0
    assert number == signal.SIGKILL or "| stock | 1.00 (1.00 to 1.00)" in text, "what was measured is printed"
