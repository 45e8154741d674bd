"""What a forward pass keeps for the backward pass, in bytes, on one rank: an estimate.

Counted as in Korthikanti et al. (arXiv:2205.05198, 4), for layers of today: each linear layer keeps its input, a norm
its input, a gated activation its input, attention its queries, keys and values (a fused kernel keeps no scores). With
tensor parallelism what is split is divided; with sequence parallelism the rest is too. Full recomputation keeps each
layer's input, and one layer at a time. Pipeline stage s of p keeps p - s micro-batches (1F1B; section 4.2.3 there, with
the factor of interleaved schedules).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from anytron_megatron.estimate.sharding import COLUMN, ROW, Piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from anytron.base.traits import ParallelSizes


_SHARED_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Layers that read what another one reads, which is kept once."""


def kept_elements(pieces: Iterable[Piece], config: Mapping[str, Any], sizes: ParallelSizes) -> dict[int, float]:
    """Count the numbers that each layer of a stage keeps of one token.

    Args:
        pieces: Of the stage.
        config: The Hugging Face config of the language model.
        sizes: The parallel sizes.
    """
    hidden, whole = config.get("hidden_size", 0), 1 if not sizes.sequence_parallel else sizes.tensor
    chosen = config.get("num_experts_per_tok") or 1
    experts = config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts") or 1
    layers: dict[int, float] = defaultdict(lambda: 2 * hidden / whole)  # the inputs of two norms
    for piece in pieces:
        if piece.layer is None or len(piece.shape) < 2:
            continue
        # Rows of an expert's matrix, once for each token that it gets; over all experts of a rank, the chosen ones.
        times = chosen / experts if piece.expert else 1.0
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
    """Bytes that a stage keeps at its fullest.

    Args:
        kept: As :func:`kept_elements` counts it.
        tokens: Of a micro-batch on this rank.
        element: Bytes of a number.
        hidden: Size of the hidden states.
        sizes: The parallel sizes.
        stage: Which pipeline stage.
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


def tile_bytes(*, tokens: int, chunk_tokens: int, entries: int, element: int, hidden: int) -> int:
    """Bytes of log-probs without logits: two tiles in float32 and one in the weight's type, and the gradients.

    As :mod:`anytron.kernels.log_prob` says: a tile has as many logits as ``chunk_tokens`` tokens have, or 1024 of each
    token if that is more. The backward pass adds the hidden states' gradient in float32, and the weight's.
    """
    tile = min(tokens * entries, max(chunk_tokens * entries, 1024 * tokens))
    return tile * (4 + 4 + (element if element < 4 else 0)) + tokens * hidden * 4 + entries * hidden * element
