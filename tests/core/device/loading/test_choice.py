"""The table of platform choices: explicit > ANYTRON_PLATFORM > probe, and never a silent fallback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from anytron.base.errors import ConfigError, PlatformError
from anytron.device.loading import State, open_session, survey_plugins


@pytest.fixture(autouse=True)
def _isolated(site):
    """Every test here runs on a site of its own."""


def test_alone_the_processor_is_taken_and_says_why():
    session = open_session()
    assert session.platform.name == "cpu"
    assert session.choice_reason == "no accelerator platform is installed"


def test_absent_accelerators_leave_the_processor_and_their_reasons_are_given(site):
    site.platform("npx", "absent", reason="no NPX on the bus")
    session = open_session()
    assert session.platform.name == "cpu"
    assert "every installed accelerator is absent" in session.choice_reason
    assert "npx: no NPX on the bus" in session.choice_reason


def test_a_usable_accelerator_wins_over_the_processor(site):
    site.platform("npx", "usable")
    session = open_session()
    assert session.platform.name == "npx"
    states = {report.name: report.state for report in session.reports}
    assert (states["npx"], states["cpu"]) == (State.ACTIVE, State.AVAILABLE)


def test_a_broken_accelerator_is_an_error_never_a_fallback(site):
    site.platform("npx", "broken", reason="driver 3 is too old", remedy="install driver 4")
    with pytest.raises(PlatformError) as caught:
        open_session()
    assert "driver 3 is too old" in caught.value.why
    assert "install driver 4" in caught.value.fix
    assert "ANYTRON_PLATFORM=cpu" in caught.value.fix


def test_a_broken_accelerator_is_an_error_beside_a_usable_one(site):
    site.platform("npx", "broken", reason="driver 3 is too old")
    site.platform("zpu", "usable")
    with pytest.raises(PlatformError, match="npx"):
        open_session()
    assert open_session("zpu").platform.name == "zpu"


BY_NAME_ONLY = "    chosen_by_name_only = True"


def test_a_device_that_is_used_only_by_name_is_never_passed_over(site):
    site.platform("anyx", "usable", reason="torch reports 2 devices", body=BY_NAME_ONLY)
    with pytest.raises(PlatformError, match="no platform for it is installed") as caught:
        open_session()
    assert "torch reports 2 devices" in caught.value.why
    for way in ("platform.name=anyx", "anytron new-platform NAME", "ANYTRON_PLATFORM=cpu", "anytron[cuda]"):
        assert way in caught.value.fix
    assert open_session("anyx").platform.name == "anyx"
    assert open_session("cpu").platform.name == "cpu"


def test_a_platform_that_is_excluded_is_named_beside_it(site, monkeypatch):
    site.platform("anyx", "usable", body=BY_NAME_ONLY)
    site.platform("npx", "usable")
    monkeypatch.setenv("ANYTRON_DISABLE_PLUGINS", "npx")
    with pytest.raises(PlatformError, match="no platform for it is installed") as caught:
        open_session()
    assert "Platform 'npx' is excluded by ANYTRON_DISABLE_PLUGINS=npx" in caught.value.fix


@pytest.mark.parametrize("other", ["usable", "broken"])
def test_beside_another_accelerator_it_is_asked_only_if_it_is_named(site, monkeypatch, other):
    site.platform("anyx", "usable", body=BY_NAME_ONLY)
    site.platform("npx", other, remedy="repair it")
    reports = {report.name: report for report in survey_plugins().reports}
    assert reports["anyx"].reason == "not probed: it is used only if it is named"
    monkeypatch.setenv("ANYTRON_PLATFORM", "anyx")
    assert {report.name: report.state for report in survey_plugins().reports}["anyx"] is State.ACTIVE


def test_a_broken_one_does_not_trouble_whoever_names_the_processor(site, monkeypatch):
    site.platform("anyx", "broken", remedy="repair it", body=BY_NAME_ONLY)
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    reports = {report.name: report for report in survey_plugins().reports}
    assert (reports["cpu"].state, reports["anyx"].state) == (State.ACTIVE, State.AVAILABLE)


@pytest.mark.parametrize(("remedy", "shown"), [("repair the driver", True), ("", False)])
def test_its_absence_is_a_reason_where_something_is_to_be_done(site, remedy, shown):
    site.platform("anyx", "absent", reason="no driver", remedy=remedy, body=BY_NAME_ONLY)
    assert ("anyx: no driver" in open_session().choice_reason) is shown


def test_it_is_an_error_if_it_is_broken(site):
    site.platform("anyx", "broken", reason="driver 3 is too old", remedy="install driver 4", body=BY_NAME_ONLY)
    with pytest.raises(PlatformError, match="broken") as caught:
        open_session()
    assert "ANYTRON_PLATFORM=cpu" in caught.value.fix


def test_it_learns_which_packages_other_platforms_cover(site):
    site.platform(
        "anyx",
        "absent",
        remedy="do",
        body=BY_NAME_ONLY
        + """
    def probe(self):
        return Probe(Availability("absent"), f"{self.named} {sorted(self.covered_packages)}", "do")""",
    )
    site.platform("npx", "absent", body='    device_packages = ("torch_npx",)')
    assert "anyx: False ['torch_npx']" in open_session().choice_reason


@pytest.mark.parametrize("kind", ["import", "duplicate", "version"])
def test_an_accelerator_that_cannot_even_be_probed_is_an_error(site, kind):
    if kind == "import":
        site.install("acme-npx", "1 / 0", entry_points="[anytron.platforms]\nnpx = acme_npx:Chip\n")
    elif kind == "duplicate":
        site.platform("npx", "absent", distribution="acme-npx")
        site.platform("npx", "absent", distribution="other-npx")
    else:
        site.platform("npx", "absent", body="    api_version = 7\n")
    with pytest.raises(PlatformError, match="broken"):
        open_session()
    assert open_session("cpu").choice_reason.startswith("asked for by platform.name")


def test_two_usable_accelerators_ask_for_a_choice(site):
    site.platform("npx", "usable")
    site.platform("zpu", "usable")
    with pytest.raises(
        PlatformError, match=r"2 platforms can be used, and Anytron does not choose between them: npx, zpu"
    ) as caught:
        open_session()
    assert "ANYTRON_PLATFORM=npx" in caught.value.fix
    survey = survey_plugins()
    assert survey.error is not None
    assert {one.name: one.state for one in survey.reports if one.name in ("npx", "zpu")} == {
        "npx": State.AVAILABLE,
        "zpu": State.AVAILABLE,
    }


def test_the_variable_wins_over_probes_and_the_configuration_over_the_variable(site, monkeypatch):
    site.platform("npx", "usable")
    site.platform("zpu", "usable")
    monkeypatch.setenv("ANYTRON_PLATFORM", "npx")
    assert open_session().platform.name == "npx"
    assert "ANYTRON_PLATFORM" in open_session().choice_reason
    assert open_session("zpu").platform.name == "zpu"


def test_only_the_platform_asked_for_is_probed(site):
    site.platform("npx", "usable", body="    def probe(self): raise AssertionError('probed')\n")
    reports = {report.name: report for report in open_session("cpu").reports}
    assert reports["npx"].state is State.AVAILABLE
    assert "not probed" in reports["npx"].reason


@pytest.mark.parametrize("availability", ["absent", "broken"])
def test_a_platform_asked_for_and_not_usable_is_an_error(site, availability):
    site.platform("npx", availability, reason="looked in vain", remedy="plug it in")
    with pytest.raises(PlatformError) as caught:
        open_session("npx")
    assert (caught.value.where, caught.value.why, caught.value.fix) == (
        "platform.name=npx",
        "looked in vain",
        "plug it in",
    )


def test_a_probe_that_raises_is_broken_and_recorded(site):
    site.platform("npx", body="    def probe(self): raise OSError('bus error')\n")
    with pytest.raises(PlatformError, match="bus error"):
        open_session()
    assert next(one for one in survey_plugins().reports if one.name == "npx").state is State.BROKEN


def test_a_probe_that_answers_something_else_is_broken(site):
    site.platform("npx", body="    def probe(self): return True\n")
    with pytest.raises(PlatformError, match="True, which is not a Probe"):
        open_session()


def test_a_blocked_accelerator_does_not_count_and_cannot_be_asked_for(site, monkeypatch):
    site.platform("npx", "usable")
    monkeypatch.setenv("ANYTRON_DISABLE_PLUGINS", "megatron,npx")
    assert open_session().platform.name == "cpu"
    with pytest.raises(PlatformError, match="blocked"):
        open_session("npx")


def test_two_processors_ask_for_a_choice(site):
    site.platform("slowcpu", "usable", accelerator=False)
    with pytest.raises(PlatformError, match="cpu, slowcpu"):
        open_session()


def test_nothing_at_all_is_an_error(monkeypatch):
    monkeypatch.setenv("ANYTRON_DISABLE_PLUGINS", "megatron,cpu")
    with pytest.raises(PlatformError, match="No platform can be used"):
        open_session()


def test_an_official_platform_that_is_not_installed_says_how_to_install_it():
    with pytest.raises(PlatformError) as caught:
        open_session("ascend")
    assert caught.value.fix == "pip install 'anytron[ascend]'"


def test_an_unknown_platform_gets_the_nearest_name():
    with pytest.raises(PlatformError, match="did you mean cpu"):
        open_session("cpuu")


def test_a_platform_that_its_author_forgot_to_install_is_not_taken_for_another_one_only():
    with pytest.raises(PlatformError) as caught:
        open_session("acme")
    assert caught.value.fix.startswith("did you mean ascend? Otherwise install")
    assert "pip install ./anytron-NAME" in caught.value.fix


REFUSED = """
import sys
from anytron.base.errors import PlatformError
from anytron.device.loading import open_session
try:
    open_session()
