"""The trained embedded model gives the same answers through the engine as in transformers."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL, embedded_file
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.errors import InvalidRequestError
from fastserve_backend.job import FinishReason, JobOutput
from fastserve_backend.models.gguf_weights import gguf_tensors
from live_engine import wait_until_free
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

# For one output of the engine, which is busy for a second with the longest step on a quick machine.
DEADLINE_S = 120.0
# Far above the difference between two float32 programs, far below that between two words.
TIE = 1e-3

QUESTIONS = [
    "Why is the sky blue?",
    "What is the capital of France? Answer in one word.",
    "Translate to French: Good morning, my friend.",
    "Write a Python function that reverses a list.",
    "List three colours.",
    "Repeat exactly: 🎉 你好 café",
    "Count from 1 to 20.",
]
# The model continues the pattern: emoji and CJK, mostly as tokens of single bytes.
TEXTS = ["🎉🚀🎉🚀🎉🚀🎉🚀🎉🚀", "你好世界。你好世界。你好世界。你好", "日本語の日本語の日本語の"]


@pytest.fixture(scope="module")
def small_llm() -> Iterator[LLM]:
    """The embedded model in float32, with KV memory for only some of the jobs below."""
    with LLM(
        EMBEDDED_MODEL,
        dtype="float32",
        max_model_len=512,
        device_blocks=40,
        max_num_seqs=6,
        swap_space_gib=0.1,
        policy="skip_join_mlfq",  # preempts the most
        check_integrity=True,
    ) as llm:
        yield llm
        wait_until_free(llm)


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    """transformers' model with our weights: to read the file itself takes it long.
    test_embedded_model_files.py compares the weights with those that it reads."""
    file = embedded_file()
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    directory = load_model_config(EMBEDDED_MODEL, load_format="auto").directory
    assert directory is not None
    weights = {one.name: one.read_dequantized(()).float() for one in gguf_tensors(Path(directory))}
    found = model.load_state_dict(weights, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


def conversation(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


def test_answers_are_the_greedy_ones_of_transformers(
    small_llm: LLM, reference: PreTrainedModel
) -> None:
    engine = small_llm.engine
    prompts = [engine.checks.encode_chat(conversation(question)) for question in QUESTIONS]
    prompts += [engine.checks.encode(text) for text in TEXTS]
    params = SamplingParams(max_tokens=56, temperature=0)
    completions = small_llm.generate(prompts, params, progress=False)
    assert sum(c.stats.num_preemptions for c in completions if c.stats is not None) > 0
    assert {c.finish_reason for c in completions} == {FinishReason.STOP, FinishReason.LENGTH}
    for prompt, completion in zip(prompts, completions, strict=True):
        answer = completion.token_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        chosen = logits[torch.arange(len(answer)), torch.tensor(answer)]
        assert torch.all(chosen > logits.max(-1).values - TIE), completion.text
    assert "Rayleigh" in completions[0].text
    assert completions[1].text == "The capital of France is Paris."
    assert "🎉🚀🎉🚀" in completions[len(QUESTIONS)].text
    assert "世界" in completions[len(QUESTIONS) + 1].text


def stream(llm: LLM, prompt: list[int], params: SamplingParams) -> list[JobOutput]:
    outputs: queue.SimpleQueue[JobOutput] = queue.SimpleQueue()
    llm.engine.submit("stream", prompt, params, outputs.put)
    received = []
    while not received or received[-1].finish_reason is None:
        received.append(outputs.get(timeout=DEADLINE_S))
    return received


@pytest.mark.parametrize("text", TEXTS)
def test_characters_of_several_tokens_are_streamed_whole(small_llm: LLM, text: str) -> None:
    prompt = small_llm.engine.checks.encode(text)
    outputs = stream(small_llm, prompt, SamplingParams(max_tokens=40, temperature=0))
    token_ids = [token for output in outputs for token in output.token_ids]
    pieces = [output.text for output in outputs]
    assert "".join(pieces) == small_llm.engine.tokenizer.decode(token_ids)
    # Only the end, where max_tokens cuts the text, may hold half a character.
    assert "\ufffd" not in "".join(pieces)[:-1]
    assert any(output.token_ids and not output.text for output in outputs)


def test_a_stop_word_ends_the_answer_before_it(small_llm: LLM) -> None:
    question = conversation("Count from 1 to 20.")
    greedy = SamplingParams(max_tokens=60, temperature=0)
    whole = small_llm.chat([question], greedy, progress=False)[0]
    assert "4. 4" in whole.text
    stopped = small_llm.chat(
        question, SamplingParams(max_tokens=60, temperature=0, stop=("4. 4",)), progress=False
    )[0]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.text == whole.text[: whole.text.index("4. 4")]


@pytest.mark.parametrize("stop", ["<|im_end|>", ".<|im_end|>", "Paris.<|im_end|>\n", "<|im_end|>x"])
def test_stop_words_with_the_end_token(small_llm: LLM, stop: str) -> None:
    """The end token ends the answer anyway, unless ``ignore_eos`` is set."""
    question = conversation("What is the capital of France? Answer in one word.")
    answer = "The capital of France is Paris."
    expected = answer.removesuffix(stop.partition("<")[0]) if stop.endswith(">") else answer
    params = SamplingParams(max_tokens=12, temperature=0, stop=stop)
    (ended,) = small_llm.chat(question, params, progress=False)
    assert (ended.text, ended.finish_reason) == (expected, FinishReason.STOP)
    if stop.endswith(">"):
        params = replace(params, ignore_eos=True)
        (ended,) = small_llm.chat(question, params, progress=False)
        assert (ended.text, ended.finish_reason) == (expected, FinishReason.STOP)


def test_a_conversation_keeps_its_turns(small_llm: LLM, reference: PreTrainedModel) -> None:
    greedy = SamplingParams(max_tokens=24, temperature=0)
    first = conversation("What is the capital of France? Answer in one word.")
    answer = small_llm.chat(first, greedy, progress=False)[0].text
    turns = conversation(first[0]["content"], answer, "And of Italy?")
    second = small_llm.chat(turns, greedy, progress=False)[0]
    assert "Rome" in second.text
    alone = small_llm.chat(conversation("And of Italy?"), greedy, progress=False)[0]
    assert alone.text != second.text


def test_a_conversation_that_is_too_long_is_refused(small_llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="so a prompt has at most 511"):
        small_llm.chat(conversation("many words " * 400), progress=False)
    for role, content in (("user", "x" * 1_000_000), ("x" * 1_000_000, "")):
        with pytest.raises(InvalidRequestError, match=r"messages: got '\d+ characters'"):
            small_llm.chat([{"role": role, "content": content}], progress=False)
    refusal = r"got '512 messages'; This model's maximum .* so a prompt has at most 511"
    with pytest.raises(InvalidRequestError, match=refusal):
        small_llm.chat([{"role": "user", "content": ""}] * 512, progress=False)


PARTS = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}]


def test_parts_of_text_are_the_text(small_llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0)
    whole = [{"role": "user", "content": "What is the capital of France?"}]
    parts = [{"role": "user", "content": PARTS}]
    one, other = small_llm.chat([whole, parts], greedy, progress=False)
    assert one.prompt == other.prompt == small_llm.engine.checks.encode_chat(parts)
    assert one.token_ids == other.token_ids


@pytest.mark.parametrize(
    ("conversations", "field"),
    [
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([[{"role": "user"}]], "messages[0]"),
        ([{"role": "user", "content": "a"}, "b"], "messages[1]"),
        ([[]], "messages"),
        ([None], "messages"),
        ("Hello", "messages"),
        (["Hello"], "messages"),
        ({"role": "user", "content": "a"}, "messages"),
        (None, "messages"),
    ],
)
def test_what_is_no_conversation_is_refused_by_name(
    small_llm: LLM, conversations: Any, field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        small_llm.chat(conversations, SamplingParams(max_tokens=1), progress=False)
    assert caught.value.field == field


def test_options_of_the_chat_template(small_llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0)
    question = {"role": "user", "content": "What is the capital of France?"}
    begun = [question, {"role": "assistant", "content": "The capital of"}]
    (answer,) = small_llm.chat(begun, greedy, continue_final_message=True, progress=False)
    assert answer.text.startswith(" France is")
    with pytest.raises(InvalidRequestError, match=r"^tools: got 'str'; must be a list"):
        small_llm.chat(begun, greedy, tools="add", progress=False)  # type: ignore[arg-type]


def test_an_assistant_that_calls_tools_may_say_nothing(small_llm: LLM) -> None:
    checks = small_llm.engine.checks
    user = {"role": "user", "content": "Hi"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": "5"}
    called = [user, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    empty = [user, {"role": "assistant", "content": ""}, result]
    assert checks.encode_chat(called) == checks.encode_chat(empty)  # the template knows no tools
    assert small_llm.chat(called, SamplingParams(max_tokens=1), progress=False)[0].token_ids
