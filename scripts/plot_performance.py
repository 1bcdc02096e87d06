#!/usr/bin/env python3
"""Draws times over rows per rank, both axes logarithmic: ours, peers and the floor, one panel for each run.

Without arguments it draws every picture of docs/measurements again. With arguments it draws one picture:

    scripts/plot_performance.py gpus.json gpus.svg --runs qwen3-30b-a3b/bf16 deepseek-v3/fp8

The input is what `loadtest/peers/gpu_compare.py --json FILE` or `expertd bench --json FILE` writes. A run is
named SHAPE/FORMAT; SHAPE alone means all formats. `--check` draws nothing: it fails when a picture of
docs/measurements differs from what its JSON gives. Python's standard library is all that is needed.
"""

import argparse
import json
import math
import sys
from html import escape
from pathlib import Path

MEASUREMENTS = Path(__file__).resolve().parents[1] / "docs/measurements"

# The pictures in the documents: file, JSON, the runs that it shows (all if empty), title.
PICTURES = [
    (
        "steps-1-gpu.svg",
        "steps-1-gpu.json",
        ["qwen3-30b-a3b/bf16", "qwen3-30b-a3b/fp8", "deepseek-v3", "mixtral-8x7b", "gpt-oss-120b"],
        "One MoE layer on one H200, gate to combine",
    ),
    (
        "steps-4-gpus.svg",
        "steps-4-gpus-flashinfer-deepgemm.json",
        ["qwen3-30b-a3b", "deepseek-v3"],
        "One MoE layer on 4 × H200, gate to combine",
    ),
    (
        "steps-4-gpus-other-peers.svg",
        "steps-4-gpus-triton-nccl-ep.json",
        [],
        "One MoE layer on 4 × H200 in bf16, gate to combine, beside other peers",
    ),
    (
        "exchange-4-gpus.svg",
        "exchange-4-gpus.json",
        ["exchange-h2048-e128-k8", "exchange-h7168-e256-k8"],
        "dispatch + combine on 4 × H200 in bf16",
    ),
]

SHAPES = {
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "olmoe-7b": "OLMoE-7B",
    "mixtral-8x7b": "Mixtral-8x7B",
    "deepseek-v3": "DeepSeek-V3, routed experts",
}
FORMATS = {"bf16": "bf16", "fp8": "FP8 weights", "mxfp4": "MXFP4 weights"}

# Name, colour on light background, colour on dark background, marker. The colours are those of Okabe and Ito, which
# colour-blind readers can distinguish; the marker identifies a line without its colour.
OURS = ("expertd", "#0072b2", "#56b4e9", "circle")
FLOOR = ("floor", "#59636e", "#9198a1", None)
PEERS = {
    "flashinfer": ("FlashInfer", "#d55e00", "#ff8b3d", "square"),
    "deepgemm": ("DeepGEMM", "#aa4490", "#e8a0cd", "diamond"),
    "deepgemm_masked": ("DeepGEMM", "#aa4490", "#e8a0cd", "diamond"),
    "triton_kernels": ("triton_kernels", "#00795a", "#2fc79b", "square"),
    "torch": ("PyTorch", "#8a6d00", "#e8c33c", "triangle"),
    "triton": ("Triton", "#00795a", "#2fc79b", "square"),
    "nccl_ep": ("NCCL EP", "#aa4490", "#e8a0cd", "diamond"),
}
UNKNOWN_PEER = ("#59636e", "#9198a1", "cross")

PANEL_WIDTH, PANEL_HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 92, 34, 44
HEAD, FOOT = 34, 26
LABEL_GAP = 15


class BadInput(Exception):
    """The JSON does not hold what the picture needs."""


def read_runs(path):
    """All runs of a file, as `gpu_compare.py` names their parts."""
    try:
        found = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise BadInput(f"{path}: cannot be read as JSON: {error}") from error
    if "runs" in found:
        return found["runs"]
    if "sizes" in found:  # of `expertd bench`, which has no peers
        return [{"shape": path.stem, "ours": found["sizes"], "peers": {}}]
    raise BadInput(f"{path}: expected the key runs (gpu_compare.py) or sizes (expertd bench), found {sorted(found)}")


def chosen(runs, names):
    """The runs that `names` name, in the order of the names."""
    if not names:
        return runs
    picked = []
    for name in names:
        shape, _, kind = name.partition("/")
        here = [r for r in runs if r["shape"] == shape and (not kind or r.get("format", "bf16") == kind)]
        if not here:
            known = ", ".join(f"{r['shape']}/{r.get('format', 'bf16')}" for r in runs)
            raise BadInput(f"no run is called {name}; the file holds {known}")
        picked += here
    return picked


