"""Wire names of the Triton model ``fastserve``: tensors, their types, and the limits of a request.

Client and server import this module, so it depends on nothing: not on torch, numpy, tritonclient.
A tensor has dims [1] unless its ``TensorSpec`` says that its length varies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

MODEL_NAME: Final = "fastserve"

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_HTTP_PORT: Final = 8000
DEFAULT_GRPC_PORT: Final = 8001
DEFAULT_METRICS_PORT: Final = 8002

# Triton's names of datatypes in requests (KServe v2); its config.pbtxt says TYPE_STRING for BYTES.
DataType = Literal["BYTES", "BOOL", "INT32", "INT64", "UINT32", "UINT64", "FP32"]


@dataclass(frozen=True)
class TensorSpec:
    """Name and type of one input or output tensor."""

    name: str
    datatype: DataType
    variable_length: bool = False
    """Dims [-1] instead of [1]."""


TEXT_INPUT: Final = "text_input"
INPUT_IDS: Final = "input_ids"
MESSAGES: Final = "messages"
"""A conversation for the model's chat template: a JSON list of objects with the strings ``role``
(such as system, user, assistant, tool) and ``content``."""
OUTPUT_IDS_SO_FAR: Final = "output_ids_so_far"
"""Beside a prompt: the output that the client has already, from a server that was lost. The answer
goes on after it, and the outputs are about the rest."""
PROMPTS: Final = (TEXT_INPUT, INPUT_IDS, MESSAGES)
"""A request for tokens has exactly one of them."""
WATCH_INTERVAL_MS: Final = "watch_interval_ms"
"""Takes the place of a prompt, with ``STREAM`` and nothing else. It asks for a response with
``ENGINE_STATE`` every so many milliseconds."""
TASK: Final = "task"
"""Takes the place of generation: one of ``TASKS``. The only response has ``TASK_RESULT``."""
DESCRIBE: Final = "describe"
"""The task that returns the fields of a ``ModelDescription``. Nothing is given beside it."""
TOKENIZE: Final = "tokenize"
"""The task that returns the fields of a ``Tokenization``, for ``TEXT_INPUT`` or ``MESSAGES``."""
DETOKENIZE: Final = "detokenize"
"""The task that returns the ``text`` of ``INPUT_IDS``."""
TASKS: Final = (DESCRIBE, TOKENIZE, DETOKENIZE)
STREAM: Final = "stream"
SAMPLING_PARAMETERS: Final = "sampling_parameters"
"""A JSON object with any of ``PARAMETER_KEYS``; a tensor of the same name beats it."""
EXCLUDE_INPUT_IN_OUTPUT: Final = "exclude_input_in_output"
MAX_TOKENS: Final = "max_tokens"
MIN_TOKENS: Final = "min_tokens"
TEMPERATURE: Final = "temperature"
TOP_P: Final = "top_p"
TOP_K: Final = "top_k"
REPETITION_PENALTY: Final = "repetition_penalty"
PRESENCE_PENALTY: Final = "presence_penalty"
FREQUENCY_PENALTY: Final = "frequency_penalty"
SEED: Final = "seed"
STOP_WORDS: Final = "stop_words"
IGNORE_EOS: Final = "ignore_eos"
PRIORITY: Final = "priority"
"""Lower runs first."""
TTFT_SLO_MS: Final = "ttft_slo_ms"
"""Wanted time to the first token; without it, the server's."""
TPOT_SLO_MS: Final = "tpot_slo_ms"
"""Wanted time for each later token; without it, the server's."""
TENANT: Final = "tenant"
"""For whom the request runs."""
SESSION_ID: Final = "session_id"
"""The conversation that the request is a turn of; its KV is kept for the next turn."""
CACHE_SALT: Final = "cache_salt"
"""Only requests with the same salt use each other's KV; those without one share theirs."""
SLO_HEADERS: Final = {TTFT_SLO_MS: "x-slo-ttft-ms", TPOT_SLO_MS: "x-slo-tpot-ms"}
"""The gateway's HTTP headers for objectives."""
SESSION_HEADER: Final = "x-session-id"
"""The gateway's HTTP header for ``SESSION_ID``, for clients that cannot change the body."""
RETURN_FINISH_REASON: Final = "return_finish_reason"
RETURN_NUM_INPUT_TOKENS: Final = "return_num_input_tokens"
RETURN_NUM_CACHED_TOKENS: Final = "return_num_cached_tokens"
RETURN_NUM_OUTPUT_TOKENS: Final = "return_num_output_tokens"
RETURN_CUMULATIVE_LOGPROB: Final = "return_cumulative_logprob"
RETURN_LOGPROBS: Final = "return_logprobs"
RETURN_PROMPT_LOGPROBS: Final = "return_prompt_logprobs"
RETURN_PROMPT_TOKENS: Final = "return_prompt_tokens"
RETURN_PERF_METRICS: Final = "return_perf_metrics"

