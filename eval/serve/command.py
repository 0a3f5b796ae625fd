"""The server: requests of many clients share every pass of the model."""

import json
import os
import socket
import time
from contextlib import suppress

from transformers.utils.import_utils import is_serve_available


if not is_serve_available():
    raise ImportError("looped serve needs the server of transformers: pip install 'modeling-looped[serve]'")

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from looped_eval.common.model_folder import loops_by_default, open_config, open_model, open_tokenizer
from looped_recipes.common.errors import CommandError
from modeling_looped.shared_passes import SharedPasses

from .grammars import vocabulary
from .handlers import Chat, Completions, OneModel, SharedState
from .http import Admits, EndsCancelled, LimitedSize, answer, error_response
from .options import parse
from .shared_generation import TOO_DEEP, SharedGenerateManager


BYTES_PER_TOKEN = 32  # limit of a request's body; larger ones are refused before they are read
LEAST_BYTES = 2**16
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health")
UNPARSED = "There was an error parsing the body"  # FastAPI's
UNREAD = {  # of what, by its cause
    UnicodeDecodeError: "the body is not UTF-8: send JSON in UTF-8, and not compressed",
    RecursionError: TOO_DEEP,
    ValueError: "the body has a number of too many digits",
}


def build_app(
    name: str,
    model,
    tokenizer,
    passes: SharedPasses,
    max_loops: int | None = None,
    host: str = "localhost",
    api_key: str | None = None,
) -> FastAPI:
    """Build the server. max_loops: the largest num_loops of a request; None means 4 times that of requests that name
    none. host, api_key: where it listens, and the key that requests have to send, if any."""
    app, started = FastAPI(title=name), int(time.time())
    num_loops = loops_by_default(model)
    app.add_middleware(
        LimitedSize, most_bytes=max(LEAST_BYTES, BYTES_PER_TOKEN * model.config.max_position_embeddings)
    )
    app.add_middleware(EndsCancelled)
    app.add_middleware(Admits, host=host, api_key=api_key)
    manager = SharedGenerateManager(passes, 4 * num_loops if max_loops is None else max_loops)
    one, state = OneModel(name, model, tokenizer), SharedState(manager)
    with suppress(ValueError):  # told to those who ask for a form
        vocabulary(one.of_forms, model)
    chat, completions = Chat(one, state), Completions(one, state)

    @app.exception_handler(StarletteHTTPException)  # the base class of FastAPI's
    async def as_clients_read_it(request: Request, error: StarletteHTTPException):
        if error.status_code == 404 and error.detail == "Not Found":  # starlette's, of a path without an endpoint
            return error_response(404, f"there is nothing at {request.url.path}, but at {', '.join(ENDPOINTS)}")
        message = UNREAD.get(type(error.__cause__), UNPARSED) if error.detail == UNPARSED else error.detail
        return error_response(400 if error.status_code == 422 else error.status_code, message)

    @app.exception_handler(RequestValidationError)
    async def not_json(request: Request, error: RequestValidationError):
        if "json" not in (kind := request.headers.get("content-type", "")):
            sent = f"as {kind}" if kind else "without its type"
            return error_response(400, f"the body was sent {sent}: send the header Content-Type: application/json")
        reasons = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        return error_response(400, "; ".join(reasons))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception):
        closing = {"Connection": "close"}  # uvicorn closes it, since starlette raises the error again
        return error_response(500, f"{type(error).__name__}: {error}", "server_error", headers=closing)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: dict):
        return await answer(chat, request, body)

    @app.post("/v1/completions")
    async def text_completions(request: Request, body: dict):
        return await answer(completions, request, body)

    described = {
        "id": name,
        "object": "model",
        "created": started,
        "owned_by": "",
        "num_loops": num_loops,
    }

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models")
    def models():
        return {"object": "list", "data": [described]}

    @app.get("/v1/models/{asked:path}")
    def one_model(asked: str):  # refuses every other name
        if asked != name:
            raise HTTPException(404, f"there is no model {asked!r} here, only {name!r}")
        return described

    @app.post("/load_model")
    def load_model(body: dict):
        """What `transformers chat` asks before its first message."""
        if body.get("model") is None:
            raise HTTPException(422, "the body has no `model`: name one")
        one_model(body["model"])
        event = json.dumps({"status": "ready", "cached": True})
        return StreamingResponse(iter([f"data: {event}\n\n"]), media_type="text/event-stream")

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    def health():
        return {"status": "ok"}

    return app


def check_free(host: str, port: int):
    """Refuse an address that is in use, before the model is loaded, which may take long."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise CommandError(
            f"cannot listen at --host {host} --port {port}: {error.strerror or error}; choose another, or end the "
            "process that holds it"
        ) from error


def main(arguments: list[str] | None = None):
    args = parse(arguments)
    check_free(args.host, args.port)
    folder, config = open_config(args.model)
    tokenizer = open_tokenizer(folder, args.tokenizer, config)
    asked = {"num_loops": args.num_loops, "attn_implementation": args.attn_implementation}
    asked = {name: value for name, value in asked.items() if value is not None}
    model = open_model(folder, args, dtype=args.dtype, **asked)
    max_tokens = args.max_tokens or args.max_rows * model.config.max_position_embeddings
    with SharedPasses(model, args.max_rows, max_tokens) as passes:
        key = os.environ.get("LOOPED_API_KEY") or None
        app = build_app(args.name or args.model, model, tokenizer, passes, args.max_loops, args.host, key)
        uvicorn.run(app, host=args.host, port=args.port, timeout_graceful_shutdown=args.grace)
