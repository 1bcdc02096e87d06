#!/usr/bin/env python3
"""Makes tiny random models and quantises them with public tools on the CPU; scripts/real_checks.py checks what the tools wrote.

    python scripts/real_quantisers.py OUT models
    python scripts/real_quantisers.py OUT quantise --tools TOOLS [--families FAMILIES] [--only SUBSTRING,...]

The tools need other versions of the same libraries, so each one gets a virtual environment of its own: llmcompressor 0.14.0.1 (torch
2.14.0, transformers 5.17.0; also for `models` and the checks), nvidia-modelopt 0.47.0 with transformers 5.23.0, accelerate, datasets and
torchvision; auto-round 0.16.1 with compressed-tensors; gptqmodel 7.6.0. Set HF_HUB_OFFLINE=1: nothing is downloaded.
A folder of a case has the file `done` if the tool wrote it, `failed` with the traceback otherwise.
"""

import argparse
import json
import os
import pathlib
import shutil
import sys
import time
import traceback

import torch

SIZES = dict(vocab_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
             max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
HIDDEN, WIDTH, EXPERTS, CHOSEN = 256, 128, 8, 2
MODELS = {
    "qwen3_moe": dict(num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=WIDTH, intermediate_size=256,
                      norm_topk_prob=True),
    "mixtral": dict(num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, intermediate_size=WIDTH),
    "deepseek_v3": dict(n_routed_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=WIDTH, intermediate_size=256,
                        n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=64, kv_lora_rank=64,
                        qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32, num_key_value_heads=4),
    "glm4_moe": dict(n_routed_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=WIDTH, intermediate_size=256,
                     n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1),
    "qwen2_moe": dict(num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=WIDTH, intermediate_size=256,
                      shared_expert_intermediate_size=WIDTH),
    "gpt_oss": dict(num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, intermediate_size=WIDTH,
                    layer_types=["sliding_attention", "full_attention"]),
}


def make_models(out):
    import transformers
    from golden import randomise
    for number, (family, options) in enumerate(MODELS.items()):
        folder = out / "models" / family
        config = transformers.AutoConfig.for_model(family, **{**SIZES, "hidden_size": HIDDEN, **options})
        torch.manual_seed(number)
        model = transformers.AutoModelForCausalLM.from_config(config)
        randomise(model, number)
        model.to(torch.bfloat16).save_pretrained(folder)
        add_tokenizer(folder)


def add_tokenizer(folder):
    """A tokenizer of 128 words, because some tools refuse a model without one."""
    import tokenizers
    import transformers
    words = {f"w{i}": i for i in range(SIZES["vocab_size"])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="w0", pad_token="w0", bos_token="w1", eos_token="w2")
    wrapped.save_pretrained(folder)


def load(folder):
    import transformers
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def sequences(count=8, length=64):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 128, (1, length), generator=generator) for _ in range(count)]


# ---- llm-compressor

IGNORED = ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$", "re:.*shared_expert_gate$", "re:.*router$"]


def compressor(recipe, calibrate):
    def run(source, folder):
        from llmcompressor import oneshot
        model = load(source)
        options = {}
        if calibrate:
            import datasets
            rows = [dict(input_ids=ids[0].tolist(), attention_mask=[1] * ids.shape[1]) for ids in sequences()]
            options = dict(dataset=datasets.Dataset.from_list(rows), num_calibration_samples=8, max_seq_length=64)
        import transformers
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        oneshot(model=model, processor=tokenizer, recipe=recipe(), **options)
        model.save_pretrained(folder, save_compressed=True)
        tokenizer.save_pretrained(folder)
    return run


def preset(scheme, **more):
    def recipe():
        from llmcompressor.modifiers.quantization import QuantizationModifier
        return QuantizationModifier(targets="Linear", scheme=scheme, ignore=IGNORED, **more)
    return recipe


def weights(strategy, size=None, symmetric=True, actorder=None, method="rtn"):
    """Integers of 4 bits."""
    def recipe():
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from llmcompressor.modifiers.gptq import GPTQModifier
        from llmcompressor.modifiers.quantization import QuantizationModifier
        arguments = QuantizationArgs(num_bits=4, type="int", strategy=strategy, group_size=size, symmetric=symmetric,
                                     actorder=actorder)
        groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=arguments)}
        modifier = GPTQModifier if method == "gptq" else QuantizationModifier
        return modifier(config_groups=groups, ignore=IGNORED)
    return recipe