STOP: Final = "stop"
"""Other name of ``STOP_WORDS`` inside ``SAMPLING_PARAMETERS``: a string or a list of strings."""
LOGPROBS: Final = "logprobs"
"""Only inside ``SAMPLING_PARAMETERS`` or as a request parameter: how many of the most likely tokens
the ``logprobs`` output lists for each generated token (it needs ``return_logprobs`` as well)."""
CLIP_MAX_TOKENS: Final = "clip_max_tokens"
"""Not a tensor, like ``LOGPROBS``. True: a ``max_tokens`` that does not fit behind the prompt is
lowered instead of refused."""
STOP_TOKEN_IDS: Final = "stop_token_ids"
"""Not a tensor, like ``LOGPROBS``. Token ids that end the answer: a JSON list of integers (or its
text), or one integer."""
LOGIT_BIAS: Final = "logit_bias"
"""Not a tensor, like ``LOGPROBS``. A JSON object (or its text) of token ids, as strings, and what
to add to their logits."""
STRUCTURED_OUTPUT: Final = "structured_output"
"""Not a tensor, like ``LOGPROBS``. A JSON object (or its text) with exactly one of ``json_schema``
(an object), ``json_object`` (true), ``regex`` (a string), ``choice`` (a list of strings) and
``grammar`` (a string)."""
MIN_P: Final = "min_p"
"""Not a tensor, like ``LOGPROBS``. Tokens less likely than this share of the likeliest token's
probability are not chosen."""
ALLOWED_TOKEN_IDS: Final = "allowed_token_ids"
"""Not a tensor, like ``LOGPROBS``. Only these tokens may be chosen: a JSON list of integers (or
its text), or one integer."""
BAD_WORDS: Final = "bad_words"
"""Not a tensor, like ``LOGPROBS``. Texts that the answer must not contain: a JSON list, or
one text."""
TRUNCATE_PROMPT_TOKENS: Final = "truncate_prompt_tokens"
"""Not a tensor, like ``LOGPROBS``. Only this many of the prompt's last tokens are used; -1: as
many as there is room for."""
SKIP_SPECIAL_TOKENS: Final = "skip_special_tokens"
"""Not a tensor, like ``LOGPROBS``. False: special tokens in the output have their text too."""
STOP_NOT_BETWEEN: Final = "stop_not_between"
"""Not a tensor, like ``LOGPROBS``. A list of two marks; stop words do not count between them."""
TOOLS: Final = "tools"
"""Not a tensor, like ``LOGPROBS``. Tools for the chat template: a JSON list of OpenAI's objects."""
CHAT_TEMPLATE_KWARGS: Final = "chat_template_kwargs"
"""Not a tensor, like ``LOGPROBS``. More variables for the chat template: a JSON object."""
ADD_GENERATION_PROMPT: Final = "add_generation_prompt"
"""Not a tensor, like ``LOGPROBS``. False: the prompt ends with the last message."""
CONTINUE_FINAL_MESSAGE: Final = "continue_final_message"
"""Not a tensor, like ``LOGPROBS``. True: the answer goes on with the text of the last message."""
CHAT_OPTIONS: Final = (
    TOOLS,
    CHAT_TEMPLATE_KWARGS,
    ADD_GENERATION_PROMPT,
    CONTINUE_FINAL_MESSAGE,
)
"""Only with ``MESSAGES``."""
ADD_SPECIAL_TOKENS: Final = "add_special_tokens"
"""Not a tensor, like ``LOGPROBS``. Whether the tokenizer adds the tokens that the model expects
around a prompt. The default is true for ``TEXT_INPUT`` and false for ``MESSAGES``, whose template
writes them."""
RETURN_TOKEN_STRS: Final = "return_token_strs"
"""Not a tensor, and only with the task ``TOKENIZE``: return the text of each token, too."""
PROMPT_LOGPROBS: Final = "prompt_logprobs"
"""Not a tensor, like ``LOGPROBS``. How many of the most likely tokens the output
``PROMPT_LOGPROBS_OUTPUT`` lists for each token of the prompt (with ``RETURN_PROMPT_LOGPROBS``)."""
REQUEST_ID: Final = "id"
"""Only a request parameter: the request's id, for the generate endpoints of HTTP. These have no
other place for it in release 24.10."""
TRACEPARENT: Final = "traceparent"
"""Only a request parameter, or a header of a gRPC call, which the server makes one: W3C's trace
context."""
TRACESTATE: Final = "tracestate"
"""Like ``TRACEPARENT``."""
TRACE_HEADERS: Final = (TRACEPARENT, TRACESTATE)