except PlatformError as error:
    print(error.fix, "torch" in sys.modules)
"""


def test_a_platform_that_is_not_installed_is_refused_in_seconds_without_torch():
    done = subprocess.run(
        [sys.executable, "-c", REFUSED],
        env={**os.environ, "ANYTRON_PLATFORM": "ascend"},
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    assert done.stdout == "pip install 'anytron[ascend]' False\n"


OPTIONS = """
    from pydantic import BaseModel
    class options_model(BaseModel):
        model_config = {"extra": "forbid"}
        tile: int = 8
    def configure_options(self, options): self.seen = options
"""


def test_options_reach_the_platform_validated(site):
    site.platform("npx", body=OPTIONS)
    assert open_session("npx", {"tile": "16"}).platform.seen.tile == 16
    assert open_session("npx").platform.seen.tile == 8


def test_the_platform_knows_the_engine_when_it_gets_its_options(site):
    site.platform("npx", body="\n    def configure_options(self, options): self.seen = self.engine")
    assert open_session("npx", engine="an_engine").platform.seen == "an_engine"
    assert open_session("npx").platform.seen is None


def test_an_unknown_option_gets_the_nearest_name(site):
    site.platform("npx", body=OPTIONS)
    with pytest.raises(ConfigError, match=r"did you mean platform\.options\.tile") as caught:
        open_session("npx", {"tiles": 4})
    assert caught.value.where == "platform.options.tiles"


def test_where_there_are_no_options_none_are_listed(site):
    """As in the template that ``anytron new-platform`` writes."""
    site.platform("npx", body=OPTIONS.replace("tile: int = 8", "pass"))
    with pytest.raises(ConfigError) as caught:
        open_session("npx", {"tile": 4})
    assert (caught.value.where, caught.value.fix) == ("platform.options.tile", "remove it")


def test_a_wrong_option_value_names_its_key(site):
    site.platform("npx", body=OPTIONS)
    with pytest.raises(ConfigError) as caught:
        open_session("npx", {"tile": "many"})
    assert caught.value.where == "platform.options.tile"


def test_a_platform_without_options_refuses_all():
    with pytest.raises(ConfigError, match="no options are accepted"):
        open_session("cpu", {"tile": 4})


def test_the_variable_holds_the_options_where_none_are_given(site, monkeypatch):
    site.platform("npx", body=OPTIONS)
    monkeypatch.setenv("ANYTRON_PLATFORM_OPTIONS", '{"tile": 32}')
    assert open_session("npx").platform.seen.tile == 32
    assert open_session("npx", {}).platform.seen.tile == 32
    assert open_session("npx", {"tile": 32}).platform.seen.tile == 32, "the same twice is no conflict"
    with pytest.raises(ConfigError, match="set in two places") as caught:
        open_session("npx", {"tile": 16})
    assert caught.value.where == "platform.options, ANYTRON_PLATFORM_OPTIONS"


@pytest.mark.parametrize(
    "text", ["tile=32", "[32]", "null", "NaN", "{", '"tile"', "{'tile': 32}", "[" * 100_000, "\udc80", "{} {}"]
)
def test_a_variable_that_is_no_object_is_refused_by_its_name(site, monkeypatch, text):
    site.platform("npx", body=OPTIONS)
    monkeypatch.setenv("ANYTRON_PLATFORM_OPTIONS", text)
    with pytest.raises(ConfigError, match="ANYTRON_PLATFORM_OPTIONS is not a JSON object"):
        open_session("npx")


@pytest.mark.parametrize("text", ['{"tile": "many"}', '{"tile": NaN}', '{"tile": 1e999}', '{"tile": {"tile": 1}}'])
def test_an_option_of_the_variable_is_refused_by_its_name(site, monkeypatch, text):
    site.platform("npx", body=OPTIONS)
    monkeypatch.setenv("ANYTRON_PLATFORM_OPTIONS", text)
    with pytest.raises(ConfigError) as caught:
        open_session("npx")
    assert caught.value.where == "ANYTRON_PLATFORM_OPTIONS.tile"


def test_torch_is_kept_from_loading_devices_by_itself(monkeypatch):
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    open_session()
    assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    open_session()
    assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1", "what the user set is kept"
