"""Look at the order in which prompts are drawn, epoch by epoch and after a resume. Needs no engine."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from anytron.proof.verification.comparisons import measured
from anytron.task.data.mixture import Mixture

if TYPE_CHECKING:
    from anytron.base.results import Result
    from anytron.config.schema import RunConfig

MOST = 4096
"""Most prompts of an epoch that are drawn."""
_ENOUGH = 9
"""Different prompts of which two random orders are equal once in 363,000 times."""


def check_epochs(check: str, config: RunConfig, sampler: Mixture) -> Result:
    """Draw two epochs of each source: all prompts come once, in a new order if it is random, and again after a resume.

    Args:
        check: Name of the check.
        config: Configuration of the run.
        sampler: The prompts; it is left at its place.
    """
    seed, shuffle, places = config.trainer.seed, config.data.shuffle, sampler.places
    single = len(sampler.tables) == 1
    mixes = [sampler] if single else [Mixture([one], None, seed=seed, shuffle=shuffle) for one in sampler.tables]
    try:
        wrong = [f"{one.tables[0].name}: {what}" for one in mixes if (what := mistake_in(one, shuffle=shuffle))]
    finally:
        sampler.seek(places)
    if wrong:
        return measured(check, 1.0, 0.0, "; ".join(wrong))
    count = sum(min(len(one), MOST) for one in mixes)
    kind = "in another order in each" if shuffle else "in the order of the data (data.shuffle)"
    return measured(check, 0.0, 0.0, f"{count} prompts in each of 2 epochs, {kind}, and the same ones after a resume")


def mistake_in(mix: Mixture, *, shuffle: bool) -> str:
    """Say what is wrong with the order of a source's prompts; empty if nothing is.

    Args:
        mix: A mix of one source, which is moved.
        shuffle: Whether the order is random.
    """
    count, (table,) = min(len(mix), MOST), mix.tables
    mix.seek([(0, 0)])
    epochs = [_drawn(mix, count)]
    mix.seek([(0, len(mix))])  # the next draw begins an epoch
    epochs.append(_drawn(mix, count))
    if count == len(mix) and any(Counter(one) != Counter(name for name, _ in table.data()) for one in epochs):
        return "an epoch lacks prompts, and has others twice: some are never trained on"
    if shuffle and len(set(epochs[0])) >= _ENOUGH and epochs[0] == epochs[1]:
        return "prompts come in the same order in each epoch, although data.shuffle is true"
    if not shuffle and epochs[0] != epochs[1]:
        return "prompts come in another order in each epoch, although data.shuffle is false"
    mix.seek([(1, count // 2)])
    if _drawn(mix, count - count // 2) != epochs[1][count // 2 :]:
        return "other prompts follow after a resume than without it: some are drawn twice, and others not at all"
    return ""


def _drawn(mix: Mixture, count: int) -> list[str]:
    return [prompt.id for prompt in mix.draw(count)]
