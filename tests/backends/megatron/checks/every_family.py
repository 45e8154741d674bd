"""Build the model of each directory in a folder, and print what the installed libraries say of themselves.

In a process of its own: to import mcore-bridge needs the patches.
"""

import json
import sys
from dataclasses import fields
from pathlib import Path

import torch

from anytron.base.errors import ConfigError
from anytron.base.traits import ParallelSizes
from anytron.device.hooks.types import PatchContext
from anytron.device.loading import hooks_of
from anytron.device.patches import Ledger, Phase
from anytron_cpu import CpuPlatform
from anytron_megatron.patches import trainer_patches


def main(folder: Path) -> None:
    platform = CpuPlatform()
    context = PatchContext(platform, "trainer", hooks_of(platform), "megatron")
    ledger = Ledger(context=context)
    for phase in Phase:
        ledger.apply(phase, trainer_patches(phase, context))
    from mcore_bridge import MLAModelConfig, ModelConfig
    from mcore_bridge.model.register import MODEL_MAPPING

    from anytron_megatron.training.parallel import initialize

    initialize(platform.runtime(), ParallelSizes(), seed=1, timeout_s=60)
    found = {
        "families": sorted({name for meta in MODEL_MAPPING.values() for name in meta.model_types}),
        "options": sorted(field.name for field in fields(ModelConfig)),
        "latent": sorted(field.name for field in fields(MLAModelConfig)),
        "built": {directory.name: outcome(directory) for directory in sorted(folder.iterdir())},
    }
    print(json.dumps(found))


def outcome(directory: Path) -> int | str:
    """Return the number of parameters, or why there is no model: the words of a refusal, or a bare exception."""
    from mcore_bridge import get_mcore_model

    from anytron_megatron.models.bridge import BridgeSource

    try:
        source = BridgeSource(
            directory,
            dtype=torch.float32,
            sizes=ParallelSizes(),
            recompute="none",
            deterministic=False,
            portable=True,
            transformer={},
        )
        (model,) = get_mcore_model(source.config)
    except ConfigError as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001  # what the test looks for
        return f"{type(error).__name__}: {error}"
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
