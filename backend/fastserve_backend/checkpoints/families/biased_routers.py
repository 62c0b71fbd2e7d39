"""Mixtures whose routers have a bias for the choice alone, which balances the experts' load
(DeepSeek-V3, 2024): GLM 4.5, Solar Open, K-EXAONE, dots.llm1, MiniMax M2 and ERNIE 4.5."""

from __future__ import annotations

from typing import Unpack

from fastserve_kernels.routing_rule import RoutingRule

from fastserve_backend.checkpoints.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    Sizes,
    read_windows,
)
from fastserve_backend.checkpoints.experts_config import ExpertsConfig, read_choices, read_groups
from fastserve_backend.checkpoints.families.olmo import read_exaone_layers
from fastserve_backend.checkpoints.families.rotation import partial_rotary, whole_rotary
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields


def read_glm4_moe(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    sizes = Sizes.read(
        raw, layers=46, hidden=4096, heads=96, kv_heads=8, ffn=10944, vocab=151552,
        positions=131072,
    )  # fmt: skip
    return DecoderConfig.read(
        raw,
        common,
        "glm4_moe",
        sizes,
        [partial_rotary(raw, sizes, share=0.5)],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        end=(),
        qk_norm="head" if raw.boolean("use_qk_norm", False) else None,
        qkv_bias=raw.boolean("attention_bias", False),
        experts=_sigmoid_experts(raw, 128, 8, shared=1, renormalises=True),
        dense_layers=_first_layers(raw, sizes, 1),
        spare_layers=raw.whole_number("num_nextn_predict_layers", 1),
    )


def read_solar_open(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    sizes = Sizes.read(
        raw, layers=48, hidden=4096, heads=64, kv_heads=8, head_dim=128, ffn=10240, vocab=196608,
        positions=131072,
    )  # fmt: skip
    return DecoderConfig.read(
        raw,
        common,
        "solar_open",
        sizes,
        [partial_rotary(raw, sizes, theta=1e6, share=1.0)],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        end=(),
        qkv_bias=raw.boolean("attention_bias", False),
        experts=_sigmoid_experts(raw, 128, 8, shared=1, renormalises=True, ffn=1280),
    )


def read_exaone_moe(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """EXAONE 4's windows and rotations; norms before the blocks."""
    sizes = Sizes.read(
        raw, layers=32, hidden=4096, heads=32, kv_heads=32, ffn=16384, vocab=102400,
        positions=2048,
    )  # fmt: skip
    windows, rotations = read_exaone_layers(raw, sizes)
    first = _first_layers(raw, sizes, 1)
    default = ["dense" if layer in first else "sparse" for layer in range(sizes.layers)]
    kinds = raw.choices("mlp_layer_types", tuple(default), ("dense", "sparse"))
    raw = raw.renamed({"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"})
    return DecoderConfig.read(
        raw,
        common,
        "exaone_moe",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        end=(53,),
        qk_norm="head",
        rotary_of_layer=rotations,
        window_of_layer=windows,
        experts=_sigmoid_experts(raw, 64, 8, shared=1, renormalises=True, ffn=1024, factor=2.5),
        dense_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "dense"),
    )


def read_dots1(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    sizes = Sizes.read(
        raw, layers=62, hidden=4608, heads=32, kv_heads=32, ffn=10944, vocab=152064, positions=2048
    )
    window, first = (
        raw.optional_integer("sliding_window", 4096),
        raw.integer("max_window_layers", 62),
    )
    default = [
        FULL if window is None or layer < first else SLIDING for layer in range(sizes.layers)
    ]
    _, windows = read_windows(raw, window, default)
    has_bias = raw.boolean("attention_bias", False)
    return DecoderConfig.read(
        raw,
        common,
        "dots1",
        sizes,
        [whole_rotary(raw, sizes)],
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        end=(),
        qk_norm="head",
        qkv_bias=has_bias,
        out_bias=has_bias,
        window_of_layer=windows,
        experts=_sigmoid_experts(raw, None, None, shared=None, renormalises=False),
        dense_layers=_first_layers(raw, sizes, 0),
    )


def read_minimax_m2(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    sizes = Sizes.read(
        raw, layers=62, hidden=3072, heads=48, kv_heads=8, head_dim=128, ffn=1536, vocab=200064,
        positions=196608,
    )  # fmt: skip
    raw.choice("hidden_act", "silu", ("silu",))
    raw.choice("scoring_func", "sigmoid", ("sigmoid",))
    count, top_k = read_choices(raw, "num_local_experts", 256, 8)
    rotated = raw.integer("rotary_dim", sizes.head_dim)
    return DecoderConfig.read(
        raw,
        common,
        "minimax_m2",
        sizes,
        [partial_rotary(raw, sizes, theta=5e6, share=rotated / sizes.head_dim)],
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        end=(200020,),
        qk_norm="all_heads",
        experts=ExpertsConfig(
            count=count,
            top_k=top_k,
            intermediate_size=sizes.ffn,
            routing=RoutingRule(scoring="sigmoid"),
            has_choice_bias=True,
        ),
    )


def read_ernie4_5_moe(raw: HFConfig, **common: Unpack[CommonFields]) -> DecoderConfig:
    """A softmax, and a rotation that turns neighbouring elements."""
    sizes = Sizes.read(
        raw, layers=28, hidden=2560, heads=20, kv_heads=4, ffn=12288, vocab=103424,
        positions=131072,
    )  # fmt: skip
    raw.choice("hidden_act", "silu", ("silu",))
    if raw.boolean("use_bias", False):
        raise raw.error("use_bias", "false: experts with biases are not supported")
    count, top_k = read_choices(raw, "moe_num_experts", 64, 6, top_k_key="moe_k")
    ffn = raw.integer("moe_intermediate_size", 1536)
    step, start = raw.integer("moe_layer_interval", 1), raw.whole_number("moe_layer_start_index", 1)
    last = sizes.layers - 1
    if not raw.states("moe_layer_end_index", [-1]):
        last = raw.whole_number("moe_layer_end_index", last)
    with_experts = [layer for layer in range(start, last + 1) if (layer + 1) % step == 0]
    return DecoderConfig.read(
        raw,
        common,
        "ernie4_5_moe",
        sizes,
        [whole_rotary(raw, sizes, theta=5e5)],
        norm_eps=raw.number("rms_norm_eps", 1e-5),
        ties=True,
        rotates_neighbours=True,
        experts=ExpertsConfig(
            count=count,
            top_k=top_k,
            intermediate_size=ffn,
            routing=RoutingRule(),
            has_choice_bias=True,
            shared_size=raw.whole_number("moe_num_shared_experts", 2) * ffn,
        ),
        dense_layers=tuple(layer for layer in range(sizes.layers) if layer not in with_experts),
    )


def _sigmoid_experts(
    raw: HFConfig,
    count: int | None,
    top_k: int | None,
    *,
    shared: int | None,
    renormalises: bool,
    ffn: int = 1408,
    factor: float = 1.0,
) -> ExpertsConfig:
    """DeepSeek-V3's fields. The arguments are the family's defaults; None: there is none."""
    raw.choice("hidden_act", "silu", ("silu",))
    for key, default in (
        ("n_routed_experts", count), ("num_experts_per_tok", top_k), ("n_shared_experts", shared)
    ):  # fmt: skip
        if default is None and key not in raw:
            raise raw.error(key, "an integer of at least 1")
    count, top_k = read_choices(raw, "n_routed_experts", count or 1, top_k or 1)
    groups, chosen_groups = read_groups(raw, count, top_k)
    ffn = raw.integer("moe_intermediate_size", ffn)
    return ExpertsConfig(
        count=count,
        top_k=top_k,
        intermediate_size=ffn,
        routing=RoutingRule(
            scoring="sigmoid",
            renormalises=raw.boolean("norm_topk_prob", renormalises),
            groups=groups,
            chosen_groups=chosen_groups,
            factor=raw.number("routed_scaling_factor", factor),
        ),
        has_choice_bias=True,
        shared_size=raw.whole_number("n_shared_experts", shared or 1) * ffn,
    )


def _first_layers(raw: HFConfig, sizes: Sizes, default: int) -> tuple[int, ...]:
    """Those without experts."""
    first = raw.whole_number("first_k_dense_replace", default)
    return tuple(range(min(first, sizes.layers)))
