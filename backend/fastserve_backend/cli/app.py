"""The ``fastserve`` command.

Heavy modules are imported by the command that needs them, so that ``fastserve generate`` works
where only the client is installed, and ``--help`` is quick.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from fastserve_client.endpoint import DEFAULT_URL
from fastserve_client.errors import ClientError
from fastserve_client.listening import DEFAULT_KEEP_ALIVE_S
from fastserve_client.protocol import (
    DEFAULT_GRPC_PORT,
    DEFAULT_HOST,
    DEFAULT_HTTP_PORT,
    DEFAULT_METRICS_PORT,
    MODEL_NAME,
)
from typer.core import TyperGroup

from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL
from fastserve_backend.cli import workload_flags
from fastserve_backend.cli.bench import bench
from fastserve_backend.cli.config_flags import with_config_flags
from fastserve_backend.cli.workload_flags import listed, parse_rates
from fastserve_backend.config import EngineConfig
from fastserve_backend.errors import ConfigError, FastServeError
from fastserve_backend.profile.hardware import HARDWARE
from fastserve_backend.system.standard_streams import open_closed_streams

if TYPE_CHECKING:
    from fastserve_client.key_file import NamedKey

    from fastserve_backend.serving.endpoints import Endpoints
    from fastserve_backend.serving.launch import TritonServer

# Options of several commands.
_Url = Annotated[str, typer.Option(help="The server: grpc://, or http:// with its HTTP port.")]
_Model = Annotated[str, typer.Option(help="Name of the model at the server.")]
_Temperature = Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own.")]
_TopP = Annotated[float | None, typer.Option(help="Nucleus sampling, in (0, 1].")]
_TopK = Annotated[int | None, typer.Option(help="Only the k most likely tokens.")]
_MinP = Annotated[
    float | None,
    typer.Option(help="Only tokens with this share of the likeliest token's probability, 0 to 1."),
]
_Priority = Annotated[int | None, typer.Option(help="Lower runs first; default: 0.")]
_TtftSlo = Annotated[
    float | None, typer.Option(help="Wanted ms to the first token; default: the server's.")
]
_TpotSlo = Annotated[
    float | None, typer.Option(help="Wanted ms for each later token; default: the server's.")
]
_Tenant = Annotated[str | None, typer.Option(help="For whom it runs.")]
_Config = Annotated[Path | None, typer.Option(help="An engine.yaml; flags override it.")]

*_GPUS, _LAST_GPU = HARDWARE

# Extras that each command needs in addition to the command line's own packages.
_EXTRAS = {
    "generate": "'.[client]'",
    "chat": "'.[client]'",
    "gateway": "'.[gateway]'",
    "serve": "'.[server]'",
    "simulate": "'.[engine]'",
    "bench": "'.[bench]', with --serve '.[bench,server]'",
    "profile": "'.[engine]'",
}


class _Commands(TyperGroup):
    """If a command's packages are missing, the error says which extra to install."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if ctx.invoked_subcommand is None or (error.name or "").startswith("fastserve_"):
                raise
            raise FastServeError(
                f"{error}; fastserve {ctx.invoked_subcommand} needs: "
                f"pip install {_EXTRAS[ctx.invoked_subcommand]}"
            ) from None


app = typer.Typer(
    name="fastserve",
    cls=_Commands,
    help="Preemptive LLM serving on NVIDIA Triton Inference Server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # locals hold prompts
)


def main() -> None:
    """Entry point. A user's mistake gives one line on stderr and exit code 1."""
    open_closed_streams()
    try:
        app()
    except (FastServeError, ClientError) as error:
        from rich.markup import escape

        _print(f"[bold red]error:[/] {escape(str(error))}", markup=True)
        sys.exit(1)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    url: _Url = DEFAULT_URL,
    model: _Model = MODEL_NAME,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    top_k: _TopK = None,
    min_p: _MinP = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop word, also a special token; can be repeated.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after an end token.")] = False,
    priority: _Priority = None,
    ttft_slo_ms: _TtftSlo = None,
    tpot_slo_ms: _TpotSlo = None,
    tenant: _Tenant = None,
    timeout: Annotated[float | None, typer.Option(help="Give up after so many seconds.")] = None,
) -> None:
    """Stream one completion to the terminal; TTFT and tokens per second go to stderr."""
    from fastserve_client.terminal import generate_to_terminal

    code = generate_to_terminal(
        prompt,
        url=url,
        model=model,
        timeout_s=timeout,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop or None,
        ignore_eos=ignore_eos or None,
        priority=priority,
        ttft_slo_ms=ttft_slo_ms,
        tpot_slo_ms=tpot_slo_ms,
        tenant=tenant,
    )
    raise typer.Exit(int(code))


