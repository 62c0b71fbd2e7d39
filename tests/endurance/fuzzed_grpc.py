"""Calls of Triton's gRPC service, most of them almost valid."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from fastserve_client import protocol
from fuzzed_values import (
    GOOD,
    INPUT_NAMES,
    TENSORS,
    Draw,
    any_json,
    boolean,
    either,
    integer,
    mostly,
    number,
    text,
    whole_number,
)
from tritonclient.grpc import service_pb2

TRITON_GRPC = "Triton gRPC"
INFER = "ModelStreamInfer"
_OTHER_CALLS = (
    *("ModelInfer", "ModelMetadata", "ModelConfig", "ModelStatistics", "ServerLive", "LogSettings"),
    *("RepositoryIndex", "RepositoryModelUnload", "SystemSharedMemoryRegister", "NoSuchCall"),
)
_DATATYPES = ("BYTES", "BOOL", "INT32", "INT64", "UINT64", "FP32", "FP16", "FP64", "JSON", "")
_SHAPES = ([1], [], [0], [-1], [2], [1, 1], [1] * 9, [2**31], [2**62], [2**62, 4], [-(2**63)])
_VERSIONS = ("1", "9", "-1", "x", "9" * 30)
_TRITONS_PARAMETERS = (
    *("timeout", "priority", "sequence_id", "sequence_start", "binary_data", "unknown"),
    *("triton_enable_empty_final_response", "shared_memory_region", "shared_memory_byte_size"),
)
_SIZES = {"INT32": 4, "UINT64": 8}


@dataclass(frozen=True)
class GrpcCall:
    method: str
    messages: tuple[bytes, ...]
    """The encoded messages: those of a stream, or a single one."""
    metadata: tuple[tuple[str, str], ...] = ()
    service = TRITON_GRPC


def _packed(datatype: str, values: Sequence[Any]) -> bytes:
    """Packs ``values`` as Triton reads them; bits that do not fit are cut off."""
    if datatype == "BYTES":
        texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        return b"".join(struct.pack("<I", len(text)) + text for text in encoded)
    if datatype == "FP32":
        return struct.pack(f"<{len(values)}f", *values)
    if datatype == "BOOL":
        return bytes(values)
    size = _SIZES[datatype]
    return b"".join((value % 256**size).to_bytes(size, "little") for value in values)


_ANY_OF: dict[str, Draw] = {
    "BYTES": either(text, any_json),
    "FP32": lambda rng: struct.unpack("<f", rng.randbytes(4))[0],
    "BOOL": whole_number(0, 255),
    "INT32": integer,
    "UINT64": integer,
}


def _tensor(rng: Random, name: str, *, whole: bool) -> tuple[Any, bytes]:
    """An input and its raw contents. If ``whole``, both match the model's declaration."""
    spec = next(one for one in protocol.INPUTS if one.name == name)
    datatype: str = spec.datatype
    good = (GOOD | TENSORS)[name]
    value = (good if mostly(rng, 6) else _ANY_OF[datatype])(rng)
    values = value if spec.variable_length and isinstance(value, list) else [value]
    raw, shape = _packed(datatype, values), [len(values)]
    if not (whole or mostly(rng, 4)):
        cut = rng.randint(0, len(raw))
        cuts = (b"", raw[:cut], raw + b"\0", raw * 2, b"\xff\xff\xff\xff" + raw)
        damage = rng.randrange(4)
        shape = rng.choice(_SHAPES) if damage == 0 else shape
        datatype = rng.choice(_DATATYPES) if damage == 1 else datatype
        name = "no_such_input" if damage == 2 else name
        raw = rng.choice(cuts) if damage == 3 else raw
    tensor = service_pb2.ModelInferRequest.InferInputTensor(
        name=name, datatype=datatype, shape=shape
    )
    return tensor, raw


