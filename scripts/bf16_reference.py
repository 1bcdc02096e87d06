#!/usr/bin/env python3
"""Measures the accuracy of Hugging Face's MoE blocks in bf16, the standard for GPU ranks, which also compute in bf16.

    python scripts/bf16_reference.py [--device cuda] [--write] [FOLDER]

Loads every checkpoint under FOLDER (default: those in tests/fixtures/golden) in bf16, runs its blocks on the recorded rows, and prints
the relative L2 error of the rows against the recorded float32 output. Rows that the block's gate routes differently from the
recording are counted and left out. With --write, a file bf16-error beside each recording holds the root mean square, which the test
`other_checkpoints` allows GPU ranks as well. Needs torch, transformers and safetensors.
"""

import argparse
import pathlib
import statistics

import recorded_checkpoints
import torch
import transformers
from safetensors.torch import load_file

from golden import auto_class, blocks


def errors(folder, device):
    """Returns the relative errors of the rows, and the number of rows that were routed differently."""
    golden = load_file(folder / "golden.safetensors")
    auto = auto_class(transformers.AutoConfig.from_pretrained(folder))
    model = auto.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation="eager").eval().to(device)
    found, rerouted, routed = [], 0, {}

    def watch(number, block, gate):
        wanted = golden[f"layers.{number}.output"].double()
        rows = golden[f"layers.{number}.input"].to(device, torch.bfloat16)

        def give_recorded(_, args, kwargs):
            if args:
                return (rows.view_as(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": rows.view_as(kwargs["hidden_states"])}

        def note_routing(_, args, result):
            if isinstance(result, tuple) and len(result) == 3:
                routed[number] = result[2].cpu()

        def compare(_, args, kwargs, result):
            nonlocal rerouted
            got = (result[0] if isinstance(result, tuple) else result).detach().cpu().double().view_as(wanted)
            row_errors = (got - wanted).norm(dim=1) / wanted.norm(dim=1)
            same = torch.ones(len(wanted), dtype=torch.bool)
            if f"layers.{number}.topk_ids" in golden and number in routed:
                recorded = golden[f"layers.{number}.topk_ids"].long().sort(1).values
                same = (routed[number].long().sort(1).values == recorded).all(1)
            rerouted += int((~same).sum())
            found.extend(row_errors[same].tolist())

        block.register_forward_pre_hook(give_recorded, with_kwargs=True)
        gate.register_forward_hook(note_routing)
        block.register_forward_hook(compare, with_kwargs=True)

    for number, block, gate in blocks(model):
        watch(number, block, gate)
    with torch.no_grad():
        model(input_ids=golden["input_ids"].to(device))
    return found, rerouted


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, nargs="?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    print("| family | rows | median error | root mean square | largest error | rows routed differently |")
    print("|---|---|---|---|---|---|")
    root = arguments.folder or recorded_checkpoints.ROOT / "tests/fixtures/golden"
    for folder in sorted(path.parent for path in root.glob("*/golden.safetensors")):
        if arguments.folder is None:
            folder = recorded_checkpoints.folder(f"golden/{folder.name}")
        found, rerouted = errors(folder, arguments.device)
        middle, mean, largest = statistics.median(found), statistics.fmean(error**2 for error in found) ** 0.5, max(found)
        print(f"| {folder.name} | {len(found)} | {middle:.1e} | {mean:.1e} | {largest:.1e} | {rerouted} |", flush=True)
        if arguments.write:
            (folder / "bf16-error").write_text(f"{mean:.1e}\n")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    main()
