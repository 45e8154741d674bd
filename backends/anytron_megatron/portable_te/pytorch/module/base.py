"""The base of the linear layers: parameters, their tensor-parallel attributes, empty FP8 state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from anytron.base.errors import EngineError
from anytron_megatron.portable_te.refusals import refuse, refuse_settings

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

InitMethod = Callable[[Tensor], object]

# Megatron hides tensor parallelism from the linear layers of experts (their dispatcher communicates) and
# leaves this name as the only trace: their weights are split between ranks although parallel_mode is None.
_EXPERT_RNG = "expert-parallel-rng"


def default_init(weight: Tensor) -> Tensor:
    """Fill a weight as Transformer Engine does if no method is given: normal, deviation 0.023."""
    return torch.nn.init.normal_(weight, mean=0.0, std=0.023)


class TransformerEngineBaseModule(torch.nn.Module):
    """Base of the linear layers.

    Accepted without effect, because they change no result: ``fuse_wgrad_accumulation`` (Megatron's
    gradient buffers add ``param.grad`` themselves if the layer did not) and ``ub_name`` (the name of a buffer for
    overlapped communication, which is refused). Every other setting that requests a feature is refused.

    Args:
        sequence_parallel: Whether inputs (column) or outputs (row) are split along their first dimension.
        tp_group: Tensor-parallel group; may be set later. Its size takes precedence over ``tp_size``.
        get_rng_state_tracker: Function that returns the tracker whose state initialises weights.
        rng_tracker_name: Name of the tracker's state; None = the default one.
        return_bias: Whether to return the bias instead of adding it.
        parallel_mode: ``column`` splits the outputs, ``row`` the inputs, None nothing.

    Raises:
        EngineError: A setting is not supported.
    """

    fp8 = False
    fp8_calibration = False
    save_original_input = False
    """Megatron sets it for FP8 recomputation; the original input is what is saved here anyway."""

    def __init__(
        self,
        *,
        bias: bool = True,
        return_bias: bool = False,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        parallel_mode: str | None = None,
        ub_name: str | None = None,
        **unsupported: Any,
    ) -> None:
        refuse_settings(type(self).__name__, unsupported)
        del fuse_wgrad_accumulation
        super().__init__()
        if parallel_mode not in (None, "column", "row"):
            raise EngineError(
                f"Unknown parallel_mode {parallel_mode!r}.",
                where=f"transformer_engine.pytorch, {type(self).__name__}",
                fix="use column, row or None",
            )
        self.ub_name = ub_name
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self.tp_group = tp_group
        self.tp_size = tensor_parallel_size(tp_group, tp_size)
        self.parallel_mode = parallel_mode
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        # TEGroupedLinear.sharded_state_dict reads it.
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self._get_rng_state_tracker = get_rng_state_tracker
        self._rng_tracker_name = rng_tracker_name

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """Set the group of a layer that was built before groups existed."""
        self.tp_group = tp_group

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Do nothing: there are no FP8 scales to prepare."""

    def backward_dw(self) -> None:
        """Refuse to compute delayed weight gradients.

        Raises:
            EngineError: Always.
        """
        refuse(type(self).__name__, "delayed weight gradients", "set delay_wgrad_compute to false")

    # Checkpoints have an entry ``_extra_state`` per layer: FP8 scales, empty without FP8.

    def get_extra_state(self) -> Tensor:
        """Return an empty state, uint8 ``[0]``."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Accept an empty state.

        Raises:
            EngineError: The state holds FP8 scales.
        """
        if state is not None and state.numel():
            refuse(type(self).__name__, "FP8, and the checkpoint holds FP8 state", "save the checkpoint without FP8")

    def _encode_extra_state(self, state: object) -> Tensor:
        # Called by TEGroupedLinear where it splits and merges the states of its experts.
        del state
        return self.get_extra_state()

    def _decode_extra_state(self, state: Tensor) -> None:
        self.set_extra_state(state)

    def _add_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        init: InitMethod,
        *,
        partition_dim: int | None,
        dtype: torch.dtype | None,
        device: Any,
    ) -> torch.nn.Parameter:
        """Register a parameter, filled by ``init`` in the layer's random state unless on the meta device."""
        parameter = torch.nn.Parameter(torch.empty(*shape, dtype=dtype or torch.get_default_dtype(), device=device))
        if parameter.device.type != "meta":
            with torch.no_grad(), self._rng_state():
                init(parameter)
        # What Megatron's gradient norm and mcore-bridge's LoRA read: is this one part of a split tensor?
        split = partition_dim is not None and (self.parallel_mode is not None or self._rng_tracker_name == _EXPERT_RNG)
        vars(parameter).update(
            tensor_model_parallel=split, partition_dim=partition_dim if split else -1, partition_stride=1
        )
        self.register_parameter(name, parameter)
        return parameter

    def _rng_state(self) -> AbstractContextManager[None]:
        return rng_state(self._get_rng_state_tracker, self._rng_tracker_name)


def tensor_parallel_size(group: ProcessGroup | None, size: int) -> int:
    """Return the number of tensor-parallel ranks as Transformer Engine does: a group takes precedence over a size.

    Args:
        group: Argument ``tp_group`` of a layer.
        size: Argument ``tp_size``. For layers with a norm, Megatron passes the size in its configuration, which
            may differ from the size of the caller's group.
    """
    return size if group is None else dist.get_world_size(group)


def rng_state(get_tracker: Callable[[], Any] | None, name: str | None = None) -> AbstractContextManager[None]:
    """Return a context that draws from state ``name`` of Megatron's RNG tracker; without a tracker, a null context."""
    if get_tracker is None:
        return nullcontext()
    fork: Callable[..., AbstractContextManager[None]] = get_tracker().fork
    return fork(name) if name else fork()
