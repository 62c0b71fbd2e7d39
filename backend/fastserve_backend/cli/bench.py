"""``fastserve bench`` on the command line: turns its flags into a plan and servers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from fastserve_client.endpoint import DEFAULT_URL

from fastserve_backend.cli import workload_flags
from fastserve_backend.cli.workload_flags import listed, parse_rates
from fastserve_backend.errors import ConfigError
from fastserve_backend.scheduler.registry import known_policies


def bench(
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="A server, [NAME=]grpc://HOST:PORT (Triton) or [NAME=]http://HOST:PORT/v1 (any "
            "OpenAI API, with the key in OPENAI_API_KEY); can be repeated.",
            show_default=DEFAULT_URL,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model's name at the server.",
            show_default="fastserve over gRPC, else the first that the server lists",
        ),
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(
            help="In place of --url: arguments of fastserve serve in one string, for servers that "
            "run in turn, one a policy of --compare."
        ),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Policies for --serve, separated by commas.")
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="In place of --rates: numbers of requests to keep under way, separated by commas."
        ),
    ] = None,
    job_class: workload_flags.JobClasses = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="Runs of each load, seeds counting up; medians.")
    ] = 1,
    warmup: Annotated[
        int, typer.Option(min=0, help="Requests before a run, which do not count.")
    ] = 4,
    pause: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=3600.0,
            help="Seconds before each run where several --url take turns: some servers stay busy "
            "for a while after their last job.",
        ),
    ] = 2.0,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds that each request may take.")
    ] = 600.0,
    rates: workload_flags.Rates = None,
    dataset: workload_flags.Dataset = "sharegpt",
    arrivals: workload_flags.ArrivalsFlag = None,
    num_jobs: workload_flags.NumJobs = 100,
    seed: workload_flags.Seed = 0,
    max_prompt_tokens: workload_flags.MaxPromptTokens = 1024,
    max_total_tokens: workload_flags.MaxTotalTokens = 2048,
    max_output_tokens: workload_flags.MaxOutputTokens = None,
    scale: workload_flags.Scale = 1.0,
    length_ratio: workload_flags.LengthRatio = None,
    # Every model has so many tokens, and their ids do not change the time that a prompt takes.
    vocab_size: Annotated[
        int, typer.Option(help="Prompts have random token ids below this.")
    ] = 1000,
    natural_lengths: Annotated[
        bool,
        typer.Option(
            "--natural-lengths",
            help="Send the texts of the data set, and let answers end by themselves.",
        ),
    ] = False,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Send those texts as messages of users, for instruct models."),
    ] = False,
    slo_ms: Annotated[float, typer.Option(help="Wanted latency per output token.")] = 300.0,
    ttft_slo_ms: Annotated[float | None, typer.Option(help="Wanted time to first token.")] = None,
    tpot_slo_ms: Annotated[
        float | None, typer.Option(help="Wanted time per token after the first.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write JSON with every job's times.")] = None,
    plot: workload_flags.Plot = None,
) -> None:
    """Load test of running servers: latencies, throughput and errors at each load.

    Jobs are sent at their arrival times, whatever has finished (--rates), or a fixed number is kept
    under way (--concurrency). docs/benchmarking.md says what the numbers mean.
    """
    from fastserve_bench.command import bench_command
    from fastserve_bench.connection import Target
    from fastserve_bench.own_server import OwnServer
    from fastserve_bench.report.objectives import Objectives
    from fastserve_bench.report.output import Output
    from fastserve_bench.session import Load, Plan
    from fastserve_bench.workload import LengthLimits, ServiceClass, Workload

    if rates is not None and concurrency is not None:
        raise ConfigError("concurrency: got it beside --rates; a load is one of them")
    if (serve is None) != (compare is None):
        raise ConfigError("compare: takes policies for --serve; running servers are --url each")
    if serve is not None and url:
        raise ConfigError("serve: got it beside --url; bench starts servers or finds them")
    if natural_lengths and max_output_tokens is None:
        raise ConfigError("natural_lengths: needs --max-output-tokens, where every answer ends")
    if chat and not natural_lengths:
        raise ConfigError("chat: needs --natural-lengths, whose texts are sent as messages")
    bounds_ms = {"slo_ms": slo_ms, "ttft_slo_ms": ttft_slo_ms, "tpot_slo_ms": tpot_slo_ms}
    for name, number in {"timeout": timeout, **bounds_ms}.items():
        if number is not None and not 0 < number < math.inf:
            raise ConfigError(f"{name}: got {number:g}; must be a number above 0")
    limits = LengthLimits(max_prompt_tokens, max_total_tokens, max_output_tokens)
    classes = tuple(map(ServiceClass.parse, job_class or ()))
    loads = [Load(concurrency=clients) for clients in _whole_numbers(concurrency)]
    loads += [Load(rate=rate) for rate in parse_rates(rates)]
    plan = Plan(
        Workload(dataset, num_jobs, seed, limits, scale, length_ratio, arrivals, classes),
        list(dict.fromkeys(loads)) or [Load()],
        repeats,
        timeout,
        warmup,
        vocab_size,
        pause,
        max_output_tokens if natural_lengths else None,
        chat,
    )
    servers: list[Target] | list[OwnServer]
    if serve is None:
        servers = [Target.parse(one, model) for one in url or [DEFAULT_URL]]
    else:
        servers = [OwnServer.parse(serve, policy) for policy in _policies(compare)]
    code = bench_command(
        servers,
        plan,
        Objectives(*(None if bound is None else bound / 1e3 for bound in bounds_ms.values())),
        Output(output, plot),
    )
    raise typer.Exit(int(code))


def _policies(text: str | None) -> list[str]:
    """The policies of ``--compare``. Unknown ones are refused here: a server would refuse one only
    after those before it were measured."""
    policies, known = listed(text), known_policies()
    for policy in policies:
        if policy not in known:
            raise ConfigError(f"compare: got {policy!r}; policies are {', '.join(known)}")
    return policies


def _whole_numbers(text: str | None) -> list[int]:
    numbers = listed(text)
    if not all(number.isascii() and number.isdigit() and int(number) for number in numbers):
        raise ConfigError(
            f"concurrency: got {text!r}; must be whole numbers from 1, separated by commas"
        )
    return [int(number) for number in numbers]
