"""A fit in Python shows its progress, explains an interruption by Ctrl-C, and can write a report."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

import scalelatent as sl

X, Y = np.random.default_rng(0).normal(size=(80, 6)), np.arange(80) % 2
V = (X > 0).astype("u1")
MODELS = {
    "capsule": (sl.CapsuleRegression(capsule_dim=2, max_iter=4, nu_schedule=None, random_state=0), (X, Y)),
    "online": (sl.CapsuleRegression(capsule_dim=2, max_iter=4, algorithm="stepwise", random_state=0), (X, Y)),
    "crbm": (sl.ConditionalRBM(n_hidden=2, n_epochs=4, batch_size=20, random_state=0), (V, V)),
    "mbn": (sl.MultilayerBootstrapNetwork(decay=0.5, n_clusterings=5, k1=10, random_state=0), (X,)),
    "search": (
        sl.Search(MODEL := sl.CapsuleRegression(max_iter=4, random_state=0), {"capsule_dim": [1, 2]}, cv=2),
        (X, Y),
    ),
}
LEARNERS = ("capsule", "online", "crbm")


class StopAfter(sl.Callback):
    """Callback that raises KeyboardInterrupt, as Ctrl-C does, at the end of pass ``number``."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_pass_end(self, record: dict[str, Any]) -> None:
        if record["pass"] == self.number:
            raise KeyboardInterrupt


def make_model(name: str) -> Any:
    from sklearn.base import clone

    return clone(MODELS[name][0])


@pytest.mark.parametrize("name", MODELS)
def test_verbose_shows_progress_and_without_it_nothing_is_shown(name, capsys):
    make_model(name).fit(*MODELS[name][1])
    assert capsys.readouterr() == ("", "")
    make_model(name).fit(*MODELS[name][1], verbose=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "pass 1" in err or "layer" in err


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Imitate a notebook: IPython returns a shell with a kernel, which a terminal does not have."""
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    return shell


@pytest.mark.parametrize("name", ["capsule", "search"])
@pytest.mark.usefixtures("notebook")
def test_a_notebook_shows_progress(name, capsys):
    make_model(name).fit(*MODELS[name][1])
    out, err = capsys.readouterr()
    assert out == ""
    assert "pass 4" in err


@pytest.mark.usefixtures("notebook")
def test_a_notebook_shows_nothing_if_verbose_is_false(capsys):
    make_model("capsule").fit(X, Y, verbose=False)
    assert capsys.readouterr() == ("", "")


def test_ipython_on_a_terminal_is_not_a_notebook(notebook, capsys):
    del notebook.kernel
    make_model("capsule").fit(X, Y)
    assert capsys.readouterr() == ("", "")


def test_a_partly_imported_ipython_is_not_a_notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    make_model("capsule").fit(X, Y)


@pytest.mark.parametrize("name", LEARNERS)
def test_ctrl_c_keeps_the_finished_passes(name):
    model = make_model(name)
    with pytest.raises(KeyboardInterrupt, match=r"stopped after pass 2; .*no model was kept.*run_dir=FOLDER"):
        model.fit(*MODELS[name][1], callbacks=StopAfter(2))
    whole = make_model(name).fit(*MODELS[name][1])
    assert [record["pass"] for record in model.history_] == [1, 2]
    reported = ("pass", "objective", "train_error")
    assert [[r[k] for k in reported] for r in model.history_] == [
        [r[k] for k in reported] for r in whole.history_[: len(model.history_)]
    ]
    with pytest.raises(NotFittedError):
        model.predict(MODELS[name][1][0])
    whole_passes = whole.n_iter_
    with pytest.raises(KeyboardInterrupt):
        whole.fit(*MODELS[name][1], callbacks=StopAfter(1))
    assert whole.n_iter_ == whole_passes  # The model of the fit before the interrupted one is kept.


@pytest.mark.parametrize("name", LEARNERS)
def test_ctrl_c_names_the_resume_command_which_gives_the_same_bits(name, tmp_path):
    rows = MODELS[name][1]
    with pytest.raises(KeyboardInterrupt, match=rf"run_dir='{tmp_path / 'run'}', resume=True"):
        make_model(name).fit(*rows, run_dir=tmp_path / "run", callbacks=StopAfter(2))
    model = make_model(name)
    with pytest.raises(KeyboardInterrupt):
        model.fit(*rows, run_dir=tmp_path / "run", resume=True, callbacks=StopAfter(3))
    # The history includes the passes before the interruption.
    assert [record["pass"] for record in model.history_] == [1, 2, 3]
    model.fit(*rows, run_dir=tmp_path / "run", resume=True)
    whole = make_model(name).fit(*rows)
    np.testing.assert_array_equal(model.W_, whole.W_)


def test_ctrl_c_before_the_first_pass_leaves_no_model():
    class Stop(sl.Callback):
        def on_stage(self, info: dict[str, Any]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="before its first pass ended; nothing was kept"):
        make_model("capsule").fit(X, Y, callbacks=Stop())


def test_ctrl_c_in_a_layer_of_a_bootstrap_network_names_the_layer(tmp_path):
    class Stop(sl.Callback):
        def on_stage(self, info: dict[str, Any]) -> None:
            if info.get("layer") == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"stopped in layer 2 of 2; continue with the same fit\("):
        make_model("mbn").fit(X, run_dir=tmp_path / "run", callbacks=Stop())


@pytest.mark.parametrize("name", ["capsule", "crbm", "mbn"])
def test_a_model_writes_a_report(name, tmp_path):
    model = make_model(name).fit(*MODELS[name][1])
    page = model.report(tmp_path / "new", data=MODELS[name][1] if name != "mbn" else X)
    assert page == str(tmp_path / "new" / "report" / "index.html")
    assert "made without rows" not in (tmp_path / "new" / "report" / "index.html").read_text()


def test_a_report_shows_the_stored_rows_of_the_fit(tmp_path):
    ds = sl.Dataset.from_arrays(X, Y).save(tmp_path / "rows.zarr")
    model = make_model("capsule").fit(ds[:60], validation=ds[60:])
    with open(model.report(tmp_path)) as page:
        text = page.read()
    assert "validation rows" in text
    assert "made without rows" not in text


def test_a_report_needs_a_fit(tmp_path):
    with pytest.raises(NotFittedError):
        make_model("capsule").report(tmp_path)
