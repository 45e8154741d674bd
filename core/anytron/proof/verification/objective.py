"""Compare advantages and losses with their definitions, and ask which numbers they depend on. Needs no engine.

The sequences are made up so that each kind of mistake shows: groups of three sizes, one with rewards that hardly
differ; a response of two conversations; an empty response; responses in which an environment wrote some tokens; and
ratios on both sides of every limit. Numbers at tokens that the policy did not write are large: they must not count.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from anytron.algorithms.losses import SupervisedLoss
from anytron.algorithms.policy_loss import PolicyLoss
from anytron.algorithms.registered import with_advantages
from anytron.proof.verification import definitions
from anytron.proof.verification.comparisons import largest, measured
from anytron.proof.verification.definitions import Row
from anytron.run.trainer.updates import UpdatePlan
from anytron.sequences.batch import RaggedBatch, TokenOutputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from anytron.algorithms.contract import LossFunction
    from anytron.base.results import Result
    from anytron.config.algorithm import AlgorithmSection
    from anytron.config.schema import RunConfig

_GROUPS = (0, 0, 0, 0, 1, 1, 1, 2, 2, 3)
_RESPONSES = (0, 0, 1, 2, 3, 4, 5, 6, 7, 8)
_REWARDS = (1.0, 1.0, 0.0, 0.25, 0.5, 0.5008, 0.4995, 0.75, -1.0, 0.5)
_OWN = ("00111", "000110011", "0011", "01", "00", "0011111", "00101", "0011001", "000111", "0001111111")
"""By row, the tokens that the policy wrote: 1. One response is empty."""
_RATIOS = (-1.9, -0.43, -0.11, 0.07, 0.37, 1.7)
"""Logarithms of the policy's ratios, in turn."""
_ELSEWHERE = 1e3
"""Size of numbers at tokens that do not count."""
_TOLERANCE = 1e-4
_STEP = 1e-6


def check_advantages(check: str, config: RunConfig) -> Result:
    """Compare the advantages of made-up responses with their definition; a user's estimator is asked for influence.

    Args:
        check: Name of the check.
        config: Configuration of the run.
    """
    algorithm = config.corrected_algorithm
    rows = made_rows()
    found = _advantages(rows, config)
    wanted = definitions.advantages(rows, algorithm)
    name, own = algorithm.advantage, torch.tensor([one for row in rows for one in row.own])
    if wanted is not None:
        difference = largest((found - torch.tensor(list(itertools.chain(*wanted))))[own])
        size = max(1.0, largest(found[own]))
        detail = f"{name}: {int(own.sum())} tokens of {len(rows)} sequences in {max(_GROUPS) + 1} groups"
        if difference > _TOLERANCE * size:
            return measured(check, difference, _TOLERANCE * size, f"{detail} differ from the formula's")
    elsewhere = _advantages([_with_other_numbers_elsewhere(row) for row in rows], config)
    moved = largest((found - elsewhere)[own])
    if moved:
        detail = f"{name}: numbers at tokens that the policy did not write change the advantages of others"
        return measured(check, moved, 0.0, detail)
    if wanted is None:
        return measured(check, 0.0, 0.0, f"{name}: a function of yours; only the policy's own tokens count")
    return measured(check, difference, _TOLERANCE * size, detail)


def check_loss(check: str, config: RunConfig) -> Result:
    """Compare the loss of made-up responses, and its gradient, with its definition.

    A user's loss has none. Of every loss it is asked whether tokens that the policy did not write count, and whether
    the parts of micro-batches add up.

    Args:
        check: Name of the check.
        config: Configuration of the run.
    """
    algorithm = config.corrected_algorithm
    function: LossFunction = SupervisedLoss() if config.supervised else PolicyLoss(algorithm)
    rows = made_rows()
    constant = algorithm.length_constant or config.rollout.max_new_tokens
    whole = _computed(rows, function, algorithm, constant, parts=1)
    parts = _computed(rows, function, algorithm, constant, parts=len(rows))
    other = [_with_other_numbers_elsewhere(row) for row in rows]
    elsewhere = _computed(other, function, algorithm, constant, parts=1)
    name = "cross-entropy" if config.supervised else algorithm.loss
    size = max(1e-3, largest(whole))
    own = torch.tensor([one for row in rows for one in row.own])
    limit = _TOLERANCE * size
    for found, what in (
        (parts, "differs between one micro-batch and one for each sequence"),
        (elsewhere, "depends on tokens that the policy did not write"),
    ):
        if (off := largest(found - whole)) > limit:
            return measured(check, off, limit, f"{name}: the loss, or its gradient, {what}")
    if strays := largest(whole[1:].masked_fill(own, 0.0)):
        return measured(check, strays, 0.0, f"{name}: tokens that the policy did not write have a gradient")
    wanted = _defined(rows, config, algorithm, constant)
    if wanted is None:
        return measured(check, 0.0, limit, f"{name}: a function of yours; parts add up, and only own tokens count")
    off = largest(whole - wanted)
    detail = f"{name}, {algorithm.aggregation}: the loss and its gradient at {int(own.sum())} log-probs"
    return measured(check, off, limit, detail if off <= limit else f"{detail} differ from the formula's")


