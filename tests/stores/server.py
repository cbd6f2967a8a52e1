"""The S3 server of the package moto on loopback, behind a proxy that can refuse or break requests."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code>'
    b"<Message>Please reduce your request rate.</Message></Error>"
)
DENIED = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>AccessDenied</Code><Message>no</Message></Error>'
)


class ServerProxy:
    """WSGI application that counts requests, and refuses or breaks some of them.

    Attributes
    ----------
    share : float
        Share of requests (0 to 1) that get the answer 503, chosen by a seeded generator.
    cut : float
        Share of answers (0 to 1) that end in their middle.
    denied : callable or None
        Function of (method, path) that returns True if the request gets the answer 403.
    lost : callable or None
        Function of (method, path) that returns True if the request is executed but gets the answer 503.
    requests : list of (method, path, byte range) of all requests that ``share`` did not refuse
    """

    def __init__(self, application: Any, seed: int = 0) -> None:
        self._application = application
        self._random, self._lock = random.Random(seed), threading.Lock()
        self.share = self.cut = 0.0
        self.denied: Callable[[str, str], bool] | None = None
        self.lost: Callable[[str, str], bool] | None = None
        self.requests: list[tuple[str, str, str | None]] = []
        self.turned_away = self.broken_off = 0
        self.in_flight = self.most_in_flight = 0
        self.gate: threading.Barrier | None = None

    def __call__(self, environ: dict[str, Any], start: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        with self._lock:
            away = self._random.random() < self.share
            cut = self.cut > 0 and self._random.random() < self.cut
            self.turned_away += away
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            if not away:
                self.requests.append((method, path, environ.get("HTTP_RANGE")))
        try:
            if away:
                return _answer(environ, start, "503 Slow Down", SLOW_DOWN)
            if self.denied is not None and self.denied(method, path):
                return _answer(environ, start, "403 Forbidden", DENIED)
            if self.gate is not None and "HTTP_RANGE" in environ:
                self.gate.wait(timeout=20)
            if self.lost is not None and self.lost(method, path):
                b"".join(self._application(environ, lambda *answer: lambda data: None))
                environ["CONTENT_LENGTH"] = "0"  # The application has read the body.
                return _answer(environ, start, "503 Slow Down", SLOW_DOWN)
            body = b"".join(self._application(environ, start))
            if cut and len(body) > 1:
                self.broken_off += 1
                body = body[: len(body) // 2]
            return [body]
        finally:
            with self._lock:
                self.in_flight -= 1

    @contextmanager
    def turning_away(self, share: float) -> Iterator[None]:
        """Answer 503 to this share of the requests (0 to 1), chosen at random."""
        self.share = share
        try:
            yield
        finally:
            self.share = 0.0

    @contextmanager
    def breaking_off(self, share: float) -> Iterator[None]:
        """Send only the first half of an answer, for this share of the answers (0 to 1)."""
        self.cut = share
        try:
            yield
        finally:
            self.cut = 0.0

    @contextmanager
    def denying(self, which: Callable[[str, str], bool]) -> Iterator[None]:
        """Answer 403 to requests for which ``which`` (method, path) returns True."""
        self.denied = which
        try:
            yield
        finally:
            self.denied = None

    @contextmanager
    def losing_first(self, method: str, end: str) -> Iterator[None]:
        """Execute the first request of a method for a path with this ending, but answer 503 to it."""
        left = [True]
        self.lost = lambda asked, path: asked == method and path.endswith(end) and bool(left and left.pop())
        try:
            yield
        finally:
            self.lost = None
        assert not left


def _answer(environ: dict[str, Any], start: Any, status: str, body: bytes) -> list[bytes]:
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    body = b"" if environ["REQUEST_METHOD"] == "HEAD" else body
    start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]


@contextmanager
def serve_bucket(seed: int = 0) -> Iterator[tuple[str, ServerProxy]]:
    """Run an S3 server on a free port of loopback; yield its URL and its proxy."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    proxy = ServerProxy(DomainDispatcherApplication(create_backend_app), seed)
    server = make_server("127.0.0.1", 0, proxy, threaded=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", proxy
    finally:
        server.shutdown()
        thread.join(timeout=10)
        server.server_close()
