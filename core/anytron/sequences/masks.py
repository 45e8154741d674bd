"""Attention masks that plugins build: the type of a mask says how to read it.

A mask is computed from the :class:`~anytron.sequences.SequenceLayout`, and no code derives a layout from a mask. The
polarity is stored with the mask, because common conventions contradict each other: Megatron's softmax and
``npu_fusion_attention`` read True as *masked*, Hugging Face and most Python code read True as *keep*.
"""

from __future__ import annotations

import contextlib
import contextvars
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NoReturn

from anytron.base.errors import HookContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from anytron.base.traits import ModelTraits, ParallelSizes
    from anytron.sequences.layout import SequenceLayout
    from anytron.sequences.scopes import ScopeFactory

    MaskReader = Callable[["AttnMask", Sequence[SequenceLayout], ModelTraits], set["Pair"]]
    """Return the pairs that a vendor's attention lets through, from a mask and the layouts of all shards."""

Pair = tuple[int, int]
"""(query token, key token), flat."""


class MaskKind(str, Enum):
    """The forms in which a mask can reach a model."""

    NONE = "none"
    """No tensor: the kernel knows all it needs (``cu_seqlens``, or plain causal on right padding)."""
    PADDING_2D = "padding-2d"
    """bool ``[B, S]``: which tokens are real; the model packs or masks by it."""
    FULL_4D = "full-4d"
    """bool ``[B, 1, C, S]``: every pair of a query of this rank and a key of *any* context-parallel rank,
    keys in order of position; ``[B, 1, S, S]`` without context parallelism."""


class Polarity(str, Enum):
    """Meaning of True in a mask."""

    KEEP = "keep"
    """True = real token, may attend."""
    MASKED = "masked"
    """True = forbidden."""


MODEL_POLARITY: Mapping[MaskKind, Polarity] = MappingProxyType(
    {
        # Models that pack or mask by the 2-D map read it as Hugging Face does.
        MaskKind.PADDING_2D: Polarity.KEEP,
        # Megatron's softmax and Transformer Engine's `arbitrary`.
        MaskKind.FULL_4D: Polarity.MASKED,
    }
)
"""What True means to a model that is handed a mask of this kind."""


@dataclass(frozen=True)
class MaskRequest:
    """A request for the mask of one micro-batch, or for a mask without a tensor when the engine is built.

    Attributes:
        format: ``thd`` or ``bshd``.
        traits: Properties of the model.
        parallel: The parallel sizes.
        accepted: The kinds that can reach the model's attention, as the engine says (docs/reference/families.md).
        layout: The micro-batch's layout; None when the engine is built. The kind and kernel mode of the mask must
            depend on the other fields only.
    """

    format: Literal["thd", "bshd"]
    traits: ModelTraits
    parallel: ParallelSizes
    accepted: frozenset[MaskKind]
    layout: SequenceLayout | None = None


@dataclass(frozen=True)
class AttnMask:
    """The result of ``build_attn_mask``.

    Attributes:
        kind: Form of ``tensor``.
        kernel_mode: How the attention kernel must read ``tensor``: any word that the platform's own kernel knows; the
            reference kernel knows Transformer Engine's ``attn_mask_type``
            (:mod:`anytron.kernels.attention`). A mask and its mode always travel together.
        tensor: The mask itself, shaped as ``kind`` says; None for kind ``none`` and when the engine is built.
        polarity: Meaning of True in ``tensor``; None if and only if ``tensor`` is None.
        padding_mask: bool ``[R, C]``, True = MASKED, for MoE routing; None if nothing reads it.
        linear_attn_mask: bool ``[B, S]`` over all context-parallel shards, True = KEEP, for
            Gated DeltaNet; None if nothing reads it.
        reader: For platforms whose modules are not portable: returns which pairs of tokens the vendor's attention lets
            through, given this mask. It is required for a mode that Transformer Engine does not have, because the
            engine cannot call the vendor's kernel by itself; otherwise None.
        plugin: Name of the plugin that built the mask, for messages; the core fills it in.
    """

    kind: MaskKind
    kernel_mode: str
    tensor: Tensor | None = None
    polarity: Polarity | None = None
    padding_mask: Tensor | None = None
    linear_attn_mask: Tensor | None = None
    reader: MaskReader | None = field(default=None, compare=False, repr=False)
    plugin: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.polarity is not None and not isinstance(self.polarity, Polarity):
            raise HookContractError(
                "A mask's polarity must be Polarity.KEEP or Polarity.MASKED.",
                where="AttnMask",
                why=f"it is {self.polarity!r}",
                fix="import Polarity from anytron.sequences",
            )
        if (self.tensor is None) != (self.polarity is None):
            raise HookContractError(
                "A mask must have both a tensor and a polarity, or neither.",
                where="AttnMask",
                why=f"the tensor is {'absent' if self.tensor is None else 'given'}, the polarity is {self.polarity}",
                fix="give both, or neither",
            )
        if self.kind is MaskKind.NONE and self.tensor is not None:
            raise HookContractError(
                "A mask of kind 'none' must not have a tensor.",
                where="AttnMask",
                fix="remove the tensor, or name its form: MaskKind.PADDING_2D or MaskKind.FULL_4D",
            )

    def read_as(self, polarity: Polarity) -> Tensor | None:
        """Return the tensor in the given polarity, negated if it has the other one."""
        if self.tensor is None or self.polarity is polarity:
            return self.tensor
        return ~self.tensor

    def for_model(self) -> Tensor | None:
        """Return the tensor to pass to a model, in the polarity that models expect for this kind."""
        return None if self.tensor is None else self.read_as(MODEL_POLARITY[self.kind])


