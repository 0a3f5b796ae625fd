"""Answers that must call a tool, or may where else they keep to a schema. A call has the form that the
response_template of the tokenizer reads as one."""

import json
import re
from typing import Any

from transformers.cli.serving.utils import ToolCall

from .answer_parts import AnswerParts, parser_behind
from .grammars import Form, json_rule, matcher_of_rule, schema_of
from .stop_texts import StopTexts


NAMED = '{"type": "function", "function": {"name": ...}}'
# white space that a model may be used to write around the call; readers of JSON skip it
SPACE = "\nSPACE: /[ \\n]{0,2}/"

WITHOUT_CALLS = {
    "tool_choice": ("tool_choice can force no call", 'pass tool_choice="auto"'),
    "response_format": (
        "an answer that keeps to response_format could call no tool",
        'leave it or the tools out, or pass tool_choice="none"',
    ),
}


def form_asked(body: dict) -> tuple[dict | None, list[dict]]:
    """Return the schema of the answer and the functions of which it may call one instead; without a schema it must,
    and with neither any answer will do. Tools are checked."""
    schema, choice = schema_of(body.get("response_format")), body.get("tool_choice")
    functions = [tool["function"] for tool in body.get("tools") or ()]
    if choice in (None, "none", "auto"):
        return schema, [] if schema is None else functions
    return None, functions_to_call(choice, functions)


def functions_to_call(choice: Any, functions: list[dict]) -> list[dict]:
    """Return the functions of which the answer must call one."""
    name = name_in(choice)
    if choice != "required" and name is None:
        raise ValueError(f"tool_choice={choice!r} must be none, auto, required or {NAMED}")
    chosen = [function for function in functions if name in (None, function["name"])]
    if not chosen:
        names = ", ".join(function["name"] for function in functions) or "none"
        raise ValueError(f"tool_choice={choice!r} needs a tool that is among the tools, which are {names}: pass it")
    return chosen


def name_in(choice: Any) -> str | None:
    """Return the name of the function that a tool_choice names, if it names one."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def form_of_call(functions: list[dict], tokenizer, words, schema: dict | None = None) -> Form:
    """Return the form of an answer that calls one of these functions, or keeps to the schema if there is one."""
    template = getattr(tokenizer, "response_template", None) or {}
    field = template.get("fields", {}).get("tool_calls", {})
    begin, end = text_of(field, "open"), text_of(field, "close")
    calls = []
    for function in functions:
        arguments = json_rule({**(function.get("parameters") or {"additionalProperties": False}), "type": "object"})
        try:
            matcher_of_rule(arguments, words)
        except ValueError as error:
            raise ValueError(f"the parameters of the tool {function['name']!r} have {error}") from error
        calls.append(f'{json.dumps(head(function))} {arguments} "}}"')
    rule = f"{rule_of(begin, tokenizer)} SPACE ({' | '.join(calls)}) SPACE {rule_of(end, tokenizer)}"
    if schema is not None:
        rule += f" | {json_rule(schema)}"
    field = "tool_choice" if schema is None else "response_format"
    example = f"{begin}{head(functions[0])}{{}}}}{end}"
    return Form(field, matcher_of_rule(rule + SPACE, words), begin.strip(), example)


def head(function: dict) -> str:
    """Return the text of a call that stands before its arguments."""
    return f'{{"name": {json.dumps(function["name"])}, "arguments": '


def text_of(field: dict, name: str) -> str:
    """Return a text by which a field opens or closes, without the white space that a pattern allows. A pattern of more
    than that does not match it, which `check_call_is_read` sees."""
    texts = field.get(name, field.get(f"{name}_pattern", "").replace(r"\s*", ""))
    return texts if isinstance(texts, str) else texts[0]


def rule_of(text: str, tokenizer) -> str:
    """Return a rule for a text. The special tokens in it are named, since grammars write texts without such tokens."""
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)


def check_call_is_read(form: Form, tokenizer, prompt: list[int]):
    """Refuse a form whose call would not be read as one behind this prompt, which may have opened thoughts."""
    parser = parser_behind(tokenizer, prompt)
    told = [] if parser is None else AnswerParts(None, StopTexts(None), parser).read(form.example, is_last=True)
    if len(told) != 1 or not isinstance(told[0], ToolCall) or told[0].arguments != "{}":
        fails, instead = WITHOUT_CALLS[form.field]
        raise ValueError(
            f"{fails} here: behind this prompt the response_template of the model's tokenizer does not read "
            f"{form.example!r} as a call; {instead}"
        )
