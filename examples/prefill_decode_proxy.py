"""Send each completion to a prefill server first, then to a decode server: vLLM with NIXL.

    python examples/prefill_decode_proxy.py --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000

It shows what a router has to do, and takes servers in turn. When no prefill server answers, the
decode server computes the prompt. When a client goes away, so do its requests.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

PATHS = ("/v1/completions", "/v1/chat/completions")
SEND_ON = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}


async def prefill(session: ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """Let a server compute the prompt; return where a decode server finds it, if it did."""
    one_token = {"max_tokens": 1, "stream": False, "kv_transfer_params": SEND_ON}
    if "max_completion_tokens" in body:
        one_token["max_completion_tokens"] = 1
    without = {key: value for key, value in body.items() if key != "stream_options"}
    try:
        async with session.post(url, json=without | one_token) as answer:
            answer.raise_for_status()
            found: dict[str, Any] | None = (await answer.json()).get("kv_transfer_params")
            return found
    except ClientError:
        return None


def make_app(prefill_urls: Sequence[str], decode_urls: Sequence[str]) -> web.Application:
    """The proxy; `handler_cancellation` of what runs it has to be on."""
    prefills, decodes = itertools.cycle(prefill_urls), itertools.cycle(decode_urls)

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        session = request.app[SESSION]
        body["kv_transfer_params"] = await prefill(session, next(prefills) + request.path, body)
        async with session.post(next(decodes) + request.path, json=body) as decoded:
            kind = {"Content-Type": decoded.headers["Content-Type"]}
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
    async with ClientSession(timeout=ClientTimeout(total=None)) as app[SESSION]:
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
