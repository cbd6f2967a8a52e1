"""The report page is one complete HTML file, which names the parts that are missing."""

from __future__ import annotations

import base64
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from scalelatent import CapsuleRegression, Dataset
from scalelatent.errors import DataError
from scalelatent.report import build
from scalelatent.report.build import build_report
from scalelatent.report.page import count, duration, join_words

VOID_TAGS = {"meta", "link", "img", "br", "hr", "input"}


class PageParser(HTMLParser):
    """Parser that collects tags, texts and headings of a page, and checks that tags are nested."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text, self.headings = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append((self.open[-1], data))
        if "style" not in self.open:
            self.text.append(data)

    def find_attributes(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def read(path):
    text = Path(path).read_text(encoding="utf-8")
    reader = PageParser()
    reader.feed(text)
    assert not reader.open
    reader.source = text
    reader.words = " ".join(" ".join(reader.text).split())
    return reader


def list_pictures(page):
    return [attrs["id"] for attrs in page.find_attributes("article")]


@pytest.fixture(scope="module")
def build_once(digits, run_folder):
    """Return a function that builds the report of an architecture once, and returns its path."""

    @cache
    def build(architecture):
        found = digits(capsule_dim=2, architecture=architecture)
        folder = run_folder(found.model)
        path = Path(build_report(folder, model=found.model, data=found.data))
        assert path == folder / "report" / "index.html"
        return path

    return build


@pytest.mark.parametrize("architecture", ["multiclass", "one_vs_all", "all_vs_all"])
def test_page_of_each_architecture(digits, build_once, architecture):
    found = digits(capsule_dim=2, architecture=architecture)
    path = build_once(architecture)
    page = read(path)
    expected = ["latents", "prototypes", "confusion", "mistakes", "reliability", "history"]
    if architecture == "all_vs_all":
        expected = [name for name in expected if name not in ("latents", "reliability")]
    assert list_pictures(page) == expected
    assert sorted(p.name for p in path.parent.iterdir()) == sorted(
        ["index.html", *(f"{n}.png" for n in expected)]
    )
    error = 1 - found.model.score(found.data)
    assert f"test error {100 * error:.2f} %" in page.words
    assert "made without rows" not in page.words
    assert not any(attrs.get("class") == "card notes" for attrs in page.find_attributes("section"))


def test_page_is_self_contained_and_accessible(build_once):
    path = build_once("multiclass")
    page = read(path)
    assert not re.search(r"https?://|@import|url\(", page.source)
    assert not page.find_attributes("script")
    for attrs in page.find_attributes("link"):
        assert attrs["href"].startswith("data:")
    for attrs in page.find_attributes("img"):
        assert len(attrs["alt"]) > 30
        head, data = attrs["src"].split(",", 1)
        assert head == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
    for attrs in page.find_attributes("a"):
        target = attrs["href"]
        if target.startswith("#"):
            assert any(tag.get("id") == target[1:] for _, tag in page.tags), target
        else:
            assert (path.parent / target).exists(), target
    assert [level for level, _ in page.headings].count("h1") == 1
    assert {"Figures", "Numbers", "Settings of the job", "Files of the run"} <= {t for _, t in page.headings}
    assert page.find_attributes("html")[0]["lang"] == "en"
    assert any(attrs.get("name") == "viewport" for attrs in page.find_attributes("meta"))
    assert "prefers-color-scheme: dark" in page.source


def test_settings_numbers_and_links(build_once):
    page = read(build_once("multiclass"))
    assert "capsule_dim 2 job file" in page.words
    assert "tol none default" in page.words
    assert "training rows 1,300" in page.words
    assert "passes 8" in page.words
    links = [attrs["href"] for attrs in page.find_attributes("a") if attrs["href"].startswith("../")]
    assert links == ["../job.json", "../metrics.jsonl", "../events.jsonl"]


def test_labels_are_escaped_and_strings_work(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(120, 5)), np.array(["<b>cat</b>", "dog & co"])[np.arange(120) % 2]
    x[y == "dog & co"] += 1.5
    model = CapsuleRegression(capsule_dim=2, max_iter=3, random_state=0).fit(x, y)
    (tmp_path / "run").mkdir()
    page = read(build_report(tmp_path / "run", model=model, data=Dataset.from_arrays(x, y), role="training"))
    assert "<b>cat" not in page.source
    # The figures of single rows need images, which these rows of x are not.
    assert not {"prototypes", "mistakes"} & set(list_pictures(page))
    assert "training error" in page.words


def test_page_shows_validation_and_best_error(run_folder):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 6)), np.arange(200) % 4
    x[np.arange(200), y] += 2
    model = CapsuleRegression(capsule_dim=1, max_iter=4, random_state=0)
    model.fit(x[:150], y[:150], validation=(x[150:], y[150:]))
    folder = run_folder(model, data={"test": None, "validation": "v.zarr"})
    page = read(build_report(folder, model=model, data=Dataset.from_arrays(x[150:], y[150:])))
    assert f"best validation error {100 * model.best_validation_error_:.2f} %" in page.words
    assert "all validation rows" in page.words
    assert "strip from -1 to 1" in page.words


def test_the_page_names_missing_parts(digits, run_folder):
    found = digits(capsule_dim=2)
    folder = run_folder(found.model)
    (folder / "metrics.jsonl").unlink()
    (folder / "job.json").unlink()
    found.model.save(folder / "model.zarr")
    page = read(build_report(folder))  # A saved model has no history.
    assert "metrics.jsonl is missing" in page.words
    assert "job.json is missing" in page.words
    assert "made without rows" in page.words
    assert list_pictures(page) == []
    page = read(build_report(folder, data=Dataset.from_arrays(found.x), role="test"))
    assert "have no labels" in page.words
    assert list_pictures(page) == ["latents", "prototypes"]


def test_a_model_in_memory_has_its_history(digits, tmp_path):
    found = digits(capsule_dim=2)
    page = read(build_report(tmp_path, model=found.model))
    assert list_pictures(page) == ["history"]
    assert "metrics.jsonl" not in page.words


def test_incomplete_last_line_is_ignored_and_damaged_line_is_noted(digits, run_folder):
    found = digits(capsule_dim=2)
    folder = run_folder(found.model)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"pass": 9, "obj')
    assert "damaged" not in read(build_report(folder, model=found.model)).words
    lines = (folder / "metrics.jsonl").read_text().split("\n")
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], "{broken", *lines[2:]]))
    assert "metrics.jsonl: line 2 is damaged" in read(build_report(folder, model=found.model)).words


def test_the_page_is_written_if_its_rows_are_unusable(digits, run_folder):
    found = digits(capsule_dim=2)
    page = read(
        build_report(run_folder(found.model), model=found.model, data=Dataset.from_arrays(np.ones((9, 3))))
    )
    assert "has 3 features per row" in page.words
    assert list_pictures(page) == ["history"]


def test_a_second_report_replaces_the_first(digits, run_folder):
    found = digits(capsule_dim=2)
    folder = run_folder(found.model)
    build_report(folder, model=found.model)
    (folder / "report" / "latents.png").write_bytes(b"of an earlier report")
    path = Path(build_report(folder, model=found.model))
    assert sorted(p.name for p in path.parent.iterdir()) == ["history.png", "index.html"]


def test_folders_without_run_or_model_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"nothing has no model\.zarr"):
        build_report(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"has no model\.zarr.*scalelatent resume"):
        build_report(tmp_path)


def test_records_within_a_pass_do_not_count_as_passes(run_folder):
    x, y = np.random.default_rng(0).normal(size=(400, 6)), np.arange(400) % 2
    model = CapsuleRegression(
        capsule_dim=1, algorithm="stepwise", n_epochs=2, batch_rows=40, n_chains=1, random_state=0
    ).fit(x, y, validation=(x[:50], y[:50]), engine={"validate_steps": 2})
    assert len(model.history_) == 10
    page = read(build_report(run_folder(model), model=model))
    assert "2 passes:" in page.find_attributes("img")[0]["alt"]


def test_a_history_of_one_pass_is_shown(digits, run_folder):
    found = digits(capsule_dim=2, max_iter=1)
    page = read(build_report(run_folder(found.model), model=found.model))
    assert "1 pass:" in page.find_attributes("img")[0]["alt"]


def test_numbers_are_formatted():
    assert [count(1, "row"), count(12345, "row"), count(2, "class", "classes")] == [
        "1 row", "12,345 rows", "2 classes",
    ]  # fmt: skip
    assert [join_words(["a"]), join_words(["a", "b", "c"])] == ["a", "a, b and c"]
    assert [duration(0.0123), duration(75.2), duration(7300)] == ["0.012 s", "1 min 15 s", "2 h 1 min"]


def test_a_kind_without_a_section_gets_the_plain_page(digits, run_folder, monkeypatch):
    found = digits(capsule_dim=2)
    monkeypatch.setattr(build, "find_kind", lambda model: SimpleNamespace(report=""))
    page = read(build_report(run_folder(found.model), model=found.model))
    assert list_pictures(page) == ["learning"]
    assert "features per row 64" in page.words
