"""The operations in plain torch, for any device and dtype: slower, never wrong.

They copy each job's K and V together, which the compiled kernels avoid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from fastserve_kernels.activations import Activation
from fastserve_kernels.attention_rule import AttentionRule
from fastserve_kernels.common_beginnings import CommonBeginnings
from fastserve_kernels.int8_cache import (
    codes_and_scales,
    dequantize_tokens,
    is_int8,
    quantize_tokens,
)
from fastserve_kernels.routes import Routes
from fastserve_kernels.routing_rule import RoutingRule

_LEAST_SUM = 1e-20
"""Is added to the sum of weights that it divides, as in transformers."""


def kv_write(kv: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """See `ops.kv_write`."""
    block_size = kv.shape[4]
    written = (slots >= 0).nonzero().squeeze(1)
    slots = slots[written]
    blocks, offsets = slots // block_size, slots % block_size
    for side, tokens in enumerate((key[written], value[written])):
        used = slice(tokens.shape[2])
        if is_int8(kv):
            codes, scales = codes_and_scales(kv)
            new_codes, new_scales = quantize_tokens(tokens)
            codes[blocks, layer, side, :, offsets, used] = new_codes
            scales[blocks, layer, side, :, offsets] = new_scales
        else:
            kv[blocks, layer, side, :, offsets, used] = tokens


def paged_decode(
    query: Tensor, kv: Tensor, layer: int, block_tables: Tensor, table_starts: Tensor,
    context_lens: Tensor, rule: AttentionRule, out: Tensor,
    beginnings: CommonBeginnings | None = None,
) -> None:  # fmt: skip
    """See `ops.paged_decode`."""
    jobs = zip(table_starts.tolist(), context_lens.tolist(), strict=True)
    for row, (table_start, context) in enumerate(jobs):
        one = slice(row, row + 1)
        table = block_tables, table_start
        _attend(query[one], kv, layer, table, context, rule, out[one])


def paged_prefill(
    query: Tensor, kv: Tensor, layer: int, block_tables: Tensor, table_starts: Tensor,
    context_lens: Tensor, query_starts: Tensor, rule: AttentionRule, out: Tensor,
) -> None:  # fmt: skip
    """See `ops.paged_prefill`."""
    spans = pairwise(query_starts.tolist())
    jobs = zip(spans, table_starts.tolist(), context_lens.tolist(), strict=True)
    for (start, end), table_start, context in jobs:
        rows = slice(start, end)
        table = block_tables, table_start
        _attend(query[rows], kv, layer, table, context, rule, out[rows])


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See `ops.add_layer_norm`. For low precision, torch accumulates in fp32 by itself."""
    total = x + residual
    return total, F.layer_norm(total, total.shape[-1:], weight, bias, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, shift: float
) -> tuple[Tensor, Tensor]:
    """See `ops.add_rms_norm`."""
    total = x + residual
    return total, _rms_norm(total, weight, eps, shift)


def rms_norm_heads(x: Tensor, weight: Tensor, eps: float, shift: float) -> None:
    """See `ops.rms_norm_heads`."""
    x.copy_(_rms_norm(x, weight, eps, shift))


def _rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
    values = x.float()
    inverse = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return (values * inverse * (weight.float() + shift)).to(x.dtype)


def rotate(x: Tensor, cos_sin: Tensor) -> None:
    """See `ops.rotate`."""
    half = cos_sin.shape[1] // 2
    cosine, sine = cos_sin[:, None, :half], cos_sin[:, None, half:]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    x[..., : 2 * half] = turned


def lookup_rows(table: Tensor, ids: Tensor, first: int, *, is_whole: bool) -> Tensor:
    """See `ops.lookup_rows`; without `is_whole` see `ops.lookup_part`."""
    if is_whole:
        return table[ids - first if first else ids]
    absent = (ids < first) | (ids >= first + len(table))
    return table[(ids - first).masked_fill_(absent, 0)].masked_fill_(absent[:, None], 0)


def take_columns(x: Tensor, columns: Tensor) -> Tensor:
    """See `ops.take_columns`."""
    return x[:, columns]