INPUTS: Final = (
    TensorSpec(TEXT_INPUT, "BYTES"),
    TensorSpec(INPUT_IDS, "INT32", variable_length=True),
    TensorSpec(MESSAGES, "BYTES"),
    TensorSpec(OUTPUT_IDS_SO_FAR, "INT32", variable_length=True),
    TensorSpec(WATCH_INTERVAL_MS, "INT32"),
    TensorSpec(TASK, "BYTES"),
    TensorSpec(STREAM, "BOOL"),
    TensorSpec(SAMPLING_PARAMETERS, "BYTES"),
    TensorSpec(EXCLUDE_INPUT_IN_OUTPUT, "BOOL"),
    TensorSpec(MAX_TOKENS, "INT32"),
    TensorSpec(MIN_TOKENS, "INT32"),
    TensorSpec(TEMPERATURE, "FP32"),
    TensorSpec(TOP_P, "FP32"),
    TensorSpec(TOP_K, "INT32"),
    TensorSpec(REPETITION_PENALTY, "FP32"),
    TensorSpec(PRESENCE_PENALTY, "FP32"),
    TensorSpec(FREQUENCY_PENALTY, "FP32"),
    TensorSpec(SEED, "UINT64"),
    TensorSpec(STOP_WORDS, "BYTES", variable_length=True),
    TensorSpec(IGNORE_EOS, "BOOL"),
    TensorSpec(PRIORITY, "INT32"),
    TensorSpec(TTFT_SLO_MS, "FP32"),
    TensorSpec(TPOT_SLO_MS, "FP32"),
    TensorSpec(TENANT, "BYTES"),
    TensorSpec(SESSION_ID, "BYTES"),
    TensorSpec(CACHE_SALT, "BYTES"),
    TensorSpec(RETURN_FINISH_REASON, "BOOL"),
    TensorSpec(RETURN_NUM_INPUT_TOKENS, "BOOL"),
    TensorSpec(RETURN_NUM_CACHED_TOKENS, "BOOL"),
    TensorSpec(RETURN_NUM_OUTPUT_TOKENS, "BOOL"),
    TensorSpec(RETURN_CUMULATIVE_LOGPROB, "BOOL"),
    TensorSpec(RETURN_LOGPROBS, "BOOL"),
    TensorSpec(RETURN_PROMPT_LOGPROBS, "BOOL"),
    TensorSpec(RETURN_PROMPT_TOKENS, "BOOL"),
    TensorSpec(RETURN_PERF_METRICS, "BOOL"),
)

