"""Make a step's experience: responses with rewards, and responses that replace groups without signal (equal rewards).

Such replacement is DAPO's dynamic sampling (arXiv:2503.14476, section 3.2), round by round until a step has as many
groups as prompts were asked for::

    round 1: 32 prompts -> 20 groups with signal
    round 2: 12 prompts ->  7
    round 3:  5 prompts ->  5        49 groups are drawn, 17 dropped, 32 trained on

The drawn groups depend on the data, the seeds and the weights alone: a resumed run draws the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from anytron.algorithms.advantages import by_group, differ, have_signal, overlong_penalties
from anytron.base.errors import DataError
from anytron.base.packed import concatenated
from anytron.sequences.batch import RaggedBatch
from anytron.task.data.decoding import decode_responses
from anytron.task.data.thoughts import opened
from anytron.task.rewards.sample import Sample
from anytron.task.rewards.scoring import RewardScores, joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from anytron.config.schema import RunConfig
    from anytron.record.tracking.progress import Clock
    from anytron.record.tracking.run_directory import RunDirectory
    from anytron.run.rollout.prefetch import RolloutPrefetch
    from anytron.task.data.prompts import TokenizedPrompt
    from anytron.task.rewards.scoring import RewardWorkers
    from anytron.workers.engines.rollout_engine import Response

    Numbers = Sequence[float] | npt.NDArray[np.generic]

TAIL = 16
"""Largest number of tokens of an opening tag, such as ``<think>``, and the white space after it."""
_AT_ONCE = 1024
"""Number of responses that are examined at once."""


@dataclass(frozen=True)
class Experience:
    """All N samples of a step, including those that are not trained on.

    Attributes:
        samples: The samples; samples of one prompt are adjacent.
        groups: int64 ``[N]``, the number of each sample's prompt, from 0, ascending.
        rewards: Results of the reward functions.
        penalties: float32 ``[N]``, penalties for length (``algorithm.overlong_buffer``).
        used: bool ``[N]``, True = the sample is trained on. Other samples count neither in the loss nor in
            comparisons within their groups.
        metrics: Further metrics of the step.
    """

    samples: Sequence[Sample]
    groups: Tensor
    rewards: RewardScores
    penalties: Tensor
    used: Tensor
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of samples that are trained on; if there are none, the number of all samples."""
        return int(self.used.sum()) or len(self.samples)

    @property
    def used_groups(self) -> int:
        """Number of prompts with a sample that is trained on."""
        return len(self.groups[self.used].unique())

    @property
    def teaches(self) -> bool:
        """Whether any token is trained on; tokens that an environment wrote never are."""
        return any(sample.own_tokens for sample, one in zip(self.samples, self.used.tolist(), strict=True) if one)

    @property
    def used_rewards(self) -> Tensor:
        """Reward, penalties included, of each sequence of :meth:`batch`, float32 ``[B]``."""
        return (self.rewards.total + self.penalties)[self.used].repeat_interleave(self._conversations)

    def batch(self, temperature: float) -> RaggedBatch:
        """Assemble the samples that are trained on; each conversation of a sample is a sequence.

        Args:
            temperature: Sampling temperature.
        """
        counts = self._conversations
        groups = self.groups[self.used].repeat_interleave(counts)
        batch = assemble([one for sample in self._used for one in sample.conversations], temperature, groups)
        if int(counts.sum()) == len(counts):
            return batch
        return replace(batch, responses=torch.arange(len(counts)).repeat_interleave(counts))

    @property
    def _used(self) -> list[Sample]:
        return [sample for sample, one in zip(self.samples, self.used.tolist(), strict=True) if one]

    @property
    def _conversations(self) -> Tensor:
        """Number of conversations of each sample that is trained on, int64."""
        return torch.tensor([len(sample.conversations) for sample in self._used], dtype=torch.int64)


