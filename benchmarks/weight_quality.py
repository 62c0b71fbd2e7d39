"""What formats of weights cost in quality: the embedded model beside the same model in float32.

    python -m benchmarks.weight_quality                                     # minutes
    python -m benchmarks.weight_quality file:int4 file:int8 Q4_0:as_stored  # only these formats

A format has two parts: the type of the matrices in the GGUF file, or "file" for the file as it is,
and a value of the configuration's `quantization`. Files of other types are written from
the file's own weights, so they add their rounding to that of the file.

The reference is the file, dequantised to float32, which transformers runs. The text is Python's
language reference (pydoc's topics, which comes with Python) in windows; the answers are the
reference's own greedy ones. "Same token" is the share of all places at which the most likely next
token is the reference's.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from fastserve_backend.checkpoints.embedded import embedded_file
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.config import EngineConfig
from fastserve_backend.models.loader import load_model, torch_dtype
from fastserve_backend.rank_protocol.messages import Step
from fastserve_backend.worker.step_inputs import CPUInputs
from gguf import GGMLQuantizationType
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers.comparison_tables import markdown

FILE = "file"
FORMATS = (
    *(f"{FILE}:{quantization}" for quantization in ("as_stored", "int8", "int4")),
    *(f"{kind}:as_stored" for kind in ("Q8_0", "Q5_1", "Q5_0", "Q4_0")),
)
WINDOW = 512
"""Tokens, of which all but the first are scored."""
ANSWER_TOKENS = 64
QUESTIONS = (
    "What is the capital of France?",
    "Explain to a child why the sky is blue.",
    "Write a short story about a fox and a river.",
    "Give me three tips for learning a language.",
    "How do I boil an egg?",
    "What is the difference between a list and a tuple in Python?",
    "Summarize the plot of Romeo and Juliet.",
    "Write an email that asks a colleague for a meeting.",
)
_BLOCK_SIZE = 16

Forward = Callable[[Tensor], Tensor]
"""Token ids [T] -> logits [T, vocab]."""


@dataclass(frozen=True, slots=True)
class Text:
    tokens: Tensor
    scored: slice
    """Places whose next token is scored."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Of several texts."""

    loss: float
    """Mean negative log-probability of the next token."""
    likeliest: Tensor
    """Most likely next tokens, of all texts one after the other."""


@torch.inference_mode()
def scores(forward: Forward, texts: Sequence[Text]) -> Scores:
    losses, likeliest = [], []
    for text in texts:
        logits = forward(text.tokens[:-1])[text.scored].float()
        losses.append(float(nn.functional.cross_entropy(logits, text.tokens[1:][text.scored])))
        likeliest.append(logits.argmax(-1))
    return Scores(statistics.mean(losses), torch.cat(likeliest))


class Reference:
    """The file's model in float32, by transformers."""

    def __init__(self, file: Path) -> None:
        config = load_model_config(str(file), load_format="auto")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(config.directory)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self._model(tokens[None]).logits[0]
        return logits

    def windows(self, count: int) -> list[Text]:
        topics = "\n".join(pydoc_data.topics.topics.values())
        tokens = torch.tensor(self._tokenizer(topics).input_ids)
        stride = len(tokens) // count
        return [Text(tokens[number * stride :][:WINDOW], slice(None)) for number in range(count)]

    @torch.inference_mode()
    def answers(self) -> list[Text]:
        texts = []
        for question in QUESTIONS:
            chat = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
            )
            prompt = torch.tensor([self._tokenizer(chat).input_ids])
            tokens = self._model.generate(prompt, max_new_tokens=ANSWER_TOKENS, do_sample=False)
            texts.append(Text(tokens[0], slice(prompt.shape[1] - 1, None)))
        return texts


def load_format(file: Path, quantization: str) -> Forward:
    """Our model of a GGUF file, as a rank computes it."""
    checked = EngineConfig().with_keys(model=str(file), quantization=quantization).model
    config = load_model_config(checked.model, load_format="auto", quantization=checked.quantization)
    forward = our_forward(config)
    assert config.directory is not None
    if file != embedded_file():
        shutil.rmtree(config.directory)  # of the cache, where nobody needs it again
    return forward


