"""The command `scalelatent doctor` runs all checks of an installation, and names each problem."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from scalelatent.deploy import checks, probes, warm
from scalelatent.storage.folder_probe import find_folder_problem


def group_by_check(findings):
    return {finding.check: finding for finding in findings}


def find_single_finding(check, folder="."):
    (finding,) = checks.examine(folder, only=(check,))
    return finding


def test_a_healthy_machine_passes_all_checks(tmp_path):
    findings = group_by_check(checks.examine(tmp_path))
    expected = {
        "cpu",
        "memory",
        "numba",
        "gpu",
        "folder",
    }
    assert expected <= set(findings)
    assert [f for f in findings.values() if f.status == "fail"] == []
    assert all(f.fix for f in findings.values() if f.status != "ok")


def test_an_error_in_a_check_is_a_finding(monkeypatch):
    def broken(folder):
        raise RuntimeError("numba is half installed")

    broken_check = checks.Check("numba", "here", broken)
    monkeypatch.setattr(checks, "CHECKS", (*checks.CHECKS[:2], broken_check))
    finding = group_by_check(checks.examine())["numba"]
    assert finding.status == "fail"
    assert "half installed" in finding.found


@pytest.mark.slow
def test_cold_kernels_are_counted_and_not_compiled(tmp_path):
    command = [sys.executable, "-m", "scalelatent", "doctor", str(tmp_path), "--json"]
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=170, check=True)
    (found,) = [found for found in json.loads(done.stdout)["findings"] if found["check"] == "kernels"]
    cold, count = re.match(r"(\d+) of (\d+) kernels are not compiled yet", found["found"]).groups()
    assert int(cold) == int(count) >= 20
    assert (found["status"], found["fix"]) == ("warn", "scalelatent warm")
    assert not list((tmp_path / "cache").rglob("*.nbc"))


@pytest.mark.parametrize(("cold", "status"), [(0, "ok"), (3, "warn")])
def test_warm_kernels_pass_and_cold_ones_name_the_command(monkeypatch, cold, status):
    monkeypatch.setattr(
        warm, "_find_uncompiled", lambda kinds: (40, [("mbn", n, "scan") for n in range(cold)])
    )
    finding = find_single_finding("kernels")
    assert finding.status == status
    assert ("3 of 40" in finding.found) == (finding.fix == "scalelatent warm") == bool(cold)


def test_two_installations_of_cupy_are_reported(monkeypatch):
    names = ("cupy-cuda12x", "CuPy-CUDA13x", "cupydo")
    wheels = [SimpleNamespace(metadata={"Name": name}, version="13") for name in names]
    monkeypatch.setattr(probes.metadata, "distributions", lambda: wheels)
    finding = find_single_finding("gpu")
    assert finding.status == "fail"
    assert "CuPy is installed twice: cupy-cuda12x, cupy-cuda13x" in finding.found
    assert finding.fix == "pip uninstall cupy-cuda13x"


def test_a_folder_that_cannot_be_written_is_reported(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    finding = find_single_finding("folder", blocked / "run")
    assert finding.status == "fail"
    assert str(blocked) in finding.found


def test_a_folder_that_does_not_exist_yet_is_accepted(tmp_path):
    finding = find_single_finding("folder", tmp_path / "a" / "b")
    assert finding.status in ("ok", "warn")
    assert not (tmp_path / "a").exists()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity here")
def test_a_process_bound_to_some_cpus_is_reported(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    finding = find_single_finding("cpu")
    assert finding.status == "warn"
    assert "1 of 4" in finding.found


def test_an_invalid_folder_is_not_reported_as_a_broken_installation(tmp_path):
    found = find_single_finding("folder", tmp_path / ("a" * 300))
    assert (found.status, found.fix) == ("fail", "choose another folder, or ask for write access")
    assert "File name too long" in found.found


def test_a_missing_mark_means_another_folder(tmp_path):
    (tmp_path / "mark").write_text("seen")
    assert find_folder_problem(str(tmp_path), "mark") == find_folder_problem(str(tmp_path / "new")) == ""
    assert "another folder of the same name" in find_folder_problem(str(tmp_path), "left-by-the-laptop")
    assert find_folder_problem(str(tmp_path / "new"), "mark").startswith("it does not exist on host")
    assert os.listdir(tmp_path) == ["mark"]


def test_the_peak_memory_of_this_process_is_reported():
    assert probes.peak_bytes() > 2**20