def lines_of(run):
    """Lines of a panel: (style, whether the line is the floor, [(rows per rank, µs)])."""
    ours = [(f["tokens_per_rank"], f["without_copies_seconds"] * 1e6) for f in run["ours"]]
    floor = [
        (f["tokens_per_rank"], f["floor"]["step_seconds"] * 1e6) for f in run["ours"] if f.get("floor")
    ]
    lines = []
    for name, figures in run["peers"].items():
        points = [(f["tokens_per_rank"], f["median_us"]) for f in figures if not f.get("wrong")]
        lines.append((PEERS.get(name, (name, *UNKNOWN_PEER)), False, points))
    lines.append((FLOOR, True, floor))
    lines.append((OURS, False, ours))  # last, so that it lies above the others
    return [(style, is_floor, sorted(points)) for style, is_floor, points in lines if points]


def ticks(low, high):
    """Every 1, 2, 5, 10, 20, … between `low` and `high`."""
    return [f * 10**power for power in range(-2, 8) for f in (1, 2, 5) if low <= f * 10**power <= high]


def marker(kind, x, y):
    if kind == "circle":
        return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="3.8"/>'
    paths = {
        "square": "m-3.4-3.4h6.8v6.8h-6.8z",
        "diamond": "m0-4.8 4.2 4.8-4.2 4.8-4.2-4.8z",
        "triangle": "m0-4.8 4.4 8h-8.8z",
        "cross": "m-4-1h3v-3h2v3h3v2h-3v3h-2v-3h-3z",
    }
    return f'<path class="mark" d="M{x:.1f} {y:.1f}{paths[kind]}"/>'