class ExperienceMaker:
    """Makes the experience of each step.

    Args:
        config: The run's configuration.
        prefetch: Source of prompts and responses.
        score: Scorer of the responses.
        tokenizer: A Hugging Face tokenizer.
        run: Run directory, to which samples are written.
    """

    def __init__(
        self, config: RunConfig, prefetch: RolloutPrefetch, score: RewardWorkers, tokenizer: Any, run: RunDirectory
    ) -> None:
        self._config, self._prefetch, self._score, self._tokenizer, self._run = config, prefetch, score, tokenizer, run
        known = list(tokenizer.get_vocab().values())
        self._known = np.zeros(max(known, default=-1) + 2, np.bool_)
        self._known[known] = True  # and the last entry is for all ids beyond: it stays False

    def make(self, step: int, clock: Clock) -> Experience:
        """Draw prompts, generate responses and score them, in as many rounds as necessary.

        Args:
            step: Counted from 1.
            clock: Clock of the step.

        Raises:
            DataError: A reward fails.
        """
        algorithm, missing = self._config.algorithm, self._config.data.prompts_per_step
        rounds = algorithm.dynamic_sampling_rounds if algorithm.dynamic_sampling else 1
        found: list[Experience] = []
        memory: dict[str, float] = {}
        while missing > 0 and len(found) < rounds:
            with clock.measure("rollout"):
                prompts, responses = self._prefetch.take(step, len(found) + 1, missing)
                if len(found) + 1 == rounds:
                    memory = self._prefetch.move_on(step)  # before rewards: both take their time
            samples = make_samples(prompts, responses, self._tokenizer)
            with clock.measure("reward"):
                rewards = self._rewards(step, samples, first=not found)
            sizes = torch.tensor([len(group) for group in responses])
            found.append(_round(samples, torch.arange(len(sizes)).repeat_interleave(sizes), rewards, self._config))
            missing -= found[-1].used_groups
        if len(found) < rounds:
            with clock.measure("rollout"):
                memory = self._prefetch.move_on(step)
        whole = _step(found, self._config)
        self._run.write_samples(step, whole.samples, whole.rewards)
        unknown = self._unknown([one.response_tokens for sample in whole.samples for one in sample.conversations])
        return replace(whole, metrics={**whole.metrics, **memory, "response/unknown_tokens": unknown})

    def _unknown(self, responses: Sequence[Sequence[int]]) -> int:
        """Count the tokens that the tokenizer does not have."""
        count = 0
        for begin in range(0, len(responses), _AT_ONCE):
            ids = concatenated(responses[begin : begin + _AT_ONCE], np.int32).view(np.uint32)  # -1 is a large id
            count += len(ids) - int(np.count_nonzero(self._known.take(ids, mode="clip")))
        return count

    def _rewards(self, step: int, samples: Sequence[Sample], *, first: bool) -> RewardScores:
        try:
            return self._score(samples, more=not first)
        except DataError:
            self._run.write_samples(step, samples, rewards=None)
            raise


def _round(samples: Sequence[Sample], groups: Tensor, rewards: RewardScores, config: RunConfig) -> Experience:
    """Decide which samples of a round are trained on."""
    algorithm = config.algorithm
    used = ~rewards.total.isnan()
    if algorithm.overlong_masking:
        used &= torch.tensor([sample.finished for sample in samples])
    if algorithm.dynamic_sampling:
        used &= have_signal(rewards.total.masked_fill(~used, torch.nan), groups)
    penalties = torch.zeros(len(samples))
    if algorithm.overlong_buffer is not None:
        lengths = torch.tensor([sample.own_tokens for sample in samples])
        shape = overlong_penalties(lengths, config.rollout.max_new_tokens, algorithm.overlong_buffer)
        penalties = algorithm.overlong_penalty * shape
    return Experience(samples, groups, rewards, penalties, used)


def _step(found: Sequence[Experience], config: RunConfig) -> Experience:
    """Join the rounds of a step."""
    groups, drawn = [], 0
    for one in found:
        groups.append(one.groups + drawn)
        drawn += int(one.groups[-1]) + 1
    kept = sum(one.used_groups for one in found)
    penalties = torch.cat([one.penalties for one in found])
    used = torch.cat([one.used for one in found])
    rewards = joined([one.rewards for one in found])
    without = _without_signal((rewards.total + penalties).masked_fill(~used, torch.nan), torch.cat(groups), config)
    metrics: dict[str, float] = {"reward/groups_without_signal": without}
    if config.algorithm.dynamic_sampling:
        metrics |= {
            "sampling/rounds": len(found),
            "sampling/groups_drawn": drawn,
            "sampling/groups_dropped": drawn - kept,
            "sampling/groups_missing": config.data.prompts_per_step - kept,
            "sampling/no_signal_fraction": (drawn - kept) / drawn,
        }
    if config.algorithm.overlong_buffer is not None:
        metrics["reward/overlong_penalty"] = penalties.mean().item()
    return Experience(
        samples=[sample for one in found for sample in one.samples],
        groups=torch.cat(groups),
        rewards=rewards,
        penalties=penalties,
        used=used,
        metrics=metrics,
    )


def _without_signal(rewards: Tensor, groups: Tensor, config: RunConfig) -> int:
    """Count the groups whose rewards teach nothing.

    In such a group no sample is trained on; or the algorithm compares samples of a group, and all rewards are equal.

    Args:
        rewards: float32 ``[N]``, penalties included; NaN for a sample that is not trained on.
        groups: int64 ``[N]``, the number of each sample's group.
        config: The run's configuration. With a teacher, groups with equal rewards are not counted: they teach too.
    """
    rows = by_group(rewards, groups)
    compared = config.algorithm.compares_a_group and config.teacher is None
    return int((~differ(rows) if compared else rows.isnan().all(dim=1)).sum())


