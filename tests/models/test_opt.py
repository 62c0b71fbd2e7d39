"""OPT's checkpoints: their formats, their precision, random weights and damage."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.models.causal_lm import CausalLM
from fastserve_backend.models.loader import load_model
from log_records import messages_of
from opt_checkpoints import (
    FORMATS,
    VARIANTS,
    random_opt,
    rewrite,
    save_bin,
    save_legacy_bin,
    save_safetensors,
    save_tied_with_head,
)
from paged_executor import PagedExecutor, check_prompt, expected_logits, load, prompts
from torch import Tensor
from transformers import OPTForCausalLM

Save = Callable[[OPTForCausalLM, Path], None]


@pytest.mark.parametrize("save", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("variant", ["base", "350m"])
def test_checkpoint_formats(tmp_path: Path, variant: str, save: Save) -> None:
    theirs = random_opt(**VARIANTS[variant])
    save(theirs, tmp_path)
    check_prompt(load(tmp_path), theirs)


def test_untied_head_in_bin(tmp_path: Path) -> None:
    theirs = random_opt(tie_word_embeddings=False)
    save_bin(theirs, tmp_path)
    check_prompt(load(tmp_path), theirs)


@pytest.mark.parametrize(
    "names",
    [
        ("score.weight", "v_head.summary.bias"),
        ("model.decoder.version", "model.vision_tower.layers.0.fc1.weight"),
        tuple(f"mtp.{number}.weight" for number in range(9)),
    ],
)
def test_what_is_no_part_of_the_model_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: tuple[str, ...]
) -> None:
    theirs = random_opt()
    save_safetensors(theirs, tmp_path)
    rewrite(tmp_path, lambda t: t.update({name: torch.tensor(3) for name in names}))
    check_prompt(load(tmp_path), theirs)
    (message,) = messages_of(caplog, "fastserve_backend.models")
    assert message.startswith("checkpoint tensors that the model does not use: ")
    assert all(name in message for name in names[:4])
    assert len(message) < 200


@pytest.mark.parametrize("only_head", [True, False], ids=["head_only", "head_differs"])
def test_tied_config_with_a_head_in_the_checkpoint(tmp_path: Path, only_head: bool) -> None:
    """As in transformers, one name for the table is enough, and two different tables are not
    tied."""
    theirs = save_tied_with_head(tmp_path, only_head=only_head)
    check_prompt(load(tmp_path), theirs)


def test_half_precision_checkpoint_is_computed_in_the_asked_dtype(tmp_path: Path) -> None:
    theirs = random_opt().to(torch.bfloat16)
    save_safetensors(theirs, tmp_path)
    check_prompt(load(tmp_path), theirs.float())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near(tmp_path: Path, dtype: str) -> None:
    theirs = random_opt()
    save_safetensors(theirs, tmp_path)
    config = load_model_config(str(tmp_path), load_format="auto", dtype=dtype)
    ours = load_model(config, torch.device("cpu"))
    executor = PagedExecutor(ours, theirs.config, prompts(12), seed=5)
    executor.cast(getattr(torch, dtype))
    executor.step([(0, 12)])
    got, want = (
        torch.stack(executor.jobs[0].logits).float(),
        expected_logits(theirs, executor.jobs[0].tokens),
    )
    assert (got - want).norm() / want.norm() < (0.03 if dtype == "bfloat16" else 0.005)


class TestDummyWeights:
    def build(self, tmp_path: Path) -> tuple[CausalLM, OPTForCausalLM]:
        theirs = random_opt()
        theirs.config.save_pretrained(tmp_path)
        config = load_model_config(str(tmp_path), load_format="dummy", dtype="float32")
        return load_model(config, torch.device("cpu")), theirs

    def logits(self, tmp_path: Path) -> Tensor:
        ours, theirs = self.build(tmp_path)
        executor = PagedExecutor(ours, theirs.config, prompts(12), seed=5)
        executor.step([(0, 12)])
        return torch.stack(executor.jobs[0].logits)

    def test_are_always_the_same(self, tmp_path: Path) -> None:
        first = self.logits(tmp_path)
        torch.manual_seed(99)  # torch's global generator has no influence
        assert torch.equal(first, self.logits(tmp_path))

    def test_look_like_initial_weights(self, tmp_path: Path) -> None:
        from fastserve_backend.models.weights import dummy_tensors

        ours, theirs = self.build(tmp_path)
        wanted = ours.parameters()
        stored = dummy_tensors(wanted, theirs.num_parameters(), torch.float32)
        tensors = {one.name: one.read(wanted[one.name].shard) for one in stored}
        assert sum(t.numel() for t in tensors.values()) == theirs.num_parameters()
        for name, tensor in tensors.items():
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            assert abs(tensor.mean().item() - centre) < 0.02, name
            assert 0.01 < tensor.std().item() < 0.03, name
        assert not torch.equal(
            tensors["layers.0.self_attn.q_proj.weight"], tensors["layers.1.self_attn.q_proj.weight"]
        )


class TestBadWeights:
    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        save_safetensors(random_opt(), tmp_path)
        return tmp_path

    def test_missing_tensor(self, checkpoint: Path) -> None:
        rewrite(checkpoint, lambda t: t.__delitem__("model.decoder.layers.1.fc1.bias"))
        with pytest.raises(ModelError, match=r"lacks layers\.1\.fc1\.bias"):
            load(checkpoint)

    @pytest.mark.parametrize(
        "name",
        [
            "model.decoder.layers.0.fc3.weight",
            "model.decoder.layers.0.self_attn.q_proj.lora_A.weight",
            "model.decoder.layers.3.fc1.bias",  # in a layer that config.json does not have
            "model.decoder.project_in.weight",
            "lm_head.bias",
        ],
    )
    def test_a_tensor_without_which_the_model_would_be_another(
        self, checkpoint: Path, name: str
    ) -> None:
        rewrite(checkpoint, lambda t: t.update({name: torch.ones(2)}))
        shown = name.removeprefix("model.decoder.")
        with pytest.raises(ModelError, match=f"{re.escape(shown)} is unexpected"):
            load(checkpoint)

    @pytest.mark.parametrize("name", ["lm_head.bias", "model.decoder.layers.0.fc3.bias"])
    def test_but_not_a_bias_that_adds_nothing(self, checkpoint: Path, name: str) -> None:
        rewrite(checkpoint, lambda t: t.update({name: torch.zeros(2)}))
        load(checkpoint)

    @pytest.mark.parametrize("name", ["model.decoder.layers.0.fc2.weight", "lm_head.weight"])
    def test_wrong_shape(self, checkpoint: Path, name: str) -> None:
        rewrite(checkpoint, lambda t: t.update({name: torch.zeros(3, 5)}))
        with pytest.raises(
            ModelError, match=r"weight has shape \(3, 5\), but .* asks for \(\d+, \d+\)"
        ):
            load(checkpoint)

    def test_integer_tensor(self, checkpoint: Path) -> None:
        name = "model.decoder.final_layer_norm.bias"
        rewrite(checkpoint, lambda t: t.update({name: t[name].to(torch.int8)}))
        with pytest.raises(ModelError, match=r"bias is I8; only floating-point"):
            load(checkpoint)

    @pytest.mark.parametrize("keep", [4, 200, -100])
    def test_truncated_safetensors(self, checkpoint: Path, keep: int) -> None:
        file = checkpoint / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(ModelError, match=r"model\.safetensors is damaged or incomplete"):
            load(checkpoint)

    def test_tensor_twice(self, tmp_path: Path) -> None:
        theirs = random_opt()
        save_bin(theirs, tmp_path)
        state = theirs.state_dict()
        state["decoder.final_layer_norm.bias"] = state[
            "model.decoder.final_layer_norm.bias"
        ].clone()
        torch.save(state, tmp_path / "pytorch_model.bin")
        with pytest.raises(ModelError, match=r"final_layer_norm\.bias is twice"):
            load(tmp_path)

    def test_missing_shard(self, tmp_path: Path) -> None:
        FORMATS["sharded_safetensors"](random_opt(), tmp_path)
        lost = sorted(tmp_path.glob("model-00002-of-*.safetensors"))[0]
        lost.unlink()
        with pytest.raises(ModelError, match=f"{lost.name} is missing"):
            load(tmp_path)

    @pytest.mark.parametrize(
        "index",
        [
            "{",
            "[]",
            '{"weight_map": 3}',
            '{"weight_map": {"a": "../outside.bin"}}',
            '{"weight_map": {"a": 1}}',
        ],
    )
    def test_bad_index(self, tmp_path: Path, index: str) -> None:
        random_opt().config.save_pretrained(tmp_path)
        (tmp_path / "pytorch_model.bin.index.json").write_text(index)
        with pytest.raises(ModelError, match=r"pytorch_model\.bin\.index\.json"):
            load(tmp_path)

    @pytest.mark.parametrize(
        ("save", "keep"),
        [(save_bin, keep) for keep in (0, 10, -300)]
        + [(save_legacy_bin, keep) for keep in (1, 18, 28, 54, 316)],
    )
    def test_truncated_bin(self, tmp_path: Path, save: Save, keep: int) -> None:
        """torch's reader of the legacy format fails in a different way at each instruction of the
        pickle."""
        save(random_opt(), tmp_path)
        file = tmp_path / "pytorch_model.bin"
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(ModelError, match=r"pytorch_model\.bin is (damaged|refused)"):
            load(tmp_path)

    def test_code_in_bin_is_refused(self, tmp_path: Path) -> None:
        random_opt().config.save_pretrained(tmp_path)
        torch.save({"a": _RunsCode(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
        with pytest.raises(ModelError, match="could run code"):
            load(tmp_path)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("content", [[torch.zeros(1)], {"a": 1}, {3: torch.zeros(1)}])
    def test_bin_without_named_tensors(self, tmp_path: Path, content: object) -> None:
        random_opt().config.save_pretrained(tmp_path)
        torch.save(content, tmp_path / "pytorch_model.bin")
        with pytest.raises(ModelError, match="named tensor"):
            load(tmp_path)


class _RunsCode:
    """An object whose unpickling would make a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self._path,)
