"""Commands of `scalelatent` print text or JSON, set exit codes, and report errors without a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import scalelatent as sl
from scalelatent import Dataset, __version__
from scalelatent.cli import main
from scalelatent.cli.show import DEBUG_VARIABLE, format_bytes, format_value
from scalelatent.engine.callbacks import COMPILING
from scalelatent.errors import DataError
from tests.helpers import make_fresh_kernel


@pytest.fixture
def run_command(capsys, monkeypatch, tmp_path):
    """Return a function that runs `scalelatent` in this process and in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv(DEBUG_VARIABLE, "")

    def run(*arguments, code=0):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        assert (ended.value.code or 0) == code, output
        return SimpleNamespace(out=output.out, err=output.err, json=lambda: json.loads(output.out))

    return run


@pytest.fixture
def digits(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, (60, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", X=x, y=np.arange(60) % 3)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.arange(60) % 3)
    return tmp_path


def test_help_lists_the_verbs_and_version_prints_one_line(run_command):
    text = run_command("--help").out
    verbs = "data plan fit resume submit status logs attach cancel predict transform score report doctor"
    for verb in verbs.split():
        assert verb in text
    assert run_command("--version").out == f"scalelatent {__version__}\n"
    assert "--set" in run_command("fit", "--help").out


def test_imported_files_are_described_by_info(run_command, digits):
    reported = run_command("data", "import", "npz", "a.npz", "a.zarr", "--json").json()
    assert (reported["rows"], reported["features"], reported["classes"]) == (60, 16, [0, 1, 2])
    text = run_command("data", "info", "a.zarr").out
    assert "60" in text
    assert "4, 4" in text
    again = run_command("data", "import", "npz", "a.npz", "a.zarr", code=2)
    assert again.err.startswith("error: ")
    assert "a.zarr" in again.err
    assert again.out == ""
    run_command("data", "import", "npz", "a.npz", "a.zarr", "--overwrite")
    run_command("data", "import", "npy", "x.npy", "b.zarr", "--y", "y.npy")
    assert run_command("data", "info", "b.zarr", "--json").json()["labels"] is True


def test_images_and_named_datasets_are_imported(run_command, tmp_path):
    from PIL import Image

    for kind in "ab":
        (tmp_path / "in" / kind).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (6, 4), (i, 0, 0)).save(tmp_path / "in" / kind / f"{i}.png")
    options = ("data", "import", "images", "in", "i.zarr")
    reported = run_command(*options, "--size", "2x3", "--gray", "--json").json()
    assert (reported["rows"], reported["feature_shape"], reported["classes"]) == (6, [2, 3], ["a", "b"])
    for wrong in ("28x28x3", "0x4", "x"):
        assert f"--size {wrong}: give height x width" in run_command(*options, "--size", wrong, code=2).err
    assert "exclude each other" in run_command(*options, "--gray", "--rgb", code=2).err
    assert run_command(*options, "--no-labels", "--overwrite", "--json").json()["labels"] is False
    (tmp_path / "in" / "b" / "1.png").write_bytes(b"")
    assert "b/1.png cannot be read" in run_command(*options, "--overwrite", code=2).err
    output = run_command(*options, "--overwrite", "--skip-bad", "--json")
    assert output.err == "skipped 1 unreadable images and 0 of another size or kind; the first: b/1.png\n"
    assert output.json()["provenance"]["skipped"] == {
        "unreadable": 1,
        "unlike_first": 0,
        "first": ["b/1.png"],
    }
    assert run_command("data", "import", "digits", "d.zarr", "--json").json()["rows"] == 1797
    refused = run_command(
        "data", "import", "mnist", "m.zarr", "--mirror", "http://127.0.0.1:9", "--cache", "c", code=2
    )
    assert "scalelatent data import idx train-images-idx3-ubyte.gz" in refused.err


def test_hdf5_and_mat_files_are_imported(run_command, digits):
    h5py = pytest.importorskip("h5py")
    from scipy.io import savemat

    with h5py.File(digits / "a.h5", "w") as file:
        file["train/data"], file["train/target"] = np.eye(4), [2, 3, 2, 3]
    reported = run_command(
        "data", "import", "hdf5", "a.h5", "h.zarr", "--x", "train/data", "--y", "train/target", "--json"
    ).json()
    assert (reported["rows"], reported["classes"]) == (4, [2, 3])
    savemat(digits / "a.mat", {"X": np.ones((2, 3, 7)), "y": np.arange(7)})
    options = ("data", "import", "mat", "a.mat", "m.zarr")
    assert "--rows-last" in run_command(*options, code=2).err
    assert run_command(*options, "--rows-last", "--json").json()["feature_shape"] == [2, 3]
    assert "has no array 'q'" in run_command(*options, "--x", "q", code=2).err


def test_info_names_the_features(run_command):
    Dataset.from_arrays(np.eye(3), feature_names=["first", "second", "third"]).save("d.zarr")
    assert "feature names   first, second, third" in run_command("data", "info", "d.zarr").out


def test_long_lists_of_classes_are_shortened(run_command, tmp_path):
    pytest.importorskip("pyarrow")
    lines = ["a,b,price", *(f"{i},{i + 1},{i + 0.5}" for i in range(2000))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    with pytest.warns(UserWarning, match="labels are 2,000 different numbers, some with a fraction"):
        result = run_command("data", "import", "csv", "t.csv", "t.zarr", "--label", "price")
    assert "10.5, 11.5, … (2,000 in all)" in result.out
    assert max(map(len, result.out.splitlines())) < 300
    assert len(run_command("data", "info", "t.zarr", "--json").json()["classes"]) == 2000


def test_digits_are_made_and_resumed(run_command):
    reported = run_command(
        "data", "make", "digits", "d.zarr", "--rows", 300, "--base-rows", "0:100", "--json"
    ).json()
    assert reported["rows"] == 300
    assert reported["feature_shape"] == [8, 8]
    run_command("data", "make", "digits", "d.zarr", "--rows", 300, "--base-rows", "0:100", "--resume")
    for rows in ("5", "5:", "-9:-5"):
        assert (
            "--base-rows"
            in run_command("data", "make", "digits", "e.zarr", "--rows", 9, "--base-rows", rows, code=2).err
        )


def test_a_dataset_is_shuffled(run_command, digits):
    run_command("data", "import", "npz", "a.npz", "a.zarr")
    reported = run_command(
        "data", "shuffle", "a.zarr", "b.zarr", "--seed", 3, "--memory", "1kB", "--json"
    ).json()
    assert (reported["rows"], reported["provenance"]["seed"]) == (60, 3)
    assert (
        "512MiB"
        in run_command("data", "shuffle", "a.zarr", "c.zarr", "--seed", 3, "--memory", "much", code=2).err
    )


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (
            ("up", "--workers", "0", "--dashboard", "127.0.0.1:99999"),
            "dashboard '127.0.0.1:99999': '99999' is",
        ),
        (("up", "--workers", "0", "--dashboard", "127.0.0.1:http"), "'http' is not a port; give HOST:PORT"),
        (
            ("join", "127.0.0.1:99999"),
            "scheduler '127.0.0.1:99999' is not an address (its port 99999 is not between",
        ),
        (("join", "tcp://127.0.0.1:0"), "its port 0 is not between 1 and 65535"),
    ],
)
def test_invalid_ports_are_refused(run_command, arguments, reported):
    output = run_command("cluster", *arguments, code=2).err
    assert reported in output
    assert len(output.splitlines()) == 1