def make_samples(
    prompts: Sequence[TokenizedPrompt], responses: Sequence[Sequence[Response]], tokenizer: Any
) -> list[Sample]:
    """Join each prompt with its responses, decoded (:func:`anytron.task.data.decoding.decode_responses`).

    Args:
        prompts: P prompts.
        responses: One or more responses for each prompt.
        tokenizer: A Hugging Face tokenizer.

    Returns:
        The samples; samples of one prompt are adjacent and share its images.
    """
    whole = [(prompt, response) for prompt, group in zip(prompts, responses, strict=True) for response in group]
    pairs = [(prompt, one) for prompt, response in whole for one in (response, *response.others)]
    texts = decode_responses(tokenizer, [response.tokens for _, response in pairs])

    def text_of(prompt: TokenizedPrompt, response: Response) -> str:
        return prompt.text if response.prompt is None else str(tokenizer.decode(list(response.prompt)))

    made = iter(
        Sample(
            prompt_id=prompt.id,
            prompt_text=text_of(prompt, response),
            response_text=text,
            prompt_tokens=prompt.tokens if response.prompt is None else response.prompt,
            response_tokens=response.tokens,
            log_probs=response.log_probs,
            finished=response.finished,
            data=prompt.data,
            images=prompt.images,
            patches=prompt.patches if response.prompt is None else response.images,
            response_mask=response.response_mask,
            environment=response.environment,
            routing=response.routing,
            opened=_opened(text_of(prompt, response), response, tokenizer),
        )
        for (prompt, response), text in zip(pairs, texts, strict=True)
    )
    return [replace(next(made), others=tuple(islice(made, len(response.others)))) for _, response in whole]


def _opened(prompt: str, response: Response, tokenizer: Any) -> str:
    """The opening tag, such as ``<think>``, right before the model's last turn; empty if there is none."""
    mask = response.response_mask
    if mask is None or all(mask):
        return opened(prompt)
    end = len(mask) - next((place for place, own in enumerate(reversed(mask)) if not own), 0)
    return opened(tokenizer.decode(list(response.tokens[max(0, end - TAIL) : end])))


def assemble(samples: Sequence[Sample], temperature: float, groups: Tensor | None = None) -> RaggedBatch:
    """Concatenate samples into a batch with int32 tokens; a response may be empty.

    Args:
        samples: B samples.
        temperature: Sampling temperature.
        groups: int64 ``[B]``, the number of each sample's prompt (:attr:`RaggedBatch.groups`); None = no two share one.
    """
    images = tuple(sample.patches for sample in samples)
    different = {id(sample.prompt_tokens): sample.prompt_tokens for sample in samples}  # samples share them
    arrays = {key: np.array(prompt, np.int32) for key, prompt in different.items()}
    prompts = [arrays[id(sample.prompt_tokens)] for sample in samples]
    lengths = [len(prompt) + len(sample.response_tokens) for prompt, sample in zip(prompts, samples, strict=True)]
    true, false, zero = (np.full(max(lengths, default=0), value) for value in (True, False, np.float32(0.0)))
    own = (
        true[: len(sample.response_tokens)] if sample.response_mask is None else sample.response_mask
        for sample in samples
    )
    return RaggedBatch(
        lengths=torch.tensor(lengths),
        tokens=_joined(prompts, (sample.response_tokens for sample in samples), np.int32),
        response_mask=_joined((false[: len(prompt)] for prompt in prompts), own, np.bool_),
        temperature=temperature,
        groups=groups,
        rollout_log_probs=_joined(
            (zero[: len(prompt)] for prompt in prompts), (sample.log_probs for sample in samples), np.float32
        ),
        routing=_joined_routing(samples),
        images=images if any(patches is not None for patches in images) else None,
    )


def assemble_examples(examples: Sequence[TokenizedPrompt]) -> RaggedBatch:
    """Concatenate examples of supervised fine-tuning into a batch.

    Args:
        examples: B prompts with their ``response_mask``.
    """
    tokens = chain.from_iterable(example.tokens for example in examples)
    mask = chain.from_iterable(example.response_mask or () for example in examples)
    images = tuple(example.patches for example in examples)
    return RaggedBatch(
        lengths=torch.tensor([len(example.tokens) for example in examples]),
        tokens=torch.tensor(list(tokens), dtype=torch.int64),
        response_mask=torch.tensor(list(mask), dtype=torch.bool),
        images=images if any(patches is not None for patches in images) else None,
    )


def _joined(prompts: Iterable[Numbers], responses: Iterable[Numbers], dtype: type[np.generic]) -> Tensor:
    """Concatenate numbers of each prompt and of its response, as ``dtype``."""
    return torch.from_numpy(concatenated(chain.from_iterable(zip(prompts, responses, strict=True)), dtype))


def _joined_routing(samples: Sequence[Sample]) -> Tensor | None:
    """Join the samples' routing, one row for each token; None if rollout engines report no routing.

    They report none for the last token of a sequence, nor for observations after which the model wrote nothing. These
    tokens are routed to the first experts, which has no effect, because nothing is learnt from them.
    """
    known = next((sample.routing for sample in samples if sample.routing is not None), None)
    if known is None:
        return None
    first = torch.arange(known.shape[-1], dtype=known.dtype)
    rows = []
    for sample in samples:
        told = known[:0] if sample.routing is None else sample.routing
        untold = len(sample.prompt_tokens) + len(sample.response_tokens) - len(told)
        rows += [told, first.expand(untold, known.shape[1], -1)]
    return torch.cat(rows)
