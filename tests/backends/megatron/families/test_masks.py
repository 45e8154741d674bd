"""The mask that a platform answers is the mask that every family attends with, in padded rows."""

from __future__ import annotations

import pytest

from tests.backends.megatron.families.layouts import MODELS, PADDED, PUBLISHED_MODELS
from tests.backends.megatron.families.observe import largest
from tests.backends.megatron.ranks import install_extension

FULL_MASK = """
import os
from pathlib import Path

from anytron import hookimpl
from anytron.sequences.masks import AttnMask, MaskKind, Polarity

class Plugin:
    name = "full-mask"

    @hookimpl
    def build_attn_mask(self, request):
        layout = request.layout
        if layout is None:
            return AttnMask(MaskKind.FULL_4D, "arbitrary")
        real = layout.valid[:, :, None] & layout.valid[:, None, :]
        keep = (real & (layout.position_ids[:, None] <= layout.position_ids[:, :, None]))[:, None]
        polarity = Polarity.MASKED if Path(os.environ["NEGATE_MASKS"]).exists() else Polarity.KEEP
        recurrent = {"linear_attn_mask": layout.valid} if request.traits.linear_attention else {}
        return AttnMask(MaskKind.FULL_4D, "arbitrary", keep, polarity, **recurrent)
"""
"""An extension that answers full masks. While the file NEGATE_MASKS exists, they say the opposite."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same for all families, so that all engines are built in one process."""
    return tmp_path_factory.mktemp("full_mask")


@pytest.fixture
def negate(folder, monkeypatch):
    """The file that negates the masks of the installed extension."""
    flag = folder / "negate"
    flag.unlink(missing_ok=True)
    monkeypatch.setenv("NEGATE_MASKS", str(flag))
    install_extension(FULL_MASK, folder, monkeypatch)
    return flag


@pytest.fixture
def check_masks(negate, ranks, tiny_family, trajectories_of, truth_of):
    """Compare a model's logits under a full mask with Hugging Face's, and with those under the opposite mask."""

    def check(model):
        batch = trajectories_of(model)
        engine = {"max_tokens_per_micro_batch": batch.num_tokens // 3 + 3, **PADDED}
        workers, _ = ranks.engine(tiny_family(model.name), engine=engine)

        right = workers.logits(batch)
        negate.touch()
        wrong = workers.logits(batch)

        assert largest(right - truth_of(model).logits) <= 1e-5
        assert largest(wrong - right) > 1e-2, "a negated mask changes nothing: no kernel has read it"

    return check


@pytest.mark.some(4)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_full_mask_is_what_padded_rows_attend_with(model, check_masks):
    check_masks(model)


@pytest.mark.families
@pytest.mark.parametrize(
    "model",
    [one for one in PUBLISHED_MODELS if not (one.family.sparse_attention or one.refused)],
    ids=lambda model: model.name,
)
def test_so_it_is_in_published_families(model, check_masks):
    check_masks(model)
