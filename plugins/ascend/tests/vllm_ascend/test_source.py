"""What Anytron says of vllm-ascend, read in its source: one test for each claim and branch.

``ANYTRON_VLLM_ASCEND`` names a folder with a checkout for each of ``BRANCHES``, under that name: ``v0.23.0`` is the
branch ``releases/v0.23.0``. Nothing of vllm-ascend is imported.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from anytron_ascend import vllm_ascend
from plugins.ascend.tests.vllm_ascend.claims import BRANCHES, LAYOUT, WEIGHTS
from plugins.ascend.tests.vllm_ascend.claims_of_the_worker import LOG_PROBS, METHODS, SLEEP

CLAIMS = (*LAYOUT, *WEIGHTS, *SLEEP, *LOG_PROBS, *METHODS)
CASES = [
    pytest.param(claim, branch, id=f"{branch}-{claim.says}")
    for branch in BRANCHES
    for claim in CLAIMS
    if branch in claim.branches
]
PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "roll-out-with-vllm.md"
FILES = re.compile(r"vllm_ascend/[\w/]+\.py")


def checkout(branch):
    found = Path(os.environ["ANYTRON_VLLM_ASCEND"]) / branch
    assert (found / "vllm_ascend").is_dir(), f"{found} is no checkout of vllm-ascend"
    return found


@pytest.mark.vllm_ascend
@pytest.mark.parametrize(("claim", "branch"), CASES)
def test_a_claim_holds_and_would_not_hold_of_other_source(claim, branch):
    source = claim.source(checkout(branch))
    assert claim.missing(source) == []
    old, new = claim.sabotage
    assert old in source
    assert claim.missing(source.replace(old, new)) != []


@pytest.mark.vllm_ascend
@pytest.mark.parametrize("branch", BRANCHES)
def test_the_page_names_the_torch_that_a_branch_was_built_for(branch):
    pins = dict(
        line.split("==") for line in (checkout(branch) / "requirements.txt").read_text().split() if "==" in line
    )
    row = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{branch}` |"))
    assert f"| {pins['torch']}, {pins['torch-npu']} |" in row


def test_each_file_that_is_named_is_read():
    read = {claim.file for claim in CLAIMS}
    named = FILES.findall(PAGE.read_text(encoding="utf-8")) + FILES.findall(
        Path(vllm_ascend.__file__).read_text(encoding="utf-8")
    )
    assert named
    # The package writes the first when it is built.
    assert set(named) - read == {"vllm_ascend/_build_info.py"}


def test_each_claim_is_of_a_branch_and_differs_from_the_others():
    assert all(claim.branches and set(claim.branches) <= set(BRANCHES) for claim in CLAIMS)
    assert len({(claim.says, claim.file) for claim in CLAIMS}) == len(CLAIMS)