def kv_cache():
    from llmcompressor.modifiers.quantization import QuantizationModifier
    return QuantizationModifier(targets="Linear", scheme="FP8", ignore=IGNORED, kv_cache_scheme=dict(
        num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True))


def mixed():
    """INT4 experts beside FP8 attention."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.quantization import QuantizationModifier
    four = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)
    eight = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    return QuantizationModifier(config_groups={
        "group_0": QuantizationScheme(targets=["re:.*experts.*proj$"], weights=four),
        "group_1": QuantizationScheme(targets=["re:.*self_attn.*proj$"], weights=eight)}, ignore=IGNORED)


def model_free(scheme):
    def run(source, folder):
        from llmcompressor import model_free_ptq
        model_free_ptq(str(source), str(folder), scheme=scheme, device="cpu",
                       ignore=[*IGNORED, "re:.*embed_tokens$", "re:.*norm.*"])
    return run


LLMCOMPRESSOR = {
    "w4a16-g128": compressor(preset("W4A16"), False),
    "w4a16-asym-g128": compressor(preset("W4A16_ASYM"), False),
    "w4a16-g32": compressor(weights("group", 32), False),
    "w4a16-g32-asym": compressor(weights("group", 32, False), False),
    "w4a16-channel": compressor(weights("channel"), False),
    "gptq-static": compressor(weights("group", 32, actorder="static", method="gptq"), True),
    "fp8": compressor(preset("FP8"), True),
    "fp8-kv": compressor(kv_cache, True),
    "fp8-dynamic": compressor(preset("FP8_DYNAMIC"), False),
    "fp8-block": compressor(preset("FP8_BLOCK"), False),
    "nvfp4": compressor(preset("NVFP4"), True),
    "nvfp4a16": compressor(preset("NVFP4A16"), False),
    "mxfp4": compressor(preset("MXFP4"), False),
    "mxfp4a16": compressor(preset("MXFP4A16"), False),
    "mxfp8": compressor(preset("MXFP8"), False),
    "mxfp8a16": compressor(preset("MXFP8A16"), False),
    "w8a16": compressor(preset("W8A16"), False),
    "w8a8": compressor(preset("W8A8"), False),
    "w4afp8": compressor(preset("W4AFP8"), False),
    "mixed": compressor(mixed, False),
    "free-fp8-block": model_free("FP8_BLOCK"),
    "free-fp8-dynamic": model_free("FP8_DYNAMIC"),
    "free-nvfp4a16": model_free("NVFP4A16"),
    "free-mxfp4": model_free("MXFP4A16"),
    "free-mxfp8": model_free("MXFP8A16"),
    "free-w4a16": model_free("W4A16"),
}

# ---- ModelOpt

def modelopt(preset, edit=None):
    def run(source, folder):
        import copy
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint
        model = load(source)
        config = copy.deepcopy(getattr(mtq, preset))
        if edit is not None:
            edit(config, mtq)

        def forward(model):
            with torch.no_grad():
                for ids in sequences():
                    model(input_ids=ids)
        model = mtq.quantize(model, config, forward)
        export_hf_checkpoint(model, export_dir=folder)
    return run


def with_kv(config, mtq):
    config["quant_cfg"] = list(config["quant_cfg"]) + list(mtq.FP8_KV_CFG["quant_cfg"])


MODELOPT = {
    "fp8": modelopt("FP8_DEFAULT_CFG"),
    "fp8-kv": modelopt("FP8_DEFAULT_CFG", with_kv),
    "fp8-channel": modelopt("FP8_PER_CHANNEL_PER_TOKEN_CFG"),
    "fp8-block": modelopt("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"),
    "nvfp4": modelopt("NVFP4_DEFAULT_CFG"),
    "nvfp4-kv": modelopt("NVFP4_DEFAULT_CFG", with_kv),
    "nvfp4-w4a16": modelopt("W4A16_NVFP4_CFG"),
    "nvfp4-experts": modelopt("NVFP4_EXPERTS_ONLY_CFG"),
    "nvfp4-mlp": modelopt("NVFP4_MLP_ONLY_CFG"),
    "mxfp8": modelopt("MXFP8_DEFAULT_CFG"),
    "mxfp4": modelopt("MXFP4_DEFAULT_CFG"),
    "w4a8-nvfp4": modelopt("W4A8_NVFP4_FP8_CFG"),
}


# ---- AutoRound

def autoround(form, scheme="W4A16", **options):
    def run(source, folder):
        import transformers
        from auto_round import AutoRound
        model, tokenizer = load(source), transformers.AutoTokenizer.from_pretrained(source)
        calibration = folder / "calibration.jsonl"
        lines = (" ".join(f"w{i}" for i in ids[0].tolist()) for ids in sequences(16, 128))
        calibration.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        rounds = AutoRound(model, tokenizer, scheme=scheme, iters=0, nsamples=8, seqlen=64, device_map="cpu",
                           dataset=str(calibration), **options)
        rounds.quantize_and_save(str(folder), format=form)
        for inner in folder.glob("*/config.json"):  # a folder is named by the number of bits
            shutil.copytree(inner.parent, folder, dirs_exist_ok=True)
    return run


AUTOROUND = {
    "gptq": autoround("auto_gptq"),
    "awq": autoround("auto_awq", sym=False),
    "awq-sym": autoround("auto_awq"),
    "own": autoround("auto_round"),
    "own-asym": autoround("auto_round", sym=False),
    "own-g32": autoround("auto_round", group_size=32),
    "own-awq": autoround("auto_round:auto_awq", sym=False),
    "own-gptq": autoround("auto_round:auto_gptq"),
    "ct-w4a16": autoround("llm_compressor"),
    "ct-nvfp4": autoround("llm_compressor", "NVFP4"),
    "ct-mxfp4": autoround("llm_compressor", "MXFP4"),
    "ct-mxfp8": autoround("llm_compressor", "MXFP8"),
    "ct-fp8": autoround("llm_compressor", "FP8_STATIC"),
    "ct-fp8-block": autoround("llm_compressor", "FP8_BLOCK"),
    "own-nvfp4": autoround("auto_round", "NVFP4"),
    "own-mxfp4": autoround("auto_round", "MXFP4"),
    "own-mxfp8": autoround("auto_round", "MXFP8"),
    "own-fp8": autoround("auto_round", "FP8_STATIC"),
    "own-fp8-block": autoround("auto_round", "FP8_BLOCK"),
    "fp8": autoround("fp8", "FP8_BLOCK"),
}


# ---- GPTQModel

def gptqmodel(rtn=False, **options):
    def run(source, folder):
        os.cpu_count = lambda: 8  # its pools of threads ask for more workers than two cores give
        from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
        if rtn:
            from gptqmodel.quantization import RTNConfig
            config = RTNConfig(bits=4, **options)
        else:
            config = QuantizeConfig(bits=4, **options)
        model = GPTQModel.load(str(source), config, device="cpu")
        rows = [dict(input_ids=ids[0].tolist(), attention_mask=[1] * ids.shape[1]) for ids in sequences(32, 128)]
        model.quantize(None if rtn else rows, batch_size=1, backend=BACKEND.TORCH)
        model.save(str(folder))
    return run


GPTQMODEL = {
    "gptq": gptqmodel(group_size=32),
    "gptq-g128": gptqmodel(group_size=128),
    "gptq-desc": gptqmodel(group_size=32, desc_act=True),
    "gptq-asym": gptqmodel(group_size=32, sym=False),
    "gptq-v2": gptqmodel(group_size=32, format="gptq_v2"),
    "awq": gptqmodel(group_size=32, method="awq", format="gemm"),
    "rtn": gptqmodel(True, group_size=32),
}


TOOLS = {"llmcompressor": LLMCOMPRESSOR, "modelopt": MODELOPT, "autoround": AUTOROUND, "gptqmodel": GPTQMODEL}


def quantise(out, tools, only, families):
    for tool, cases in ((tool, TOOLS[tool]) for tool in tools):
        for family in families:
            for case, run in cases.items():
                name = f"{tool}/{family}-{case}"
                folder = out / tool / f"{family}-{case}"
                if not any(part in name for part in only.split(",")) or (folder / "done").exists():
                    continue
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                start = time.time()
                try:
                    run(out / "models" / family, folder)
                    (folder / "done").write_text("")
                    print(f"{name}: written in {time.time() - start:.0f} s", flush=True)
                except Exception as error:
                    (folder / "failed").write_text(traceback.format_exc())
                    print(f"{name}: FAILED: {type(error).__name__}: {str(error)[:300]}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("step", choices=["models", "quantise"])
    parser.add_argument("--only", default="")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--families", default="qwen3_moe,mixtral,deepseek_v3,glm4_moe,qwen2_moe,gpt_oss")
    arguments = parser.parse_args()
    if arguments.step == "models":
        make_models(arguments.out)
    else:
        quantise(arguments.out, arguments.tools.split(","), arguments.only, arguments.families.split(","))


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    main()
