import pytest

from anytron.device.patches.plan import in_range, installed_version


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("0.16.1", "<0.16.2", True),
        ("0.16.2", "<0.16.2", False),
        ("0.16.2", ">=0.16.2", True),
        ("0.9.0", "<0.13", True),  # as versions, not as strings
        ("0.16.1", "", True),
        ("2.13.0+cu128", "==2.13.0", True),
        ("1.0.post1", ">1.0", False),  # PEP 440: a post-release is no later version of its release
        ("1.0.post1", ">=1.0.post1", True),
        ("0.16.5", "==0.16.*", True),
    ],
)
def test_versions_are_compared_as_versions(version, specifier, expected):
    assert in_range(version, specifier) is expected


@pytest.mark.parametrize("prerelease", ["0.16.2rc1", "0.16.2a0", "0.16.2.dev7", "0.16.2rc1+cu128"])
def test_a_prerelease_counts_as_the_version_it_leads_to(prerelease):
    assert in_range(prerelease, ">=0.16.2")
    assert not in_range(prerelease, "<0.16.2")
    assert in_range(prerelease, ">=0.16,<0.17")


def test_exactly_one_of_a_patch_and_its_successor_applies_to_every_prerelease():
    for version in ("0.16.1", "0.16.2.dev0", "0.16.2rc1", "0.16.2", "0.16.3rc2"):
        assert in_range(version, "<0.16.2") != in_range(version, ">=0.16.2")


def test_a_range_that_names_a_prerelease_is_compared_exactly():
    assert in_range("0.16.2rc1", "<0.16.2rc2")
    assert not in_range("0.16.2rc2", "<0.16.2rc2")


def test_a_distribution_that_is_not_installed_has_no_version():
    assert installed_version("no-such-distribution-anywhere") == ""
    assert installed_version("pluggy")
