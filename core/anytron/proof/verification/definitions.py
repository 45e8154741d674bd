"""Advantages and losses as their papers define them: float64, one number after the other, slow and independent.

Nothing here calls :mod:`anytron.algorithms`. Formulas and constants are those of docs/how-to/algorithms.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anytron.config.algorithm import AlgorithmSection

_STD_EPSILON, _VARIANCE_EPSILON = 1e-4, 1e-8


@dataclass(frozen=True)
class Row:
    """One sequence of a step, with a number for each token; all but ``own`` may hold anything at other tokens.

    Attributes:
        group: Number of the prompt.
        response: Number of the response; one response may have several rows.
        own: Whether the policy wrote the token.
        reward: Reward of the response.
        log_probs: Log-probs of the policy.
        old: Log-probs before the step's updates.
        drawn: Log-probs that the rollout computed.
        reference: The reference's log-probs.
        entropy: Entropies.
        values: The critic's values of the state before each token.
        advantages: Advantages.
    """

    group: int
    response: int
    own: list[bool]
    reward: float
    log_probs: list[float]
    old: list[float]
    drawn: list[float]
    reference: list[float]
    entropy: list[float]
    values: list[float]
    advantages: list[float]

    @property
    def places(self) -> list[int]:
        """Places of the tokens that the policy wrote."""
        return [place for place, own in enumerate(self.own) if own]


def advantages(rows: Sequence[Row], algorithm: AlgorithmSection) -> list[list[float]] | None:
    """Return the advantage of each token of each row; None for a user's estimator."""
    name = algorithm.advantage
    if name == "none":
        return [[0.0] * len(row.own) for row in rows]
    if name in ("gae", "reinforce_plus_plus"):
        found = [_estimates(row, algorithm) for row in rows]
        if name == "reinforce_plus_plus" or algorithm.normalize_std:
            return _whitened(found, rows)
        return found
    compare = {"grpo": _grpo, "dr_grpo": _centred, "rloo": _rloo, "reinforce_plus_plus_baseline": _centred}.get(name)
    if compare is None:
        return None
    rewards = _rewards(rows, algorithm)
    of_response: dict[int, float] = {}
    for group in {row.group for row in rows}:
        members = list(dict.fromkeys(row.response for row in rows if row.group == group))
        values = [rewards[member] for member in members]
        normal = algorithm.normalize_std
        compared = compare(values) if name != "grpo" or normal else _centred(values)
        of_response |= dict(zip(members, compared, strict=True))
    spread = [[of_response[row.response] if own else 0.0 for own in row.own] for row in rows]
    return _whitened(spread, rows) if name == "reinforce_plus_plus_baseline" else spread


def _rewards(rows: Sequence[Row], algorithm: AlgorithmSection) -> dict[int, float]:
    rewards = {row.response: row.reward for row in rows}
    for row in rows:
        rewards[row.response] -= sum(_penalty(row, place, algorithm) for place in row.places)
    return rewards


def _penalty(row: Row, place: int, algorithm: AlgorithmSection) -> float:
    """The part of a token's reward that the reference takes away."""
    if algorithm.kl_placement != "reward":
        return 0.0
    return algorithm.kl_coefficient * divergence(algorithm.kl_estimator, row.old[place], row.reference[place])


def _centred(rewards: list[float]) -> list[float]:
    return [0.0 if len(set(rewards)) == 1 else reward - fmean(rewards) for reward in rewards]


def _grpo(rewards: list[float]) -> list[float]:
    deviation = stdev(rewards) if len(rewards) > 1 else 0.0
    return [one / (deviation + _STD_EPSILON) for one in _centred(rewards)]


def _rloo(rewards: list[float]) -> list[float]:
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    return [one - fmean(rewards[:place] + rewards[place + 1 :]) for place, one in enumerate(rewards)]


def _estimates(row: Row, algorithm: AlgorithmSection) -> list[float]:
    """Generalized advantage estimates of a row; without a critic, returns."""
    critic = algorithm.advantage == "gae"
    decay = algorithm.gamma * (algorithm.gae_lambda if critic else 1.0)
    found, carried, following = [0.0] * len(row.own), 0.0, 0.0
    for place in reversed(row.places):
        earned = (row.reward if place == row.places[-1] else 0.0) - _penalty(row, place, algorithm)
        value = row.values[place] if critic else 0.0
        carried = earned + algorithm.gamma * following - value + decay * carried
        found[place], following = carried, value
    return found


def _whitened(values: list[list[float]], rows: Sequence[Row]) -> list[list[float]]:
    chosen = [value[place] for value, row in zip(values, rows, strict=True) for place in row.places]
    mean = fmean(chosen)
    variance = sum((one - mean) ** 2 for one in chosen) / max(len(chosen) - 1, 1)
    scale = math.sqrt(variance + _VARIANCE_EPSILON)
    return [
        [(one - mean) / scale if own else 0.0 for one, own in zip(value, row.own, strict=True)]
        for value, row in zip(values, rows, strict=True)
    ]


def divergence(estimator: str, own: float, reference: float) -> float:
    """Estimate KL(policy || reference) from one token's log-probs."""
    ratio = reference - own
    return {"k1": -ratio, "k2": 0.5 * ratio**2, "k3": math.exp(ratio) - 1.0 - ratio}[estimator]


