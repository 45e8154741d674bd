"""Observation of a worker's device: peak memory, traces of where time goes, and explanations of memory errors."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.base.errors import AnytronError, DataError, ResourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig
    from anytron.device.hooks.types import Role
    from anytron.device.platform import Platform
    from anytron.device.runtime import DeviceRuntime, MemoryStats
    from anytron.workers.executor.channel import Bootstrap

OBSERVED = ("begin_trace", "end_trace", "peak_memory")
"""Methods that a worker calls on its :class:`RankObserver`, not on its engine."""
BUILDING = "start"
"""Used in place of a method's name while the engine is built."""
WITH_GRADIENTS = ("update", "update_critic", "inspect_update", "export_gradients")
"""Methods of a training engine that keep activations."""
WITH_TOKENS = ("score", "values", "logits", *WITH_GRADIENTS)
"""Methods of a training engine that run micro-batches through a model."""


class RankObserver:
    """Observes the calls of one training rank of any engine: peak memory, and where the time goes.

    The driver calls the methods named in :data:`OBSERVED` on groups of workers, like methods of their engine.

    Args:
        runtime: The device; None = the device must not be initialised, because the engine of this process may do
            without it.
    """

    def __init__(self, runtime: DeviceRuntime | None) -> None:
        self._runtime = runtime
        self._profiler: Any = None

    @contextlib.contextmanager
    def marked(self, method: str) -> Iterator[None]:
        """Mark a call as a range with the method's name, in the device's profiler and in a trace being recorded."""
        with contextlib.ExitStack() as ranges:
            if self._runtime is not None:
                ranges.enter_context(self._runtime.profiler_range(method))
            if self._profiler is not None:
                import torch

                ranges.enter_context(torch.profiler.record_function(method))
            yield

    def peak_memory(self) -> int | None:
        """Return the peak number of allocated device bytes since the last call; None if torch cannot tell."""
        assert self._runtime is not None, "only training ranks are asked"
        peak = self._runtime.memory_stats().peak_allocated
        self._runtime.reset_peak_memory_stats()
        return peak

    def begin_trace(self, wanted: bool, stacks: bool, memory: bool) -> None:
        """Begin to record operations of the host, and kernels of the device if torch's profiler supports it.

        Args:
            wanted: Whether to record this rank.
            stacks: Whether to record the Python lines that called the operations.
            memory: Whether to record allocations.
        """
        if not wanted:
            return
        import torch

        assert self._runtime is not None, "only training ranks are asked"
        self._runtime.synchronize()
        profiler = torch.profiler.profile(
            activities=torch.profiler.supported_activities(), with_stack=stacks, profile_memory=memory
        )
        profiler.start()
        self._profiler = profiler

    def end_trace(self, path: str, largest: int) -> str | None:
        """End the recording, and write it as a file for Perfetto or ``chrome://tracing``.

        Args:
            path: The file, ``.json.gz``; an existing file is replaced.
            largest: Largest size of the file in bytes.

        Returns:
            Why there is no file; None if there is one, or if this rank was not recorded.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None
        assert self._runtime is not None, "only training ranks are asked"
        self._runtime.synchronize()
        profiler.stop()
        file = Path(path)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
            profiler.export_chrome_trace(path)
            size = file.stat().st_size
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
            return f"{type(error).__name__}: {error}"
        if size > largest:
            file.unlink()
            return f"the trace has {size:,} bytes, and trainer.profile.max_mib allows {largest:,}"
        return None


@dataclass(frozen=True)
class MemoryExplainer:
    """Replaces a device's out-of-memory error by one that names the settings to change.

    Attributes:
        platform: Platform of the device. Its runtime is loaded only after an error, because some engines use no device.
        bootstrap: Description of this process and of the run.
    """

    platform: Platform
    bootstrap: Bootstrap

    def explain(self, error: Exception, method: str) -> ResourceError | None:
        """Return an error that explains an out-of-memory error; None for any other error.

        Args:
            error: The exception that was raised. If it is a ``DataError`` of a user's function, its cause is examined.
            method: The engine's method that was called, or :data:`BUILDING`.
        """
        try:
            runtime = self.platform.runtime()
        except AnytronError:  # an engine that generates may do without the device's libraries
            return None
        raised = error.__cause__ or error if isinstance(error, DataError) else error
        if not runtime.is_out_of_memory(raised):
            return None
        from anytron.config.schema import RunConfig  # a worker imports nothing heavy before its first message

        config, role = RunConfig.model_validate(self.bootstrap.config), self.bootstrap.role
        reads = self.bootstrap.model == "reward_model"
        doing = "while the engine was built" if method == BUILDING else f"in {method}()"
        return ResourceError(
            f"The device ran out of memory {doing}.",
            where=f"{self.bootstrap.name}, {runtime.device_name()}",
            why=f"{_first_line(raised)} ({_sizes(runtime.memory_stats())})",
            fix="; ".join(advice_for_scores(config) if reads else advice(config, role, method)),
        )


def advice(config: RunConfig, role: Role, method: str) -> Iterator[str]:
    """Name the settings that lower the memory of a call, the cheapest first, with their current values.

    Args:
        config: Configuration of the run.
        role: Role of the process.
        method: The engine's method that was called, or :data:`BUILDING`.
    """
    engine, rollout, parallel = config.engine, config.rollout, config.parallel
    if role == "rollout":
        yield f"lower rollout.max_batch_size (now {rollout.max_batch_size}) or rollout.max_new_tokens"
        for name, value in rollout.options.items():
            if "memory" in name:
                yield f"change rollout.options.{name} (now {value}), which may reserve more memory than is free"
        if not engine.offload and rollout.placement == "colocated":
            yield "engine.offload=[optimizer,gradients,reference] lets generation use the memory of the training ranks"
        return
    if method in WITH_TOKENS:
        yield f"lower engine.max_tokens_per_micro_batch (now {engine.max_tokens_per_micro_batch})"
        yield f"lower engine.log_prob_chunk_tokens (now {engine.log_prob_chunk_tokens})"
    if method in WITH_GRADIENTS and engine.recompute != "full":
        yield f"set engine.recompute=full (now {engine.recompute})"
    if parallel.data_parallel_size > 1 and not engine.distributed_optimizer:
        yield "engine.distributed_optimizer=true shares the optimizer's state between replicas"
    if not rollout.sleep and rollout.placement == "colocated" and not config.supervised:
        yield "rollout.sleep=true frees the rollout engine's memory during training, if the engine can"
    if method == BUILDING and config.algorithm.kl_coefficient > 0.0 and config.model.lora is None:
        yield "algorithm.kl_coefficient=0 builds no reference model"
    yield (
        "split the model over more devices: parallel.tensor_model_parallel_size "
        f"(now {parallel.tensor_model_parallel_size}), parallel.pipeline_model_parallel_size "
        f"(now {parallel.pipeline_model_parallel_size})"
    )


def advice_for_scores(config: RunConfig) -> Iterator[str]:
    """Name the settings that lower the memory of a reward model, or of the training engine on the same devices.

    Args:
        config: Configuration of the reward model's ranks (:attr:`anytron.config.schema.RunConfig.of_reward_model`).
    """
    section, tensor = config.reward_model, config.parallel.tensor_model_parallel_size
    assert section is not None
    yield f"lower reward_model.max_tokens_per_micro_batch (now {section.max_tokens_per_micro_batch})"
    if not section.offload:
        yield "reward_model.offload=true frees the device while nothing is scored"
    yield "rollout.sleep=true and engine.offload=[optimizer,gradients] leave more memory for the reward model"
    yield f"split the reward model over more devices: reward_model.parallel.tensor_model_parallel_size (now {tensor})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _sizes(memory: MemoryStats) -> str:
    parts = {
        "allocated": memory.allocated,
        "at the peak": memory.peak_allocated,
        "reserved": memory.reserved,
        "in all": memory.total,
    }
    known = {name: count for name, count in parts.items() if count is not None}
    return ", ".join(f"{count / 2**30:.2f} GiB {name}" for name, count in known.items()) or "memory is not known"
