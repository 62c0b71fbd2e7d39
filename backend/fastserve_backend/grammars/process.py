"""The loop of the grammars' process: a matcher for each job, and masks for its tokens."""

from __future__ import annotations

import select
import time
from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

from llguidance import LLMatcher

from fastserve_backend.grammars.check import Check
from fastserve_backend.grammars.compiler import Compiler, GrammarError, accept
from fastserve_backend.grammars.messages import (
    AcceptTokens,
    BeginJob,
    EndJob,
    GrammarRefused,
    JobFailed,
    Mask,
    NewMasks,
    ToGrammars,
    Vocabulary,
)
from fastserve_backend.system.packets import Packets
from fastserve_backend.tenant_queue import TenantQueue

# Compiled grammars that are kept: clients mostly send the same few again and again.
_MAX_KNOWN = 64
# Grammars that are checked at the same time: two of one tenant, so that quick ones pass a slow one.
_MAX_CHECKS = 3
# Processor time for one mask; other jobs wait meanwhile, and at each token again. Schemas with
# hundreds of properties take a tenth of it. Very ambiguous grammars would take ten times as much
# before they exceed other limits.
_MOST_MASK_S = 0.05
# A job may begin with output, which takes microseconds a token. Other jobs wait for a slice of it
# at most, and the whole may take so much processor time.
_RESUME_SLICE_S = 0.002
_MOST_RESUME_S = 10.0
# How often the process looks whether a check is overdue.
_CHECK_DEADLINES_MS = 1000.0
# How long a mask that is ready waits for others, to be sent with them.
_MASKS_TOGETHER_S = 0.001


class _Grammar(NamedTuple):
    kind: str
    text: str
    spells_specials: bool


@dataclass(slots=True)
class _Job:
    number: int
    compiler: Compiler
    matcher: LLMatcher
    output_ids: array[int]
    """The output with which it begins."""
    num_tokens: int = 0
    resume_s: float = 0.0
    """Processor time for those of ``output_ids`` that are accepted."""

    def accept(self, token_id: int) -> None:
        """Raises GrammarError."""
        accept(self.matcher, token_id)
        self.num_tokens += 1

    def resume(self) -> bool:
        """Accept a slice of ``output_ids``; returns whether it is the last. Raises GrammarError."""
        started_s = time.thread_time()
        for token_id in self.output_ids[self.num_tokens :]:
            self.accept(token_id)
            slice_s = time.thread_time() - started_s
            if slice_s > _RESUME_SLICE_S:
                self.resume_s += slice_s
                break
        if self.resume_s > _MOST_RESUME_S:
            raise GrammarError("it takes too long to check; make the grammar less ambiguous")
        return self.num_tokens == len(self.output_ids)

    def mask(self) -> Mask:
        """Raises GrammarError."""
        return Mask(self.number, self.num_tokens, self.compiler.next_mask(self.matcher))

    def mask_after(self, token_id: int) -> Mask:
        """Raises GrammarError: also where computing the mask takes too long."""
        started_s = time.thread_time()
        self.accept(token_id)
        mask = self.mask()
        if time.thread_time() - started_s > _MOST_MASK_S:
            raise GrammarError(
                f"it takes more than {_MOST_MASK_S * 1e3:.0f} ms to find out what may follow a "
                "token; make it less ambiguous"
            )
        return mask


class _StartedCheck(NamedTuple):
    tenant: str
    grammar: _Grammar
    check: Check


