"""Runs one engine of vLLM while services change: `python engine_events.py JOB.json ANSWER.json`.

First stock vLLM generates, then an engine whose experts are at services, once undisturbed and once for each event in the job. Each answer has
the tokens, and the longest time that a request waited for its next token.
"""

import concurrent.futures
import gc
import json
import os
import signal
import subprocess
import sys
import time

import expertd
from conftest_engine import children, serve

KEPT = {}


def kill_rank(services):
    os.kill(children(services[0].process.pid)[-1], signal.SIGKILL)


def stop_rank(services):
    """The rank never runs again; the service has to find that out."""
    os.kill(children(services[0].process.pid)[-1], signal.SIGSTOP)


def reload(services):
    for service in services:
        subprocess.run([expertd.command(), "reload", "--admin", service.admin_address], check=True, capture_output=True)


def upgrade(services):
    """Each service is drained, and another one takes its address, before the next one's turn."""
    for place, service in enumerate(services):
        address = service.address
        service.stop()
        services[place] = serve(KEPT["folder"], listen=f"unix:{KEPT['sockets']}/{place}.sock" if address.startswith("unix:") else address)


EVENTS = {event.__name__: event for event in (kill_rank, stop_rank, reload, upgrade)}


def generate(llm, job, name, event=None):
    """Every prompt's tokens, in rounds. `event` happens in a thread in the first round, and the round in which it ends is the last one."""
    pauses, rounds = [], []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        happening = None

        def begin():
            nonlocal happening
            happening = happening or (event and pool.submit(event))

        while not rounds or (happening and not happening.done()):
            rounds.append(one_round(llm, job, f"{name}-{len(rounds)}", begin, pauses))
        if happening:
            happening.result()
    return {"rounds": rounds, "pause": max(pauses)}


def one_round(llm, job, name, begin, pauses):
    """Every prompt's tokens, all prompts together. Calls `begin` when a quarter of them is there; `pauses` gets seconds between a request's tokens."""
    import vllm

    params = vllm.SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
    engine, tokens, came = llm.llm_engine, {}, {}
    requests = [f"{name}-{number}" for number in range(len(job["prompts"]))]
    for request, prompt in zip(requests, job["prompts"], strict=True):
        engine.add_request(request, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        outputs, now = engine.step(), time.monotonic()
        for output in outputs:
            pauses.append(now - came.get(output.request_id, now))
            came[output.request_id] = now
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        if 4 * sum(map(len, tokens.values())) >= len(requests) * job["tokens"]:
            begin()
    return [tokens[request] for request in requests]


def load(job, address, session):
    import vllm

    os.environ.update(EXPERTD_ADDRESS=address, EXPERTD_SESSION=session or "")
    return vllm.LLM(
        job["folder"],
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        enforce_eager=True,
    )


def run(job):
    from vllm.distributed import cleanup_dist_env_and_memory

    KEPT.update(folder=job["folder"], sockets=job["sockets"])
    services = [serve(job["folder"], listen=f"unix:{job['sockets']}/{place}.sock") for place in range(job["services"])]
    addresses = ",".join(service.session_address if job["session"] else service.address for service in services)
    try:
        # The plugin is loaded with the first engine, and needs the variable for that.
        os.environ["EXPERTD_ADDRESS"] = addresses
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        llm = load(job, "", None)
        answers = {"stock": generate(llm, job, "stock")}
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
        llm = load(job, addresses, job["session"])
        answers["undisturbed"] = generate(llm, job, "undisturbed")
        for name in job["events"]:
            before = [service.client().model().generation for service in services]
            answers[name] = generate(llm, job, name, lambda name=name: EVENTS[name](services))
            answers[name]["generations"] = [before, [service.client().model().generation for service in services]]
    finally:
        for service in services:
            service.stop()
    return answers


if __name__ == "__main__":
    with open(sys.argv[1]) as given:
        job = json.load(given)
    try:
        answer = run(job)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    with open(sys.argv[2], "w") as out:
        json.dump(answer, out)
