"""The engines, the trajectories and the values that the checks of ``anytron verify`` share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from anytron.base.errors import AnytronError
from anytron.proof.checks import Check, Inapplicable
from anytron.proof.verification import roles
from anytron.proof.verification.engines import (
    Engines,
    Forward,
    Observation,
    Trajectories,
    draw_prompts,
    observe,
    observe_forward,
    sample_trajectories,
)
from anytron.proof.verification.gradients import check_gradients
from anytron.proof.verification.logits import logits_of_transformers
from anytron.run.preflight.capabilities import shows_gradients
from anytron.run.preflight.limits import NotPossible, adapted

if TYPE_CHECKING:
    import torch

    from anytron.base.results import Result
    from anytron.config.schema import RunConfig
    from anytron.device.loading import Session
    from anytron.run.preflight.prepare import PreparedRun
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.workers.executor.protocol import Executor

ExecutorMaker = Callable[["RunConfig", "Session"], "Executor"]
"""Makes an executor; it is called again for a layout of another size, which needs other processes."""
Value = TypeVar("Value")


def check(name: str) -> Callable[[Callable[[Any, str], Result]], Check]:
    """Return a decorator that turns a method into a check called ``name``."""
    return lambda method: Check(name, method)


def require(part: object, reason: str) -> None:
    """Skip the check if the run lacks what it is about.

    Raises:
        Inapplicable: ``part`` is false.
    """
    if not part:
        raise Inapplicable(reason)


class Shared:
    """The engines, the trajectories, and values that several checks need, each computed when the first asks.

    Attributes:
        kernels: Plugins that supplied each kernel of the configured training engine, by the kernel's name.
    """

    def __init__(
        self,
        config: RunConfig,
        random: RunConfig,
        session: Session,
        make_executor: ExecutorMaker,
        executor: Executor,
        prepared: PreparedRun,
    ) -> None:
        self._config = config
        self._random = random  # with its dropout
        self._session = session
        self._make_executor = make_executor
        self._prepared = prepared
        self._engines = Engines(config, executor)
        self._check = ""
        self._failed: list[str] = []
        self._shared: dict[str, Any] = {}
        self._lost: dict[str, str] = {}
        self.kernels = self._engines.kernels

    def _after(self, checks: tuple[str, ...], result: Result) -> Result:
        """Add to a result of wrong gradients which values are already wrong."""
        cause = next((one for one in checks if one in self._failed), None)
        if result.status != "failed" or cause is None:
            return result
        why = f"begin with {cause}: gradients of wrong values are wrong too"
        return replace(result, detail=f"{why}; {result.detail}")

    def _adapted(self, wanted: RunConfig, key: str, value: Callable[[RunConfig], object], why: str) -> RunConfig:
        """Let the plugins adapt a configuration, or skip the check, with the reason."""
        try:
            return adapted(wanted, self._session, key, value)
        except NotPossible as reason:
            raise Inapplicable(f"{why}: {reason}") from reason

    def _require_gradients(self) -> None:
        """Skip the check if the engine has no gradients to show."""
        if not shows_gradients(self._config):
            raise Inapplicable(f"the engine {self._config.engine.name} lacks the capability gradients")

    def _trajectories(self) -> Trajectories:
        prepared = self._config, self._prepared
        return self._once(
            "responses",
            lambda: sample_trajectories(*prepared, self._engines.rollout(), draw_prompts(*prepared)),
        )

    def _sampled_again(self, trainer: TrainingWorkers) -> Trajectories:
        """Sample with changed weights and the same prompts: an engine may have kept something of them."""
        prompts = self._trajectories().prompts
        return sample_trajectories(self._config, self._prepared, self._engines.rollout(trainer), prompts)

    def _their_logits(self) -> tuple[torch.Tensor, str]:
        own, sampled = (self._config, self._session.platform, self._engines), self._trajectories()
        return self._once("the logits of transformers", lambda: logits_of_transformers(*own, sampled))

    def _forward(self) -> Forward:
        batch = self._trajectories().batch
        return self._once(
            "the configured engine's log-probs", lambda: observe_forward(self._engines.trainer(), self._config, batch)
        )

    def _gradients(self) -> Result:
        """Compare them with transformers'. Whoever needs gradients asks first: they may not be computable."""
        batch = self._trajectories().batch
        return self._once(
            "the configured engine's gradients",
            lambda: check_gradients("hf-gradients", self._config, self._engines.trainer(), batch),
        )

    def _values(self) -> Result:
        batch = self._trajectories().batch
        return self._once(
            "the critic's values",
            lambda: roles.check_values("critic-values", self._config, self._engines.trainer(), batch),
        )

    def _own(self) -> Observation:
        self._forward()
        batch = self._trajectories().batch
        return self._once(
            "the configured engine's update",
            lambda: observe(self._engines.trainer_to_update(), self._config, batch),
        )

    def _once(self, what: str, compute: Callable[[], Value]) -> Value:
        """Compute what several checks need when the first asks; if that fails, the others are not made."""
        if what in self._lost:
            raise Inapplicable(f"this check needs {what}, which could not be computed in the check {self._lost[what]}")
        if what not in self._shared:
            try:
                self._shared[what] = compute()
            except AnytronError:
                self._lost[what] = self._check
                raise
        value: Value = self._shared[what]
        return value
