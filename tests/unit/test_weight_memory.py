"""Weights that do not fit are refused before they are loaded."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from fastserve_backend.checkpoints.load_config import ModelConfig, load_model_config
from fastserve_backend.errors import ConfigError
from fastserve_backend.worker.host_limits import check_weights_fit

# No host holds this many times the weights of OPT-125M.
MANY = 10**9


def opt_125m(dtype: str) -> ModelConfig:
    return load_model_config("opt-125m", load_format="dummy", dtype=dtype)


def test_all_ranks_of_a_host_are_counted_and_no_others() -> None:
    config = opt_125m("float32")
    check_weights_fit(config, num_ranks=1, num_local_ranks=1)
    check_weights_fit(config, num_ranks=MANY, num_local_ranks=1)
    message = (
        r"the weights are .* GiB on this host in float32.* model\.dtype bfloat16, "
        r"model\.quantization int8 or more"
    )
    with pytest.raises(ConfigError, match=message):
        check_weights_fit(config, num_ranks=1, num_local_ranks=MANY)


def test_weights_that_may_stay_in_mapped_files_are_not_counted() -> None:
    check_weights_fit(opt_125m("float16"), num_ranks=1, num_local_ranks=MANY)


def test_weights_of_few_bits_are_counted_as_they_are_stored_where_kernels_take_them() -> None:
    config = replace(opt_125m("bfloat16"), quantization="as_stored", stored_weight_bytes=10**8)
    assert config.weight_bytes == 10**8
    check_weights_fit(config, num_ranks=1, num_local_ranks=1)
    sizes = []
    for dtype in ("bfloat16", "float16"):  # which only plain torch computes on a CPU
        with pytest.raises(ConfigError) as error:
            check_weights_fit(replace(config, dtype=dtype), num_ranks=1, num_local_ranks=MANY)
        sizes.append(float(re.findall(r"are ([\d.]+) GiB", str(error.value))[0]))
    assert sizes == pytest.approx([MANY * 10**8 / 2**30, MANY * 2 * config.num_parameters / 2**30])


def test_rounded_weights_are_counted_as_what_they_take() -> None:
    config = replace(opt_125m("float16"), quantization="int8")
    # A byte for each weight, the head's included, and the table in addition.
    assert config.weight_bytes == config.num_parameters + 2 * 50272 * 768
    untied = replace(config, tie_word_embeddings=False)
    assert untied.num_parameters == config.num_parameters + 50272 * 768
    assert untied.weight_bytes == config.weight_bytes
    with pytest.raises(ConfigError, match=r"GiB on this host in int8.* take a smaller model or"):
        check_weights_fit(config, num_ranks=1, num_local_ranks=MANY)
