"""Runs an engine of vLLM that others stand beside: `python engine_beside.py JOB.json ROUNDS.jsonl`.

It generates from the job's prompts again and again and adds a line with their tokens each time, until it is killed or its parent is gone.
"""

import json
import os
import sys

from engine_events import load


def run(job, out):
    import vllm

    llm = load(job, job["address"], job["session"])
    params = vllm.SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    while os.getppid() == job["parent"]:
        found = llm.generate(given, params, use_tqdm=False)
        out.write(json.dumps([list(answer.outputs[0].token_ids) for answer in found]) + "\n")
        out.flush()


if __name__ == "__main__":
    with open(sys.argv[1]) as given:
        job = json.load(given)
    with open(sys.argv[2], "w") as out:
        run(job, out)
