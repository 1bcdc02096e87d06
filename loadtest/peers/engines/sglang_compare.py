#!/usr/bin/env python3
"""SGLang with its own experts and with experts at a service: decode steps, prefill, greedy tokens, a killed rank.

    loadtest/peers/engines/sglang_compare.py --checkpoint /dev/shm/qwen --mode stock apart --logs logs

As vllm_compare.py beside it, with SGLang's offline engine. SGLang has no engine for processors that runs this: with --dry-run everything but
the engine runs without a GPU. The checkpoint is made and served on CPU ranks, the plugin is loaded into the modules of
python/tests/sglang_plugin/sglang_stubs.py, which stand for SGLang's, and layers without weights call the service; tokens come from the
prompts alone, and times say nothing about SGLang.
"""

import json
import os
import pathlib
import random
import sys
import time

import cells
import checkpoint
from jobs import Run, serve_job

STUBS = pathlib.Path(__file__).resolve().parents[3] / "python/tests/sglang_plugin"
# Tokens of the shorter of two runs, whose difference is decode steps.
SHORT = 8


class Timed:
    """Times of whole runs: SGLang's steps happen in another process."""

    def seconds(self, prompts, tokens):
        begin = time.perf_counter()
        self.run(prompts, tokens)
        return time.perf_counter() - begin

    def decode(self, prompts, tokens):
        return (self.seconds(prompts, SHORT + tokens) - self.seconds(prompts, SHORT)) / tokens

    def prefill(self, prompts):
        return self.seconds(prompts, 1)


class Sglang(Timed):
    """SGLang's offline engine."""

    def __init__(self, job):
        import sglang
        import torch

        self.version = sglang.__version__
        options = dict(
            model_path=job["checkpoint"],
            dtype=job["dtype"],
            random_seed=0,
            skip_tokenizer_init=True,
            disable_radix_cache=True,
            attention_backend="triton",
            moe_runner_backend="triton",
            context_length=job["longest"],
            max_running_requests=job["most_sequences"],
            max_total_tokens=job["cache_tokens"],
            chunked_prefill_size=job["most_rows"],
            log_level="info",
        )
        begin = time.perf_counter()
        self.engine = sglang.Engine(**{**options, **job["options"]})
        self.about = {"torch": torch.__version__, "load_s": round(time.perf_counter() - begin, 1)}

    def run(self, prompts, tokens, logprobs=None, at_half=None):
        asked = dict(
            input_ids=prompts, sampling_params={"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}, return_logprob=bool(logprobs)
        )
        if logprobs:
            asked["top_logprobs_num"] = logprobs
        if at_half is None:
            answers = self.engine.generate(**asked)
            return Run([answer["output_ids"] for answer in answers], [likeliest(answer) for answer in answers] if logprobs else [])
        found, steps, begin = Run([[] for _ in prompts]), 0, time.perf_counter()
        for answer in self.engine.generate(**asked, stream=True):
            sequence, ids = found.tokens[answer.get("index", 0)], answer["output_ids"]
            # All tokens so far, or with SGLang's incremental output the new ones.
            sequence[:] = ids if len(ids) == answer["meta_info"]["completion_tokens"] else sequence + ids
            # A step has ended when the last sequence has its token.
            shortest = min(map(len, found.tokens))
            if shortest > steps:
                found.times.append((time.perf_counter() - begin, (shortest - steps) * len(prompts)))
                steps = shortest
            if at_half and shortest >= tokens / 2:
                at_half()
                at_half = None
        return found


def likeliest(answer):
    """For each token of an answer the log-probabilities of the likeliest tokens."""
    return [{str(token): logprob for logprob, token, _ in at} for at in answer["meta_info"]["output_top_logprobs"]]


class StandIn(Timed):
    """Stands for SGLang in a dry run. Each step calls the service once for each layer, if there is one."""

    def __init__(self, job):
        sys.path.insert(0, str(STUBS))
        import sglang_stubs
        import torch

        self.version = sys.modules["sglang"].__version__ + ", stand-ins"
        self.torch, self.vocabulary, self.layers = torch, job["vocabulary"], []
        folder = pathlib.Path(job["checkpoint"])
        self.config = json.loads((folder / "config.json").read_text())
        self.about = {"torch": torch.__version__, "dry_run": True}
        if os.environ.get("EXPERTD_ADDRESS"):
            self.about["loaded_tensors"] = self.load(sglang_stubs, folder)

    def load(self, stubs, folder):
        """Builds and loads the MoE layers as SGLang does; returns the number of tensors that the model has seen."""
        from expertd.sglang import register

        stubs.SERVER = stubs.arguments(model_path=str(folder))
        register()
        sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry.apply_hooks()
        config, torch = self.config, self.torch
        self.layers = [
            sys.modules[stubs.LAYER].FusedMoE(
                num_experts=config["num_experts"],
                top_k=config["num_experts_per_tok"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["moe_intermediate_size"],
                layer_id=number,
                prefix=f"model.layers.{number}.mlp.experts",
            )
            for number in range(config["num_hidden_layers"])
        ]
        seen = []

        class Model(torch.nn.Module):
            def __init__(self, layers):
                super().__init__()
                self.experts = torch.nn.ModuleList(layers)
                self.config = stubs.of(model_type=config["model_type"], hidden_size=config["hidden_size"])

            def load_weights(self, weights):
                seen.extend(name for name, _ in weights)

        names = json.loads((folder / checkpoint.INDEX).read_text())["weight_map"]
        weights = ((name, torch.zeros(1)) for name in names)
        sys.modules[stubs.LOADER].DefaultModelLoader.load_weights_and_postprocess(Model(self.layers), weights, torch.device("cpu"))
        held = [name for name in seen if ".experts." in name]
        if held or not seen:
            raise RuntimeError(f"the model has seen {len(seen)} tensors, {len(held)} of them of experts")
        return len(seen)

    def run(self, prompts, tokens, logprobs=None, at_half=None):
        torch, config, begin = self.torch, self.config, time.perf_counter()
        draws = [random.Random(str(prompt)) for prompt in prompts]
        found = Run([[] for _ in prompts])
        for step in range(tokens):
            for layer in self.layers:
                chosen = [torch.randperm(config["num_experts"])[: config["num_experts_per_tok"]] for _ in prompts]
                weights, logits = torch.rand(len(prompts), config["num_experts_per_tok"]), torch.zeros(len(prompts), config["num_experts"])
                routing = sys.modules["sglang.srt.layers.moe.topk"].StandardTopKOutput(weights, torch.stack(chosen).int(), logits)
                rows = layer(torch.randn(len(prompts), config["hidden_size"]), routing)
                if not bool(torch.isfinite(rows).all()):
                    raise RuntimeError("the service's rows are not finite")
            for sequence, draw in zip(found.tokens, draws):
                sequence.append(draw.randrange(self.vocabulary))
            found.times.append((time.perf_counter() - begin, len(prompts)))
            if at_half and step + 1 >= tokens / 2:
                at_half()
                at_half = None
        if logprobs:
            found.logprobs = [[{str(token): 0.0} for token in sequence] for sequence in found.tokens]
        return found


def main():
    if sys.argv[1:2] == ["--job"]:
        serve_job(sys.argv[2], StandIn if "--dry-run" in sys.argv else Sglang)
    parser = cells.parser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="everything but the engine, without a GPU")
    args = parser.parse_args()
    args.device = "cpu" if args.dry_run else "cuda"
    cells.main(args, "SGLang", __file__, lambda job: {}, ["--dry-run"] if args.dry_run else [])


if __name__ == "__main__":
    main()
