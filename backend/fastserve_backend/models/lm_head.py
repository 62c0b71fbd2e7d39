"""The LM head, which many models share with their token embeddings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fastserve_backend.models.layers import ColumnLinear, VocabEmbedding
from fastserve_backend.models.model_part import ModelPart
from fastserve_backend.models.weights import (
    Parameter,
    StoredTensor,
    WeightSource,
    check_tensor,
    load_parameters,
)


class LMHead:
    """Hidden states to logits, in the last stage; its ranks divide the vocabulary among them.

    Other stages have one too, which knows of the tensors that they need not load.

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
        tied_to: tuple[str, VocabEmbedding] | None,
        part: ModelPart,
    ) -> None:
        self.name = name
        self._linear = ColumnLinear(hidden, {name: vocab}, bias=False, part=part)
        self._tensor_name = f"{name}.weight"
        self._vocab = vocab
        self._tied_to = tied_to
        self._part = part

    def parameters(self) -> dict[str, Parameter]:
        """None for a tied head, but in a last stage without the embedding, which needs its table
        too."""
        if not self._part.is_last:
            return {}
        if self._tied_to is None:
            return {self._tensor_name: self._parameter}
        return {} if self._part.is_first else {self._tied_to[0]: self._parameter}

    def __call__(self, hidden: Tensor) -> Tensor | None:
        """hidden [R, hidden] -> logits [R, vocab]; None but on the first rank of the stage."""
        return self._part.tensor.gather_columns(self._linear(hidden), self._vocab)

    def load_model(
        self, parameters: Mapping[str, Parameter], source: WeightSource, elsewhere: Collection[str]
    ) -> None:
        """Load all of the stage's weights, the head's among them; see `load_parameters`.

        A tied checkpoint may hold the table under the embedding's name, the head's, or both; where
        both are there and differ they are not tied after all (as in transformers).

        Raises:
            ModelError: missing, unexpected or misshapen tensors.
        """
        if self._tied_to is None:
            load_parameters(parameters, source, elsewhere)
            return
        _, embedding = self._tied_to
        tables: dict[str, StoredTensor] = {}
        load_parameters(parameters, self._one_table(source, tables), elsewhere)
        if not (self._part.is_first and self._part.is_last):
            return
        if len(tables) == 2:
            own = tables[self._tensor_name].read(self._parameter.shard)
            if not torch.equal(own.to(embedding.table), embedding.table):
                self._parameter.load(own)
                return
        self._linear.tie(embedding.table)

    def _one_table(
        self, source: WeightSource, tables: dict[str, StoredTensor]
    ) -> Iterator[StoredTensor]:
        """All tensors, but of the two that may be the table one alone, as the last and under the
        embedding's name: the first stage prefers the embedding's, others the head's. `tables` gets
        those that are there, by their own names."""
        assert self._tied_to is not None
        embedding_name, _ = self._tied_to
        for stored in source:
            if stored.name in (embedding_name, self._tensor_name) and stored.name not in tables:
                check_tensor(stored, self._parameter.shape)
                tables[stored.name] = stored
            else:
                yield stored
        of_embedding, of_head = tables.get(embedding_name), tables.get(self._tensor_name)
        table = (of_embedding or of_head) if self._part.is_first else (of_head or of_embedding)
        if table is not None:
            yield replace(table, name=embedding_name)

    @property
    def _parameter(self) -> Parameter:
        return self._linear.parameters()[self._tensor_name]
