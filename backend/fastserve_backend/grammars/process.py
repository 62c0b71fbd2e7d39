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
from fastserve_backend.grammars.compilation import Compilation, Compiled, compile_now
from fastserve_backend.grammars.compiler import Compiler, GrammarError, accept
from fastserve_backend.grammars.messages import (
    AcceptTokens,
    BeginJob,
    EndJob,
    GrammarRefused,
    JobFailed,
    Mask,
    NewMasks,
    TimeUsed,
    ToGrammars,
    Vocabulary,
)
from fastserve_backend.system.cores import num_cores
from fastserve_backend.system.packets import Packets
from fastserve_backend.tenant_queue import TenantQueue

# Compiled grammars that are kept: clients mostly send the same few again and again.
_MAX_KNOWN = 64
# Grammars that are checked at the same time: two of one tenant, so that quick ones pass a slow one.
_MAX_CHECKS = 3
# A grammar whose check has used no more processor time than this is compiled at once. Others get a
# thread, and no check can start until it has ended.
_QUICK_S = 0.02
# The engine is told of a job's processor time when there is so much of it, not at each mask.
_WORTH_TELLING_S = 0.001
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

# Events of a pipe that ``poll`` waits for. None but POLLHUP, which needs no naming: a fork writes
# its verdict and then takes a while to end, in which nobody should wait for it.
_ENDED = 0


class _Grammar(NamedTuple):
    kind: str
    text: str
    spells_specials: bool


@dataclass(slots=True)
class _Job:
    number: int
    tenant: str
    compiler: Compiler
    matcher: LLMatcher
    output_ids: array[int]
    """The output with which it begins."""
    num_tokens: int = 0
    resume_s: float = 0.0
    """Processor time for those of ``output_ids`` that are accepted."""
    untold_s: float = 0.0
    """Processor time that the engine does not know of."""

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


class _Passed(NamedTuple):
    """A grammar that has passed its check, and is not compiled yet."""

    tenant: str
    grammar: _Grammar
    check_s: float
    """Processor time of the check."""


class GrammarLoop:
    """Serves one engine. The process forks only while it has a single thread.

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
        self._waiting: dict[_Grammar, list[BeginJob]] = {}
        """Jobs that wait for a grammar to be checked and compiled."""
        self._unchecked: TenantQueue[_Grammar] = TenantQueue(_MAX_CHECKS)
        self._checks: dict[int, _StartedCheck] = {}
        self._passed: deque[_Passed] = deque()
        """Slow grammars. The first one is being compiled if there is a ``_compilation``."""
        self._compilation: Compilation | None = None
        self._num_cores = num_cores()

    def run(self) -> None:
        """Raises OSError: the engine is gone."""
        while True:
            poller = select.poll()
            poller.register(self._engine, self._engine.events)
            for fileno in self._checks:
                poller.register(fileno, _ENDED)
            if self._compilation is not None:
                poller.register(self._compilation, _ENDED)
            timeout_ms = 0 if self._resuming else _CHECK_DEADLINES_MS if self._checks else None
            ready = {fileno for fileno, _ in poller.poll(timeout_ms)}
            if self._engine.fileno() in ready:
                self._engine.flush()
                for message in self._engine.receive():
                    self._take(message)
            # What starts meanwhile may get the number of a descriptor that was ready.
            ended = ready & self._checks.keys()
            compilation = self._compilation
            if compilation is not None and compilation.fileno() in ready:
                self._end_compilation(compilation)
            for fileno in ended:
                self._end_check(fileno)
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
            for grammar, jobs in self._waiting.items():
                self._waiting[grammar] = [one for one in jobs if one.number != message.number]
        else:
            assert isinstance(message, Vocabulary)
            self._vocabulary = message

    # --- Jobs that begin ----------------------------------------------------------------------

    def _begin(self, begin: BeginJob) -> None:
        grammar = _Grammar(begin.kind, begin.text, begin.spells_specials)
        if grammar in self._known:
            self._known.move_to_end(grammar)
            self._start(begin, grammar)
        elif grammar in self._waiting:
            self._waiting[grammar].append(begin)
        else:
            self._waiting[grammar] = [begin]
            self._unchecked.add(begin.tenant, grammar)
            self._start_checks()

    def _start_checks(self) -> None:
        if self._compilation is not None:
            return
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
        passed = _Passed(tenant, grammar, used_s)
        if reason is not None:
            self._on_compiled(passed, Compiled(reason, 0.0))
        elif used_s <= _QUICK_S:
            compiler = self._compiler(spells_specials=grammar.spells_specials)
            self._on_compiled(passed, compile_now(compiler, grammar.kind, grammar.text))
        else:
            self._passed.append(passed)
        self._go_on()

    def _end_compilation(self, compilation: Compilation) -> None:
        self._compilation = None
        self._on_compiled(self._passed.popleft(), compilation.wait())
        self._go_on()

    def _on_compiled(self, passed: _Passed, compiled: Compiled) -> None:
        """A grammar is known from now on, and its jobs start."""
        tenant, grammar, check_s = passed
        self._unchecked.on_end(tenant, check_s + compiled.used_s)
        self._tell(tenant, check_s + compiled.used_s)
        self._known[grammar] = compiled.known
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        for begin in self._waiting.pop(grammar):
            self._start(begin, grammar)

    def _go_on(self) -> None:
        """Start checks before the next compilation, during which none can start."""
        self._start_checks()
        if self._passed and self._compilation is None:
            grammar = self._passed[0].grammar
            compiler = self._compiler(spells_specials=grammar.spells_specials)
            self._compilation = Compilation(compiler, grammar.kind, grammar.text)

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

    def _start(self, begin: BeginJob, grammar: _Grammar) -> None:
        """Start a job whose grammar is known."""
        known = self._known[grammar]
        if isinstance(known, str):
            self._engine.send(GrammarRefused(begin.number, known))
            return
        compiler = self._compiler(spells_specials=grammar.spells_specials)
        output_ids = array("i", begin.output_ids)
        self._resume(_Job(begin.number, begin.tenant, compiler, known.deep_copy(), output_ids))

    def _resume(self, job: _Job) -> None:
        started_s = time.thread_time()
        self._take_slice(job)
        self._charge(job, time.thread_time() - started_s)

    def _take_slice(self, job: _Job) -> None:
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
            started_s = time.thread_time()
            try:
                mask = job.mask_after(token_id)
            except GrammarError as error:
                del self._jobs[number]
                self._engine.send(JobFailed(number, str(error)))
                continue
            finally:
                self._charge(job, time.thread_time() - started_s)
            now = time.monotonic()
            if masks and now - oldest_s > _MASKS_TOGETHER_S:
                self._engine.send(NewMasks(masks))
                masks = []
            if not masks:
                oldest_s = now
            masks.append(mask)
        if masks:
            self._engine.send(NewMasks(masks))

    def _charge(self, job: _Job, used_s: float) -> None:
        """The job has used processor time, which the engine learns."""
        job.untold_s += used_s
        if job.untold_s >= _WORTH_TELLING_S:
            self._tell(job.tenant, job.untold_s)
            job.untold_s = 0.0

    def _tell(self, tenant: str, core_s: float) -> None:
        self._engine.send(TimeUsed(tenant, core_s / self._num_cores))