@app.command()
def chat(
    url: _Url = DEFAULT_URL,
    model: _Model = MODEL_NAME,
    system: Annotated[
        str | None, typer.Option(help="What the model is told before the first message.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    top_k: _TopK = None,
    min_p: _MinP = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    priority: _Priority = None,
    ttft_slo_ms: _TtftSlo = None,
    tpot_slo_ms: _TpotSlo = None,
    tenant: _Tenant = None,
    tools: Annotated[
        Literal["demo"] | None,
        typer.Option(help="demo: the model may call a calculator and a clock."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Give an answer up after so many seconds.")
    ] = None,
) -> None:
    """A conversation with the model, through its chat template; answers are streamed.

    Ctrl-C stops an answer, Ctrl-D ends the program. Messages can also come from a pipe, one a line.
    """
    from fastserve_chat.terminal_chat import chat_in_terminal

    code = chat_in_terminal(
        url=url,
        model=model,
        system=system,
        timeout_s=timeout,
        demo_tools=tools == "demo",
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        priority=priority,
        ttft_slo_ms=ttft_slo_ms,
        tpot_slo_ms=tpot_slo_ms,
        tenant=tenant,
    )
    raise typer.Exit(int(code))


@app.command()
def gateway(
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than loopback needs keys.")
    ] = DEFAULT_HOST,
    port: Annotated[int, typer.Option(help="0 is any free one.")] = 9000,
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="A server: grpc://, or http:// with its HTTP port; can be repeated.",
            show_default=DEFAULT_URL,
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a model at the servers and in requests; can be repeated.",
            show_default=MODEL_NAME,
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=MODEL: another name of a model in requests; * is any other name. Can be "
            "repeated.",
        ),
    ] = None,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            help="Keys, one a line: KEY, NAME:KEY, NAME:WEIGHT:KEY or NAME:WEIGHT:KEY:PRIORITY, "
            "where NAME is the tenant; requests must then have one of them."
        ),
    ] = None,
    operator_keys_file: Annotated[
        Path | None,
        typer.Option(
            help="Keys, one a line, that may read /metrics and /live of all tenants and ask for "
            "no tokens; if keys have names, no other key may."
        ),
    ] = None,
    most_urgent_priority: Annotated[
        int | None,
        typer.Option(
            help="Lowest priority that requests may ask for, if their key has no PRIORITY.",
            show_default="0 with keys, any without",
        ),
    ] = None,
    share_kv: Annotated[
        bool,
        typer.Option(
            "--share-kv",
            help="Compute equal beginnings of prompts once for all tenants; usage then tells each "
            "of them what others have sent.",
        ),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse unknown fields instead of ignoring them.")
    ] = False,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Largest body; one for n answers counts n times.")
    ] = 8 << 20,
    max_held_bytes: Annotated[
        int, typer.Option(min=1, help="Bodies of all unanswered requests, and their answers.")
    ] = 32 << 20,
    max_jobs: Annotated[
        int, typer.Option(min=1, help="Most answers to one request: prompts times n.")
    ] = 128,
    max_moves: Annotated[
        int,
        typer.Option(
            min=0,
            help="How often an answer may lose its server and go on at one that works; 0: it ends.",
        ),
    ] = 3,
    response_store_mib: Annotated[
        int,
        typer.Option(
            min=0, help="Memory for responses that others may continue, shared by tenants; 0: none."
        ),
    ] = 32,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of pages that may use the gateway from a browser, such as "
            "https://chat.example.com; * is any. Can be repeated.",
            show_default="none",
        ),
    ] = None,
    keep_alive_s: Annotated[
        int,
        typer.Option(
            min=1,
            max=86_400,
            help="Seconds until an idle connection ends; proxies must end theirs sooner.",
        ),
    ] = DEFAULT_KEEP_ALIVE_S,
    tool_format: Annotated[
        str, typer.Option(help="How the model writes calls of tools; auto: by its chat template.")
    ] = "auto",
    reasoning_format: Annotated[
        str, typer.Option(help="How the model marks its reasoning; auto: by its chat template.")
    ] = "auto",
) -> None:
    """OpenAI's HTTP API in front of a running server: completions, chat, responses, models. Also
    Anthropic's messages.

    Listens on http://HOST:PORT/v1 until SIGTERM or Ctrl-C; GET /health and /metrics are there too.
    """
    from fastserve_gateway.auth import ApiKeys
    from fastserve_gateway.command import run_gateway
    from fastserve_gateway.model_formats import FormatNames
    from fastserve_gateway.settings import GatewaySettings

    from fastserve_backend.system.logs import log_to_stderr

    log_to_stderr()
    settings = GatewaySettings(
        urls=url or [DEFAULT_URL],
        models=model or [MODEL_NAME],
        aliases=_aliases(alias or []),
        keys=ApiKeys(
            _named_keys("api-keys-file", api_keys_file),
            most_urgent_priority,
            _named_keys("operator-keys-file", operator_keys_file),
        ),
        strict=strict,
        max_body_bytes=max_body_bytes,
        max_held_bytes=max_held_bytes,
        max_jobs=max_jobs,
        max_moves=max_moves,
        max_stored_bytes=response_store_mib << 20,
        formats=FormatNames(tool_format, reasoning_format),
        cors_origins=cors_origin or (),
        share_kv=share_kv,
    )
    run_gateway(settings, host, port, _print_gateway, keep_alive_s)


