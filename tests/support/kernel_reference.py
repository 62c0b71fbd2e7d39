"""Float64 oracles of `ops` and `kv_quantization`, written to be read.

Most of them take one token and one head at a time. Inputs may have any float dtype. Results are
float64 unless a docstring says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product

import numpy as np
import torch
from fastserve_kernels import ops
from fastserve_kernels.attention_rule import AttentionRule
from fastserve_kernels.int8_cache import codes_and_scales, is_int8
from fastserve_kernels.routing_rule import RoutingRule
from torch import Tensor


def kv_write(kv: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> Tensor:
    """The cache after `ops.kv_write`, as a new tensor of kv's dtype."""
    kv = kv.clone()
    block_size = kv.shape[4]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            for side, heads in enumerate((key[token], value[token])):
                if is_int8(kv):
                    codes, scales = codes_and_scales(kv)
                    for head, row in enumerate(heads):
                        place = block, layer, side, head, offset
                        codes[place][: len(row)], scales[place] = quantize_token(row)
                else:
                    kv[block, layer, side, :, offset, : heads.shape[1]] = heads
    return kv


def quantize_token(row: Tensor) -> tuple[Tensor, Tensor]:
    """See `int8_cache.quantize_tokens`. For one token of one head: row [head_dim] -> codes, scale.
    The scale is float32, so that the codes can be compared."""
    scale = row.float().abs().max() / 127
    if not row.isfinite().all():
        return torch.zeros(row.shape, dtype=torch.int8), scale * torch.nan
    codes = row.float() / (scale if scale > 0 else 1)
    return torch.round(codes).to(torch.int8), scale


def widened(kv: Tensor) -> Tensor:
    """A cache in INT8 as a float64 one, with the values of its codes."""
    codes, scales = codes_and_scales(kv)
    return codes.double() * scales.double()[..., None]


def attend(
    query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, sinks: Tensor | None
) -> Tensor:
    """The heads of a query over all that it sees: query [heads, k], key [n, kv_heads, k], value
    [n, kv_heads, v], sinks [heads] -> [heads, v]."""
    group = query.shape[0] // key.shape[1]
    key, value = (one.double().repeat_interleave(group, dim=1) for one in (key, value))
    scores = torch.einsum("hk,nhk->hn", query.double(), key) * rule.scale
    if rule.soft_cap is not None:
        scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    if sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        weights = torch.softmax(torch.cat([scores, sinks.double()[:, None]], -1), -1)[:, :-1]
    return torch.einsum("hn,nhv->hv", weights, value)


