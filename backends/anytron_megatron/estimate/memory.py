"""The memory of a model on a rank, in bytes: parameters, gradients, optimizer state, and activations.

Mixed precision with Adam keeps, for each parameter, a float32 copy and two float32 moments; with the distributed
optimizer, each data-parallel replica keeps only a part of these (Rajbhandari et al., arXiv:1910.02054, 3.1 and 5.1; the
table "Theoretical memory savings" in Megatron-Core's page on its distributed optimizer). Every replica keeps all
gradients, in float32, because Megatron's distributed optimizer divides the state but not the gradient buffers.

The activations that a forward pass keeps for the backward pass are counted as in Korthikanti et al. (arXiv:2205.05198,
4), for current layers: each linear layer keeps its input, a norm its input, a gated activation its input, attention its
queries, keys and values (a fused kernel keeps no scores). Tensor parallelism divides split activations; sequence
parallelism divides the rest too. Full recomputation keeps each layer's input, and all activations of one layer at a
time. Pipeline stage s of p keeps p - s micro-batches (1F1B; section 4.2.3 there, with the factor of interleaved
schedules).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anytron_megatron.estimate.tensors import COLUMN, ROW, Piece, chosen_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from anytron.base.traits import ParallelSizes
    from anytron.config.running import OptimizerSection


GRADIENT_BYTES = 4
MASTER_BYTES, MOMENTS_BYTES = 4, 8


@dataclass(frozen=True)
class Held:
    """Numbers of parameter elements on one rank.

    Attributes:
        dense: Number of elements outside of routed experts.
        expert: Number of elements in routed experts.
    """

    dense: int
    expert: int

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Held:
        """Count the elements of a rank's pieces."""
        sizes = [(piece.size, piece.expert) for piece in pieces]
        return cls(sum(size for size, expert in sizes if not expert), sum(size for size, expert in sizes if expert))

    @property
    def total(self) -> int:
        """Elements inside and outside of routed experts."""
        return self.dense + self.expert


def optimizer_bytes(held: Held, optimizer: OptimizerSection, *, dtype: str, replicas: tuple[int, int]) -> int:
    """Compute the bytes of optimizer state on a rank: the mean over the ranks that share the state, rounded up.

    Args:
        held: Trained parameters on the rank.
        optimizer: Adam, or SGD without momentum.
        dtype: Element type of the parameters.
        replicas: Numbers of ranks between which the state of dense and of expert parameters is divided; (1, 1) = each
            rank has the whole state.
    """
    each = (MASTER_BYTES if dtype != "float32" else 0) + (MOMENTS_BYTES if optimizer.name == "adam" else 0)
    return math.ceil(held.dense * each / replicas[0]) + math.ceil(held.expert * each / replicas[1])


def sharing_ranks(sizes: ParallelSizes, *, distributed: bool) -> tuple[int, int]:
    """Return how many ranks share an optimizer's state: the number for dense parameters, and the number for experts.

    Each number is 1 without Megatron's distributed optimizer (``distributed``).
    """
    if not distributed:
        return 1, 1
    same = sizes.data * sizes.context
    return same, max(1, same * sizes.tensor // (sizes.expert * sizes.expert_tensor))


_SHARED_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Layer -> another layer with the same input, which is kept and counted once."""


def kept_elements(pieces: Iterable[Piece], config: Mapping[str, Any], sizes: ParallelSizes) -> dict[int, float]:
    """Count the activations that each layer of a stage keeps for the backward pass, in elements per token, by layer.

    Args:
        pieces: Tensors of the model on the stage.
        config: The Hugging Face config of the language model.
        sizes: The parallel sizes.
    """
    hidden, whole = config.get("hidden_size", 0), 1 if not sizes.sequence_parallel else sizes.tensor
    chosen = chosen_share(config)
    layers: dict[int, float] = defaultdict(lambda: 2 * hidden / whole)  # the inputs of two norms
    for piece in pieces:
        if piece.layer is None or len(piece.shape) < 2:
            continue
        # Rows of an expert's matrix, once for each token that it gets; over all experts of a rank, the chosen ones.
        times = chosen if piece.expert else 1.0
        count = piece.shape[0] if len(piece.shape) == 3 else 1
        outputs, inputs = piece.shape[-2], piece.shape[-1]
        split = sizes.expert_tensor if piece.expert else sizes.tensor
        kept = 0.0
        if piece.kind in ROW:
            kept = inputs / split
        elif piece.kind not in _SHARED_INPUT:
            kept = inputs if piece.expert else inputs / whole
        if piece.kind in COLUMN:
            kept += outputs / split  # of gated activations, and of attention
        layers[piece.layer] += kept * times * count
    return dict(layers)


def activation_bytes(
    kept: Mapping[int, float],
    *,
    tokens: int,
    element: int,
    hidden: int,
    sizes: ParallelSizes,
    stage: int,
    recompute: str,
) -> int:
    """Compute the peak activation memory of a pipeline stage, in bytes.

    Args:
        kept: Elements that each layer keeps for one token, from :func:`kept_elements`.
        tokens: Number of tokens of a micro-batch on this rank.
        element: Bytes of an element.
        hidden: Size of the hidden states.
        sizes: The parallel sizes.
        stage: Number of the pipeline stage.
        recompute: ``engine.recompute``.
    """
    under_way = float(sizes.pipeline - stage)
    if sizes.virtual_pipeline > 1:
        under_way += (sizes.pipeline - 1) / sizes.virtual_pipeline
    if recompute == "full":
        inputs = hidden / (sizes.tensor if sizes.sequence_parallel else 1) * len(kept)
        per_token = under_way * inputs + max(kept.values(), default=0.0)
    else:
        per_token = under_way * sum(kept.values())
    return int(per_token * tokens * element)


def tile_bytes(*, tokens: int, chunk_tokens: int, entries: int, element: int, hidden: int, capped: bool) -> int:
    """Compute the bytes that the log-prob kernel needs; it makes one tile of the logits at a time.

    As in :mod:`anytron.kernels.log_prob`, a tile has as many logits as ``chunk_tokens`` tokens have, or 1024 per token
    if that is more. There are two tiles in float32, a third if the logits are capped, and one in the weight's type if
    that is not float32. The backward pass also needs the gradient of the hidden states in float32 and the gradient of
    the weight.

    Args:
        tokens: Number of tokens of a micro-batch on this rank.
        chunk_tokens: ``engine.log_prob_chunk_tokens``.
        entries: Rows of the output layer's weight on this rank.
        element: Bytes of an element of the weight.
        hidden: Size of the hidden states.
        capped: Whether the model limits its logits (``final_logit_softcapping``).
    """
    tile = min(tokens * entries, max(chunk_tokens * entries, 1024 * tokens))
    of_a_logit = 4 * (3 if capped else 2) + (element if element < 4 else 0)
    return tile * of_a_logit + tokens * hidden * 4 + entries * hidden * element
