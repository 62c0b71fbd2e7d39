"""The operations of a model step, token-major: the T tokens of all jobs are flattened.

Each operation runs on the device of its tensors:

- On a GPU it is a kernel in the Triton language (`gpu`).
- On a CPU, float32 and bfloat16 run in C++ that is compiled on first use (`cpu.builder`).
- Other dtypes, and machines without a compiler, run in plain torch, with the same results up to
  rounding.

Shapes and dtypes are the caller's contract; calls do not check them.

Attention here is for a CPU. A GPU's is `gpu.paged_decode` and `gpu.paged_prefill`. They take work
lists that the host has made (`gpu.work_lists`) and never wait for the device. A CUDA graph can
capture both.

KV cache: one contiguous tensor [num_blocks, layers, 2, kv_heads, block_size, width]. Dimension 2 is
(K, V), and slot = block_id * block_size + offset. It has the model's dtype, or int8 as `int8_cache`
describes; then what is written is rounded.

width is head_dim, the elements of a key or value of a head. Where keys and values have different
sizes, key_dim and value_dim, width is the larger of them. Then the rest of the rows of the others
is never written or read. The size of keys is that of queries, and the size of values that of `out`.

Block tables: int32 [N], contiguous, the block ids of all jobs, each job's in the order of its
tokens. table_starts: int32, contiguous, where each job's ids begin. Entries between and behind the
jobs' ids are not used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastserve_kernels.activations import Activation
from fastserve_kernels.attention_rule import AttentionRule
from fastserve_kernels.backend import (
    compiled_for,
    compiled_on,
    cpu_backend,
    kernels_for,
    set_cpu_backend,
    thread_ids,
    uses_triton,
)
from fastserve_kernels.common_beginnings import CommonBeginnings
from fastserve_kernels.cpu import operations, plain_torch
from fastserve_kernels.cpu.operations import of_thread
from fastserve_kernels.grouped_linear import GroupedLinear
from fastserve_kernels.int8_linear import Int8Linear
from fastserve_kernels.linear import PackedLinear
from fastserve_kernels.quantized_linear import QuantizedLinear
from fastserve_kernels.routes import Routes
from fastserve_kernels.routing_rule import RoutingRule

__all__ = [
    "Activation",
    "AttentionRule",
    "CommonBeginnings",
    "GroupedLinear",
    "Int8Linear",
    "PackedLinear",
    "QuantizedLinear",
    "Routes",
    "RoutingRule",
    "activate",
    "activate_mul",
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "call_on_rows",
    "choose",
    "clamp_",
    "clamped_swiglu",
    "cpu_backend",
    "empty",
    "gelu_tanh_mul",
    "greedy_tokens",
    "kv_write",
    "lookup_part",
    "lookup_rows",
    "paged_decode",
    "paged_prefill",
    "rms_norm_heads",
    "rope_kv_write",
    "rotate",
    "scale_",
    "scale_by_sigmoid_",
    "scale_rows_",
    "silu_mul",
    "set_cpu_backend",
    "soft_cap_",
    "sort_choices",
    "sum_choices",
    "take_columns",
    "thread_ids",
    "uses_triton",
    "zeros_like",
]


def kv_write(kv: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write the K and V of T tokens into one layer of the cache, in place.

    key, value: [T, kv_heads, key_dim] and [T, kv_heads, value_dim] of the model's dtype; only the
        last dimension must be contiguous.
    slots: int64 [T], contiguous; -1 skips the token.
    """
    kernels_for(key).kv_write(kv, layer, key, value, slots)


def rope_kv_write(
    qkv: Tensor, heads: int, cos_sin: Tensor, kv: Tensor, layer: int, slots: Tensor
) -> None:
    """Rotate the queries in place, and write the rotated keys and the values to the cache.

    qkv: [T, heads + 2 * kv_heads, head_dim] of the model's dtype: query, key and value heads; only
        the last dimension must be contiguous. Its keys may be rotated in place too, or not.
    cos_sin: as in `rotate`.
    slots: as in `kv_write`.
    """
    kv_heads = kv.shape[3]
    key, value = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    if uses_triton(kv.device):
        from fastserve_kernels.gpu import kernels

        kernels.rope_kv_write(qkv[:, :heads], key, value, cos_sin, kv, layer, slots)
        return
    rotate(qkv[:, : heads + kv_heads], cos_sin)
    kv_write(kv, layer, key, value, slots)


def paged_decode(
    query: Tensor,
    kv: Tensor,
    layer: int,
    block_tables: Tensor,
    table_starts: Tensor,
    context_lens: Tensor,
    rule: AttentionRule,
    out: Tensor | None = None,
    beginnings: CommonBeginnings | None = None,
) -> Tensor:
    """Attention of one query row for each job over the paged cache.

    query: [B, heads, key_dim] of the model's dtype; only the last dimension must be contiguous.
        heads is a multiple of kv_heads; key_dim and value_dim are multiples of 8 up to 256.
    block_tables, table_starts: [N] and [B], see the module.
    context_lens: int32 [B], contiguous. Row t attends to the positions [0, context_lens[t]) of its
        job, or to the last of them within the rule's window; 0 gives zeros (padding).
    out: [B, heads, value_dim] of query's dtype, to write to; each row contiguous.
    beginnings: of these rows. Compiled kernels read once what neighbours have in common. It changes
        no bit of the result.

    Returns out, or a new contiguous tensor like query. Table entries, blocks and slots past a
    context, or before a row's window, are never used, whatever they hold. With compiled kernels a
    row is bit for bit independent of the other rows.
    """
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    kernels = compiled_for(query) or plain_torch
    kernels.paged_decode(
        query, kv, layer, block_tables, table_starts, context_lens, rule, out, beginnings
    )
    return out