def our_forward(config: ModelConfig) -> Forward:
    model = load_model(config, torch.device("cpu"))
    blocks = list(range(math.ceil(WINDOW / _BLOCK_SIZE)))
    kv = torch.zeros(
        (len(blocks), config.num_layers, 2, config.num_kv_heads, _BLOCK_SIZE, config.head_dim),
        dtype=torch_dtype(config),
    )
    all_inputs = CPUInputs(_BLOCK_SIZE, config.layer_groups.kinds)

    def forward(tokens: Tensor) -> Tensor:
        step = Step.of(1, [(0, tokens.tolist(), blocks[: math.ceil(len(tokens) / _BLOCK_SIZE)])])
        inputs = all_inputs.prepare(step, 0)
        logits = model.forward(
            inputs.token_ids, inputs.positions, inputs.batch, kv, None, torch.arange(len(tokens))
        )
        assert logits is not None
        return logits

    return forward


def write_requantized(source: Path, kind: GGMLQuantizationType, target: Path) -> None:
    """Writes a GGUF file with matrices of another type. The embedding, vectors and fields stay."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            kinds = field.types
            writer.add_key_value(
                field.name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None
            )
    for tensor in reader.tensors:
        data, stored = tensor.data, tensor.tensor_type
        if data.ndim > 1 and tensor.name != "token_embd.weight":
            data, stored = gguf.quantize(gguf.dequantize(data, stored), kind), kind
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def row(name: str, mine: Sequence[Scores], exact: Sequence[Scores]) -> list[str]:
    """A row of the table.

    Args:
        mine, exact: a format's scores and the reference's, of the text and of the answers.
    """
    same = [
        float((one.likeliest == other.likeliest).double().mean())
        for one, other in zip(mine, exact, strict=True)
    ]
    return [
        name,
        f"{math.exp(mine[0].loss):.3f}",
        f"{math.expm1(mine[0].loss - exact[0].loss):+.2%}",
        *(f"{share:.1%}" for share in same),
    ]


def quality(file: Path, formats: Sequence[tuple[str, str]], windows: int) -> str:
    """The table, as Markdown."""
    reference = Reference(file)
    texts, answers = reference.windows(windows), reference.answers()
    exact = [scores(reference.forward, some) for some in (texts, answers)]
    rows = [row("float32", exact, exact)]
    with tempfile.TemporaryDirectory() as scratch:
        for kind, quantization in formats:
            print(f"# {kind}, {quantization}", file=sys.stderr, flush=True)
            path = file
            if kind != FILE:
                path = Path(scratch) / f"{kind}.gguf"
                write_requantized(file, GGMLQuantizationType[kind], path)
            forward = load_format(path, quantization)
            mine = [scores(forward, some) for some in (texts, answers)]
            rows.append(row(f"{kind}, {quantization}", mine, exact))
    header = ["weights, `quantization`", "perplexity", "change", "same token", "same in answers"]
    places = [len(one.likeliest) for one in exact]
    return (
        f"{file.name}: {windows} windows of {WINDOW} tokens, {places[0]} places, and "
        f"{len(QUESTIONS)} answers, {places[1]} places.\n\n" + markdown(header, rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("formats", nargs="*", default=FORMATS, help="such as Q4_0:as_stored")
    parser.add_argument("--windows", type=int, default=16)
    arguments = parser.parse_args()
    formats = []
    for name in arguments.formats:
        kind, _, quantization = name.partition(":")
        if kind not in (FILE, *GGMLQuantizationType.__members__) or not quantization:
            parser.error(f"got {name!r}; must be like Q4_0:as_stored or file:int8")
        formats.append((kind, quantization))
    print(quality(embedded_file(), formats, arguments.windows))


if __name__ == "__main__":
    main()
