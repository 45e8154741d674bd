"""Every installed plugin gets a report, whatever is wrong with it or with its neighbours."""

from __future__ import annotations

import pytest

from anytron.base.errors import PlatformError, PluginError
from anytron.base.version import __version__
from anytron.device.loading import State, open_session, survey_plugins

HOOK = "    @hookimpl\n    def {signature}: {body}\n"


def test_the_embedded_platform_is_reported_with_its_distribution(report):
    cpu = report("cpu")
    assert (cpu.state, cpu.kind, cpu.distribution) == (State.ACTIVE, "platform", "anytron")
    assert cpu.version == __version__


def test_a_plugin_that_fails_to_import_hides_no_other(site, report):
    """pluggy's own loader stops at the first broken plugin."""
    site.extension("aaa", "import a_package_that_nobody_has")
    site.extension("zzz", "from anytron import hookimpl\n@hookimpl\ndef runtime_env(process): return {'X': '1'}")
    assert report("aaa").state is State.BROKEN
    assert "No module named 'a_package_that_nobody_has'" in report("aaa").reason
    assert "python -c" in report("aaa").remedy
    assert report("zzz").state is State.ACTIVE
    assert report("zzz").hooks == ("runtime_env",)


def test_a_plugin_that_exits_at_import_does_not_end_the_process(site, report):
    site.extension("quitter", "import sys; sys.exit('bye')")
    assert report("quitter").state is State.BROKEN
    assert "SystemExit: bye" in report("quitter").reason


def test_a_broken_extension_stops_a_session_and_says_how_to_leave_it_out(site, monkeypatch):
    site.extension("crash", "1 / 0")
    with pytest.raises(PluginError, match="cannot be used: crash") as caught:
        open_session()
    assert "ZeroDivisionError" in caught.value.why
    assert "ANYTRON_DISABLE_PLUGINS=crash" in caught.value.fix
    monkeypatch.setenv("ANYTRON_DISABLE_PLUGINS", "megatron,crash")
    assert open_session().platform.name == "cpu"


def test_an_unknown_hook_is_broken_and_the_nearest_name_is_given(site, report):
    """pluggy accepts a hook that no specification knows."""
    site.platform("chip", body=HOOK.format(signature="attention_kernal(self, spec)", body="return None"))
    chip = report("chip")
    assert chip.state is State.BROKEN
    assert "attention_kernal" in chip.reason
    assert "acme_chip.py" in chip.reason
    assert chip.remedy == "did you mean attention_kernel?"


def test_an_argument_that_the_hook_does_not_have_is_broken(site, report):
    site.platform("chip", body=HOOK.format(signature="fused_kernel(self, name, shape)", body="return None"))
    chip = report("chip")
    assert chip.state is State.BROKEN
    assert "no argument shape" in chip.reason
    assert "(name, spec)" in chip.remedy


def test_an_argument_with_a_default_is_broken_because_it_would_never_be_passed(site, report):
    """pluggy never passes an argument that has a default value."""
    site.platform("chip", body=HOOK.format(signature="attention_kernel(self, spec=None)", body="return None"))
    assert report("chip").state is State.BROKEN
    assert "never passed: spec" in report("chip").reason


def test_a_wrapper_is_broken(site, report):
    wrapper = "    @hookimpl(wrapper=True)\n    def attention_kernel(self, spec): return (yield)\n"
    site.platform("chip", body=wrapper)
    assert report("chip").state is State.BROKEN
    assert "implements attention_kernel as a wrapper" in report("chip").reason


def test_a_method_with_a_hooks_name_and_no_marker_is_broken(site, report):
    """pluggy leaves it out, and the run would use another kernel in silence."""
    site.platform("chip", body="    def attention_kernel(self, spec): return None\n")
    chip = report("chip")
    assert chip.state is State.BROKEN
    assert "has a function attention_kernel without the marker hookimpl" in chip.reason
    assert "acme_chip.py" in chip.reason
    assert "@anytron.hookimpl" in chip.remedy


