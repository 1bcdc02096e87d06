"""Runs vLLM in a process of its own: `python engine.py JOBS.json ANSWERS.json`.

A job is a model to load and generate from, with its experts in vLLM or at a service. Each answer has the tokens and what the
engine held and sent.
"""

import gc
import json
import os
import signal
import sys

import numpy

import expertd
from conftest_engine import children


def expert_bytes(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    # Shared experts and gates may have names below those of experts.
    others = ("shared", ".gate.", "e_score_correction_bias")
    held = [t for name, t in tensors if "experts." in name and not any(other in name for other in others)]
    return sum(t.nbytes for t in held if t.is_floating_point())


def methods(model):
    """Which method holds and applies the weights of attention, and of routed experts, in the first layer that has them."""
    named = {name: type(module.quant_method).__name__ for name, module in model.named_modules() if hasattr(module, "quant_method")}
    return {kind: next((method for name, method in named.items() if kind in name), None) for kind in ("qkv_proj", "routed_experts")}


def logprobs(output):
    """Log-probabilities of a prompt's tokens but the first, if the job asked for them."""
    return [next(iter(found.values())).logprob for found in (output.prompt_logprobs or [])[1:]]


def count(calls, kill_at, service_pid):
    """Counts calls of services; call number `kill_at` first kills the last rank that this service has by then."""
    from expertd._torch import Remote

    original = Remote.forward

    def forward(self, *arguments, **options):
        calls.append(arguments[1].shape[0])
        if len(calls) == kill_at:
            os.kill(children(service_pid)[-1], signal.SIGKILL)
        return original(self, *arguments, **options)

    Remote.forward = forward
    return lambda: setattr(Remote, "forward", original)


def compare_choices(found):
    """Has the service's gate choose for the rows of each call, too; `found` gets the largest difference between weights of experts."""
    import torch

    from expertd._torch import Remote

    original = Remote.forward

    def dense(ids, weights, experts):
        return torch.zeros(ids.shape[0], experts).scatter(1, ids.long(), weights.float())

    def forward(self, layer, rows, ids, weights, *others, **options):
        most = self.model.limits.max_tokens_per_request
        mine = dense(ids[:most], weights[:most], self.layer(layer).num_experts)
        with expertd.Client(self.address, session=self.session) as client:
            answer = client.forward(layer, rows[:most].contiguous(), return_routing=True)
        theirs = [torch.from_numpy(numpy.array(part)) for part in (answer.receipt.topk_ids, answer.receipt.topk_weights)]
        found.append((mine - dense(*theirs, mine.shape[1])).abs().max().item())
        return original(self, layer, rows, ids, weights, *others, **options)

    Remote.forward = forward
    return lambda: setattr(Remote, "forward", original)


def run(job):
    os.environ["EXPERTD_ADDRESS"] = job.get("address") or ""
    os.environ["EXPERTD_SESSION"] = job.get("session") or ""
    os.environ["EXPERTD_GATE"] = job.get("gate") or ""
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.models import registry

    # vLLM looks at each model's class in a process of its own so as not to initialise CUDA; that takes longer than the rest of a job.
    registry._run_in_subprocess = lambda look: look()
    calls, differences = [], []
    restore = None
    try:
        llm = vllm.LLM(
            job["folder"],
            dtype=job.get("dtype", "float32"),
            skip_tokenizer_init=True,
            max_model_len=128,
            max_num_batched_tokens=256,
            enable_prefix_caching=False,
            enforce_eager=job.get("eager", True),
            **job.get("options", {}),
        )
        # With the engine in a process of its own, this process sees neither its model nor its calls.
        in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
        held = llm.apply_model(expert_bytes)[0] if in_process else None
        restore = compare_choices(differences) if job.get("compare") else count(calls, job.get("kill_at"), job.get("service_pid"))
        likely = {"prompt_logprobs": 0} if job.get("logprobs") else {}
        params = vllm.SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False, **likely)
        out = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], params, use_tqdm=False)
        answer = {
            "tokens": [list(o.outputs[0].token_ids) for o in out],
            "expert_bytes": held,
            "calls": calls,
            "methods": llm.apply_model(methods)[0] if in_process else None,
            "logprobs": [logprobs(o) for o in out],
            "difference": max(differences, default=None),
        }
        del llm
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    finally:
        if restore is not None:
            restore()
    gc.collect()
    cleanup_dist_env_and_memory()
    return answer


if __name__ == "__main__":
    with open(sys.argv[1]) as jobs:
        answers = [run(job) for job in json.load(jobs)]
    with open(sys.argv[2], "w") as out:
        json.dump(answers, out)
