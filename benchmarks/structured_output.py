"""What structured output costs the jobs that have it, and those beside them.

    python benchmarks/structured_output.py        # two to five minutes

First the masks alone, for answers to some typical forms, on the embedded model's tokens: how long
compiling a form takes, and each mask with the token before it, in the process that computes them.
Then decoding with the embedded model: jobs that write JSON after a schema, and as many that write
what they like, both of the same number of tokens; and free jobs beside bound ones, or beside other
free ones. The sides take turns; figures are medians of the repeats, with the least and the most in
brackets, and ratios are medians of those of the pairs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from fastserve_backend import LLM, SamplingParams, StructuredOutput
from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL
from fastserve_backend.engine.engine import Engine
from fastserve_backend.grammars.compiler import Compiler, accept, next_mask
from replay import run_jobs
from rich.console import Console
from rich.table import Table

OUTPUT_TOKENS = 96
PROMPT = [504, 2365, 282, 253]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string"}},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "kind": {"enum": ["writer", "painter", "other"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
# Longer than any answer here, so that none ends before the others.
PEOPLE = {"type": "array", "items": PERSON, "minItems": 100}
DOCUMENT = (
    '{"name": "Bertha von Suttner", "age": 71, "tags": ["peace", "novels", "Österreich"],\n'
    '    "zip": "12345", "kind": "writer"}'
)
FORMS = {
    "schema": (StructuredOutput(json_schema=PERSON), DOCUMENT),
    "any JSON object": (StructuredOutput(json_object=True), DOCUMENT),
    "regex": (StructuredOutput(regex=r"\d{4}-\d\d-\d\d [a-z ]{1,60}"), "1905-12-10 peace prize"),
    "choice of 3": (StructuredOutput(choice=["positive", "negative", "neutral"]), "neutral"),
    "grammar": (
        StructuredOutput(
            grammar='start: term (("+"|"-") term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]+/'
        ),
        "(12+3)-45+(6-(7+8))",
    ),
}

console = Console(width=110)


def masks(engine: Engine, repeats: int) -> None:
    tokens = [engine.tokenizer.token_bytes(one) for one in range(engine.model_config.vocab_size)]
    started_s = time.perf_counter()
    compiler = Compiler(tokens, engine.model_config.eos_token_ids)
    console.print(f"{len(tokens)} tokens: {(time.perf_counter() - started_s) * 1e3:.0f} ms, once")
    table = Table("form", "compile, ms", "mask, µs: median", "99%", "most")
    for name, (wanted, answer) in FORMS.items():
        ids = engine.tokenizer.encode(answer, special_tokens=False)
        compiled, each = [], []
        for _ in range(repeats):
            started_s = time.perf_counter()
            matcher = compiler.compile(wanted.kind, wanted.text)
            compiled.append(time.perf_counter() - started_s)
            for token_id in ids:
                started_s = time.perf_counter()
                accept(matcher, token_id)
                next_mask(matcher)
                each.append(time.perf_counter() - started_s)
        p99, most = np.percentile(each, 99), max(each)
        table.add_row(
            name,
            f"{statistics.median(compiled) * 1e3:.1f}",
            *(f"{seconds * 1e6:.0f}" for seconds in (statistics.median(each), p99, most)),
        )
    console.print(table)


def params(is_bound: bool) -> SamplingParams:
    wanted = StructuredOutput(json_schema=PEOPLE) if is_bound else None
    return SamplingParams(
        max_tokens=OUTPUT_TOKENS,
        temperature=0,
        ignore_eos=not is_bound,
        structured_output=wanted,
    )


def decode(engine: Engine, jobs: Sequence[bool], counted: int) -> tuple[float, float]:
    """Tokens/s of the first ``counted`` of the jobs, from the moment when all have a token; and
    milliseconds from a step's tokens to sending the next step, if that was not sent ahead."""
    counters = engine.counters
    num_steps, between_s = counters.iterations, counters.between_s
    answers = run_jobs(engine, [(PROMPT, params(is_bound)) for is_bound in jobs])
    stats = [answer.stats for answer in answers]
    assert all(one.num_output_tokens == OUTPUT_TOKENS for one in stats)
    first_s = max(one.first_token_s or 0.0 for one in stats)
    last_s = max(one.last_token_s or 0.0 for one in stats[:counted])
    between_s = (counters.between_s - between_s) / (counters.iterations - num_steps)
    return counted * (OUTPUT_TOKENS - 1) / (last_s - first_s), between_s * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    free, bound = False, True
    cases = {
        "1 job": ([free], [bound], 1),
        "16 jobs": ([free] * 16, [bound] * 16, 16),
        "8 free jobs beside 8": ([free] * 16, [free] * 8 + [bound] * 8, 8),
    }
    with LLM(arguments.model, device=arguments.device, prefix_caching=False) as llm:
        engine = llm.engine
        masks(engine, arguments.repeats)
        decode(engine, [free, bound], 2)  # warm
        figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for repeat in range(arguments.repeats):
            for label, (without, with_masks, counted) in cases.items():
                sides = {"free": without, "bound": with_masks}
                for side, jobs in list(sides.items())[:: 1 if repeat % 2 else -1]:
                    rate, between_ms = decode(engine, jobs, counted)
                    figures[f"{label}, tokens/s"][side].append(rate)
                    figures[f"{label}, ms between steps"][side].append(between_ms)
    table = Table("", "free", "bound", "bound / free")
    for label, values in figures.items():
        one, other = values["free"], values["bound"]
        ratio = ""
        if label.endswith("tokens/s"):
            ratio = f"{statistics.median(b / a for a, b in zip(one, other, strict=True)):.2f}"
        table.add_row(label, summary(one), summary(other), ratio)
    console.print(table)


def summary(values: list[float]) -> str:
    median, least, most = (f"{of(values):.2f}" for of in (statistics.median, min, max))
    return f"{median} [{least}, {most}]"


if __name__ == "__main__":
    main()
