"""A model that is divided among ranks and stages gives the logits of transformers' model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_checkpoints import FAMILIES as DECODERS
from decoder_checkpoints import of_each
from divisible_models import MODELS, saved
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.models.loader import load_model
from log_records import messages_of
from opt_checkpoints import FORMATS, random_opt, rewrite, save_tied_with_head
from paged_executor import PagedExecutor, check_chunked_prompts, check_prompt, prompts
from rank_threads import DividedModel

SIZES = [(4, 1), (1, 3), (2, 2)]
"""Ranks of a stage, and stages."""


def divided(directory: Path, tensor_size: int, num_stages: int) -> DividedModel:
    config = load_model_config(str(directory), load_format="auto", dtype="float32")
    return DividedModel(config, tensor_size, num_stages)


@pytest.mark.parametrize(
    ("name", "tensor_size", "num_stages"),
    [
        *((name, *sizes) for name in MODELS if name not in DECODERS for sizes in SIZES),
        # They share the classes that divide a model, so that one division of each is enough.
        *(
            one
            for index, name in enumerate(DECODERS)
            for one in of_each([name], *SIZES[index % len(SIZES)])
        ),
    ],
)
def test_logits(name: str, tensor_size: int, num_stages: int, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path)
    check_chunked_prompts(divided(tmp_path, tensor_size, num_stages), theirs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "sums_a_layer"), [("opt_base", 2), ("llama", 2), ("neox", 1), ("neox_sequential", 2)]
)
def test_ranks_sum_as_rarely_as_they_can(name: str, sums_a_layer: int, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path)
    ours = divided(tmp_path, 2, 1)
    executor = PagedExecutor(ours, theirs.config, prompts(5), seed=2)  # type: ignore[arg-type]
    executor.step([(0, 5)])
    embedding = 1
    assert ours.meetings[0].num_sums == embedding + 3 * sums_a_layer


@pytest.mark.parametrize("save", FORMATS.values(), ids=FORMATS)
def test_every_checkpoint_format_is_read_in_parts(tmp_path: Path, save: Any) -> None:
    theirs = random_opt()
    save(theirs, tmp_path)
    check_prompt(divided(tmp_path, 2, 3), theirs)  # type: ignore[arg-type]


@pytest.mark.parametrize("only_head", [True, False], ids=["head_only", "head_differs"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_tied_head_in_the_checkpoint(tmp_path: Path, only_head: bool, num_stages: int) -> None:
    theirs = save_tied_with_head(tmp_path, only_head=only_head)
    check_prompt(divided(tmp_path, 2, num_stages), theirs)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["opt_350m", "llama_grouped", "neox_tied"])
def test_random_weights_do_not_depend_on_the_division(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path)
    config = load_model_config(str(tmp_path), load_format="dummy", dtype="float32")
    logits = []
    for model in (load_model(config, torch.device("cpu")), DividedModel(config, 2, 3)):
        executor = PagedExecutor(model, theirs.config, prompts(9), seed=5)  # type: ignore[arg-type]
        executor.step([(0, 9)])
        logits.append(torch.stack(executor.jobs[0].logits))
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5)


class TestWrongFiles:
    """The stage that needs a tensor reports it missing. Every stage refuses a tensor that none
    needs."""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: t.pop("model.decoder.layers.1.fc1.bias"), r"lacks layers\.1\.fc1\.bias"),
            (lambda t: t.update({"lm_head.bias": torch.ones(2)}), r"lm_head\.bias is unexpected"),
            (
                lambda t: t.update({"model.decoder.layers.2.fc2.weight": torch.zeros(3, 5)}),
                r"layers\.2\.fc2\.weight has shape \(3, 5\)",
            ),
            (lambda t: t.pop("model.decoder.embed_tokens.weight"), r"lacks embed_tokens\.weight"),
        ],
    )
    def test_is_said(self, tmp_path: Path, change: Any, message: str) -> None:
        random_opt().save_pretrained(tmp_path)
        rewrite(tmp_path, change)
        with pytest.raises(ModelError, match=message):
            divided(tmp_path, 2, 3)

    def test_what_is_no_part_of_the_model_is_named_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        random_opt().save_pretrained(tmp_path)
        rewrite(tmp_path, lambda tensors: tensors.update({"score": torch.zeros(2)}))
        divided(tmp_path, 2, 3)
        messages = messages_of(caplog, "fastserve_backend.models")
        assert [message[-7:] for message in messages] == [": score"]

    def test_tensors_of_layers_that_config_json_lacks(self, tmp_path: Path) -> None:
        random_opt().save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        fields = json.loads(file.read_text()) | {"num_hidden_layers": 2}
        file.write_text(json.dumps(fields))
        with pytest.raises(ModelError, match=r"layers\.2\..* is unexpected"):
            divided(tmp_path, 1, 2)
