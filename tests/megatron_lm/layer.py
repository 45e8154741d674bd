"""What Megatron-LM's tests find when they start: the device stack, and stand-ins for what this machine has not."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from anytron.base.traits import ParallelSizes
from anytron.device.patches import Phase
from anytron.device.platform import EngineFacts
from anytron.train import open_device_stack

OFTEN_IMPORTED = (
    "megatron.training.training",
    "megatron.core.datasets.utils",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.mamba.mamba_model",
    "megatron.core.optimizer",
    "megatron.core.dist_checkpointing",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.pipeline_parallel.schedules",
    "transformers",
)
TEST_FILES = str(Path("tests") / "unit_tests") + os.sep


def open_layer(platform: str) -> None:
    """Open the device stack for the rest of this process, and import what most tests import.

    Tests make and destroy process groups by themselves, many times, so each phase of patches is applied once, here.
    """
    stack = open_device_stack(platform)
    stack.prepare(EngineFacts(ParallelSizes()))
    for phase in (Phase.BEFORE_PARALLEL_INIT, Phase.BEFORE_BUILD):
        stack.apply_phase(phase)
    _say_available_to_tests()
    _stand_in()
    for name in OFTEN_IMPORTED:
        importlib.import_module(name)
    _end_groups()
    # The installed package has its extension compiled, and no Makefile.
    sys.modules["megatron.core.datasets.utils"].compile_helpers = lambda: None  # type: ignore[attr-defined]


def _end_groups() -> None:
    """Let Megatron end the process groups that it forgets: each has a thread of gloo, which wakes all the time.

    Groups of one rank are shared by the device stack, and stay.
    """
    import torch
    from megatron.core import parallel_state

    forget = parallel_state.destroy_model_parallel

    def destroy_model_parallel() -> None:
        made = parallel_state._global_process_group_list or ()
        forget()
        for group in {one for one in made if one is not None and one.size() > 1}:
            with contextlib.suppress(ValueError):  # Megatron has ended it
                torch.distributed.destroy_process_group(group)

    parallel_state.destroy_model_parallel = destroy_model_parallel


def _say_available_to_tests() -> None:
    """Answer True to ``torch.cuda.is_available()`` in test files alone: seventy marks would skip their tests otherwise.

    The stack answers False on purpose, so that libraries take their device-neutral paths.
    """
    import torch

    honest = torch.cuda.is_available

    def is_available() -> bool:
        return TEST_FILES in sys._getframe(1).f_code.co_filename or honest()

    torch.cuda.is_available = is_available


def _stand_in() -> None:
    """Put modules in the place of a download, and of flash_attn, whose version test files ask for."""
    download = ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    download.download_and_extract_asset = lambda **_: None  # type: ignore[attr-defined]
    flash = ModuleType("flash_attn")
    flash.__version__ = "0.0.1"  # type: ignore[attr-defined]
    flash.__spec__ = ModuleSpec("flash_attn", None)
    for module in (download, flash):
        sys.modules.setdefault(module.__name__, module)