def test_host_names_that_resolve_to_loopback_are_refused(run_command, monkeypatch):
    def resolve(name, *_args):
        return [(2, 1, 6, "", ({"debian": "127.0.1.1", "head": "10.0.0.1"}.get(name, name), 0))]

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    advice = "give the address of this machine in the network"
    output = run_command("cluster", "up", "--workers", "0", "--host", "debian", code=2).err
    assert output.startswith("error: host debian is a loopback address (127.0.1.1)")
    assert f"{advice}, or 127.0.0.1 for a cluster on one machine" in output
    for host in ("debian", "127.0.0.1", "::1"):
        output = run_command("cluster", "join", "tcp://head:8786", "--host", host, code=2).err
        assert f"host {host} is a loopback address" in output
        assert advice in output
        assert len(output.splitlines()) == 1


def test_rows_are_appended(run_command, digits):
    run_command("data", "import", "npz", "a.npz", "a.zarr")
    run_command("data", "convert", "a.zarr", "copy.zarr")
    assert run_command("data", "append", "a.zarr", "copy.zarr", "--json").json()["rows"] == 120
    for itself in ("a.zarr", "./a.zarr/", str(digits / "a.zarr")):
        reported = run_command("data", "append", "a.zarr", itself, code=2).err
        assert "appended to itself" in reported
        assert "data convert a.zarr COPY" in reported
    assert run_command("data", "info", "a.zarr", "--json").json()["rows"] == 120
    run_command("data", "import", "npy", "x.npy", "x.zarr")
    assert "labels None instead of numbers" in run_command("data", "append", "a.zarr", "x.zarr", code=2).err


