"""MindSpeed's process-wide state: its arguments, its patches for each engine, and the sequences of a micro-batch."""

from __future__ import annotations

import contextlib
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from anytron import Installed, PatchError
from anytron_ascend.mindspeed.installation import find_installation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from anytron import Ledger, ParallelSizes, PatchContext
    from anytron.sequences import SequenceLayout
    from anytron.sequences.scopes import ScopeFactory
    from anytron_ascend.options import MindSpeedOptions


_last: list[dict[str, Any]] = []
"""The arguments that :func:`repatch` was last given in this process, and all that MindSpeed had afterwards."""

GLOBALS = (
    ("mindspeed.utils", "_ACTUAL_SEQ_LEN"),
    ("mindspeed.core.context_parallel.get_batch_utils", "_ACTUAL_SEQ_LEN"),
    ("mindspeed.utils", "_POSITION_IDS"),
)
"""Where MindSpeed core_r0.16.0 keeps a micro-batch's sequence lengths and positions: module and name. Two modules have
a global of the same name; both are set and restored, also when a recomputation runs inside another micro-batch."""


def engine_arguments(defaults: Mapping[str, Any], sizes: ParallelSizes, options: MindSpeedOptions) -> dict[str, Any]:
    """Return all arguments of an engine: ``defaults`` (MindSpeed's own), changed by the sizes and the options.

    Arguments are process-wide and persist: an engine would inherit missing ones from the previous engine. So each
    engine gets a complete set, including MindSpeed's defaults.
    """
    return {
        **defaults,
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "context_parallel_size": sizes.context,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.expert_tensor,
        "sequence_parallel": sizes.sequence_parallel,
        "context_parallel_algo": options.context_parallel_algo,
        "transformer_impl": "transformer_engine",
        "multi_latent_attention": False,
        "use_flash_attn": True,
        # A mask and its mode come together, call by call (anytron_ascend.mindspeed.patches); these hold
        # for calls without a mask: MindSpeed's compressed triangle, left-up causal.
        "attention_mask_type": "causal",
        "sparse_mode": 2,
        # With context parallelism MindSpeed would put a Gated DeltaNet of its own in the place of Megatron's, and it
        # would be the parent of mcore-bridge's layer or not, by which of the two was imported first.
        "gated_delta_net": False,
    }


def import_mindspeed(context: PatchContext) -> Installed:
    """Import MindSpeed, which patches torch and Megatron for its defaults."""
    # Before the import, because MindSpeed replaces importlib.metadata.version.
    installation = find_installation()
    context.platform.runtime()
    with bare_command_line():
        from mindspeed import megatron_adaptor
    return Installed(
        megatron_adaptor.MindSpeedFeaturesManager.remove_patches,
        f"MindSpeed {installation.mindspeed}, megatron-core {installation.megatron}",
    )


def default_arguments() -> dict[str, Any]:
    """Return MindSpeed's arguments with the defaults that it declares."""
    from mindspeed.args_utils import get_mindspeed_args

    return dict(vars(get_mindspeed_args(get_defaults=True)))


def repatch(arguments: Mapping[str, Any], ledger: Ledger) -> bool:
    """Let MindSpeed apply its patches for ``arguments`` (a complete set) and remove those of an earlier engine.

    MindSpeed starts from the original objects, and so drops patches that others (mcore-bridge, the ledger) have made on
    top of its own. They are restored where MindSpeed's own patch is the same as before; elsewhere the ledger applies
    its patches again. Returns False if the previous engine had the same arguments.

    Raises:
        PatchError: A change that is not in the ledger would be lost.
    """
    from mindspeed.args_utils import get_full_args
    from mindspeed.megatron_adaptor import repatch as mindspeed_repatch

    current = vars(get_full_args())
    if _last == [dict(arguments), current]:
        return False
    tops = list(_tops())
    for key in set(current) - set(arguments):
        del current[key]
    with bare_command_line():
        mindspeed_repatch(dict(arguments))
    # Features add further arguments while they patch.
    _last[:] = dict(arguments), dict(current)
    changed = [top for top in tops if not top.put_back()]
    ledger.revalidate()
    if lost := [top.name for top in changed if top.is_lost]:
        raise PatchError(
            "MindSpeed's patches for this engine have discarded other patches.",
            where=", ".join(lost),
            why="other code has changed these functions since the previous engine was built; MindSpeed has "
            "replaced them, and Anytron can repeat only its own patches",
            fix="build engines whose MindSpeed arguments differ, for example with and without context parallelism, in "
            "separate processes",
        )
    return True


