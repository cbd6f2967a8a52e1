"""Locations in object stores (`s3://`, `gs://`, `az://`, …) and in memory (`memory://`), through fsspec."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from scalelatent.errors import StoreError

from .access import Access
from .location import FROM_ENVIRONMENT, Location

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from zarr.abc.store import Store

RETRY_SECONDS = 60.0
"""Maximum total time of the attempts of one request."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two attempts: the first pause, and the maximum to which the pauses grow."""
READS_AT_ONCE = 8
"""Number of parallel reads of one reader."""
_CONNECT_SECONDS, _READ_SECONDS = 10, 60
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
_EXTRAS |= dict.fromkeys(("az", "abfs", "abfss"), "azure")
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
# Errors are listed by name, because the libraries that raise them may not be installed.
_TRANSIENT_NAMES = frozenset(
    {
        "ClientConnectionError",
        "ClientOSError",
        "ClientPayloadError",
        "ConnectTimeoutError",
        "ConnectionClosedError",
        "EndpointConnectionError",
        "HTTPClientError",
        "IncompleteRead",
        "IncompleteReadError",
        "ProxyConnectionError",
        "ReadTimeoutError",
        "ResponseParserError",
        "ResponseStreamingError",
        "ServerDisconnectedError",
        "ServiceRequestError",
        "ServiceRequestTimeoutError",
        "ServiceResponseError",
        "ServiceResponseTimeoutError",
    }
)
_NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"})
_T = TypeVar("_T")

# obstore is not used here, although version 0.12 read 2.3 times faster than s3fs from a server on loopback.
# If a process that has used obstore forks, the child, such as a torch worker, waits forever without error.
# obstore does not retry an interrupted listing, does not support AWS_PROFILE, and sends requests to Google
# that the tests' emulator does not answer. Addresses of memory://, other protocols and pyarrow need fsspec
# anyway, so obstore would be a second implementation.


class _OutOfRange(StoreError):
    """Error of a read beyond the end of an object."""