def test_a_dataset_is_converted(run_command, digits):
    run_command("data", "import", "npz", "a.npz", "a.zarr")
    reported = run_command(
        "data", "convert", "a.zarr", "b.zarr", "--rows", "-20:", "--dtype", "float32", "--codec", "zstd",
        "--chunk-rows", 5, "--shard-rows", "auto", "--json",
    ).json()  # fmt: skip
    assert (reported["rows"], reported["dtype"], reported["rows_per_piece"]) == (20, "float32", 5)
    for wrong, text in (
        (("--rows", "50:70"), "are outside of the rows 0:60"),
        (("--rows", "many"), "--rows"),
        (("--chunk-rows", "some"), "--chunk-rows some"),
        (("--dtype", "tiny"), "unknown type"),
        (("--codec", "zip"), "compressor is 'zip'"),
        (("--dtype", "int8"), "--lossy"),
        (("--x", "rows"), "leave out --x"),
    ):
        assert text in run_command("data", "convert", "a.zarr", "c.zarr", *wrong, code=2).err
    assert (
        "--resize 24x32" in run_command("data", "convert", "a.zarr", "c.zarr", "--resize", "9*9", code=2).err
    )
    reported = run_command(
        "data", "convert", "a.zarr", "e.zarr", "--crop", "1", "--resize", "1x2", "--json"
    ).json()
    assert reported["feature_shape"] == [1, 2]
    run_command("data", "convert", "a.zarr", "c.zarr", "--dtype", "int8", "--lossy")
    assert run_command("data", "convert", "a.zarr", "d.zarr", "--sparse", "--json").json()["features"] == 16


def test_errors_are_one_line(run_command):
    for command in (
        ("fit", "no.toml"),
        ("plan", "no.toml"),
        ("resume", "no"),
        ("status", "no"),
        ("score", "no", "no.zarr"),
        ("predict", "no", "no.zarr", "--out", "p.zarr"),
        ("report", "no"),
        ("model", "info", "no"),
        ("data", "info", "no.zarr"),
    ):
        output = run_command(*command, code=2)
        assert output.out == ""
        assert output.err.startswith("error: ")
        assert len(output.err.splitlines()) == 1
        assert "Traceback" not in output.err


def test_debug_shows_the_traceback(run_command, monkeypatch):
    from scalelatent.errors import JobError

    with pytest.raises(JobError):
        main(["fit", "no.toml", "--debug"])


def test_status_reports_a_folder_without_runs(run_command):
    assert run_command("status", "--json").json() == []
    assert "no run folder below" in run_command("status").out


# Command lines that compute, each with a function of the package that the command calls first. The test
# replaces this function by one that compiles two kernels and then ends the command with an error.
COMPUTING = {
    "plan job.toml": "jobs.planning.plan_job",
    "fit job.toml": "jobs.planning.plan_job",
    "demo --rows 1000": "jobs.demo.prepare",
    "predict run a.zarr --out b.zarr": "jobs.runs.load_run",
    "transform run a.zarr --out b.zarr": "jobs.runs.load_run",
    "score run a.zarr": "jobs.datasets.open_rows",
    "report run": "jobs.runs.write_report",
    "report run a.zarr": "jobs.datasets.open_rows",
    "data make digits a.zarr --rows 10": "data.make_digits",
    "data make documents a.zarr --rows 10 --base b.zarr": "data.make_documents",
    "data make bars a.zarr --rows 10": "data.make_images",
    "data make noisy-digits a.zarr --rows 10": "data.make_corrupted",
    "data make cluttered-digits a.zarr --rows 10": "data.make_corrupted",
}


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("line", COMPUTING)
def test_computing_verbs_announce_compilation_once(run_command, monkeypatch, line, as_json):
    def compute(*args, **kwargs):
        assert make_fresh_kernel()(1) == make_fresh_kernel()(1) == 2
        raise DataError("enough")

    Path("job.toml").write_text('[job]\nout = "r"\n[data]\ntrain = "a.zarr"\n[model]\nkind = "capsule"\n')
    monkeypatch.setattr(f"scalelatent.{COMPUTING[line]}", compute)
    reported = run_command(*line.split(), *(["--json"] if as_json else []), code=2)
    assert COMPILING not in reported.out
    assert reported.err.splitlines().count(COMPILING) == 1
    assert "enough" in reported.err.splitlines()[-1]


