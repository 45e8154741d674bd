"""The training engine ``megatron``: Hugging Face models trained with Megatron-Core and mcore-bridge.

Its public names are for custom trainers and for engines that reuse parts of this engine. ``plugin`` and
``checks`` import no Megatron and run in the driver; ``engine`` runs in training ranks, after the patches.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron_megatron.checks.run import split_diagnostics
    from anytron_megatron.checks.subject import models_of
    from anytron_megatron.checks.training import optimizer_diagnostics
    from anytron_megatron.engine import MegatronEngine
    from anytron_megatron.estimate.run import estimate as estimate_training
    from anytron_megatron.models.configuration import accepted_masks, features_of, traits_of
    from anytron_megatron.own_trainer import batch_preparer, forward, join, token_log_probs
    from anytron_megatron.patches.triton_stand_in import stand_in_during_imports
    from anytron_megatron.training.micro_batch import BatchPreparer, PreparedBatch
    from anytron_megatron.training.parallel import context_shard
    from anytron_megatron.training.vendor_attention import set_mask_type
else:

    def __getattr__(name: str) -> object:
        from anytron.base.lazy import find

        return find(__name__, name)


__all__ = [
    "BatchPreparer",
    "MegatronEngine",
    "PreparedBatch",
    "accepted_masks",
    "batch_preparer",
    "context_shard",
    "estimate_training",
    "features_of",
    "forward",
    "join",
    "models_of",
    "optimizer_diagnostics",
    "set_mask_type",
    "split_diagnostics",
    "stand_in_during_imports",
    "token_log_probs",
    "traits_of",
]
