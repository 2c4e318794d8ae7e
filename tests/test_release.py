"""What `make dist` adds to a release. `.ci/run` builds one and runs the demo with its wheel."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from safe_offload import __version__
from tests import ci_script

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://git.example/team/safe_offload"
LINK = re.compile(r"\]\(([^)]+)\)")


@pytest.fixture(scope="module")
def make_dist():
    return ci_script.load("make_dist")


@pytest.fixture
def tree(tmp_path, make_dist):
    for name in ("pyproject.toml", "README.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    make_dist.add_address(tmp_path, REPOSITORY)
    return tmp_path


def test_the_address_of_the_repository_is_in_the_metadata(tree):
    urls = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Source"] == REPOSITORY
    for name in ("Documentation", "Changelog"):
        path = urls[name].removeprefix(f"{REPOSITORY}/blob/main/")
        assert (ROOT / path).is_file(), path


def test_the_links_of_the_readme_lead_to_files_of_the_repository(tree):
    links = LINK.findall((tree / "README.md").read_text())
    assert len(links) == len(LINK.findall((ROOT / "README.md").read_text()))
    for link in links:
        path = re.sub(rf"^{REPOSITORY}/(blob|raw)/main/", "", link)
        assert path != link, f"{link} leads nowhere on PyPI"
        assert (ROOT / path.partition("#")[0]).is_file(), path


def test_the_release_workflow_calls_targets_that_exist():
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    steps = [step.get("run", "") for step in workflow["jobs"]["build"]["steps"]]
    targets = re.findall(r"^make ([\w-]+)", "\n".join(steps), re.MULTILINE)
    assert targets == ["dist", "demo-wheel"]
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (tag_check,) = (step for step in steps if "GITHUB_REF_NAME" in step)
    assert f'__version__ = "{__version__}"' in (ROOT / "safe_offload/__init__.py").read_text()
    assert "safe_offload/__init__.py" in tag_check


def test_the_version_has_an_entry_in_the_changelog():
    assert f"\n## {__version__}" in (ROOT / "docs/CHANGELOG.md").read_text()
