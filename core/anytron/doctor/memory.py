"""Estimate the device memory of a run, part by part, and compare it with what a device has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.components import ROLLOUT_ENGINES, TRAINING_ENGINES, engine_info
from anytron.doctor.live import ProbeError
from anytron.engines.memory import DeviceMemory, peak, readable
from anytron.entries import Entry, of_error
from anytron.errors import AnytronError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig
    from anytron.doctor.live import Live
    from anytron.doctor.subject import Subject
    from anytron.engines.memory import MemoryPart, TrainingEstimate

ROOM = 0.9
"""Of a device: above that, the allocator's fragments and the libraries' own memory are likely not to fit."""


def examine(subject: Subject, live: Live) -> Iterator[Entry]:
    """Give the parts on the rank that has the most, their sum at its largest, and the verdict."""
    run = subject.run
    if run is None:
        yield Entry("memory.total", "skip", "no CONFIG was given" if subject.misread is None else "CONFIG is not valid")
        return
    try:
        estimate = engine_info(TRAINING_ENGINES, run.engine.name, "engine.name").load_memory()
        training: TrainingEstimate | None = None if estimate is None else estimate(run)
    except AnytronError as error:
        yield of_error("memory.training", error, "warn")
        return
    if training is None:
        yield Entry("memory.total", "skip", f"the engine {run.engine.name} gives no estimate")
        return
    total, ranks, unknown = _device(subject, run, live)
    accelerator = subject.session is None or subject.session.platform.accelerator
    device = DeviceMemory(total, accelerator)
    parts = list(training.parts)
    for_rollout = engine_info(ROLLOUT_ENGINES, run.rollout.engine, "rollout.engine").load_memory()
    if for_rollout is None:
        yield Entry("memory.rollout", "skip", f"the engine {run.rollout.engine} gives no estimate")
    rollout = [] if for_rollout is None else list(for_rollout(run, training, device))
    if run.rollout.placement == "colocated":
        parts += rollout
    for part in [*training.parts, *rollout]:
        yield Entry(f"memory.{part.name}", "ok", _line(part))
    yield _verdict("memory.total", "a training rank", parts, total, ranks, unknown)
    if run.rollout.placement == "separate" and rollout:
        yield _verdict("memory.rollout", "a rollout replica", rollout, total, 1, unknown)


def _line(part: MemoryPart) -> str:
    about = "" if part.exact else "about "
    when = "" if part.when == "always" else f", during {part.when}"
    return f"{about}{readable(part.size)}{when}: {part.how}"


def _verdict(name: str, who: str, parts: list[MemoryPart], total: int | None, ranks: int, unknown: str) -> Entry:
    needed = peak(parts) * ranks
    share = f" ({ranks} ranks share one device)" if ranks > 1 else ""
    detail = f"{who} needs about {readable(peak(parts))} at its peak{share}"
    if total is None:
        return Entry(name, "skip", f"{detail}; what a device has is not known: {unknown}")
    detail += f"; a device has {readable(total)}"
    fix = (
        "more tensor_model_parallel_size or pipeline_model_parallel_size, engine.recompute=full, "
        "a smaller engine.max_tokens_per_micro_batch, engine.offload, rollout.sleep"
    )
    if needed > total:
        return Entry(name, "fail", f"{detail}: it does not fit", fix)
    if needed > ROOM * total:
        return Entry(name, "warn", f"{detail}: less than a tenth is left", fix)
    return Entry(name, "ok", detail)


def _device(subject: Subject, run: RunConfig, live: Live) -> tuple[int | None, int, str]:
    """Bytes of the smallest device, ranks that share one, and why the bytes are not known."""
    if subject.session is None:
        return None, 1, "no platform is active"
    try:
        seen = live.ask("devices")
    except ProbeError as error:
        return None, 1, error.what
    if not seen["devices"]:
        return None, 1, "no device is seen"
    # Where there are more ranks than devices of an accelerator, the others are on other machines.
    ranks = 1 if subject.session.platform.accelerator else -(-run.parallel.world_size // seen["count"])
    return min(device["total"] for device in seen["devices"]), ranks, ""
