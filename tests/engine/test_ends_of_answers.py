"""An answer ends at an end token that only the tokenizer's files name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from byte_tokenizer import save_byte_tokenizer
from fastserve_backend import LLM, SamplingParams, StructuredOutput
from tiny_model import TINY_OPT, engine_options
from tokenizers import AddedToken, Tokenizer

pytestmark = pytest.mark.usefixtures("forked_ranks")

# Added as text, not as a special token.
END = 260
CERTAIN = {END: 100.0}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = save_byte_tokenizer(tmp_path_factory.mktemp("ends"))
    file = directory / "tokenizer.json"
    fast = Tokenizer.from_str(file.read_text("utf-8"))
    fast.add_tokens([AddedToken("<|turn|>", normalized=False)])
    assert fast.token_to_id("<|turn|>") == END
    file.write_text(fast.to_str(), "utf-8")
    (directory / "config.json").write_text(json.dumps(TINY_OPT))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|turn|>"}))
    with LLM(**engine_options(directory)) as shared:
        yield shared


def test_it_ends_the_answer_and_is_no_part_of_it(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, logit_bias=CERTAIN)
    [one] = llm.generate(["a"], params, progress=False)
    assert (str(one.finish_reason), one.token_ids, one.text) == ("stop", [END], "")


def test_ranks_do_not_choose_it_before_min_tokens(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, min_tokens=3, logit_bias=CERTAIN)
    [one] = llm.generate(["a"], params, progress=False)
    assert len(one.token_ids) == 4
    assert one.token_ids.index(END) == 3


def test_it_is_no_part_of_a_structured_answer(llm: LLM) -> None:
    """The token's text fits the pattern, but the token would end the answer."""
    pattern = '"[a-z<>|]{3,12}"'
    wanted = StructuredOutput(regex=pattern)
    params = SamplingParams(max_tokens=40, logit_bias=CERTAIN, structured_output=wanted)
    [one] = llm.generate(["a"], params, progress=False)
    assert one.token_ids[-1] == END
    assert END not in one.token_ids[:-1]
    assert re.fullmatch(pattern, one.text)
