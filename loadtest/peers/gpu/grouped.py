"""A small grouped MLP in Triton: rows sorted by expert, two GEMMs, silu and product in the first one's epilogue.

PEER_TUNED names a folder with files of tile sizes as vLLM ships them for its fused MoE; without a file for the shape, sizes are those
of `config`.
"""

import json
import os
from pathlib import Path

import torch
import triton
import triton.language as tl


@triton.jit
def count_kernel(ids, counts, place, first, local, entries, BLOCK: tl.constexpr):
    """Gives each choice of a local expert its index among that expert's rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + at, mask=at < entries, other=-1).to(tl.int32) - first
    mine = (expert >= 0) & (expert < local)
    old = tl.atomic_add(counts + expert, 1, mask=mine)
    tl.store(place + at, old, mask=mine)


@triton.jit
def tiles_kernel(counts, starts, tile_expert, local, tiles, EXPERTS: tl.constexpr, TILES: tl.constexpr, M: tl.constexpr):
    """Computes each expert's first row, in whole tiles of M rows, and the expert of each tile."""
    expert = tl.arange(0, EXPERTS)
    needed = (tl.load(counts + expert, mask=expert < local, other=0) + M - 1) // M
    ends = tl.cumsum(needed, 0)
    tl.store(starts + expert, (ends - needed) * M, mask=expert < local)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    owner = tl.sum((tile[:, None] >= ends[None, :]).to(tl.int32), 1)
    tl.store(tile_expert + tile, tl.where(owner < local, owner, -1), mask=tile < tiles)


@triton.jit
def list_kernel(ids, place, starts, listed, first, local, entries, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + at, mask=at < entries, other=-1).to(tl.int32) - first
    mine = (expert >= 0) & (expert < local)
    slot = tl.load(starts + expert, mask=mine, other=0) + tl.load(place + at, mask=mine, other=0)
    tl.store(listed + slot, at, mask=mine)


@triton.jit
def tile_of(program, tiles, columns, TOGETHER: tl.constexpr):
    """Tile and column of a program: TOGETHER tiles take a column in turn, so that its weights are in the cache."""
    group = program // (TOGETHER * columns)
    first = group * TOGETHER
    here = tl.minimum(tiles - first, TOGETHER)
    within = program % (TOGETHER * columns)
    return first + within % here, within // here


