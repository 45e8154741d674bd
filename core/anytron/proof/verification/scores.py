"""The checks of ``anytron verify`` on a trainer of another framework, through a function that scores tokens.

A :data:`Score` takes ragged sequences, ``lengths`` int64 ``[B]`` and ``tokens`` int64 ``[T]``, and gives float32
``[T]`` on any device: the log-prob of each token given those before it in its sequence, at temperature 1. Its value
for the first token of a sequence is ignored. On several ranks, every rank calls the same function in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.base.results import Result
from anytron.proof.verification.comparisons import compare_observations, compare_token_outputs, largest, measured
from anytron.proof.verification.engines import Observation
from anytron.proof.verification.hugging_face import computed_by_transformers, expected_logits
from anytron.sequences.batch import RaggedBatch, TokenOutputs
from anytron.task.data.pretrained import read_hf_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import TypeAlias

    from torch import Tensor

    Score: TypeAlias = Callable[[Tensor, Tensor], Tensor]
    Gradients: TypeAlias = Callable[[Tensor, Tensor], Mapping[str, Tensor]]
    """The gradients of a mean of the tokens' log-probs, by the parameters' names; those of one rank are enough."""

LENGTHS = (9, 30, 2, 17, 12, 23)
"""Lengths of the sequences of :func:`random_sequences`: all different, one of two tokens, no multiple of eight."""


def random_sequences(vocabulary: int, seed: int = 0) -> RaggedBatch:
    """Draw sequences of :data:`LENGTHS`; all tokens but the first of each are scored.

    Args:
        vocabulary: Size of the vocabulary: token ids are drawn from 0 to ``vocabulary - 1``.
        seed: Seed of the random tokens.
    """
    lengths = torch.tensor(LENGTHS)
    scored = torch.ones(int(lengths.sum()), dtype=torch.bool)
    scored[lengths.cumsum(0) - lengths] = False
    tokens = torch.randint(vocabulary, (len(scored),), generator=torch.Generator().manual_seed(seed))
    return RaggedBatch(lengths, tokens, scored)


def transformers_logits(model_dir: Path, batch: RaggedBatch, dtype: str = "float32") -> Tensor:
    """Compute the logits to check a score against, float32 ``[T, V]`` on the host: row t predicts token t + 1.

    It is best called in a process without Megatron: some bridges change transformers (docs/upstream.md).

    Args:
        model_dir: A Hugging Face model directory.
        batch: Sequences as :func:`random_sequences` returns them.
        dtype: Name of the element type to which the weights are rounded; everything is computed in float32.

    Raises:
        EngineError: transformers cannot run the model.
        ResourceError: The host has not enough memory.
    """
    with computed_by_transformers(model_dir):
        return expected_logits(model_dir, getattr(torch, dtype), batch)


def verify_scores(
    score: Score,
    model_dir: Path,
    *,
    dtype: str = "float32",
    padded: Score | None = None,
    single: Score | None = None,
    gradients: Gradients | None = None,
) -> list[Result]:
    """Check a trainer's scoring function on random sequences; see :func:`check_scores`.

    Args:
        score: The trainer's function; if the trainer has both formats, on packed sequences.
        model_dir: Hugging Face directory of the model that the function runs.
        dtype: Name of the element type that the function computes in.
        padded: The same function on padded rows; None = its check is skipped.
        single: The same function on one rank; None = its check is skipped.
        gradients: Function that computes gradients; None = its check is skipped.

    Raises:
        EngineError: transformers cannot run the model.
        ResourceError: The host has not enough memory.
    """
    batch = random_sequences(read_hf_config(model_dir).get_text_config().vocab_size)
    logits = transformers_logits(model_dir, batch, dtype)
    return check_scores(score, batch, logits, dtype=dtype, padded=padded, single=single, gradients=gradients)


def check_scores(
    score: Score,
    batch: RaggedBatch,
    logits: Tensor,
    *,
    dtype: str,
    padded: Score | None = None,
    single: Score | None = None,
    gradients: Gradients | None = None,
) -> list[Result]:
    """Make each check whose function is given; the others are skipped.

    ``hf-log-probs`` compares log-probs with ``logits``. ``together-equals-alone`` checks that sequences of one call do
    not influence each other. ``packed-equals-padded`` and ``parallel-equals-single`` compare with ``padded`` and
    ``single``. ``finite-gradients`` checks that each gradient is finite, and that not all are 0. All other checks have
    the tolerances of ``anytron verify``.

    Args:
        score: The trainer's function; if the trainer has both formats, on packed sequences.
        batch: Sequences to score.
        logits: Logits of ``batch``, as :func:`transformers_logits` returns them.
        dtype: Name of the element type that the function computes in; tolerances follow from it.
        padded: The same function on padded rows.
        single: The same function on one rank.
        gradients: Function that computes gradients.
    """
    own = _observed(score, batch)
    outputs = {1.0: TokenOutputs(log_probs=own.outputs["log-probs"])}
    results = [
        compare_token_outputs("hf-log-probs", dtype, logits, batch, outputs, entropies=False),
        compare_observations(
            "together-equals-alone", dtype, own, _alone(score, batch), f"{len(batch.lengths)} sequences"
        ),
    ]
    for check, other, what, absent in (
        ("packed-equals-padded", padded, "thd and bshd", "no function for the other format was given"),
        ("parallel-equals-single", single, "this layout and one rank", "no function for one rank was given"),
    ):
        if other is None:
            results.append(Result(check, "skipped", absent))
        else:
            results.append(compare_observations(check, dtype, own, _observed(other, batch), what))
    return [*results, _check_gradients(gradients, batch)]


def _observed(score: Score, batch: RaggedBatch) -> Observation:
    return Observation({"log-probs": _scored(score(batch.lengths, batch.tokens), batch)}, {})


def _alone(score: Score, batch: RaggedBatch) -> Observation:
    """Score each sequence in a call of its own."""
    alone = [score(one.lengths, one.tokens).flatten().cpu() for one in _each(batch)]
    return Observation({"log-probs": _scored(torch.cat(alone), batch)}, {})


def _each(batch: RaggedBatch) -> list[RaggedBatch]:
    return [batch.select(torch.tensor([index])) for index in range(batch.num_sequences)]


def _scored(values: Tensor, batch: RaggedBatch) -> Tensor:
    if values.shape != batch.tokens.shape:
        shape = tuple(values.shape)
        message = f"a score function must return shape ({len(batch.tokens)},), a log-prob for each token; it is {shape}"
        raise ValueError(message)
    return values.detach().float().cpu().where(batch.response_mask, 0.0)


def _check_gradients(gradients: Gradients | None, batch: RaggedBatch) -> Result:
    check = "finite-gradients"
    if gradients is None:
        return Result(check, "skipped", "no function that computes gradients was given")
    found = gradients(batch.lengths, batch.tokens)
    wrong = [name for name, gradient in found.items() if not bool(gradient.isfinite().all())]
    if wrong:
        return Result(
            check, "failed", f"{len(wrong)} of {len(found)} gradients are not finite; the first is {wrong[0]}"
        )
    size = max((largest(gradient) for gradient in found.values()), default=0.0)
    if size == 0.0:
        return Result(
            check, "failed", f"all of {len(found)} gradients are 0: the loss does not depend on the parameters"
        )
    return measured(check, 0.0, 0.0, f"{len(found)} parameters, the largest entry is {size:.3g}")
