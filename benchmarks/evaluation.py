"""Log-likelihoods that EleutherAI's evaluation harness gets from the gateway, beside transformers'.

    benchmarks/peers/lm_eval.sh setup       # once: the harness in an environment of its own
    python -m benchmarks.evaluation         # minutes

A real tritonserver and a real ``fastserve gateway`` serve a checkpoint in float32, and the
harness's model ``local-completions`` runs three tasks on them: likelihoods of last words, of
whole texts in windows (``loglikelihood_rolling``), and a choice among four continuations. The texts
are Python's language reference (pydoc's topics, which comes with Python). transformers then
computes each log-likelihood anew, from the same tokens and weights.

There are two checkpoints: the embedded model, whose GGUF file transformers turns into float32, and
an OPT-125M with random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fastserve_backend.checkpoints.embedded import embedded_file
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from fastserve_client.protocol import MODEL_NAME
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gateway_overhead import start_gateway
from benchmarks.peers.against_others import interpreter_of
from benchmarks.peers.checkpoint import existing_checkpoint
from benchmarks.peers.comparison_tables import markdown
from benchmarks.peers.worker_process import ROOT

MAX_LENGTH = 512
"""Tokens of a window. Whole texts have several."""
TEXT_CHARACTERS = 3000
MOST_CHARACTERS = 400
"""Of a paragraph, which must fit a window even in a vocabulary of bytes."""
NUM_DOCUMENTS = 16
"""Of each task but the texts, of which there are a third as many."""
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "fastserve" / "peers"


def paragraphs() -> list[str]:
    """Paragraphs of at least two sentences that fit a window, on one line each."""
    text = "\n\n".join(pydoc_data.topics.topics.values())
    lines = (" ".join(one.split()) for one in text.split("\n\n"))
    return [
        one for one in lines if len(one) < MOST_CHARACTERS and re.search(r"[.] .{40,}[.]$", one)
    ]


def write_tasks(directory: Path) -> list[str]:
    """Writes the tasks and their data as the harness reads them. Returns the tasks' names."""
    found = paragraphs()
    chosen = found[:: len(found) // NUM_DOCUMENTS][:NUM_DOCUMENTS]
    words = [dict(zip(("context", "word"), one.rsplit(" ", 1), strict=True)) for one in chosen]
    topics = pydoc_data.topics.topics.values()
    texts = [{"text": one[:TEXT_CHARACTERS]} for one in topics if len(one) > TEXT_CHARACTERS]
    halves = [one.split(". ", 1) for one in chosen]
    choices = [
        {
            "question": begin + ".",
            "choices": [halves[(place + step) % len(halves)][1] for step in (0, 3, 6, 9)],
            "label": 0,
        }
        for place, (begin, _) in enumerate(halves)
    ]
    tasks: dict[str, tuple[Sequence[Mapping[str, Any]], dict[str, Any]]] = {
        "last_word": (
            words,
            {
                "output_type": "loglikelihood",
                "doc_to_text": "{{context}}",
                "doc_to_target": "{{word}}",
                "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
            },
        ),
        "whole_text": (
            texts[: NUM_DOCUMENTS // 3],
            {
                "output_type": "loglikelihood_rolling",
                "doc_to_text": "",
                "doc_to_target": "{{text}}",
                "metric_list": [{"metric": "word_perplexity"}],
            },
        ),
        "continuation": (
            choices,
            {
                "output_type": "multiple_choice",
                "doc_to_text": "{{question}}",
                "doc_to_target": "label",
                "doc_to_choice": "choices",
                "metric_list": [{"metric": "acc"}],
            },
        ),
    }
    for name, (documents, fields) in tasks.items():
        data = directory / f"{name}.jsonl"
        data.write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            **fields,
        }
        (directory / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # is YAML too
    return list(tasks)


def embedded_in_float32(directory: Path) -> Path:
    """The embedded model as a checkpoint of transformers."""
    file = embedded_file()
    config = load_model_config(str(file), load_format="auto")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # It cannot be saved, because it counts as quantized.
    del loaded.config.quantization_config
    model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(config.directory).save_pretrained(directory)
    return directory


def run_harness(python: str, checkpoint: Path, scratch: Path) -> dict[str, Any]:
    """The harness's results for the checkpoint behind a server and a gateway of its own."""
    config = EngineConfig().with_keys(
        model=str(checkpoint), dtype="float32", max_model_len=MAX_LENGTH, max_num_seqs=16,
        prefill_chunk_tokens=200,
    )  # fmt: skip
    settings, results = scratch / "settings.json", scratch / "results.json"
    server_log = scratch / "server.log"
    with TritonServer(
        config, http_port=0, grpc_port=0, metrics_port=0, log_path=server_log
    ) as server:
        gateway, url = start_gateway(server.endpoints.grpc_url)
        model = {
            "model": MODEL_NAME,
            "base_url": f"{url}/v1/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": str(checkpoint),
            "max_length": MAX_LENGTH,
            "batch_size": 4,
            "num_concurrent": 4,
        }
        tasks = scratch / "tasks"
        tasks.mkdir()
        wanted = {"model": model, "tasks": write_tasks(tasks), "include_path": str(tasks)}
        settings.write_text(json.dumps(wanted), encoding="utf-8")
        worker = ROOT / "benchmarks" / "peers" / "lm_eval_worker.py"
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(scratch)}
        environment.pop("PYTHONPATH", None)
        try:
            subprocess.run(
                [python, worker, settings, results], check=True, stdout=sys.stderr, env=environment
            )
        finally:
            gateway.terminate()
            gateway.wait()
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    return found


@torch.inference_mode()
def exact_loglikelihood(
    model: Any, context: Sequence[int], continuation: Sequence[int]
) -> tuple[float, bool]:
    """transformers' log-likelihood of the continuation, and whether each of its tokens is the most
    likely one."""
    tokens = torch.tensor([*context, *continuation])[-MAX_LENGTH + 1 :]
    targets = tokens[-len(continuation) :]
    logits = model(tokens[None, :-1]).logits[0, -len(continuation) :]
    own = logits.log_softmax(-1).gather(1, targets[:, None])
    return float(own.double().sum()), bool((logits.argmax(-1) == targets).all())


def compare(name: str, checkpoint: Path, results: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    differences, per_token, num_tokens, num_other = [], [], 0, 0
    for one in results["loglikelihoods"]:
        continuation = one["continuation"]
        exact, is_greedy = exact_loglikelihood(model, one["context"], continuation)
        differences.append(abs(one["logprob"] - exact))
        per_token.append(differences[-1] / len(continuation))
        num_tokens += len(continuation)
        num_other += one["is_greedy"] != is_greedy
    return [
        name,
        f"{len(differences)}",
        f"{num_tokens}",
        f"{max(differences):.1e}",
        f"{max(per_token):.1e}",
        f"{num_other}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    python = interpreter_of("lm_eval")
    if python is None:
        raise SystemExit(1)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        checkpoints = {
            "SmolLM2-135M-Instruct": embedded_in_float32(scratch / "embedded"),
            "OPT-125M, random": existing_checkpoint(_CACHE),
        }
        for number, (name, checkpoint) in enumerate(checkpoints.items()):
            of_model = scratch / str(number)
            of_model.mkdir()
            results = run_harness(python, checkpoint, of_model)
            print(f"# {name}: {json.dumps(results['metrics'])}", file=sys.stderr, flush=True)
            rows.append(compare(name, checkpoint, results))
    header = [
        "model", "log-likelihoods", "tokens", "greatest difference", "greatest difference a token",
        "other `is_greedy`",
    ]  # fmt: skip
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
