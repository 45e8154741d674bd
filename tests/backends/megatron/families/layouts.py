"""Which models are compared in which layouts: the rows of figures in ``docs/reference/families.md``.

To add a family, give it a configuration in a file ``published_*.py``, an entry in
:data:`PUBLISHED_MODELS`, and what this proves in its row of ``anytron_megatron.models.families``; to add a layout, name
it here and list it where it applies. What must be refused stands in :data:`REFUSALS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from anytron.device.patches.plan import in_range, installed_version
from anytron.task.data.model_files import SAME_MODELS
from anytron_conformance.tiny_models import CONFIGS
from anytron_megatron.models.families import FAMILIES, Family
from anytron_megatron.models.release import HAS_MAMBA, HAS_SPARSE_ATTENTION
from tests.backends.megatron.families.observe import LEARNING_RATE
from tests.backends.megatron.families.published import PUBLISHED


@dataclass(frozen=True)
class Layout:
    """One way to arrange a model and its sequences.

    Attributes:
        name: As in the table.
        parallel: The configuration's section.
        engine: The same.
    """

    name: str
    parallel: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


PADDED = {"sequence_format": "bshd"}

ONE = Layout("one rank")
ONE_PADDED = Layout("one rank, padded", engine=PADDED)
TP2 = Layout("TP2", {"tensor_model_parallel_size": 2})
TP2_WHOLE = Layout("TP2, whole sequences", {"tensor_model_parallel_size": 2, "sequence_parallel": False})
TP2_PADDED = Layout("TP2, padded", {"tensor_model_parallel_size": 2}, PADDED)
PP2 = Layout("PP2", {"pipeline_model_parallel_size": 2})
PP2_PADDED = Layout("PP2, padded", {"pipeline_model_parallel_size": 2}, PADDED)
VPP2 = Layout("PP2 x VPP2", PP2.parallel, {"options": {"virtual_pipeline_model_parallel_size": 2}})
CP2 = Layout("CP2", {"context_parallel_size": 2})
CP2_PADDED = Layout("CP2, padded", {"context_parallel_size": 2}, PADDED)
CP4 = Layout("CP4", {"context_parallel_size": 4})
TP2_CP2 = Layout("TP2, CP2", {**TP2.parallel, **CP2.parallel})
TP2_CP2_PADDED = Layout("TP2, CP2, padded", TP2_CP2.parallel, PADDED)
PP2_CP2 = Layout("PP2, CP2, recomputed", {**PP2.parallel, **CP2.parallel}, {"recompute": "full"})
PP2_CP2_PADDED = Layout("PP2, CP2, recomputed, padded", PP2_CP2.parallel, {"recompute": "full", **PADDED})
DP2 = Layout("DP2", {"data_parallel_size": 2})
EP2 = Layout("EP2", {"data_parallel_size": 2, "expert_model_parallel_size": 2})
TP2_EP2 = Layout("TP2, EP2", {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2})
TP2_CP2_EP2 = Layout("TP2, CP2, EP2", {**TP2_EP2.parallel, **CP2.parallel})
TP2_EP2_PADDED = Layout("TP2, EP2, padded", TP2_EP2.parallel, PADDED)

ONE_RANK = (ONE, ONE_PADDED)
DENSE = (*ONE_RANK, TP2, TP2_PADDED, PP2, PP2_PADDED, CP2, CP2_PADDED)
EXPERTS = (*ONE_RANK, TP2, TP2_EP2, TP2_EP2_PADDED, EP2, PP2, CP2)
PUBLISHED_DENSE = (*ONE_RANK, TP2, TP2_WHOLE, PP2, VPP2, CP2)
# TP2 splits experts too, ETP2: they need sequence parallelism, and expert parallelism is 1.
PUBLISHED_EXPERTS = (*ONE_RANK, TP2, EP2, TP2_EP2, PP2, VPP2, CP2)
# A vision tower is on the first stage only: an interleaved pipeline is left out.
PUBLISHED_IMAGES = tuple(one for one in PUBLISHED_DENSE if one is not VPP2)
PUBLISHED_IMAGE_EXPERTS = tuple(one for one in PUBLISHED_EXPERTS if one is not VPP2)
# Of language models that other rows prove: each column once.
PART_DENSE = (*ONE_RANK, TP2, TP2_WHOLE, VPP2, CP2)
PART_EXPERTS = (*ONE_RANK, TP2_EP2, VPP2, CP2)


@dataclass(frozen=True)
class Model:
    """A tiny model of a family and its layouts.

    Attributes:
        name: Key of ``anytron_conformance.tiny_models.CONFIGS``, or of :data:`published.PUBLISHED`.
        title: As in the table.
        layouts: The first is what the others must agree with.
        quick: Those that the normal suite observes, or of a published configuration ``tox -e slow``. None = all.
        learning_rate: Of the updates; where gradients are large, a smaller one, so that updates do not diverge.
        still: Regular expression of the tensors that no update moves: of a tower that gets no images, and buffers.
    """

    name: str
    title: str
    layouts: tuple[Layout, ...]
    quick: tuple[Layout, ...] | None = None
    learning_rate: float = LEARNING_RATE
    still: str = "^$"

    def marks(self, layout: Layout) -> list[str]:
        """Marks of the tests of a layout: whether they are left to ``tox -e slow``, or to ``tox -e families``."""
        quick = self.quick is None or layout in self.quick
        if self.name in PUBLISHED:
            return ["families", "slow"] if quick else ["families"]
        return [] if quick else ["slow"]

    @property
    def refused(self) -> bool:
        """Whether the installed megatron-core lacks what it needs."""
        needs = [(self.family.sparse_attention, HAS_SPARSE_ATTENTION), (self.family.hybrid, HAS_MAMBA)]
        return any(lacks and not in_range(installed_version("megatron-core"), release) for lacks, release in needs)

    @property
    def config(self) -> dict[str, Any]:
        """The Hugging Face config, with ``model_type``."""
        return PUBLISHED.get(self.name) or CONFIGS[self.name]

    @property
    def family(self) -> Family:
        """The row of its ``model_type``."""
        return FAMILIES[self.config["model_type"]]


MODELS = (
    Model("qwen3", "Qwen3", (*DENSE, VPP2, DP2), quick=(ONE, PP2_PADDED, VPP2, CP2)),
    # No layout splits these otherwise than Qwen3, but for tied weights, which the first and the last stage share.
    Model("qwen3_tied", "Qwen3, tied", DENSE, quick=(ONE, PP2)),
    Model("qwen2", "Qwen2, tied", DENSE, quick=(ONE, TP2_PADDED)),
    Model("qwen2_5", "Qwen2.5", DENSE, quick=(ONE,)),
    Model("llama", "Llama", DENSE, quick=(ONE,)),
    Model("qwen3_moe", "Qwen3-MoE", EXPERTS, quick=(ONE, TP2_EP2)),
    Model("deepseek_v3", "DeepSeek-V3", EXPERTS, quick=(ONE_PADDED, CP2)),
    Model(
        "qwen3_next",
        "Qwen3-Next",
        (*DENSE, TP2_EP2, TP2_EP2_PADDED, PP2_CP2, PP2_CP2_PADDED),
        quick=(ONE, CP2_PADDED),
    ),
    Model("qwen3_next_heads", "Qwen3-Next, more heads", (ONE, TP2_CP2, TP2_CP2_PADDED, CP4), quick=()),
    Model("qwen3_5", "Qwen3.5, images", DENSE, quick=(ONE, TP2_PADDED)),
    Model("qwen2_5_vl", "Qwen2.5-VL, images", DENSE, quick=(ONE, PP2_PADDED)),
    Model("qwen3_vl", "Qwen3-VL, images", DENSE, quick=(ONE_PADDED, CP2)),
)
_TILES = r"^(vision_tower|multi_modal_projector)\."
_MINICPM = r"^model\.(vision_tower|merger)\."
_SENSES = r"^thinker\.(visual|audio_tower)\."
_GEMMA = r"^model\.(vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder)\.|\.layer_scalar$"
_MUSE = r"^model\.(vision_tower|vision_adapter|vision_projection)\."
_LLAMA = r"^(vision_model|multi_modal_projector)\."
PUBLISHED_MODELS = (
    Model("glm4_5_air", "GLM-4.5-Air", PUBLISHED_EXPERTS, quick=(ONE,)),
    Model("glm4_6", "GLM-4.5, GLM-4.6, GLM-4.7", PUBLISHED_EXPERTS, quick=()),
    # Megatron splits no experts that have biases.
    Model("gpt_oss", "gpt-oss", tuple(one for one in PUBLISHED_EXPERTS if one is not TP2), quick=(ONE,)),
    Model("minimax_m2", "MiniMax-M2", PUBLISHED_EXPERTS, quick=()),
    Model("qwen2_moe", "Qwen2-MoE", PUBLISHED_EXPERTS, quick=()),
    Model("olmoe", "OLMoE", PUBLISHED_EXPERTS, quick=()),
    Model("deepseek_v2", "DeepSeek-V2-Lite", PUBLISHED_EXPERTS, quick=()),
    Model("ernie4_5", "ERNIE-4.5", PUBLISHED_DENSE, quick=()),
    Model("ernie4_5_moe", "ERNIE-4.5-MoE", PUBLISHED_EXPERTS, quick=()),
    Model("hy_v3", "Hunyuan 3", PUBLISHED_EXPERTS, quick=()),
    Model("qwen3_5_moe", "Qwen3.5-MoE, images", PUBLISHED_IMAGE_EXPERTS, quick=()),
    Model("kimi_k2", "Kimi-K2", PUBLISHED_EXPERTS, quick=()),
    Model("moonlight", "Moonlight", PUBLISHED_EXPERTS, quick=()),
    Model("dots1", "dots.llm1", PUBLISHED_EXPERTS, quick=()),
    Model("internlm3", "InternLM3", PUBLISHED_DENSE, quick=()),
    Model("mimo", "MiMo", PUBLISHED_DENSE, quick=()),
    Model("glm4", "GLM-4", PUBLISHED_DENSE, quick=(ONE,)),
    Model("glm4_moe_lite", "GLM-4.7-Flash", PUBLISHED_EXPERTS, quick=()),
    Model("deepseek_v32", "DeepSeek-V3.2", (*PUBLISHED_EXPERTS, CP2_PADDED, TP2_CP2, PP2_CP2), quick=()),
    Model("glm5", "GLM-5", PUBLISHED_EXPERTS, quick=()),
    Model(
        "nemotron3",
        "Nemotron-3",
        (*ONE_RANK, EP2, TP2_EP2, TP2_EP2_PADDED, PP2, CP2, CP2_PADDED, TP2_CP2_EP2, PP2_CP2, PP2_CP2_PADDED),
        quick=(),
    ),
    Model("qwen2_vl", "Qwen2-VL, images", PUBLISHED_IMAGES, quick=()),
    Model("qwen3_vl_moe", "Qwen3-VL-MoE, images", PUBLISHED_IMAGE_EXPERTS, quick=()),
    Model("glm4v", "GLM-4.1V, images", PUBLISHED_IMAGES, quick=()),
    Model("internvl3_5", "InternVL3.5", PUBLISHED_IMAGES, quick=(ONE,), still=_TILES),
    # The language models of these two are proven above, in all layouts.
    Model("internvl3_5_moe", "InternVL3.5, experts", (ONE, EP2, TP2_EP2), quick=(), still=_TILES),
    Model("internvl3", "InternVL3", (ONE, TP2_WHOLE), quick=(), still=_TILES),
    Model("gemma4_31b", "Gemma 4 31B", PUBLISHED_DENSE, quick=(ONE,), learning_rate=1 / 32, still=_GEMMA),
    Model("gemma4_26b", "Gemma 4 26B-A4B", (ONE, EP2, TP2_EP2), quick=(), learning_rate=1 / 32, still=_GEMMA),
    Model("gemma4_e2b", "Gemma 4 E2B", (*ONE_RANK, TP2, TP2_WHOLE), quick=(), learning_rate=1 / 32, still=_GEMMA),
    Model("gemma4_12b", "Gemma 4 12B", PUBLISHED_DENSE, quick=(), learning_rate=1 / 32, still=_GEMMA),
    Model("muse_glimmer", "Muse Glimmer", PUBLISHED_DENSE, quick=(ONE,), learning_rate=1 / 64, still=_MUSE),
    Model("llama4_scout", "Llama 4 Scout", PUBLISHED_EXPERTS, quick=(ONE,), still=_LLAMA),
    Model("llama4_maverick", "Llama 4 Maverick", PUBLISHED_EXPERTS, quick=(), still=_LLAMA),
    Model("minicpmv4_6", "MiniCPM-V 4.6", PUBLISHED_DENSE, quick=(ONE,), still=_MINICPM),
    Model("qwen3_omni_moe", "Qwen3-Omni", PUBLISHED_EXPERTS, quick=(ONE,), still=_SENSES),
    Model("qwen2_5_omni", "Qwen2.5-Omni", PUBLISHED_DENSE, quick=(ONE,), still=_SENSES),
    Model("glm4v_moe", "GLM-4.5V, images", PUBLISHED_IMAGE_EXPERTS, quick=()),
    Model("kimi_k25", "Kimi-K2.5", PART_EXPERTS, quick=(ONE,)),
    Model("kimi_vl", "Kimi-VL", PART_EXPERTS, quick=()),
    Model("internvl_chat", "InternVL (internvl_chat)", PART_DENSE, quick=()),
    Model("internvl_chat_moe", "InternVL (internvl_chat), experts", (ONE, TP2_EP2), quick=()),
    Model("internvl_chat_qwen2", "InternVL (internvl_chat), Qwen2", (ONE, TP2_WHOLE), quick=()),
    Model("ovis2_5", "Ovis2.5", PART_DENSE, quick=()),
    Model("llava_onevision1_5", "LLaVA-OneVision-1.5", PART_DENSE, quick=()),
)
"""Families and configurations beyond the kit's: ``tox -e families``."""

