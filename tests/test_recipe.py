"""conda's recipe says what pyproject.toml says."""

import pathlib
import sys

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")
yaml = pytest.importorskip("yaml")

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture
def recipe():
    text = (ROOT / "recipe/recipe.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


@pytest.fixture
def project():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["project"]


def test_a_recipe_builds_the_version_of_the_project(recipe, project):
    assert recipe["context"]["version"] == project["version"]
    assert recipe["package"]["name"] == project["name"]
    about = recipe["about"]
    assert about["summary"] == project["description"]
    assert about["license"] == project["license"]
    assert [about["license_file"]] == project["license-files"]


def test_a_recipe_needs_what_the_project_needs(recipe, project):
    wanted = {name.replace(" ", "") for name in project["dependencies"]}
    wanted.add(f"python{project['requires-python']}")
    run = recipe["requirements"]["run"]
    # The system, and the compiler of the native library.
    assert {name.replace(" ", "") for name in run} == wanted | {
        "__linux",
        "gxx",
    }


def test_a_recipe_has_the_command_of_the_project(recipe, project):
    scripts = [f"{name} = {to}" for name, to in project["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts
