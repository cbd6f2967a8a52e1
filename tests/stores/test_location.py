"""Files are read, written, listed and deleted alike on a disk, in memory and in an object store."""

from __future__ import annotations

import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from scalelatent.errors import ScalelatentError, StoreError
from scalelatent.storage.disk import is_local, locate
from scalelatent.storage.linelog import LineLog
from scalelatent.storage.objects import scrub
from scalelatent.storage.write_checks import contains, scratch

from .conftest import S3, SECRET


def test_files_are_written_read_listed_and_deleted(any_url: str) -> None:
    store = locate(any_url)
    assert store.is_empty()
    store.make()
    assert store.is_empty()
    assert store.read("a/b") is None
    assert not store.has("a/b")
    assert store.stamp("a/b") is None
    assert store.keys("a") == []
    store.delete("a/b")
    store.delete_tree("a")
    store.write("a/b", b"0123456789")
    first = store.stamp("a/b")
    assert first is not None
    assert store.read("a/b") == b"0123456789"
    store.write("a/b", b"9876543210", durable=True)
    assert store.stamp("a/b") != first
    store.write("a/empty", b"")
    assert store.read("a/empty") == b""
    assert store.has("a/empty")
    store.write("a/b2/c", b"x")
    assert store.keys("a") == ["b", "b2", "empty"]
    assert store.keys("") == ["a"]
    assert not store.is_empty()
    assert not store.has("a")
    assert not store.has("a/b2")
    store.delete("a/b")
    assert store.keys("a") == ["b2", "empty"]
    assert store.at("a").read("b2/c") == b"x"
    store.delete_tree("a/b2")
    assert store.keys("a") == ["empty"]
    store.clear()
    assert store.is_empty()


def test_ranges_of_files_are_read(any_url: str) -> None:
    store = locate(any_url)
    store.write("f", bytes(range(100)))
    assert store.read_range("f", 10, 5) == bytes(range(10, 15))
    assert store.read_range("f", -4, 4) == bytes(range(96, 100))
    assert store.read_range("f", 90, 50) == bytes(range(90, 100))
    assert store.read_range("f", -200, 200) == bytes(range(100))
    wanted = [("f", i, 3) for i in range(0, 60, 3)]
    assert b"".join(store.read_ranges(wanted)) == bytes(range(60))
    assert store.read_ranges(["f", ("f", 1, 1)]) == [bytes(range(100)), b"\1"]
    with pytest.raises(FileNotFoundError):
        store.read_range("g", 0, 1)
    with pytest.raises(FileNotFoundError):
        store.read_ranges(["f", "g"])


def test_a_replacement_is_complete_or_absent(any_url: str) -> None:
    store = locate(any_url)
    with store.replacing() as target:
        target.write("x", b"1")
        target.write("zarr.json", b"{}")
    assert store.keys("") == ["x", "zarr.json"]
    with store.replacing() as target:
        target.write("y", b"2")
        target.write("zarr.json", b"{}")
    assert store.keys("") == ["y", "zarr.json"]
    with pytest.raises(RuntimeError), store.replacing() as target:
        target.write("z", b"3")
        raise RuntimeError
    assert not store.has("z")