CORRUPTIONS = {
    "bordered-digits --width 2": {"width": 2},
    "patched-digits --patch 3x4 --grey": {"patch": [3, 4], "threshold": None},
    "gridded-digits --pitch 5 --threshold 99": {"pitch": 5, "threshold": 99},
    "cluttered-digits --lines 2 --base-rows 5:30": {"lines": 2, "base_rows": [5, 30]},
    "deleted-digits --share 0.2 --lines 1 --rows 10 --seed 4": {"share": 0.2, "lines": 1, "seed": 4},
}


@pytest.mark.parametrize("line", CORRUPTIONS)
def test_options_of_corrupted_digits_are_in_their_provenance(run_command, line):
    kind, *options = line.split()
    reported = run_command("data", "make", kind, "x.zarr", *options, "--clean", "c.zarr", "--json").json()
    assert CORRUPTIONS[line].items() <= reported["provenance"].items()
    assert (
        reported["rows"]
        == reported["target"]["rows"]
        == {"cluttered": 25, "deleted": 10}.get(line.split("-")[0], 1797)
    )
    assert reported["target"]["url"].endswith("c.zarr")


def test_doctor_prints_its_findings(run_command):
    reported = run_command("doctor", "--json").json()
    assert reported["ok"] is True
    assert {"check", "status", "found", "fix"} == set(reported["findings"][0])
    assert "blas threads" in run_command("doctor").out
    (open("file", "w")).close()
    failed = run_command("doctor", "file/run", "--json", code=1).json()
    assert failed["ok"] is False


def test_usage_errors_are_one_line_and_exit_with_two(run_command):
    assert run_command("fit", code=2).err == (
        "error: scalelatent fit: missing argument 'JOB'; see: scalelatent fit --help\n"
    )
    assert run_command("nonsense", code=2).err.count("\n") == 1
    reported = json.loads(run_command("cluster", "up", "--workers", "two", "--json", code=2).err)
    assert reported["kind"] == "UsageError"
    assert "--workers" in reported["error"]
    assert reported["hint"] == "see: scalelatent cluster up --help"


