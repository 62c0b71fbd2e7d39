"""The LM head, which many models share with their token embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .layers import Embedding, Linear
from .weights import NamedTensors, Parameter, check_tensor, load_parameters


class LMHead:
    """Hidden states to logits.

    Args:
        name: of its checkpoint layer.
        tied_to: the embedding whose table it shares, with the name of that tensor; None for a head
            of its own.
    """

    def __init__(
        self,
        name: str,
        hidden: int,
        vocab: int,
        *,
        tied_to: tuple[str, Embedding] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._linear = Linear(hidden, {name: vocab}, bias=False, dtype=dtype, device=device)
        self._tied_to = tied_to

    def parameters(self) -> dict[str, Parameter]:
        """None for a tied head."""
        return {} if self._tied_to is not None else self._linear.parameters()

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> logits [R, vocab]."""
        return self._linear(hidden)

    def load_model(self, parameters: Mapping[str, Parameter], tensors: NamedTensors) -> None:
        """Load all of a model's weights, the head's among them.

        A tied checkpoint may hold the table under the embedding's name, the head's, or both; where
        both are there and differ they are not tied after all (as in transformers).

        Raises:
            ModelError: missing, unexpected or misshapen tensors.
        """
        if self._tied_to is None:
            load_parameters(parameters, tensors)
            return
        embedding_name, embedding = self._tied_to
        ((head_name, head),) = self._linear.parameters().items()
        spare: list[Tensor] = []

        def without_head() -> Iterator[tuple[str, Tensor]]:
            embedding_seen = False
            for name, tensor in tensors:
                if name == head_name:
                    check_tensor(name, tensor, head.shape)
                    spare.append(tensor)
                    continue
                embedding_seen |= name == embedding_name
                yield name, tensor
            if spare and not embedding_seen:
                yield embedding_name, spare.pop()

        load_parameters(parameters, without_head())
        if spare and not torch.equal(spare[0].to(embedding.table), embedding.table):
            head.load(spare.pop())
        else:
            self._linear.tie(embedding.table)
