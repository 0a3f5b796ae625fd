"""The server: requests of many clients share every pass of the model."""

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers.generation import BaseStreamer
from transformers.utils.import_utils import is_serve_available


if not is_serve_available():
    raise ImportError("looped serve needs the server of transformers: pip install 'modeling-looped[serve]'")

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import GenerateManager, GenerationState

from looped_eval.common.model_folder import open_config, open_tokenizer
from looped_recipes.common.errors import CommandError
from modeling_looped import LoopedForCausalLM
from modeling_looped.depth_options import DEPTH_FIELDS
from modeling_looped.shared_passes import SharedPasses

from .http import LimitedSize, answer, error_response
from .options import parse
from .request_checks import check_answers, check_body, check_conversation, check_stop, check_tools
from .stop_texts import StopsInAnswer, StopTexts


MOST_THREADS = 64  # requests that are prepared at a time; others wait before
BYTES_PER_TOKEN = 32  # of a request's body: more are refused before they are read
LEAST_BYTES = 2**16
NEW_TOKENS = 1024  # of an answer whose length is not asked for, as in the server of transformers


@dataclass
class Asked:
    """The request that is answered in this context."""

    fields: dict[str, Any]  # of depth
    seed: int | None
    has_length: bool  # says how many tokens it wants
    has_config: bool  # a generation config of its own
    is_checked: bool = False  # what fails now is no fault of the request
    full_depth: int = 0
    loops: list[int] = field(default_factory=list)  # that its tokens have taken
    end_tokens: tuple[int, ...] = ()  # any of which ends the text
    has_ended: bool = False  # with one of them
    stops: StopTexts = field(default_factory=lambda: StopTexts(None))

    def note_end(self, tokens: list[int]):
        self.has_ended = bool(tokens) and tokens[-1] in self.end_tokens

    def finish(self, choice: dict, is_last: bool):
        """A choice of OpenAI's form, as it is told."""
        self.stops.shorten(choice, is_last)
        if self.has_ended and choice.get("finish_reason") == "length":  # it ended with the last token that it had
            choice["finish_reason"] = "stop"

    def fields_of_loops(self) -> dict:
        saved = 1 - sum(self.loops) / (self.full_depth * len(self.loops)) if self.loops else 0
        return {"token_loops": self.loops, "saved_percent": round(100 * saved, 1)}


_asked: ContextVar[Asked] = ContextVar("asked")


class Cancelled(Exception):
    """Nobody waits for this answer any more."""


class UntilCancelled(BaseStreamer):
    """Ends a generation whose client has gone away."""

    def __init__(self):
        self._cancelled = threading.Event()

    def cancel(self):
        self._cancelled.set()

    def put(self, value):
        if self._cancelled.is_set():
            raise Cancelled

    def end(self):
        pass


def check_client(streamer):
    """That it has not gone away: else the streamer raises."""
    cancelled = getattr(streamer, "_cancelled", None)  # that of transformers; beams have none
    if cancelled is not None and cancelled.is_set():
        streamer.put(None)


class WholeStream(BaseStreamer):
    """A stream of transformers, which by itself never tells the end of an answer that is no whole character."""

    def __init__(self, streamer, asked: Asked):
        self.streamer, self.asked = streamer, asked
        self.told: list[str] = []
        self.tokens: list[int] = []
        self.has_prompt = False
        self._cancelled, self._enqueue = streamer._cancelled, streamer._enqueue
        streamer._enqueue = self.enqueue

    def put(self, value):
        self.streamer.put(value)
        if self.has_prompt:
            self.tokens.extend(value.tolist())
        self.has_prompt = True

    def put_loops(self, loops):
        self.asked.loops.extend(loops.tolist())

    def enqueue(self, item):
        if isinstance(item, str):
            self.told.append(item)
        self._enqueue(item)

    def end(self):
        self.asked.note_end(self.tokens)
        whole, told = self.streamer._tokenizer.decode(self.tokens, skip_special_tokens=True), "".join(self.told)
        if self.streamer._parser is None and whole.startswith(told) and whole != told:
            self._enqueue(whole[len(told) :])
        self.streamer.end()


class ModelOfRequest:
    """The model, whose `generate` shares its passes with other requests and runs as deep as this one asks."""

    def __init__(self, passes: SharedPasses):
        self.passes, self.asked = passes, _asked.get()
        self.until_cancelled = UntilCancelled()

    def __getattr__(self, name):
        return getattr(self.passes.model, name)

    def generate(self, streamer=None, **kwargs):
        config, length = kwargs["generation_config"], kwargs["input_ids"].shape[1]
        if streamer is not None:
            streamer = WholeStream(streamer, self.asked)
        elif config.num_beams in (None, 1):  # beams take no streamer
            streamer = self.until_cancelled
        if config.stop_strings:
            kwargs["stopping_criteria"] = [StopsInAnswer(kwargs["tokenizer"], config.stop_strings, length)]
            config.stop_strings = None
        settings = {**kwargs, **self.asked.fields, "return_dict_in_generate": True}
        try:
            result = self.passes.generate(streamer=streamer, check=partial(check_client, streamer), **settings)
        except (ValueError, TypeError, RuntimeError) as error:
            if streamer is None or streamer is self.until_cancelled:
                raise
            raise RuntimeError(json.dumps(str(error))[1:-1]) from error  # streams put it between quotes
        self.asked.loops[:] = result.token_loops[0].tolist()
        self.asked.note_end(result.sequences[0, length:].tolist())
        return result.sequences


