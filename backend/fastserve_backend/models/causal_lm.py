"""`CausalLM`: the base of every model, and `LMHead`.

`CausalLM` loads the weights, runs a step and computes its logits. An architecture adds its layers
and `forward`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from fastserve_kernels import ops
from torch import Tensor

from fastserve_backend.models.attention import AttentionBatch
from fastserve_backend.models.layers import ColumnLinear, Linear, VocabEmbedding, prefixed
from fastserve_backend.models.model_part import ModelPart
from fastserve_backend.models.weights import (
    Parameter,
    StoredTensor,
    StoredWeight,
    WeightSource,
    check_tensor,
    load_parameters,
    some_of,
)

_log = logging.getLogger(__name__)


class CausalLM(ABC):
    """A stage of a decoder, with its LM head. Load the weights once, then call it under
    `torch.inference_mode`.

    Args:
        prefixes: prefixes that are removed from checkpoint names, one after the other, where they
            occur. All names below are without them.
        computed: endings of names that are ignored: older checkpoints hold tensors that follow from
            the configuration.
        other_modules: modules that the architecture has in other configurations. (A module is the
            first part of a name.)
        first, last: parameters that only the first or the last stage has: embeddings, final norm.
        layers: the parameters of each layer of the part, in order, named below "layers.<number>".
    """

    def __init__(
        self,
        part: ModelPart,
        *,
        prefixes: tuple[str, ...],
        computed: tuple[str, ...] = (),
        other_modules: tuple[str, ...] = (),
        first: Mapping[str, Parameter],
        layers: Iterable[Mapping[str, Parameter]],
        last: Mapping[str, Parameter],
        head: LMHead,
    ) -> None:
        self._part, self._head = part, head
        self._prefixes, self._computed = prefixes, computed
        modules = (_module(name) for name in (*first, *last, head.name))
        self._modules = {"layers", *modules, *other_modules}
        self._parameters = dict(first) if part.is_first else {}
        for index, parameters in zip(part.layers, layers, strict=True):
            self._parameters |= prefixed(f"layers.{index}", parameters)
        if part.is_last:
            self._parameters |= last
        self._parameters |= head.parameters()

    def parameters(self) -> dict[str, Parameter]:
        """Every tensor that the stage needs, by name. For a tied head see `LMHead.parameters`."""
        return self._parameters

    def load_weights(self, source: WeightSource, elsewhere: Collection[str] = ()) -> None:
        """Load all weights. Tensors named in `elsewhere` may be there for other stages.

        Tensors outside the architecture's modules, such as an image encoder's, are skipped with a
        warning.

        Raises:
            ModelError: a tensor is missing or of a wrong shape, or one within the architecture's
                modules is unexpected: the model would compute without it.
        """
        self._head.load_stage(self._parameters, self._canonical(source), elsewhere)

    @abstractmethod
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: Tensor,
        hidden: Tensor | None = None,
        sampled: Tensor | None = None,
    ) -> Tensor | None:
        """Run the step's T tokens: token_ids and positions int64 [T] -> `_output` of their hidden
        states [T, hidden].

        Writes their keys and values to the cache `kv`, [blocks, layers, 2, kv_heads, block_size,
        head_dim].

        Args:
            hidden: what the stage before returned, [T, hidden]; None in the first stage.
            sampled: int64 [R], in ascending order: the rows whose logits are wanted.
        """

    def _output(self, hidden: Tensor, sampled: Tensor | None) -> Tensor | None:
        """What `forward` returns: hidden states; in the last stage `logits`, if `sampled` asks."""
        if sampled is None or not self._part.is_last:
            return hidden
        return self.logits(hidden, sampled)

    def logits(self, hidden: Tensor, sampled: Tensor | None = None) -> Tensor | None:
        """Logits of rows of the last stage's hidden states: [T, hidden] -> [R, vocab].
        None if there are no rows, and on all ranks of the stage but the first.

        Args:
            sampled: int64 [R], in ascending order: the rows; None: all.
        """
        if sampled is not None and len(sampled) != len(hidden):
            hidden = ops.lookup_rows(hidden, sampled)  # a prefill needs only its last token's
        return self._head(hidden) if len(hidden) else None

    def _own_name(self, name: str) -> str:
        """The name by which the architecture knows a checkpoint's tensor, without its prefixes."""
        return name

    def _canonical(self, source: WeightSource) -> Iterator[StoredTensor]:
        unused = []
        for stored in source:
            if stored.name.endswith(self._computed):
                continue
            name = stored.name
            for prefix in self._prefixes:
                name = name.removeprefix(prefix)
            name = self._own_name(name)
            if _module(name) in self._modules:
                yield replace(stored, name=name)
            else:
                unused.append(stored.name)
        if unused and self._part.is_first and self._part.tensor.is_first:  # only one rank warns
            _log.warning("checkpoint tensors that the model does not use: %s", some_of(unused))


