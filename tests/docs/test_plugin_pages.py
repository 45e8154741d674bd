"""The pages for authors of plugins: every example runs."""

from __future__ import annotations

import importlib
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from anytron import hookimpl
from anytron.base.errors import EngineError
from anytron.config.load import load_config
from anytron.config.schema import RunConfig
from anytron.device.hooks.types import PatchContext
from anytron.device.loading import hooks_of, survey_plugins
from anytron.device.patches import Ledger, Phase
from anytron.device.runtime import DeviceRuntime
from anytron.sequences import scopes
from anytron.sequences.layout import ModelInputs
from anytron.sequences.planning import plan_layout
from tests.docs.test_pages import ROOT, blocks

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
    test = module("tiles", example(PLATFORM, "test_training_ranks_read_the_tile")).test_training_ranks_read_the_tile

    acme = module("acme_of_the_page", example(PLATFORM, "class AcmePlatform"))

    class WithTiles(acme.AcmePlatform):
        @hookimpl
        def runtime_env(self, process):
            return {"ACME_TILE": "8"} if process.role == "trainer" else {}

    test(WithTiles())


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


def test_the_commands_of_the_ci_recipe_set_keys_that_exist():
    (recipe,) = [block for block in blocks(KERNELS, "sh") if "anytron verify" in block]
    commands = [line.partition("#")[0].split() for line in recipe.splitlines() if "run.yaml" in line]
    assert len(commands) == 4
    for _, _, _, *overrides in commands:
        load_config(ROOT / "examples" / "grpo_sort.yaml", overrides)
