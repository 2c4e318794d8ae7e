"""Send each completion to a prefill server first, then to a decode server: vLLM with NIXL.

    python examples/prefill_decode_proxy.py --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000

It shows what a router has to do, and takes servers in turn. What a client asks for in
`kv_transfer_params` reaches both servers; where NIXL finds a prompt is added. When no prefill
server answers, the decode server computes the prompt. When a client goes away, so do its requests.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

PATHS = ("/v1/completions", "/v1/chat/completions")
SEND_ON = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}


async def prefill(session: ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """Let a server compute the prompt; return where a decode server finds it, if it did."""
    params = (body.get("kv_transfer_params") or {}) | SEND_ON
    one_token = {"max_tokens": 1, "stream": False, "kv_transfer_params": params}
    if "max_completion_tokens" in body:
        one_token["max_completion_tokens"] = 1
    without = {key: value for key, value in body.items() if key != "stream_options"}
    try:
        async with session.post(url, json=without | one_token) as answer:
            answer.raise_for_status()
            return read_object(await answer.read()).get("kv_transfer_params")
    except (ClientError, ValueError):
        return None


def read_object(text: bytes) -> dict[str, Any]:
    """Read a JSON object whose `kv_transfer_params`, if it has any, is one too.

    Raises:
        ValueError: it is none.
    """
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("expected a JSON object as body, found no JSON") from None
    if not isinstance(read, dict):
        raise ValueError(f"expected a JSON object as body, found {type(read).__name__}")
    if not isinstance(params := read.get("kv_transfer_params"), dict | None):
        found = type(params).__name__
        raise ValueError(f"expected a JSON object as kv_transfer_params, found {found}")
    return read


def make_app(prefill_urls: Sequence[str], decode_urls: Sequence[str]) -> web.Application:
    """The proxy; `handler_cancellation` of what runs it has to be on."""
    prefills, decodes = itertools.cycle(prefill_urls), itertools.cycle(decode_urls)

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            body = read_object(await request.read())
        except ValueError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        session = request.app[SESSION]
        params = body.get("kv_transfer_params") or {}
        params = {key: value for key, value in params.items() if key not in SEND_ON}
        found = await prefill(session, next(prefills) + request.path, body)
        body["kv_transfer_params"] = params | (found or {})
        url = next(decodes)
        try:
            decoding = await session.post(url + request.path, json=body)
        except ClientError as error:
            message = f"the decode server {url} does not answer: {error}"
            return web.json_response({"error": {"message": message}}, status=502)
        async with decoding as decoded:
            kind = {"Content-Type": decoded.headers.get("Content-Type", "application/json")}
            reply = web.StreamResponse(status=decoded.status, headers=kind)
            await reply.prepare(request)
            async for piece in decoded.content.iter_any():
                await reply.write(piece)
            await reply.write_eof()
            return reply

    app = web.Application(client_max_size=1 << 30)
    app.cleanup_ctx.append(_keep_session)
    app.add_routes([web.post(path, answer) for path in PATHS])
    return app


SESSION: web.AppKey[ClientSession] = web.AppKey("session", ClientSession)


async def _keep_session(app: web.Application) -> AsyncIterator[None]:
    # A connection for each request: vLLM's server closes an idle one after 5 s, and a request that
    # meets that is lost.
    each_anew = TCPConnector(limit=0, force_close=True)
    async with ClientSession(connector=each_anew, timeout=ClientTimeout(total=None)) as session:
        app[SESSION] = session
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--prefill", action="append", required=True, help="a server; more than once"
    )
    parser.add_argument("--decode", action="append", required=True, help="a server; more than once")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    app = make_app(options.prefill, options.decode)
    web.run_app(app, port=options.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
