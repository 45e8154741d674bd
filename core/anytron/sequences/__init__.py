"""How ragged batches are arranged for a model: layouts, packing, unpacking, scopes.

Legend of shape suffixes used in this package:

====  ==========================================================================================
T     real tokens of a (micro-)batch, sequences concatenated, no padding ("flat")
B     sequences
R, C  rows and columns of the local model input: thd has R = 1, bshd has R = B
N     slots of one rank, N = R * C (real tokens and padding)
====  ==========================================================================================
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron.sequences.batch import RaggedBatch
    from anytron.sequences.layout import ContextShard, Format, LayoutConstraints, ModelInputs, SequenceLayout
    from anytron.sequences.masks import AttnMask, MaskKind, MaskRequest, Pair, Polarity, current_mask
    from anytron.sequences.planning import plan_layout
else:

    def __getattr__(name: str) -> object:
        from anytron.base.lazy import find

        return find(__name__, name)


__all__ = [
    "AttnMask",
    "ContextShard",
    "Format",
    "LayoutConstraints",
    "MaskKind",
    "MaskRequest",
    "ModelInputs",
    "Pair",
    "Polarity",
    "RaggedBatch",
    "SequenceLayout",
    "current_mask",
    "plan_layout",
]
