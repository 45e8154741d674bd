"""The names that ``engine.options`` may have, read from the sources of Megatron and mcore-bridge.

Importing those costs seconds and changes other libraries; their text is parsed instead.
"""

from __future__ import annotations

import ast
import functools
from importlib.util import find_spec
from pathlib import Path

# Dataclasses and their files, by top-level package.
_COMMON = (
    ("megatron", "core/model_parallel_config.py", "ModelParallelConfig"),
    ("megatron", "core/transformer/transformer_config.py", "TransformerConfig"),
    ("mcore_bridge", "config/model_config.py", "ModelConfig"),
)
_LATENT = (
    ("megatron", "core/transformer/transformer_config.py", "MLATransformerConfig"),
    ("mcore_bridge", "config/model_config.py", "MLAModelConfig"),
)


@functools.cache
def option_names(*, latent_attention: bool) -> frozenset[str]:
    """Collect the fields of Megatron's transformer config as mcore-bridge extends it.

    Args:
        latent_attention: Of models with multi-latent attention, which have more.
    """
    sources = [*_COMMON, *(_LATENT if latent_attention else ())]
    return frozenset().union(*(_fields(*source) for source in sources))


def _fields(package: str, file: str, name: str) -> set[str]:
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return set()
    # A namespace package may lie in several folders.
    path = next(path for place in spec.submodule_search_locations if (path := Path(place) / file).is_file())
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        line.target.id
        for node in classes
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
