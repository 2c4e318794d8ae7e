"""Bad answers to requests of an S3 client, in HTTP/1.1."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.worker.tiers.hostile.answers import (
    EVIL,
    HUGE,
    MARK,
    ODD_NUMBERS,
    End,
    Kind,
    Pause,
    Places,
    Steps,
    disguised,
    drip,
    ended,
    endless,
    noise,
    object_at,
    silent,
    spoilt,
)

_BOMB = gzip.compress(bytes(64 << 20), 9)
BOMBS = (_BOMB, gzip.compress(_BOMB), zlib.compress(bytes(1 << 24)))
_LAUGHS = "".join(
    f'<!ENTITY {after} "{f"&{before};" * 10}">'
    for before, after in zip("abcdefghi", "bcdefghij", strict=True)
)
BILLION = (
    f'<?xml version="1.0"?><!DOCTYPE e [<!ENTITY a "ha">{_LAUGHS}'
    '<!ENTITY file SYSTEM "file:///etc/passwd">]>'
).encode()


@dataclass
class Reply:
    """One answer.

    Attributes:
        headers: Content-Length is added.
        length: that is told where it is not that of the body.
    """

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    has_body: bool = True

    def raw(self, *, first: bytes = b"", length: str | None = "", more: bytes = b"") -> bytes:
        """Return the bytes of the answer; `length` None leaves Content-Length out."""
        lines = [first or f"HTTP/1.1 {self.status} X\r\n".encode()]
        headers = dict(self.headers)
        if length is not None:
            told = headers.pop("Content-Length", str(len(self.body)))
            headers["Content-Length"] = length or told
        lines += [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
        return b"".join((*lines, more, b"\r\n", self.body if self.has_body else b""))


@dataclass
class Scene:
    """What one answer can be made of.

    Attributes:
        method: of the request.
        is_list: it asks which objects there are.
        path: with its query.
        good: the right answer.
        others: right answers to other requests, with objects in them.
        heard: headers with which the client proves who it is.
    """

    rng: random.Random
    places: Places
    method: str
    is_list: bool
    path: str
    good: Reply
    others: Sequence[Reply]
    heard: Sequence[bytes] = ()


def _with(scene: Scene, body: bytes) -> Reply:
    return Reply(scene.good.status, body, dict(scene.good.headers), scene.good.has_body)


def _change(scene: Scene, change: object) -> Steps | None:
    place = object_at(scene.good.body)
    if place is None:
        return None
    start, end = place
    body = scene.good.body
    assert callable(change)
    return [_with(scene, body[:start] + change(body[start:end], scene.rng) + body[end:]).raw()]


# ---- lengths ----------------------------------------------------------------------------------


def huge_length(scene: Scene) -> Steps:
    """More than any machine has; of errors too, whose text a client may want whole."""
    rng = scene.rng
    end = rng.choice((End.CLOSE, End.SILENCE, Pause(0.0)))
    reply = rng.choice((scene.good, Reply(403, b"no"), Reply(404, b"no"), Reply(500, b"no")))
    return [reply.raw(length=str(rng.choice(HUGE))), Pause(0.02), b"more", end]


def odd_length(scene: Scene) -> Steps:
    end = scene.rng.choice((End.CLOSE, End.SILENCE, Pause(0.0)))
    return [scene.good.raw(length=scene.rng.choice(ODD_NUMBERS)), end]


def two_lengths(scene: Scene) -> Steps:
    rng = scene.rng
    other = rng.choice((0, 1, len(scene.good.body) - 1, len(scene.good.body) + 1, 1 << 20))
    more = rng.choice((b"Content-Length: %d\r\n" % other, b"Transfer-Encoding: chunked\r\n"))
    return [scene.good.raw(more=more)]


def no_length(scene: Scene) -> Steps:
    return [scene.good.raw(length=None), scene.rng.choice((End.CLOSE, End.SILENCE, End.RESET))]


def false_length(scene: Scene) -> Steps:
    many = scene.rng.choice((1, 2, 4096, 1 << 20))
    longer = scene.rng.random() < 0.5
    body = scene.good.body
    length = str(len(body) + many if longer else max(len(body) - many, 0))
    end = scene.rng.choice((End.CLOSE, End.SILENCE, Pause(0.0)))
    return [scene.good.raw(length=length), end]


def other_length(scene: Scene) -> Steps | None:
    """A body that is shorter or longer than it is, and says so."""
    if not scene.good.body:
        return None
    many = scene.rng.choice((1, 2, 4095, 4096, 8192, 1 << 20))
    body = scene.good.body
    body = body + bytes(many) if scene.rng.random() < 0.5 else body[:-many]
    return [_with(scene, body).raw()]


def chunks(scene: Scene) -> Steps:
    rng, good = scene.rng, scene.good
    size = rng.choice(
        (b"%x" % len(good.body), b"ffffffffffffffff", b"-1", b"zz", b"", b"1;" + EVIL)
    )
    end = rng.choice((b"\r\n0\r\n\r\n", b"\r\n", b"xx0\r\n\r\n", b"\r\n0\r\nX: y\r\n"))
    bare = Reply(good.status, b"", good.headers).raw(
        length=None, more=b"Transfer-Encoding: chunked\r\n"
    )
    return [bare + size + b"\r\n" + good.body + end, rng.choice((Pause(0.0), End.CLOSE))]


# ---- pace -------------------------------------------------------------------------------------


def never_ending(scene: Scene) -> Steps:
    rng, good = scene.rng, scene.good
    head = Reply(good.status, b"", good.headers)
    chunked = head.raw(length=None, more=b"Transfer-Encoding: chunked\r\n")
    xml = b"<?xml version='1.0'?><ListBucketResult>"
    chunk, first = rng.choice(
        (
            (b"x" * 4096, head.raw(length=None)),
            (b"x" * 4096, head.raw(length=str(1 << 30))),
            (b"1000\r\n" + b"x" * 4096 + b"\r\n", chunked),
            (b"1\r\nx\r\n", chunked),
            (b"x" * 4096, chunked),
            (b"X-More: more\r\n", b"HTTP/1.1 200 OK\r\n"),
            (b"x" * 4096, b"HTTP/1.1 200 OK\r\nX: "),
            (b"x" * 4096, b"HTTP/1.1 200 "),
            (b"HTTP/1.1 100 Continue\r\n\r\n", b""),
            (b"\r\n", b""),
            (b"<Contents><Key>a</Key></Contents>", head.raw(length=None) + xml),
            (b"<a>", head.raw(length=None)),
            (b"x" * 4096, Reply(500).raw(length=None)),
            (b"x" * 4096, Reply(404).raw(length=None)),
        )
    )
    return endless(chunk, first)


def endless_framing(scene: Scene) -> Steps:
    """No end of what is neither an object nor an error: interim answers, trailers, extensions."""
    rng, good = scene.rng, scene.good
    head = Reply(rng.choice((good.status, 404, 503)), b"", good.headers)
    chunked = head.raw(length=None, more=b"Transfer-Encoding: chunked\r\n")
    interim = rng.choice((b"100 Continue", b"102 Processing", b"103 Early Hints", b"199 X"))
    chunk, first = rng.choice(
        (
            (b"HTTP/1.1 " + interim + b"\r\n\r\n", b""),
            (b"HTTP/1.1 " + interim + b"\r\nLink: <x>\r\nContent-Length: 0\r\n\r\n", b""),
            (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", b""),
            (b"X-More: more\r\n", chunked + b"0\r\n"),
            (b"x" * 4096, chunked + b"0\r\nX: "),
            (b"1;" + b"x" * 300 + b"\r\ny\r\n", chunked),
            (b";name=value", chunked + b"5"),
            (b"0", chunked),
            (b"\r\n", chunked),
            (b"0\r\n\r\n", chunked),
            (b" folded\r\n", b"HTTP/1.1 200 OK\r\nX: y\r\n"),
            (b"Content-Length: 5\r\n", b"HTTP/1.1 404 X\r\n"),
        )
    )
    return endless(chunk, first)


def slow_drip(scene: Scene) -> Steps:
    return drip(scene.good.raw()[: scene.rng.choice((20, 200))])


def slow_object(scene: Scene) -> Steps:
    """All but the last bytes at once, those one by one."""
    return (step for part in _late(scene.good.raw()) for step in part)


def _late(good: bytes) -> Iterator[Steps]:
    yield [good[:-40]]
    yield drip(good[-40:])


def late_but_right(scene: Scene) -> Steps:
    raw = scene.good.raw()
    cut = scene.rng.randrange(len(raw))
    return [raw[:cut], Pause(0.03), raw[cut:]]


# ---- objects ----------------------------------------------------------------------------------


def wrong_bytes(scene: Scene) -> Steps | None:
    return _change(scene, spoilt)


def lying_header(scene: Scene) -> Steps | None:
    return _change(scene, disguised)


def another_object(scene: Scene) -> Steps | None:
    if object_at(scene.good.body) is None or not scene.others:
        return None
    other = scene.rng.choice(scene.others)
    if scene.rng.random() < 0.5:
        return [other.raw()]
    return [_with(scene, other.body[: len(scene.good.body)]).raw()]


def cut_off(scene: Scene) -> Steps:
    raw, rng = scene.good.raw(), scene.rng
    cut = rng.choice((1, 9, 30, len(raw) - 1, rng.randrange(len(raw)), rng.randrange(len(raw))))
    return [raw[:cut], rng.choice((End.CLOSE, End.RESET, End.HALF_CLOSE))]


def other_range(scene: Scene) -> Steps | None:
    """A part of an object that is not the one that was asked for."""
    good, rng = scene.good, scene.rng
    if scene.method != "GET" or scene.is_list:
        return None
    total = len(good.body)
    told = rng.choice(
        (
            f"bytes 1-{total}/{total + 1}",
            f"bytes 0-{total - 1}/*",
            f"bytes 0-{1 << 63}/{1 << 64}",
            f"bytes {total}-0/{total}",
            f"bytes */{total}",
            "bytes -",
            "pages 1-2/3",
            "",
            f"bytes 0-{total - 1}/0",
        )
    )
    status = rng.choice((206, 200, 416))
    body = rng.choice((good.body, good.body[1:], good.body[::-1], b""))
    return [Reply(status, body, {**good.headers, "Content-Range": told}).raw()]


# ---- statuses ---------------------------------------------------------------------------------


def xml_error(code: str, message: bytes) -> bytes:
    """Return the body of an error of S3."""
    return (
        b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>%s</Code><Message>%s</Message>'
        b"<Resource>/</Resource><RequestId>1</RequestId></Error>" % (code.encode(), message)
    )


def status(scene: Scene) -> Steps:
    rng = scene.rng
    number, code = rng.choice(
        (
            *((500, "InternalError"), (503, "SlowDown"), (503, "ServiceUnavailable")),
            *((403, "AccessDenied"), (404, "NoSuchKey"), (404, "NoSuchBucket"), (304, "")),
            *((412, "PreconditionFailed"), (409, "Conflict"), (401, ""), (416, ""), (429, "")),
            *((204, ""), (201, ""), (202, ""), (207, ""), (299, ""), (400, "RequestTimeout")),
            *((599, ""), (408, ""), (418, ""), (501, "NotImplemented"), (507, ""), (413, "")),
        )
    )
    headers = {"Retry-After": rng.choice(("1", "999999999999", "-1", "tomorrow", "1e9"))}
    return [Reply(number, xml_error(code, b"no") if code else b"", headers).raw()]


def odd_status(scene: Scene) -> Steps:
    line = scene.rng.choice(
        (
            b"HTTP/1.1 99999 X\r\n",
            b"HTTP/1.1 -1 X\r\n",
            b"HTTP/1.1 000 X\r\n",
            b"HTTP/1.1 1 X\r\n",
            b"HTTP/9.9 200 OK\r\n",
            b"HTTP/1.0 200 OK\r\n",
            b"HTTP/1.1 200\r\n",
            b"HTTP/1.1  200  OK\r\n",
            b"200 OK\r\n",
            b"ICY 200 OK\r\n",
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n",
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n",
            b"HTTP/1.1 200 " + EVIL.replace(b"\n", b"") + b"\r\n",
            b"HTTP/1.1 200 " + b"x" * (1 << 20) + b"\r\n",
        )
    )
    return [scene.good.raw(first=line)]


def redirect(scene: Scene) -> Steps:
    rng, places = scene.rng, scene.places
    where = rng.choice(
        (
            f"http://127.0.0.1:{places.own}{scene.path}",
            scene.path,
            f"http://127.0.0.1:{places.dead}/",
            f"http://127.0.0.1:{places.trap}{scene.path}",
            f"http://localhost:{places.trap}{scene.path}",
            "http://no such host/",
            "http://[::1",
            "ftp://127.0.0.1/",
            "file:///etc/passwd",
            "//",
            "",
            "http://" + "x" * 5000 + ".invalid/",
            "javascript:1",
            f"http://user:word@127.0.0.1:{places.trap}/",
        )
    )
    number = rng.choice((301, 302, 303, 307, 308, 300, 305))
    body = rng.choice((b"", xml_error("PermanentRedirect", b"there"), scene.good.body))
    return [Reply(number, body, {"Location": where}).raw()]


def evil_error(scene: Scene) -> Steps:
    rng = scene.rng
    said = b" ".join(scene.heard)
    told = rng.choice((EVIL, said, said + EVIL, MARK.encode() + b"\r\n" * 100, b"\xff" * 50))
    number = rng.choice((400, 403, 404, 409, 412, 500))
    return [Reply(number, xml_error(rng.choice(("AccessDenied", "NoSuchKey", "X")), told)).raw()]


def big_error(scene: Scene) -> Steps:
    number = scene.rng.choice((400, 403, 404, 500, 503))
    body = scene.rng.choice(
        (b"E" * (4 << 20), xml_error("X", b"E" * (4 << 20)), b"<a>" * (1 << 19))
    )
    return [Reply(number, body).raw()]


def bomb(scene: Scene) -> Steps:
    """A small answer that says it is large once it is unpacked, or read as XML."""
    rng = scene.rng
    number = rng.choice((200, scene.good.status, 404, 500))
    if rng.random() < 0.5:
        coding = rng.choice(("gzip", "gzip, gzip", "br", "deflate", "zstd"))
        return [
            Reply(
                number, rng.choice(BOMBS), {**scene.good.headers, "Content-Encoding": coding}
            ).raw()
        ]
    element = rng.choice(
        (b"<Error><Code>&j;</Code></Error>", _listing(b"&j;"), _listing(b"&file;"))
    )
    return [Reply(number, BILLION + element, {"Content-Type": "application/xml"}).raw()]


# ---- lists ------------------------------------------------------------------------------------


def _listing(key: bytes, *, size: str = "1", more: bytes = b"", date: str = "") -> bytes:
    date = date or "2026-01-01T00:00:00.000Z"
    return (
        b'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult '
        b'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>kv</Name>'
        b"<KeyCount>1</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>" + more
    ) + (
        b"<Contents><Key>%s</Key><LastModified>%s</LastModified><ETag>x</ETag><Size>%s</Size>"
        b"<StorageClass>STANDARD</StorageClass></Contents></ListBucketResult>"
        % (key, date.encode(), size.encode())
    )


def false_list(scene: Scene) -> Steps | None:
    if not scene.is_list:
        return None
    rng, good = scene.rng, scene.good.body
    again = b"<NextContinuationToken>again</NextContinuationToken>"
    body = rng.choice(
        (
            _listing(b"../../etc/passwd"),
            _listing(b""),
            _listing(b"/"),
            _listing(b"a//b"),
            _listing(EVIL.replace(b"\0", b"")),
            _listing(b"k" * 100_000),
            _listing(b"kv", size="-1"),
            _listing(b"kv", size=str(1 << 64)),
            _listing(b"kv", size="x"),
            _listing(b"kv", date="yesterday"),
            _listing(b"kv", date="9999999-01-01T00:00:00Z"),
            good.replace(b"false</IsTruncated>", b"true</IsTruncated>" + again),
            good.replace(b"false</IsTruncated>", b"true</IsTruncated>"),
            good.replace(b"<Contents>", b"<Contents>" * 100),
            good.replace(b"</Key>", b""),
            good[: len(good) // 2],
            good[:-18] + good[-200:-18] * 2000 + good[-18:],
            b"<ListBucketResult/>",
            b"<" * 100_000,
            b"<a>" * 100_000,
            b"\xff\xfe" + good,
            b"{}",
            b"",
        )
    )
    return [Reply(200, body, {"Content-Type": "application/xml"}).raw()]


# ---- headers and connections ------------------------------------------------------------------


def odd_headers(scene: Scene) -> Steps:
    rng = scene.rng
    more = rng.choice(
        (
            b"X: " + b"x" * (1 << 20) + b"\r\n",
            b"".join(b"X-%d: x\r\n" % n for n in range(5000)),
            b"X: \x00\x01\x1b[31m\r\n",
            b"X: " + bytes(range(128, 256)) + b"\r\n",
            b"no colon\r\n",
            b": no name\r\n",
            b" folded\r\n",
            b"X: y\n\rZ: a\r\n",
            b"Connection: close\r\n",
            b"Keep-Alive: timeout=0, max=0\r\n",
            b"Transfer-Encoding: gzip, identity\r\n",
            b"Set-Cookie: a=b; Domain=127.0.0.1\r\n" * 50,
        )
    )
    return [scene.good.raw(more=more)]


def odd_etag(scene: Scene) -> Steps:
    rng = scene.rng
    headers = dict(scene.good.headers)
    which = rng.choice(("ETag", "Last-Modified", "x-amz-version-id", "Content-Type"))
    values = ("", "x" * 10_000, "Thu, 99 Foo 99999 99:99:99 GMT", "\x01", '"', "\u2603", "-1", "0")
    if rng.random() < 0.3:
        headers.pop(which, None)
    else:
        headers[which] = rng.choice(values)
    return [Reply(scene.good.status, scene.good.body, headers, scene.good.has_body).raw()]


def split(scene: Scene) -> Steps:
    """One answer more, which a client may take for that to its next request."""
    rng = scene.rng
    more = rng.choice((*scene.others, Reply(200, b""), Reply(404), Reply(204)))
    return [scene.good.raw() + more.raw()]


def head_with_body(scene: Scene) -> Steps | None:
    if scene.method != "HEAD" or not scene.others:
        return None
    return [scene.good.raw() + scene.rng.choice(scene.others).raw()]


def another_protocol(scene: Scene) -> Steps:
    return [
        scene.rng.choice(
            (
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
                b"\0\0\x12\4\0\0\0\0\0\0\3\0\0\0\x80\0\4\0\1\0\0\0\5\0\xff\xff\xff",
                b"\x15\x03\x01\x00\x02\x02\x28",
                b"SSH-2.0-OpenSSH_9.6\r\n",
                b"-ERR unknown command 'GET'\r\n",
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            )
        )
    ]


KINDS: dict[str, Kind[Scene]] = {
    kind.__name__: kind
    for kind in (
        *(
            huge_length,
            odd_length,
            two_lengths,
            no_length,
            false_length,
            other_length,
            chunks,
            never_ending,
            endless_framing,
        ),
        *(slow_drip, slow_object, late_but_right, wrong_bytes, lying_header, another_object),
        *(cut_off, other_range, status, odd_status, redirect, evil_error, big_error, bomb),
        *(false_list, odd_headers, odd_etag, split, head_with_body, noise, another_protocol),
        *(ended, silent),
    )
}
WEIGHTS = {
    **{"wrong_bytes": 30, "lying_header": 30, "another_object": 30, "split": 30, "status": 20},
    **{"slow_drip": 3, "slow_object": 3, "silent": 3, "never_ending": 5, "false_list": 60},
    **{"odd_etag": 20, "redirect": 20, "big_error": 5},
}