@pytest.mark.parametrize("decorator", ["@staticmethod", "@classmethod", "@functools.cache"])
def test_a_decorator_does_not_hide_a_method_without_a_marker(site, report, decorator):
    site.platform("chip", body=f"    import functools\n    {decorator}\n    def attention_kernel(spec): return None\n")
    assert report("chip").state is State.BROKEN


def test_an_unmarked_method_that_overrides_a_marked_one_is_broken(site, report):
    body = HOOK.format(signature="attention_kernel(self, spec)", body="return None")
    site.platform(
        "chip", body=body + "class Base(Chip): pass\nclass Chip(Base):\n    attention_kernel = lambda self: 1\n"
    )
    assert report("chip").state is State.BROKEN


def test_a_hook_of_an_earlier_version_says_what_plugins_do_instead(site, report):
    site.extension("old", "from anytron import hookimpl\n@hookimpl\ndef rollout_options(engine): return {'x': 1}")
    assert report("old").state is State.BROKEN
    assert "rollout_options" in report("old").reason
    assert "default=True" in report("old").remedy


def test_a_run_refuses_a_plugin_with_an_unmarked_function(site):
    site.extension("acme", "def runtime_env(process): return {'X': '1'}")
    with pytest.raises(PluginError, match="cannot be used: acme") as caught:
        open_session()
    assert "runtime_env is the name of a hook" in caught.value.why


def test_other_things_with_a_hooks_name_are_no_implementations(site, report):
    """Attributes that are no functions, imported functions, and methods inherited from another distribution."""
    site.install("acme-tools", "def configure(): ...\nclass Tool:\n    def requirements(self): ...", entry_points="")
    site.extension("module", "from acme_tools import configure\nrequirements = ['torch']")
    site.platform("chip", body="    requirements = ()\n    configure = property(lambda self: 1)\n")
    site.extension("tool", "from acme_tools import Tool\nclass Plugin(Tool):\n    runtime_env = None", "Plugin")
    assert {name: report(name).reason for name in ("module", "tool") if report(name).state is not State.ACTIVE} == {}
    assert (report("chip").state, report("chip").hooks) == (State.ACTIVE, ())


def test_what_is_no_platform_is_broken(site, report):
    site.install("acme-chip", "class Chip: pass", entry_points="[anytron.platforms]\nchip = acme_chip:Chip\n")
    assert report("chip").state is State.BROKEN
    assert "not a subclass of anytron.Platform" in report("chip").reason


def test_a_platform_without_a_probe_is_broken(site, report):
    source = "from anytron import Platform\nclass Chip(Platform):\n    name = 'chip'\n    api_version = 1\n"
    site.install("acme-chip", source, entry_points="[anytron.platforms]\nchip = acme_chip:Chip\n")
    assert report("chip").state is State.BROKEN
    assert "abstract" in report("chip").reason


def test_a_platform_that_calls_itself_otherwise_is_broken(site, report):
    site.platform("chip", body="    name = 'chop'\n")
    assert report("chip").state is State.BROKEN
    assert "'chip'" in report("chip").reason
    assert "'chop'" in report("chip").reason


def test_options_that_accept_unknown_keys_are_broken(site, report):
    site.platform("chip", body="    from pydantic import BaseModel as options_model\n")
    assert report("chip").state is State.BROKEN
    assert "accept unknown options" in report("chip").reason


def test_an_object_that_raises_while_hooks_are_looked_for_is_broken(site, report):
    site.platform("chip", body="    def __dir__(self): raise RuntimeError('no clock')\n")
    assert report("chip").state is State.BROKEN
    assert "no clock" in report("chip").reason


@pytest.mark.parametrize("version", [0, 2])
def test_another_version_of_the_contract_is_incompatible(site, report, version):
    site.platform("chip", body=f"    api_version = {version}\n")
    assert report("chip").state is State.INCOMPATIBLE
    assert f"version {version}" in report("chip").reason


