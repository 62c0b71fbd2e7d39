"""The rules of the parts that layers are made of, by GGUF's names without the layer's number."""

from __future__ import annotations

from collections.abc import Mapping

from fastserve_backend.checkpoints.gguf_tensors import TensorRule, linear, weight


def attention(
    *, bias: bool | str = False, output_bias: bool | str | None = None, permuted: bool = False
) -> tuple[TensorRule, ...]:
    """Separate projections.

    Args:
        bias: of q, k and v; see `linear`.
        output_bias: of the output; None: as `bias`.
        permuted: whether llama.cpp's converter reorders rows of q and k.
    """
    q, k = ("heads", "kv_heads") if permuted else (None, None)
    return (
        *linear("attn_q", "self_attn.q_proj", "q", "hidden", bias=bias, heads=q),
        *linear("attn_k", "self_attn.k_proj", "kv", "hidden", bias=bias, heads=k),
        *linear("attn_v", "self_attn.v_proj", "kv", "hidden", bias=bias),
        *linear(
            "attn_output",
            "self_attn.o_proj",
            "hidden",
            "q",
            bias=bias if output_bias is None else output_bias,
        ),
    )


def head_norms(q: str, k: str, offset: float = 0.0) -> tuple[TensorRule, ...]:
    """Norms of queries and keys, of these sizes."""
    return (
        weight("attn_q_norm", "self_attn.q_norm", q, offset=offset),
        weight("attn_k_norm", "self_attn.k_norm", k, offset=offset),
    )


def norms(names: Mapping[str, str], offset: float = 0.0) -> tuple[TensorRule, ...]:
    return tuple(weight(theirs, ours, "hidden", offset=offset) for theirs, ours in names.items())


PRE_NORM_NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
PRE_NORMS = norms(PRE_NORM_NAMES)
POST_NORMS = norms(
    {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
GEMMA_NORMS = norms(
    {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    offset=1.0,
)
GEMMA_LAST_NORM = (weight("output_norm", "model.norm", "hidden", offset=1.0),)


def layer_norm(source: str, target: str) -> tuple[TensorRule, ...]:
    return tuple(
        TensorRule(f"{target}.{part}", (f"{source}.{part}",), ("hidden",))
        for part in ("weight", "bias")
    )


def gated_mlp(bias: bool | str = False) -> tuple[TensorRule, ...]:
    return (
        *linear("ffn_gate", "mlp.gate_proj", "ffn", "hidden", bias=bias),
        *linear("ffn_up", "mlp.up_proj", "ffn", "hidden", bias=bias),
        *linear("ffn_down", "mlp.down_proj", "hidden", "ffn", bias=bias),
    )


def experts(parent: str, gate: str, up: str, down: str) -> tuple[TensorRule, ...]:
    """The router and the experts, which a checkpoint has one by one."""
    rows = ("experts", "expert_ffn", "hidden")
    expert = f"{parent}.experts.{{expert}}"
    return (
        *linear("ffn_gate_inp", f"{parent}.gate", "experts", "hidden"),
        weight("ffn_gate_exps", f"{expert}.{gate}", *rows),
        weight("ffn_up_exps", f"{expert}.{up}", *rows),
        weight("ffn_down_exps", f"{expert}.{down}", "experts", "hidden", "expert_ffn"),
    )


MLP_EXPERTS = experts("mlp", "gate_proj", "up_proj", "down_proj")

# gpt-oss has all experts in one tensor, gate and up by turns, and matrices the other way round.
GPT_OSS_EXPERTS = (
    *linear("ffn_gate_inp", "mlp.router", "experts", "hidden", bias=True),
    TensorRule(
        "mlp.experts.gate_up_proj",
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        ("experts", "expert_ffn", "hidden"),
        transposed=True,
    ),
    TensorRule(
        "mlp.experts.gate_up_proj_bias",
        ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
        ("experts", "expert_ffn"),
    ),
    TensorRule(
        "mlp.experts.down_proj",
        ("ffn_down_exps.weight",),
        ("experts", "hidden", "expert_ffn"),
        transposed=True,
    ),
    TensorRule("mlp.experts.down_proj_bias", ("ffn_down_exps.bias",), ("experts", "hidden")),
)