def made_rows() -> list[Row]:
    """Make the sequences up; the same ones each time."""
    draw = random.Random(5)
    ratios = itertools.cycle(_RATIOS)
    rows = []
    for group, response, reward, marks in zip(_GROUPS, _RESPONSES, _REWARDS, _OWN, strict=True):
        own = [mark == "1" for mark in marks]
        log_probs = [-draw.uniform(0.1, 3.0) for _ in own]
        old = [one - next(ratios) for one in log_probs]
        row = Row(
            group=group,
            response=response,
            own=own,
            reward=reward,
            log_probs=log_probs,
            old=old,
            drawn=[one - draw.uniform(-1.2, 1.2) for one in old],
            reference=[one + draw.uniform(-0.8, 0.8) for one in log_probs],
            entropy=[draw.uniform(0.1, 2.0) for _ in own],
            values=[draw.uniform(-1.0, 1.0) for _ in own],
            advantages=[draw.uniform(-1.5, 1.5) for _ in own],
        )
        rows.append(row)
    return rows


def _with_other_numbers_elsewhere(row: Row) -> Row:
    def other(values: list[float]) -> list[float]:
        return [one if own else -_ELSEWHERE for one, own in zip(values, row.own, strict=True)]

    return replace(
        row,
        old=other(row.old),
        drawn=other(row.drawn),
        reference=other(row.reference),
        values=other(row.values),
        advantages=other(row.advantages),
    )


def _batch(rows: Sequence[Row]) -> RaggedBatch:
    def joined(name: str) -> Tensor:
        return torch.tensor([one for row in rows for one in getattr(row, name)])

    return RaggedBatch(
        lengths=torch.tensor([len(row.own) for row in rows]),
        tokens=torch.zeros(sum(len(row.own) for row in rows), dtype=torch.int64),
        response_mask=joined("own"),
        groups=torch.tensor([row.group for row in rows]),
        responses=torch.tensor([row.response for row in rows]),
        rollout_log_probs=joined("drawn"),
        old_log_probs=joined("old"),
        reference_log_probs=joined("reference"),
        values=joined("values"),
        advantages=joined("advantages"),
    )


def _advantages(rows: Sequence[Row], config: RunConfig) -> Tensor:
    rewards = torch.tensor([row.reward for row in rows])
    batch = _batch(rows)
    if config.critic is None:
        batch = replace(batch, values=None)
    found = with_advantages(batch, rewards, config.corrected_algorithm).advantages
    assert found is not None
    return found


def _computed(
    rows: Sequence[Row], function: LossFunction, algorithm: AlgorithmSection, constant: int, *, parts: int
) -> Tensor:
    """Return the loss, and its gradient at each token's log-prob: float32 ``[1 + T]``."""
    plan = UpdatePlan(1, 1, algorithm.aggregation, max_tokens=1 << 20, length_constant=constant)
    whole = next(plan.mini_batches(_batch(rows), 0))
    log_probs = torch.tensor([one for row in rows for one in row.log_probs], requires_grad=True)
    entropy = torch.tensor([one for row in rows for one in row.entropy])
    lengths = [len(row.own) for row in rows]
    loss = torch.zeros(())
    for chosen in reversed(torch.arange(len(rows)).tensor_split(parts)):
        outputs = TokenOutputs(
            log_probs=torch.cat([log_probs.split(lengths)[index] for index in chosen.tolist()]),
            entropy=torch.cat([entropy.split(lengths)[index] for index in chosen.tolist()]),
        )
        loss = loss + function(outputs, whole.select(chosen)).loss
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return torch.cat([loss.detach()[None], gradient])


def _defined(rows: Sequence[Row], config: RunConfig, algorithm: AlgorithmSection, constant: int) -> Tensor | None:
    """Return the same by definition, with differences for the gradient."""
    per_row = definitions.weights(rows, algorithm, constant)
    points = [list(row.log_probs) for row in rows]

    def at(now: Sequence[Sequence[float]]) -> float | None:
        if config.supervised:
            return -sum(
                weight * now[index][place]
                for index, (row, weight) in enumerate(zip(rows, per_row, strict=True))
                for place in row.places
            )
        return definitions.loss(rows, algorithm, per_row, now)

    value = at(points)
    if value is None:
        return None
    gradient = []
    for index, row in enumerate(rows):
        for place, own in enumerate(row.own):
            if not own:
                gradient.append(0.0)
                continue
            ends = []
            for step in (_STEP, -_STEP):
                moved = [list(point) for point in points]
                moved[index][place] += step
                ends.append(at(moved) or 0.0)
            gradient.append((ends[0] - ends[1]) / (2.0 * _STEP))
    return torch.tensor([value, *gradient])