def zeros_like(x: Tensor) -> Tensor:
    """See `ops.zeros_like`."""
    return torch.zeros_like(x)


def add(x: Tensor, y: Tensor) -> Tensor:
    """See `ops.add`."""
    return x + y


def scale_(x: Tensor, factor: float) -> Tensor:
    """See `ops.scale_`."""
    return x.mul_(factor)


def scale_rows_(x: Tensor, factors: Tensor) -> Tensor:
    """See `ops.scale_rows_`."""
    return x.mul_(factors)


def scale_by_sigmoid_(x: Tensor, gates: Tensor) -> Tensor:
    """See `ops.scale_by_sigmoid_`."""
    return x.copy_(x.float() * torch.sigmoid(gates.float()))


def clamp_(x: Tensor, limit: float) -> Tensor:
    """See `ops.clamp_`."""
    return x.clamp_(-limit, limit)


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """See `ops.soft_cap_`."""
    return x.div_(cap).tanh_().mul_(cap)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """See `ops.activate`."""
    return _ACTIVATIONS[activation](x)


def activate_mul(x: Tensor, activation: Activation) -> Tensor:
    """See `ops.activate_mul`."""
    gate, up = x.float().chunk(2, dim=-1)
    return (_ACTIVATIONS[activation](gate) * up).to(x.dtype)


def _relu_squared(x: Tensor) -> Tensor:
    return torch.relu(x).square()


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": torch.relu,
    "relu_squared": _relu_squared,
}


def silu_mul(x: Tensor) -> Tensor:
    """See `ops.silu_mul`."""
    return activate_mul(x, "silu")


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """See `ops.clamped_swiglu`."""
    gate, up = x.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(x.dtype)


