"""Measure passes from S3 on loopback, compared with local disk.

    python benchmarks/s3_pass.py [--parts pass,troubled]

pass      An E-step of ten capsules of 8 dimensions over stored float32 rows without a cache, on one thread.
          The rows come from the disk, or from an S3 server (moto, in a separate process on 127.0.0.1). The
          fastest round counts.
troubled  A fit of ten passes without a cache, from the server alone and through a proxy in another process.
          The proxy delays each request by --latency milliseconds. It answers one request of a hundred with
          503, resets the connection in the middle of one answer of a hundred, and sends one answer of a
          hundred in pieces over half a second. The results are seconds, rates, the proxy's failures, and
          whether the weights have the same bits.

The results of the part pass are:

    compute_s      seconds with the rows in memory
    disk_s, s3_s   seconds of reading and computing; ratio = s3_s / disk_s
    read_*_s       seconds of reading alone
    server_s       seconds in which eight plain HTTP connections read the same objects without decoding
    delay          seconds with a server that delays every request, as a network does: with several
                   simultaneous reads, and with one read after the other
"""

from __future__ import annotations

import http.client
import multiprocessing
import os
import random
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from common import fastest, parser, stored_rows, write_part
from streamed_pass import make_learner

import scalelatent as sl
from scalelatent.engine.cache import PieceCache
from scalelatent.engine.inprocess import InProcessExecutor
from scalelatent.engine.passes import make_stage
from scalelatent.engine.reading import Meter, Reader, StopEvent, iter_blocks
from scalelatent.engine.threads import single_threaded
from scalelatent.storage.objects import forget_connections

BUCKET = "benchmark"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "benchmark",
    "AWS_SECRET_ACCESS_KEY": "benchmark",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def point_environment_to(port: int) -> None:
    """Set the environment variables so that S3 clients use the server or the proxy at this port."""
    os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")


def make_bucket() -> None:
    """Create the bucket at the server that the environment names."""
    import s3fs

    s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True).mkdir(BUCKET)


def serve(pipe: Any, delay: Any) -> None:
    """Run the S3 server until the process is killed; send its port through the pipe.

    Every request first waits `delay` seconds.
    """
    import logging

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    WSGIRequestHandler.protocol_version = "HTTP/1.1"  # HTTP/1.1 keeps connections open, as real stores do.
    inner = DomainDispatcherApplication(create_backend_app)

    def application(environ: Any, start: Any) -> Any:
        time.sleep(delay.value)
        return inner(environ, start)

    server = make_server("127.0.0.1", 0, application, threaded=True)
    pipe.send(server.server_port)
    server.serve_forever()


@contextmanager
def start_s3_server() -> Iterator[tuple[int, Any]]:
    """Start an S3 server in a separate process; yield its port, and a shared number: its delay in seconds."""
    context = multiprocessing.get_context("spawn")
    delay = context.Value("d", 0.0)
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, delay), daemon=True)
    process.start()
    try:
        if not here.poll(60):
            raise SystemExit("the S3 server did not start within 60 s")
        yield here.recv(), delay
    finally:
        process.terminate()
        process.join(10)


# Failures of the proxy: error 503, a broken connection, a slow answer; and the share of requests with each.
FAILURES = ("503", "reset", "slow")
FAILURE_SHARE = 0.01
# A slow answer arrives in this number of pieces over this number of seconds.
PIECES, SLOW_SECONDS = 10, 0.5