def test_a_platform_that_says_no_version_of_the_contract_is_broken(site, report):
    """An inherited number would be that of whatever core is installed, and fit always."""
    source = "from anytron import Platform\nclass Chip(Platform):\n    name = 'chip'\n"
    site.install("acme-chip", source, entry_points="[anytron.platforms]\nchip = acme_chip:Chip\n")
    assert report("chip").state is State.BROKEN
    assert "has no api_version" in report("chip").reason
    assert "api_version = 1 into the class Chip" in report("chip").remedy


def test_a_platform_of_another_version_is_refused_by_name(site):
    site.platform("chip", body="    api_version = 2\n")
    with pytest.raises(PlatformError) as caught:
        open_session("chip")
    assert caught.value.what == "Platform 'chip' is incompatible."
    assert caught.value.where == "platform.name=chip"
    assert caught.value.why == "it was written for version 2 of the plugin contract, this anytron has 1"
    assert caught.value.fix == "install versions of anytron and acme-chip that match"


def test_one_name_twice_uses_neither_and_names_both(site, report):
    """pluggy skips a second plugin of the same name in silence."""
    site.platform("chip", distribution="acme-chip")
    site.platform("chip", distribution="other-chip")
    both = [one for one in survey_plugins().reports if one.name == "chip"]
    assert [one.state for one in both] == [State.DUPLICATE] * 2
    assert {one.distribution for one in both} == {"acme-chip", "other-chip"}
    assert all("acme-chip" in one.reason and "other-chip" in one.reason for one in both)


def test_an_unmet_requirement_is_incompatible(site, report):
    body = """
    @hookimpl
    def requirements(self):
        from anytron.device.hooks.types import Requirement
        return [Requirement("pluggy", ">=99", "pip install pluggy==99")]
"""
    site.platform("chip", body=body)
    assert report("chip").state is State.INCOMPATIBLE
    assert "needs pluggy>=99" in report("chip").reason
    assert report("chip").remedy == "pip install pluggy==99"


def test_a_requirements_hook_that_raises_is_broken_and_hides_no_other(site, report):
    site.extension("bad", "from anytron import hookimpl\n@hookimpl\ndef requirements(): raise OSError('disk')")
    site.extension("fine", "")
    assert (report("bad").state, report("fine").state) == (State.BROKEN, State.ACTIVE)
    assert "disk" in report("bad").reason


def test_the_allow_list_blocks_others_without_importing_them(site, report, monkeypatch):
    site.extension("wanted", "")
    site.extension("unwanted", "raise AssertionError('imported')")
    monkeypatch.setenv("ANYTRON_PLUGINS", "wanted")
    assert report("wanted").state is State.ACTIVE
    assert report("unwanted").state is State.BLOCKED
    assert report("unwanted").reason == "excluded by ANYTRON_PLUGINS=wanted"
    assert report("cpu").state is State.ACTIVE, "what ships with anytron itself is not subject to the list"


def test_an_empty_allow_list_blocks_every_third_party_plugin(site, report, monkeypatch):
    site.extension("unwanted", "")
    monkeypatch.setenv("ANYTRON_PLUGINS", "")
    assert report("unwanted").state is State.BLOCKED


def test_an_allow_list_entry_that_matches_nothing_is_an_error(site, monkeypatch):
    monkeypatch.setenv("ANYTRON_PLUGINS", "wnated")
    with pytest.raises(PluginError, match="wnated"):
        survey_plugins()


def test_disabled_plugins_are_blocked_embedded_ones_too(report):
    assert report("megatron").state is State.BLOCKED
    assert "ANYTRON_DISABLE_PLUGINS" in report("megatron").reason


def test_disabling_what_is_not_installed_is_said(site, monkeypatch, caplog):
    monkeypatch.setenv("ANYTRON_DISABLE_PLUGINS", "megatron,typo")
    survey_plugins()
    assert "typo" in caplog.text