def test_a_shell_completes_verbs(run_command, monkeypatch):
    assert "_SCALELATENT_COMPLETE=complete_bash" in run_command("--show-completion", "bash").out
    monkeypatch.setenv("_SCALELATENT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "scalelatent re")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert set(run_command().out.split()) == {"resume", "report"}


def test_errors_are_json_if_the_output_is_json(run_command):
    output = run_command("fit", "no.toml", "--json", code=2)
    assert output.out == ""
    reported = json.loads(output.err)
    assert (reported["kind"], reported["exit_code"], reported["traceback"]) == ("JobError", 2, None)
    assert "no.toml does not exist" in reported["error"]


@pytest.fixture
def raise_unexpected_error(monkeypatch, tmp_path):
    """Make ``open_dataset`` raise a KeyError, which no command expects."""
    from scalelatent import data

    def fail(url):
        raise KeyError("a line\nand another")

    monkeypatch.setattr(data, "open_dataset", fail)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_unexpected_error_is_one_line_with_the_path_of_its_traceback(
    run_command, raise_unexpected_error, tmp_path
):
    output = run_command("data", "info", "x.zarr", code=70).err
    assert output.count("\n") == 1
    assert output.startswith("error: unexpected error in scalelatent/cli/data.py:")
    assert "KeyError: 'a line" in output
    (file,) = (tmp_path / "cache" / "scalelatent").iterdir()
    assert str(file) in output
    kept = file.read_text()
    assert "Traceback (most recent call last)" in kept
    assert "data.py" in kept
    reported = json.loads(run_command("data", "info", "x.zarr", "--json", code=70).err)
    assert (reported["kind"], reported["exit_code"]) == ("KeyError", 70)
    assert "Traceback" in Path(reported["traceback"]).read_text()
    with pytest.raises(KeyError):
        main(["data", "info", "x.zarr", "--debug"])


def test_traceback_overwrites_no_file(tmp_path, monkeypatch):
    from scalelatent.cli import exits

    class Clock:
        @staticmethod
        def now(zone):
            return datetime(2026, 1, 2, tzinfo=zone)

    monkeypatch.setattr(exits, "datetime", Clock)
    monkeypatch.setattr(exits, "_traceback_folders", lambda: [tmp_path, tmp_path / "next"])
    private = tmp_path / "private"
    private.write_text("mine")
    (tmp_path / f"traceback-20260102T000000000000-{os.getpid()}.txt").symlink_to(private)
    kept = exits._write_traceback(ValueError("no"))
    assert Path(kept).parent == tmp_path / "next"
    assert private.read_text() == "mine"


def test_a_closed_pipe_is_no_error(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "scalelatent", "status", "--json"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_ctrl_c_is_reported_as_json(run_command, monkeypatch):
    from scalelatent import data

    def stop(url):
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "open_dataset", stop)
    assert run_command("data", "info", "x.zarr", code=130).err == "stopped\n"
    assert json.loads(run_command("data", "info", "x.zarr", "--json", code=130).err)["error"] == "stopped"


def test_values_are_formatted_for_people():
    assert format_value((12, "tasks")) == "12  (tasks)"
    assert format_value(True) == "yes"
    assert format_value([1, 2000]) == "1, 2,000"
    assert format_bytes(5 * 2**40) == "5.0 TiB"
    assert format_bytes(12) == "12 bytes"


def test_entry_point_runs():
    command = [sys.executable, "-m", "scalelatent", "status", "/no/such/folder"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "NO_COLOR": "1"}
    )
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "error: /no/such/folder does not exist; give the folder that [job] out of a job file, or run_dir in "
        "Python, names"
    )
    assert done.stdout == ""


def test_output_over_the_input_dataset_is_refused(tmp_path):
    from scalelatent.errors import DataError
    from scalelatent.jobs.runs import write_rows

    url = str(tmp_path / "a.zarr")
    data = Dataset.from_arrays(np.eye(4), np.arange(4) % 2).save(url)
    model = sl.CapsuleRegression(capsule_dim=1, max_iter=1).fit(data)
    with pytest.raises(DataError, match="cannot replace itself"):
        write_rows(model, "predict", data, url, overwrite=True)
    with pytest.raises(DataError, match="cannot replace itself"):
        model.transform(data, out=url, overwrite=True)
    assert data.read_x(0, 4).tolist() == np.eye(4).tolist()
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "text").write_text("precious")
    with pytest.raises(
        DataError, match="thesis exists and is not a scalelatent dataset, so it is not replaced"
    ):
        write_rows(model, "predict", data, str(other), overwrite=True)


def test_an_unfinished_output_is_replaced_on_request(tmp_path):
    model = sl.CapsuleRegression(capsule_dim=1, max_iter=1).fit(np.eye(4), np.arange(4) % 2)
    with pytest.raises(DataError, match="nan"):
        model.predict(Dataset.from_arrays(np.full((4, 4), np.nan)), out=tmp_path / "out.zarr")
    with pytest.raises(
        DataError, match=r"exists \(unfinished\); choose another output, or replace it with [^;]*$"
    ):
        model.predict(Dataset.from_arrays(np.eye(4)), out=tmp_path / "out.zarr")
    model.predict(Dataset.from_arrays(np.eye(4)), out=tmp_path / "out.zarr", overwrite=True)
    assert len(sl.open_dataset(tmp_path / "out.zarr")) == 4


