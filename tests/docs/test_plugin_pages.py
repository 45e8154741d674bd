"""The pages for authors of plugins: every example runs, and the test file that they copy notices what is wrong."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from anytron import hookimpl
from anytron.config.load import load_config
from anytron.config.schema import RunConfig
from anytron.errors import EngineError
from anytron.hooks.types import LayoutRequest, PatchContext
from anytron.patches import Ledger, Phase
from anytron.platform import DeviceRuntime
from anytron.plugins import hooks_of, survey_plugins
from anytron.sequences import LayoutConstraints, ModelInputs, plan_layout, scopes
from anytron.traits import ModelTraits, ParallelSizes
from tests.docs.test_pages import ROOT, blocks
from tests.third_party_platform import SAMPLE

if TYPE_CHECKING:
    from pathlib import Path

PLATFORM, EXTENSION = "docs/how-to/write-a-platform.md", "docs/how-to/write-an-extension.md"
KERNELS, PATCHES = "docs/how-to/check-your-kernels.md", "docs/explanation/patches.md"
CONFIG = {"model": {"path": "x"}, "data": {"source": "jsonl"}, "rewards": [{"function": "exact"}]}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Make a module of some source, importable by a name until the test ends."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, name, raising=False)
        loaded = importlib.import_module(name)
        monkeypatch.setitem(sys.modules, name, loaded)
        return loaded

    return make


def example(page, containing):
    (found,) = [block for block in blocks(page, "python") if containing in block]
    return found


def entry_point(page):
    """Group, name and object of the entry point that a page's project offers."""
    (project,) = blocks(page, "toml")
    return re.search(r'^\[project\.entry-points\."(.+)"\]\n(\S+) = "(.+)"$', project, re.MULTILINE).groups()


@pytest.fixture
def library(monkeypatch):
    """The vendor's library that the examples are about."""
    made = ModuleType("vendors_library")
    made.told, made.TILE, made.buffer_size = None, 16, lambda: 1

    def set_lengths(lengths):
        before, made.told = made.told, lengths
        return before

    made.set_lengths = set_lengths
    for name in ("acme_library", "toy_library"):
        monkeypatch.setitem(sys.modules, name, made)
    return made


# ---- a platform ---------------------------------------------------------------------------------------


def test_the_third_section_is_a_platform(module, monkeypatch):
    runtime = module("acme_runtime", example(PLATFORM, "class AcmeRuntime"))
    made = module("acme_platform_of_the_page", example(PLATFORM, "class AcmePlatform"))
    monkeypatch.setitem(sys.modules, "anytron_acme", ModuleType("anytron_acme"))
    monkeypatch.setitem(sys.modules, "anytron_acme.runtime", runtime)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(device_count=lambda: 2))

    platform = made.AcmePlatform()

    assert platform.probe().devices == platform.runtime().device_count() == 2
    assert isinstance(platform.runtime(), DeviceRuntime)
    assert platform.runtime() is made.AcmePlatform().runtime()
    assert entry_point(PLATFORM) == ("anytron.platforms", platform.name, "anytron_acme:AcmePlatform")


def test_the_example_of_a_scope_sets_and_puts_back(module, library):
    plugin = module("with_lengths", example(PLATFORM, "class WithLengths")).WithLengths()
    layout, tokens = plan_layout([3, 2]), torch.arange(5)
    given = ModelInputs(layout, layout.pack(tokens), layout.position_ids, layout.next_tokens(tokens))
    inputs = hooks_of(extensions={"acme": plugin}).preprocess_sequences(given)
    library.told = "before"
    with scopes.enter(inputs.scope):
        assert library.told == [3, 2]
        with scopes.enter(inputs.scope):
            assert library.told == [3, 2]
        assert library.told == [3, 2]
    assert library.told == "before"


def test_the_example_of_an_error_is_shown_in_four_lines(module):
    refuse = module("refusing", example(PLATFORM, "def refuse_long_sequences")).refuse_long_sequences
    with pytest.raises(EngineError) as caught:
        refuse(5000)
    assert len(str(caught.value).splitlines()) == 4


def test_the_example_of_a_test_asks_a_facade(module):
    test = module("tiles", example(PLATFORM, "test_sequences_are_whole_tiles")).test_sequences_are_whole_tiles

    acme = module("acme_of_the_page", example(PLATFORM, "class AcmePlatform"))

    class WithTiles(acme.AcmePlatform):
        @hookimpl
        def layout_constraints(self, request):
            return LayoutConstraints(align=8)

    test(WithTiles(), LayoutRequest("thd", ModelTraits(), ParallelSizes()))


# ---- an extension -------------------------------------------------------------------------------------


def test_the_example_of_an_extension_passes_its_own_test_and_is_found(module, tmp_path, monkeypatch):
    extension = module("our_cluster", example(EXTENSION, "def runtime_env"))
    module("test_our_cluster", example(EXTENSION, "def test_every_worker")).test_every_worker_has_its_queue()
    long = RunConfig.model_validate({**CONFIG, "trainer": {"total_steps": 10_001}})
    (warning,) = hooks_of(extensions={"our-cluster": extension}).remarks(long)[1]
    assert (warning.severity, warning.key) == ("warning", "trainer.total_steps")

    group, name, value = entry_point(EXTENSION)
    info = tmp_path / "our_cluster-1.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    importlib.invalidate_caches()

    def state():
        return next(one.state.value for one in survey_plugins().reports if one.name == "our-cluster")

    assert state() == "active"
    for variable, value in (("ANYTRON_DISABLE_PLUGINS", "our-cluster"), ("ANYTRON_PLUGINS", "")):
        monkeypatch.setenv(variable, value)
        assert state() == "blocked", variable
        monkeypatch.delenv(variable)