@triton.jit
def gate_up_kernel(
    x, w, h, listed, tile_expert, counts, inter, hidden, capacity, tiles_per_expert,
    K: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """h[slot] = silu(x[row] gate^T) * (x[row] up^T). Rows by `listed`, or PADDED: [experts, capacity, hidden]."""
    columns = tl.cdiv(inter, N)
    tile, column = tile_of(tl.program_id(0), tl.num_programs(0) // columns, columns, TOGETHER)
    lane = tl.arange(0, M)
    if PADDED:
        expert = tile // tiles_per_expert
        row = (tile % tiles_per_expert) * M + lane
        rows_here = tl.load(counts + expert)
        if (tile % tiles_per_expert) * M >= rows_here:
            return
        valid = row < rows_here
        slot = expert.to(tl.int64) * capacity + row
        source = slot
    else:
        expert = tl.load(tile_expert + tile)
        if expert < 0:
            return
        slot = tile.to(tl.int64) * M + lane
        entry = tl.load(listed + slot)
        valid = entry >= 0
        source = (entry // K).to(tl.int64)
    features = column * N + tl.arange(0, N)
    inside = features < inter
    base = w + expert.to(tl.int64) * 2 * inter * hidden
    gate_at = base + features[:, None].to(tl.int64) * hidden
    up_at = gate_at + inter.to(tl.int64) * hidden
    x_at = x + source[:, None] * hidden
    gate = tl.zeros((M, N), tl.float32)
    up = tl.zeros((M, N), tl.float32)
    for start in range(0, hidden, BK):
        inner = start + tl.arange(0, BK)
        rows = tl.load(x_at + inner[None, :], mask=valid[:, None], other=0.0)
        gate_w = tl.load(gate_at + inner[None, :], mask=inside[:, None], other=0.0)
        up_w = tl.load(up_at + inner[None, :], mask=inside[:, None], other=0.0)
        gate = tl.dot(rows, gate_w.T, gate)
        up = tl.dot(rows, up_w.T, up)
    product = gate * tl.sigmoid(gate) * up
    to = h + slot[:, None] * inter + features[None, :]
    tl.store(to, product.to(tl.bfloat16), mask=valid[:, None] & inside[None, :])


@triton.jit
def down_kernel(
    h, w, y, listed, weights, tile_expert, counts, inter, hidden, capacity, tiles_per_expert,
    PADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """y[entry] = weight * h[slot] down^T; if PADDED, y[slot] without the weight."""
    columns = tl.cdiv(hidden, N)
    tile, column = tile_of(tl.program_id(0), tl.num_programs(0) // columns, columns, TOGETHER)
    lane = tl.arange(0, M)
    if PADDED:
        expert = tile // tiles_per_expert
        row = (tile % tiles_per_expert) * M + lane
        rows_here = tl.load(counts + expert)
        if (tile % tiles_per_expert) * M >= rows_here:
            return
        valid = row < rows_here
        slot = expert.to(tl.int64) * capacity + row
        target = slot
    else:
        expert = tl.load(tile_expert + tile)
        if expert < 0:
            return
        slot = tile.to(tl.int64) * M + lane
        entry = tl.load(listed + slot)
        valid = entry >= 0
        target = entry.to(tl.int64)
    features = column * N + tl.arange(0, N)
    inside = features < hidden
    w_at = w + expert.to(tl.int64) * hidden * inter + features[:, None].to(tl.int64) * inter
    h_at = h + slot[:, None] * inter
    sum = tl.zeros((M, N), tl.float32)
    for start in range(0, inter, BK):
        inner = start + tl.arange(0, BK)
        rows = tl.load(h_at + inner[None, :], mask=valid[:, None], other=0.0)
        weight = tl.load(w_at + inner[None, :], mask=inside[:, None], other=0.0)
        sum = tl.dot(rows, weight.T, sum)
    if not PADDED:
        sum *= tl.load(weights + entry, mask=valid, other=0.0)[:, None]
    tl.store(y + target[:, None] * hidden + features[None, :], sum.to(tl.bfloat16), mask=valid[:, None] & inside[None, :])


@triton.jit
def sum_kernel(y, ids, out, first, local, hidden, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] = sum of y over the row's local choices."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    sum = tl.zeros((BLOCK,), tl.float32)
    for choice in range(K):
        expert = tl.load(ids + row * K + choice).to(tl.int32) - first
        if (expert >= 0) & (expert < local):
            sum += tl.load(y + (row * K + choice) * hidden + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + column, sum.to(tl.bfloat16), mask=inside)


def config(rows_per_expert):
    """Tile sizes (M rows x N features, BK of the inner dimension), tiles together, warps and stages, for gate_up and then down."""
    if rows_per_expert <= 16:
        return (16, 64, 128, 1, 4, 4), (16, 64, 128, 1, 4, 5)
    if rows_per_expert <= 48:
        return (32, 64, 128, 1, 4, 4), (32, 64, 128, 1, 4, 5)
    if rows_per_expert <= 128:
        return (64, 64, 64, 1, 4, 4), (64, 128, 64, 1, 4, 4)
    return (128, 128, 64, 1, 8, 3), (128, 256, 64, 1, 8, 3)


def tuned(shape, tokens, suffix=""):
    """The same from vLLM's file for an H200, or None. A column of its gate_up has gate and up rows, ours both of half as many."""
    name = f"E={shape.experts},N={shape.width},device_name=NVIDIA_H200{suffix}.json"
    path = Path(os.environ.get("PEER_TUNED", "")) / name
    if "PEER_TUNED" not in os.environ or not path.exists():
        return None
    sizes = {int(key): value for key, value in json.loads(path.read_text()).items() if key.isdigit()}
    best = sizes[min(sizes, key=lambda key: abs(key - tokens))]
    m, n, bk = (best[f"BLOCK_SIZE_{letter}"] for letter in "MNK")
    rest = best["GROUP_SIZE_M"], best["num_warps"], best["num_stages"]
    return (m, n // 2, bk, *rest), (m, n, bk, *rest)


class Lists:
    """The rows of each of `local` experts, in whole tiles of M rows: choices (`empty` in the rest of a tile), and each tile's expert."""

    def __init__(self, device, local, entries, m, empty=-1):
        self.local, self.entries, self.m, self.empty = local, entries, m, empty
        self.tiles = triton.cdiv(entries, m) + min(local, entries)
        integers = lambda count: torch.empty(count, device=device, dtype=torch.int32)
        self.counts, self.starts = integers(local), integers(local)
        self.place, self.tile_expert, self.listed = integers(entries), integers(self.tiles), integers(self.tiles * m)

    def __call__(self, ids, first=0):
        """`first`: the id of the first expert."""
        entries, local, blocks = self.entries, self.local, (triton.cdiv(self.entries, 256),)
        self.counts.zero_()
        self.listed.fill_(self.empty)
        count_kernel[blocks](ids, self.counts, self.place, first, local, entries, BLOCK=256)
        tiles_kernel[(triton.cdiv(self.tiles, 64),)](
            self.counts, self.starts, self.tile_expert, local, self.tiles,
            EXPERTS=triton.next_power_of_2(local), TILES=64, M=self.m,
        )  # fmt: skip
        list_kernel[blocks](ids, self.place, self.starts, self.listed, first, local, entries, BLOCK=256)


class Grouped:
    """Experts of one rank for at most `entries` choices; rows are indexed by lists built here."""

    def __init__(self, device, shape, local, entries, rows_per_expert, sizes=None):
        self.shape, self.local, self.entries = shape, local, entries
        self.gate_up, self.down = sizes or tuned(shape, entries // shape.top_k) or config(rows_per_expert)
        m = self.gate_up[0]
        assert self.down[0] == m
        self.lists = Lists(device, local, entries, m)
        self.h = torch.empty(self.lists.tiles * m, shape.width, device=device, dtype=torch.bfloat16)
        self.y = torch.empty(entries, shape.hidden, device=device, dtype=torch.bfloat16)

    def __call__(self, layer, rows, weights, ids, out):
        """Takes rows bf16 [R, H], weights f32 and integer ids [R, k]; writes out bf16 [R, H], sums over local choices."""
        s = self.shape
        lists = self.lists
        lists(ids, layer.first)
        m, n, bk, together, warps, stages = self.gate_up
        gate_up_kernel[(lists.tiles * triton.cdiv(s.width, n),)](
            rows, layer.gate_up, self.h, lists.listed, lists.tile_expert, lists.counts, s.width, s.hidden, 0, 0,
            K=s.top_k, PADDED=False, M=m, N=n, BK=bk, TOGETHER=together, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        m, n, bk, together, warps, stages = self.down
        down_kernel[(lists.tiles * triton.cdiv(s.hidden, n),)](
            self.h, layer.down, self.y, lists.listed, weights, lists.tile_expert, lists.counts, s.width, s.hidden, 0, 0,
            PADDED=False, M=m, N=n, BK=bk, TOGETHER=together, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        sum_kernel[(rows.shape[0], triton.cdiv(s.hidden, 1024))](
            self.y, ids, out, layer.first, self.local, s.hidden, K=s.top_k, BLOCK=1024, num_warps=4
        )


class Padded:
    """Experts of one rank for rows laid out as [local experts, capacity, H], with counts on the device."""

    def __init__(self, device, shape, local, capacity, rows_per_expert):
        self.shape, self.local, self.capacity = shape, local, capacity
        self.gate_up, self.down = config(rows_per_expert)
        self.h = torch.empty(local * capacity, shape.width, device=device, dtype=torch.bfloat16)

    def __call__(self, layer, rows, counts, out):
        s = self.shape
        m, n, bk, together, warps, stages = self.gate_up
        tiles = triton.cdiv(self.capacity, m)
        gate_up_kernel[(self.local * tiles * triton.cdiv(s.width, n),)](
            rows, layer.gate_up, self.h, None, None, counts, s.width, s.hidden, self.capacity, tiles,
            K=s.top_k, PADDED=True, M=m, N=n, BK=bk, TOGETHER=together, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        m, n, bk, together, warps, stages = self.down
        tiles = triton.cdiv(self.capacity, m)
        down_kernel[(self.local * tiles * triton.cdiv(s.hidden, n),)](
            self.h, layer.down, out, None, None, None, counts, s.width, s.hidden, self.capacity, tiles,
            PADDED=True, M=m, N=n, BK=bk, TOGETHER=together, num_warps=warps, num_stages=stages,
        )  # fmt: skip
