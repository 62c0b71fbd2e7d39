"""The grammar process: which tokens an answer may continue with, and protection from hostile
grammars."""

from __future__ import annotations

import itertools
import json
import queue
import random
import select
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import psutil
import pytest
from fastserve_backend.errors import TenantLimitError
from fastserve_backend.grammars.client import MAX_WAITING, GrammarClient
from fastserve_backend.grammars.compilation import Compilation
from fastserve_backend.grammars.compiler import (
    Compiler,
    GrammarError,
    _Vocabulary,
    accept,
)
from fastserve_backend.grammars.messages import (
    FromGrammars,
    GrammarRefused,
    JobFailed,
    NewMasks,
    TimeUsed,
    Vocabulary,
)
from fastserve_backend.grammars.structured_output import StructuredOutput
from fastserve_backend.system import helper_process
from fastserve_backend.system.cores import num_cores
from fastserve_client.schema_formats import KNOWN_FORMATS
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from started_processes import StartedProcesses, noting_processes

DEADLINE_S = 60.0
EOS = (2, 3)
# Two end tokens, all bytes, some words; 270 has no text.
WORDS = [b'{"', b'": ', b'", "', b"true", b"12", b"yes", b" no", "ö".encode(), b"", b"yes"]
TOKENS = [b""] * 4 + [bytes([value]) for value in range(256)] + WORDS
SPECIALS = {0: b"[CALL]"}
CHAIN = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(1500)}
STANDARD_FORMATS = (
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname",
    "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template",
    "json-pointer", "relative-json-pointer", "regex", "int32", "int64", "float", "double", "byte",
    "binary", "password", "color", "phone", "unknown",
)  # fmt: skip
# Recursion, time without end, memory.
HOSTILE = {
    "stack": {"json_schema": {"$defs": CHAIN | {"a1500": {}}, "$ref": "#/$defs/a0"}},
    "time": {"json_schema": {"allOf": [{"type": "integer", "multipleOf": n} for n in
                                       (9973, 9967, 9949, 9941)]}},
    "rules": {"grammar": "start: r0\n" + "\n".join(f'r{n}: r{n + 1} "a" | r{n + 1}' for n in
                                                   range(2500)) + '\nr2500: "b"'},
}  # fmt: skip
# It may be compiled, and that takes half a second of processor time.
SLOW = {"allOf": [{"type": "integer", "multipleOf": n} for n in (31, 37, 41)]}


def allowed(mask: bytes) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")))


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(TOKENS, EOS)


