"""Handlers of transformers, extended by depth fields in requests and the loops of tokens in answers."""

import asyncio
import json
from collections.abc import Callable
from copy import copy

from fastapi import HTTPException
from fastapi.responses import JSONResponse, Response
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import GenerationState, ReasoningText, ToolCall
from transformers.utils.chat_parsing import ResponseParser

from .asked import Asked, current_request
from .grammars import Form, form_of_schema, vocabulary
from .http import with_whole_errors
from .likelihoods import Likelihood, of_chat, of_completion
from .request_checks import (
    check_body,
    check_conversation,
    check_names,
    check_several,
    check_stop,
    check_tools,
    read_arguments,
)
from .several import all_or_none, joined, one_by_one
from .shared_generation import SharedGenerateManager, bad_request
from .stop_texts import StopTexts
from .tool_choice import form_asked, form_of_call


class OneModel(ModelManager):
    """Returns the one model of this server for every request."""

    def __init__(self, name: str, model, tokenizer):
        self.force_model, self.model, self.tokenizer = name, model, copy(tokenizer)
        self.tokenizer.parse_response = self.parse_response  # that of the class fails at a tool call that is cut off
        vars(self.tokenizer).setdefault("_tokenizer", None)  # a slow one has none, and streamers are given it, unread
        self.of_forms = copy(tokenizer)  # JSON may hold the texts by which a template parts an answer
        self.of_forms.response_template = None

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id  # no revision is appended

    def load_model_and_processor(self, *args, **kwargs):
        form = current_request.get().form
        return self.model, self.tokenizer if form is None or form.may_call else self.of_forms

    def form_of(self, schema: dict | None, functions: list[dict]) -> Form:
        words = vocabulary(self.of_forms, self.model)
        form = None if schema is None else form_of_schema(schema, words)  # so that errors name it
        return form_of_call(functions, self.tokenizer, words, schema) if functions else form

    def parse_response(self, ids, template, **how) -> dict:
        """Return the fields of a whole answer in a conversation, with the tool calls that a stream would tell."""
        asked, parser = current_request.get(), ResponseParser(template, **how)
        asked.stops = StopTexts(asked.stops.texts)  # it has searched the text without special tokens
        told = asked.parts(self.tokenizer, [], parser).whole(ids.tolist())
        calls = [{"function": vars(part)} for part in told if isinstance(part, ToolCall)]
        thoughts = "".join(part for part in told if isinstance(part, ReasoningText))
        content = "".join(part for part in told if type(part) is str)
        # of the two names of thoughts, each version of transformers reads its own
        fields = {"content": content, "reasoning_content": thoughts, "thinking": thoughts, "tool_calls": calls}
        return {name: value for name, value in fields.items() if value}


class SharedState(GenerationState):
    def __init__(self, manager: SharedGenerateManager):
        super().__init__()
        self.manager = manager

    def get_manager(self, *args, **kwargs):
        return self.manager


