"""What the server does with requests before and beside the model: errors, sizes, clients that go away."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from uuid import uuid4

from fastapi import Request
from fastapi.responses import Response


REQUEST_ID = "x-request-id"


def error_of(status: int, message: str, kind: str = "invalid_request_error") -> str:
    """An error in the form of OpenAI, in ASCII, also where half a character came."""
    return json.dumps({"error": {"message": message, "type": kind, "code": status}})


def error_response(status: int, *said: str) -> Response:
    return Response(error_of(status, *said), status, media_type="application/json")


async def with_whole_errors(parts: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    """The parts of a stream of transformers, which tells an error as a text, where clients read an object."""
    async with aclosing(parts):
        async for part in parts:
            lines = part.split("\n\n")
            for i, line in enumerate(lines):
                if line.startswith('data: {"error": "'):
                    message = json.loads(line.removeprefix("data: "))["error"]
                    lines[i] = "data: " + error_of(500, message, "server_error")
            yield "\n\n".join(lines)


class LimitedSize:
    """Refuses a body that is too large before it is kept and cut into tokens, for which other requests would wait.

    What comes of it is let go: a client that still sends would find a closed connection, and not the answer.
    """

    def __init__(self, app, most_bytes: int):
        self.app, self.most_bytes = app, most_bytes

    async def __call__(self, scope, receive, send):
        length = dict(scope.get("headers", ())).get(b"content-length", b"").decode()
        if scope.get("method") == "POST" and (not length.isdecimal() or int(length) > self.most_bytes):
            refusal = error_response(413, f"a request of {length} bytes: this server takes up to {self.most_bytes}")
            if not length.isdecimal():
                refusal = error_response(411, "how long the request is must be said: send a Content-Length")
            while (await receive()).get("more_body"):
                pass
            return await refusal(scope, receive, send)
        return await self.app(scope, receive, send)


async def hangs_up(request: Request):
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def answer(handler, request: Request, body: dict):
    """Of a handler, unless the client goes away before it is made."""
    work = handler.handle_request(body, request.headers.get(REQUEST_ID) or str(uuid4()))
    if body.get("stream"):  # looks after that itself
        return await work
    work, gone = asyncio.ensure_future(work), asyncio.ensure_future(hangs_up(request))
    await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    if work.done():
        return work.result()
    work.cancel()
    return Response(status_code=499)