class SharedGenerateManager(GenerateManager):
    """Runs requests, each in a thread of its own until the model is asked."""

    def __init__(self, passes: SharedPasses, max_loops: int):
        self.passes, self.max_loops, self.pool = passes, max_loops, ThreadPoolExecutor(MOST_THREADS)

    def generate_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
        self.check(inputs, gen_config, streams=True)
        return super().generate_streaming(ModelOfRequest(self.passes), processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
        self.check(inputs, gen_config)
        model = ModelOfRequest(self.passes)
        try:
            return await super().generate_non_streaming(model, processor, inputs, gen_config, *args, **kwargs)
        except asyncio.CancelledError:
            model.until_cancelled.cancel()
            raise
        except (ValueError, TypeError) as error:
            raise bad_request(error) from error
        except (IndexError, AttributeError, ImportError) as error:
            if not _asked.get().has_config:
                raise
            raise bad_request(ValueError(f"generation_config asks for what fails here: {error}")) from error

    def check(self, inputs, gen_config, streams: bool = False):
        """Before anything is computed or streamed."""
        asked, model = _asked.get(), self.passes.model
        rows, length = inputs["input_ids"].shape
        try:
            if length == 0:
                raise ValueError("the prompt is empty: write at least one token")
            room = model.config.max_position_embeddings + 1 - length  # the last token is not read again
            if not asked.has_length:
                gen_config.max_new_tokens = max(1, min(gen_config.max_new_tokens or NEW_TOKENS, room))
            prepared, _ = model._prepare_generation_config(gen_config, **asked.fields)
            check_answers(prepared, streams)
            if gen_config.max_new_tokens is None:  # a generation_config that says the length of prompt and answer
                if prepared.max_length <= length:
                    raise ValueError(
                        f"max_length={prepared.max_length} of generation_config leaves no room behind a prompt of "
                        f"{length} tokens: raise it, or say max_new_tokens"
                    )
                gen_config.max_new_tokens = prepared.max_length - length
            ends = prepared.eos_token_id
            asked.end_tokens = tuple(ends if isinstance(ends, list) else [ends])
            options = prepared.depth_options
            asked.full_depth = options.deepest(model.config)
            if asked.full_depth > self.max_loops:
                raise ValueError(
                    f"num_loops={asked.full_depth} is more than the {self.max_loops} that this server runs"
                )
            if asked.seed is not None and prepared.do_sample and not options.shares_passes:
                raise ValueError(f"seed={asked.seed} goes with plain sampling and exits that stop: leave it out")
            new_tokens = gen_config.max_new_tokens
            if new_tokens > room:
                raise ValueError(
                    f"a prompt of {length} tokens and max_tokens={new_tokens} are more than the "
                    f"max_position_embeddings={model.config.max_position_embeddings} of this model: shorten one"
                )
            self.passes.check_size(rows, rows * (length + new_tokens))
        except (ValueError, TypeError) as error:
            raise bad_request(error) from error
        asked.is_checked = True

    def submit(self, fn, *args, **kwargs) -> Future:
        return self.pool.submit(fn, *args, **kwargs)

    def async_submit(self, fn, *args, **kwargs) -> asyncio.Future:
        return asyncio.get_running_loop().run_in_executor(self.pool, partial(fn, *args, **kwargs))


def bad_request(error: Exception) -> HTTPException:
    return HTTPException(status_code=400, detail=str(error))


class OneModel(ModelManager):
    """The model that this server is for, under one name."""

    def __init__(self, name: str, model, tokenizer):
        self.force_model, self.model, self.tokenizer = name, model, tokenizer

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id  # without a revision

    def load_model_and_processor(self, *args, **kwargs):
        return self.model, self.tokenizer


class SharedState(GenerationState):
    def __init__(self, manager: SharedGenerateManager):
        super().__init__()
        self.manager = manager

    def get_manager(self, *args, **kwargs):
        return self.manager


SAY_LENGTH = ("max_tokens", "max_completion_tokens")


def has_length(config: Any) -> bool:
    """Whether the JSON of a generation config says how long the answer is."""
    try:
        fields = json.loads(config)
    except (TypeError, ValueError):  # refused later
        return False
    return isinstance(fields, dict) and any(fields.get(name) is not None for name in ("max_new_tokens", "max_length"))


class TakesDepth:
    """Mixed into a handler of transformers: fields of depth in the request, and loops in the answer."""

    async def handle_request(self, body: dict, request_id: str):
        fields = {name: body.pop(name) for name in DEPTH_FIELDS if name in body}
        config = body.get("generation_config")
        says_length = any(body.get(name) is not None for name in SAY_LENGTH) or has_length(config)
        asked = Asked(fields, body.pop("seed", None), says_length, config is not None)
        _asked.set(asked)
        try:
            check_body({**body, "seed": asked.seed})
            if isinstance(prompt := body.get("prompt"), list):  # some clients send one so
                body = {**body, "prompt": prompt[0]}
            return await super().handle_request(body, request_id)  # pyrefly: ignore[missing-attribute]
        except HTTPException:
            raise
        except Exception as error:
            if asked.is_checked:
                raise
            raise bad_request(error) from error  # of what prepares it, as templates

    def _build_generation_config(self, body: dict, *args, **kwargs):
        config = super()._build_generation_config(body, *args, **kwargs)  # pyrefly: ignore[missing-attribute]
        if body.get("temperature") is not None:  # without sampling it would change nothing
            config.do_sample = float(body["temperature"]) != 0
        elif body.get("top_p") not in (None, 1):
            config.do_sample = True
        if (bias := body.get("logit_bias")) is not None:  # left out of completions otherwise, and refused as integers
            config.sequence_bias = {(int(token),): float(value) for token, value in bias.items()} or None
        if config.top_k is None:  # transformers would sample of the 50 likeliest
            config.top_k = 0
        config._seed = _asked.get().seed
        config.stop_strings = config.stop_strings or None
        check_stop(self.model_manager.tokenizer, config.stop_strings)  # pyrefly: ignore[missing-attribute]
        _asked.get().stops = StopTexts(config.stop_strings)
        return config

    async def _non_streaming(self, *args, **kwargs):
        response = await super()._non_streaming(*args, **kwargs)  # pyrefly: ignore[missing-attribute]
        body = json.loads(response.body)
        _asked.get().finish(body["choices"][0], is_last=True)
        return JSONResponse({**body, **_asked.get().fields_of_loops()})

    def _build_chunk_sse(self, *args, finish_reason=None, **kwargs) -> str:
        line = super()._build_chunk_sse(*args, finish_reason=finish_reason, **kwargs)  # pyrefly: ignore
        asked, is_last = _asked.get(), finish_reason is not None
        if not (is_last or asked.stops.texts):
            return line
        chunk = json.loads(line.removeprefix("data: "))
        asked.finish(chunk["choices"][0], is_last)
        return f"data: {json.dumps({**chunk, **(asked.fields_of_loops() if is_last else {})})}\n\n"


class Chat(TakesDepth, ChatCompletionHandler):
    async def handle_request(self, body: dict, request_id: str):
        if not self.model_manager.tokenizer.chat_template:
            raise bad_request(ValueError("this model's tokenizer has no chat template: use /v1/completions"))
        try:
            check_conversation(body.get("messages"))
            check_tools(body.get("tools"), self.model_manager.tokenizer.chat_template)
        except ValueError as error:
            raise bad_request(error) from error
        return await super().handle_request(body, request_id)


class Completions(TakesDepth, CompletionHandler):
    pass


def build_app(name: str, model, tokenizer, passes: SharedPasses, max_loops: int | None = None) -> FastAPI:
    """max_loops: the deepest that a request may ask for; None is 4 times the model's own depth."""
    app, started = FastAPI(title=name), int(time.time())
    app.add_middleware(
        LimitedSize, most_bytes=max(LEAST_BYTES, BYTES_PER_TOKEN * model.config.max_position_embeddings)
    )
    manager = SharedGenerateManager(passes, 4 * model.config.num_loops if max_loops is None else max_loops)
    one, state = OneModel(name, model, tokenizer), SharedState(manager)
    chat, completions = Chat(one, state), Completions(one, state)

    @app.exception_handler(StarletteHTTPException)  # of which that of FastAPI is one
    async def as_clients_read_it(_: Request, error: StarletteHTTPException):
        return error_response(400 if error.status_code == 422 else error.status_code, error.detail)

    @app.exception_handler(RequestValidationError)
    async def not_json(_: Request, error: RequestValidationError):
        reasons = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        return error_response(400, "; ".join(reasons))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception):
        return error_response(500, f"{type(error).__name__}: {error}", "server_error")

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
        "num_loops": model.config.num_loops,
    }

    @app.get("/v1/models")
    def models():
        return {"object": "list", "data": [described]}

    @app.get("/v1/models/{asked:path}")
    def one_model(asked: str):
        if asked != name:
            raise HTTPException(404, f"there is no model {asked!r} here, only {name!r}")
        return described

    @app.get("/health")
    def health():
        return {"status": "ok"}

    return app


def check_free(host: str, port: int):
    """Before the model is loaded, which may take long."""
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
    model = LoopedForCausalLM.from_pretrained(folder, dtype=args.dtype, **asked).to(args.device).eval()
    max_tokens = args.max_tokens or args.max_rows * model.config.max_position_embeddings
    with SharedPasses(model, args.max_rows, max_tokens) as passes:
        app = build_app(args.name or args.model, model, tokenizer, passes, args.max_loops)
        uvicorn.run(app, host=args.host, port=args.port, timeout_graceful_shutdown=args.grace)
