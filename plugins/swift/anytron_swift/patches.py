"""What of ms-swift is replaced: where the mask of padded rows is made, and the model's forward pass, in its scope."""

from __future__ import annotations

from anytron import Patch, Phase
from anytron_swift.installation import MS_SWIFT

PATCHES = (
    Patch(
        id="swift.prepare-batch",
        owner="swift",
        target="swift.megatron.trainers.utils:prepare_batch",
        phase=Phase.BEFORE_BUILD,
        package=MS_SWIFT.package,
        requires=MS_SWIFT.specifier,
        reason=("ms-swift makes a mask of all pairs of tokens, except on NPUs, and layers that keep a state get none"),
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
"""They join the layer's own of the phase."""
