"""Filter the known warnings that importing Megatron emits about itself."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

from anytron.device.patches import Installed

if TYPE_CHECKING:
    from anytron.device.hooks.types import PatchContext

# Regular expressions of how messages begin, and where megatron-core emits them: 0.16.1 unless another is named.
WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    # inference/contexts/__init__.py:9
    (r"The following imports from `dynamic_context\.py` will be removed", DeprecationWarning),
    # transformer/custom_layers/transformer_engine.py, imported by transformer/multi_latent_attention.py:36
    (r"The 'megatron\.core\.transformer\.custom_layers\.transformer_engine'", DeprecationWarning),
    # models/backends.py:21, models/gpt/gpt_layer_specs.py:70
    (r"Apex is not installed\. Falling back to Torch Norm", UserWarning),
    # optimizer/clip_grads.py:29
    (r"Transformer Engine and Apex are not installed\.", UserWarning),
    # 0.17.1 and later: hyper_comm_grid.py:20
    (r"absl\.logging is not installed\.", UserWarning),
)
# Loggers that report their configuration at level INFO, on every rank.
TALKATIVE_LOGGERS = ("megatron.core.distributed.fsdp", "megatron.core.num_microbatches_calculator")


def filter_messages(_context: PatchContext) -> Installed:
    """Filter the warnings, and the talkative loggers below WARNING."""
    filters_before = list(warnings.filters)
    for message, category in WARNINGS:
        warnings.filterwarnings("ignore", message=r"\s*" + message, category=category)
    added = [entry for entry in warnings.filters if entry not in filters_before]
    levels = {name: logging.getLogger(name).level for name in TALKATIVE_LOGGERS}
    for name in TALKATIVE_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)

    def undo() -> None:
        # The end of a warnings.catch_warnings() block may have removed them already.
        for entry in added:
            if entry in warnings.filters:
                warnings.filters.remove(entry)  # type: ignore[attr-defined]
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)

    return Installed(undo)
