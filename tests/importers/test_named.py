"""Named datasets are downloaded from a server on loopback; missing, wrong and truncated files are refused."""

from __future__ import annotations

import gzip
import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from scalelatent.data import import_named
from scalelatent.errors import DataError
from scalelatent.importers.named import PUBLIC_FILES, RemoteFile

RNG = np.random.Generator(np.random.Philox(8))


def make_packed_idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(head + array.tobytes(), mtime=0)


ROWS = {
    "train": RNG.integers(0, 256, (60, 4, 4)).astype("u1"),
    "test": RNG.integers(0, 256, (9, 4, 4)).astype("u1"),
}
LABELS = {part: (np.arange(len(rows)) % 10).astype("u1") for part, rows in ROWS.items()}
FILES = {
    "train-images-idx3-ubyte.gz": make_packed_idx(ROWS["train"]),
    "train-labels-idx1-ubyte.gz": make_packed_idx(LABELS["train"]),
    "t10k-images-idx3-ubyte.gz": make_packed_idx(ROWS["test"]),
    "t10k-labels-idx1-ubyte.gz": make_packed_idx(LABELS["test"]),
}


class FileServer:
    """Web server of `files`, which sends only the first half of each file if `torn` is True."""

    def __init__(self) -> None:
        self.files = dict(FILES)
        self.asked: list[str] = []
        self.torn = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                content = outer.files.get(self.path.rpartition("/")[2])
                if content is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if outer.torn else content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/set"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)


def make_origin(*urls: str) -> dict[str, tuple[RemoteFile, ...]]:
    """Return the files of MNIST by part, each with an address below every given URL."""

    def pair(head: str) -> tuple[RemoteFile, ...]:
        names = (f"{head}-images-idx3-ubyte.gz", f"{head}-labels-idx1-ubyte.gz")
        return tuple(remote_files(name, FILES[name], *urls) for name in names)

    return {"train": pair("train"), "test": pair("t10k")}


def remote_files(name: str, content: bytes, *urls: str) -> RemoteFile:
    checksum = "sha256:" + hashlib.sha256(content).hexdigest()
    return RemoteFile(name, checksum, tuple(f"{url}/{name}" for url in urls))