def test_paths_in_place_of_rows_are_named():
    model = sl.CapsuleRegression(capsule_dim=1, max_iter=1)
    advice = r"X is the string 'rows.zarr', .* pass the rows: scalelatent.open_dataset\('rows.zarr'\)"
    with pytest.raises(DataError, match=advice):
        model.fit("rows.zarr")
    with pytest.raises(DataError, match=advice.replace("X", "x")):
        Dataset.from_arrays(Path("rows.zarr"))
    with pytest.raises(DataError, match=advice):
        model.fit(np.eye(4), np.arange(4) % 2).predict("rows.zarr")


def test_transform_writes_the_codes_of_a_layer(run_command, tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
    Dataset.from_arrays(x).save("x.zarr")
    network = sl.MultilayerBootstrapNetwork(decay=0.5, n_clusterings=5, keep_codes=True, random_state=0).fit(
        x
    )
    z = network.transform(x, layer=1)
    network.save("m.zarr")
    run_command("transform", "m.zarr", "x.zarr", "--out", "z.zarr", "--layer", "1")
    np.testing.assert_array_equal(sl.open_dataset("z.zarr").read_x(0, 60), z)
    again = ("transform", "m.zarr", "x.zarr", "--out", "z.zarr", "--overwrite")
    assert "take codes(X, layer=2) (--codes)" in run_command(*again, "--layer", "2", code=2).err
    # The refused command has not replaced the output of the first one.
    np.testing.assert_array_equal(sl.open_dataset("z.zarr").read_x(0, 60), z)
    run_command(*again, "--layer", "2", "--codes")
    np.testing.assert_array_equal(sl.open_dataset("z.zarr").read_x(0, 60), network.codes(layer=2))
    sl.CapsuleRegression(capsule_dim=2, max_iter=1).fit(x, np.arange(60) % 2).save("c.zarr")
    refused = ("transform", "c.zarr", "x.zarr", "--out", "h.zarr")
    assert "a CapsuleRegression has no layers" in run_command(*refused, "--layer", "1", code=2).err
    assert "a CapsuleRegression has no codes" in run_command(*refused, "--codes", code=2).err


def test_transform_writes_a_layer_from_the_codes_of_a_run_folder(run_command, tmp_path, monkeypatch):
    """The codes (cluster indices) of lower layers are stored only if the job set ``keep_codes``."""
    monkeypatch.setattr("scalelatent.jobs.runner._report", lambda *_: None)
    x = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
    Dataset.from_arrays(x).save("x.zarr")
    for name, kept in (("run", "true"), ("plain", "false")):
        model = f'[model]\nkind = "mbn"\nn_clusterings = 5\ndecay = 0.5\nkeep_codes = {kept}\n'
        job = f'[job]\nseed = 0\nout = "{name}"\n[data]\ntrain = "x.zarr"\n{model}'
        (tmp_path / "job.toml").write_text(job)
        run_command("fit", "job.toml")
    run_command("transform", "run", "x.zarr", "--out", "z.zarr", "--layer", "1")
    model = sl.MultilayerBootstrapNetwork(decay=0.5, n_clusterings=5, keep_codes=True, random_state=0).fit(x)
    np.testing.assert_array_equal(sl.open_dataset("z.zarr").read_x(0, 60), model.transform(x, layer=1))
    loaded = sl.load_model("run")
    np.testing.assert_array_equal(loaded.codes(layer=2), model.codes(layer=2))
    loaded.transform(None, layer=2)
    loaded.save("m.zarr")
    again = sl.load_model("m.zarr")
    np.testing.assert_array_equal(again.transform(x, layer=2), model.transform(x, layer=2))
    reported = run_command("transform", "plain", "x.zarr", "--out", "y.zarr", "--layer", "1", code=2).err
    assert "(--codes), or fit with keep_codes=True (keep_codes = true in a job's [model])" in reported


def test_a_warning_is_one_line_without_a_position_in_the_code(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,0.5\n2,1.5\n3,0.5\n")
    done = subprocess.run(
        [sys.executable, "-m", "scalelatent", "data", "import", "csv", "t.csv", "t.zarr", "--label", "b"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "arning" in line]
    assert len(lines) == 1
    assert lines[0].startswith("warning: ")
    assert "2 different numbers" in lines[0]
