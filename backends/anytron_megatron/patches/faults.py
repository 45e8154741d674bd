"""Faults of megatron-core, each with the versions that have it and the patch that cures it.

Every range was measured: the tests show each fault on an affected version and the patch skipped on the
others (``tox -e mcore012,mcore013,mcore014,mcore015,mcore016``).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from anytron.patches import Patch, Phase, Supersession

if TYPE_CHECKING:
    from collections.abc import Callable

    from anytron.hooks.types import PatchContext

PACKAGE = "megatron-core"
MLA = "megatron.core.transformer.multi_latent_attention"


def machinery_patches(context: PatchContext, owner: str) -> list[Patch]:
    """Return the patches of what runs models: recomputation, schedules, checkpoints."""
    patches = [
        recompute_scopes(owner),
        recompute_scopes_without_output(owner),
        pipeline_sends(owner),
        checkpoint_format(owner),
    ]
    if _has_transformer_engine(context):
        patches.append(recompute_scopes_transformer_engine(owner))
    return patches


def model_patches(context: PatchContext, owner: str) -> list[Patch]:
    """Return the patches of Megatron's models."""
    patches = [
        mla_packed_rotary(owner),
        mla_packed_qkv(owner),
        mla_padded_positions(owner),
        mla_values(owner),
        mtp_without_labels(owner),
        router_padding(owner),
    ]
    return patches if _has_transformer_engine(context) else [*patches, router_gemm(owner)]


def _has_transformer_engine(context: PatchContext) -> bool:
    return context.platform.portable_modules or find_spec("transformer_engine") is not None


def mla_packed_rotary(owner: str) -> Patch:
    """Rotate packed queries and keys that still have their dimension of size 1."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        from anytron_megatron.patches.mla_packing import rotating_with_a_batch_dimension

        return rotating_with_a_batch_dimension(original)

    return Patch(
        id="megatron.mla-packed-rotary",
        owner=owner,
        target="megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd",
        phase=Phase.BEFORE_BUILD,
        package=PACKAGE,
        requires="<0.13",
        reason="packed queries of multi-latent attention are [T, 1, N, D], and the rotary embedding broadcasts over 1",
        upstream="megatron-core 0.12.3, multi_latent_attention.py, qkv_up_proj_and_rope_apply; verl #6005",
        remove_when="megatron-core before 0.13 is not supported",
        replacement=replace,
    )


def mla_packed_qkv(owner: str) -> Patch:
    """Give packed attention kernels three dimensions."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        from anytron_megatron.patches.mla_packing import dropping_the_batch_dimension

        return dropping_the_batch_dimension(original)

    return Patch(
        id="megatron.mla-packed-qkv",
        owner=owner,
        target=f"{MLA}:MLASelfAttention.get_query_key_value_tensors",
        phase=Phase.BEFORE_BUILD,
        package=PACKAGE,
        requires="<0.13",
        reason="with packed sequences it gives [T, 1, N, D], and thd kernels take [T, N, D]",
        upstream="megatron-core 0.12.3, multi_latent_attention.py; verl #6005",
        remove_when="megatron-core before 0.13 is not supported",
        replacement=replace,
    )


def mla_padded_positions(owner: str) -> Patch:
    """Rotate packed sequences where they lie in the buffer, padding included."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        from anytron_megatron.patches.mla_packing import rotating_padded_sequences

        return rotating_padded_sequences(original)

    return Patch(
        id="megatron.mla-padded-positions",
        owner=owner,
        target=f"{MLA}:MLASelfAttention.get_query_key_value_tensors",
        phase=Phase.BEFORE_BUILD,
        package=PACKAGE,
        requires="<0.14",
        reason="it cuts a packed buffer at the real lengths, although sequences lie at the padded ones",
        upstream="megatron-core 0.14.0, multi_latent_attention.py, line 511: 'if ... cu_seqlens_q_padded is not None'",
        remove_when="megatron-core before 0.14 is not supported",
        replacement=replace,
    )


def mla_values(owner: str) -> Patch:
    """Let kernels that want values as wide as queries compute multi-latent attention."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        from anytron_megatron.patches.mla_values import padding_values

        return padding_values(original)

    return Patch(
        id="megatron.mla-values",
        owner=owner,
        target=f"{MLA}:MultiLatentAttention.forward",
        phase=Phase.BEFORE_BUILD,
        package=PACKAGE,
        # 0.17.0 and 0.17.1 left without #3003, which 0.18.0 has; the engine refuses them.
        requires="<0.16.2",
        reason="packed attention kernels (Transformer Engine's, MindSpeed's TND) want values as wide as queries",
        upstream="https://github.com/NVIDIA/Megatron-LM/pull/3003, verl #6005",
        remove_when="megatron-core before 0.16.2 is not supported",
        replacement=replace,
        superseded_by=(
            Supersession(
                target="mcore_bridge.model.modules.multi_latent_attention:MLASelfAttention.forward",
                package="mcore-bridge",
                requires=">=1.6.5,<1.7",
                reason="models that mcore-bridge builds have a class with its own forward, which pads values",
            ),
        ),
    )


def mtp_without_labels(owner: str) -> Patch:
    """Let models with multi-token prediction score and generate."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        from anytron_megatron.patches.multi_token_prediction import leaving_out_without_labels

        return leaving_out_without_labels(original)

    return Patch(
        id="megatron.mtp-without-labels",
        owner=owner,
        target="megatron.core.models.gpt.gpt_model:GPTModel.forward",
        phase=Phase.BEFORE_BUILD,
        package=PACKAGE,
        requires="<0.17",
        reason="multi-token prediction clones the labels, and a model that scores or generates is given none",
        upstream="megatron-core 0.16.1, gpt_model.py, line 612: labels.clone(); verl patch.py, MTP inference",
        remove_when="megatron-core before 0.17 is not supported",
        replacement=replace,
    )


def router_padding(owner: str) -> Patch:
    """Keep padding out of the statistics of routing."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        from anytron_megatron.patches.router_padding import masking_padding

        return masking_padding(original)

    return Patch(
        id="megatron.router-padding",
        owner=owner,
        target="megatron.core.transformer.moe.router:TopKRouter.forward",
        phase=Phase.BEFORE_BUILD,
        package=PACKAGE,
        requires=">=0.16",
        reason=(
            "padding counts in auxiliary losses and expert biases: mcore-bridge's forward takes no padding mask, and "
            "that of its vision models drops what it does not know, on later pipeline stages always"
        ),
        upstream="mcore_bridge/model/gpt_model.py, forward; mcore_bridge/model/mm_gpt_model.py, line 125: kwargs = {}",
        remove_when="mcore-bridge's models take padding_mask, as megatron.core's GPTModel.forward does",
        replacement=replace,
    )


def pipeline_sends(owner: str) -> Patch:
    """Let interleaved pipelines send what they computed."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        from anytron_megatron.patches.pipeline_sends import sending_aliases

        return sending_aliases(original)

    return Patch(
        id="megatron.pipeline-sends",
        owner=owner,
        target="megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
        phase=Phase.BEFORE_BUILD,
        package=PACKAGE,
        reason=(
            "an interleaved pipeline frees what it sends before it is sent: over gloo the next stage receives "
            "what happens to lie there, the more often the busier the machine"
        ),
        upstream="megatron/core/pipeline_parallel/schedules.py, deallocate_output_tensor behind an asynchronous send",
        remove_when="the schedule waits for a send before it frees the tensor",
        replacement=replace,
    )


def checkpoint_format(owner: str) -> Patch:
    """Write distributed checkpoints with torch 2.7 and later."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        from anytron_megatron.patches.checkpoint_writing import naming_the_format

        return naming_the_format(original)

    return Patch(
        id="megatron.checkpoint-format",
        owner=owner,
        target="megatron.core.dist_checkpointing.strategies.filesystem_async:_write_item",
        phase=Phase.BEFORE_BUILD,
        package=PACKAGE,
        requires="<0.13",
        reason="saving fails: _write_item() missing 1 required positional argument: 'serialization_format'",
        upstream="https://github.com/modelscope/ms-swift/issues/4111, https://github.com/ROCm/Megatron-LM/pull/83",
        remove_when="megatron-core before 0.13 is not supported",
        required=False,  # the module needs psutil, and who saves no distributed checkpoint needs neither
        rebinds=False,  # the function is torch's
        replacement=replace,
    )


def router_gemm(owner: str) -> Patch:
    """Let routers of mixtures of experts compute without Transformer Engine."""

    def install() -> Callable[[], None]:
        from anytron_megatron.patches.router_gating import define_missing_gemm

        return define_missing_gemm()

    return Patch(
        id="megatron.router-gemm",
        owner=owner,
        target="megatron.core.transformer.moe.moe_utils:te_general_gemm",
        phase=Phase.BEFORE_BUILD,
        package=PACKAGE,
        requires=">=0.13,<0.17",
        reason="without Transformer Engine the router fails: NameError: name 'te_general_gemm' is not defined",
        upstream="megatron-core 0.16.1, moe_utils.py, lines 16 to 39 and 1192; 0.19 defines it as None",
        remove_when="megatron-core before 0.17 is not supported",
        install=install,
    )


def recompute_scopes(owner: str) -> Patch:
    """Recompute a layer inside its own micro-batch's scope."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        from anytron_megatron.patches.recompute_scopes import rescoping_function

        return rescoping_function(original)

    return _rescoping("", "megatron.core.tensor_parallel.random:checkpoint", owner, replace)


def recompute_scopes_without_output(owner: str) -> Patch:
    """Recompute a part of a layer whose output was dropped inside its own micro-batch's scope."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        from anytron_megatron.patches.recompute_scopes import rescoping_method

        return rescoping_method(original)

    target = "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.checkpoint"
    return _rescoping(".without-output", target, owner, replace)


def recompute_scopes_transformer_engine(owner: str) -> Patch:
    """Recompute a layer through Transformer Engine inside its own micro-batch's scope."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        from anytron_megatron.patches.recompute_scopes import rescoping_function

        return rescoping_function(original)

    target = "megatron.core.extensions.transformer_engine:te_checkpoint"
    return _rescoping(".transformer-engine", target, owner, replace)


def _rescoping(suffix: str, target: str, owner: str, replace: Callable[[Any], Any]) -> Patch:
    return Patch(
        id="megatron.recompute-scopes" + suffix,
        owner=owner,
        target=target,
        phase=Phase.BEFORE_BUILD,
        package=PACKAGE,
        reason=(
            "what is recomputed in the backward pass would see the device state of another micro-batch, or none: "
            "autograd runs it later, on a thread of its own"
        ),
        upstream="verl util.py, preprocess_for_mindspeed: process globals, read by recomputed functions",
        remove_when="no device needs process-global state around a micro-batch",
        replacement=replace,
    )
