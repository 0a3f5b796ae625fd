"""Handling of requests outside the model: error responses, size limits, clients that disconnect."""

import asyncio
import hmac
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from uuid import uuid4

from fastapi import Request
from fastapi.responses import Response
from starlette.datastructures import Headers


REQUEST_ID = "x-request-id"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1", "[::1]")
MOST_DISCARDED = 2**26  # bytes that are read of a refused body beyond what the server takes
STOPPING = "the server is stopping and has cut this answer off: ask again"


def error_of(status: int, message: str, kind: str = "invalid_request_error") -> str:
    """Return an error in OpenAI's format, in ASCII, so that half of a character in the message cannot fail."""
    return json.dumps({"error": {"message": message, "type": kind, "code": status}})


def error_response(status: int, *said: str, headers: dict[str, str] | None = None) -> Response:
    return Response(error_of(status, *said), status, headers, media_type="application/json")


async def with_whole_errors(parts: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    """Yield the parts of a stream of transformers, and its end. Its errors, which are strings, become objects as
    clients expect."""
    try:
        async with aclosing(parts):
            async for part in parts:
                lines = part.split("\n\n")
                for i, line in enumerate(lines):
                    if line.startswith('data: {"error": "'):
                        message = json.loads(line.removeprefix("data: "))["error"]
                        lines[i] = "data: " + error_of(500, message, "server_error")
                yield "\n\n".join(lines)
        yield "data: [DONE]\n\n"
    except asyncio.CancelledError:
        yield "data: " + error_of(503, STOPPING, "server_error") + "\n\n"


class LimitedSize:
    """Refuses a body that is too large before it is tokenized, which would make other requests wait.

    Its bytes are counted as they come, since a body in chunks does not say its length. The rest of a refused body is
    read and discarded, up to a limit: a client that is still sending would see a closed connection, not the answer.
    """

    def __init__(self, app, most_bytes: int):
        self.app, self.most_bytes = app, most_bytes

    async def __call__(self, scope, receive, send):
        if scope.get("method") != "POST":
            return await self.app(scope, receive, send)
        body, size, goes_on, message = bytearray(), 0, True, {}
        while goes_on and size < self.most_bytes + MOST_DISCARDED:
            message = await receive()
            part, goes_on = message.get("body", b""), message.get("more_body")
            size += len(part)
            if size <= self.most_bytes:
                body += part
        if (refusal := self.refusal(Headers(scope=scope), size)) is not None:
            refusal.headers["Connection"] = "close"  # the rest of the body is not read
            return await refusal(scope, receive, send)

        whole = [{**message, "body": bytes(body)}]  # as one message, or that of a client that is gone

        async def receive_again():
            return whole.pop() if whole else await receive()

        return await self.app(scope, receive_again, send)

    def refusal(self, headers: Headers, size: int) -> Response | None:
        if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may have read the other one
            return error_response(400, "the request has a Content-Length and a Transfer-Encoding: send one of them")
        if size > self.most_bytes:
            return error_response(413, f"the request is too long: this server takes up to {self.most_bytes} bytes")
        return None


class Admits:
    """Refuses requests without the API key, if there is one; and, where the server listens for its own machine alone,
    requests to another host: a page of any site could send them, by a name that it lets point to this machine."""

    def __init__(self, app, host: str, api_key: str | None):
        self.app, self.api_key, self.is_local = app, api_key, host in LOCAL_HOSTS

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and (refusal := self.refusal(Headers(scope=scope), scope["path"])):
            return await refusal(scope, receive, send)
        return await self.app(scope, receive, send)

    def refusal(self, headers: Headers, path: str) -> Response | None:
        asked, sent = headers.get("host", ""), headers.get("authorization", "")
        if self.is_local and re.sub(r":\d+$", "", asked).lower() not in LOCAL_HOSTS:
            wanted = "send it to localhost, or start the server with --host 0.0.0.0"
            return error_response(400, f"a request for the host {asked!r}, but this machine alone is served: {wanted}")
        is_open = self.api_key is None or path == "/health"
        if is_open or hmac.compare_digest(sent.encode("latin-1"), f"Bearer {self.api_key}".encode()):
            return None
        return error_response(401, "this server wants its API key: send the header Authorization: Bearer KEY")


class EndsCancelled:
    """Keeps an answer that was cut off, and said so, from ending in a traceback: starlette raises the cancellation
    again when the last part of a stream has been sent."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        has_ended = False

        async def send_and_note(message):
            nonlocal has_ended
            await send(message)
            has_ended |= message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self.app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            if not has_ended:
                raise


async def hangs_up(request: Request):
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def answer(handler, request: Request, body: dict):
    """Return the answer of a handler; cancel it if the client disconnects first, or if the server stops."""
    work = handler.handle_request(body, request.headers.get(REQUEST_ID) or str(uuid4()))
    if body.get("stream"):  # a stream detects this itself
        return await work
    work, gone = asyncio.ensure_future(work), asyncio.ensure_future(hangs_up(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else Response(status_code=499)
    except asyncio.CancelledError:  # what uvicorn does to answers that still run when its grace has passed
        return error_response(503, STOPPING, "server_error")
    finally:
        gone.cancel()
        work.cancel()
