"""Requests for several answers: each answer is computed as a separate request, and all share the model's passes."""

import asyncio
import json
from collections.abc import Awaitable, Callable

from fastapi.responses import JSONResponse, Response

from .request_checks import is_prompt


OF_LOOPS = ("token_loops", "saved_percent")  # fields of an answer about its loops


def prompts_of(body: dict) -> list[str | list[int]]:
    """Return the prompts of a completion request; `prompt` is a text, a list of token numbers, or a list of these."""
    return [body["prompt"]] if is_prompt(body["prompt"]) else body["prompt"]


def one_by_one(body: dict) -> list[dict]:
    """Split a request into one per prompt and answer. Answer i to a prompt has seed + i, or all would be equal."""
    body = dict(body)
    count, seed = body.pop("n", None) or 1, body.get("seed")
    prompts = [{"prompt": prompt} for prompt in prompts_of(body)] if "prompt" in body else [{}]
    seeds = [{} if seed is None else {"seed": seed + i} for i in range(count)]
    return [{**body, **prompt, **own} for prompt in prompts for own in seeds]


async def all_or_none(answer: Callable[[dict], Awaitable[Response]], bodies: list[dict]) -> list[Response]:
    tasks = [asyncio.ensure_future(answer(body)) for body in bodies]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise


def joined(responses: list[Response], answers_each: int) -> JSONResponse:
    """Join answers into one with all choices. Each choice has the fields about its loops."""
    bodies = [json.loads(response.body) for response in responses]
    choices = [
        {**body["choices"][0], "index": i, **{name: body[name] for name in OF_LOOPS}} for i, body in enumerate(bodies)
    ]
    prompt = sum(body["usage"]["prompt_tokens"] for body in bodies[::answers_each])
    answer = sum(body["usage"]["completion_tokens"] for body in bodies)
    usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    told = {name: value for name, value in bodies[0].items() if name not in OF_LOOPS}
    return JSONResponse({**told, "choices": choices, "usage": usage})