class TestCompiler:
    def test_an_answer_ends_where_it_is_complete_and_with_any_end_token(
        self, compiler: Compiler
    ) -> None:
        matcher = compiler.compile("choice", '["yes", "yes no"]')
        assert allowed(compiler.next_mask(matcher)) == {
            265
        }  # where there is no choice, the longest token
        accept(matcher, 265)
        assert allowed(compiler.next_mask(matcher)) == {*EOS, 4 + ord(" "), 266}
        accept(matcher, 266)
        assert allowed(compiler.next_mask(matcher)) == set(EOS)

    @pytest.mark.parametrize("num_tokens", [287, 288, 289])
    def test_a_mask_has_a_bit_for_each_token_in_whole_words(self, num_tokens: int) -> None:
        tokens = [*TOKENS, *[b""] * (num_tokens - len(TOKENS))]
        compiler = Compiler(tokens, EOS)
        mask = compiler.next_mask(compiler.compile("regex", "a"))
        assert len(mask) == (36 if num_tokens <= 288 else 40)

    @pytest.mark.parametrize(
        ("wanted", "answers"),
        [
            (StructuredOutput(regex=r"\d{2}/[a-c]+"), {b"12/ab": True, "٤٢/a".encode(): False}),
            (StructuredOutput(json_object=True), {b'{"a":\n  [1]}': True, b"[1]": False}),
            (StructuredOutput(choice=['a"\\\n/\u2028😀']), {'a"\\\n/\u2028😀'.encode(): True}),
            (StructuredOutput(grammar='start: "a"+ /[xy]/'), {b"aay": True, b"y": False}),
        ],
    )
    def test_what_is_of_the_language(
        self, compiler: Compiler, wanted: StructuredOutput, answers: dict[bytes, bool]
    ) -> None:
        for text, is_answer in answers.items():
            matcher = compiler.compile(wanted.kind, wanted.text)
            ids = [4 + byte for byte in text]
            assert (matcher.validate_tokens([*ids, EOS[0]]) > len(ids)) == is_answer

    def test_formats_that_are_known(self) -> None:
        """Checks the formats of JSON Schema and OpenAPI, and an unknown one."""
        tokens = LLTokenizer(TokenizerWrapper(_Vocabulary(TOKENS, EOS[0])), eos_token=list(EOS))
        for name in (*STANDARD_FORMATS, *KNOWN_FORMATS, "colour"):
            grammar = LLMatcher.grammar_from_json_schema({"type": "string", "format": name})
            is_known = not LLMatcher(tokens, grammar, log_level=0).is_error()
            assert is_known == (name in KNOWN_FORMATS), name

    @pytest.mark.parametrize(
        ("schema", "answers"),
        [
            ({"type": "string", "format": "regex"}, {'"(: is none"': True, "5": False}),
            ({"type": "string", "format": "regex", "pattern": "^a$"}, {'"a"': True, '"b"': False}),
            ({"type": "integer", "format": "int32"}, {"5": True, '"5"': False}),
            ({"type": "number", "format": "double", "minimum": 2}, {"5": True, "1": False}),
            ({"type": "string", "format": "date"}, {'"2026-01-31"': True, '"today"': False}),
            ({"type": "array", "uniqueItems": False}, {"[1,1]": True, "{}": False}),
            ({"type": "object", "required": None}, {"{}": True, "5": False}),
            ({"type": "object", "propertyNames": {"type": "string"},
              "additionalProperties": {"type": "string"}}, {'{"a":"b"}': True, '{"a":5}': False}),
            ({"enum": [{"format": "x"}]}, {'{"format":"x"}': True, "{}": False}),
            ({"properties": {"format": {"const": "x"}}, "required": ["format"], "type": "object"},
             {'{"format":"x"}': True, '{"format":"y"}': False}),
            ({"properties": {"a": {"$ref": "#/$defs/a"}}, "type": "object", "required": ["a"],
              "$defs": {"a": {"type": "string", "format": "iri"}}}, {'{"a":"ä"}': True}),
            ({"type": "object", "$ref": "#/$defs/a", "$defs": {"a": {"maxProperties": 0}}},
             {"{}": True, "5": False}),
        ],
    )  # fmt: skip
    def test_what_is_left_out_of_a_schema(
        self, compiler: Compiler, schema: dict[str, Any], answers: dict[str, bool]
    ) -> None:
        for text, is_answer in answers.items():
            matcher = compiler.compile("json_schema", json.dumps(schema))
            ids = [4 + byte for byte in text.encode()]
            assert (matcher.validate_tokens([*ids, EOS[0]]) > len(ids)) == is_answer, text

    def test_where_a_format_less_would_allow_more_it_is_refused(self, compiler: Compiler) -> None:
        with pytest.raises(GrammarError):
            compiler.compile("json_schema", '{"type": "string", "not": {"format": "x"}}')

    def test_white_space_comes_to_an_end(self, compiler: Compiler) -> None:
        matcher = compiler.compile("json_object", '{"type": "object"}')
        ids = [4 + byte for byte in b"{" + b" " * 30]
        assert matcher.validate_tokens(ids) == 25


def test_a_compilation_leaves_the_interpreter_to_others(compiler: Compiler) -> None:
    quick = compiler.compile("regex", "a*")
    compilation = Compilation(compiler, "json_schema", json.dumps(SLOW))
    poller = select.poll()
    poller.register(compilation, 0)
    num_masks = 0
    while not poller.poll(0):
        accept(quick, 4 + ord("a"))
        compiler.next_mask(quick)
        num_masks += 1
    compiled = compilation.wait()
    assert isinstance(compiled.known, LLMatcher)
    assert allowed(compiler.next_mask(compiled.known.deep_copy())) >= {4 + ord("1")}
    assert compiled.used_s > 0
    assert num_masks > 20


def test_a_compilation_that_fails_has_the_reason(compiler: Compiler) -> None:
    compiled = Compilation(compiler, "regex", "(a").wait()
    assert isinstance(compiled.known, str)
    assert "unclosed group" in compiled.known