# ---- patches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "buffer"), [("1.3", 2), ("1.4", 1)])
def test_the_example_of_patches_is_applied_where_it_is_needed(module, library, tmp_path, version, buffer):
    plugin = module("toy_tiles", example(PATCHES, "class Tiles")).Tiles()
    module("toy_patches", example(PATCHES, "def doubled"))
    info = tmp_path / f"toy_library-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toy-library\nVersion: {version}\n")
    importlib.invalidate_caches()
    hooks = hooks_of(extensions={"toy": plugin})
    context = PatchContext(SimpleNamespace(options=SimpleNamespace(tile=4)), "trainer", hooks, "megatron")
    ledger = Ledger(context=context)

    ledger.apply(Phase.BEFORE_BUILD, hooks.patch_model(Phase.BEFORE_BUILD, context))

    assert (library.TILE, library.buffer_size()) == (4, buffer)
    outcomes = {one["id"]: one["outcome"] for one in ledger.report()}
    assert outcomes == {"toy.buffer": "applied" if buffer == 2 else "skipped", "toy.tile": "applied"}
    ledger.undo()
    assert (library.TILE, library.buffer_size()) == (16, 1)


# ---- kernels ------------------------------------------------------------------------------------------

MUTANTS = {
    "top-left": ("attention.py", "arange(keys - queries, keys,", "arange(queries,", "last_query"),
    "not-causal": (
        "attention.py",
        "hidden = distance > 0 if causal else",
        "hidden = distance > keys if causal else",
        "",
    ),
    "heads": ("attention.py", "key[None, of_keys], value", "key[None, of_keys].flip(2), value", ""),
    "padding": ("attention.py", "query.new_zeros", "query.new_ones", "attention_is"),
    "temperature": ("log_probs.py", ".float() / temperature", ".float()", "log_probs"),
    "vocabulary": ("log_probs.py", "weight[:entries]", "weight", "log_probs"),
    "ignored": ("log_probs.py", "torch.where(real, entropy, 0.0)", "entropy", "log_probs"),
    "entropy": ("log_probs.py", "-(every.exp() * every)", "-(every.exp() * every).detach()", "log_probs"),
    "eps": ("fused.py", "keepdim=True) + eps)", "keepdim=True))", "rms_norm"),
    "centre": ("fused.py", "1.0 + weight.float() if zero_centered else weight", "weight", "rms_norm"),
    "through-the-root": ("fused.py", "normal * (scaled * normal)", "0 * (scaled * normal)", "rms_norm"),
    "halves": ("fused.py", "gate, up = ", "up, gate = ", "swiglu"),
    "gradient": ("fused.py", "functional.silu(gate) * up", "functional.silu(gate.detach()) * up", "swiglu"),
    "output": ("platform.py", "layout.unpack(values) if", "layout.unpack(values).flip(0) if", "outputs"),
    "detached": (
        "platform.py",
        "layout.unpack(values) if",
        "layout.unpack(0 * values + values.detach()) if",
        "outputs",
    ),
}
"""By name: the sample's file, what stands in it, what stands there instead, and whose failure is expected."""


def run_the_file(folder: Path, *paths: str) -> subprocess.CompletedProcess[str]:
    (source,) = [block for block in blocks(KERNELS, "python") if "MyPlatform" in block]
    (folder / "test_my_kernels.py").write_text(source)
    program = f"import sys, pytest; sys.path[:0] = {[*paths, *sys.path]!r}; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=folder)


def test_the_file_passes_for_the_sample(tmp_path):
    done = run_the_file(tmp_path, str(SAMPLE), str(SAMPLE / "sdk"))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_file_notices_what_is_wrong(tmp_path, mutant):
    file, right, wrong, test = MUTANTS[mutant]
    folder = tmp_path / "mutant" / "anytron_basalt"
    folder.mkdir(parents=True)
    for path in (SAMPLE / "anytron_basalt").glob("*.py"):
        text = path.read_text()
        assert path.name != file or right in text
        (folder / path.name).write_text(text.replace(right, wrong) if path.name == file else text)
    done = run_the_file(tmp_path, str(folder.parent), str(SAMPLE / "sdk"))
    failed = re.findall(r"^FAILED .*::(test_\w+\S*)", done.stdout, re.MULTILINE)
    assert done.returncode == 1, done.stdout
    assert failed
    assert all(test in name for name in failed), failed


def test_the_commands_of_the_ci_recipe_set_keys_that_exist():
    (recipe,) = [block for block in blocks(KERNELS, "sh") if "anytron verify" in block]
    commands = [line.partition("#")[0].split() for line in recipe.splitlines() if "run.yaml" in line]
    assert len(commands) == 4
    for _, _, _, *overrides in commands:
        load_config(ROOT / "examples" / "grpo_sort.yaml", overrides)
