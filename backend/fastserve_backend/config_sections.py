"""The sections of the configuration: each field says its unit and meaning once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from fastserve_client.key_file import KeyFileError, read_key_file
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from fastserve_backend.errors import ConfigError
from fastserve_backend.scheduler.registry import BUILT_IN_POLICIES, is_known_policy, known_policies

START_TIMEOUT_S = 600.0
"""How long ranks may take to load the model. Large weights take minutes from a slow disk."""

# Bounds of configured times: a microsecond and eleven days.
_MIN_MS, MAX_MS = 1e-3, 1e9


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse true and false for numbers: YAML reads a bare ``yes`` as true, and pydantic reads
        true as 1."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and {int, float} & {annotation, *get_args(annotation)}:
            raise PydanticCustomError("number", "must be a number")
        return value


class ModelConfigSection(Section):
    model: str = Field(
        "facebook/opt-125m",
        min_length=1,
        description="Hugging Face id (owner/name or owner/name@revision), local directory, GGUF "
        "file, or a built-in name.",
    )
    tokenizer: str | None = Field(
        None,
        min_length=1,
        description="Directory or id of the tokenizer; default: the model's own.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of weights and KV; auto: the checkpoint's (CPU: never float16)."
    )
    quantization: Literal["int8", "int4", "as_stored"] | None = Field(
        None,
        description="int8 rounds the weights of linear layers to 8 bits, int4 to 4. as_stored, the "
        "default, keeps them as the checkpoint has them, in few bits too.",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="auto reads the checkpoint; dummy makes random weights."
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Most tokens, prompt and output, of one job; default: the model's."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; auto: cuda if there is one, else cpu."
    )
    generation_config: Literal["auto", "off"] = Field(
        "auto",
        description="auto: sampling fields of the model's generation_config.json are the defaults "
        "of requests; off: they are not.",
    )

    @field_validator("generation_config", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, value: object) -> object:
        """YAML reads a bare ``off`` as false."""
        return "off" if value is False else value


class ParallelSection(Section):
    tensor_parallel_size: int = Field(
        1, ge=1, description="Ranks that share each layer; divides attention and KV heads."
    )
    pipeline_parallel_size: int = Field(
        1, ge=1, description="Stages that follow each other, each with some of the layers."
    )
    nnodes: int = Field(
        1, ge=1, description="Hosts with an equal share of the ranks; see docs/several_hosts.md."
    )
    node_rank: int = Field(
        0, ge=0, description="Number of this host; the engine is on 0, the others run torchrun."
    )
    master_addr: str = Field(
        "127.0.0.1",
        min_length=1,
        description="IPv4 address or name of the engine's host, where it listens for the others.",
    )
    master_port: int = Field(
        0,
        ge=0,
        le=65534,
        description="Port where ranks of several hosts meet; the next port is the engine's.",
    )
    host_share: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="Share of a host's cores and free memory for the ranks of this model; serve "
        "divides both among several models.",
    )

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def engine_port(self) -> int:
        """The port on which the engine listens for the ranks of other hosts."""
        return self.master_port + 1

    def torchrun_command(self, node_rank: int | str) -> str:
        """The command to run on another host."""
        return (
            f"torchrun --nnodes {self.nnodes} --node-rank {node_rank} "
            f"--nproc-per-node {self.num_ranks // self.nnodes} "
            f"--master-addr {self.master_addr} --master-port {self.master_port} "
            f"-m fastserve_backend.worker --engine tcp://{self.master_addr}:{self.engine_port}"
        )

    def impossible_combinations(self) -> list[str]:
        """Problems of the division among hosts, if there are any."""
        if self.num_ranks % self.nnodes:
            return [
                f"parallel.nnodes: got {self.nnodes}; must divide tensor_parallel_size × "
                f"pipeline_parallel_size, the {self.num_ranks} ranks"
            ]
        problems = []
        if self.node_rank >= self.nnodes:
            problems.append(
                f"parallel.node_rank: got {self.node_rank}; with {self.nnodes} hosts it is 0 to "
                f"{self.nnodes - 1}"
            )
        elif self.node_rank:
            problems.append(
                f"parallel.node_rank: got {self.node_rank}; the engine runs on host 0 only. On "
                f"this one run: {self.torchrun_command(self.node_rank)}"
            )
        if self.nnodes > 1 and not self.master_port:
            problems.append(
                "parallel.master_port: got 0; with several hosts choose one, it and the next are "
                "to be free"
            )
        ranks_per_node = self.num_ranks // self.nnodes
        if self.tensor_parallel_size <= ranks_per_node and (
            ranks_per_node % self.tensor_parallel_size
        ):
            problems.append(
                f"parallel.nnodes: got {self.nnodes}; with {ranks_per_node} ranks each, some "
                f"stages of {self.tensor_parallel_size} ranks would be on two; must divide "
                f"pipeline_parallel_size ({self.pipeline_parallel_size})"
            )
        return problems


SwapStrategy = Literal["defer", "recompute", "reactive", "proactive"]


class KVCacheSection(Section):
    block_size: Literal[8, 16, 32, 64] = Field(16, description="Tokens in one KV block.")
    device_memory_utilization: float = Field(
        0.9,
        gt=0.0,
        le=1.0,
        description="Share of a GPU's memory for weights, activations and KV blocks.",
    )
    device_blocks: int | None = Field(
        None,
        ge=1,
        description="Number of KV blocks on the device; default: what memory allows, on a CPU a "
        "quarter of the free memory and 4 GiB at most.",
    )
    swap_space_gib: float = Field(
        4.0,
        ge=0.0,
        le=2**20,
        description="Host memory of each rank for preempted jobs' KV, GiB; 0: none is swapped.",
    )
    disk_swap_gib: float = Field(
        0.0,
        ge=0.0,
        le=2**20,
        description="Disk space of each rank for KV of paused sessions that leaves host memory, "
        "GiB; 0: none is written.",
    )
    disk_swap_dir: str | None = Field(
        None,
        min_length=1,
        description="Directory on a local disk for that; default: swap within the user's cache "
        "directory.",
    )
    prefix_caching: bool = Field(
        True,
        description="Reuse KV of ended and running jobs for jobs that begin with the same tokens.",
    )
    session_ttl_s: Literal["auto"] | Annotated[float, Field(ge=0.0, le=86400.0)] = Field(
        "auto",
        description="Hold the KV of a paused session for so many seconds, in memory that no job "
        "needs; 0: never. auto: as long as all but a few measured pauses last.",
    )
    strategy: SwapStrategy = Field(
        "proactive", description="What happens when the device's KV blocks are short."
    )
    incremental: bool = Field(
        True, description="Keep KV on the host when a job returns, and copy only what is new."
    )
    write_back: bool = Field(
        True,
        description="Copy KV to the host ahead while the link is idle; needs proactive and "
        "incremental.",
    )
    device_dtype: Literal["same", "int8"] = Field(
        "same",
        description="Type of KV on the device; int8 holds nearly twice as many tokens as 16 bits, "
        "but changes outputs a little.",
    )
    host_dtype: Literal["same", "int8"] = Field(
        "same",
        description="Type of KV on the host; int8 is smaller, but changes outputs a little. KV "
        "that is int8 on the device stays as it is.",
    )

    @property
    def is_swapping(self) -> bool:
        """Whether the strategy uses host memory."""
        return self.strategy in ("reactive", "proactive")

    @property
    def swaps_are_lossy(self) -> bool:
        """Whether swapping changes KV."""
        return self.host_dtype == "int8" and self.device_dtype == "same"

    def impossible_combinations(self) -> list[str]:
        if self.disk_swap_gib and not (self.is_swapping and self.swap_space_gib):
            return [
                f"kv_cache.disk_swap_gib: got {self.disk_swap_gib:g}; KV reaches the disk through "
                "host memory: set swap_space_gib above 0 and strategy to 'proactive' or 'reactive'"
            ]
        return []


Objective = Literal["balanced", "normalized_latency", "jct"]

MOST_AUTO_SEQS = 256
"""Upper bound of ``max_num_seqs: auto``. Ranks reserve memory for so many jobs, and the latency
profile measures up to so many."""
_MOST_SEQS = 4096


class SchedulerSection(Section):
    policy: str = Field(
        "gittins", description="Scheduling policy.", examples=list(BUILT_IN_POLICIES)
    )
    objective: Objective = Field(
        "balanced",
        description="The mean that the policy gittins minimises: latency per output token, job "
        "completion time, or a balance of both.",
    )
    max_num_seqs: int | Literal["auto"] = Field(
        "auto",
        description="Most jobs in one iteration; auto: what KV memory holds and slo_ms allows, "
        f"{MOST_AUTO_SEQS} at most.",
    )
    max_num_batched_tokens: int = Field(
        2048, ge=1, description="Most tokens in one iteration, prefill and decode together."
    )
    prefill_chunk_tokens: int | Literal["auto", "whole"] = Field(
        "auto",
        description="Most prefill tokens in one iteration; longer prompts run in chunks. auto: "
        "what slo_ms allows by the latency profile. whole: a prompt runs in one iteration if it "
        "fits beside max_num_seqs decodes.",
    )
    quantum_ratio: float = Field(
        2.0, ge=1.1, le=64.0, description="Quantum of a queue over that of the queue above it."
    )
    base_quantum_ms: float | Literal["auto"] = Field(
        "auto", description="Quantum of the highest queue, ms; auto: one decode iteration."
    )
    slo_ms: float = Field(
        300.0, ge=_MIN_MS, le=MAX_MS, description="Wanted normalized latency, ms a token."
    )
    ttft_slo_ms: float | None = Field(
        None,
        gt=0.0,
        le=MAX_MS,
        description="Wanted time to the first token, ms, of requests that name none; default: no "
        "objective.",
    )
    tpot_slo_ms: float | None = Field(
        None,
        gt=0.0,
        le=MAX_MS,
        description="Wanted time for each later token, ms, of requests that name none; default: no "
        "objective.",
    )
    starvation_ms: float | Literal["auto"] = Field(
        "auto",
        description="After this wait, ms, a job has a turn before all others, until its first "
        "token, or for as long again if it has one. auto: from slo_ms.",
    )
    priority_starvation_ms: float | None = Field(
        None,
        ge=_MIN_MS,
        le=MAX_MS,
        description="After this wait, ms, a job has a turn before all priorities; null: "
        "never, so less urgent jobs wait as long as more urgent ones can run.",
    )
    session_age: bool = Field(
        False,
        description="A turn of a session counts as having run as long as the session's earlier "
        "turns, so that short conversations come before long ones.",
    )
    max_queued_requests: int = Field(
        4096, ge=1, description="Most unfinished jobs; more are refused as UNAVAILABLE."
    )
    log_requests: bool = Field(
        False,
        description="Log a line for each request that ends: its id, tenant, priority, times and "
        "objectives, never its words.",
    )
    stream_interval: int = Field(
        1,
        ge=1,
        description="Tokens of a streamed response, which waits for them 0.2 s or so at most; the "
        "first has one. More is less smooth, and less work for server and clients.",
    )
    length_prediction: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Predict output lengths from the words of prompts, see "
        "docs/length_prediction.md; auto: for the policy speculative.",
    )
    length_prediction_dir: str | None = Field(
        None,
        min_length=1,
        description="Where the predictor keeps what it learned; default: for each model a "
        "directory in the user's cache directory.",
    )
    length_prediction_capacity: int = Field(
        20000, ge=1, le=200_000, description="Most prompts whose lengths the predictor remembers."
    )

    @field_validator("policy")
    @classmethod
    def _policy_is_known(cls, value: str) -> str:
        if not is_known_policy(value):
            known = ", ".join(known_policies())
            raise PydanticCustomError("policy", "must be one of {known}", {"known": known})
        return value

    @field_validator("prefill_chunk_tokens", mode="before")
    @classmethod
    def _null_is_whole(cls, value: object) -> object:
        """Older configuration files have null for ``whole``."""
        return "whole" if value is None else value

    @field_validator("length_prediction", mode="before")
    @classmethod
    def _as_yaml_means_it(cls, value: object) -> object:
        """YAML reads a bare ``on`` as true and ``off`` as false."""
        if isinstance(value, bool):
            return "on" if value else "off"
        return value

    @property
    def most_seqs(self) -> int:
        """The largest number of jobs in one iteration of the ranks."""
        if self.max_num_seqs == "auto":
            return min(MOST_AUTO_SEQS, self.max_num_batched_tokens)
        return self.max_num_seqs

    @property
    def predicts_lengths(self) -> bool:
        if self.length_prediction == "auto":
            return self.policy == "speculative"
        return self.length_prediction == "on"

    def impossible_combinations(self) -> list[str]:
        problems = []
        if self.max_num_seqs != "auto" and not 1 <= self.max_num_seqs <= _MOST_SEQS:
            problems.append(
                f"scheduler.max_num_seqs: got {self.max_num_seqs}; must be 'auto' or from 1 "
                f"to {_MOST_SEQS}"
            )
        elif self.max_num_batched_tokens < self.most_seqs:
            problems.append(
                f"scheduler.max_num_batched_tokens: got {self.max_num_batched_tokens}; "
                f"must be at least scheduler.max_num_seqs ({self.max_num_seqs})"
            )
        chunk = self.prefill_chunk_tokens
        if isinstance(chunk, int) and not 1 <= chunk <= self.max_num_batched_tokens:
            problems.append(
                f"scheduler.prefill_chunk_tokens: got {chunk}; must be 'auto', 'whole' or from 1 "
                f"to scheduler.max_num_batched_tokens ({self.max_num_batched_tokens})"
            )
        if self.policy == "speculative" and not self.predicts_lengths:
            problems.append(
                "scheduler.length_prediction: got 'off'; the policy speculative schedules by "
                "predicted lengths, set it to 'auto' or choose skip_join_mlfq"
            )
        for key in ("base_quantum_ms", "starvation_ms"):
            value = getattr(self, key)
            if value != "auto" and not _MIN_MS <= value <= MAX_MS:
                problems.append(
                    f"scheduler.{key}: got {value}; must be 'auto' or from {_MIN_MS:g} to "
                    f"{MAX_MS:g} ms"
                )
        return problems


class TenantsSection(Section):
    fair_shares: bool = Field(
        True,
        description="Share the machine fairly among the tenants with jobs of the same priority.",
    )
    tenants_file: str | None = Field(
        None,
        min_length=1,
        description="The gateway's file of API keys, for the names and weights of tenants; others "
        "are refused. Default: any tenant may send requests, and all have the weight 1.",
    )
    tenant_max_queued: int | None = Field(
        None, ge=1, description="Most unfinished jobs of one tenant; default: no limit."
    )
    tenant_tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="Most tokens of one tenant a minute, prompt and output; default: no limit.",
    )
    most_urgent_priority: int = Field(
        -100, ge=-(2**31), le=0, description="Lowest priority of a request, which runs first."
    )
    least_urgent_priority: int = Field(
        100, ge=0, le=2**31 - 1, description="Highest priority of a request, which runs last."
    )

    def read_weights(self) -> dict[str, float]:
        """Weights of the tenants in ``tenants_file``; empty if there is no file.

        Raises:
            ConfigError: the file cannot be used.
        """
        if self.tenants_file is None:
            return {}
        try:
            keys = read_key_file(Path(self.tenants_file))
        except KeyFileError as error:
            raise ConfigError(f"tenants.tenants_file: {error}") from None
        return {key.name: key.weight for key in keys}
