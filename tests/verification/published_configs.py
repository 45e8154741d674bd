"""The values of published ``config.json`` files, by the names of their repositories on huggingface.co.

Organizations: AIDC-AI, allenai, baidu, deepseek-ai, google, meta-llama, MiniMaxAI, moonshotai, openai, Qwen, zai-org.
The files lie in ``published``, and those of examples in ``examples/models``. Of ``auto_map``, ``quantization_config``
and towers that are not built only what is needed to recognise them was written down.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
_FILES = {
    **{file.parent.name: file for file in _EXAMPLES.glob("*/config.json")},
    **{file.stem: file for file in (Path(__file__).parent / "published").glob("*.json")},
}

PUBLISHED: dict[str, dict[str, Any]] = {name: json.loads(_FILES[name].read_text()) for name in sorted(_FILES)}
"""Name -> ``config.json``."""