TEXT_OUTPUT: Final = "text_output"
"""New text of this response; never a broken UTF-8 sequence. May be empty while a character or a
possible stop word is incomplete."""
OUTPUT_IDS: Final = "output_ids"
"""New tokens of this response; may be empty."""
FINISH_REASON: Final = "finish_reason"
"""``stop`` or ``length``, in the last response only. A job that is cancelled or fails ends with an
error instead."""
NUM_INPUT_TOKENS: Final = "num_input_tokens"
NUM_CACHED_TOKENS: Final = "num_cached_tokens"
"""Tokens of the prompt that were not computed: another request had their keys and values."""
NUM_OUTPUT_TOKENS: Final = "num_output_tokens"
"""Tokens of this response, as Triton's vLLM backend counts; the sum is the length of the output."""
CUMULATIVE_LOGPROB: Final = "cumulative_logprob"
"""Sum over the tokens up to and with this response, natural logarithm."""
LOGPROBS_OUTPUT: Final = "logprobs"
"""JSON list with an object for each token of ``OUTPUT_IDS``: ``token_id``, ``token`` (its text),
``logprob``, and ``top`` (a list of such objects, most likely first) if the request asked for it."""
PROMPT_LOGPROBS_OUTPUT: Final = "prompt_logprobs"
"""JSON list with an entry for each token of the prompt, in the first response only: null for the
first token, else an object as in ``LOGPROBS_OUTPUT``, with ``rank`` (1 if no token is likelier)."""
PROMPT_TOKENS: Final = "prompt_tokens"
"""JSON list with an object for each token of the prompt, in the first response only: ``token_id``
and ``token`` as in ``LOGPROBS_OUTPUT``, and for a special token ``special``, how a prompt spells
it."""
ARRIVAL_TIME_NS: Final = "arrival_time_ns"
FIRST_SCHEDULED_TIME_NS: Final = "first_scheduled_time_ns"
FIRST_TOKEN_TIME_NS: Final = "first_token_time_ns"
LAST_TOKEN_TIME_NS: Final = "last_token_time_ns"
NUM_PREEMPTIONS: Final = "num_preemptions"
NUM_SWAPS: Final = "num_swaps"
QUEUE_LEVEL: Final = "queue_level"
ENGINE_STATE: Final = "engine_state"
"""JSON of an ``engine_state.EngineState``; the only output of a request that watches."""
TASK_RESULT: Final = "task_result"
"""A JSON object; the only output of a request with ``TASK``."""

PERF_OUTPUTS: Final = (
    TensorSpec(ARRIVAL_TIME_NS, "INT64"),
    TensorSpec(FIRST_SCHEDULED_TIME_NS, "INT64"),
    TensorSpec(FIRST_TOKEN_TIME_NS, "INT64"),
    TensorSpec(LAST_TOKEN_TIME_NS, "INT64"),
    TensorSpec(NUM_PREEMPTIONS, "INT32"),
    TensorSpec(NUM_SWAPS, "INT32"),
    TensorSpec(QUEUE_LEVEL, "INT32"),
)
"""With ``RETURN_PERF_METRICS``, in the last response only. Times are nanoseconds since the Unix
epoch on the server's clock; 0 where the event did not happen."""

OUTPUTS: Final = (
    TensorSpec(TEXT_OUTPUT, "BYTES", variable_length=True),
    TensorSpec(OUTPUT_IDS, "INT32", variable_length=True),
    TensorSpec(FINISH_REASON, "BYTES"),
    TensorSpec(NUM_INPUT_TOKENS, "UINT32"),
    TensorSpec(NUM_CACHED_TOKENS, "UINT32"),
    TensorSpec(NUM_OUTPUT_TOKENS, "UINT32"),
    TensorSpec(CUMULATIVE_LOGPROB, "FP32"),
    TensorSpec(LOGPROBS_OUTPUT, "BYTES"),
    TensorSpec(PROMPT_LOGPROBS_OUTPUT, "BYTES"),
    TensorSpec(PROMPT_TOKENS, "BYTES"),
    *PERF_OUTPUTS,
    TensorSpec(ENGINE_STATE, "BYTES"),
    TensorSpec(TASK_RESULT, "BYTES"),
)

PARAMETER_KEYS: Final = (
    *(
        spec.name
        for spec in INPUTS
        if spec.name
        not in (*PROMPTS, OUTPUT_IDS_SO_FAR, WATCH_INTERVAL_MS, TASK, SAMPLING_PARAMETERS)
    ),
    STOP,
    LOGPROBS,
    PROMPT_LOGPROBS,
    CLIP_MAX_TOKENS,
    STOP_TOKEN_IDS,
    LOGIT_BIAS,
    STRUCTURED_OUTPUT,
    SKIP_SPECIAL_TOKENS,
    STOP_NOT_BETWEEN,
    MIN_P,
    ALLOWED_TOKEN_IDS,
    BAD_WORDS,
    TRUNCATE_PROMPT_TOKENS,
    *CHAT_OPTIONS,
    ADD_SPECIAL_TOKENS,
)
"""Names that may also be a key of ``SAMPLING_PARAMETERS`` or a request parameter. A tensor beats
``SAMPLING_PARAMETERS``, and that beats a request parameter. Numbers and booleans may be strings.
Other keys are errors."""

MAX_SEED: Final = 2**64 - 1
MIN_WATCH_INTERVAL_MS: Final = 50
MAX_WATCH_INTERVAL_MS: Final = 10_000
MAX_INT32: Final = 2**31 - 1
