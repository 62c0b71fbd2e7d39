"""Iteration times of GPUs that are not here, from the least that they must compute and move.

Every part of an iteration takes the time of its multiplications or of its memory traffic, whichever
is longer. Both run at the share of the peak rate that good kernels reach in whole models. With the
shares below, OPT-13B in 16 bits takes (``tests/unit/test_roofline.py`` pins these numbers):

==========================================  ========  ========  ====  ====
milliseconds                                a100-40g  a100-80g  h100  h200
==========================================  ========  ========  ====  ====
decode, one job, context 400                26.3      20.6      13.5  10.1
decode, 16 jobs, context 400 each           30.8      24.1      15.6  11.6
prefill, one prompt of 512 tokens           86.5      86.4      29.0  28.9
==========================================  ========  ========  ====  ====

FastServe sets its SLO of 0.3 s a token as ten decode iterations of OPT-13B on an A100, so 30 ms
each. That is the second row's time on the 40 GB type. On an A100 the second row is 1.6 times the
time of reading weights and KV at the full memory rate. On an H200 it is 1.8 times, because
overheads do not shrink with faster memory.
"""

from __future__ import annotations

from collections import Counter

from fastserve_backend.checkpoints.model_config import DTYPE_BYTES, ModelConfig
from fastserve_backend.checkpoints.partition import check_parallel, layers_of_stages, share_of_kv
from fastserve_backend.errors import ConfigError
from fastserve_backend.profile.hardware import GPUS_PER_NODE, Hardware
from fastserve_backend.profile.iteration import IterationLoad, LatencyModel
from fastserve_backend.rank_protocol.layer_kinds import BlockNeeds

# A large GEMM alone reaches 65 to 85% of the peak. A whole prefill reaches about half, because of
# layer norms, activations, odd shapes and gaps between kernels.
LINEAR_COMPUTE_SHARE = 0.5
# Softmax and the causal mask keep the tensor cores waiting. For prompts of 1000 to 2000 tokens.
ATTENTION_COMPUTE_SHARE = 0.35
# A copy reaches 90%. A decode reaches less: its thin matrix products and paged reads start and
# drain dozens of times a layer.
HBM_SHARE = 0.7
# Bus bandwidth of large NCCL all-reduces among 8 GPUs, over the rate of NVLink.
NVLINK_SHARE = 0.75
# DMA between pinned host memory and the device reaches 25 of 32 or 50 of 64 GB/s.
PCIE_SHARE = 0.8
# A collective or a send too small for bandwidth to matter.
NCCL_LATENCY_S = 10e-6
# About ten kernels a layer, each with a start that a CUDA graph leaves at 1 µs.
LAYER_OVERHEAD_S = 10e-6
# The host's part: scheduling, making input tensors, sampling, returning the tokens.
ITERATION_OVERHEAD_S = 2e-3

_FLOPS_PER_WEIGHT = 2  # multiply and add
_FLOPS_PER_PAIR = 4  # per channel: multiply and add, for the score and for the value
# What the log-probabilities of a prompt do with logits in float32: they are written, and read for
# the softmax (three times, and written), for the rank and for the most likely tokens.
_LOGIT_BYTES = 4
_LOGIT_PASSES = 7
_ALL_REDUCES_PER_LAYER = 2  # after attention and after the feed-forward block (Megatron)


