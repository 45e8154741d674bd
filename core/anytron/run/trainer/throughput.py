"""How fast a run is for the devices that it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anytron.base.components import TRAINING_ENGINES, engine_info
from anytron.base.errors import ConfigError
from anytron.run.preflight.capabilities import generates_in_training

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from anytron.config.schema import RunConfig
    from anytron.record.tracking.progress import Clock
    from anytron.workers.engines.flops import ModelFlops


@dataclass(frozen=True)
class Throughput:
    """Computes tokens per second and device, and model FLOP/s utilization (MFU).

    Attributes:
        devices: Of training ranks, and of rollout replicas that have their own.
        peak_per_s: Operations that the devices of all training ranks can do in a second; None = not known.
        policy: What the policy computes; None = not known.
        critic: What the critic computes; None = there is none.
        epochs: How often an update sees each token.
        why_no_mfu: Why there is no MFU; empty if there is.
    """

    devices: int
    peak_per_s: float | None
    policy: ModelFlops | None
    critic: ModelFlops | None
    epochs: int
    why_no_mfu: str = ""

    @classmethod
    def of(cls, config: RunConfig, facts: Sequence[Mapping[str, Any]]) -> Throughput:
        """Take the numbers of a run from its configuration, and from what its training ranks say of themselves."""
        separate = config.rollout.placement == "separate" and not generates_in_training(config)
        devices = config.parallel.world_size + (config.rollout.replicas if separate else 0)
        said = [rank.get("peak_flops") or {"per_s": None, "source": "the engine says no peak"} for rank in facts]
        unknown = [peak["source"] for peak in said if peak["per_s"] is None]
        total = None if unknown else sum(peak["per_s"] for peak in said)
        policy, critic, why = None, None, "".join(unknown[:1])
        count = engine_info(TRAINING_ENGINES, config.engine.name, "engine.name").load_flops()
        if count is None:
            why = why or f"the engine {config.engine.name} counts no operations"
        else:
            try:
                policy, critic = count(config)
            except ConfigError as error:
                why = why or f"{error.what} {error.why}"
        return cls(devices, total, policy, critic, config.algorithm.epochs, why)

    def remark(self, note: Callable[[str], None]) -> None:
        """Say why there is no MFU, where the device's peak is known."""
        if self.peak_per_s is not None and self.why_no_mfu:
            note(f"there is no throughput/mfu: {self.why_no_mfu}")

    def metrics(
        self, lengths: Sequence[int], metrics: Mapping[str, float], clock: Clock, *, updates_policy: bool
    ) -> dict[str, float]:
        """Compute the metrics of a step.

        Args:
            lengths: Tokens of each sequence that updates saw; empty if there were no updates.
            metrics: The step's metrics so far, with the throughput of all devices together.
            clock: The step's times.
            updates_policy: False in the critic's warm-up.
        """
        found = {"throughput/tokens_per_s_per_device": metrics["throughput/tokens_per_s"] / self.devices}
        if lengths and self.peak_per_s is not None and self.policy is not None:
            models = [self.policy] if updates_policy else []
            models += [] if self.critic is None else [self.critic]
            needed = self.epochs * sum(model.update(lengths) for model in models)
            found["throughput/mfu"] = needed / clock.seconds["update"] / self.peak_per_s
        return found