@app.command()
def launch(
    agent: Annotated[Literal["claude", "codex", "opencode"], typer.Argument()],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS...", help="For the agent.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="The gateway, which must run.",
            show_default="http://127.0.0.1:9000, or one of its own",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Name of the model at the gateway.",
            show_default=f"{MODEL_NAME}, or the first of its own",
        ),
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(
            help="Start a server with these arguments of fastserve serve, and a gateway, on free "
            "ports; both end with the agent. Quote several.",
            show_default="if no gateway runs, the embedded model",
        ),
    ] = None,
) -> None:
    """Start a coding agent against a gateway. The agent's own configuration stays as it is.

    Without --url, a server and a gateway are started if no gateway runs. If a running gateway has
    keys, FASTSERVE_API_KEY must be one of them.
    """
    from fastserve_backend.cli.launch import launch_agent

    raise typer.Exit(launch_agent(agent, arguments or [], url=url, model=model, serve=serve))


def _aliases(given: list[str]) -> dict[str, str]:
    """Raises ConfigError: an alias names no model, or comes twice."""
    aliases: dict[str, str] = {}
    for one in given:
        name, separator, model = one.partition("=")
        if not separator or name in aliases:
            raise ConfigError(f"alias: got {one!r}; must be NAME=MODEL, each NAME once")
        aliases[name] = model
    return aliases


def _named_keys(flag: str, path: Path | None) -> list[NamedKey]:
    """Raises ConfigError: the file cannot be used."""
    from fastserve_client.key_file import KeyFileError, read_key_file

    try:
        return [] if path is None else read_key_file(path)
    except KeyFileError as error:
        raise ConfigError(f"{flag}: {error}") from None


def _print_gateway(url: str) -> None:
    _print(f"[bold green]listening[/] on {url}/v1", markup=True)


