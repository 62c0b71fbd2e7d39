"""Which weights are refused before they are loaded."""

from __future__ import annotations

import pytest
from fastserve_backend.errors import ConfigError
from fastserve_backend.models.config import ModelConfig, load_model_config
from fastserve_backend.worker.weight_memory import check_weights_fit

# As many times the weights of OPT-125M no host holds.
MANY = 10**9


def opt_125m(dtype: str) -> ModelConfig:
    return load_model_config("opt-125m", load_format="dummy", dtype=dtype)


def test_all_ranks_of_a_host_are_counted_and_no_others() -> None:
    config = opt_125m("float32")
    check_weights_fit(config, num_ranks=1, num_local_ranks=1)
    check_weights_fit(config, num_ranks=MANY, num_local_ranks=1)
    message = r"the weights are .* GiB on this host in float32.* model\.dtype bfloat16 or more"
    with pytest.raises(ConfigError, match=message):
        check_weights_fit(config, num_ranks=1, num_local_ranks=MANY)


def test_weights_that_may_stay_in_mapped_files_are_not_counted() -> None:
    check_weights_fit(opt_125m("float16"), num_ranks=1, num_local_ranks=MANY)