def serve_with_failures(pipe: Any, server: int, latency: float, counts: Any, seed: int) -> None:
    """Run the proxy of a server until the process is killed; send its port through the pipe.

    ``counts`` is a shared array with the number of each failure so far.
    """
    chance, lock = random.Random(seed), threading.Lock()

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_request(self) -> None:
            with lock:
                draw = chance.random() / FAILURE_SHARE
                what = FAILURES[int(draw)] if draw < len(FAILURES) else None
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            time.sleep(latency)
            if what == "503":
                self.count(what)
                self.answer(503, [], b"")
                return
            onward = http.client.HTTPConnection("127.0.0.1", server, timeout=60)
            onward.request(self.command, self.path, body, dict(self.headers.items()))
            got = onward.getresponse()
            reported, headers = (
                got.read(),
                [(k, v) for k, v in got.getheaders() if k.lower() not in PROXY_HEADERS],
            )
            onward.close()
            self.answer(got.status, headers, reported, what if len(reported) > 1 else None)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request

        def count(self, what: str) -> None:
            with lock:
                counts[FAILURES.index(what)] += 1

        def answer(
            self, status: int, headers: list[tuple[str, str]], body: bytes, what: str | None = None
        ) -> None:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if what is not None:
                self.count(what)
            if what == "reset":
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True
            elif what == "slow":
                size = -(-len(body) // PIECES)
                for a in range(0, len(body), size):
                    time.sleep(SLOW_SECONDS / PIECES)
                    self.wfile.write(body[a : a + size])
            elif self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Suppress the log."""

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    pipe.send(proxy.server_port)
    proxy.serve_forever()


# The proxy sets these headers itself, and does not forward those of the server.
PROXY_HEADERS = ("content-length", "connection", "transfer-encoding")


@contextmanager
def start_failing_proxy(server: int, latency: float, seed: int) -> Iterator[tuple[int, Any]]:
    """Start a proxy of a server in a separate process; yield its port and the counts of its failures."""
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", len(FAILURES))
    here, there = context.Pipe()
    process = context.Process(
        target=serve_with_failures, args=(there, server, latency, counts, seed), daemon=True
    )
    process.start()
    try:
        if not here.poll(60):
            raise SystemExit("the proxy did not start within 60 s")
        yield here.recv(), counts
    finally:
        process.terminate()
        process.join(10)


def make_pass(dataset: sl.Dataset, seed: int, cache: PieceCache) -> Callable[[], Any]:
    """Return a function that runs an E-step over a dataset, always with the same parameters."""
    em, state = make_learner(8, seed)
    stage = make_stage("capsule_estep", em, {"train": dataset}, "cpu", dataset.classes)
    executor = InProcessExecutor(1, cache=cache)
    return lambda: executor.step(stage, 0, state, lambda done, total: None)


def read_all(dataset: sl.Dataset) -> Callable[[], Any]:
    """Return a function that reads all rows without computing."""
    blocks = [(a, min(a + 4096, len(dataset))) for a in range(0, len(dataset), 4096)]

    def read() -> None:
        for _ in iter_blocks(Reader(dataset, None, Meter()), blocks, StopEvent()):
            pass

    return read


def make_plain_gets(port: int, dataset: sl.Dataset) -> Callable[[], Any]:
    """Return a function that reads all objects of the dataset's rows with eight plain HTTP connections."""
    source = dataset._columns.x
    keys = [source.shard_key(i) for i in range(-(-len(dataset) // source.shard_rows))]  # type: ignore[attr-defined]
    paths = [f"/{BUCKET}/noise.zarr/{key}" for key in keys]

    def fetch(mine: list[str]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for path in mine:
            connection.request("GET", path)
            connection.getresponse().read()
        connection.close()

    def run() -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(fetch, [paths[i::8] for i in range(8)]))

    return run


def measure(folder: Path, rows: int, seed: int, rounds: int, milliseconds: float) -> dict[str, Any]:
    """Return the results of a pass that reads rows from the S3 server and from disk.

    ``milliseconds`` is the delay of every request in the results "delay".
    """
    disk = stored_rows(folder, rows, seed)
    with start_s3_server() as (port, delay):
        point_environment_to(port)
        forget_connections()
        make_bucket()
        begin = time.perf_counter()
        remote = disk.save(f"s3://{BUCKET}/noise.zarr")
        saved = time.perf_counter() - begin
        one = sl.open_dataset(remote.url)
        one._columns.x.reads_at_once = 1  # type: ignore[attr-defined]
        with single_threaded():
            warm = make_pass(disk, seed, PieceCache(2**34))
            warm()
            found = fastest(
                {
                    "compute_s": warm,
                    "disk_s": make_pass(disk, seed, PieceCache(0)),
                    "s3_s": make_pass(remote, seed, PieceCache(0)),
                    "s3_one_at_a_time_s": make_pass(one, seed, PieceCache(0)),
                    "read_disk_s": read_all(disk),
                    "read_s3_s": read_all(remote),
                    "server_s": make_plain_gets(port, remote),
                },
                rounds,
            )
            delay.value = milliseconds / 1e3
            delayed = fastest(
                {
                    "s3_s": make_pass(remote, seed, PieceCache(0)),
                    "s3_one_at_a_time_s": make_pass(one, seed, PieceCache(0)),
                },
                max(2, rounds // 2),
            )
            delay.value = 0.0
    megabytes = rows * disk.n_features * 4 / 1e6
    out: dict[str, Any] = {"rows": rows, "features": disk.n_features, "megabytes": megabytes}
    out |= {"write_s3_s": saved, **found, "ratio": found["s3_s"] / found["disk_s"]}
    out |= {"read_s3_mb_per_s": megabytes / found["read_s3_s"]}
    out |= {"server_mb_per_s": megabytes / found["server_s"]}
    delayed |= {"milliseconds": milliseconds, "ratio": delayed["s3_s"] / found["disk_s"]}
    delayed |= {"gain_of_several": delayed["s3_one_at_a_time_s"] / delayed["s3_s"]}
    out = {k: round(v, 4) for k, v in out.items()}
    out["delay"] = {k: round(v, 4) for k, v in delayed.items()}
    return out


def measure_failures(folder: Path, a: Any) -> dict[str, Any]:
    """Compare a fit from the server alone with one through the proxy: seconds, rates, failures and bits."""
    disk = stored_rows(folder, a.rows, a.seed)
    found: dict[str, Any] = {}
    weights = []
    with (
        start_s3_server() as (port, _),
        start_failing_proxy(port, a.latency / 1e3, a.seed) as (through, counts),
    ):
        for name, at in (("alone", port), ("troubled", through)):
            point_environment_to(at)
            forget_connections()
            if name == "alone":
                make_bucket()
                disk.save(f"s3://{BUCKET}/noise.zarr")
            rows = sl.open_dataset(f"s3://{BUCKET}/noise.zarr")
            given = {"architecture": "multiclass", "capsule_dim": 8, "max_iter": 10}
            model = sl.CapsuleRegression(**given, random_state=a.seed)
            begin = time.perf_counter()
            model.fit(rows, run_dir=f"s3://{BUCKET}/run-{name}", engine={"cache": 0})
            found[f"{name}_s"] = round(time.perf_counter() - begin, 2)
            read = sum(record["bytes_read"] for record in model.history_)
            found[f"{name}_mb_per_s"] = round(read / 1e6 / found[f"{name}_s"], 1)
            weights.append(model.W_)
        found |= {f"times {what}": int(n) for what, n in zip(FAILURES, counts, strict=True)}
    found |= {"rows": a.rows, "latency_ms": a.latency, "share_of_each_trouble": FAILURE_SHARE}
    return found | {"same_bits": bool(np.array_equal(*weights))}


def main() -> None:
    args = parser(__doc__, "s3_pass")
    args.add_argument("--parts", default="pass,troubled")
    args.add_argument("--rows", type=int, default=400_000)
    args.add_argument("--rounds", type=int, default=5)
    args.add_argument(
        "--delay", type=float, default=30.0, help="milliseconds by which a distant store delays a request"
    )
    args.add_argument(
        "--latency", type=float, default=50.0, help="milliseconds by which the proxy delays a request"
    )
    a = args.parse_args()
    for part in a.parts.split(","):
        with tempfile.TemporaryDirectory() as folder:
            if part == "pass":
                result = measure(Path(folder), a.rows, a.seed, a.rounds, a.delay)
            else:
                result = measure_failures(Path(folder), a)
        print(part, result, flush=True)
        write_part(a.out, part, a.seed, result)


if __name__ == "__main__":
    main()
