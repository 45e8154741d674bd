"""The process that uses the device for ``anytron doctor``: it runs probes by name and answers in plain JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.base.hidden import error_text
from anytron.task.isolation.worker import calls, enter

if TYPE_CHECKING:
    from collections.abc import Callable

    from anytron.proof.doctor.probes import Bench

    Probe = Callable[[Bench], dict[str, Any]]


def main(channel: int, lifeline: int) -> None:
    """Run the probes that the driver asks for until the driver is gone.

    Args:
        channel: As for :func:`anytron.task.isolation.worker.enter`.
        lifeline: As for :func:`anytron.task.isolation.worker.enter`.
    """
    connection, start = enter(channel, lifeline)
    bench: Bench | None = None
    for probe, give in calls(connection, start):
        try:
            bench = bench or _bench(start)
            answer = _answer(bench, probe)
        except Exception as error:  # noqa: BLE001 - a device, a driver or a kernel: the driver makes an entry of it
            suppliers = {} if bench is None else bench.session.hooks.suppliers()
            answer = {
                "error": getattr(error, "what", error_text(error)),
                "why": getattr(error, "why", ""),
                "fix": getattr(error, "fix", ""),
                "suppliers": suppliers,
            }
        give(answer)


def _bench(start: dict[str, Any]) -> Bench:
    """Open a session as a training rank does."""
    from anytron.config.schema import RunConfig, default_run
    from anytron.device.hooks.types import ProcessInfo
    from anytron.device.loading import open_process

    run = None if start["run"] is None else RunConfig.model_validate(start["run"])
    process = ProcessInfo("trainer", world_size=1 if run is None else run.parallel.world_size)
    session = open_process(process, run or default_run(), platform=start["platform"], engine=start["engine"])
    session.hooks.invariant = run is not None and run.engine.on_policy == "bitwise"

    from anytron.proof.doctor.probes import Bench  # torch: only when the environment is set

    return Bench(session, run)


def _answer(bench: Bench, question: str) -> dict[str, Any]:
    from anytron.proof.doctor import probes
    from anytron.proof.doctor.operators import operators

    probe, _, argument = question.partition(" ")
    if argument:
        return {"executor": probes.executor, "attention": probes.attention}[probe](bench, argument)
    known: dict[str, Probe] = {
        "devices": probes.devices,
        "kernels": probes.kernels,
        "log-probs": probes.log_probs,
        "operators": operators,
    }
    return known[probe](bench)