EXACT = st.integers(-(2**53), 2**53)
"""Integers that are exact as doubles, as llguidance reads those of a schema."""


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    simple: st.SearchStrategy[dict[str, Any]] = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n},
                  st.integers(-50, 50), st.integers(0, 300)),
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 5)),
        st.builds(lambda values: {"enum": values},
                  st.lists(st.text(max_size=4) | EXACT, min_size=1, max_size=3)),
    )  # fmt: skip

    def compound(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        return st.one_of(
            st.builds(
                lambda properties: {"type": "object", "properties": properties,
                                    "required": sorted(properties)[::2],
                                    "additionalProperties": False},
                st.dictionaries(st.text("abcä\"\\ ", max_size=3), inner, max_size=3),
            ),
            st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
            st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=2)),
        )  # fmt: skip

    return st.recursive(simple, compound, max_leaves=4)


@settings(max_examples=60, deadline=None)
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_whatever_a_model_chooses_is_json_that_the_schema_describes(
    compiler: Compiler, schema: dict[str, Any], seed: int
) -> None:
    matcher = compiler.compile("json_schema", StructuredOutput(json_schema=schema).text)
    text = random_answer(compiler, matcher, random.Random(seed))
    jsonschema.validate(json.loads(text), schema)


def random_answer(compiler: Compiler, matcher: LLMatcher, rng: random.Random) -> bytes:
    text = b""
    for _ in range(5000):
        token_id = int(rng.choice(sorted(allowed(compiler.next_mask(matcher)))))
        if token_id in EOS:
            return text
        text += TOKENS[token_id]
        accept(matcher, token_id)
    raise AssertionError("it has no end")


class Asker:
    """A client that keeps answers until the test takes them, and sums up what tenants have used."""

    def __init__(self, started: StartedProcesses) -> None:
        self._started = started
        self.used_s: Counter[str] = Counter()
        self.answers: queue.SimpleQueue[FromGrammars] = queue.SimpleQueue()
        self.client = GrammarClient(lambda: Vocabulary(TOKENS, SPECIALS, EOS), self._on_answer)

    def _on_answer(self, answer: FromGrammars) -> None:
        if isinstance(answer, TimeUsed):
            self.used_s[answer.tenant] += answer.seconds
        else:
            self.answers.put(answer)

    def answer(self) -> FromGrammars:
        return self.answers.get(timeout=DEADLINE_S)

    def masks(self, count: int) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        while len(found) < count:
            answer = self.answer()
            assert isinstance(answer, NewMasks), answer
            found |= {mask.number: allowed(mask.bits) for mask in answer.masks}
        return found

    def process(self) -> psutil.Process:
        [process] = self._started.left("fastserve_backend.grammars")
        return process


@pytest.fixture
def asker() -> Iterator[Asker]:
    with noting_processes() as started:
        asker = Asker(started)
        yield asker
        asker.client.close()
    assert asker.answers.empty()


