"""Files on S3-compatible storage: read from wherever a connection broke off, visible only when they are whole.

An object is written to a local temporary file first and then uploaded in parts; the storage shows it when the last part
is confirmed. An upload that fails is aborted, so nothing of it stays. Address, region and keys of the storage come from
the environment variables and files that every AWS client reads (`AWS_ENDPOINT_URL_S3`, `AWS_ACCESS_KEY_ID`, ...).
"""

from __future__ import annotations

import fnmatch
import functools
import io
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

SCHEME = "s3://"
PART_BYTES = 8 << 20
_MOST_PARTS = 9_000  # S3 refuses more than 10,000
_READ_BYTES = 1 << 20
_CONNECT_S, _READ_S, _ATTEMPTS = 5, 30, 5
_REOPENED = 6  # times in a row that a read is begun again without a byte
_REFUSALS = {
    "NoSuchBucket": "there is no such bucket",
    "AccessDenied": "access denied",
    "403": "access denied",
    "InvalidAccessKeyId": "the storage does not know this access key",
    "SignatureDoesNotMatch": "the storage refuses the secret key",
    "InvalidBucketName": "this is no name of a bucket",
    "PermanentRedirect": "the bucket is in another region",
}
_MISSING = {"404", "NoSuchKey", "NotFound"}


class StorageError(Exception):
    """The storage cannot be used; the text is one line. `is_refusal`: trying again would not help."""

    def __init__(self, text: str, *, is_refusal: bool = False) -> None:
        super().__init__(text)
        self.is_refusal = is_refusal


class ObjectStatus(NamedTuple):
    """The size of an object, when it was written, and its entity tag, which another content does not have."""

    size_bytes: int
    modified_s: float
    etag: str


