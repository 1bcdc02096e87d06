#!/usr/bin/env python3
"""vLLM with its own experts and with experts at a service: decode steps, prefill, greedy tokens, a killed rank.

    loadtest/peers/engines/vllm_compare.py --checkpoint /dev/shm/qwen --mode stock apart shared --gate engine service

Makes a random checkpoint, starts a service and vLLM's offline engine for each mode, one after the other, and prints a JSON line for each cell
and tables. ../README.md says what is measured. Needs vLLM, torch and this repository's Python package, with a command that has GPU ranks.
`--device cpu --shape tiny --dtype float32` goes through everything on a processor (docs/vllm.md says how to install vLLM there).
"""

import math
import os
import sys
import time

import cells
from jobs import Run, serve_job


class Vllm:
    """vLLM's engine, driven step by step. A step's time is that between the outputs of two steps."""

    def __init__(self, job):
        import torch
        import vllm

        self.vllm = vllm
        self.version = vllm.__version__
        options = dict(
            dtype=job["dtype"],
            seed=0,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=job["longest"],
            max_num_seqs=job["most_sequences"],
            max_num_batched_tokens=job["most_rows"],
        )
        if job["device"] == "cuda":
            # With a given size of the cache vLLM does not measure free memory, of which a service on this GPU has a part.
            options |= dict(kv_cache_memory_bytes=job["cache_bytes"], gpu_memory_utilization=0.2)
        begin = time.perf_counter()
        self.llm = vllm.LLM(job["checkpoint"], **{**options, **job["options"]})
        config = self.llm.llm_engine.vllm_config
        self.most_rows = config.scheduler_config.max_num_batched_tokens
        self.about = {
            "torch": torch.__version__,
            "device_name": torch.cuda.get_device_name(0) if job["device"] == "cuda" else "cpu",
            "load_s": round(time.perf_counter() - begin, 1),
            "graphs": config.compilation_config.cudagraph_mode.name,
            "eager": config.model_config.enforce_eager,
        }
        # The model is in another process otherwise.
        if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
            self.about["expert_bytes"], self.about["weight_bytes"] = self.llm.apply_model(held_bytes)[0]
        self.number = 0

    def run(self, prompts, tokens, logprobs=None, at_half=None):
        kind = self.vllm.sampling_params.RequestOutputKind.DELTA
        parameters = self.vllm.SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs, output_kind=kind
        )
        engine, places = self.llm.llm_engine, {}
        for place, prompt in enumerate(prompts):
            self.number += 1
            # vLLM may add to the name that a request is given here.
            name = engine.add_request(str(self.number), {"prompt_token_ids": prompt}, parameters) or str(self.number)
            places[name] = places[str(self.number)] = place
        found = Run([[] for _ in prompts], [[] for _ in prompts] if logprobs else [])
        begin, done = time.perf_counter(), 0
        while engine.has_unfinished_requests():
            outputs = engine.step()
            moment, count = time.perf_counter() - begin, 0
            for output in outputs:
                place, [part] = places[output.request_id], output.outputs
                found.tokens[place] += part.token_ids
                count += len(part.token_ids)
                if logprobs:
                    found.logprobs[place] += [{str(token): one.logprob for token, one in at.items()} for at in part.logprobs]
            if count:
                found.times.append((moment, count))
            done += count
            if at_half and done >= len(prompts) * tokens / 2:
                at_half()
                at_half = None
        return found

    def decode(self, prompts, tokens):
        # While the last prompts are read, the first requests have tokens already.
        longer = tokens + math.ceil(len(prompts) * len(prompts[0]) / self.most_rows) + cells.SPARE
        times = self.run(prompts, longer).times
        whole = [after - before for (before, m), (after, n) in zip(times, times[1:]) if m == n == len(prompts)]
        # The first ones can still wait for what the host did with the prompts.
        whole = whole[2 : tokens + 2]
        if len(whole) < tokens:
            raise RuntimeError(
                f"only {len(whole)} of {tokens} steps had all {len(prompts)} requests; others waited, for example for room in the cache"
            )
        return sum(whole) / len(whole)

    def prefill(self, prompts):
        # The requests end with their first tokens.
        return self.run(prompts, 1).times[-1][0]


def held_bytes(model):
    """Bytes of routed experts, and of all tensors, in the engine's model."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    routed = (t for name, t in tensors if "experts." in name and "shared" not in name and t.is_floating_point())
    return sum(t.nbytes for t in routed), sum(t.nbytes for _, t in tensors)


def variables(job, own_process):
    """vLLM's environment."""
    found = {"VLLM_ENABLE_V1_MULTIPROCESSING": int(own_process), "VLLM_NO_USAGE_STATS": 1}
    if job["device"] == "cpu":
        found |= {"VLLM_CPU_KVCACHE_SPACE": math.ceil(job["cache_bytes"] / 2**30), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        found["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))
    return found


def parser(about):
    made = cells.parser(about)
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    made.add_argument("--graphs", help="vLLM's cudagraph_mode, such as FULL_DECODE_ONLY [default: vLLM's]")
    made.add_argument("--own-process", action="store_true", help="vLLM's engine in a process of its own, as its server has it")
    return made


def main():
    if sys.argv[1:2] == ["--job"]:
        serve_job(sys.argv[2], Vllm)
    args = parser(__doc__).parse_args()
    if args.graphs:
        args.options.append(("compilation_config", {"cudagraph_mode": args.graphs}))
    cells.main(args, "vLLM", __file__, lambda job: variables(job, args.own_process))


if __name__ == "__main__":
    main()
