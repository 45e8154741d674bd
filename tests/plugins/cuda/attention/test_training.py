"""Megatron on the processor with the CUDA platform's attention: FlashAttention 2's adapter over its stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.megatron.conftest import follow, policy_loss, ranks, recorded, tiny_model
from tests.backends.megatron.engine.test_agreement import differences
from tests.backends.megatron.ranks import install_extension

__all__ = ["follow", "policy_loss", "ranks", "recorded", "tiny_model"]  # fixtures

ROOT = Path(__file__).parents[4]
# The library refuses float32, in which two computations can be told apart: its stand-in is let off that.
SOURCE = f"""
import sys

import torch

from anytron import hookimpl

sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "plugins" / "cuda")!r}]


class Plugin:
    name = "stand_in"

    @hookimpl
    def attention_kernel(self, spec):
        from tests.plugins.cuda.stand_ins import definition, flash_attn

        sys.modules["flash_attn"] = flash_attn
        definition.HALF = (*definition.HALF, torch.float32)
        SABOTAGE
        from anytron_cuda.attention.choice import CANDIDATES

        return CANDIDATES["flash_attention_2"].make(spec)
"""
LAYOUTS = {
    "thd": {},
    "bshd": {"engine": {"sequence_format": "bshd"}},
    "cp2": {"parallel": {"context_parallel_size": 2}},
}


@pytest.fixture(scope="module")
def neutral(follow):
    return follow()


@pytest.fixture(scope="module")
def installed(neutral, tmp_path_factory):
    """The processes of ``neutral`` have started without the plugin."""
    with pytest.MonkeyPatch.context() as patches:
        install_extension(SOURCE.replace("SABOTAGE", ""), tmp_path_factory.mktemp("installed"), patches)
        yield


@pytest.mark.some(1)
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("layout", ["thd", "bshd", pytest.param("cp2", marks=pytest.mark.slow)])
def test_three_updates_agree_with_the_neutral_kernel(layout, neutral, follow):
    found = differences(neutral, follow(**LAYOUTS[layout]))
    assert max(found.values()) <= 1e-5, found


@pytest.mark.slow
def test_another_map_of_heads_is_noticed(neutral, follow, tmp_path, monkeypatch):
    sabotage = "definition.key_heads = lambda key, heads: key.repeat(1, heads // key.shape[1], 1)"
    install_extension(SOURCE.replace("SABOTAGE", sabotage), tmp_path, monkeypatch)
    found = differences(neutral, follow())
    assert min(found.values()) > 1e-4, found
