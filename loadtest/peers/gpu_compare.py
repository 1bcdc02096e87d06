#!/usr/bin/env python3
"""Compares whole steps on GPUs, `expertd bench --device cuda`, with peers and floors measured in the same run.

See README.md beside this file.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE / "gpu"))

# Arguments of `expertd synth` for each shape; layers are used in turn.
SYNTH = {
    "qwen3-30b-a3b": ["--family", "qwen3_moe", "--layers", "2"],
    "olmoe-7b": ["--family", "olmoe", "--layers", "2"],
    "mixtral-8x7b": ["--family", "mixtral", "--layers", "2"],
    # One layer of 22.5 GB without shared experts, because the peers have none.
    "deepseek-v3": ["--family", "qwen3_moe", "--layers", "1"],
    "gpt-oss-120b": ["--family", "gpt_oss", "--layers", "2"],
}
# Peers' programs and the formats of weights that they support.
PEERS = {
    "torch": ("torch_layer.py", ["bf16"]),
    "triton": ("triton_layer.py", ["bf16", "fp8"]),
    "nccl_ep": ("nccl_ep_layer.py", ["bf16"]),
    "flashinfer": ("flashinfer_layer.py", ["bf16", "fp8"]),
    "deepgemm": ("deepgemm_layer.py", ["fp8"]),
    "deepgemm_masked": ("deepgemm_masked_layer.py", ["fp8"]),
    "triton_kernels": ("triton_kernels_layer.py", ["mxfp4"]),
}
# Peers that exchange rows between GPUs and so do not run on one.
EXCHANGING = ["nccl_ep"]
SIZES = {  # the sizes in gpu/layer.py, which cannot be imported without torch
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "olmoe-7b": (2048, 1024, 64, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "deepseek-v3": (7168, 2048, 256, 8),
    "gpt-oss-120b": (2880, 2880, 128, 4),
}


def quiet_run(command, patience, **options):
    """Runs a command for at most `patience` seconds; its output is shown only if it fails."""
    # The timeout also ends the children of a launcher: they are in one process group.
    command = ["timeout", "--kill-after=5", patience, *command]
    done = subprocess.run([str(word) for word in command], text=True, capture_output=True, **options)
    if done.returncode != 0:
        print(f"{' '.join(map(str, command))} failed with {done.returncode}:", file=sys.stderr)
        print((done.stdout + done.stderr)[-3000:], file=sys.stderr)
    return done


def ceilings(args):
    done = quiet_run([args.python, HERE / "gpu/ceilings.py"], args.patience)
    return json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else None


def ours(args, ranks, shape, tokens, found, folder):
    """`expertd bench` on a synthesised checkpoint of the shape."""
    hidden, width, experts, k = SIZES[shape]
    model = Path(args.models or folder) / f"{shape}-{args.dtype}"
    if not (model / "config.json").exists():
        sizes = ["--hidden", hidden, "--width", width, "--experts", experts, "--top-k", k, "--dtype", args.dtype]
        if quiet_run([args.expertd, "synth", "--out", model, *SYNTH[shape], *sizes], args.patience).returncode:
            return []
    report = Path(folder) / f"{shape}-{args.dtype}-{ranks}.json"
    command = [args.expertd, "bench", "--model", model, "--device", "cuda", "--ranks", ranks, "--json", report]
    command += ["--steps", args.steps, "--warmup", 10, "--routing", args.routing]
    command += ["--tokens", ",".join(map(str, tokens)), "--aligned"]
    if args.fp8_compute:
        command += ["--fp8-compute", args.fp8_compute]
    if args.mxfp4_compute:
        command += ["--mxfp4-compute", args.mxfp4_compute]
    if found:
        command += ["--memory-gbps", found["memory_read_bytes_per_second"] / 1e9]
        command += ["--tensor-tflops", found["tensor_sustained_flops"] / 1e12]
        if ranks > 1 and found["link_bytes_per_second"]:
            command += ["--link-gbps", found["link_bytes_per_second"] / 1e9]
    done = quiet_run(command, args.patience)
    if done.returncode != 0:
        return []
    print(done.stdout, flush=True)
    return json.loads(report.read_text())["sizes"]


def peer(args, name, ranks, shape, tokens, folder):
    report = Path(folder) / f"{name}-{shape}-{ranks}.json"
    launcher = [args.python]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    # NVLink multicast stays off: a program that fails while it uses it can stop GPUs of others.
    environment = dict(os.environ, NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", OMP_NUM_THREADS="4")
    if args.peer_site:
        environment["PEER_SITE"] = str(Path(args.peer_site).resolve())
    if name == "nccl_ep":
        library = Path(args.nccl_home) / "lib/libnccl.so.2"
        environment |= dict(
            NCCL_HOME=args.nccl_home,
            NCCL_EP_HOME=str(Path(args.peer_site) / "nccl/ep"),
            LD_PRELOAD=str(library),
            LD_LIBRARY_PATH=f"{library.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        )
    command = [*launcher, HERE / "gpu" / PEERS[name][0], "--shape", shape, "--replays", args.replays, "--json", report]
    command += ["--dtype", args.dtype] if args.dtype != "bf16" else []
    done = quiet_run([*command, "--tokens", *tokens], args.patience, env=environment)
    print(done.stdout, file=sys.stderr, flush=True)
    if done.returncode != 0 or not report.exists():
        return []
    return json.loads(report.read_text())["sizes"]


def row(tokens, mine, others):
    floor = (mine.get("floor") or {}).get("step_seconds")
    inner = mine.get("without_copies_seconds")
    times = sorted(mine.get("step_seconds", []))
    cell = lambda value: f"{value * 1e6:.0f}" if value else "-"
    cells = [str(tokens), cell(times[len(times) // 2] if times else None), cell(inner), cell(floor)]
    cells.append(f"{inner / floor:.2f}" if inner and floor else "-")
    best = None
    for name, figures in others.items():
        here = next((f for f in figures if f["tokens_per_rank"] == tokens), None)
        if here is None or here.get("wrong"):
            cells.append("wrong" if here else "-")
            continue
        cells.append(f"{here['median_us']:.0f}")
        best = min(best or here["median_us"], here["median_us"])
    cells.append(f"{best / (inner * 1e6):.2f}" if best and inner else "-")
    return "| " + " | ".join(cells) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SYNTH, nargs="+", default=["qwen3-30b-a3b"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="numbers of GPUs to measure with")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 512, 2048], help="rows per rank")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["torch", "triton"])
    formats = ["bf16", "fp8", "mxfp4"]
    parser.add_argument("--dtype", choices=formats, default="bf16", help="format of the weights; README.md says which peers have it")
    parser.add_argument("--fp8-compute", choices=["fp8", "bf16"], help="how expertd multiplies FP8 weights [default: expertd's]")
    parser.add_argument("--mxfp4-compute", choices=["fp8", "bf16"], help="the same for MXFP4 weights")
    parser.add_argument("--routing", default="gate", help="routing of expertd's steps; each peer uses its own gate")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--expertd", default=str(ROOT / "target/release/expertd"), help="built with --features cuda")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch and triton")
    parser.add_argument("--models", help="directory for synthesised checkpoints [default: a temporary one]")
    parser.add_argument("--peer-site", help="directory with the unpacked wheels of nccl_ep, flashinfer or deepgemm")
    parser.add_argument("--nccl-home", help="NCCL 2.30.7: lib and include, for nccl_ep")
    parser.add_argument("--patience", type=int, default=300, help="time limit of each program in seconds")
    parser.add_argument("--commit", help="commit that the binary was built from, for the record")
    parser.add_argument("--json", type=Path, help="write everything to this file, for scripts/plot_performance.py")
    args = parser.parse_args()
    if "nccl_ep" in args.peers and not (args.peer_site and args.nccl_home):
        parser.error("nccl_ep needs --peer-site and --nccl-home")
    unpacked = [name for name in ("flashinfer", "deepgemm", "deepgemm_masked", "triton_kernels") if name in args.peers]
    if unpacked and not args.peer_site:
        parser.error(f"{', '.join(unpacked)}: --peer-site is missing, the folder with the unpacked wheels")
    with tempfile.TemporaryDirectory() as folder:
        found = ceilings(args)
        print(f"ceilings: {json.dumps(found)}")
        about = {"measured": time.strftime("%Y-%m-%d"), "commit": args.commit}
        everything = {"about": about, "ceilings": found, "runs": []}
        for shape in args.shape:
            for ranks in args.ranks:
                mine = ours(args, ranks, shape, args.tokens, found, folder)
                # One peer has gpt-oss's activation, and only that; a single rank has no peer to exchange with.
                able = [name for name in args.peers if args.dtype in PEERS[name][1]]
                able = [name for name in able if (name == "triton_kernels") == (shape == "gpt-oss-120b")]
                names = [name for name in able if ranks > 1 or name not in EXCHANGING]
                others = {name: peer(args, name, ranks, shape, args.tokens, folder) for name in names}
                run = dict(shape=shape, ranks=ranks, format=args.dtype, routing=args.routing, ours=mine, peers=others)
                everything["runs"].append(run)
                print(f"\n{shape}, {ranks} ranks, {args.dtype}, medians in µs")
                columns = ["rows per rank", "step", "without copies", "floor", "x floor", *names, "best peer / ours"]
                print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
                for tokens in args.tokens:
                    here = next((m for m in mine if m["tokens_per_rank"] == tokens), {})
                    print(row(tokens, here, others), flush=True)
                if args.json:
                    args.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