@app.command()
@with_config_flags()
def serve(
    model: Annotated[list[str] | None, typer.Argument(show_default=EMBEDDED_MODEL)] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            help="An engine.yaml; flags override it. Once for all models, or once for each."
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of the model at Triton; once for each model.",
            show_default=f"{MODEL_NAME}, or short names of several models",
        ),
    ] = None,
    model_repository: Annotated[
        Path | None,
        typer.Option(help="Directory of Triton models to serve beside, such as ensembles."),
    ] = None,
    model_control: Annotated[
        bool,
        typer.Option(
            "--model-control",
            help="Let clients that have the server's key load and unload models.",
        ),
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = DEFAULT_HOST,
    allow_old_triton: Annotated[
        bool,
        typer.Option(
            "--allow-old-triton",
            help="Listen beyond loopback although clients can crash a tritonserver before 25.07.",
        ),
    ] = False,
    http_port: Annotated[int, typer.Option(help="Triton HTTP.")] = DEFAULT_HTTP_PORT,
    grpc_port: Annotated[int, typer.Option(help="Triton gRPC.")] = DEFAULT_GRPC_PORT,
    metrics_port: Annotated[int, typer.Option(help="Prometheus metrics.")] = DEFAULT_METRICS_PORT,
    **keys: Any,
) -> None:
    """Serve MODEL, or several, through a real tritonserver until SIGTERM or Ctrl-C.

    MODEL is a Hugging Face id (owner/name, or owner/name@revision), a local directory in Hugging
    Face format, a GGUF file, or a built-in name with --load-format dummy. Without MODEL and
    --config, the embedded default runs: SmolLM2-135M-Instruct, which needs no download. Several
    models share the machine evenly, unless their configurations say otherwise.
    """
    from fastserve_backend.serving import launch
    from fastserve_backend.serving.served_models import name_models
    from fastserve_backend.system.logs import warn_on_stderr

    warn_on_stderr()
    models = name_models(_engine_configs(model or [], config or [], keys), name or [])
    server = launch.TritonServer(
        models,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        model_repository=model_repository,
        model_control=model_control,
        allow_old_triton=allow_old_triton,
    )

    def on_ready() -> None:
        _print_endpoints(server.endpoints, list(models))
        if model_control:
            _print_control(server)

    raise typer.Exit(launch.serve(server, on_ready))


def _print_endpoints(endpoints: Endpoints, models: list[str]) -> None:
    url = f"grpc://{endpoints.grpc_url}"
    there = "" if url == DEFAULT_URL else f" --url {url}"
    if models != [MODEL_NAME]:
        there += f" --model {models[0]}"
    _print("[bold green]ready[/]", markup=True)
    _print(f'  gRPC     {url}   (fastserve generate "Hello"{there})')
    for name in models:
        _print(f"  HTTP     {endpoints.http_url}/v2/models/{name}/generate_stream")
    _print(f"  metrics  {endpoints.metrics_url}")


def _print_control(server: TritonServer) -> None:
    from fastserve_backend.serving.process import ADMIN_HEADER

    key_file = server.runtime.admin_key_file
    _print(f"  models   {server.runtime.repository}")
    _print(
        f'  load     curl -X POST -H "{ADMIN_HEADER}: $(cat {key_file})" '
        f"{server.endpoints.http_url}/v2/repository/models/NAME/load"
    )


def _print(text: str, *, markup: bool = False) -> None:
    """A line on stderr, which is lost if its disk is full or its reader is gone: a server must
    start all the same. Addresses have no markup, but those of IPv6 look like it."""
    from rich.console import Console  # a server starts without it

    shown = io.StringIO()
    is_terminal = sys.stderr.isatty()
    console = Console(file=shown, force_terminal=is_terminal, highlight=False, soft_wrap=True)
    console.print(text, markup=markup)
    data = shown.getvalue().encode(sys.stderr.encoding, "replace")
    # Not through sys.stderr: what it cannot write would fail again at the end of the process.
    with suppress(OSError):
        while data:
            data = data[os.write(sys.stderr.fileno(), data) :]


