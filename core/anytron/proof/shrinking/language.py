"""New sizes of a language model: depth and width are cut, and ratios, patterns and flags stay.

Fields are recognised by the names that published ``config.json`` files use, whatever the family.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Any

from anytron.task.data.model_files import CHOSEN_EXPERTS, EXPERT_COUNTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from anytron.base.traits import ParallelSizes

DEPTH = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
HEADS = ("num_attention_heads", "n_heads", "n_head")
WIDTH = ("hidden_size", "d_model", "n_embd")
VOCABULARY = "vocab_size"
_GROUPS = "num_key_value_heads"
_OTHER_GROUPS = "num_global_key_value_heads"
"""Gemma 4's layers without a window have these groups of heads, of another size."""
_HEAD_DIMS = (
    "head_dim",
    "global_head_dim",
    "qk_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rotary_dim",
)
_INDEXER = ("index_head_dim",)
_DELTA_DIMS = ("linear_key_head_dim", "linear_value_head_dim")
_RANKS = ("q_lora_rank", "kv_lora_rank")
_MLP = (
    "intermediate_size",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "expert_hidden_dim",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "intermediate_size_mlp",
    "dense_intermediate_size",
)
_WINDOW = "sliding_window"
_DENSE = "first_k_dense_replace"
_NUMBERED = ("mlp_only_layers", "moe_layers")
"""Lists of layers' numbers."""
_INTERVALS = (
    "full_attention_interval",
    "decoder_sparse_step",
    "moe_layer_freq",
    "sliding_window_pattern",
    "interleave_moe_layer_step",
)
_LONGEST_PERIOD = 16
_LARGEST_HEAD = 2**14

HEAD_DIM = 16
"""Smallest size of a head. Below 16, some kernels of attention do not run."""
LATENT_SHARE = 32
"""The ranks of latent attention are divided by this."""
TOKENS = 128
"""Least tokens of a vocabulary."""
WINDOW = 8
"""Tokens of a sliding window: fewer than the prompts have, so that the window has an effect."""


@dataclass(frozen=True)
class Depth:
    """The layers that stay.

    Attributes:
        before: Layers of the published model.
        kept: Their numbers in the published model, ascending.
    """

    before: int
    kept: tuple[int, ...]

    def of(self, values: list[Any], more: int) -> list[Any] | None:
        """Cut a list with one entry per layer, and perhaps one for each of ``more`` prediction modules.

        Returns:
            The entries of the kept layers, and of the modules; None if the list has another length.
        """
        if len(values) not in (self.before, self.before + more):
            return None
        return [values[layer] for layer in self.kept] + values[self.before :]

    def places(self, layers: list[int]) -> list[int]:
        """Give the new numbers of those layers that are kept."""
        return [self.kept.index(layer) for layer in layers if layer in self.kept]


def first(known: Mapping[str, Any], names: Iterable[str]) -> tuple[str, Any]:
    """Return the first of these fields that is set, with its value; ("", None) if none is."""
    return next(((name, known[name]) for name in names if known.get(name) is not None), ("", None))


