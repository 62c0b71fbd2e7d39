"""``python -m fastserve_backend.checkpoints.template_renderer``: renders chat templates for the
process at the other end of standard input, within the limits of `template_process`."""

from __future__ import annotations

import contextlib
import json
import resource
import select
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fastserve_backend.checkpoints.template_process import (
    CPU_SECONDS,
    MAX_CHARS,
    MEMORY_BYTES,
    Answer,
    Refused,
    Render,
    Rendered,
    TooMuch,
    render_decoder,
)
from fastserve_backend.system.helper_process import connect_to_engine

# A model has one template, or two. More are only kept for a while.
_MAX_COMPILED = 4
_MAX_REASON_CHARS = 1000


class TemplateRenderer:
    """Compiles and renders templates. They run in a sandbox and can access nothing outside."""

    def __init__(self) -> None:
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        self._environment.filters["tojson"] = _to_json
        self._environment.globals["raise_exception"] = _refuse
        self._environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self._compiled: dict[str, jinja2.Template] = {}

    def answer(self, message: Render) -> Answer:
        try:
            template = self._template(message.source)
            if message.variables is None:
                return Rendered(b"")
            return _rendered(template, json.loads(message.variables))
        except jinja2.TemplateError as error:
            return Refused(_shortened(str(error)))
        except MemoryError:
            return TooMuch(f"{MEMORY_BYTES >> 20} MiB of memory")
        except Exception as error:  # a template is a program and can raise anything
            return Refused(_shortened(f"{type(error).__name__}: {error}"))

    def _template(self, source: str) -> jinja2.Template:
        template = self._compiled.get(source)
        if template is None:
            if len(self._compiled) == _MAX_COMPILED:
                self._compiled.clear()
            template = self._compiled[source] = self._environment.from_string(source)
        return template


def _rendered(template: jinja2.Template, variables: dict[str, Any]) -> Answer:
    pieces, num_chars = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > MAX_CHARS:
            return TooMuch(f"{MAX_CHARS} characters")
    return Rendered("".join(pieces).encode("utf-8", "surrogatepass"))


def _shortened(reason: str) -> str:
    """Without lone surrogates, which no message can hold."""
    return reason[:_MAX_REASON_CHARS].encode("utf-8", "replace").decode()


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the model's own words for training. Its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, but a prompt is not HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        own_bytes = int(file.read().split()[5]) * resource.getpagesize()
    for limit, value in (
        (resource.RLIMIT_DATA, own_bytes + MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        with contextlib.suppress(ValueError):  # the hard limit is lower
            resource.setrlimit(limit, (value, hard))
    # Where memory runs out, the kernel kills this process first: another can take its place.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def main() -> int:
    asking = connect_to_engine(render_decoder)
    _limit_memory()
    # The timer's signal ends the process whatever it does, also within one call of a C function.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    renderer = TemplateRenderer()
    with contextlib.suppress(OSError):  # the other process is gone
        while True:
            poller = select.poll()
            poller.register(asking, asking.events)
            poller.poll()
            asking.flush()
            for message in asking.receive():
                signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
                answer = renderer.answer(message)
                signal.setitimer(signal.ITIMER_PROF, 0)
                asking.send(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