def weights(rows: Sequence[Row], algorithm: AlgorithmSection, constant: int) -> list[float]:
    """Return the weight in the loss of each token that the policy wrote, by row.

    Args:
        rows: All rows of an update.
        algorithm: Section ``algorithm`` of the configuration.
        constant: Divisor of ``aggregation=length-constant``, in tokens.
    """
    lengths: dict[int, int] = {}
    for row in rows:
        lengths[row.response] = lengths.get(row.response, 0) + len(row.places)
    total, filled = sum(lengths.values()), sum(length > 0 for length in lengths.values())
    each = {
        "token-mean": dict.fromkeys(lengths, 1.0 / total),
        "token-sum": dict.fromkeys(lengths, 1.0),
        "length-constant": dict.fromkeys(lengths, 1.0 / (len(lengths) * constant)),
        "sequence-mean": {name: 1.0 / (filled * max(length, 1)) for name, length in lengths.items()},
    }[algorithm.aggregation]
    return [each[row.response] for row in rows]


def loss(
    rows: Sequence[Row], algorithm: AlgorithmSection, per_row: Sequence[float], now: Sequence[Sequence[float]]
) -> float | None:
    """Return the policy's loss of an update; None for a user's loss.

    Args:
        rows: All rows; their ``log_probs`` stand wherever a formula stops the gradient.
        algorithm: Section ``algorithm`` of the configuration.
        per_row: The weight of each token of a row.
        now: Log-probs of the policy, as ``log_probs``: what the gradient is taken of.
    """
    token_loss = _LOSSES.get(algorithm.loss)
    if token_loss is None:
        return None
    total = 0.0
    for row, weight, current in zip(rows, per_row, now, strict=True):
        costs = token_loss(row, algorithm, current)
        factors = _corrections(row, algorithm)
        for place in row.places:
            total += weight * (factors[place] * costs[place] - algorithm.entropy_coefficient * row.entropy[place])
            if algorithm.kl_placement == "loss" and algorithm.kl_coefficient:
                kl = divergence(algorithm.kl_estimator, current[place], row.reference[place])
                total += weight * algorithm.kl_coefficient * kl
    return total


def _corrections(row: Row, algorithm: AlgorithmSection) -> dict[int, float]:
    if algorithm.importance_correction not in ("truncated", "masked"):
        return dict.fromkeys(row.places, 1.0)
    logs = {place: row.old[place] - row.drawn[place] for place in row.places}
    if algorithm.importance_level == "sequence":
        logs = dict.fromkeys(logs, sum(logs.values()))
    ratios = {place: math.exp(log) for place, log in logs.items()}
    cap, floor = algorithm.importance_cap, algorithm.importance_floor
    if algorithm.importance_correction == "truncated":
        return {place: min(ratio, cap) for place, ratio in ratios.items()}
    return {place: ratio if floor <= ratio <= cap else 0.0 for place, ratio in ratios.items()}


def _clipped(ratio: float, advantage: float, algorithm: AlgorithmSection) -> float:
    held = min(max(ratio, 1.0 - algorithm.clip_low), 1.0 + algorithm.clip_high)
    cost = -min(ratio * advantage, held * advantage)
    if algorithm.dual_clip is not None and advantage < 0.0:
        cost = min(cost, -algorithm.dual_clip * advantage)
    return cost


def _ppo_clip(row: Row, algorithm: AlgorithmSection, now: Sequence[float]) -> dict[int, float]:
    return {
        place: _clipped(math.exp(now[place] - row.old[place]), row.advantages[place], algorithm) for place in row.places
    }


def _gspo(row: Row, algorithm: AlgorithmSection, now: Sequence[float]) -> dict[int, float]:
    if not row.places:
        return {}
    ratio = math.exp(fmean(now[place] - row.old[place] for place in row.places))
    return {place: _clipped(ratio, row.advantages[place], algorithm) for place in row.places}


def _gspo_token(row: Row, algorithm: AlgorithmSection, now: Sequence[float]) -> dict[int, float]:
    if not row.places:
        return {}
    ratio = math.exp(fmean(row.log_probs[place] - row.old[place] for place in row.places))
    own = {place: math.exp(now[place] - row.log_probs[place]) for place in row.places}
    return {place: _clipped(ratio * own[place], row.advantages[place], algorithm) for place in row.places}


def _cispo(row: Row, algorithm: AlgorithmSection, now: Sequence[float]) -> dict[int, float]:
    costs = {}
    for place in row.places:
        ratio = math.exp(row.log_probs[place] - row.old[place])
        held = min(max(ratio, 1.0 - algorithm.clip_low), 1.0 + algorithm.clip_high)
        costs[place] = -held * row.advantages[place] * now[place]
    return costs


def _sapo(row: Row, algorithm: AlgorithmSection, now: Sequence[float]) -> dict[int, float]:
    costs = {}
    for place in row.places:
        advantage = row.advantages[place]
        tau = algorithm.sapo_tau_positive if advantage > 0 else algorithm.sapo_tau_negative
        gate = 4.0 / tau / (1.0 + math.exp(-tau * (math.exp(now[place] - row.old[place]) - 1.0)))
        costs[place] = -gate * advantage
    return costs


_LOSSES: dict[str, Callable[[Row, AlgorithmSection, Sequence[float]], dict[int, float]]] = {
    "ppo_clip": _ppo_clip,
    "gspo": _gspo,
    "gspo_token": _gspo_token,
    "cispo": _cispo,
    "sapo": _sapo,
}
