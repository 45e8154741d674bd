"""The device stack of a process in which ms-swift trains."""

from __future__ import annotations

import json
import os
from pathlib import Path

from anytron import AnytronError, EngineError, Patch, Phase
from anytron.train import DeviceStack, open_device_stack
from anytron_swift.cli import fail
from anytron_swift.installation import MS_SWIFT, load

REPORT = "ANYTRON_SWIFT_REPORT"
"""Environment variable that names a directory, in which each rank writes what Anytron has patched in it."""

_stack: DeviceStack | None = None


def start(entry: str) -> None:
    """Open the device stack and run one of ms-swift's entry points in it, which reads its options from ``sys.argv``.

    An :class:`AnytronError` ends the process with status 1, printed as ``anytron`` does: the platform cannot be used,
    Megatron is imported already, a patch cannot be applied, or the platform refuses the model.

    Args:
        entry: Name of the entry point in ``swift.megatron``.
    """
    try:
        _start(entry)
    except AnytronError as error:
        fail(error)


def _start(entry: str) -> None:
    global _stack  # noqa: PLW0603 - a state of the process, as what it patches is
    # CUDA_DEVICE_MAX_CONNECTIONS as in ms-swift's own files (swift/cli/_megatron/sft.py).
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # ms-swift's models are mcore-bridge's, as those of Anytron's engine are. The device stack ends with the process.
    _stack = open_device_stack(engine="megatron")
    _stack.apply_phase(Phase.BEFORE_PARALLEL_INIT)
    run = load("swift.megatron", entry)
    _stack.apply_phase(Phase.BEFORE_BUILD, PATCHES)
    if directory := os.environ.get(REPORT):
        path = Path(directory) / f"patches-{os.getpid()}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_stack.ledger.report(), indent=1) + "\n", encoding="utf-8")
    run()


def stack() -> DeviceStack:
    """Return the device stack of this process.

    Raises:
        EngineError: No device stack was opened.
    """
    if _stack is None:
        raise EngineError(
            "ms-swift runs without Anytron in this process.",
            why="Anytron has patched ms-swift in this process, but has not chosen a platform",
            fix="start ms-swift with the command anytron-swift",
        )
    return _stack


PATCHES = (
    Patch(
        id="swift.prepare-batch",
        owner="swift",
        target="swift.megatron.trainers.utils:prepare_batch",
        phase=Phase.BEFORE_BUILD,
        package=MS_SWIFT.package,
        requires=MS_SWIFT.specifier,
        reason="ms-swift makes a mask of all pairs of tokens, except on NPUs, and layers that keep a state get no mask",
        upstream="https://github.com/modelscope/ms-swift/pull/9196; swift/template/base.py, lines 2151 to 2157",
        remove_when="ms-swift asks its platform for masks",
        replacement="anytron_swift.masks:prepare_batch",
    ),
    Patch(
        id="swift.model-forward",
        owner="swift",
        target="mcore_bridge.model.gpt_model:GPTModel.forward",
        phase=Phase.BEFORE_BUILD,
        package="mcore-bridge",
        reason="ms-swift's trainers call models in eight places, none of which knows the scope of a micro-batch",
        remove_when="ms-swift has one place that runs a micro-batch",
        replacement="anytron_swift.masks:forward",
    ),
)
"""Applied together with the device stack's own patches of the phase."""
