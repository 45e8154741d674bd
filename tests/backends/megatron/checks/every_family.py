"""Build the model of each directory in a folder from its configuration, and print its size.

In a process of its own: to import mcore-bridge needs the patches.
"""

import sys
from pathlib import Path

import torch

from anytron.hooks.types import PatchContext
from anytron.patches import Ledger, Phase
from anytron.plugins import hooks_of
from anytron.traits import ParallelSizes
from anytron_cpu import CpuPlatform
from anytron_megatron.patches import trainer_patches


def main(folder: Path) -> None:
    platform = CpuPlatform()
    context = PatchContext(platform, "trainer", hooks_of(platform), "megatron")
    ledger = Ledger(context=context)
    for phase in Phase:
        ledger.apply(phase, trainer_patches(phase, context))
    from mcore_bridge import get_mcore_model

    from anytron_megatron.models.bridge import BridgeSource
    from anytron_megatron.training.parallel import initialize

    initialize(platform.runtime(), ParallelSizes(), seed=1, timeout_s=60)
    for directory in sorted(folder.iterdir()):
        print(directory.name, end=" ", flush=True)
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
        print(sum(parameter.numel() for parameter in model.parameters()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