@pytest.fixture
def server(monkeypatch: Any) -> Iterator[FileServer]:
    """Start a server of small files, whose addresses replace those of MNIST; return the server."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    server = FileServer()
    monkeypatch.setitem(PUBLIC_FILES, "mnist", make_origin(server.url))
    yield server
    server.close()


def unused_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("part", ["train", "test"])
def test_every_part_has_its_rows_and_labels(server: FileServer, tmp_path: Path, part: str) -> None:
    ds = import_named("mnist", tmp_path / "ds", part=part, cache=tmp_path / "cache", shard_rows=7)
    rows = ROWS[part]
    np.testing.assert_array_equal(ds.read_x(0, len(ds)), rows.reshape(len(rows), -1))
    assert ds.read_y(0, len(ds)).tolist() == LABELS[part].tolist()
    assert ds.feature_shape == (4, 4)
    provenance = ds.attrs["provenance"]
    assert (provenance["importer"], provenance["part"]) == ("mnist", part)
    assert len(provenance["source"]) == len(server.asked) == 2


def test_files_are_downloaded_once(server: FileServer, tmp_path: Path) -> None:
    for _ in range(2):
        import_named("mnist", tmp_path / "ds", cache=tmp_path / "cache", overwrite=True)
        assert len(server.asked) == 2
    names = ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]
    assert sorted(p.name for p in (tmp_path / "cache").rglob("*.gz")) == names


def test_the_cache_folder_comes_from_the_environment(
    server: FileServer, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("SCALELATENT_CACHE", str(tmp_path / "mine"))
    import_named("mnist", tmp_path / "ds", part="test")
    assert (tmp_path / "mine" / "mnist" / "t10k-images-idx3-ubyte.gz").exists()


def test_a_damaged_file_in_the_cache_is_downloaded_again(server: FileServer, tmp_path: Path) -> None:
    import_named("mnist", tmp_path / "ds", cache=tmp_path / "cache")
    images = tmp_path / "cache" / "mnist" / "train-images-idx3-ubyte.gz"
    images.write_bytes(images.read_bytes()[:-5])
    import_named("mnist", tmp_path / "ds", cache=tmp_path / "cache", overwrite=True)
    assert images.read_bytes() == FILES[images.name]
    assert len(server.asked) == 3


def test_the_next_mirror_is_tried_after_a_failure(
    server: FileServer, tmp_path: Path, monkeypatch: Any
) -> None:
    lying = FileServer()
    try:
        lying.files = {name: b"other" + content for name, content in FILES.items()}
        monkeypatch.setitem(PUBLIC_FILES, "mnist", make_origin(unused_url(), lying.url, server.url))
        ds = import_named("mnist", tmp_path / "ds", part="test", cache=tmp_path / "cache")
    finally:
        lying.close()
    assert len(ds) == 9
    assert len(lying.asked) == len(server.asked) == 2


def assert_refused(tmp_path: Path, *message: str, **how: Any) -> None:
    with pytest.raises(DataError) as error:
        import_named("mnist", tmp_path / "out", cache=tmp_path / "cache", **how)
    for part in message:
        assert part in str(error.value)
    assert not (tmp_path / "out").exists()
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []


def test_wrong_truncated_and_missing_files_are_refused(server: FileServer, tmp_path: Path) -> None:
    name = "train-images-idx3-ubyte.gz"
    server.files[name] = FILES["t10k-images-idx3-ubyte.gz"]
    assert_refused(tmp_path, f"{server.url}/{name} (the checksum is wrong: it is another file)")
    server.files[name] = FILES[name]
    server.torn = True
    assert_refused(tmp_path, f"{server.url}/{name} (the connection was interrupted)")
    server.files = {}
    assert_refused(tmp_path, f"{server.url}/{name} (the server answered 404 Not Found)")


def test_without_a_network_the_message_explains_the_manual_import(server: FileServer, tmp_path: Path) -> None:
    mirror = unused_url()
    assert_refused(
        tmp_path,
        f"mnist: train-images-idx3-ubyte.gz is not in the cache and could not be downloaded: {mirror}/train-",
        "(no connection)",
        f"put it into {tmp_path / 'cache' / 'mnist'}, then try again, or scalelatent data import idx",
        "data import idx train-images-idx3-ubyte.gz train-labels-idx1-ubyte.gz OUT.zarr",
        "--mirror URL",
        mirror=mirror,
    )
    assert server.asked == []
    (tmp_path / "cache" / "mnist").mkdir(parents=True, exist_ok=True)
    for name, content in FILES.items():
        (tmp_path / "cache" / "mnist" / name).write_bytes(content)
    ds = import_named("mnist", tmp_path / "ds", cache=tmp_path / "cache", mirror=mirror)
    assert len(ds) == 60


def test_unknown_names_and_parts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="no dataset 'mnst' is known by name; the known ones are digits, mnist"
    ):
        import_named("mnst", tmp_path / "out")
    with pytest.raises(DataError, match="mnist has no part 'val'; the parts are train, test"):
        import_named("mnist", tmp_path / "out", part="val")
    assert list(tmp_path.iterdir()) == []


def test_digits_are_those_of_scikit_learn(tmp_path: Path) -> None:
    ds = import_named("digits", tmp_path / "ds")
    x, y = load_digits(return_X_y=True)
    np.testing.assert_array_equal(ds.read_x(0, 1797), np.rint(x * (255 / 16)))
    np.testing.assert_array_equal(ds.read_y(0, 1797), y)


@pytest.mark.realdata
def test_the_checksums_of_mnist_are_those_of_the_real_files(mnist_dir: Path) -> None:
    for file in PUBLIC_FILES["mnist"]["train"] + PUBLIC_FILES["mnist"]["test"]:
        assert file.checksum == remote_files(file.title, (mnist_dir / file.title).read_bytes()).checksum