def paged_attention(
    query: Tensor, kv: Tensor, layer: int, block_tables: Tensor, table_starts: Tensor,
    context_lens: Tensor, rule: AttentionRule, value_dim: int,
) -> Tensor:  # fmt: skip
    """Attention of T queries over the paged cache: for decodes (one row a job) and prefills (more).

    query: [T, heads, key_dim].
    table_starts: int [T], where the blocks of query t's job begin in block_tables, int [N].
    context_lens: int [T]. Query t is at the position context_lens[t] - 1, and attends to what the
        rule lets it see; 0 gives zeros.

    Returns [T, heads, value_dim].
    """
    kv = widened(kv) if is_int8(kv) else kv
    tokens, heads, key_dim = query.shape
    block_size = kv.shape[4]
    out = torch.zeros(tokens, heads, value_dim, dtype=torch.float64)
    for t in range(tokens):
        table, context = block_tables[int(table_starts[t]) :].tolist(), int(context_lens[t])
        slots = [
            (table[position // block_size], position % block_size)
            for position in range(rule.first_visible(context - 1), context)
        ]
        if not slots:
            continue
        blocks, offsets = (torch.tensor(column) for column in zip(*slots, strict=True))
        key, value = kv[blocks, layer, 0, :, offsets], kv[blocks, layer, 1, :, offsets]
        out[t] = attend(query[t], key[..., :key_dim], value[..., :value_dim], rule, rule.sinks)
    return out


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See `ops.add_layer_norm`. The sum has x's dtype, as there."""
    total = x + residual
    wide = total.double()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.double()
    if bias is not None:
        normed = normed + bias.double()
    return total, normed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """See `ops.PackedLinear`."""
    y = x.double() @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    return y.clamp_min(0.0) if relu else y


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See `ops.add_rms_norm`. The sum has x's dtype, as there."""
    total = x + residual
    scale = weight.double() + shift
    rows = [row * (row.square().mean() + eps).rsqrt() * scale for row in total.double()]
    return total, torch.stack(rows) if rows else total.double()


def rms_norm_heads(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """The content of x after `ops.rms_norm_heads`."""
    out = x.double().clone()
    for head in out.flatten(0, 1):
        head *= (head.square().mean() + eps).rsqrt() * (weight.double() + shift)
    return out


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """The rotated x of `ops.rotate`. Each pair is a complex number here."""
    out, half = x.double().clone(), cos_sin.shape[1] // 2
    first, second = out[..., :half], out[..., half : 2 * half]
    cosine, sine = cos_sin.double()[:, None].chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.complex(cosine, sine)
    first[:], second[:] = turned.real, turned.imag
    return out


def silu_mul(x: Tensor) -> Tensor:
    """See `ops.silu_mul`."""
    gate, up = x.double().chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def activate(x: Tensor, activation: ops.Activation) -> Tensor:
    """See `ops.activate`."""
    return ACTIVATIONS[activation](x.double())


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())


ACTIVATIONS: dict[ops.Activation, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: 0.5 * x * torch.special.erfc(-x / math.sqrt(2)),
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: x.clamp_min(0),
    "relu_squared": lambda x: x.clamp_min(0) ** 2,
}


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """See `ops.clamped_swiglu`."""
    gate, up = x.double().chunk(2, dim=-1)
    gate, up = gate.clamp_max(limit), up.clamp_min(-limit).clamp_max(limit)
    return (up + 1) * gate / (1 + (-alpha * gate).exp())


def sort_choices(experts: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens, starts and places of `ops.sort_choices`, int32."""
    choices = list(enumerate(experts.flatten().tolist()))
    here = range(first, first + count)
    order = [i for one in here for i, expert in choices if expert == one]
    starts = [sum(expert in here[:group] for _, expert in choices) for group in range(count + 1)]
    order += [i for i, expert in choices if expert not in here]
    places = torch.tensor(order, dtype=torch.int64).argsort().view(experts.shape)
    tokens = [i // experts.shape[1] for i in order]
    as_int = partial(torch.tensor, dtype=torch.int32)
    return as_int(tokens), as_int(starts), places.int()


def grouped_linear(
    x: Tensor, weights: Tensor, biases: Tensor | None, starts: Tensor, rows: Tensor | None
) -> Tensor:
    """See `GroupedLinear`. Rows of no group are zeros."""
    y = torch.zeros(len(x if rows is None else rows), weights.shape[1], dtype=torch.float64)
    for group, weight in enumerate(weights):
        for row in range(int(starts[group]), int(starts[group + 1])):
            y[row] = weight.double() @ x[row if rows is None else int(rows[row])].double()
            if biases is not None:
                y[row] += biases[group].double()
    return y


def routed(
    scores: Tensor, choices: int, rule: RoutingRule, bias: Tensor | None
) -> dict[int, float]:
    """See `RoutingRule`: the experts that a token chooses, the best first, and their weights.

    scores: [experts].
    """
    exact = scores.double().tolist()
    count = len(exact)
    powers = [math.exp(one) for one in exact]
    if rule.scoring == "softmax":
        parts = [power / sum(powers) for power in powers]
    else:
        parts = [power / (1 + power) for power in powers]
    keys = parts if bias is None else [sum(p) for p in zip(parts, bias.tolist(), strict=True)]
    size = count // rule.groups
    groups = [range(start, start + size) for start in range(0, count, size)]
    groups.sort(key=lambda group: -sum(sorted(keys[i] for i in group)[-2:]))
    left = [expert for group in groups[: rule.chosen_groups] for expert in group]
    chosen = sorted(left, key=lambda expert: -keys[expert])[:choices]
    weights = {expert: parts[expert] for expert in chosen}
    if rule.margin is not None:
        for place, expert in enumerate(chosen):
            high = exact[expert]
            near = (
                powers[i]
                for i in range(count)
                if i not in chosen[:place]
                and (high - exact[i]) / max(abs(exact[i]), high) <= rule.margin
            )
            weights[expert] = powers[expert] / sum(near)
    total = sum(weights.values()) if rule.renormalises else 1.0
    return {expert: weight / total * rule.factor for expert, weight in weights.items()}


def mixture(y: Tensor, experts: Tensor, weights: Tensor, tokens: Tensor, starts: Tensor) -> Tensor:
    """See `ops.sum_choices`: for each token the sum of its experts' results.

    y [R, n], experts and weights [T, choices]; tokens and starts as in `Routes`.
    """
    out = torch.zeros(len(experts), y.shape[1], dtype=torch.float64)
    for expert, (start, end) in enumerate(pairwise(starts.tolist())):
        for row in range(start, end):
            token = int(tokens[row])
            weight = weights[token][experts[token] == expert].double()
            out[token] += weight * y[row].double()
    return out


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """See `ops.gelu_tanh_mul`."""
    gate, up = x.double().chunk(2, dim=-1)
    return _gelu_tanh(gate) * up


def greedy_tokens(logits: Tensor) -> Tensor:
    """See `ops.greedy_tokens`; the logits are numbers."""
    return torch.tensor([int(torch.argmax(row.double())) for row in logits], dtype=torch.int64)


def quantize_kv(blocks: Tensor, num_last_tokens: int) -> tuple[Tensor, Tensor]:
    """See `kv_quantization.quantize`. The parameters are float64, but rounded to float16, so that
    the codes can be compared."""
    n, layers, sides, kv_heads, block_size, head_dim = blocks.shape
    codes = torch.zeros(blocks.shape, dtype=torch.int8)
    parameters = torch.zeros(n, layers, sides, kv_heads, 2, head_dim, dtype=torch.float64)
    for block in range(n):
        used = num_last_tokens if block == n - 1 else block_size
        channels = product(range(layers), range(sides), range(kv_heads), range(head_dim))
        for layer, side, head, channel in channels:
            column = blocks[block, layer, side, head, :, channel].double().clone()
            column[used:] = column[0]
            scale = ((column.max() - column.min()) / 255).clamp_min(2.0**-14).half().double()
            minimum = column.min().half().double()
            code = torch.round((column - minimum) / scale) - 128
            codes[block, layer, side, head, :, channel] = code.clamp(-128, 127).to(torch.int8)
            parameters[block, layer, side, head, 0, channel] = scale
            parameters[block, layer, side, head, 1, channel] = minimum
    return codes, parameters


def dequantize_kv(codes: Tensor, parameters: Tensor) -> Tensor:
    """See `kv_quantization.dequantize`."""
    scale, minimum = parameters.double()[..., :1, :], parameters.double()[..., 1:, :]
    return (codes.double() + 128) * scale + minimum


def bias_relu(x: Tensor, bias: Tensor | None) -> Tensor:
    """The content of x after `gpu.activations.bias_relu`."""
    total = x.double() if bias is None else x.double() + bias.double()
    return total.clamp_min(0.0)


def rope_kv_write(
    query: Tensor, key: Tensor, value: Tensor, cos_sin: Tensor, kv: Tensor, layer: int,
    slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The results of `gpu.cache_writes.rope_kv_write`: the rotated query, the rotated key, and the
    cache as a new tensor of kv's dtype."""
    rotated = rotate(key, cos_sin)
    cache = kv_write(kv, layer, rotated.to(kv.dtype), value, slots)
    return rotate(query, cos_sin), rotated, cache


def error_of_choice(
    scores: Tensor,
    token: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
) -> float:
    """By which share of the weight a token differs from that of `gpu.token_choice`: 0 if it is the
    right one, and infinite if no rounding of weights explains it.

    scores: [vocab], float32, all below infinity. The numbers are rounded to float32 first, except
    ``uniform``.
    """
    values = scores.double()
    order = values.sort(descending=True, stable=True).indices
    if temperature == 0:
        return 0.0 if token == order[0] else math.inf
    heat, share, least = (float(np.float32(one)) for one in (temperature, top_p, min_p))
    largest = scores.amax()
    kept = order[: top_k or len(order)]
    if least > 0:
        kept = kept[scores[kept] >= largest + float(np.float32(heat * math.log(least)))]
    weights = ((values - largest.double()) / heat).exp()
    total = float(weights[kept].sum())
    up_to = weights[kept].cumsum(0)
    count = int((up_to - weights[kept] < share * total).sum()) if share < 1 else len(kept)
    errors = []
    for last in {max(count - 1, 1), max(count, 1), min(count + 1, len(kept))}:
        too_many = up_to[last - 1] - weights[kept[last - 1]] - share * total if last > 1 else 0.0
        too_few = share * total - up_to[last - 1] if last < len(kept) else 0.0
        ids = kept[:last].sort().values
        if token not in ids:
            continue
        in_order = weights[ids].cumsum(0)
        place = int((ids == token).nonzero())
        point = uniform * in_order[-1]
        too_early, too_late = point - in_order[place], in_order[place] - weights[token] - point
        errors.append(
            max(0.0, *(float(e) / total for e in (too_many, too_few, too_early, too_late)))
        )
    return min(errors, default=math.inf)
