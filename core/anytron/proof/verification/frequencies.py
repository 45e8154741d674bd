"""Look whether tokens are drawn as often as their probabilities say, within what the sampling parameters allow.

Log-probs that are right do not show how a token was chosen. So numbers that depend on the chosen token are added up
over many draws, less their expectations under the training engine's distribution before each draw. Whatever came before
a draw, such a sum stays within a few standard deviations. A model that starts from random weights finds all tokens
about equally probable, and would hide most mistakes; it samples at a lower temperature than the run.

Legend: R draws, V vocabulary, F numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from anytron.base.results import Result
from anytron.base.seeds import derive_seed
from anytron.proof.verification.comparisons import measured, tolerance
from anytron.proof.verification.engines import SAMPLES, limited
from anytron.run.rollout.turns import SingleTurns
from anytron.run.trainer.experience import assemble, make_samples

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from anytron.config.schema import RunConfig
    from anytron.run.preflight.prepare import PreparedRun
    from anytron.run.rollout.pool import RolloutPool
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.task.data.prompts import TokenizedPrompt
    from anytron.task.rewards.sample import Sample
    from anytron.workers.engines.rollout_engine import SamplingParams

DRAWS = 1024
"""About how many tokens are drawn, if no response ends early."""
HALVES = 8
"""Random halves of the vocabulary whose frequencies are compared."""
NAMES = (
    "the log-prob",
    "an end token",
    "the token before",
    *(f"random half {place} of tokens" for place in range(HALVES)),
)
_DEVIATIONS = 6.0
"""Standard deviations that a sum reaches by chance less than once in a million times."""
_LEAST_VARIANCE = 10.0
"""Variance of a sum below which it says too little."""
_COLDEST = 1e-3
"""Temperature below which no other one is tried."""
_LOGITS = 1 << 27
"""Most logits that are computed at one time."""


def check_frequencies(
    check: str,
    config: RunConfig,
    prepared: PreparedRun,
    rollout: RolloutPool,
    trainer: TrainingWorkers,
    prompts: Sequence[TokenizedPrompt],
    logits: Tensor,
) -> Result:
    """Sample many responses, and compare which tokens were drawn with their probabilities.

    Args:
        check: Name of the check.
        config: Configuration of the run.
        prepared: Sampling parameters of the run.
        rollout: The rollout engines, with the training engine's weights.
        trainer: The training ranks.
        prompts: Prompts of the run.
        logits: float32 ``[T, V]``, the training engine's after some tokens.
    """
    sampling = limited(prepared.sampling)
    sampling = replace(sampling, temperature=telling_temperature(logits, sampling.temperature))
    each = max(SAMPLES, -(-DRAWS // (len(prompts) * sampling.max_new_tokens)))
    turns = SingleTurns(rollout, sampling)
    responses = turns.finish(turns.begin(prompts, each, derive_seed(config.trainer.seed, "verify", 3)))
    samples = make_samples(prompts, responses, prepared.tokenizer)
    frequencies = Frequencies(sampling, config.model.dtype)
    for some in _some(samples, prepared.vocab_size):
        rows = trainer.logits(assemble(some, sampling.temperature)).split([_length(one) for one in some])
        for sample, logits in zip(some, rows, strict=True):
            start = len(sample.prompt_tokens)
            tokens = [*sample.prompt_tokens, *sample.response_tokens]
            frequencies.add(logits[start - 1 : -1], torch.tensor(tokens[start - 1 :], dtype=torch.int64))
    return frequencies.result(check)


def telling_temperature(logits: Tensor, temperature: float) -> float:
    """Halve a temperature until the mean entropy is at most half of the largest possible one.

    Args:
        logits: float32 ``[T, V]``.
        temperature: The run's temperature.
    """
    while _entropy(logits / temperature) > 0.5 * math.log(logits.shape[-1]) and temperature > _COLDEST:
        temperature /= 2.0
    return temperature


def _entropy(logits: Tensor) -> float:
    log_probs = logits.log_softmax(-1)
    return float(-(log_probs.exp() * log_probs).sum(-1).mean())


def _length(sample: Sample) -> int:
    return len(sample.prompt_tokens) + len(sample.response_tokens)


def _some(samples: Sequence[Sample], vocabulary: int) -> Iterator[list[Sample]]:
    """Yield a few samples at a time, in order."""
    some: list[Sample] = []
    for sample in samples:
        if some and (sum(map(_length, some)) + _length(sample)) * vocabulary > _LOGITS:
            yield some
            some = []
        some.append(sample)
    yield some


@dataclass
class Frequencies:
    """Sums over draws.

    Args:
        sampling: Sampling parameters of all draws.
        dtype: Element type of the engines' weights.

    Attributes:
        draws: Number of draws.
        strays: Number of drawn tokens that the sampling parameters do not allow.
        sums: For each of :data:`NAMES`, the sum less its expectation: float64 ``[F]``.
        variances: Variances of the sums, float64 ``[F]``.
    """

    sampling: SamplingParams
    dtype: str

    def __post_init__(self) -> None:
        self.draws, self.strays = 0, 0
        self.sums, self.variances = torch.zeros(2, len(NAMES), dtype=torch.float64)

    def add(self, logits: Tensor, tokens: Tensor) -> None:
        """Add the draws of a response.

        Args:
            logits: float32 ``[R, V]`` before each draw, not divided by the temperature.
            tokens: int64 ``[R + 1]``, the token before the response, and its tokens.
        """
        if not len(logits):
            return
        before, drawn = tokens[:-1, None], tokens[1:, None]
        log_probs = (logits.double() / self.sampling.temperature).log_softmax(-1)
        self.draws += len(drawn)
        self.strays += int((~self._allowed(log_probs, drawn)).sum())
        probs = self._narrowed(log_probs).exp()
        vocabulary = torch.arange(logits.shape[-1])
        ends = self._ends(len(vocabulary))
        halves = torch.rand(HALVES, len(vocabulary), generator=torch.Generator().manual_seed(7)) < 0.5
        numbers = [log_probs.clamp(min=-100.0), ends.expand_as(probs), vocabulary == before]
        numbers += [half.expand_as(probs) for half in halves]
        for place, number in enumerate(numbers):
            values = number.double()
            mean = (probs * values).sum(-1)
            self.sums[place] += (values.gather(-1, drawn)[:, 0] - mean).sum()
            self.variances[place] += (probs * (values - mean[:, None]).square()).sum()

    def _early(self, log_probs: Tensor) -> Tensor:
        """Mark end tokens that come too early, bool ``[R, V]``."""
        early = torch.arange(len(log_probs)) < self.sampling.min_new_tokens
        return early[:, None] & self._ends(log_probs.shape[-1])

    def _ends(self, vocabulary: int) -> Tensor:
        """Mark end tokens, bool ``[V]``."""
        return torch.isin(torch.arange(vocabulary), torch.tensor(self.sampling.end_token_ids, dtype=torch.int64))

    def _narrowed(self, log_probs: Tensor) -> Tensor:
        """Return the distribution of the draws by definition: early ends left out, then top-k, then top-p."""
        left = log_probs.masked_fill(self._early(log_probs), -math.inf).log_softmax(-1)
        if self.sampling.top_k > 0:
            least = left.topk(min(self.sampling.top_k, left.shape[-1])).values[:, -1:]
            left = left.masked_fill(left < least, -math.inf).log_softmax(-1)
        if self.sampling.top_p < 1.0:
            ordered, order = left.sort(descending=True)
            probs = ordered.exp()
            beyond = (probs.cumsum(-1) - probs) >= self.sampling.top_p
            left = left.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -math.inf).log_softmax(-1)
        return left

    def _allowed(self, log_probs: Tensor, drawn: Tensor) -> Tensor:
        """Whether drawn tokens, int64 ``[R, 1]``, may be drawn, but for rounding: bool ``[R]``."""
        early = self._early(log_probs)
        left = log_probs.masked_fill(early, -math.inf).log_softmax(-1)
        own = left.gather(-1, drawn)
        better = left > own + 2.0 * tolerance(self.dtype, log_probs[log_probs.isfinite()])
        allowed = ~early.gather(-1, drawn)[:, 0]
        if self.sampling.top_k > 0:
            allowed &= better.sum(-1) < self.sampling.top_k
        if self.sampling.top_p < 1.0:
            allowed &= (left.exp() * better).sum(-1) < self.sampling.top_p
        return allowed

    def result(self, check: str) -> Result:
        """Make the result.

        Args:
            check: Name of the check.
        """
        parameters = f"top_k {self.sampling.top_k}, top_p {self.sampling.top_p:g}"
        if self.strays:
            what = f"{self.strays} of {self.draws} drawn tokens are not allowed by {parameters}"
            return measured(check, float(self.strays), 0.0, f"{what}, min_new_tokens {self.sampling.min_new_tokens}")
        telling = self.variances >= _LEAST_VARIANCE
        if not telling.any():
            return Result(check, "skipped", f"{self.draws} draws, of which nearly all could only have one result")
        off = torch.where(telling, self.sums.abs() / self.variances.clamp(min=1e-12).sqrt(), 0.0)
        worst = int(off.argmax())
        detail = f"{self.draws} draws at temperature {self.sampling.temperature:g}: {NAMES[worst]} is off its"
        detail += f" expectation by {self.sums[worst].item():+.1f}, {off[worst].item():.1f} standard deviations"
        if off[worst] > _DEVIATIONS:
            detail += ": tokens are not drawn from the distribution that their log-probs belong to"
        return measured(check, off[worst].item(), _DEVIATIONS, detail)
