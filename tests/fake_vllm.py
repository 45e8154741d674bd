"""As much of an installed vLLM as checks read, which import none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def install(folder: Path, version: str, *, torchvision: bool = False) -> None:
    """Write it into a folder of packages."""
    models = folder / "vllm" / "model_executor" / "models"
    models.mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text("raise ImportError('the checks import no vLLM')")
    (folder / "vllm" / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    if torchvision:
        (folder / "torchvision").mkdir()
        (folder / "torchvision" / "__init__.py").write_text("raise ImportError('the checks import no torchvision')")
    (models / "registry.py").write_text(
        "_TEXT_GENERATION_MODELS = {'Qwen3ForCausalLM': ('qwen3', 'Q'), 'Qwen3MoeForCausalLM': ('qwen3_moe', 'M'),"
        " 'OtherForCausalLM': ('o', 'O')}\n"
        "_MULTIMODAL_MODELS = {'Qwen2_5_VLForConditionalGeneration': ('qwen2_5_vl', 'V')}\n"
        "_EMBEDDING_MODELS = {'OnlyEmbeds': ('e', 'E')}\n"
    )