EVERY_MODEL = (*MODELS, *PUBLISHED_MODELS)

WITH_ADAPTERS = (
    "glm4_5_air", "glm4_6", "olmoe", "deepseek_v2", "ernie4_5", "ernie4_5_moe", "kimi_k2", "moonlight", "dots1",
    "internlm3", "glm4_moe_lite", "internvl3_5", "gemma4_12b", "muse_glimmer", "minicpmv4_6", "qwen2_5_omni",
    "qwen3_omni_moe",
)  # fmt: skip
"""Published configurations of which ``tests/backends/megatron/lora`` trains adapters."""
WITH_CACHE = (
    "glm4_5_air", "glm4_6", "minimax_m2", "qwen2_moe", "olmoe", "deepseek_v2", "ernie4_5", "ernie4_5_moe", "hy_v3",
    "kimi_k2", "moonlight", "dots1", "internlm3", "mimo", "glm4", "glm4_moe_lite", "internvl3_5", "internvl3_5_moe",
    "internvl3", "llama4_scout", "llama4_maverick", "kimi_k25", "kimi_vl", "internvl_chat", "internvl_chat_moe",
    "internvl_chat_qwen2", "ovis2_5", "llava_onevision1_5", "qwen2_5_omni", "qwen3_omni_moe",
)  # fmt: skip
"""Published configurations that ``tests/backends/megatron/generation`` generates with."""
WITH_REPLAY = (
    "glm4_5_air", "gpt_oss", "minimax_m2", "qwen2_moe", "olmoe", "deepseek_v2", "ernie4_5_moe", "hy_v3", "qwen3_5_moe",
    "kimi_k2", "dots1", "glm4_moe_lite", "qwen3_vl_moe", "glm4v_moe", "kimi_k25", "kimi_vl", "internvl_chat_moe",
    "qwen3_omni_moe",
)  # fmt: skip
"""Published configurations whose routing ``tests/backends/megatron/experts/test_published_routing.py`` replays."""