@pytest.mark.parametrize("bytes_a_segment", [64 << 10, 30])
def test_lines_are_appended_to_logs(
    any_url: str, bytes_a_segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scalelatent.storage.linelog.SEGMENT_BYTES", bytes_a_segment)
    store = locate(any_url)
    store.make()
    log = LineLog(store, "log.jsonl")
    assert log.lines() == []
    assert not log.exists()
    lines = [f"line {i}".encode() for i in range(12)]
    for line in lines[:7]:
        log.append(line)
    log = LineLog(store, "log.jsonl")  # A new object continues the log, as another process would.
    for line in lines[7:]:
        log.append(line)
    assert LineLog(store, "log.jsonl").lines() == lines
    assert log.exists()
    log.rewrite(lines[:5])
    assert LineLog(store, "log.jsonl").lines() == lines[:5]
    log.append(b"other")
    assert LineLog(store, "log.jsonl").lines() == [*lines[:5], b"other"]
    log.rewrite([])
    assert LineLog(store, "log.jsonl").lines() == []


def test_threads_that_log_at_once_lose_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads may write to one log at once, because each thread reports its compilations."""
    store = locate("memory://threads-of-a-log")
    write = store.write

    def slowly(key: str, data: bytes) -> None:
        time.sleep(0.01)
        write(key, data)

    monkeypatch.setattr(store, "write", slowly)
    log = LineLog(store, "log.jsonl")
    log.append(b"first")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(log.append, (b"%d" % i for i in range(12))))
    assert sorted(LineLog(store, "log.jsonl").lines()) == sorted([b"first", *(b"%d" % i for i in range(12))])


def test_the_creator_of_a_file_is_known_if_the_answer_was_lost(s3: S3) -> None:
    store = locate(s3.url + "/x")
    with s3.proxy.losing_first("PUT", "/lock"):
        assert store.create("lock", b"mine")  # type: ignore[attr-defined]
    with s3.proxy.losing_first("PUT", "/lock"):
        assert not store.create("lock", b"another's")  # type: ignore[attr-defined]
    assert store.read("lock") == b"mine"


def test_one_of_many_threads_creates_a_file(s3: S3) -> None:
    store = locate(s3.url + "/x")
    won: list[int] = []
    start = threading.Barrier(6)

    def race(i: int) -> None:
        start.wait()
        if store.create("lock", str(i).encode()):  # type: ignore[attr-defined]
            won.append(i)

    threads = [threading.Thread(target=race, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(won) == 1
    assert store.read("lock") == str(won[0]).encode()


def test_several_reads_run_at_once(s3: S3) -> None:
    store = locate(s3.at("x"))
    store.write("f", bytes(1000))
    s3.proxy.gate = threading.Barrier(4)  # Each answer waits until four requests have arrived.
    try:
        assert len(store.read_ranges([("f", i, 1) for i in range(8)])) == 8
    finally:
        s3.proxy.gate = None
    assert s3.proxy.most_in_flight >= 4


def test_answers_of_503_are_retried_and_reported_if_they_last(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = locate(s3.at("x"))
    with s3.proxy.turning_away(0.4):
        for i in range(10):
            store.write(f"k{i}", bytes([i]))
        assert [store.read(f"k{i}") for i in range(10)] == [bytes([i]) for i in range(10)]
        assert len(store.keys("")) == 10
    assert s3.proxy.turned_away > 3
    monkeypatch.setattr("scalelatent.storage.objects.RETRY_SECONDS", 0.3)
    with s3.proxy.turning_away(1.0), pytest.raises(StoreError) as error:
        store.read("k0")
    assert "x/k0: the store did not answer correctly in" in str(error.value)
    assert "503" in str(error.value)


def test_answers_that_are_always_incomplete_are_reported(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    store = locate(s3.at("place"))
    store.write("a", b"0123456789")
    monkeypatch.setattr("scalelatent.storage.objects.RETRY_SECONDS", 1.0)
    with (
        s3.proxy.breaking_off(1.0),
        pytest.raises(
            StoreError, match=r"place/a: the store did not answer .* in \d+ attempts.* \(the last: "
        ),
    ):
        store.read("a")
    assert s3.proxy.broken_off > 2
    assert store.read("a") == b"0123456789"


def test_an_unreachable_server_is_reported(
    s3: S3, close_connections: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalelatent.storage import objects

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(objects, "RETRY_SECONDS", 0.2)
    objects.forget_connections()
    with pytest.raises(StoreError, match="check that the store is up and reachable"):
        locate(s3.at("x")).read("k")


def test_missing_credentials_are_reported(
    s3: S3, close_connections: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalelatent.storage import objects

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    objects.forget_connections()
    with pytest.raises(StoreError, match=r"no credentials were found for s3://b-.*AWS_ACCESS_KEY_ID.*never"):
        locate(s3.at("x")).read("k")


def test_a_forked_process_has_connections_of_its_own(s3: S3) -> None:
    store = locate(s3.at("x"))
    for key in "abc":
        store.write(key, key.encode())
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=lambda: there.send([store.read("a"), *store.read_ranges(["b", "c"])]))
    child.start()
    try:
        assert here.poll(60)
        assert here.recv() == [b"a", b"b", b"c"]
    finally:
        child.kill()
        child.join(10)


def test_a_missing_bucket_is_reported(s3: S3) -> None:
    store = locate("s3://no-such-bucket/x")
    message = "there is no bucket 'no-such-bucket'"
    for ask in (lambda: store.read("k"), lambda: store.has("k"), lambda: store.write("k", b""),
                lambda: store.keys(""), store.is_empty):  # fmt: skip
        with pytest.raises(StoreError, match=message):
            ask()


def test_denied_permissions_are_reported(s3: S3) -> None:
    store = locate(s3.at("x"))
    with s3.proxy.denying(lambda method, path: True):
        for ask in (lambda: store.read("k"), lambda: store.write("k", b"")):
            with pytest.raises(StoreError, match=r"x/k: permission denied \(.*use others") as error:
                ask()
            assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://AKIAKEY:my-secret@bucket/x", "'s3://…@bucket/x' contains credentials"),
        ("s3://AKIAKEY@bucket/x", "contains credentials"),
        ("s3://bucket/x?key=a&secret=my-secret", r"'s3://bucket/x\?…' contains credentials"),
        ("gs://bucket/x?token=my-secret", "contains credentials"),
        ("abfs://container:my-secret@account/x", "contains credentials"),
        ("s3://bucket/x?version=3", "has a query"),
        ("s3://", "needs a name"),
        ("memory://", "needs a name"),
        ("nosuch://bucket/x", "'nosuch://' are not known here"),
    ],
)
def test_invalid_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(StoreError, match=message) as error:
        locate(url)
    assert "my-secret" not in str(error.value)
    assert isinstance(error.value, ScalelatentError)


def test_the_error_names_a_missing_package(close_connections: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def absent(protocol: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", absent)
    from scalelatent.storage import objects

    objects.forget_connections()
    with pytest.raises(StoreError, match=r"pip install 'scalelatent\[s3\]'"):
        locate("s3://bucket/x")
    with pytest.raises(StoreError, match=r"pip install 'scalelatent\[gs\]'"):
        locate("gs://bucket/x")


def test_requests_to_google_have_a_timeout(monkeypatch: pytest.MonkeyPatch, close_connections: None) -> None:
    """The library for Google's storage retries by itself, so each request needs a time limit to end."""
    import fsspec

    made: list[dict[str, Any]] = []

    class Google(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
        protocol = "gs"

        def __init__(self, **options: Any) -> None:
            made.append(options)
            super().__init__()

    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda protocol: Google)
    locate("gs://bucket/a")
    (options,) = made
    limits = options["session_kwargs"]["timeout"]
    assert 0 < limits.sock_connect <= 60
    assert 0 < limits.sock_read <= 60


def test_paths_and_file_urls_are_local() -> None:
    assert [is_local(url) for url in ("runs/a", "file:///a", "s3://bucket/a")] == [True, True, False]
    assert locate("memory://trial").at("model.zarr").url == "memory://trial/model.zarr"


def test_a_location_contains_locations_below_it() -> None:
    whole, part = locate("a.zarr"), locate("./a.zarr/part")
    assert contains(whole, part)
    assert not contains(part, whole)


def test_scratch_is_cleared() -> None:
    with scratch(locate("memory://scratch")) as store:
        store.write("a", b"1")
    assert locate("memory://scratch").is_empty()


def test_messages_hide_users_and_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "12345678")
    assert scrub("cannot reach https://me:word@host/bucket with 12345678") == (
        "cannot reach https://…@host/bucket with …"
    )
