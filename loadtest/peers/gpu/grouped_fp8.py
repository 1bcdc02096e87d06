"""The grouped MLP of grouped.py with FP8 weights in blocks of 128 x 128 and FP8 rows: products in FP8, scaled every 128 elements."""

import torch
import triton
import triton.language as tl

import quantise
from grouped import Grouped, sum_kernel, tile_of, tuned
from quantise import GROUP


@triton.jit
def gate_up_kernel(
    x, x_scales, w, w_scales, h, h_scales, listed, tile_expert, inter, hidden,
    K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """h[slot] = silu(x[row] gate^T) * (x[row] up^T): codes and scales if N is 128, otherwise bf16."""
    columns = tl.cdiv(inter, N)
    tile, column = tile_of(tl.program_id(0), tl.num_programs(0) // columns, columns, TOGETHER)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    slot = tile.to(tl.int64) * M + tl.arange(0, M)
    entry = tl.load(listed + slot)
    valid = entry >= 0
    source = (entry // K).to(tl.int64)
    features = column * N + tl.arange(0, N)
    groups = hidden // GROUP
    lane = tl.arange(0, GROUP)
    x_at = x + source[:, None] * hidden + lane[None, :]
    s_at = x_scales + source * groups
    gate_at = w + (expert * 2 * inter + features[:, None]) * hidden + lane[None, :]
    up_at = gate_at + inter.to(tl.int64) * hidden
    gate_scales = w_scales + (expert * 2 * inter + column * N) // GROUP * groups
    up_scales = gate_scales + inter // GROUP * groups
    gate = tl.zeros((M, N), tl.float32)
    up = tl.zeros((M, N), tl.float32)
    for group in range(0, groups):
        rows = tl.load(x_at + group * GROUP, mask=valid[:, None], other=0.0)
        scale = tl.load(s_at + group, mask=valid, other=0.0)[:, None]
        gate += tl.dot(rows, tl.load(gate_at + group * GROUP).T) * (scale * tl.load(gate_scales + group))
        up += tl.dot(rows, tl.load(up_at + group * GROUP).T) * (scale * tl.load(up_scales + group))
    product = gate * tl.sigmoid(gate) * up
    to = h + slot[:, None] * inter + features[None, :]
    if N == 128:
        codes, scale = quantise.codes_of(product)
        tl.store(to, codes, mask=valid[:, None])
        tl.store(h_scales + slot * (inter // GROUP) + column, scale, mask=valid)
    else:
        tl.store(to, product.to(tl.bfloat16), mask=valid[:, None])


@triton.jit
def inner_kernel(product, h, h_scales, listed, inter, GROUPS: tl.constexpr):
    """Codes and scales of bf16 rows [slots, I], of those that exist."""
    slot = tl.program_id(0).to(tl.int64)
    if tl.load(listed + slot) < 0:
        return
    groups = inter // GROUP
    group = tl.arange(0, GROUPS)
    inside = group < groups
    at = slot * inter + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    codes, scale = quantise.codes_of(tl.load(product + at, mask=inside[:, None], other=0.0).to(tl.float32))
    tl.store(h + at, codes, mask=inside[:, None])
    tl.store(h_scales + slot * groups + group, scale, mask=inside)


@triton.jit
def down_kernel(
    h, h_scales, w, w_scales, y, listed, weights, tile_expert, inter, hidden,
    M: tl.constexpr, N: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """y[entry] = weight * h[slot] down^T."""
    columns = tl.cdiv(hidden, N)
    tile, column = tile_of(tl.program_id(0), tl.num_programs(0) // columns, columns, TOGETHER)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    slot = tile.to(tl.int64) * M + tl.arange(0, M)
    entry = tl.load(listed + slot)
    valid = entry >= 0
    features = column * N + tl.arange(0, N)
    groups = inter // GROUP
    lane = tl.arange(0, GROUP)
    h_at = h + slot[:, None] * inter + lane[None, :]
    s_at = h_scales + slot * groups
    w_at = w + (expert * hidden + features[:, None]) * inter + lane[None, :]
    scales = w_scales + (expert * hidden + column * N) // GROUP * groups
    sum = tl.zeros((M, N), tl.float32)
    for group in range(0, groups):
        rows = tl.load(h_at + group * GROUP, mask=valid[:, None], other=0.0)
        scale = tl.load(s_at + group, mask=valid, other=0.0)[:, None]
        sum += tl.dot(rows, tl.load(w_at + group * GROUP).T) * (scale * tl.load(scales + group))
    sum *= tl.load(weights + entry, mask=valid, other=0.0)[:, None]
    to = y + entry.to(tl.int64)[:, None] * hidden + features[None, :]
    tl.store(to, sum.to(tl.bfloat16), mask=valid[:, None])


def config(rows_per_expert):
    """M, N, BK, tiles together, warps and stages, for gate_up and then down."""
    if rows_per_expert <= 12:
        return (16, 32, 128, 1, 4, 5), (16, 64, 128, 1, 4, 5)
    return (64, 128, 128, 16, 8, 3), (64, 128, 128, 16, 4, 4)


def sizes(shape, tokens):
    """vLLM's sizes for `down`; gate_up takes whole groups of 128 features, so that it can quantise, or narrow ones for few rows."""
    best = config(tokens * shape.top_k / shape.experts)
    found = tuned(shape, tokens, ",dtype=fp8_w8a8,block_shape=[128,128]")
    if found is None:
        return best
    m, n, bk, *rest = found[1]
    first = (m, min(n // 2, 64), bk, *rest) if m < 64 or n < 128 else (m, 128, bk, rest[0], 8, 3)
    return first, (m, n, bk, *rest)


class GroupedFp8(Grouped):
    """As `Grouped`, with layers whose weights are `Quantised`."""

    def __init__(self, device, shape, local, entries, rows):
        super().__init__(device, shape, local, entries, entries / shape.experts, sizes(shape, entries // shape.top_k))
        empty = lambda *size, dtype=torch.float32: torch.empty(*size, device=device, dtype=dtype)
        slots = self.h.shape[0]
        fp8 = torch.float8_e4m3fn
        self.x, self.x_scales = empty(rows, shape.hidden, dtype=fp8), empty(rows, shape.hidden // 128)
        self.inner, self.inner_scales = empty(slots, shape.width, dtype=fp8), empty(slots, shape.width // 128)

    def __call__(self, layer, rows, weights, ids, out):
        s, lists, slots = self.shape, self.lists, self.h.shape[0]
        groups = lambda size: triton.next_power_of_2(size // 128)
        lists(ids, layer.first)
        quantise.rows_kernel[(rows.shape[0],)](rows, self.x, self.x_scales, s.hidden, GROUPS=groups(s.hidden))
        m, n, _, together, warps, stages = self.gate_up
        quantises = n == 128
        gate_up_kernel[(lists.tiles * triton.cdiv(s.width, n),)](
            self.x, self.x_scales, layer.gate_up.values, layer.gate_up.scales, self.inner if quantises else self.h, self.inner_scales,
            lists.listed, lists.tile_expert, s.width, s.hidden,
            K=s.top_k, M=m, N=n, TOGETHER=together, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        if not quantises:
            inner_kernel[(slots,)](self.h, self.inner, self.inner_scales, lists.listed, s.width, GROUPS=groups(s.width))
        m, n, _, together, warps, stages = self.down
        down_kernel[(lists.tiles * triton.cdiv(s.hidden, n),)](
            self.inner, self.inner_scales, layer.down.values, layer.down.scales, self.y, lists.listed, weights, lists.tile_expert,
            s.width, s.hidden, M=m, N=n, TOGETHER=together, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        sum_kernel[(rows.shape[0], triton.cdiv(s.hidden, 1024))](
            self.y, ids, out, layer.first, self.local, s.hidden, K=s.top_k, BLOCK=1024, num_warps=4
        )