# Without the keys that a simulation ignores, and without the policy, since it has several.
@app.command()
@with_config_flags(
    without=(
        "policy", "tokenizer", "device", "generation_config",
        "prefix_caching", "max_queued_requests", "log_requests", "stream_interval",
        "length_prediction", "length_prediction_dir", "length_prediction_capacity",
        "ttft_slo_ms", "tpot_slo_ms", "most_urgent_priority", "least_urgent_priority",
        "nnodes", "node_rank", "master_addr", "master_port",
    )
)  # fmt: skip
def simulate(
    model: Annotated[str, typer.Argument(help="As of serve.")],
    config: _Config = None,
    policies: Annotated[
        str, typer.Option(help="To compare, separated by commas.")
    ] = "fcfs,skip_join_mlfq,gittins",
    rates: workload_flags.Rates = None,
    dataset: workload_flags.Dataset = "sharegpt",
    job_class: workload_flags.JobClasses = None,
    arrivals: workload_flags.ArrivalsFlag = None,
    num_jobs: workload_flags.NumJobs = 1000,
    seed: workload_flags.Seed = 0,
    max_prompt_tokens: workload_flags.MaxPromptTokens = 1024,
    max_total_tokens: workload_flags.MaxTotalTokens = 2048,
    max_output_tokens: workload_flags.MaxOutputTokens = None,
    scale: workload_flags.Scale = 1.0,
    length_ratio: workload_flags.LengthRatio = None,
    hardware: Annotated[str, typer.Option(help=f"{', '.join(_GPUS)} or {_LAST_GPU}.")] = "a100-80g",
    profile: Annotated[
        Path | None, typer.Option(help="A file of fastserve profile, in place of --hardware.")
    ] = None,
    prediction_error: Annotated[
        float | None,
        typer.Option(
            help="Predict output lengths, for the policies speculative and gittins: the standard "
            "deviation of ln(predicted / real), 0 for perfect predictions; left out: nothing is "
            "predicted."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    plot: workload_flags.Plot = None,
    **keys: Any,
) -> None:
    """What each policy does to latency: the engine's own scheduler against a modelled cluster.

    MODEL is as of serve; a built-in name needs nothing but its name. Times in the table are in
    seconds.
    """
    from fastserve_bench.report.output import Output
    from fastserve_bench.workload import LengthLimits, ServiceClass, Workload

    from fastserve_backend.cli.simulate import ModelledHardware, simulate_command

    if keys["load_format"] is None:
        keys["load_format"] = "dummy"  # no weights are needed
    limits = LengthLimits(max_prompt_tokens, max_total_tokens, max_output_tokens)
    classes = tuple(map(ServiceClass.parse, job_class or ()))
    code = simulate_command(
        _engine_config(model, config, keys),
        ModelledHardware(profile, hardware),
        Workload(dataset, num_jobs, seed, limits, scale, length_ratio, arrivals, classes),
        Output(output, plot),
        policies=listed(policies),
        rates=parse_rates(rates),
        prediction_error=prediction_error,
    )
    raise typer.Exit(int(code))


app.command()(bench)


@app.command()
@with_config_flags(
    only=(
        "load_format", "dtype", "quantization", "device", "max_model_len",
        "tensor_parallel_size", "pipeline_parallel_size", "nnodes", "master_addr", "master_port",
        "block_size", "device_blocks", "device_memory_utilization", "device_dtype",
        "max_num_seqs", "max_num_batched_tokens",
    )
)  # fmt: skip
def profile(
    model: Annotated[str | None, typer.Argument(help="As of serve.")] = None,
    config: _Config = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON; default: where the engine looks for it.")
    ] = None,
    **keys: Any,
) -> None:
    """Measure how long iterations take, on real ranks, and how well that predicts others.

    MODEL is as of serve.
    """
    from fastserve_backend.cli.profile import profile_command

    profile_command(_engine_config(model, config, keys), output)


def _engine_configs(
    models: list[str], files: list[Path], keys: dict[str, Any]
) -> list[EngineConfig]:
    """A configuration for each model, or for each file if no model is given.

    Raises:
        ConfigError: neither one file nor one for each model.
    """
    if not models and not files:
        return [_engine_config(None, None, keys)]
    if not models:
        return [_engine_config(None, file, keys) for file in files]
    if len(files) <= 1:
        shared = files[0] if files else None
        return [_engine_config(model, shared, keys) for model in models]
    if len(files) != len(models):
        raise ConfigError(
            f"config: got {len(files)} files for {len(models)} models; give one for all of them, "
            "or one for each, in their order"
        )
    return [_engine_config(model, file, keys) for model, file in zip(models, files, strict=True)]


def _engine_config(model: str | None, config: Path | None, keys: dict[str, Any]) -> EngineConfig:
    """The file's configuration, or that of the embedded model, changed by the given flags."""
    base = EngineConfig() if config is None else EngineConfig.from_yaml(config)
    if model is None and config is None:
        model = EMBEDDED_MODEL
    given = {"model": model, **keys}
    return base.with_keys(**{key: value for key, value in given.items() if value is not None})