class TestProcess:
    def test_jobs_side_by_side(self, asker: Asker) -> None:
        wanted = StructuredOutput(choice=["ab", "ac"])
        for number in range(3):
            asker.client.begin_job(number, wanted)
        assert asker.masks(3) == {number: {4 + ord("a")} for number in range(3)}
        asker.client.accept_tokens([(0, 4 + ord("a")), (2, 4 + ord("a"))])
        asker.client.end_job(1)
        b_or_c = {4 + ord("b"), 4 + ord("c")}
        assert asker.masks(2) == {0: b_or_c, 2: b_or_c}
        asker.client.accept_tokens([(0, 4 + ord("x"))])  # no mask allows this token
        failed = asker.answer()
        assert isinstance(failed, JobFailed)
        assert failed.number == 0
        asker.client.end_job(0)
        asker.client.accept_tokens([(2, 4 + ord("c"))])
        assert asker.masks(1) == {2: set(EOS)}

    def test_a_job_that_begins_with_output_does_not_hold_up_others(self, asker: Asker) -> None:
        wanted = StructuredOutput(regex="a*b")
        asker.client.begin_job(0, wanted)
        asker.masks(1)  # the grammar is known from now on
        a, b, x = (4 + ord(letter) for letter in "abx")
        asker.client.begin_job(1, wanted, array("i", [a] * 50_000))
        asker.client.begin_job(2, wanted, array("i", [a, x]))
        refused = asker.answer()
        assert isinstance(refused, GrammarRefused)
        assert refused.number == 2
        assert "does not allow token 2 of the output so far" in refused.reason
        assert asker.masks(1) == {1: {a, b}}
        asker.client.accept_tokens([(1, b)])
        assert asker.masks(1) == {1: set(EOS)}

    def test_special_tokens_follow_a_grammar_where_they_have_text(self, asker: Asker) -> None:
        wanted = StructuredOutput(grammar='start: "[CALL]" "a" | "x"')
        asker.client.begin_job(0, wanted)
        asker.client.begin_job(1, wanted, spells_specials=True)
        spelled = {4 + ord("["), 4 + ord("x")}
        assert asker.masks(2) == {0: spelled, 1: spelled | {0}}
        asker.client.accept_tokens([(1, 0)])
        assert asker.masks(1) == {1: {4 + ord("a")}}

    @pytest.mark.parametrize("name", HOSTILE)
    def test_a_grammar_that_takes_too_much_is_refused_and_others_go_on(
        self, asker: Asker, name: str
    ) -> None:
        wanted = StructuredOutput(choice=["a" * 40])
        asker.client.begin_job(0, wanted)
        asker.masks(1)
        process = asker.process()
        asker.client.begin_job(1, StructuredOutput(**HOSTILE[name]))
        asker.client.begin_job(2, StructuredOutput(regex="b"))
        answers: list[FromGrammars] = []
        for _ in range(12):
            asker.client.accept_tokens([(0, 4 + ord("a"))])
            answers.append(asker.answer())
        while len(answers) < 12 + 2:  # one to each of the others
            answers.append(asker.answer())
        [refused] = [one for one in answers if isinstance(one, GrammarRefused)]
        assert refused.number == 1
        assert "too complex" in refused.reason
        assert asker.process() == process

    def test_a_tenants_flood_of_grammars_is_no_queue_for_others(self, asker: Asker) -> None:
        schema = HOSTILE["time"]["json_schema"]
        for number in range(5):
            wanted = StructuredOutput(json_schema={"title": str(number), **schema})
            asker.client.begin_job(number, wanted, tenant="flood")
        asker.client.begin_job(5, StructuredOutput(choice=["yes"]), tenant="other")
        answers = [asker.answer() for _ in range(6)]
        [place] = [n for n, answer in enumerate(answers) if isinstance(answer, NewMasks)]
        assert place < 4

    def test_tenants_are_charged_for_their_checks_compilations_and_masks(
        self, asker: Asker
    ) -> None:
        ambiguous = StructuredOutput(grammar='start: (x{1,100}){1,100}\nx: "a" | "b"')
        for number, (tenant, wanted) in enumerate(
            {
                "refused": StructuredOutput(**HOSTILE["time"]),
                "slow": StructuredOutput(json_schema=SLOW),
                "masks": ambiguous,
                "quick": StructuredOutput(choice=["a"]),
            }.items()
        ):
            asker.client.begin_job(number, wanted, tenant=tenant)
        answers = [asker.answer() for _ in range(4)]
        assert sum(isinstance(answer, NewMasks) for answer in answers) == 3
        checked_s = asker.used_s["masks"]
        for _ in range(30):
            asker.client.accept_tokens([(2, 4 + ord("a"))])
            asker.masks(1)
        core_s = {tenant: seconds * num_cores() for tenant, seconds in asker.used_s.items()}
        assert core_s["refused"] > 0.9  # until its limit
        assert core_s["slow"] > 10 * core_s["quick"] > 0
        assert asker.used_s["masks"] > checked_s

    def test_others_go_on_while_a_slow_grammar_is_compiled(self, asker: Asker) -> None:
        """New grammars are checked afterwards."""
        asker.client.begin_job(0, StructuredOutput(regex="a*"))
        asker.masks(1)
        for number in (1, 2):
            wanted = StructuredOutput(json_schema={"title": str(number), **SLOW})
            asker.client.begin_job(number, wanted, tenant="slow")
        waiting = {1, 2}
        for number in range(3, 9):
            asker.client.begin_job(number, StructuredOutput(choice=[str(number)]), tenant="new")
            waiting.add(number)
            for _ in range(50):
                asker.client.accept_tokens([(0, 4 + ord("a"))])
                while 0 not in (found := asker.masks(1)):
                    waiting -= found.keys()
                waiting -= found.keys()
        while waiting:
            waiting -= asker.masks(1).keys()

    def test_a_tenant_takes_no_place_that_others_need(
        self, asker: Asker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        program = tmp_path / "program"  # it never answers
        program.write_text("#!/bin/sh\nexec cat > /dev/null\n")
        program.chmod(0o700)
        monkeypatch.setattr(helper_process, "python_executable", lambda: str(program))
        numbers = itertools.count()

        def begin(tenant: str, text: str) -> int:
            number = next(numbers)
            asker.client.begin_job(number, StructuredOutput(choice=[text]), tenant=tenant)
            return number

        num_flood = MAX_WAITING * 4 // 5
        flood = [begin("flood", str(n)) for n in range(num_flood + 1)]
        message = f"tenant 'flood' has {num_flood + 1} of the {MAX_WAITING} grammars that may wait"
        for _ in range(2):
            with pytest.raises(TenantLimitError, match=message):
                begin("flood", "one more")
        begin("flood", "0")  # it waits already
        others = [begin("other", str(n)) for n in range(10)]
        asker.client.end_job(flood[1])
        for number in others:
            asker.client.end_job(number)
        begin("flood", "one more")

    def test_what_is_no_grammar_is_refused_with_a_reason(self, asker: Asker) -> None:
        for number, (wanted, reason) in enumerate(
            [
                (StructuredOutput(regex="(a"), "unclosed group"),
                (StructuredOutput(regex="(?=a)b"), "look-around"),
                (StructuredOutput(regex=r"[^\s\S]"), "nothing matches it"),
                (StructuredOutput(json_schema={"type": "strin"}), "Invalid type"),
                (StructuredOutput(json_schema={"contains": {}}), "contains"),
                (StructuredOutput(json_schema={"propertyNames": {"pattern": "("}}), ""),
                (StructuredOutput(grammar="start: other"), "unknown name"),
                (StructuredOutput(grammar="start: <|nothing|>"), ""),
            ]
        ):
            for _ in range(2):  # at once the second time
                asker.client.begin_job(number, wanted)
                refused = asker.answer()
                assert isinstance(refused, GrammarRefused), wanted
                assert refused.number == number
                assert reason in refused.reason
                assert "\n" not in refused.reason
                asker.client.end_job(number)

    def test_jobs_go_on_in_a_fresh_process_where_they_were(self, asker: Asker) -> None:
        for number in range(4):
            asker.client.begin_job(number, StructuredOutput(choice=[f"x{number}y", "z"]))
        asker.masks(4)
        asker.client.accept_tokens([(number, 4 + ord("x")) for number in range(4)])
        assert asker.masks(4) == {number: {4 + ord(str(number))} for number in range(4)}
        asker.process().kill()
        again = asker.masks(4)  # the new process is told what the old one knew
        assert again == {number: {4 + ord(str(number))} for number in range(4)}
        asker.client.accept_tokens([(2, 4 + ord("2"))])
        assert asker.masks(1) == {2: {4 + ord("y")}}

    def test_what_it_dies_at_twice_fails_and_at_last_all_that_comes(
        self, asker: Asker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        # Replaces the process, and dies when the first job comes.
        num_bytes = 4 + len(msgspec.msgpack.encode(Vocabulary(TOKENS, SPECIALS, EOS))) + 1
        program = tmp_path / "program"
        program.write_text(f"#!/bin/sh\nexec head -c {num_bytes} > /dev/null\n")
        program.chmod(0o700)
        monkeypatch.setattr(helper_process, "python_executable", lambda: str(program))
        for number, reason in enumerate(["died at it", "died at it", "3 restarts", "3 restarts"]):
            asker.client.begin_job(number, StructuredOutput(regex="a*"))
            failed = asker.answer()
            assert isinstance(failed, JobFailed)
            assert failed.number == number
            assert reason in failed.reason
            asker.client.end_job(number)

    def test_a_job_of_which_a_token_takes_too_much_fails_alone(self, asker: Asker) -> None:
        asker.client.begin_job(
            0, StructuredOutput(grammar='start: (x{1,1000}){1,1000}\nx: "a" | "b"')
        )
        asker.client.begin_job(1, StructuredOutput(regex="a{500}"))
        asker.masks(2)
        failed: JobFailed | None = None
        while failed is None:
            asker.client.accept_tokens([(0, 4 + ord("a")), (1, 4 + ord("a"))])
            waiting = {0, 1}
            while waiting:
                answer = asker.answer()
                if isinstance(answer, NewMasks):
                    waiting -= {mask.number for mask in answer.masks}
                else:
                    assert isinstance(answer, JobFailed)
                    failed = answer
                    waiting.remove(answer.number)
        assert failed.number == 0
        asker.client.accept_tokens([(1, 4 + ord("a"))])
        assert asker.masks(1) == {1: {4 + ord("a")}}