def _parameter(rng: Random, *, whole: bool) -> Any:
    kinds: list[dict[str, Any]] = [
        {"bool_param": boolean(rng)},
        {"int64_param": rng.randint(-(2**63), 2**63 - 1)},
        {"int64_param": 4},
        {"string_param": _plain_text(rng)},
    ]
    if not whole:
        kinds += [{"uint64_param": rng.getrandbits(64)}, {"double_param": number(rng)}, {}]
    return service_pb2.InferParameter(**rng.choice(kinds))


def _infer_message(rng: Random, *, whole: bool) -> bytes:
    """If ``whole``, Triton accepts the message, though the model may refuse it."""
    prompts = (protocol.TEXT_INPUT, protocol.TEXT_INPUT, *protocol.PROMPTS)
    names = [protocol.MAX_TOKENS] if whole or mostly(rng) else []
    names += [rng.choice(prompts)] if whole or mostly(rng, 20) else []
    names += rng.choices(INPUT_NAMES, k=rng.randint(0, 3))
    if whole or mostly(rng):
        names = list(dict.fromkeys(names))
    found = [_tensor(rng, name, whole=whole) for name in names]
    message = service_pb2.ModelInferRequest(
        model_name=protocol.MODEL_NAME,
        id="" if mostly(rng, 3) else _plain_text(rng),
        inputs=[tensor for tensor, _ in found],
        raw_input_contents=[raw for _, raw in found],
    )
    if not mostly(rng, 3):
        key = rng.choice((*protocol.PARAMETER_KEYS, protocol.REQUEST_ID, "_" + _plain_text(rng)))
        message.parameters[key].CopyFrom(_parameter(rng, whole=whole))
    if not mostly(rng, 6):
        message.outputs.add(name=rng.choice(protocol.OUTPUTS).name)
    return message.SerializeToString(deterministic=True) if whole else _damaged(rng, message)


def _damaged(rng: Random, message: Any) -> bytes:
    if not mostly(rng):
        message.model_name = _plain_text(rng)
    if not mostly(rng):
        message.model_version = rng.choice(_VERSIONS)
    if not mostly(rng):
        message.parameters[rng.choice(_TRITONS_PARAMETERS)].CopyFrom(_parameter(rng, whole=False))
    if not mostly(rng):
        message.outputs.add(name=_plain_text(rng))
    if not mostly(rng, 20):
        del message.raw_input_contents[rng.randint(0, len(message.inputs)) :]
    if not mostly(rng, 20):
        message.raw_input_contents.append(rng.randbytes(rng.randint(0, 9)))
    if message.inputs and not mostly(rng):
        contents = rng.choice(message.inputs).contents
        contents.int_contents.extend([4] * rng.randint(0, 2))
        contents.bytes_contents.extend([b"a"] * rng.randint(0, 2))
    encoded: bytes = message.SerializeToString(deterministic=True)
    if mostly(rng, 20):
        return encoded
    cut = rng.randint(0, len(encoded))
    return encoded[:cut] + rng.randbytes(rng.randint(0, 4)) + encoded[cut:]


def _plain_text(rng: Random) -> str:
    """Text that protobuf accepts: without lone surrogates."""
    return text(rng).encode(errors="replace").decode()


def draw_grpc_call(rng: Random) -> GrpcCall:
    if not mostly(rng):
        message = _infer_message(rng, whole=False) if boolean(rng) else rng.randbytes(20)
        return GrpcCall(rng.choice(_OTHER_CALLS), (message,))
    if boolean(rng):
        return GrpcCall(INFER, (_infer_message(rng, whole=False),))
    # Triton 24.10 may crash where it refuses one of several requests of a call, or the request of a
    # call that asks for codes (docs/triton_facts.md).
    messages = tuple(_infer_message(rng, whole=True) for _ in range(rng.randint(1, 4)))
    asks = len(messages) == 1 and boolean(rng)
    return GrpcCall(INFER, messages, (("triton_grpc_error", "true"),) if asks else ())