def _are_equal(own: StoredWeight, table: Tensor | ops.QuantizedLinear) -> bool:
    """Whether they surely have the same values. Quantized tables are not compared."""
    if isinstance(own, Tensor) and isinstance(table, Tensor):
        return torch.equal(own.to(table), table)
    return False


def _module(name: str) -> str:
    """The module of a tensor: the first part of its name."""
    return name.partition(".")[0]


class LMHead:
    """Turns hidden states into logits, in the last stage. Its ranks divide the vocabulary.

    Other stages have an `LMHead` too: it knows which tensors they need not load.

    Args:
        name: of its checkpoint layer.
        tied_to: the name of the embedding's tensor, and the embedding whose table the head shares;
            None if the head has a table of its own.
        projection: a layer of the architecture that comes before the head.
        has_bias: whether it adds a bias. A tied head has none.
        factor: of the logits.
        soft_cap: c turns each logit l into c · tanh(l / c), after the factor.
    """

    def __init__(
        self,
        name: str,
        hidden: int,
        vocab: int,
        *,
        tied_to: tuple[str, VocabEmbedding] | None,
        part: ModelPart,
        projection: Linear | None = None,
        has_bias: bool = False,
        factor: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        self.name = name
        self._projection = projection
        self._factor, self._soft_cap = factor, soft_cap
        self._linear = ColumnLinear(hidden, {name: vocab}, bias=has_bias, part=part)
        self._tensor_name = f"{name}.weight"
        self._vocab = vocab
        self._tied_to = tied_to
        self._part = part

    def parameters(self) -> dict[str, Parameter]:
        """The head's table, if this stage must load it.

        A tied head uses the embedding's table. Only a last stage that has no embedding loads it.
        """
        if not self._part.is_last:
            return {}
        if self._tied_to is None:
            return self._linear.parameters()
        return {} if self._part.is_first else {self._tied_to[0]: self._parameter}

    def __call__(self, hidden: Tensor) -> Tensor | None:
        """hidden [R, hidden] -> logits [R, vocab] on the first rank of the stage, None on the
        others."""
        if self._projection is not None:
            hidden = self._projection(hidden)
        logits = self._part.tensor.gather_columns(self._linear(hidden), self._vocab)
        if logits is None:
            return None
        if self._factor != 1.0:
            ops.scale_(logits, self._factor)
        if self._soft_cap is not None:
            ops.soft_cap_(logits, self._soft_cap)
        return logits

    def load_stage(
        self, parameters: Mapping[str, Parameter], source: WeightSource, elsewhere: Collection[str]
    ) -> None:
        """Load all of the stage's weights, and tie the head (see `load_parameters`).

        The table of a tied head may be stored under the embedding's name, the head's, or both. If
        both are there and differ, the head is not tied after all (as in transformers).

        Raises:
            ModelError: a tensor is missing, unexpected or of a wrong shape.
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
            if not _are_equal(own, embedding.table):
                self._parameter.load(own)
                return
        self._linear.tie(embedding.table)

    def _one_table(
        self, source: WeightSource, tables: dict[str, StoredTensor]
    ) -> Iterator[StoredTensor]:
        """The source's tensors with a single table, which comes last, under the embedding's name.

        If both names are there, the first stage takes the embedding's table, other stages the
        head's. The tables found are put into `tables`, by their own names.
        """
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