class TakesDepth:
    """Mixin for a handler of transformers: reads depth fields of the request and adds loops to the answer."""

    of_likelihoods: Callable[[list[Likelihood]], dict]  # converts them to the format of the API

    async def handle_request(self, body: dict, request_id: str):
        try:
            check_body(body, self.model_manager.model.config)  # pyrefly: ignore[missing-attribute]
            bodies = one_by_one(body)
            check_several(body, len(bodies))
            form, asked = None, form_asked(body)
            if asked != (None, []):
                one = self.model_manager  # pyrefly: ignore[missing-attribute]
                form = await asyncio.to_thread(one.form_of, *asked)  # other requests go on meanwhile
        except (ValueError, RecursionError) as error:
            raise bad_request(error) from error
        if len(bodies) == 1:
            return await self.handle_one(bodies[0], request_id, form)
        answers = await all_or_none(lambda one: self.handle_one(one, request_id, form), bodies)
        return joined(answers, body.get("n") or 1)

    async def handle_one(self, body: dict, request_id: str, form: Form | None) -> Response:
        asked = Asked.taken_from(body, form)
        current_request.set(asked)
        try:
            check_names(body, self._valid_params_class.__mutable_keys__)  # pyrefly: ignore[missing-attribute]
            return await super().handle_request(body, request_id)  # pyrefly: ignore[missing-attribute]
        except HTTPException:
            raise
        except Exception as error:
            if asked.is_checked:
                raise
            raise bad_request(error) from error  # from preparing the request, e.g. a chat template

    def _build_generation_config(self, body: dict, saved, *args, **kwargs):
        read = {**body, "frequency_penalty": None}  # even 0 would replace the repetition_penalty
        config = super()._build_generation_config(read, saved, *args, **kwargs)  # pyrefly: ignore[missing-attribute]
        if body.get("temperature") is not None:  # it has an effect only with sampling
            config.do_sample = float(body["temperature"]) != 0
        elif body.get("top_p") not in (None, 1):
            config.do_sample = True
        if (bias := body.get("logit_bias")) is not None:  # transformers drops it in completions and refuses integers
            config.sequence_bias = {(int(token),): float(value) for token, value in bias.items()} or None
        samples = saved.do_sample if config.do_sample is None else config.do_sample
        if config.top_k is None and samples:  # else transformers would sample from the 50 likeliest
            config.top_k = saved.top_k or 0
        config._seed = current_request.get().seed
        check_stop(self.model_manager.tokenizer, config.stop_strings)  # pyrefly: ignore[missing-attribute]
        config.stop_strings = config.stop_strings or None
        current_request.get().stops = StopTexts(config.stop_strings)
        return config

    async def _non_streaming(self, *args, **kwargs):
        response = await super()._non_streaming(*args, **kwargs)  # pyrefly: ignore[missing-attribute]
        asked, body = current_request.get(), json.loads(response.body)
        choice = body["choices"][0]
        asked.finish(choice)
        if asked.likeliest is not None:
            choice["logprobs"] = self.of_likelihoods(asked.likelihoods_before_stop())
        if asked.echoes:
            choice["text"] = asked.text_of_prompt(self.model_manager.tokenizer) + choice["text"]  # pyrefly: ignore
        if asked.is_prompt_alone:
            choice["finish_reason"] = "length"
        return JSONResponse({**body, **asked.fields_of_loops()})

    def _streaming(self, *args, **kwargs):
        response = super()._streaming(*args, **kwargs)  # pyrefly: ignore[missing-attribute]
        response.body_iterator = with_whole_errors(response.body_iterator)
        return response

    def _build_chunk_sse(self, *args, finish_reason=None, **kwargs) -> str:
        line = super()._build_chunk_sse(*args, finish_reason=finish_reason, **kwargs)  # pyrefly: ignore
        if finish_reason is None:
            return line
        asked, chunk = current_request.get(), json.loads(line.removeprefix("data: "))
        asked.finish(chunk["choices"][0])
        return f"data: {json.dumps({**chunk, **asked.fields_of_loops()})}\n\n"


class Chat(TakesDepth, ChatCompletionHandler):
    of_likelihoods = staticmethod(of_chat)

    async def handle_request(self, body: dict, request_id: str):
        if not self.model_manager.tokenizer.chat_template:
            raise bad_request(ValueError("this model's tokenizer has no chat template: use /v1/completions"))
        if body.get("tool_choice") == "none":
            body.pop("tools", None)  # the model does not see them
        try:
            check_conversation(body.get("messages"))
            read_arguments(body["messages"])
            check_tools(body.get("tools"), self.model_manager.tokenizer.chat_template)
        except ValueError as error:
            raise bad_request(error) from error
        if body.get("chat_template_kwargs") is None:
            body.pop("chat_template_kwargs", None)
        return await super().handle_request(body, request_id)


class Completions(TakesDepth, CompletionHandler):
    of_likelihoods = staticmethod(of_completion)