def rotations(known: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Find the settings of rotary embeddings; some families have them for each type of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = known.get(name)
        if isinstance(settings, dict):
            yield settings
            yield from (one for one in settings.values() if isinstance(one, dict))


def new_depth(known: Mapping[str, Any], before: int, stages: int) -> Depth:
    """Choose the layers that stay: at least four, every kind of layer in its order, and as many on each stage.

    Args:
        known: Fields of the language model.
        before: Layers of the published model.
        stages: Pipeline stages.
    """
    dense = known.get(_DENSE) or 0
    begins = dense - 1 if 1 < dense < before else 0  # one of several dense layers at the beginning is enough
    kinds = [
        (
            *(column[layer] for column in _columns(known, before)),
            layer < dense,
            *(layer in (known.get(name) or ()) for name in _NUMBERED),
        )
        for layer in range(before)
    ]
    least = max(4, min(1, dense) + _period(known, kinds[begins:]))
    unit = stages if stages == 1 else 2 * stages
    wanted = min(before, -(-least // unit) * unit)
    kept = [*range(begins, before)][:wanted]
    missing = [kinds.index(kind) for kind in dict.fromkeys(kinds) if kind not in {kinds[layer] for layer in kept}]
    if missing:  # the pattern has no period: some of each kind, and the rest from the beginning
        firsts = sorted({kinds.index(kind) for kind in kinds})
        others = [layer for layer in range(before) if layer not in firsts]
        count = max(wanted, min(before, -(-len(firsts) // unit) * unit))
        kept = sorted([*firsts, *others[: count - len(firsts)]])
    return Depth(before, tuple(kept))


def _columns(known: Mapping[str, Any], before: int) -> list[list[Any]]:
    """Lists with an entry for each layer."""
    lists = [
        value
        for name, value in known.items()
        if name not in _NUMBERED and isinstance(value, list) and len(value) == before
    ]
    return [column for column in lists if all(isinstance(one, (str, int, float, bool)) for one in column)]


def _period(known: Mapping[str, Any], kinds: list[Any]) -> int:
    """After how many layers the pattern of layers repeats; 1 if it has none, or only a long one."""
    spans = [value for name in _INTERVALS if isinstance(value := known.get(name), int) and value > 1]
    for span in range(1, min(_LONGEST_PERIOD, len(kinds)) + 1):
        later = kinds[1 + span :]  # the first may be the dense one
        if all(kind == kinds[1 + place] for place, kind in enumerate(later)):
            spans.append(span)
            break
    return min(lcm(*spans), _LONGEST_PERIOD) if spans else 1


def new_sizes(known: Mapping[str, Any], layout: ParallelSizes) -> dict[str, Any]:
    """Choose the sizes of a language model, except its depth.

    Args:
        known: Fields of the language model, with the defaults of its class.
        layout: Parallel sizes by which heads, widths and experts stay divisible.

    Returns:
        New values by field, for the fields that are set and change.
    """
    new = {**_attention(known, layout), **_experts(known, layout)}
    _, width = first(known, WIDTH)
    heads, groups = new["heads"], new.pop(_GROUPS)
    share = _share_of_heads(known)
    dims = {name: known[name] // share for name in (*_HEAD_DIMS, *_INDEXER) if _is_multiple(known.get(name), share)}
    head = _head(known)
    squared = head * first(known, HEADS)[1] == width and not known.get("kv_lora_rank")
    own = heads * (head // share)
    new_width = own if squared else 64 if own != 64 else 80
    unit = 16 * lcm(layout.tensor, layout.expert_tensor)
    mlps = {name: scaled(known[name], width, new_width, unit) for name in _MLP if known.get(name)}
    del new["heads"]
    chosen = {
        **new,
        **dims,
        **mlps,
        **{name: min(known[name], HEAD_DIM) for name in _DELTA_DIMS if known.get(name)},
        **{name: max(8, known[name] // LATENT_SHARE) for name in _RANKS if known.get(name)},
        **({_WINDOW: WINDOW} if (known.get(_WINDOW) or 0) > WINDOW else {}),
        **dict.fromkeys(HEADS, heads),
        _GROUPS: groups,
        **dict.fromkeys(WIDTH, new_width),
        VOCABULARY: TOKENS + known[VOCABULARY] % 8,  # a vocabulary that ranks must pad stays one
        "index_topk": WINDOW,
    }
    return {name: value for name, value in chosen.items() if known.get(name) is not None and known[name] != value}


def _is_multiple(size: Any, share: int) -> bool:
    return isinstance(size, int) and size > 0 and size % share == 0


def scaled(size: int, before: int, after: int, unit: int) -> int:
    """Scale a size with the model's width, to a multiple of ``unit``, 32 or more."""
    return unit * max(-(-32 // unit), round(size * after / before / unit))


def _attention(known: Mapping[str, Any], layout: ParallelSizes) -> dict[str, Any]:
    """Numbers of heads; the heads of a group stay as many."""
    _, heads = first(known, HEADS)
    groups = known.get(_GROUPS) or heads
    unit = layout.tensor * layout.context
    fewer = 4 if groups == heads else 2
    new_groups = _count(groups, fewer, unit)
    new = {"heads": heads // groups * new_groups if heads % groups == 0 else heads, _GROUPS: new_groups}
    keys, values = known.get("linear_num_key_heads"), known.get("linear_num_value_heads")
    if keys and values:
        new["linear_num_key_heads"] = _count(keys, 2, unit)
        new["linear_num_value_heads"] = max(1, values // keys) * new["linear_num_key_heads"]
    if known.get(_OTHER_GROUPS):
        new[_OTHER_GROUPS] = _count(known[_OTHER_GROUPS], fewer, unit)
    if known.get("index_n_heads"):
        new["index_n_heads"] = _count(known["index_n_heads"], 4, unit)
    return new


def _count(before: int, wanted: int, unit: int) -> int:
    """About ``wanted`` of ``before`` things: a multiple of ``unit`` if they were one."""
    step = unit if before % unit == 0 else 1
    return min(before, -(-wanted // step) * step)


def _head(known: Mapping[str, Any]) -> int:
    width, heads = first(known, WIDTH)[1], first(known, HEADS)[1]
    return int(known.get("head_dim") or width // heads)


def _share_of_heads(known: Mapping[str, Any]) -> int:
    """By how much the sizes of heads are divided: as much as their rotary parts and sections allow."""
    least = 2
    for settings in rotations(known):
        least = max(least, 2 * (len(settings.get("mrope_section") or ()) + 1))
    if known.get("kv_lora_rank"):
        sizes = {known[name]: HEAD_DIM for name in ("qk_nope_head_dim", "v_head_dim") if known.get(name)}
        rotary = known.get("qk_rope_head_dim") or 0
        least = max(least, HEAD_DIM // 2)
    else:
        head = _head(known)
        sizes = {head: HEAD_DIM}
        parts = [one.get("partial_rotary_factor") for one in (*rotations(known), known)]
        rotary = known.get("rotary_dim") or int(head * next((part for part in parts if part), 1.0))
    for share in range(min(max(sizes, default=1), _LARGEST_HEAD) // HEAD_DIM, 0, -1):
        fits = all(size % share == 0 and size // share >= low for size, low in sizes.items())
        if fits and rotary % share == 0 and rotary // share % 2 == 0 and (not rotary or rotary // share >= least):
            return share
    return 1


def _experts(known: Mapping[str, Any], layout: ParallelSizes) -> dict[str, Any]:
    """Numbers of experts and of their groups; a group is rated by as many experts as before."""
    _, experts = first(known, EXPERT_COUNTS)
    _, chosen = first(known, CHOSEN_EXPERTS)
    if not isinstance(experts, int) or not isinstance(chosen, int) or experts < 1:
        return {}
    groups, limited = known.get("n_group") or 1, known.get("topk_group") or 1
    new: dict[str, Any] = {}
    if groups > 1:
        new["n_group"] = new_groups = min(groups, 4)
        new["topk_group"] = new_limited = max(1, limited * new_groups // groups)
        new_chosen = min(chosen, new_limited * max(1, chosen // limited))
    else:
        new_groups, new_chosen = 1, min(chosen, 2)
    least = max(8, 2 * layout.expert, 4 * new_groups)
    new_experts = _count(experts, least, lcm(layout.expert, new_groups))
    return {**new, **dict.fromkeys(EXPERT_COUNTS, new_experts), **dict.fromkeys(CHOSEN_EXPERTS, new_chosen)}


def new_rotation(settings: dict[str, Any], before: int, after: int) -> dict[str, Any]:
    """Cut the sections, and the factors for each frequency, of rotary embeddings.

    Args:
        settings: Settings of rotary embeddings; those of single types of layers are in it.
        before: Size of a head.
        after: New size of a head.
    """
    new = dict(settings)
    for name, value in settings.items():
        if isinstance(value, dict):
            new[name] = new_rotation(value, before, after)
        elif name == "mrope_section" and isinstance(value, list):
            half = sum(value) * after // before
            later = [max(1, half * section // sum(value)) for section in value[1:]]
            new[name] = [half - sum(later), *later]
        elif name in ("long_factor", "short_factor") and isinstance(value, list):
            new[name] = value[: len(value) * after // before]
    return new


def new_layer_fields(known: Mapping[str, Any], depth: Depth) -> dict[str, Any]:
    """Cut the fields that depend on the depth.

    Args:
        known: Fields of the language model.
        depth: The layers that stay.

    Returns:
        New values by field, for the fields that change.
    """
    after = len(depth.kept)
    modules = known.get("num_nextn_predict_layers") or 0
    new: dict[str, Any] = {name: after for name in DEPTH if known.get(name) is not None}
    for name, value in known.items():
        if name not in _NUMBERED and isinstance(value, list) and (kept := depth.of(value, modules)) is not None:
            new[name] = kept
    if dense := known.get(_DENSE):
        new[_DENSE] = sum(layer < dense for layer in depth.kept)
    new |= {name: depth.places(layers) for name in _NUMBERED if (layers := known.get(name)) is not None}
    if (windowless := known.get("max_window_layers")) is not None:
        new["max_window_layers"] = sum(layer < windowless for layer in depth.kept)
    return {name: value for name, value in new.items() if known.get(name) != value}
