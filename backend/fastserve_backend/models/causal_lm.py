"""What every architecture's model class is, with all but its layers and how they are run."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from fastserve_backend.models.attention_batch import AttentionBatch
from fastserve_backend.models.layers import prefixed
from fastserve_backend.models.lm_head import LMHead
from fastserve_backend.models.model_part import ModelPart
from fastserve_backend.models.weights import Parameter, StoredTensor, WeightSource, some_of

_log = logging.getLogger(__name__)


class CausalLM(ABC):
    """A stage of a decoder and its LM head. Load weights once, then call under
    `torch.inference_mode`.

    Args:
        prefixes: of checkpoint names, left out below; each where it is there, one after the other.
        computed: ends of the names of tensors that older checkpoints hold although they follow
            from the configuration.
        other_modules: first parts of names that the architecture has in other configurations.
        first, last: what the first and the last stage alone want: embeddings, final norm.
        layers: what each layer of the part wants, in order, by names below "layers.<number>".
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
        """Every tensor that the stage wants, by name; a tied head's as `LMHead.parameters` says."""
        return self._parameters

    def load_weights(self, source: WeightSource, elsewhere: Collection[str] = ()) -> None:
        """Take all weights; tensors named in `elsewhere` may be there for other stages.

        What is no part of the architecture, such as another head or an encoder of images, is left
        with a warning. Raises ModelError for missing and misshapen tensors, and for unexpected
        ones within the architecture's modules: the model would compute without them.
        """
        self._head.load_model(self._parameters, self._canonical(source), elsewhere)

    @abstractmethod
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: Tensor,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Run the step's T tokens: token_ids and positions int64 [T] -> hidden states [T, hidden].

        Writes their keys and values to the cache `kv`, [blocks, layers, 2, kv_heads, block_size,
        head_dim]. `hidden` is what the stage before returned; the first has none.
        """

    def logits(self, hidden: Tensor) -> Tensor | None:
        """hidden [R, hidden], rows of what the last stage's `forward` returned -> logits [R,
        vocab]; None but on the first rank of the stage."""
        return self._head(hidden)

    def _canonical(self, source: WeightSource) -> Iterator[StoredTensor]:
        unused = []
        for stored in source:
            if stored.name.endswith(self._computed):
                continue
            name = stored.name
            for prefix in self._prefixes:
                name = name.removeprefix(prefix)
            if _module(name) in self._modules:
                yield replace(stored, name=name)
            else:
                unused.append(stored.name)
        if unused and self._part.is_first and self._part.tensor.is_first:  # one rank says it
            _log.warning("checkpoint tensors that the model does not use: %s", some_of(unused))


def _module(name: str) -> str:
    """The part of the model that a tensor belongs to: the first part of its name."""
    return name.partition(".")[0]
