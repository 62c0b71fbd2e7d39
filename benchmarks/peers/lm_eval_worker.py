"""Runs EleutherAI's evaluation harness on a gateway, for `benchmarks.evaluation`.

    PYTHON benchmarks/peers/lm_eval_worker.py SETTINGS.json RESULTS.json

It runs in the harness's own environment and knows nothing of this project. ``SETTINGS.json`` has
``model`` (arguments of the harness's ``local-completions``), ``tasks`` (names) and ``include_path``
(the directory of their YAML files). ``RESULTS.json`` gets ``metrics``, by task, and
``loglikelihoods``: for each ``context`` and ``continuation`` in tokens the ``logprob`` and whether
it ``is_greedy``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager


class NotingCompletionsAPI(LocalCompletionsAPI):  # type: ignore[misc]
    """Keeps each log-likelihood with its tokens."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.loglikelihoods: list[dict[str, Any]] = []

    def _loglikelihood_tokens(self, requests: Any, **arguments: Any) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, **arguments)
        self.loglikelihoods += [
            {
                "context": context,
                "continuation": continuation,
                "logprob": logprob,
                "is_greedy": is_greedy,
            }
            for (_, context, continuation), (logprob, is_greedy) in zip(
                requests, answers, strict=True
            )
        ]
        return answers


def main(settings_file: str, results_file: str) -> None:
    settings = json.loads(Path(settings_file).read_text(encoding="utf-8"))
    model = NotingCompletionsAPI(**settings["model"])
    found = simple_evaluate(
        model=model,
        tasks=settings["tasks"],
        task_manager=TaskManager(include_path=settings["include_path"], include_defaults=False),
        bootstrap_iters=0,
    )
    results = {"metrics": found["results"], "loglikelihoods": model.loglikelihoods}
    Path(results_file).write_text(json.dumps(results, default=str), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