class ObjectLocation(Location):
    """A prefix in an object store, or in this process's memory (`memory://name`, for tests and examples)."""

    def __init__(self, url: str, access: Access | None = None) -> None:
        protocol, _, rest = url.partition("://")
        self.protocol = protocol.lower()
        rest = rest.strip("/")
        if not rest:
            example = "memory://trial" if self.protocol == "memory" else f"{self.protocol}://bucket/name"
            raise StoreError(f"{url!r} needs a name: write for example {example!r}")
        super().__init__(f"{self.protocol}://{rest}")
        self.access = access
        self._root = str(self._fs._strip_protocol(self.url)).rstrip("/")
        self.shared = self.protocol != "memory"
        self.reads_at_once = READS_AT_ONCE if self.shared else 1

    def __reduce__(self) -> tuple[object, ...]:
        return ObjectLocation, (self.url, self.access)

    @property
    def _fs(self) -> AbstractFileSystem:
        """File system of this process, which may be a fork of the process that created this location."""
        return _filesystem(self.protocol, os.getpid(), self.access)

    @property
    def filesystem(self) -> tuple[AbstractFileSystem, str]:
        """Fsspec file system and the path in it, for libraries that read files by themselves."""
        return self._fs, self._root

    def at(self, key: str) -> ObjectLocation:
        return ObjectLocation(f"{self.url}/{key}", self.access)

    def zarr_store(self, *, read_only: bool) -> Store:
        from .zarrstore import LocationStore

        return LocationStore(self, read_only=read_only)

    def read(self, key: str) -> bytes | None:
        try:
            return bytes(self._request(key, lambda path: self._fs.cat_file(path)))
        except FileNotFoundError:
            return None

    def read_range(self, key: str, start: int, length: int) -> bytes:
        stop = None if start < 0 else start + length

        def get(path: str) -> bytes:
            begin = start
            if start < 0 and _EXTRAS.get(self.protocol) == "azure":  # Azure has no ranges from the end.
                begin = max(0, int(self._fs.info(path)["size"]) + start)
            return bytes(self._fs.cat_file(path, start=begin, end=stop))

        got = self._request(key, get)
        # Stores without ranges from the end send the whole object.
        return got[:length] if start >= 0 else got[start:][:length]

    def read_ranges(self, ranges: Sequence[tuple[str, int, int] | str]) -> list[bytes]:
        if len(ranges) < 2 or self.reads_at_once == 1:
            return super().read_ranges(ranges)
        return list(_get_shared_threads(os.getpid()).map(self._read_item, ranges))

    def write(self, key: str, data: bytes, *, durable: bool = False) -> None:
        self._request(key, lambda path: self._fs.pipe_file(path, data))

    def create(self, key: str, data: bytes) -> bool:
        try:
            self._request(key, lambda path: self._fs.pipe_file(path, data, mode="create"))
        except FileExistsError:  # A first request may have created the object, although its answer was lost.
            return self.read(key) == data
        return True

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._request(key, self._fs.rm_file)

    def delete_tree(self, prefix: str) -> None:

        def remove(path: str) -> None:
            if found := self._fs.find(path):
                self._fs.rm(found)

        with contextlib.suppress(FileNotFoundError):
            self._request(prefix, remove)

    def keys(self, prefix: str) -> list[str]:
        try:
            paths = self._request(prefix, lambda path: self._fs.ls(path, detail=False))
        except FileNotFoundError:
            return []
        own = self._path(prefix).strip("/")
        return sorted({p.rstrip("/").rsplit("/", 1)[-1] for p in paths if p.strip("/") != own})

    def all_keys(self) -> list[str]:
        """Return the keys of all objects below this location, at any depth."""
        paths = self._request("", lambda path: self._fs.find(path))
        head = len(self._root.strip("/")) + 1
        return [p.strip("/")[head:] for p in paths]

    def has(self, key: str) -> bool:
        try:
            # Reading a byte is one request; a query of metadata adds a listing if the object is missing.
            self._request(key, lambda path: self._fs.cat_file(path, start=0, end=1))
        except FileNotFoundError:
            return False
        except _OutOfRange:
            return True
        return True

    def stamp(self, key: str) -> tuple[str, int] | None:
        try:
            info = self._request(key, lambda path: self._fs.info(path))
        except FileNotFoundError:
            return None
        mark = info.get("ETag") or info.get("etag") or info.get("created") or info.get("mtime")
        return str(mark), info.get("size")

    def age(self, key: str) -> float | None:
        """Return the seconds since an object was written, by this machine's clock; None without an object."""
        try:
            put = self._request(key, lambda path: self._fs.modified(path))
        except FileNotFoundError:
            return None
        return time.time() - float(put.timestamp())

    @contextlib.contextmanager
    def replacing(self) -> Iterator[Location]:
        self.clear()
        try:
            yield self
        except BaseException:
            with contextlib.suppress(OSError):
                self.clear(whole=False)
            raise

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _request(self, key: str, request: Callable[[str], _T]) -> _T:
        """Send a request; retry transient errors with growing pauses, and translate all other errors."""
        path, begin, tries = self._path(key), time.monotonic(), 0
        while True:
            tries += 1
            try:
                return request(path)
            except Exception as error:  # Each library has its own errors.
                spent = time.monotonic() - begin
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(tries - 1, 9))
                pause *= random.uniform(0.5, 1.0)  # Many workers must not retry at the same moment.
                if _is_transient(error) and spent + pause < RETRY_SECONDS:
                    time.sleep(pause)
                    continue
                clear = _translate_error(error, self.name_of(key) if key else self.url, self, tries, spent)
                if clear is error:
                    raise
                raise clear from error


@functools.lru_cache(maxsize=32)
def _filesystem(protocol: str, pid: int, access: Access | None = None) -> AbstractFileSystem:
    """Return the file system of a protocol in this process; connections and threads do not survive a fork."""
    import fsspec

    extra = _EXTRAS.get(protocol)
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        install = f"pip install 'scalelatent[{extra}]'" if extra else f"install what it needs ({error})"
        raise StoreError(
            f"addresses with '{protocol}://' need a package that is not installed "
            f"({error.name or error}): {install}"
        ) from error
    except ValueError as error:
        raise StoreError(
            f"addresses with '{protocol}://' are not known here; use a local path, s3://, gs://, az://, "
            "memory:// or another protocol of fsspec"
        ) from error
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if extra == "s3":
        options["config_kwargs"] = _s3_settings()
        options["max_concurrency"] = 1  # Higher values make each read first request the object's size.
    elif extra == "gs":
        from aiohttp import ClientTimeout

        limits = ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS)
        options["session_kwargs"] = {"timeout": limits}
    if access is not None:
        options = {**access.options, **options}
        for name, own in options.items():
            if isinstance(own, dict) and isinstance(given := access.options.get(name), Mapping):
                options[name] = {**own, **given}
    try:
        inspect.signature(kind.__init__).bind(None, **options)
    except TypeError as error:  # The protocol needs a host or a user, such as ftp, sftp, webhdfs.
        raise StoreError(
            f"addresses with '{protocol}://' are not known here ({error}); copy the data to a disk, or "
            "to s3://, gs:// or az://"
        ) from error
    try:
        made = kind(**options)
    except ValueError as error:
        text = _text_of(error, access)
        raise StoreError(f"'{protocol}://' cannot be opened ({text}); {FROM_ENVIRONMENT}") from error
    if extra == "s3":
        made.retries = 1
    return made


