#!/usr/bin/env python3
"""Checks that expertd serves what public quantisation tools wrote; scripts/real_quantisers.py makes the checkpoints.

    python scripts/real_checks.py OUT record [--only SUBSTRING]
    python scripts/real_checks.py OUT compare [--only SUBSTRING]
    python scripts/real_checks.py OUT serve --expertd PATH [--only SUBSTRING]

`record` dequantises the MoE blocks of every checkpoint by the definitions of the formats, compares them with the weights before
quantisation, and records the outputs of transformers' blocks with them in float32. `serve` runs `expertd inspect`, and `expertd
verify` against `expertd serve` with two CPU ranks. Needs torch, transformers, safetensors and compressed-tensors.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import tempfile
import time

TOOL_LEAVES = ("input_scale", "k_scale", "v_scale", "input_global_scale", "output_scale", "q_scale")

STORED_LEAVES = ("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale",
                 "weight_zero_point", "weight_shape", "weight_g_idx", "qweight", "qzeros", "scales", "g_idx")


def folders(out, only):
    for done in sorted(path for path in out.glob("*/*/done") if (path.parent / "config.json").exists()):
        name = f"{done.parent.parent.name}/{done.parent.name}"
        if any(part in name for part in only.split(",")):
            yield name, done.parent


def declaration(folder):
    declared = json.loads((folder / "config.json").read_text()).get("quantization_config")
    other = folder / "hf_quant_config.json"
    return declared if declared is not None or not other.exists() else json.loads(other.read_text())


def fp8(part, scale, block):
    """FP8 with a scale per tensor, channel or block."""
    scale, (rows, cols) = scale.double(), part["weight"].shape
    if scale.dim() == 4:
        scale = scale[:, 0, :, 0]
    if scale.dim() == 1 and scale.numel() == rows:
        scale = scale[:, None]
    if scale.dim() == 2:
        for dim, size in ((0, rows), (1, cols)):
            if scale.shape[dim] not in (1, size):
                scale = scale.repeat_interleave(block[dim], dim).narrow(dim, 0, size)
    return part["weight"].double() * scale


def awq_word_size(part):
    return {"group_size": part["qweight"].shape[0] // part["scales"].shape[0]}


def values(part, declared):
    """The weights of a module in float64 by the definition of its format; None if it is not quantised."""
    import torch
    import golden_formats as formats
    method = declared["quant_method"] if "quant_method" in declared else "modelopt"
    if "qweight" in part:
        packing = declared.get("packing_format", "")
        if method == "awq" or "awq" in packing:
            return formats.awq(part, awq_word_size(part))
        part = dict(part)
        cols = part["qweight"].shape[0] * 8
        part.setdefault("g_idx", torch.arange(cols) // -(-cols // part["scales"].shape[0]))
        version = "gptq_v2" if "v2" in packing else declared.get("checkpoint_format", "gptq")
        return formats.gptq(part, {"checkpoint_format": version})
    if "weight_packed" in part:
        known = formats.definition(part, {"quant_method": "compressed-tensors"})
        return known(part, declared)
    if "weight" not in part:
        return None
    kind = part["weight"].dtype
    scale = part.get("weight_scale", part.get("weight_scale_inv"))
    if kind == torch.uint8 and "weight_scale_2" in part:
        return formats.nvfp4(part, declared)
    if kind == torch.uint8:
        return formats.mxfp4({"weight_packed": part["weight"], "weight_scale": scale}, declared)
    if kind == torch.float8_e4m3fn and scale.dtype == torch.uint8:
        return formats.mxfp8({**part, "weight_scale": scale}, declared)
    if kind == torch.float8_e4m3fn:
        rows, cols = part["weight"].shape
        return fp8(part, scale, [128, 128])
    if kind in (torch.bfloat16, torch.float16, torch.float32):
        return part["weight"].double()
    raise ValueError(f"weights of {kind} with {sorted(part)}")


def block_tensors(folder):
    from safetensors.torch import load_file
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        if file.name != "golden.safetensors":
            tensors |= load_file(file)
    return {name: t for name, t in tensors.items() if ".mlp." in name or ".block_sparse_moe." in name}


def plain(folder):
    """The tensors of the MoE blocks in float32, with the names of an unquantised checkpoint."""
    declared, modules, out = declaration(folder) or {"quant_method": ""}, {}, {}
    for name, tensor in block_tensors(folder).items():
        stem, _, leaf = name.rpartition(".")
        modules.setdefault(stem, {})[leaf] = tensor
    for stem, part in modules.items():
        part = {leaf: tensor for leaf, tensor in part.items() if leaf not in TOOL_LEAVES}
        quantised = {"weight", "weight_packed", "qweight"} & set(part)
        if quantised:
            out[f"{stem}.weight"] = values(part, declared).float().contiguous()
        for leaf, tensor in part.items():
            if leaf not in STORED_LEAVES:
                out[f"{stem}.{leaf}"] = tensor.float()
    return out


def record(out, only):
    import torch
    import transformers
    from golden import blocks, fuse, load, record as run, token_ids
    from safetensors.torch import load_file, save_file
    transformers.logging.set_verbosity_error()
    # Rows are divided by 8: the gates of these models are so steep that float32 decides the fifth digit of weights otherwise.
    for name, folder in folders(out, only):
        if (folder / "golden.safetensors").exists():
            continue
        try:
            family = next(path.name for path in sorted((out / "models").iterdir()) if folder.name.startswith(path.name))
            found, original = plain(folder), load_file(out / "models" / family / "model.safetensors")
            if family == "mixtral":  # llm-compressor renames its projections
                for old, new in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
                    found = {key.replace(old, new): tensor for key, tensor in found.items()}
            if family == "gpt_oss" and any(".experts.0." in key for key in found):
                found = fuse(found, "gpt_oss")
            worst = {}
            for key, tensor in found.items():
                if "expert" in key and key in original and tensor.dim() > 1:
                    before = original[key].float()
                    kind = "shared" if "shared" in key else "routed"
                    error = ((tensor - before).norm() / before.norm()).item()
                    worst[kind] = max(worst.get(kind, 0), error)
            with tempfile.TemporaryDirectory() as copy:
                copy = pathlib.Path(copy)
                config = json.loads((out / "models" / family / "config.json").read_text())
                (copy / "config.json").write_text(json.dumps(config))
                save_file(found, copy / "model.safetensors", metadata={"format": "pt"})
                model = load(copy)
                for _, block, _ in blocks(model):
                    block.register_forward_pre_hook(lambda _, given: (given[0] / 8, *given[1:]))
                save_file(run(model, token_ids(24)), folder / "golden.safetensors")
            text = ", ".join(f"{kind} {error:.4f}" for kind, error in worst.items()) or "no tensor compared"
            (folder / "recorded").write_text(text)
            print(f"{name}: recorded; largest change of a matrix: {text}", flush=True)
        except Exception as error:
            print(f"{name}: NOT RECORDED: {type(error).__name__}: {str(error)[:300]}", flush=True)


def compare(out, only):
    """Dequantises with compressed-tensors, given scales in float32 so that it does not round to bf16, and with the definitions."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    for name, folder in folders(out, only):
        declared = declaration(folder)
        if (declared or {}).get("quant_method") != "compressed-tensors":
            continue
        modules, worst, count = {}, 0.0, 0
        for key, tensor in block_tensors(folder).items():
            stem, _, leaf = key.rpartition(".")
            modules.setdefault(stem, {})[leaf] = tensor
        for stem, part in modules.items():
            part = {leaf: tensor for leaf, tensor in part.items() if leaf in STORED_LEAVES}
            kind = part.get("weight_packed", part.get("weight", torch.zeros(1))).dtype
            if "weight_scale" not in part or ".experts.1." not in stem or kind == torch.int8:
                continue
            bits = 8 if kind == torch.float8_e4m3fn else 4
            if not any(g["weights"]["num_bits"] == bits for g in declared["config_groups"].values()):
                continue
            group = next(g for g in declared["config_groups"].values() if g["weights"]["num_bits"] == bits)
            scheme = QuantizationScheme(targets=["Linear"], weights=group["weights"], format=group.get("format"))
            form = group.get("format") or declared["format"]
            wide = {leaf: t.float() if leaf == "weight_scale" and t.dtype in (torch.bfloat16, torch.float16) else t
                    for leaf, t in part.items()}
            theirs = BaseCompressor.get_value_from_registry(form).decompress(wide, scheme)["weight"].double()
            ours = values(part, declared)
            worst = max(worst, ((theirs - ours).abs() / ours.abs().clamp(min=1e-30)).max().item())
            count += 1
        print(f"{name}: {count} matrices, largest relative difference to compressed-tensors {worst:.1e}", flush=True)


