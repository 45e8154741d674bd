"""Places of images, videos and sound in a text: transformers embeds another token there, and so does the patch.

The tests of the unpatched model fail once mcore-bridge does so: then the patch's range ends there.
"""

import json

import pytest
import torch
from transformers import AutoModelForImageTextToText

from anytron.device.patches.plan import installed_version
from tests.backends.megatron.families.published import PUBLISHED, write_published_model

pytestmark = [
    pytest.mark.mcore,
    pytest.mark.skipif(not installed_version("mcore-bridge"), reason="mcore-bridge needs megatron-core 0.16 or later"),
]


def rows_of(fields):
    """Two rows of 16 tokens: one with an image, a video and sound, one without; both with padding inside."""
    image, video, sound = (fields.get(f"{kind}_token_id", 10) for kind in ("image", "video", "audio"))
    return [[2, 5, 7, image, image, 9, video, 0, 11, sound, *range(12, 18)], [2, 0, *range(20, 34)]]


@pytest.fixture(scope="module", params=["gemma4_31b", "gemma4_e2b", "gemma4_12b", "muse_glimmer"])
def case(request, run_program, tmp_path_factory):
    directory = write_published_model(request.param, tmp_path_factory.mktemp(request.param))
    rows = rows_of(PUBLISHED[request.param])
    (directory / "rows.json").write_text(json.dumps(rows))
    found = run_program("places.py", str(directory), world=2, tmp_path=directory)
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor(rows)).logits
    return {name: (torch.tensor(logits) - expected).abs().amax(dim=(1, 2)) for name, logits in found.items()}


def test_a_text_with_places_has_the_logits_of_transformers(case):
    assert case["patched"].max() < 1e-4


def test_without_the_patch_only_a_text_with_places_differs(case):
    with_places, without = case["upstream"]
    assert with_places > 1e-1
    assert without < 1e-4
