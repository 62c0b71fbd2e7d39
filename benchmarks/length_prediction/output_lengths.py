"""How long the answers of a model really are, for a file of instructions.

    python -m benchmarks.length_prediction.output_lengths --instructions FILE --output lengths.csv

Each line of FILE is a JSON object with ``instruction``, ``input`` (may be empty) and ``output``.
The CSV holds no text: the SHA-256 of each prompt, its tokens with the chat template, and the
tokens of the model's greedy answer, its end-of-answer token among them. Prompts whose lines are
in the file already are not asked again.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from fastserve_backend import LLM, SamplingParams
from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL

from benchmarks.length_prediction.instructions import Instruction, read_instructions, read_lengths

_COLUMNS = ("prompt_sha256", "prompt_tokens", "output_tokens", "finish_reason")
_ROUND = 512  # prompts between two writes of the file


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--instructions", type=Path, required=True, metavar="FILE")
    options.add_argument("--output", type=Path, required=True, metavar="FILE")
    options.add_argument("--model", default=EMBEDDED_MODEL, help="(the embedded model)")
    options.add_argument("--count", type=int, default=5095, help="the first so many by hash (all)")
    options.add_argument("--max-tokens", type=int, default=512, help="of an answer (512)")
    options.add_argument("--max-num-seqs", type=int, default=64, help="of a batch (64)")
    options.add_argument("--dtype", default="float32", help="of the model (float32)")
    args = options.parse_args()
    is_new = not args.output.exists()
    known = {} if is_new else read_lengths(args.output)
    wanted = sorted(read_instructions(args.instructions), key=lambda one: one.sha256)
    missing = [one for one in wanted[: args.count] if one.sha256 not in known]
    with (
        LLM(
            args.model, dtype=args.dtype, max_model_len=2048, max_num_seqs=args.max_num_seqs
        ) as llm,
        args.output.open("a", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        if is_new:
            writer.writerow(_COLUMNS)
        params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0)
        for begin in range(0, len(missing), _ROUND):
            writer.writerows(_answers(llm, missing[begin : begin + _ROUND], params))
            file.flush()


def _answers(llm: LLM, some: list[Instruction], params: SamplingParams) -> list[tuple[object, ...]]:
    completions = llm.chat([one.messages for one in some], params)
    return [
        (
            one.sha256,
            len(completion.prompt),
            len(completion.token_ids),
            completion.finish_reason.value if completion.finish_reason else "",
        )
        for one, completion in zip(some, completions, strict=True)
    ]


if __name__ == "__main__":
    main()