def choose(
    scores: Tensor, choices: int, rule: RoutingRule, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `ops.choose`. It never waits for the device, and a CUDA graph can capture it."""
    scores = scores.float()
    if bias is None and rule.scoring == "softmax" and rule.groups == 1 and rule.margin is None:
        # Most routers. Each operation is a launch on a GPU, so there is none that they do not need.
        if rule.renormalises:
            top, chosen = scores.topk(choices)
            weights = top.softmax(dim=-1)
        else:
            weights, chosen = scores.softmax(dim=-1).topk(choices)
    else:
        weights, chosen = _choose_by_keys(scores, choices, rule, bias)
    return (weights if rule.factor == 1.0 else weights * rule.factor), chosen


def _choose_by_keys(
    scores: Tensor, choices: int, rule: RoutingRule, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    is_softmax = rule.scoring == "softmax"
    parts = scores.softmax(dim=-1) if is_softmax else scores.sigmoid()
    keys = scores
    if bias is not None or rule.groups > 1:
        keys = parts if bias is None else parts + bias
        if rule.groups > 1:
            keys = _of_best_groups(keys, rule)
    chosen = keys.topk(choices).indices
    if rule.margin is not None:
        return _within_margin(scores, chosen, rule.margin), chosen
    if is_softmax and rule.renormalises:
        return scores.gather(1, chosen).softmax(dim=-1), chosen
    weights = parts.gather(1, chosen)
    if rule.renormalises:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _LEAST_SUM)
    return weights, chosen


def _of_best_groups(keys: Tensor, rule: RoutingRule) -> Tensor:
    """The keys, -inf in all groups that are not among the best."""
    by_group = keys.unflatten(1, (rule.groups, -1))
    sums = by_group.topk(min(2, by_group.shape[2])).values.sum(dim=-1)
    is_left = torch.ones_like(sums, dtype=torch.bool)
    is_left.scatter_(1, sums.topk(rule.chosen_groups).indices, value=False)
    best: Tensor = by_group.masked_fill(is_left[..., None], -torch.inf).flatten(1)
    return best


def _within_margin(scores: Tensor, chosen: Tensor, margin: float) -> Tensor:
    """The weights of `RoutingRule.margin`: [T, choices]."""
    weights = []
    left = scores
    for one in chosen.split(1, dim=1):
        high = scores.gather(1, one)
        is_far = (high - scores) / scores.abs().maximum(high) > margin
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(dim=-1).gather(1, one))
        left = left.scatter(1, one, -torch.inf)
    return torch.cat(weights, dim=1)


def sort_choices(experts: Tensor, first: int, count: int) -> Routes:
    """See `ops.sort_choices`. It never waits for the device, and a CUDA graph can capture it."""
    groups = experts.flatten() - first
    groups = groups.masked_fill((groups < 0) | (groups >= count), count)
    ordered, order = groups.sort(stable=True)
    ids = torch.arange(count + 1, device=experts.device)
    starts = torch.searchsorted(ordered, ids, out_int32=True)
    rows = torch.arange(len(order), dtype=torch.int32, device=experts.device)
    places = torch.empty_like(rows).scatter_(0, order, rows)
    return Routes((order // experts.shape[1]).int(), starts, places.view(experts.shape))


def sum_choices(y: Tensor, weights: Tensor, routes: Routes) -> Tensor:
    """See `ops.sum_choices`."""
    chosen = y[routes.places.long()].float()
    chosen.masked_fill_((routes.places >= routes.starts[-1])[..., None], 0)
    return (chosen * weights[..., None]).sum(dim=1).to(y.dtype)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """See `ops.gelu_tanh_mul`."""
    return activate_mul(x, "gelu_tanh")


def greedy_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `ops.greedy_tokens`."""
    token_ids = logits.argmax(dim=-1)
    largest = logits.gather(1, token_ids[:, None])[:, 0]
    return token_ids, torch.where(largest.isnan(), -1, token_ids)


def _attend(
    query: Tensor, kv: Tensor, layer: int, table: tuple[Tensor, int], context: int,
    rule: AttentionRule, out: Tensor,
) -> None:  # fmt: skip
    """Attention of the last n rows of a job's context: query [n, heads, key_dim] to out [n, heads,
    value_dim].

    An empty context gives zeros.

    table: int32, block ids, and where the job's first would be, perhaps below 0. Those before the
        first row's window are not used.
    """
    if context == 0:
        out.zero_()
        return
    kv_heads, block_size = kv.shape[3:5]
    count = len(query)
    first_block = rule.first_visible(context - count) // block_size
    first = first_block * block_size
    block_ids, start = table
    used = slice(start + first_block, start - (-context // block_size))
    tokens = kv[block_ids[used].long(), layer]
    if is_int8(kv):
        tokens = dequantize_tokens(*codes_and_scales(tokens), query.dtype)
    # [2, kv_heads, context - first, width]
    key, value = tokens.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : context - first]
    key, value = key[..., : query.shape[2]], value[..., : out.shape[2]]
    row = torch.arange(context - count, context, device=query.device)[:, None]
    position = torch.arange(first, context, device=query.device)
    visible = position <= row
    if rule.window is not None:
        visible &= position > row - rule.window
        # What lies before a row's window may be anything, even NaN, which no weight of 0 hides.
        seen = visible.any(dim=0)[:, None]
        key, value = key.masked_fill(~seen, 0), value.masked_fill(~seen, 0)
    query = query.transpose(0, 1)
    if rule.soft_cap is None and rule.sinks is None:
        result = F.scaled_dot_product_attention(
            query[None],
            key[None],
            value[None],
            attn_mask=visible,
            scale=rule.scale,
            enable_gqa=len(query) != kv_heads,
        )[0]
    else:
        result = _capped_attention(query, key, value, visible, rule)
    out.copy_(result.transpose(0, 1))


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, rule: AttentionRule
) -> Tensor:
    """query [heads, n, key_dim], key and value [kv_heads, c, …], visible bool [n, c] -> [heads, n,
    value_dim]."""
    group = len(query) // len(key)
    key, value = (one.repeat_interleave(group, dim=0).float() for one in (key, value))
    scores = query.float() @ key.transpose(1, 2) * rule.scale
    if rule.soft_cap is not None:
        scores = torch.tanh(scores / rule.soft_cap) * rule.soft_cap
    scores = scores.masked_fill(~visible, float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[1]]
    return (weights @ value).to(query.dtype)