def serve(out, only, expertd):
    for name, folder in folders(out, only):
        shown = subprocess.run([expertd, "inspect", folder], capture_output=True, text=True)
        if shown.returncode:
            print(f"{name}: REFUSED: {shown.stderr.strip()[:420]}", flush=True)
            continue
        kind = "; ".join(re.findall(r"^  weights +(.*)$|^  shared +(?!none)(.*)$", shown.stdout, re.M)[0][:1])
        if not (folder / "golden.safetensors").exists():
            print(f"{name}: opened ({kind}), not recorded", flush=True)
            continue
        with tempfile.TemporaryDirectory() as place:
            socket, port = f"unix:{place}/s", 21000 + os.getpid() % 20000
            service = subprocess.Popen(
                [expertd, "serve", "--model", folder, "--ranks", "2", "--device", "cpu", "--listen", socket,
                 "--admin-listen", f"unix:{place}/a", "--metrics-listen", f"127.0.0.1:{port}", "--fp8-compute", "bf16"],
                stdout=subprocess.DEVNULL, stderr=open(f"{place}/log", "w"))
            try:
                deadline = time.time() + 90
                while not pathlib.Path(f"{place}/s").exists() and service.poll() is None and time.time() < deadline:
                    time.sleep(0.1)
                for _ in range(60):
                    done = subprocess.run([expertd, "verify", "--address", socket, "--golden", folder / "golden.safetensors", "--json"],
                                          capture_output=True, text=True, timeout=60)
                    if done.stdout.strip() or service.poll() is not None:
                        break
                    time.sleep(0.5)
                if done.stdout.strip():
                    report = json.loads(done.stdout)
                    error = max(layer["largest_error"] for layer in report["layers"])
                    text = json.dumps(report)[:200] if done.returncode else f"ok {error:.1e}"
                else:
                    text = f"NO ANSWER: {done.stderr.strip()[-200:]} {pathlib.Path(place, 'log').read_text()[-300:]}"
                print(f"{name}: {text} ({kind})", flush=True)
            finally:
                service.terminate()
                service.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("step", choices=["record", "compare", "serve"])
    parser.add_argument("--only", default="")
    parser.add_argument("--expertd", default="expertd")
    arguments = parser.parse_args()
    if arguments.step == "record":
        record(arguments.out, arguments.only)
    elif arguments.step == "compare":
        compare(arguments.out, arguments.only)
    else:
        serve(arguments.out, arguments.only, arguments.expertd)


if __name__ == "__main__":
    main()