def _s3_settings() -> dict[str, Any]:
    # The S3 client tries each request once, because `_request` retries requests and limits the time.
    settings: dict[str, Any] = {
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "connect_timeout": _CONNECT_SECONDS,
        "read_timeout": _READ_SECONDS,
        "max_pool_connections": 4 * READS_AT_ONCE,
    }
    try:
        from botocore.config import Config

        # Chunks and records have their own checksums. A second checksum costs a tenth of a read, and some S3
        # stores do not support it. botocore before 1.36 has neither the checksum nor this setting.
        own = dict.fromkeys(("request_checksum_calculation", "response_checksum_validation"), "when_required")
        Config(**own)
        settings |= own
    except (ImportError, TypeError):
        pass
    return settings


@functools.lru_cache(maxsize=4)
def _get_shared_threads(pid: int) -> ThreadPoolExecutor:
    """Return the thread pool that all locations of this process share."""
    return ThreadPoolExecutor(2 * READS_AT_ONCE, thread_name_prefix="scalelatent-objects")


def _cause_chain(error: BaseException) -> Iterator[BaseException]:
    visited: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in visited:
        visited.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _find_response(error: BaseException) -> tuple[int | None, str]:
    """Return (HTTP status, error code) of the store's response; (None, "") without a response."""
    for e in _cause_chain(error):
        if type(e).__name__ in _TRANSIENT_NAMES:
            break  # An interrupted answer has no status; earlier errors in the chain have other statuses.
        response = getattr(e, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status, str(response.get("Error", {}).get("Code", ""))
        for name in ("status", "code", "status_code"):
            if isinstance(value := getattr(e, name, None), int):
                return value, ""
    return None, ""


def _is_transient(error: BaseException) -> bool:
    status, code = _find_response(error)
    if status is not None:
        return status in _TRANSIENT_STATUS or code in ("RequestTimeout", "SlowDown", "InternalError")
    if isinstance(error, (FileNotFoundError, FileExistsError, PermissionError)):
        return False
    return any(
        isinstance(e, (TimeoutError, ConnectionError)) or type(e).__name__ in _TRANSIENT_NAMES
        for e in _cause_chain(error)
    )


def _translate_error(
    error: Exception, name: str, location: ObjectLocation, tries: int, spent: float
) -> Exception:
    """Return the error with a clear message; `FileNotFoundError` and `FileExistsError` keep their type."""
    status, code = _find_response(error)
    names = {type(e).__name__ for e in _cause_chain(error)}
    root = location.url.split("/")[2]
    text = _text_of(error, location.access)
    if isinstance(error, StoreError):
        return error
    if code in ("NoSuchBucket", "InvalidBucketName") or "bucket does not exist" in str(error):
        return StoreError(
            f"{name}: there is no bucket {root!r} at this store; create it, or correct the address (or the "
            "endpoint, AWS_ENDPOINT_URL)"
        )
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(name)
    if isinstance(error, FileExistsError):
        return error
    if status == 416 or code == "InvalidRange":
        return _OutOfRange(f"{name} is shorter than it should be")
    if names & _NO_CREDENTIALS:
        return StoreError(
            f"{name}: no credentials were found for {location.protocol}://{root}; {FROM_ENVIRONMENT}. For a "
            "public bucket: FSSPEC_S3_ANON=true"
        )
    if _is_transient(error):
        text = f"{status} {code}".strip() if status else text
        return StoreError(
            f"{name}: the store did not answer correctly in {tries} attempts over {spent:.0f} s (the "
            f"last: {text}); check that the store is up and reachable from here, then resume"
        )
    if isinstance(error, PermissionError) or status in (401, 403):
        return StoreError(
            f"{name}: permission denied ({code or status or text}): the credentials in use "
            f"do not allow this request in {root!r}; let them read, write, list and delete "
            "there, or use others"
        )
    return StoreError(f"{name}: {type(error).__name__}: {text}")


def _text_of(error: BaseException, access: Access | None) -> str:
    """Return the text of an error without secrets from the environment and the storage options."""
    return scrub(error) if access is None else access.hide(scrub(error))


def scrub(error: BaseException | str) -> str:
    """Return a text without secrets of the environment and without user names in addresses."""
    text = re.sub(r"//[^/@\s]+@", "//…@", str(error))
    secret = re.compile(r"SECRET|TOKEN|ACCESS_KEY|ACCOUNT_KEY|CONNECTION_STRING|PASSWORD")
    for name, value in os.environ.items():
        if secret.search(name) and len(value) >= 8:
            text = text.replace(value, "…")
    return text


def forget_connections() -> None:
    """Discard all connections, so that the next request reads environment and credentials again."""
    _filesystem.cache_clear()
