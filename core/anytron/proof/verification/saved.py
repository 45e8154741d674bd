"""Compare the model directory that a run would write at its end with the one that it begins with."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.base.results import Result
from anytron.proof.verification.comparisons import largest, measured
from anytron.proof.verification.weights import stored_weights
from anytron.run.trainer.models import model_directory, save_model
from anytron.task.data.pretrained import read_hf_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PreTrainedTokenizerBase

    from anytron.config.schema import RunConfig
    from anytron.run.trainer.workers import TrainingWorkers

ABSENT = "absent"
"""What is shown in place of a field that a configuration lacks."""
_OF_FILES = frozenset({"_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"})
"""Fields that describe files and code, and not the model."""
_SHOWN = 3


def check_saved(check: str, config: RunConfig, trainer: TrainingWorkers, tokenizer: PreTrainedTokenizerBase) -> Result:
    """Write the model as a run does at its end, and compare it with the one that the run begins with.

    Args:
        check: Name of the check.
        config: The run's configuration.
        trainer: The training ranks, with the weights that the run begins with.
        tokenizer: The run's tokenizer.

    Raises:
        AnytronError: The engine cannot write the model.
        ConfigError: A ``config.json`` is malformed, or transformers does not know the model.
    """
    with tempfile.TemporaryDirectory(dir=config.trainer.output_dir) as scratch:
        save_model(config, trainer, tokenizer, Path(scratch))
        return compare_saved(check, model_directory(config), Path(scratch))


def compare_saved(check: str, origin: Path, saved: Path) -> Result:
    """Compare two model directories: each field of the configuration, and the tensors that have the same names.

    Configurations are compared as transformers reads them, so that a field that is left out has its default.

    Args:
        check: Name of the check.
        origin: The directory that a run begins with.
        saved: The directory that it writes, in its own dtype, before any update.
    """
    if differing := [*different_fields(read_hf_config(origin).to_dict(), read_hf_config(saved).to_dict())]:
        counted = "1 field differs" if len(differing) == 1 else f"{len(differing)} fields differ"
        shown = ", ".join(differing[:_SHOWN]) + (", ..." if len(differing) > _SHOWN else "")
        return Result(
            check,
            "failed",
            f"{counted} in the saved config.json: {shown}",
            "look at what writes config.json: a field that it leaves out becomes a default of transformers, with which "
            "every other engine computes",
        )
    before, after = stored_weights(origin), stored_weights(saved)
    common = sorted(before.keys() & after.keys())
    if not common:
        return Result(check, "failed", f"none of the {len(before)} tensors has its name in the saved files")
    for name in common:
        if before[name].shape != after[name].shape:
            shapes = f"{list(after[name].shape)}, and was {list(before[name].shape)}"
            return Result(check, "failed", f"the shape of the saved {name} is {shapes}")
    off = {name: largest(before[name].to(after[name].dtype).double() - after[name].double()) for name in common}
    detail = f"{len(common)} of {len(before)} tensors have the same name, and each field of config.json the same value"
    if unequal := [name for name, value in off.items() if value != 0.0]:
        detail = f"{len(unequal)} of {len(common)} saved tensors differ, the first is {unequal[0]}"
    return measured(check, max(off.values()), 0.0, detail)


def different_fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each field of a configuration whose value has changed, nested ones as ``part.field``."""
    first, second = dict(_leaves(before)), dict(_leaves(after))
    for name in sorted(first.keys() | second.keys()):
        values = [_shown(one[name]) if name in one else ABSENT for one in (first, second)]
        if values[0] != values[1]:
            yield f"{name} is {values[1]:.60}, and was {values[0]:.60}"


def _leaves(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if name in _OF_FILES:
            continue
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
