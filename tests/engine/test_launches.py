"""What a decode step launches: on small models the time of a step follows their number."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulated_gpu import DEVICE, emulated_gpu
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.models.loader import load_model
from fastserve_backend.worker import step_inputs
from fastserve_backend.worker.model_runner import ModelRunner
from fastserve_backend.worker.step_inputs import StepLimits
from test_gpu_steps import COMMON, MODELS, empty_cache, model_config

GPT_OSS = COMMON | {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 20,
}
LAYERS = {
    "opt": [
        "_add_layer_norm",
        "addmm",
        "_attend_splits",
        "addmm",
        "_add_layer_norm",
        "_addmm_activation",
        "addmm",
    ],
    "llama, grouped heads": [
        "_add_rms_norm",
        "mm",
        "_rope_kv_write",
        "_attend_splits",
        "mm",
        "_add_rms_norm",
        "mm",
        "_gate_mul",
        "mm",
    ],
    "gemma2, windows": [
        "_add_rms_norm",
        "mm",
        "_rope_kv_write",
        "_attend_splits",
        "mm",
        "_rms_norm_heads",
        "_add_rms_norm",
        "mm",
        "_gate_mul",
        "mm",
        "_rms_norm_heads",
    ],
    "gpt-oss": [
        "_add_rms_norm",
        "addmm",
        "_rope_kv_write",
        "_attend_splits",
        "addmm",
        "_add_rms_norm",
        "addmm",
        "_to_copy",
        "topk",
        "_softmax",
        "_sort_choices",
        "_grouped_linear",
        "_clamped_swiglu",
        "arange",
        "_grouped_linear",
        "_sum_choices",
    ],
}
"""Kernels of a layer, in their order; those of torch by the names of its operations."""


@pytest.mark.parametrize("name", LAYERS)
def test_kernels_of_a_layer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_inputs, "most_host_bound_tokens", lambda *_: 0)  # decodes alone
    values = GPT_OSS if name == "gpt-oss" else MODELS[name]
    model_config(tmp_path, values)
    config = load_model_config(str(tmp_path), load_format="dummy", dtype="float16")
    with emulated_gpu() as gpu:
        model = load_model(config, DEVICE)
        cache = empty_cache(config, 8).to(DEVICE)
        limits = StepLimits(max_jobs=1, max_tokens=16, max_model_len=16)
        runner = ModelRunner(model, config, cache, DEVICE, limits)
        (graph,) = gpu.graphs
        launched = graph.launches()
        runner.close()
    expected = LAYERS[name] * values["num_hidden_layers"]
    starts = [
        index
        for index in range(len(launched))
        if launched[index : index + len(expected)] == expected
    ]
    assert len(starts) == 1, launched