def spread(wanted, low, high):
    """Heights for labels that should be near `wanted`: at least `LABEL_GAP` apart, between `low` and `high`."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = {}
    floor = low
    for i in order:
        placed[i] = max(wanted[i], floor)
        floor = placed[i] + LABEL_GAP
    ceiling = high
    for i in reversed(order):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - LABEL_GAP
    return [placed[i] for i in range(len(wanted))]


class Panel:
    """One run: axes, lines, and each line's name at its right end."""

    def __init__(self, run, most_rows):
        self.run = run
        micros = [micros for _, _, points in lines_of(run) for _, micros in points]
        self.low, self.high = min(micros) / 1.2, max(micros) * 1.2
        self.most_rows = most_rows
        self.width, self.height = PANEL_WIDTH - LEFT - RIGHT, PANEL_HEIGHT - TOP - BOTTOM

    def x(self, rows):
        return LEFT + math.log(rows) / (math.log(self.most_rows) or 1) * self.width

    def y(self, micros):
        return TOP + math.log(self.high / micros) / math.log(self.high / self.low) * self.height

    def title(self):
        kind = self.run.get("format")
        name = self.run.get("title") or SHAPES.get(self.run["shape"], self.run["shape"])
        return name + (f", {FORMATS.get(kind, kind)}" if kind and "title" not in self.run else "")

    def draw(self):
        run_lines = lines_of(self.run)
        right = PANEL_WIDTH - RIGHT
        out = [f'<text class="name" x="{LEFT}" y="{TOP - 13}">{escape(self.title())}</text>']
        for value in ticks(self.low, self.high):
            y = self.y(value)
            out.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
            out.append(f'<text class="tick" text-anchor="end" x="{LEFT - 7}" y="{y + 4:.1f}">{value:g}</text>')
        rows = sorted({point[0] for _, _, points in run_lines for point in points})
        bottom = TOP + self.height
        last = -math.inf
        for value in rows:
            x = self.x(value)
            out.append(f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>')
            if x - last >= 34:
                out.append(f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{bottom + 17}">{value}</text>')
                last = x
        middle = (LEFT + right) / 2
        out.append(f'<text class="tick" text-anchor="middle" x="{middle}" y="{bottom + 35}">rows per rank</text>')
        out.append(f'<text class="tick" text-anchor="end" x="{LEFT - 7}" y="{TOP - 13}">µs</text>')
        ends = [self.y(points[-1][1]) for _, _, points in run_lines]
        heights = spread(ends, TOP + 4, bottom - 2)
        for (style, is_floor, points), end, height in zip(run_lines, ends, heights):
            out.append(self.line(style, is_floor, points, end, height))
        return "\n".join(out)

    def line(self, style, is_floor, points, end, height):
        name, _, _, kind = style
        places = [(self.x(rows), self.y(micros)) for rows, micros in points]
        path = "M" + " ".join(f"{x:.1f} {y:.1f}" for x, y in places)
        css = css_name(name)
        right = PANEL_WIDTH - RIGHT
        # A line from the last point to its name, where the name had to move or the line ends early.
        leader = f"M{places[-1][0] + 6:.1f} {end:.1f}L{right + 9} {height:.1f}"
        parts = [f'<g class="{css}">', f'<path class="line{" dashed" if is_floor else ""}" d="{path}"/>']
        parts.append(f'<path class="leader" d="{leader}"/>')
        parts += [marker(kind, x, y) for x, y in places if kind]
        weight = ' font-weight="bold"' if style is OURS else ""
        parts.append(f'<text class="end"{weight} x="{right + 12}" y="{height + 4:.1f}">{escape(name)}</text></g>')
        return "\n".join(parts)


def css_name(name):
    return "s-" + "".join(c if c.isalnum() else "-" for c in name.lower())


def style_sheet(styles):
    light = "".join(f".{css_name(n)}{{color:{colour}}}" for n, colour, _, _ in styles)
    dark = "".join(f".{css_name(n)}{{color:{colour}}}" for n, _, colour, _ in styles)
    return (
        "text{font-family:system-ui,'Helvetica Neue',Arial,'DejaVu Sans',sans-serif;font-size:12px;fill:#1f2328}"
        ".title{font-size:15px;font-weight:600}.name{font-size:13px;font-weight:600}.tick{fill:#59636e}"
        ".card{fill:#fff}.grid{stroke:#d1d9e0;stroke-width:.7}"
        ".line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round}.dashed{stroke-dasharray:5 4}"
        ".leader{fill:none;stroke:currentColor;stroke-width:.8;stroke-dasharray:1.5 2.5}"
        ".s-expertd .line{stroke-width:2.8}.mark,.end{fill:currentColor}"
        f"{light}"
        "@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.tick{fill:#9198a1}.card{fill:#0d1117}"
        f".grid{{stroke:#30363d}}.end{{fill:currentColor}}{dark}}}"
    )


def draw(runs, title, foot):
    """The picture as SVG text."""
    all_lines = [line for run in runs for line in lines_of(run)]
    if not all_lines:
        raise BadInput("the chosen runs hold no figures")
    most_rows = max(rows for _, _, points in all_lines for rows, _ in points)
    columns = min(2, len(runs))
    width = columns * PANEL_WIDTH + 16
    height = HEAD + math.ceil(len(runs) / columns) * PANEL_HEIGHT + FOOT
    styles = {line[0][0]: line[0] for line in all_lines}.values()
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' role="img">',
        f"<title>{escape(title)}: µs over rows per rank, logarithmic axes; lower is faster</title>",
        f"<style>{style_sheet(styles)}</style>",
        f'<rect class="card" width="{width}" height="{height}" rx="8"/>',
        f'<text class="title" x="16" y="26">{escape(title)}</text>',
    ]
    for number, run in enumerate(runs):
        panel = Panel(run, most_rows)
        x, y = number % columns * PANEL_WIDTH + 8, HEAD + number // columns * PANEL_HEIGHT
        out.append(f'<g transform="translate({x} {y})">\n{panel.draw()}\n</g>')
    out.append(f'<text class="tick" x="16" y="{height - 11}">{escape(foot)}</text>')
    out.append("</svg>\n")
    return "\n".join(out)


def foot_of(path):
    """Where the figures come from, in one line."""
    about = json.loads(path.read_text()).get("about") or {}
    parts = ["Medians; lower is faster."]
    if about.get("measured"):
        parts.append(f"Measured {about['measured']}" + (f" at {about['commit']}." if about.get("commit") else "."))
    return " ".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, nargs="?", help="JSON to draw [default: the pictures of docs/measurements]")
    parser.add_argument("output", type=Path, nargs="?", help="SVG to write")
    parser.add_argument("--runs", nargs="+", default=[], metavar="SHAPE[/FORMAT]", help="runs to draw [default: all]")
    parser.add_argument("--title", default="One MoE layer, gate to combine")
    parser.add_argument("--check", action="store_true", help="fail if a picture of docs/measurements is not current")
    args = parser.parse_args()
    if args.input and not args.output:
        parser.error("an input needs an output: the SVG to write")
    if args.input:
        pictures = [(args.output, args.input, args.runs, args.title)]
    else:
        pictures = [(MEASUREMENTS / svg, MEASUREMENTS / data, runs, title) for svg, data, runs, title in PICTURES]
    stale = []
    try:
        for svg, data, names, title in pictures:
            text = draw(chosen(read_runs(data), names), title, foot_of(data))
            if args.check:
                stale += [] if svg.exists() and svg.read_text() == text else [svg]
            else:
                svg.write_text(text)
                print(svg)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 1
    for svg in stale:
        print(f"{svg} differs from its JSON; run scripts/plot_performance.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
