"""Runs vLLM with several processes: `python engine_parallel.py JOB.json ANSWER.json`. The answer has the tokens, or an error.

vLLM's synchronous class starts no data-parallel engines, so that this uses the class behind its server.
"""

import asyncio
import json
import os
import sys


async def run(job):
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=job["folder"],
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        enforce_eager=True,
        **job["options"],
    )
    engine = AsyncLLM.from_engine_args(arguments)
    adapter = LoRARequest("adapter", 1, job["adapter"]) if job.get("adapter") else None

    async def tokens(number, prompt):
        params = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
        rank = {"data_parallel_rank": number % job["options"]["data_parallel_size"]} if "data_parallel_size" in job["options"] else {}
        async for output in engine.generate({"prompt_token_ids": prompt}, params, f"r{number}", lora_request=adapter, **rank):
            last = output
        return list(last.outputs[0].token_ids)

    try:
        return {"tokens": await asyncio.gather(*(tokens(n, p) for n, p in enumerate(job["prompts"])))}
    finally:
        engine.shutdown()


if __name__ == "__main__":
    with open(sys.argv[1]) as given:
        job = json.load(given)
    os.environ["EXPERTD_ADDRESS"] = job.get("address") or ""
    os.environ["EXPERTD_SESSION"] = job.get("session") or ""
    try:
        answer = asyncio.run(run(job))
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    with open(sys.argv[2], "w") as out:
        json.dump(answer, out)