PROVED_ELSEWHERE = {
    "tests/backends/megatron/experts": {"qwen3_moe": "VPP", "deepseek_v3": "VPP"},
    "tests/backends/megatron/experts/test_rollout_routing.py": dict.fromkeys(("qwen3_moe", "deepseek_v3"), "replay"),
    "tests/backends/megatron/experts/test_published_routing.py": {"qwen3_next": "replay"},
    "tests/backends/megatron/engine/test_multi_token_prediction.py": {"deepseek_v3": "MTP"},
    "tests/backends/megatron/lora": dict.fromkeys(
        ("qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next", "qwen2_5_vl"), "LoRA"
    ),
    "tests/backends/megatron/generation": dict.fromkeys(
        ("qwen3", "qwen2", "llama", "qwen3_moe", "deepseek_v3"), "cache"
    ),
}
"""What other tests prove: the tests -> model type -> column of the page."""


def proved(model_type: str) -> set[str]:
    """Columns of the page that tests prove for a model type, by its models and by those that are read as it."""
    found = {columns[model_type] for columns in PROVED_ELSEWHERE.values() if model_type in columns}
    for model in EVERY_MODEL:
        if model_type in (model.family.model_type, SAME_MODELS.get(model.family.model_type)):
            found |= {"LoRA"} if model.name in WITH_ADAPTERS else set()
            found |= {"cache"} if model.name in WITH_CACHE else set()
            found |= {"replay"} if model.name in WITH_REPLAY else set()
            found |= {column for layout in model.layouts for column in _columns(layout)}
            found |= {"images"} if model.family.takes_images else set()
    return found


def _columns(layout: Layout) -> set[str]:
    sizes = {**layout.parallel, **layout.engine.get("options", {})}
    split = {column for key, column in _SIZES.items() if sizes.get(key, 1) > 1}
    return {layout.engine.get("sequence_format", "thd"), *split}


_SIZES = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "virtual_pipeline_model_parallel_size": "VPP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
}


@dataclass(frozen=True)
class Refusal:
    """A configuration that must be refused before anything starts.

    Attributes:
        family: Key of ``anytron_conformance.tiny_models.CONFIGS``.
        layout: What is refused.
        reason: Regular expression that the error matches.
    """

    family: str
    layout: Layout
    reason: str


REFUSALS = (
    Refusal("qwen3", Layout("TP8", {"tensor_model_parallel_size": 8}), "4 attention heads cannot be split over 8"),
    Refusal("qwen3_5", TP2_CP2, "linear_num_key_heads 2 cannot be split over 4"),
    Refusal("qwen3_next", TP2_CP2_PADDED, "linear_num_key_heads 2 cannot be split over 4"),
    Refusal("qwen3", Layout("PP3", {"pipeline_model_parallel_size": 3}), "4 layers cannot be split over 3"),
)