@functools.cache
def _client() -> Any:
    """Return the client of this process, which its threads share."""
    try:
        import botocore.config
        import botocore.session
    except ImportError:
        reason = f"{SCHEME} needs a package that is not installed: pip install 'sglang-ext[s3]'"
        raise StorageError(reason, is_refusal=True) from None
    config = botocore.config.Config(
        connect_timeout=_CONNECT_S,
        read_timeout=_READ_S,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        max_pool_connections=32,
        # Storage other than Amazon's need not know the checksums that are sent by default.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    session = botocore.session.get_session()
    region = session.get_config_variable("region") or "us-east-1"
    return session.create_client("s3", region_name=region, config=config)


def _code(error: Exception) -> str:
    """Return the storage's code of an error, empty where it gave none."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


@contextmanager
def _translated(place: object) -> Iterator[None]:
    """Raise what the client raises as a StorageError that names the place; FileNotFoundError for a missing object."""
    try:
        yield
    except Exception as error:
        kind = type(error)
        if not kind.__module__.startswith(("botocore", "urllib3")):
            raise
        code = _code(error)
        if code in _MISSING:
            raise FileNotFoundError(2, "no such object", str(place)) from None
        if code in _REFUSALS:
            raise StorageError(f"{place}: {_REFUSALS[code]}", is_refusal=True) from None
        is_refusal = kind.__name__ in {"NoCredentialsError", "PartialCredentialsError", "ParamValidationError"}
        raise StorageError(f"{place}: {' '.join(str(error).split())}", is_refusal=is_refusal) from None


@dataclass(frozen=True, slots=True)
class ObjectPath:
    """The place of an object, or of a folder where `key` is empty or ends in a slash; shaped like a `Path`."""

    bucket: str
    key: str

    @classmethod
    def parse(cls, text: str) -> ObjectPath:
        """Read `s3://BUCKET/KEY`. StorageError where it has no bucket."""
        bucket, _, key = text.removeprefix(SCHEME).partition("/")
        if not bucket:
            raise StorageError(f"{text}: must be {SCHEME}BUCKET/NAME", is_refusal=True)
        return cls(bucket, key)

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}"

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.bucket, f"{self.folder_key}{name}")

    @property
    def folder_key(self) -> str:
        """Return the key as that of a folder."""
        return self.key if not self.key or self.key.endswith("/") else f"{self.key}/"

    @property
    def name(self) -> str:
        """Return the last component."""
        return self.key.rstrip("/").rpartition("/")[2]

    def with_name(self, name: str) -> ObjectPath:
        """Return another object in the same folder."""
        folder, slash, _ = self.key.rpartition("/")
        return ObjectPath(self.bucket, f"{folder}{slash}{name}")

    def is_dir(self) -> bool:
        """Return whether this is written as a folder."""
        return not self.key or self.key.endswith("/")

    # -- what there is -------------------------------------------------------------------------------------------------

    def status(self) -> ObjectStatus:
        """Ask for size, time and tag. FileNotFoundError where there is no such object."""
        with _translated(self):
            found = _client().head_object(Bucket=self.bucket, Key=self.key)
        return ObjectStatus(found["ContentLength"], found["LastModified"].timestamp(), found["ETag"])

    def exists(self) -> bool:
        """Return whether the object is there."""
        try:
            self.status()
        except FileNotFoundError:
            return False
        return True

    def listed(self) -> Iterator[tuple[ObjectPath, float]]:
        """Yield every object whose key begins with this one, and when it was written (Unix time), in order."""
        with _translated(self):
            pages = _client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.key)
            for page in pages:
                for found in page.get("Contents", ()):
                    yield ObjectPath(self.bucket, found["Key"]), found["LastModified"].timestamp()

    def glob(self, pattern: str) -> list[ObjectPath]:
        """Return the objects directly in this folder whose names match, in order."""
        begin = self.folder_key
        listed = (path for path, _ in ObjectPath(self.bucket, begin).listed())
        return [path for path in listed if fnmatch.fnmatchcase(path.key.removeprefix(begin), pattern)]

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the object, if it is there."""
        with _translated(self):
            _client().delete_object(Bucket=self.bucket, Key=self.key)

    # -- content -------------------------------------------------------------------------------------------------------

    def open(self) -> IO[bytes]:
        """Open the object to read, also from within. FileNotFoundError where there is no such object."""
        return io.BufferedReader(_ObjectReader(self, self.status()), _READ_BYTES)

    @contextmanager
    def replacing(self) -> Iterator[IO[bytes]]:
        """Yield a local file that is uploaded under this name when the block has ended, and dropped if it fails."""
        self.abort_uploads()
        with tempfile.TemporaryFile() as local:
            yield cast("IO[bytes]", local)
            self.upload(cast("IO[bytes]", local))

    def upload(self, local: IO[bytes], is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Make the object of all that is in a local file; it is there as a whole or not at all.

        InterruptedError as soon as `is_stopped()`. An upload that fails is aborted; if the storage does not answer that
        either, `abort_uploads` finds it later.
        """
        size_bytes = local.seek(0, io.SEEK_END)
        local.seek(0)
        place = {"Bucket": self.bucket, "Key": self.key}
        with _translated(self):
            if size_bytes <= PART_BYTES:
                _client().put_object(**place, Body=local.read())
                return
            part_bytes = max(PART_BYTES, math.ceil(size_bytes / _MOST_PARTS))
            place["UploadId"] = _client().create_multipart_upload(**place)["UploadId"]
            try:
                parts: list[dict[str, Any]] = []
                while part := local.read(part_bytes):
                    if is_stopped():
                        raise InterruptedError
                    number = len(parts) + 1
                    etag = _client().upload_part(**place, PartNumber=number, Body=part)["ETag"]
                    parts.append({"PartNumber": number, "ETag": etag})
                self._complete(place, parts, size_bytes)
            except BaseException:
                _quietly(lambda: _client().abort_multipart_upload(**place))
                raise

    def _complete(self, place: dict[str, str], parts: list[dict[str, Any]], size_bytes: int) -> None:
        try:
            _client().complete_multipart_upload(**place, MultipartUpload={"Parts": parts})
        except Exception as error:
            # The answer to an earlier attempt may have been lost, and the upload is over since.
            if _code(error) != "NoSuchUpload" or not self.exists() or self.status().size_bytes != size_bytes:
                raise

    def abort_uploads(self, before_s: float | None = None, is_ours: Callable[[str], bool] | None = None) -> None:
        """Abort uploads to this key that were left, or, with `is_ours`, to keys below it of which that holds.

        `before_s`: only what began earlier (Unix time). A storage that does not list them is left alone.
        """

        def abort() -> None:
            pages = _client().get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=self.key)
            for page in pages:
                for found in page.get("Uploads", ()):
                    is_wanted = found["Key"] == self.key if is_ours is None else is_ours(found["Key"])
                    if is_wanted and (before_s is None or found["Initiated"].timestamp() < before_s):
                        _client().abort_multipart_upload(
                            Bucket=self.bucket, Key=found["Key"], UploadId=found["UploadId"]
                        )

        _quietly(abort)

    def check_writable(self) -> None:
        """Begin an upload and abort it: StorageError now, and not after hours, where nothing could be written."""
        place = {"Bucket": self.bucket, "Key": self.key}
        with _translated(self):
            place["UploadId"] = _client().create_multipart_upload(**place)["UploadId"]
        _quietly(lambda: _client().abort_multipart_upload(**place))
        self.abort_uploads()  # also those of a process that was killed right here


class _ObjectReader(io.RawIOBase):
    """The bytes of one version of an object; a connection that breaks off is opened again where it did."""

    def __init__(self, path: ObjectPath, status: ObjectStatus) -> None:
        self._path = path
        self._status = status
        self._position = 0
        self._body: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._status.size_bytes}[whence]
        if start + offset != self._position:
            self._position = max(0, start + offset)
            self._drop()
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), self._status.size_bytes - self._position)
        if wanted <= 0:
            return 0
        for attempt in range(_REOPENED):
            try:
                with _translated(self._path):
                    data = self._opened().read(wanted)
                if data:
                    view[: len(data)] = data
                    self._position += len(data)
                    return len(data)
            except StorageError as error:
                if error.is_refusal or attempt == _REOPENED - 1:
                    raise
            self._drop()
            time.sleep(min(0.25 * 2**attempt, 4.0))
        raise StorageError(f"{self._path}: ends after {self._position} of {self._status.size_bytes} bytes")

    def _opened(self) -> Any:
        if self._body is None:
            place = {"Bucket": self._path.bucket, "Key": self._path.key, "IfMatch": self._status.etag}
            try:
                got = _client().get_object(**place, Range=f"bytes={self._position}-")
            except Exception as error:
                if _code(error) in {"PreconditionFailed", "412"}:
                    raise StorageError(f"{self._path}: changed while it was read", is_refusal=True) from None
                raise
            self._body = got["Body"]
        return self._body

    def _drop(self) -> None:
        if self._body is not None:
            self._body.close()
            self._body = None

    def close(self) -> None:
        if not self.closed:
            self._drop()
        super().close()


def _quietly(action: Callable[[], object]) -> None:
    """Do what only tidies up: the storage may refuse it, or be gone."""
    try:
        with _translated(""):
            action()
    except (StorageError, FileNotFoundError):
        pass


def place_of(text: str) -> Path | ObjectPath:
    """Return the local path or the object that an option names. StorageError for an `s3://` without a bucket."""
    return ObjectPath.parse(text) if text.startswith(SCHEME) else Path(text)