class Roofline(LatencyModel):
    """Times of a model in 16 bits, sharded over ``tensor_parallel × pipeline_parallel`` GPUs.

    Tensor parallelism divides every matrix and the heads, pipeline parallelism the layers into
    stages, as the engine's ranks do (``models.partition``). GPUs fill nodes stage by stage; between
    nodes each GPU has a network card as fast as its PCIe link.

    Weights are counted from ``num_parameters``: the LM head has vocabulary × hidden, the layers
    have the rest. With tied embeddings that is exact except for the table of positions (0.1% of
    OPT-13B). An untied input table counts as part of the layers. With INT8 weights, an input table
    in 16 bits is counted in addition, tied or not. Weights that stay in few bits count with their
    mean size. Matrix products still run in 16 bits.

    Of a mixture of experts, a batch multiplies the active parameters. It reads the experts that its
    tokens are expected to choose at random. Tensor-parallel GPUs count as equally busy, though each
    has experts of its own.

    Raises:
        ConfigError: a size does not divide the model, its type is not 16 bits wide, or the weights
            exceed the memory of a GPU.
    """

    def __init__(
        self,
        model: ModelConfig,
        hardware: Hardware,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
    ) -> None:
        _check_sharding(model, tensor_parallel, pipeline_parallel)
        self.num_stages = pipeline_parallel
        self._model = model
        self._hardware = hardware
        # Share of a job's KV on one GPU of the fullest stage, which decides what fits and how long
        # swaps take.
        self.share_of_kv = share_of_kv(model, tensor_parallel, pipeline_parallel)
        element_bytes = model.linear_element_bytes
        head = model.vocab_size * model.hidden_size
        # With INT8 weights, the input table stays in 16 bits, and is not part of the layers.
        table = head if model.table_bytes else 0
        layers = model.num_parameters - head - (0 if model.tie_word_embeddings else table)
        stages = [len(stage) for stage in layers_of_stages(model, pipeline_parallel)]
        weights = [layers * count / model.num_layers for count in stages]
        weights[-1] += head
        stage_bytes = [count * element_bytes for count in weights]
        stage_bytes[0] += model.table_bytes
        self._weight_bytes = max(stage_bytes) / tensor_parallel
        if self._weight_bytes > hardware.hbm_bytes:
            smaller = ", or quantization int8" if model.quantization is None else ""
            raise ConfigError(
                f"hardware: got {hardware.name!r} with {hardware.hbm_bytes / 2**30:.0f} GiB; "
                f"{model.name} needs {self._weight_bytes / 2**30:.1f} GiB a GPU for its weights, "
                f"use more GPUs or larger ones{smaller}"
            )

        # Seconds per unit of load, for all layers of all stages.
        linear_flops = tensor_parallel * hardware.tensor_flops * LINEAR_COMPUTE_SHARE
        attention_flops = tensor_parallel * hardware.tensor_flops * ATTENTION_COMPUTE_SHARE
        hbm = tensor_parallel * hardware.hbm_bytes_s * HBM_SHARE
        experts = model.num_expert_parameters
        self._layers_token_s = (layers - experts) * _FLOPS_PER_WEIGHT / linear_flops
        self._layers_read_s = (layers - experts) * element_bytes / hbm
        active = experts * model.share_of_experts_read(1)
        self._experts_token_s = active * _FLOPS_PER_WEIGHT / linear_flops
        self._experts_read_s = experts * element_bytes / hbm
        self._head_token_s = head * _FLOPS_PER_WEIGHT / linear_flops
        self._head_read_s = head * element_bytes / hbm
        self._logits_token_s = model.vocab_size * _LOGIT_BYTES * _LOGIT_PASSES / hbm
        position_bytes = model.kv_bytes_per_block(1) // model.kv_depth
        channels = model.num_heads * model.head_dim
        # For each window, and None: (seconds a position, seconds a pair) in all layers with it.
        attention = {
            window: (
                count * position_bytes / hbm,
                count * channels * _FLOPS_PER_PAIR / attention_flops,
            )
            for window, count in Counter(model.windows).items()
        }
        self._position_s, self._pair_s = attention.get(None, (0.0, 0.0))
        self._windows = [
            (window, *seconds) for window, seconds in attention.items() if window is not None
        ]

        reduce_token_s, reduce_s = _all_reduces(model, hardware, tensor_parallel)
        send_token_s, send_s = _hand_overs(model, hardware, tensor_parallel, pipeline_parallel)
        self._transfer_token_s = reduce_token_s + send_token_s
        self._overhead_s = (
            ITERATION_OVERHEAD_S + model.num_layers * LAYER_OVERHEAD_S + reduce_s + send_s
        )

    def iteration_s(self, load: IterationLoad) -> float:
        """As in the base class. Called millions of times in a simulation, so all factors are
        computed beforehand.

        The time of reading a chunk's context is left out: from about 100 tokens a chunk, its
        multiplications take longer.
        """
        tokens = load.num_tokens
        layers_s = self._layers_token_s * tokens
        if layers_s < self._layers_read_s:
            layers_s = self._layers_read_s
        if self._experts_read_s:
            read_s = self._experts_read_s * self._model.share_of_experts_read(tokens)
            layers_s += max(self._experts_token_s * tokens, read_s)
        head_s = 0.0
        if load.num_sampled:
            head_s = self._head_token_s * load.num_sampled
            if head_s < self._head_read_s:
                head_s = self._head_read_s
        seconds = (
            self._overhead_s
            + layers_s
            + head_s
            + self._transfer_token_s * tokens
            + self._position_s * load.decode_context
            + self._pair_s * load.prefill_pairs
        )
        for window, position_s, pair_s in self._windows:
            # As if all jobs were of equal length.
            positions = min(load.decode_context, window * load.num_decodes)
            pairs = min(load.prefill_pairs, window * (tokens - load.num_decodes))
            seconds += position_s * positions + pair_s * pairs
        return seconds

    def score_s(self, num_tokens: int) -> float:
        head_s = max(self._head_read_s, self._head_token_s * num_tokens)
        return head_s + self._logits_token_s * num_tokens

    def swap_s(self, num_bytes: int) -> float:
        """Seconds to move ``num_bytes`` of KV between devices and host, in one direction.

        All GPUs move their shards at the same time, each over its own PCIe link (FastServe §4.2).
        """
        return num_bytes * self.share_of_kv / (self._hardware.pcie_bytes_s * PCIE_SHARE)

    def num_device_blocks(
        self, block_size: int, device_memory_utilization: float, step_tokens: int = 1
    ) -> int:
        """KV blocks of ``block_size`` tokens that fit beside the weights.

        Args:
            step_tokens: most tokens of a step. They count where layers have windows.

        Raises:
            ConfigError: one job of the model's ``max_model_len`` does not fit.
        """
        left = self._hardware.hbm_bytes * device_memory_utilization - self._weight_bytes
        num_blocks = int(left // (self._model.kv_bytes_per_block(block_size) * self.share_of_kv))
        kinds = self._model.layer_groups.kinds
        needed = BlockNeeds(block_size, kinds, step_tokens).most(self._model.max_model_len)
        if num_blocks < needed:
            raise ConfigError(
                f"hardware: got {self._hardware.name!r}; {max(0.0, left) / 2**30:.1f} GiB a GPU "
                f"are left for {max(0, num_blocks)} KV blocks, but one job of "
                f"{self._model.max_model_len} tokens needs {needed}; use more GPUs or larger ones, "
                "raise device_memory_utilization or lower max_model_len"
            )
        return num_blocks


def _check_sharding(model: ModelConfig, tensor_parallel: int, pipeline_parallel: int) -> None:
    if DTYPE_BYTES[model.dtype] != 2:
        raise ConfigError(
            f"dtype: got {model.dtype!r}; the tensor cores' rates are those of float16 and "
            "bfloat16, give --dtype bfloat16"
        )
    if not 1 <= tensor_parallel <= GPUS_PER_NODE:
        raise ConfigError(
            f"parallel.tensor_parallel_size: got {tensor_parallel}; must be from 1 to "
            f"{GPUS_PER_NODE}, "
            "the GPUs that NVLink joins"
        )
    check_parallel(model, tensor_parallel, pipeline_parallel)


def _all_reduces(
    model: ModelConfig, hardware: Hardware, tensor_parallel: int
) -> tuple[float, float]:
    """Time of all all-reduces: (seconds a token, constant seconds)."""
    if tensor_parallel == 1:
        return 0.0, 0.0
    count = _ALL_REDUCES_PER_LAYER * model.num_layers
    # Reduce-scatter, then all-gather: in each of them a GPU sends all parts but one.
    sent = 2 * (tensor_parallel - 1) / tensor_parallel * _activation_bytes(model)
    return count * sent / (hardware.nvlink_bytes_s * NVLINK_SHARE), count * NCCL_LATENCY_S


def _hand_overs(
    model: ModelConfig, hardware: Hardware, tensor_parallel: int, pipeline_parallel: int
) -> tuple[float, float]:
    """Time of all hand-overs between stages: (seconds a token, constant seconds)."""
    stages_per_node = GPUS_PER_NODE // tensor_parallel
    between_nodes = (pipeline_parallel - 1) // stages_per_node
    inside_nodes = pipeline_parallel - 1 - between_nodes
    token_s = _activation_bytes(model) * (
        inside_nodes / (hardware.nvlink_bytes_s * NVLINK_SHARE)
        + between_nodes / (hardware.pcie_bytes_s * PCIE_SHARE)
    )
    return token_s, (pipeline_parallel - 1) * NCCL_LATENCY_S


def _activation_bytes(model: ModelConfig) -> int:
    """Of one token between two layers."""
    return model.hidden_size * DTYPE_BYTES[model.dtype]
