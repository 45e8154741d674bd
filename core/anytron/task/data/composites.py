"""Model directories that hold a language model and other models, of which Anytron reads the language model alone.

Their ``config.json`` asks for code that lies in the directory, or transformers' class writes other names than are
published. But transformers has a class for their language model: its config is a field of ``config.json``, and the
names of its tensors have a prefix. Everything else of such a directory stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Composite:
    """Where a published directory has its language model.

    Attributes:
        field: Field of ``config.json`` with the language model's config.
        names: Beginning of the names of its tensors in the files -> beginning in files of the language model alone.
        types: ``model_type`` in that field -> the same model's type in transformers.
    """

    field: str
    names: Mapping[str, str]
    types: Mapping[str, str]


_KIMI = {"kimi_k2": "deepseek_v3", "deepseek_v3": "deepseek_v3"}
_QWEN = {name: name for name in ("qwen2", "qwen3", "qwen3_moe")}
COMPOSITES: Mapping[str, Composite] = {
    "kimi_k25": Composite("text_config", {"language_model.": ""}, _KIMI),
    "kimi_vl": Composite("text_config", {"language_model.": ""}, _KIMI),
    "internvl_chat": Composite("llm_config", {"language_model.": ""}, _QWEN),
    "ovis2_5": Composite("llm_config", {"llm.": ""}, {"qwen3": "qwen3"}),
    "llavaonevision1_5": Composite(
        "text_config",
        {"model.language_model.": "model.", "lm_head.": "lm_head."},
        {"LLaVAOneVision1_5_text": "qwen3"},
    ),
}
"""``model_type`` of ``config.json`` -> where the language model is. Prefixes are those of mcore-bridge 1.6.5
(``mcore_bridge/model/mm_gpts``: ``kimi_vl.py``, ``internvl.py``, ``qwen.py``, ``llava.py``)."""

_CODE = ("auto_map", "attn_implementation")
"""Fields that select code; the second one asks for a package in InternVL's files."""
_WHOLE = ("torch_dtype", "dtype")
"""Fields that describe the files, whatever the language model's own config says."""


def language_config(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config of the language model inside of another model's config, with a type that transformers knows.

    Args:
        fields: A whole ``config.json``.

    Returns:
        None if the config is of no model of :data:`COMPOSITES`, or its language model of another type.
    """
    composite = COMPOSITES.get(str(fields.get("model_type")))
    text = fields.get(composite.field) if composite else None
    if composite is None or not isinstance(text, dict):
        return None
    known = composite.types.get(str(text.get("model_type")))
    if known is None:
        return None
    tied = {name: fields[name] for name in ("tie_word_embeddings",) if name in fields}
    own = {name: value for name, value in text.items() if name not in _CODE}
    return {**tied, **own, **{name: fields[name] for name in _WHOLE if name in fields}, "model_type": known}


@dataclass(frozen=True)
class TensorNames:
    """Names of a language model's tensors in the files of its directory, and in files of the language model alone.

    Attributes:
        prefixes: As :attr:`Composite.names`; by default both are the same.
        idle: Beginnings of the names, in the files, of other models' tensors that no prefix tells apart.
    """

    prefixes: Mapping[str, str] = field(default_factory=lambda: {"": ""})
    idle: tuple[str, ...] = ()

    def inner(self, name: str) -> str | None:
        """Return a tensor's name in the language model, given its name in the files; None if it is not of it."""
        for outer, inner in self.prefixes.items():
            if name.startswith(outer) and not name.startswith(self.idle):
                return inner + name.removeprefix(outer)
        return None

    def outer(self, name: str) -> str:
        """Return a tensor's name in the files, given its name in the language model."""
        outer, inner = next(pair for pair in self.prefixes.items() if name.startswith(pair[1]))
        return outer + name.removeprefix(inner)
