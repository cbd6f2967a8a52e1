"""Public functions and classes document their parameters, have an example, and are in the reference."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import scalelatent as sl

API = (Path(__file__).parents[1] / ".docs" / "reference" / "python.rst").read_text(encoding="utf-8")
FUNCTIONS = [name for name in sl.__all__ if inspect.isroutine(getattr(sl, name))]
ESTIMATORS = [name for name in sl.__all__ if hasattr(getattr(sl, name), "get_params")]


def test_every_public_name_is_in_the_reference() -> None:
    listed = set(re.findall(r"^   (\w+)$", API, re.MULTILINE))
    assert set(sl.__all__) - {"__version__"} <= listed


@pytest.mark.parametrize("name", FUNCTIONS + ESTIMATORS)
def test_public_names_have_parameters_and_an_example(name: str) -> None:
    text = inspect.getdoc(getattr(sl, name)) or ""
    assert ">>>" in text
    parameters = inspect.signature(getattr(sl, name)).parameters
    assert not parameters or "Parameters\n---------" in text


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_parameter_is_explained_in_the_docstring_of_its_class(name: str) -> None:
    text = inspect.getdoc(getattr(sl, name)) or ""
    section = text.split("Parameters\n----------\n")[1].split("\n\nAttributes")[0]
    heads = " ".join(re.findall(r"^(\w[\w, ]*) :", section, re.MULTILINE))
    explained = {word.strip() for word in heads.replace(",", " ").split()}
    assert set(inspect.signature(getattr(sl, name)).parameters) <= explained


@pytest.mark.parametrize("name", ESTIMATORS)
def test_public_methods_have_a_docstring(name: str) -> None:
    cls = getattr(sl, name)
    methods = [m for m in dir(cls) if not m.startswith("_") and inspect.isfunction(getattr(cls, m))]
    assert [m for m in methods if not inspect.getdoc(getattr(cls, m))] == []


@pytest.mark.parametrize("name", ["LinearMixture", "LinearMixtureClassifier"])
def test_inserted_parts_of_a_docstring_have_the_indentation_of_their_section(name: str) -> None:
    """A decorator inserts text. From Python 3.13 on, the docstring that it reads has no indentation."""
    documented = getattr(sl, name).__doc__
    for parameter in ("n_components", "n_dims", "device", "means_", "bases_"):
        assert re.search(rf"^{parameter} : ", documented, re.MULTILINE)


def test_titles_of_docstring_sections_stand_on_their_own_line() -> None:
    joined = re.compile(r"^\s*[A-Z]\w+ -{3,}", re.MULTILINE)
    package = Path(sl.__file__).parent
    assert [path.name for path in package.rglob("*.py") if joined.search(path.read_text("utf-8"))] == []