def forget_engine() -> None:
    """Delete MindSpeed's state of an earlier engine: destroyed process groups, and its mask."""
    from mindspeed.core.transformer.flash_attention.generate_mask.generate_mask import set_attention_mask
    from mindspeed.te.pytorch.attention.dot_product_attention import utils
    from mindspeed.te.pytorch.module.ops.comm_overlap_ops import COMM_OVERLAP_CONFIG

    COMM_OVERLAP_CONFIG.init_tp_group(None)
    COMM_OVERLAP_CONFIG.init_tp_size(None)
    utils.get_distributed_world_size.cache_clear()
    utils.get_distributed_rank.cache_clear()
    set_attention_mask(None)


class _Top(NamedTuple):
    """A change that someone made on top of one of MindSpeed's patches.

    Attributes:
        name: The patched target.
        patch: MindSpeed's record of its patch.
        recipe: MindSpeed's replacement and wrappers of the target.
        held: The object that the target held, with the change.
    """

    name: str
    patch: Any
    recipe: tuple[Any, ...]
    held: Any

    def put_back(self) -> bool:
        """Restore the change if MindSpeed's patch is the same as before; return whether it was."""
        if _recipe(self.patch) != self.recipe:
            return False
        setattr(self.patch.orig_module, self.patch.orig_func_name, self.held)
        return True

    @property
    def is_lost(self) -> bool:
        """Whether MindSpeed has dropped the change."""
        return vars(self.patch.orig_module).get(self.patch.orig_func_name) is self.patch.final_patch_func


def _tops() -> Iterator[_Top]:
    from mindspeed.patch_utils import MindSpeedPatchesManager

    for name, patch in MindSpeedPatchesManager.patches_info.items():
        if patch.orig_module is None or patch.orig_func_name is None or not patch.is_applied:
            continue
        held = vars(patch.orig_module).get(patch.orig_func_name)
        if held is not None and held is not patch.final_patch_func:
            yield _Top(name, patch, _recipe(patch), held)


def _recipe(patch: Any) -> tuple[Any, ...]:
    return (patch.patch_func, *patch.wrappers)


@contextlib.contextmanager
def bare_command_line() -> Iterator[None]:
    """Hide this process's arguments: MindSpeed reads ``sys.argv`` and interprets unknown arguments as its own."""
    arguments = sys.argv
    sys.argv = arguments[:1]
    try:
        yield
    finally:
        sys.argv = arguments


def sequence_scope(layout: SequenceLayout) -> ScopeFactory:
    """Make scopes within which MindSpeed reads the lengths and positions of a finished layout.

    Lengths are int32 ``[B]``, cumulative, padded, without a leading 0, as ``npu_fusion_attention`` requires in
    layout TND; positions are int64 ``[T, 1]`` (thd) or ``[S, B]`` (bshd), from 0 in each sequence. Both are of all
    context-parallel shards: MindSpeed takes its own part (``rotary_pos_embedding.py``, ``rotary_forward``).
    """
    ends = layout.cu_seqlens_padded[1:].clone()
    if layout.format == "thd":
        starts = torch.repeat_interleave(layout.cu_seqlens_padded[:-1], layout.cu_seqlens_padded.diff())
        positions = (torch.arange(starts.numel(), device=starts.device) - starts)[:, None]
    else:
        positions = torch.arange(layout.max_seqlen, device=ends.device)[:, None].expand(-1, layout.num_sequences)

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        before = _set_globals((ends, ends, positions))
        try:
            yield
        finally:
            _set_globals(before)

    return scope


def _set_globals(values: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Set the globals; return what they held."""
    before = []
    for (module, name), value in zip(GLOBALS, values, strict=True):
        holder = import_module(module)
        before.append(getattr(holder, name))
        setattr(holder, name, value)
    return tuple(before)