def paged_prefill(
    query: Tensor,
    kv: Tensor,
    layer: int,
    block_tables: Tensor,
    table_starts: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    rule: AttentionRule,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of prompts, or chunks of prompts, whose keys and values are in the cache.

    query: [T, heads, key_dim], as in `paged_decode`.
    block_tables, table_starts: [N] and [S], see the module.
    context_lens: int32 [S], contiguous, a job's tokens in the cache, including this call's rows.
        Its last row attends to all of them.
    query_starts: int32 [S + 1], contiguous, from 0 to T. The rows [query_starts[j],
        query_starts[j + 1]), at least one, are the last ones of job j.
    out: [T, heads, value_dim] of query's dtype, to write to; each row contiguous.

    Returns out, or a new contiguous tensor like query. What lies past a context, or before the
    window of a job's first row, is never used. With compiled kernels a row is bit for bit
    independent of other jobs and of how its prompt is cut into chunks.
    """
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    kernels = compiled_for(query) or plain_torch
    kernels.paged_prefill(
        query, kv, layer, block_tables, table_starts, context_lens, query_starts, rule, out
    )
    return out


def lookup_rows(table: Tensor, ids: Tensor, first: int = 0) -> Tensor:
    """Rows of a table: table [N, n], contiguous, and ids int64 [T], contiguous -> [T, n].

    ids: within the table; first - 1 is its last row, and so on.
    first: the id of the first row.
    """
    kernels = compiled_for(table) or plain_torch
    return kernels.lookup_rows(table, ids, first, is_whole=True)


def lookup_part(table: Tensor, ids: Tensor, first: int) -> Tensor:
    """Rows of a table of which only the rows from `first` on are here, zeros for the others.

    table: [N, n], contiguous, the rows [first, first + N).
    ids: int64 [T], contiguous, of the whole table.
    """
    kernels = compiled_for(table) or plain_torch
    return kernels.lookup_rows(table, ids, first, is_whole=False)


def take_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Columns of x [T, n], rows contiguous: columns int64 [m], contiguous -> [T, m]."""
    return (compiled_for(x) or plain_torch).take_columns(x, columns)


def zeros_like(x: Tensor) -> Tensor:
    """Zeros [T, n] of x's dtype: a new contiguous tensor."""
    return (compiled_for(x) or plain_torch).zeros_like(x)


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, both [T, n] of one dtype, rows contiguous: a new contiguous tensor."""
    return (compiled_for(x) or plain_torch).add(x, y)


def scale_(x: Tensor, factor: float) -> Tensor:
    """Multiply x [T, n], rows contiguous, by a number, in place. Returns x."""
    return (compiled_for(x) or plain_torch).scale_(x, factor)


def scale_rows_(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply each row of x [T, n], rows contiguous, by its number, in place. Returns x.

    factors: float32 [T, 1], contiguous.
    """
    return (compiled_for(x) or plain_torch).scale_rows_(x, factors)


def scale_by_sigmoid_(x: Tensor, gates: Tensor) -> Tensor:
    """Multiply each row of x [T, n], rows contiguous, by the logistic function of its gate, in fp32
    and in place. Returns x.

    gates: [T, 1] of x's dtype.
    """
    return (compiled_for(x) or plain_torch).scale_by_sigmoid_(x, gates)


def clamp_(x: Tensor, limit: float) -> Tensor:
    """Limit x [T, n], rows contiguous, to -limit .. limit, in place. A NaN stays one. Returns x."""
    return (compiled_for(x) or plain_torch).clamp_(x, limit)


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """Replace each element of x [T, n], rows contiguous, by cap · tanh(x / cap). Returns x."""
    return (compiled_for(x) or plain_torch).soft_cap_(x, cap)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The function of each element of x [T, n], rows contiguous: a new contiguous tensor."""
    return (compiled_for(x) or plain_torch).activate(x, activation)


def activate_mul(x: Tensor, activation: Activation) -> Tensor:
    """The function of the first half of each row times the second half, in fp32: [T, 2n] ->
    [T, n].

    x: rows contiguous. Returns a new contiguous tensor of x's dtype.
    """
    if activation == "silu":
        return silu_mul(x)
    if activation == "gelu_tanh":
        return gelu_tanh_mul(x)
    return (compiled_for(x) or plain_torch).activate_mul(x, activation)


def call_on_rows(function: Callable[..., object], *tensors: Tensor) -> None:
    """Call function(*tensors), for what is no operation, such as an exchange with other ranks.

    In a recorded program (`cpu.recording`) the function gets the step's rows of the tensors.
    tensors: results of operations, with one number of rows.
    """
    if of_thread.recorder is None:
        function(*tensors)
    else:
        of_thread.recorder.note_call(function, tensors)


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A new tensor, of the other's dtype and device, for `call_on_rows` to fill; rows come
    first."""
    if like.is_cpu:
        return operations.empty(shape, like.dtype)
    return like.new_empty(shape)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Residual addition and layer norm in one pass: (x + residual, LayerNorm(x + residual)).

    x, residual: [T, hidden] of one dtype, rows contiguous.
    weight, bias: [hidden] of that dtype, or None.

    The sum is rounded to the dtype and then normalised in fp32.
    Returns two new contiguous tensors [T, hidden].
    """
    return kernels_for(x).add_layer_norm(x, residual, weight, bias, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Residual addition and RMS norm in one pass: (x + residual, RMSNorm(x + residual)).

    x, residual: [T, hidden] of one dtype, rows contiguous.
    weight: [hidden] of that dtype.
    shift: is added to the weight in fp32. Gemma's checkpoints have weights less 1.

    The sum is rounded to the dtype and then normalised in fp32.
    Returns two new contiguous tensors [T, hidden].
    """
    return kernels_for(x).add_rms_norm(x, residual, weight, eps, shift)


def rms_norm_heads(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> None:
    """RMS norm of each head of T tokens, in place, in fp32.

    x: [T, heads, head_dim]; only the last dimension must be contiguous.
    weight: [head_dim] of x's dtype, contiguous; all heads share it.
    shift: as in `add_rms_norm`.
    """
    kernels_for(x).rms_norm_heads(x, weight, eps, shift)


def rotate(x: Tensor, cos_sin: Tensor) -> None:
    """Rotary position embedding of T tokens, in place, in fp32.

    x: [T, heads, head_dim]; only the last dimension must be contiguous.
    cos_sin: float32 [T, dim], contiguous: dim / 2 cosines, then dim / 2 sines. dim is even and at
        most head_dim.

    The pairs (i, i + dim / 2) of each head are rotated. Elements from dim on stay.
    """
    (compiled_for(x) or plain_torch).rotate(x, cos_sin)


def silu_mul(x: Tensor) -> Tensor:
    """SiLU of the first half of each row times the second half, in fp32: [T, 2n] -> [T, n].

    x: rows contiguous. Returns a new contiguous tensor of x's dtype.
    """
    return kernels_for(x).silu_mul(x)


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """The gate of gpt-oss, in fp32: [T, 2n] -> [T, n].

    The first half g of each row is cut to at most `limit`, the second half u to ±`limit`. The
    result is (u + 1) · g · sigmoid(alpha · g).

    x: rows contiguous. Returns a new contiguous tensor of x's dtype.
    """
    return kernels_for(x).clamped_swiglu(x, alpha, limit)


def choose(
    scores: Tensor, choices: int, rule: RoutingRule, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """For each token the experts with the highest keys, and their weights in the sum.

    scores: [T, experts], rows contiguous.
    choices: for each token, at most the number of experts in the groups that it may choose from.
    bias: float32 [experts], contiguous: added to the weights, for the choice alone.

    Returns two contiguous tensors [T, choices], the highest key first: weights, float32, and the
    experts' numbers, int64.
    """
    return (compiled_for(scores) or plain_torch).choose(scores, choices, rule, bias)


def sort_choices(experts: Tensor, first: int, count: int) -> Routes:
    """Sort the tokens' choices by expert, those of one expert by token.

    experts: int64 [T, choices], contiguous, distinct in each row.
    first, count: only the experts [first, first + count) are here. They are numbered from 0.
    """
    if uses_triton(experts.device):
        from fastserve_kernels.gpu import kernels

        return kernels.sort_choices(experts, first, count)
    return (compiled_on(experts.device) or plain_torch).sort_choices(experts, first, count)


def sum_choices(y: Tensor, weights: Tensor, routes: Routes) -> Tensor:
    """For each token the weighted sum of its experts' results, in fp32 and in the order of its
    choices: [R, n] -> [T, n].

    y: contiguous. Rows from routes.starts[-1] on are not used, whatever they hold.
    weights: float32 [T, choices], contiguous.

    Returns a new contiguous tensor of y's dtype.
    """
    return kernels_for(y).sum_choices(y, weights, routes)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """GELU, in its tanh approximation, of the first half of each row times the second half, in
    fp32: [T, 2n] -> [T, n] (Hendrycks and Gimpel 2016).

    x: rows contiguous. Returns a new contiguous tensor of x's dtype.
    """
    return kernels_for(x).gelu_tanh_mul(x)


def greedy_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Index of each row's largest value, the first among equals: logits [R, vocab] -> int64 [R].

    logits: rows contiguous. A NaN counts as the largest value, as in torch.
    Returns the indices, and the same with -1 for rows with a NaN.
    """
    return (compiled_for(logits) or plain_torch).greedy_tokens(logits)
