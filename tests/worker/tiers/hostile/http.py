"""A hostile object store: buckets in memory, with answers that are replaced on their way."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.worker.tiers.hostile.answers import Choice, Places, object_at, play
from tests.worker.tiers.hostile.http_answers import KINDS, WEIGHTS, Reply, Scene, xml_error

NUM_OTHERS = 20
NUM_OBJECTS_MAX = 400
LIMIT_BYTES = 1 << 22
PROOFS = ("authorization", "x-amz-security-token", "x-amz-signature")
_WHEN = "2026-01-01T00:00:00.000Z"
_WHEN_HTTP = "Thu, 01 Jan 2026 00:00:00 GMT"


@dataclass
class Request:
    """One request of a client; names of headers are lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    path: str = ""
    query: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urlsplit(self.target)
        self.path = unquote(parts.path)
        found = parse_qs(parts.query, keep_blank_values=True)
        self.query = {name: values[0] for name, values in found.items()}

    def proofs(self) -> dict[str, str]:
        """Return what says whose it is, by its name in lower case: headers and query."""
        found = {name.lower(): value for name, value in self.query.items()} | self.headers
        return {name: found[name] for name in PROOFS if name in found}

    @property
    def is_list(self) -> bool:
        """Return whether it asks which objects there are."""
        return self.method == "GET" and "list-type" in self.query


class Store:
    """What an S3 server does, as far as a tier can want it."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self._parts: dict[str, dict[int, bytes]] = {}

    def answer(self, request: Request) -> Reply:
        """Do what is asked."""
        path, query, method = request.path, request.query, request.method
        if request.is_list:
            return self._list(path.strip("/"), query)
        if method == "POST" and "delete" in query:
            return self._delete_many(path.strip("/"), request.body)
        if "uploads" in query or "uploadId" in query:
            return self._upload(request)
        if method == "PUT":
            if request.headers.get("if-none-match") == "*" and path in self.objects:
                return Reply(412, xml_error("PreconditionFailed", b"it exists"))
            self.objects[path] = request.body
            if len(self.objects) > NUM_OBJECTS_MAX:
                del self.objects[next(iter(self.objects))]
            return Reply(200, b"", {"ETag": _etag(request.body)})
        if method == "DELETE":
            self.objects.pop(path, None)
            return Reply(204)
        if path not in self.objects:
            missing = xml_error("NoSuchKey", b"The specified key does not exist.")
            return Reply(404, missing, has_body=method != "HEAD")
        return self._get(request, self.objects[path])

    def _get(self, request: Request, data: bytes) -> Reply:
        headers = {"ETag": _etag(data), "Last-Modified": _WHEN_HTTP, "Accept-Ranges": "bytes"}
        if match := re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", "")):
            first, last = match.groups()
            start = int(first) if first else max(len(data) - int(last), 0)
            end = min(int(last) + 1, len(data)) if first and last else len(data)
            if start >= len(data):
                return Reply(416, xml_error("InvalidRange", b"no"))
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
            return Reply(206, data[start:end], headers)
        return Reply(200, data, headers, has_body=request.method != "HEAD")

    def _list(self, bucket: str, query: dict[str, str]) -> Reply:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        count = min(int(query.get("max-keys", 1000)), 1000)
        start = f"/{bucket}/"
        keys = sorted(path[len(start) :] for path in self.objects if path.startswith(start))
        rows: dict[str, str] = {}
        for key in keys:
            if not key.startswith(prefix) or key <= after:
                continue
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if found:
                common = escape(prefix + head + found)
                rows[common] = f"<CommonPrefixes><Prefix>{common}</Prefix></CommonPrefixes>"
                continue
            size, etag = len(self.objects[start + key]), escape(_etag(self.objects[start + key]))
            rows[key] = (
                f"<Contents><Key>{escape(key)}</Key><LastModified>{_WHEN}</LastModified>"
                f"<ETag>{etag}</ETag><Size>{size}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        shown = list(rows)[:count]
        is_cut = len(rows) > count
        token = f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>"
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(shown)}</KeyCount>"
            f"<MaxKeys>{count}</MaxKeys><IsTruncated>{str(is_cut).lower()}</IsTruncated>"
            f"{token if is_cut else ''}{''.join(rows[row] for row in shown)}</ListBucketResult>"
        )
        return Reply(200, body.encode(), {"Content-Type": "application/xml"})

    def _delete_many(self, bucket: str, body: bytes) -> Reply:
        keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
        for key in keys:
            self.objects.pop(f"/{bucket}/{key}", None)
        rows = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        return Reply(200, f"<DeleteResult>{rows}</DeleteResult>".encode())

    def _upload(self, request: Request) -> Reply:
        upload, path = request.query.get("uploadId", ""), request.path
        if request.method == "POST" and not upload:
            upload = str(len(self._parts) + 1)
            self._parts[upload] = {}
            body = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId>"
            return Reply(200, f"{body}</InitiateMultipartUploadResult>".encode())
        if request.method == "PUT":
            number = int(request.query["partNumber"])
            self._parts.setdefault(upload, {})[number] = request.body
            return Reply(200, b"", {"ETag": _etag(request.body)})
        parts = self._parts.pop(upload, {})
        if request.method == "DELETE":
            return Reply(204)
        self.objects[path] = b"".join(parts[number] for number in sorted(parts))
        etag = escape(_etag(self.objects[path]))
        body = f"<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>"
        return Reply(200, body.encode())


class HttpServer:
    """One port of hostile answers over a store in memory."""

    def __init__(self) -> None:
        self.store = Store()
        self.choice: Choice[Scene] = Choice(KINDS, WEIGHTS)
        self.places = Places(0, 0, 0)
        self._others: deque[Reply] = deque(maxlen=NUM_OTHERS)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        while (request := await read_request(reader)) is not None:
            good = self.store.answer(request)
            if object_at(good.body) is not None:
                self._others.append(good)
            if not self.choice.is_hostile:
                writer.write(good.raw())
                await writer.drain()
                continue
            rng = self.choice.next()
            heard = [proof.encode() for proof in request.proofs().values()]
            scene = Scene(
                *(rng, self.places, request.method, request.is_list, request.target),
                *(good, tuple(self._others), heard),
            )
            steps = self.choice.choose(rng, scene)
            if not await play([good.raw()] if steps is None else steps, reader, writer):
                return


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """Return one request; None at the end, or if it is none."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head[:-4].split("\r\n")
        method, target, _ = first.split(" ")
        headers = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = await _read_chunks(reader)
        else:
            body = await reader.readexactly(int(headers.get("content-length", 0)))
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        return None
    return Request(method, target, headers, body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readline()).split(b";")[0], 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readline()
    return b"".join(parts)


def _etag(data: bytes) -> str:
    return f'"{hash(data) & (1 << 64) - 1:x}"'