class GrammarLoop:
    """Serves one engine. The process has a single thread, because it forks.

    Args:
        engine: the connection to the engine; the loop ends when the engine closes it.
    """

    def __init__(self, engine: Packets[ToGrammars]) -> None:
        self._engine = engine
        self._vocabulary: Vocabulary
        self._compilers: dict[bool, Compiler] = {}
        """By whether special tokens have text. They are made when a job needs them."""
        self._jobs: dict[int, _Job] = {}
        self._resuming: deque[_Job] = deque()
        """Jobs that have not accepted all output with which they begin."""
        self._known: OrderedDict[_Grammar, LLMatcher | str] = OrderedDict()
        """Grammars used last: the matcher to copy, or the reason why there is none."""
        self._waiting: dict[_Grammar, dict[int, bytes]] = {}
        """Jobs that wait for a grammar to be checked: numbers, and the tokens that they have."""
        self._unchecked: TenantQueue[_Grammar] = TenantQueue(_MAX_CHECKS)
        self._checks: dict[int, _StartedCheck] = {}

    def run(self) -> None:
        """Raises OSError: the engine is gone."""
        while True:
            poller = select.poll()
            poller.register(self._engine, self._engine.events)
            for fileno in self._checks:
                poller.register(fileno, select.POLLIN)
            timeout_ms = 0 if self._resuming else _CHECK_DEADLINES_MS if self._checks else None
            ready = {fileno for fileno, _ in poller.poll(timeout_ms)}
            if self._engine.fileno() in ready:
                self._engine.flush()
                for message in self._engine.receive():
                    self._take(message)
            ended = ready & self._checks.keys()
            if ended:  # one, because compiling it may keep the jobs that go on waiting
                self._end_check(min(ended, key=lambda fileno: self._checks[fileno].check.due_s))
            now = time.monotonic()
            for _, _, check in self._checks.values():
                if now > check.due_s:
                    check.kill()
            if self._resuming:
                self._resume(self._resuming.popleft())

    def _take(self, message: ToGrammars) -> None:
        if isinstance(message, AcceptTokens):
            self._accept(message)
        elif isinstance(message, BeginJob):
            self._begin(message)
        elif isinstance(message, EndJob):
            self._jobs.pop(message.number, None)
            self._resuming = deque(job for job in self._resuming if job.number != message.number)
            for jobs in self._waiting.values():
                jobs.pop(message.number, None)
        else:
            assert isinstance(message, Vocabulary)
            self._vocabulary = message

    # --- Jobs that begin ----------------------------------------------------------------------

    def _begin(self, begin: BeginJob) -> None:
        grammar = _Grammar(begin.kind, begin.text, begin.spells_specials)
        if grammar in self._known:
            self._known.move_to_end(grammar)
            self._start(begin.number, begin.output_ids, grammar)
        elif grammar in self._waiting:
            self._waiting[grammar][begin.number] = begin.output_ids
        else:
            self._waiting[grammar] = {begin.number: begin.output_ids}
            self._unchecked.add(begin.tenant, grammar)
            self._start_checks()

    def _start_checks(self) -> None:
        while (following := self._unchecked.start_next()) is not None:
            tenant, grammar = following
            if self._waiting[grammar]:
                compiler = self._compiler(spells_specials=grammar.spells_specials)
                check = Check(compiler, grammar.kind, grammar.text)
                self._checks[check.fileno()] = _StartedCheck(tenant, grammar, check)
            else:
                del self._waiting[grammar]  # its jobs were cancelled
                self._unchecked.on_end(tenant, 0.0)

    def _end_check(self, fileno: int) -> None:
        tenant, grammar, check = self._checks.pop(fileno)
        reason, used_s = check.wait()
        compiles_s = time.thread_time()
        try:
            compiler = self._compiler(spells_specials=grammar.spells_specials)
            known = compiler.compile(grammar.kind, grammar.text) if reason is None else reason
        except GrammarError as error:
            known = str(error)
        self._unchecked.on_end(tenant, used_s + time.thread_time() - compiles_s)
        self._known[grammar] = known
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        for number, output_ids in self._waiting.pop(grammar).items():
            self._start(number, output_ids, grammar)
        self._start_checks()

    def _compiler(self, *, spells_specials: bool) -> Compiler:
        compiler = self._compilers.get(spells_specials)
        if compiler is None:
            tokens = list(self._vocabulary.tokens)
            if spells_specials:
                for token_id, text in self._vocabulary.specials.items():
                    tokens[token_id] = text
            compiler = Compiler(tokens, self._vocabulary.eos_token_ids)
            self._compilers[spells_specials] = compiler
        return compiler

    def _start(self, number: int, output_ids: bytes, grammar: _Grammar) -> None:
        """Start a job whose grammar is known."""
        known = self._known[grammar]
        if isinstance(known, str):
            self._engine.send(GrammarRefused(number, known))
            return
        compiler = self._compiler(spells_specials=grammar.spells_specials)
        self._resume(_Job(number, compiler, known.deep_copy(), array("i", output_ids)))

    def _resume(self, job: _Job) -> None:
        try:
            if not job.resume():
                self._resuming.append(job)
                return
        except GrammarError as error:  # the client gave these tokens
            reason = f"it does not allow token {job.num_tokens + 1} of the output so far: {error}"
            self._engine.send(GrammarRefused(job.number, reason))
            return
        try:
            mask = job.mask()
        except GrammarError as error:
            self._engine.send(JobFailed(job.number, str(error)))
            return
        self._jobs[job.number] = job
        self._engine.send(NewMasks([mask]))

    # --- Jobs that go on ----------------------------------------------------------------------

    def _accept(self, message: AcceptTokens) -> None:
        masks: list[Mask] = []
        oldest_s = 0.0
        for number, token_id in message.tokens:
            job = self._jobs.get(number)
            if job is None:
                continue  # it has failed
            try:
                mask = job.mask_after(token_id)
            except GrammarError as error:
                del self._jobs[number]
                self._engine.send(JobFailed(number, str(error)))
                continue
            now = time.monotonic()
            if masks and now - oldest_s > _MASKS_TOGETHER_S:
                self._engine.send(NewMasks(masks))
                masks = []
            if not masks:
                oldest_s = now
            masks.append(mask)
        if masks:
            self._engine.send(NewMasks(masks))
