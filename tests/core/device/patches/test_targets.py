"""A target that does not exist is found before a run, and nothing is imported to find it."""

import subprocess
import sys

import pytest

from anytron.device.patches import Patch, Phase, Verdict, plan
from anytron.device.patches.plan import missing_target

PACKAGE = {
    "__init__.py": "raise ImportError('nothing may import this')",
    "plain.py": (
        "try:\n    from elsewhere import guarded\nexcept ImportError:\n    pass\n"
        "def function(): pass\n"
        "class Base:\n    def method(self): pass\n"
        "class Derived(Base): pass\n"
    ),
    "dynamic.py": "globals()['made'] = 1",
    "star.py": "from anywhere import *",
}


def make(target, **fields):
    return Patch("us.p", target, Phase.BEFORE_BUILD, "test", **{"replacement": "math:floor", **fields})


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "unimportable").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "unimportable" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("target", "missing"),
    [
        ("plain:function", ""),
        ("plain:guarded", ""),
        ("plain:Base.method", ""),
        ("plain:Derived.method", ""),
        ("plain:Derived.anything", ""),  # bases are not followed: it may be inherited
        ("dynamic:made", ""),
        ("star:anything", ""),
        ("plain:functoin", "unimportable.plain has no attribute functoin"),
        ("plain:Base.metod", "unimportable.plain.Base has no attribute metod"),
        ("nowhere:function", "there is no module unimportable.nowhere"),
    ],
)
def test_sources_are_read_and_not_imported(target, missing):
    assert missing_target(make(f"unimportable.{target}")) == missing
    assert "unimportable" not in sys.modules


def test_a_loaded_module_is_asked_itself(victim):
    assert missing_target(make("victim:Shop.sell")) == ""
    assert missing_target(make("victim:Shop.buy")) == "victim.Shop has no attribute buy"


def test_a_patch_that_installs_something_needs_no_original():
    assert missing_target(make("no_such_module", replacement="", install="math:floor")) == ""


def test_the_plan_says_that_a_target_is_missing(victim):
    found, missing = plan([make("victim:greet"), make("victim:gret")])
    assert found.verdict is Verdict.APPLIES
    assert (missing.verdict, missing.why) == (Verdict.MISSING, "victim has no attribute gret")


@pytest.mark.mcore
def test_targets_in_megatron_are_found_without_importing_it():
    code = (
        "import sys; from anytron.device.patches import Patch, Phase\n"
        "from anytron.device.patches.plan import missing_target\n"
        "for name in ('PackedSeqParams', 'PackedSeqParms'):\n"
        "    patch = Patch('us.p', 'megatron.core.packed_seq_params:' + name, Phase.BEFORE_BUILD, 'r',"
        " replacement='math:floor')\n"
        "    print(missing_target(patch))\n"
        "assert 'megatron' not in sys.modules and 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["", "megatron.core.packed_seq_params has no attribute PackedSeqParms"]
