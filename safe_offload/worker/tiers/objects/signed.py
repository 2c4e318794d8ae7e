"""Requests of an S3 bucket by signed urls, which obstore makes, through our own HTTP (http.py).

Credentials, roles, regions and addresses so stay obstore's; what a server answers is bounded by us.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from safe_offload.tier_config import TierConfig
from safe_offload.worker.tiers.objects.connections import Connections
from safe_offload.worker.tiers.objects.http import Answer
from safe_offload.worker.tiers.objects.requests import Method
from safe_offload.worker.tiers.objects.store import AnswerError, Store, open_store

EXPIRES: Final = timedelta(minutes=15)
"""A url is used within the deadline of a call; clocks may differ by as much."""

# Settings, as obstore reads them, of which signed urls or our own HTTP know nothing.
_LIBRARY_ONLY: Final = (
    *("AWS_SERVER_SIDE_ENCRYPTION", "AWS_SSE_KMS_KEY_ID", "AWS_SSE_BUCKET_KEY_ENABLED"),
    *("AWS_SSE_CUSTOMER_KEY_BASE64", "AWS_CHECKSUM_ALGORITHM", "AWS_CONDITIONAL_PUT"),
    *("AWS_S3_EXPRESS", "AWS_PROXY_URL", "AWS_PROXY_CA_CERTIFICATE"),
    "AWS_ALLOW_INVALID_CERTIFICATES",
)
_IS_ON: Final = ("1", "true", "on", "yes", "y")
_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9]{1,64})</Code>")
_AGENT: Final = "safe-offload"


def plain_url(config: TierConfig, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the url of a tier's objects, without their names; None if obstore must send requests.

    It must where there is a proxy, or a setting that only it knows.
    """
    if any(environment.get(variable) for variable in _LIBRARY_ONLY):
        return None
    import obstore

    nobody = {"access_key_id": "none", "secret_access_key": "none", "skip_signature": False}
    store = open_store(config, environment, more=nobody)
    url = str(obstore.sign(store, "GET", "x", EXPIRES)).partition("?")[0].removesuffix("x")
    parts = urlsplit(url)
    proxies = getproxies()
    is_proxied = parts.scheme in proxies or "all" in proxies
    if is_proxied and not proxy_bypass(parts.netloc):
        return None
    return url


class SignedRequests:
    """See `Requests`. A ticket is what is asked for: the path of a url and its query.

    Args:
        store: that signs.
        url: of the tier's objects, see `plain_url`.
        timeout_s: of one request.
        environment: says whether nothing is to be signed.
    """

    def __init__(
        self,
        store: Store,
        url: str,
        timeout_s: float,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        parts = urlsplit(url)
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._folder = parts.path
        self._store = store
        self._is_signed = environment.get("AWS_SKIP_SIGNATURE", "").lower() not in _IS_ON
        self._connections = Connections(self._origin, timeout_s)
        self._lines = (
            f" HTTP/1.1\r\nHost: {parts.netloc}\r\nUser-Agent: {_AGENT}\r\n"
            "Accept: */*\r\nAccept-Encoding: identity\r\n"
        )

    async def tickets(self, method: Method, paths: Sequence[str]) -> list[str]:
        """See `Requests.tickets`."""
        if not self._is_signed:
            return [self._folder + path for path in paths]
        import obstore

        urls = await obstore.sign_async(self._store, method, list(paths), EXPIRES)
        return [url.removeprefix(self._origin) for url in urls]

    async def get(self, ticket: str, into: Sequence[memoryview]) -> bool:
        """See `Requests.get`."""
        answer = await self._connections.ask((self._head_of("GET", ticket),), into)
        _require(answer, 200)
        return answer.length == sum(buffer.nbytes for buffer in into)

    async def head(self, ticket: str) -> None:
        """See `Requests.head`."""
        request = self._head_of("HEAD", ticket)
        _require(await self._connections.ask((request,), is_head=True), 200)

    async def put(self, ticket: str, data: Sequence[bytes], *, only_new: bool) -> None:
        """See `Requests.put`."""
        more = f"Content-Length: {sum(map(len, data))}\r\n"
        if only_new:
            more += "If-None-Match: *\r\n"
        request = self._head_of("PUT", ticket, more)
        _require(await self._connections.ask((request, *data)), *range(200, 300))

    async def delete(self, ticket: str) -> None:
        """See `Requests.delete`."""
        request = self._head_of("DELETE", ticket)
        _require(await self._connections.ask((request,)), *range(200, 300))

    def close(self) -> None:
        """See `Requests.close`."""
        self._connections.close()
        self._store = None

    def _head_of(self, method: Method, ticket: str, more: str = "") -> bytes:
        return f"{method} {ticket}{self._lines}{more}\r\n".encode("ascii")


def _require(answer: Answer, *statuses: int) -> None:
    """Raise what an answer means that has another status."""
    if answer.status in statuses:
        return
    code: Any = _CODE.search(answer.text)
    raise AnswerError(answer.status, code[1].decode() if code else "")
