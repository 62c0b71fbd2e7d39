"""The ``fastserve`` command.

Heavy modules are imported by the command that needs them, so that ``fastserve generate`` works
where only the client is installed, and ``--help`` is quick.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from rich.console import Console

from fastserve_backend.config import EMBEDDED_MODEL, EngineConfig
from fastserve_backend.errors import FastServeError

if TYPE_CHECKING:
    from fastserve_backend.serving.endpoints import Endpoints

app = typer.Typer(
    name="fastserve",
    help="Preemptive LLM serving on NVIDIA Triton Inference Server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # locals hold prompts
)


def main() -> None:
    """Entry point: a user's mistake is one line on stderr and exit code 1."""
    try:
        app()
    except FastServeError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(1)


def _serve(
    model: str | None,
    config: Path | None,
    host: str,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    **keys: Any,
) -> None:
    """Serve MODEL through a real tritonserver until SIGTERM or Ctrl-C.

    MODEL is a Hugging Face id, a local directory in Hugging Face format, or a built-in name with
    --load-format dummy. Without MODEL and --config, the embedded default runs: OPT-125M with random
    weights, nothing to download.
    """
    from fastserve_backend.serving.launch import serve

    given = {key: value for key, value in keys.items() if value is not None}
    if model is not None:
        given["model"] = model
    elif config is None:
        given = {"model": EMBEDDED_MODEL, "load_format": "dummy"} | given
    base = EngineConfig() if config is None else EngineConfig.from_yaml(config)
    code = serve(
        base.with_keys(**given),
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        on_ready=lambda server: _print_endpoints(server.endpoints),
    )
    raise typer.Exit(code)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    url: Annotated[str, typer.Option(help="The server's gRPC endpoint.")] = "grpc://127.0.0.1:8001",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling, in (0, 1].")] = None,
    top_k: Annotated[int | None, typer.Option(help="Only the k most likely tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop word; can be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after an end token.")] = False,
    timeout: Annotated[float | None, typer.Option(help="Give up after so many seconds.")] = None,
) -> None:
    """Stream one completion to the terminal; TTFT and tokens per second go to stderr."""
    from fastserve_client.terminal import generate_to_terminal

    code = generate_to_terminal(
        prompt,
        url=url,
        timeout_s=timeout,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or None,
        ignore_eos=ignore_eos or None,
    )
    raise typer.Exit(int(code))


def _print_endpoints(endpoints: Endpoints) -> None:
    console = Console(stderr=True, highlight=False)
    console.print("[bold green]ready[/]")
    console.print(f'  gRPC     grpc://{endpoints.grpc_url}   (fastserve generate "Hello")')
    console.print(f"  HTTP     {endpoints.http_url}/v2/models/fastserve/generate_stream")
    console.print(f"  metrics  {endpoints.metrics_url}")


def _add_serve_command() -> None:
    """``serve`` has a flag for each configuration key; help and choices come from the fields."""
    parameters: dict[str, tuple[Any, Any]] = {
        "model": (Annotated[str | None, typer.Argument(show_default=EMBEDDED_MODEL)], None),
        "config": (
            Annotated[Path | None, typer.Option(help="An engine.yaml; flags override it.")],
            None,
        ),
        "host": (Annotated[str, typer.Option(help="Address to listen on.")], "127.0.0.1"),
        "http_port": (Annotated[int, typer.Option(help="Triton HTTP.")], 8000),
        "grpc_port": (Annotated[int, typer.Option(help="Triton gRPC.")], 8001),
        "metrics_port": (Annotated[int, typer.Option(help="Prometheus metrics.")], 8002),
    }
    for section, section_field in EngineConfig.model_fields.items():
        fields: Mapping[str, FieldInfo] = section_field.annotation.model_fields  # type: ignore[union-attr]
        for key, field in fields.items():
            if key == "model":  # the positional argument
                continue
            default = field.get_default()
            option = typer.Option(
                help=f"{field.description}{'' if default is None else f' Default: {default}.'}",
                metavar=_choices(field.annotation),
                rich_help_panel=f"engine.yaml: {section}",
                show_default=False,
            )
            parameters[key] = (Annotated[_flag_type(field.annotation) | None, option], None)
    command: Any = _serve
    command.__signature__ = inspect.Signature(
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
            for name, (annotation, default) in parameters.items()
        ]
    )
    command.__annotations__ = {name: annotation for name, (annotation, _) in parameters.items()}
    app.command("serve")(command)


def _flag_type(annotation: Any) -> Any:
    """The type that the command line parses; ``auto`` beside a number is parsed as text."""
    kinds = _members(annotation)
    for kind in (str, float, int):
        if all(isinstance(member, kind) or member is kind for member in kinds):
            return kind
    return str


def _choices(annotation: Any) -> str | None:
    literals = [str(member) for member in _members(annotation) if not isinstance(member, type)]
    types = [member.__name__ for member in _members(annotation) if isinstance(member, type)]
    return "|".join(types + literals) if literals else None


def _members(annotation: Any) -> list[Any]:
    """Types and literal values of a union, without None."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_args(annotation):
        members = [_members(part) for part in get_args(annotation) if part is not type(None)]
        return [member for part in members for member in part]
    return [annotation]


_add_serve_command()

if __name__ == "__main__":
    main()