_current: contextvars.ContextVar[AttnMask | None] = contextvars.ContextVar("anytron_mask", default=None)


def scope_of(mask: AttnMask) -> ScopeFactory:
    """Return a factory of scopes within which :func:`current_mask` returns ``mask``.

    Each scope belongs to one micro-batch (:mod:`anytron.sequences.scopes`): a recomputation never
    sees the mask of another micro-batch. A full mask is turned into the polarity that kernels read, once for all
    layers.
    """
    if mask.kind is MaskKind.FULL_4D and mask.tensor is not None:
        mask = replace(mask, tensor=mask.read_as(Polarity.MASKED), polarity=Polarity.MASKED)

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        token = _current.set(mask)
        try:
            yield
        finally:
            _current.reset(token)

    return scope


def current_mask() -> AttnMask | None:
    """Return the mask for the micro-batch whose forward pass, or recomputation, is running; None without one."""
    return _current.get()


def check_mask(mask: AttnMask, request: MaskRequest, built: AttnMask | None, plugin: str) -> None:
    """Check that the mask that a plugin built obeys the rules of ``build_attn_mask``.

    Args:
        mask: The mask.
        request: The request for which the plugin built it.
        built: The mask that the plugin returned when the engine was built; None if ``mask`` is that one.
        plugin: Name of the plugin, for the message.

    Raises:
        HookContractError: The mask breaks a rule; the error names the plugin and the rule.
    """

    def refuse(rule: str, why: str) -> NoReturn:
        raise HookContractError(
            f"build_attn_mask of plugin '{plugin}' broke its contract: {rule}.",
            where=f"plugin {plugin}",
            why=why,
            fix="correct build_attn_mask in the plugin; docs/reference/hooks.md has its contract",
        )

    if not isinstance(mask, AttnMask):
        refuse("its result must be an AttnMask", f"it is a {type(mask).__name__}")
    if mask.kind not in request.accepted:
        names = ", ".join(sorted(kind.value for kind in request.accepted))
        refuse("the kind must be one that the model accepts", f"it is {mask.kind.value}, not one of: {names}")
    if built is not None and (mask.kind, mask.kernel_mode) != (built.kind, built.kernel_mode):
        refuse(
            "kind and kernel mode must stay as they were when the engine was built",
            f"they were {built.kind.value}/{built.kernel_mode}, and are now {mask.kind.value}/{mask.kernel_mode}",
        )
    layout = request.layout
    if layout is None:
        return
    if mask.tensor is None and mask.kind is not MaskKind.NONE:
        refuse("a micro-batch's mask needs a tensor", f"the mask has the kind {mask.kind.value}, but no tensor")
    if request.traits.linear_attention and request.format == "bshd" and mask.linear_attn_mask is None:
        refuse(
            "recurrent layers in bshd need linear_attn_mask",
            "it is None, and padding would enter their state; give bool [B, S], True = keep",
        )
    for name in ("tensor", "padding_mask", "linear_attn_mask"):
        tensor: Tensor | None = getattr(mask, name)
        if tensor is not None:
            _check_tensor(name, tensor, mask.kind, layout, refuse)


def _check_tensor(
    name: str, tensor: Tensor, kind: MaskKind, layout: SequenceLayout, refuse: Callable[[str, str], NoReturn]
) -> None:
    if tensor.dtype is not layout.valid.dtype:  # bool, without importing torch
        refuse("masks must be bool", f"{name} is {tensor.dtype}")
    shapes = _shapes(name, kind, layout)
    if tensor.shape not in shapes:
        expected = " or ".join(str(tuple(shape)) for shape in dict.fromkeys(shapes))
        refuse("a mask must have the shape of its kind", f"{name} has {tuple(tensor.shape)}, not {expected}")


def _shapes(name: str, kind: MaskKind, layout: SequenceLayout) -> list[tuple[int, ...]]:
    """The shapes that a tensor of a mask may have."""
    if name == "padding_mask":
        return [layout.valid.shape]
    if name == "linear_attn_mask" and layout.format == "bshd":
        return [(layout.num_sequences, layout.max_seqlen)]
    if name == "linear_attn_mask" or kind is MaskKind.PADDING_2D:
        return [(layout.num_sequences, layout.longest), (layout.num_sequences, layout.max_seqlen)]
    rows, columns = layout.shape
    return [(rows, 1, columns, columns * layout.shard.size)]
