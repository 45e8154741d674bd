"""The tiny models that level ``model`` computes with, and the layouts in which it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anytron.device.platform import Feature
from anytron_conformance.rules import Case

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Family:
    """A tiny model.

    Attributes:
        name: Key of :data:`anytron_conformance.tiny_models.CONFIGS`.
        title: For people.
        needs: What a platform may declare not to do and the model asks for.
        changes: Fields of its config that are others.
    """

    name: str
    title: str
    needs: tuple[Feature, ...] = ()
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def takes_images(self) -> bool:
        """Whether its sequences have images."""
        return Feature.VISION in self.needs


@dataclass(frozen=True)
class Layout:
    """One way to arrange a model and its sequences.

    Attributes:
        name: For people.
        needs: What a platform may declare not to do and the layout asks for.
        sections: Of the configuration; sequences are packed, unless this or the platform says otherwise.
    """

    name: str
    needs: tuple[Feature, ...] = ()
    sections: dict[str, dict[str, Any]] = field(default_factory=dict, hash=False)


def _split(key: str, name: str, feature: Feature, **more: int) -> Layout:
    return Layout(name, (feature,), {"parallel": {f"{key}_parallel_size": 2, **more}})


ONE = Layout("one rank")
PADDED = Layout("one rank, padded", (Feature.THD, Feature.BSHD), {"engine": {"sequence_format": "bshd"}})
HALF = Layout("one rank, bfloat16", (Feature.BFLOAT16,), {"model": {"dtype": "bfloat16"}})
TENSOR = _split("tensor_model", "TP2", Feature.TENSOR_PARALLEL)
PIPELINE = _split("pipeline_model", "PP2", Feature.PIPELINE_PARALLEL)
REPLICAS = Layout("DP2", (), {"parallel": {"data_parallel_size": 2}})
CONTEXT = _split("context", "CP2", Feature.CONTEXT_PARALLEL)
CONTEXT_OF_FOUR = _split("context", "CP4", Feature.CONTEXT_PARALLEL, context_parallel_size=4)
PADDED_CONTEXT = Layout(
    "CP2, padded", (*CONTEXT.needs, Feature.BSHD), {**CONTEXT.sections, "engine": {"sequence_format": "bshd"}}
)
INTERLEAVED = Layout(
    "PP2 x VPP2",
    (*PIPELINE.needs, Feature.INTERLEAVED_PIPELINE),
    {**PIPELINE.sections, "engine": {"options": {"virtual_pipeline_model_parallel_size": 2}}},
)
EXPERT = _split("expert_model", "EP2", Feature.EXPERT_PARALLEL, data_parallel_size=2)
_SHARED = (Feature.EXPERT_PARALLEL, Feature.TENSOR_PARALLEL)
TENSOR_EXPERT = Layout(
    "TP2, EP2", _SHARED, {"parallel": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}}
)
SPLIT_EXPERTS = Layout(
    "DP2, TP2, EP2, ETP2",
    _SHARED,
    {"parallel": {**TENSOR_EXPERT.sections["parallel"], "data_parallel_size": 2, "expert_tensor_parallel_size": 2}},
)

_EXPERTS, _LATENT, _LINEAR = Feature.MIXTURE_OF_EXPERTS, Feature.LATENT_ATTENTION, Feature.LINEAR_ATTENTION
QWEN3 = Family("qwen3", "Qwen3")
EVERY_HEAD = Family("qwen3", "Qwen3, one query per key head", changes=(("num_key_value_heads", 4),))
ONE_HEAD = Family("qwen3", "Qwen3, one key head", changes=(("num_key_value_heads", 1),))
QWEN2 = Family("qwen2", "Qwen2, tied")
LLAMA = Family("llama", "Llama")
QWEN3_MOE = Family("qwen3_moe", "Qwen3-MoE", (_EXPERTS,))
DEEPSEEK_V3 = Family("deepseek_v3", "DeepSeek-V3", (_LATENT, _EXPERTS))
DENSE_DEEPSEEK_V3 = Family(
    "deepseek_v3", "DeepSeek-V3, dense layers", DEEPSEEK_V3.needs, changes=(("first_k_dense_replace", 4),)
)
QWEN3_NEXT = Family("qwen3_next", "Qwen3-Next", (_LINEAR, _EXPERTS))
QWEN3_5 = Family("qwen3_5", "Qwen3.5, images", (_LINEAR, Feature.VISION))
QWEN3_VL = Family("qwen3_vl", "Qwen3-VL, images", (Feature.VISION,))
QWEN2_5_VL = Family("qwen2_5_vl", "Qwen2.5-VL, images", QWEN3_VL.needs)

ARRANGED = (QWEN3, QWEN2, QWEN3_MOE, DEEPSEEK_V3, QWEN3_NEXT, QWEN3_5, QWEN3_VL)
"""Those that are computed in every layout, the simplest first: of several that fail, a rule shows one."""
FAMILIES = (*ARRANGED, LLAMA, QWEN2_5_VL)
"""All. The last ones bring nothing that a layout splits otherwise: Llama's layers are Qwen3's without norms of heads,
and Qwen2.5-VL has Qwen2's behind its vision tower."""
MIXTURES = (QWEN3_MOE, DEEPSEEK_V3, QWEN3_NEXT)


def cases(layout: Layout, *families: Family) -> Iterator[Case]:
    """Make a case of each family in a layout."""
    for place, family in enumerate(families):
        yield Case(f"{family.title}, {layout.name}", (family, layout), place, (*family.needs, *layout.needs))
