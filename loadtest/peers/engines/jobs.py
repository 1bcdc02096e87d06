"""The process of an engine: measures the cells of its job one after the other and writes a line for each.

An engine is an object with

    version                                  of the engine
    run(prompts, tokens, logprobs, at_half)  generates greedily and returns a Run; `at_half` is called once half of the tokens are there
    decode(prompts, tokens)                  seconds of a decode step of all prompts together, the mean of `tokens` steps
    prefill(prompts)                         seconds until each prompt has its first token
"""

import concurrent.futures
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field

import expertd
from processes import FAULTS, figures_of, rank_of


@dataclass
class Run:
    """What was generated.

    Attributes:
        tokens: of each sequence.
        logprobs: for each token of each sequence `{token: log-probability}` of the likeliest ones; empty unless asked for.
        times: when tokens arrived, `(seconds, number of tokens)`, from the beginning of the run.
    """

    tokens: list
    logprobs: list = field(default_factory=list)
    times: list = field(default_factory=list)


def prompts_of(job, cell, repetition, count):
    """Random prompts, the same ones in every mode."""
    draw = random.Random(f"{job['seed']} {cell['id']} {repetition}")
    return [draw.choices(range(3, job["vocabulary"]), k=job["prompt"]) for _ in range(count)]


def spread(seconds):
    """Median, smallest, largest and all times in milliseconds."""
    times = [round(1e3 * one, 4) for one in seconds]
    return {"median_ms": round(statistics.median(times), 4), "min_ms": min(times), "max_ms": max(times), "times_ms": times}


def decode(engine, job, cell):
    """The first repetition warms up: kernels are compiled and chosen for the batch."""
    batch = cell["batch"]
    found = [engine.decode(prompts_of(job, cell, number, batch), job["tokens"]) for number in range(job["repeat"] + 1)]
    result = spread(found[1:])
    return result | {"tokens_per_second": round(1e3 * batch / result["median_ms"], 1)}


def prefill(engine, job, cell):
    found = [engine.prefill(prompts_of(job, cell, number, cell["batch"])) for number in range(job["repeat"] + 1)]
    return spread(found[1:])


def tokens(engine, job, cell):
    """The tokens go to a file, for the comparison; the line says how many sequences are equal in a second run of this engine."""
    prompts = prompts_of(job, cell, 0, cell["batch"])
    first, second = (engine.run(prompts, job["tokens"], logprobs=2) for _ in range(2))
    with open(cell["file"], "w") as out:
        json.dump({"about": cell["about"], "tokens": first.tokens, "logprobs": first.logprobs}, out)
    return {"equal_to_itself": sum(a == b for a, b in zip(first.tokens, second.tokens, strict=True))}


def strike(job, kind):
    """What happens to the service: rank 0 is killed or stopped for ever, or the weights are loaded again."""
    if kind == "reload":
        command = [expertd.command(), "reload", "--admin", job["admin_address"]]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return
    pid = rank_of(job["service_pid"])
    if pid is None:
        raise RuntimeError(f"the service (process {job['service_pid']}) has no rank 0")
    os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def intervals(run, after=0):
    """Seconds between outputs, from the one on with which `after` tokens were there."""
    found, have = [], 0
    for (before, count), (now, _) in zip(run.times, run.times[1:]):
        have += count
        if have >= after:
            found.append(now - before)
    return found


def fault(engine, job, cell):
    """The service is struck once half of the tokens are there. Compares with the same prompts without a fault."""
    prompts = prompts_of(job, cell, 0, cell["batch"])

    def run(at_half=lambda: None):
        # Some engines say when tokens arrived only if something happens meanwhile.
        return engine.run(prompts, job["tokens"], at_half=at_half)

    whole = run()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        struck = []
        hits = [run(lambda: struck.append(pool.submit(strike, job, cell["kind"])))]
        if not struck:
            raise RuntimeError("the run ended before half of its tokens were there, so that nothing happened to the service")
        # A reload can take longer than a run.
        while not struck[0].done():
            hits.append(run())
        struck[0].result()
    later = intervals(hits[0], len(prompts) * job["tokens"] / 2) + [one for hit in hits[1:] for one in intervals(hit)]
    usual = intervals(whole)
    pairs = [pair for hit in hits for pair in zip(whole.tokens, hit.tokens)]
    return {
        "pause_ms": round(1e3 * max(later), 1) if later else None,
        "usual_ms": round(1e3 * statistics.median(usual), 3) if usual else None,
        "usual_pause_ms": round(1e3 * max(usual), 1) if usual else None,
        "runs": len(hits),
        "all_tokens": all(len(hit) == job["tokens"] for _, hit in pairs),
        "equal": sum(a == b for a, b in pairs),
        "sequences": len(pairs),
        "first_differences": [next((at for at, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), None) for a, b in pairs],
    }


def at_once(engine, job, cell):
    """Begins when the file `go` is there. When tokens arrived, on the clock that processes share, and how many sequences are as at the first time."""
    prompts = prompts_of(job, {"id": f"at-once-{cell['batch']}"}, 0, cell["batch"])
    while not os.path.exists(cell["go"]):
        time.sleep(0.001)
    begin = time.monotonic()
    run = engine.run(prompts, job["tokens"])
    if not os.path.exists(cell["file"]):
        with open(cell["file"], "w") as out:
            json.dump(run.tokens, out)
    with open(cell["file"]) as file:
        alone = json.load(file)
    return {
        "outputs": [(begin + at, count) for at, count in run.times],
        "equal": sum(a == b for a, b in zip(alone, run.tokens, strict=True)),
    }


KINDS = {"at-once": at_once, "decode": decode, "prefill": prefill, "tokens": tokens, **dict.fromkeys(FAULTS, fault)}


def measure(engine, job, cell):
    """A cell's figures. What the service computed is counted, so that an engine with its own experts cannot pass for one without."""
    url = job["metrics_url"]
    before = figures_of(url) if url else None
    result = KINDS[cell["kind"]](engine, job, cell)
    if url:
        after = figures_of(url)
        counted = {f"service_{name}": after[name] - before[name] for name in after}
        if counted["service_rows"] == 0:
            raise RuntimeError("the service computed no rows: the engine ran its own experts; is the plugin installed?")
        result |= counted
    return result


def serve_job(path, start):
    """Runs the cells of the job in a file with the engine that `start(job)` makes. Ends the process.

    Each line says `ready`, which cell begins, or what came out. After an error the process ends: the engine may hold requests, or have ended.
    """
    with open(path) as file:
        job = json.load(file)
    status = 0

    def report(**line):
        with open(job["out"], "a") as out:
            out.write(json.dumps(line) + "\n")

    name = None
    try:
        engine = start(job)
        report(ready=True, version=engine.version, **getattr(engine, "about", {}))
        for cell in job["cells"]:
            name = cell["id"]
            report(begins=name)
            report(ends=name, **measure(engine, job, cell))
    except BaseException as error:
        traceback.print_exc()
        report(ends=name, error=f"{type(error).__name__}: {error}"[:2000])
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the engine's own clean-up, which can hang; the process that started this one kills what is left.
    os._exit(status)
