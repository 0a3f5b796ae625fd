"""Which tools an answer may call, and which it must."""

import json
import re
from copy import copy

import pytest

from tests.helpers import tiny_model
from tests.test_serve import byte_level_tokenizer, openai, serving
from tests.test_serve_forms import form, no_blanks


pytest.importorskip("llguidance")
grammars = pytest.importorskip("looped_eval.serve.grammars")
tool_choice = pytest.importorskip("looped_eval.serve.tool_choice")

TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[-1].content }}<start>"
TEMPLATE += "{% if thinks %}<think>{% endif %}"
CALLS = {"open": "<call>", "close": "</call>", "content": "json", "transform": {"function": "{content}"}}
THOUGHTS = {"open": "<think>", "close": "</think>"}
FIELDS = {"tool_calls": CALLS, "thinking": THOUGHTS, "content": {"close": "<end>"}}
PLACE = {"type": "object", "properties": {"place": {"$ref": "#/$defs/place"}}, "required": ["place"]}
PLACE |= {"additionalProperties": False, "$defs": {"place": {"enum": ["ab", "abc"]}}}
AGE = {"properties": {"age": {"type": "integer", "minimum": 10, "maximum": 99}}, "required": ["age"]}
AGE |= {"additionalProperties": False}
# JSON may hold what a template reads
TEXTS = ["ab", '<call>{"name": "c", "arguments": {}}</call>', "<think>b</think>"]
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}


def tool(name: str, **fields) -> dict:
    return {"type": "function", "function": {"name": name, **fields}}


@pytest.fixture(scope="module")
def served():
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<end>", "additional_special_tokens": ["<call>"]})
    tokenizer.response_template = {"start_anchor": "<start>", "fields": FIELDS}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": len(tokenizer) + 3, "num_core_layers": 1, "num_loops": 2, "max_position_embeddings": 300}
    model = tiny_model(**sizes, **ends).double()
    with serving(model, tokenizer, template=TEMPLATE) as (_, _, client, *_):
        yield tokenizer, client


# arguments are an object, whatever the type says
TOOLS = [tool("bc", parameters=PLACE, strict=True), tool("age", parameters={"type": "array", **AGE}), tool("c")]
ARGUMENTS = {"bc": [{"place": "ab"}, {"place": "abc"}], "age": [{"age": age} for age in range(10, 100)], "c": [{}]}


def told(client, stream: bool, **asked):
    """Return the content, the names and arguments of the calls, and why the answer ended."""
    answer = client.chat.completions.create(**{**ASKED, "max_tokens": 150, **asked}, stream=stream)
    choices = [part.choices[0] for part in answer] if stream else answer.choices
    said = [choice.delta if stream else choice.message for choice in choices]
    calls = [call.function for part in said for call in part.tool_calls or ()]
    content = "".join(part.content or "" for part in said)
    return content, [(call.name, json.loads(call.arguments)) for call in calls], choices[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", [None, "bc", "age", "c"])
def test_a_tool_that_must_be_called(served, name, stream):
    """Whatever the model, which has random weights: one of the tools, or the one that is named."""
    choice, found = "required" if name is None else tool(name), set()
    asked = {"tools": TOOLS, "tool_choice": choice, "temperature": 2.0, "logit_bias": no_blanks(served[0])}
    for seed in range(6 if name is None else 1):
        content, [(called, arguments)], reason = told(served[1], stream, seed=seed, **asked)
        assert content == "" and arguments in ARGUMENTS[called]
        assert reason == ("tool_calls" if name is None else "stop")  # as OpenAI's servers do
        found.add(called)
    assert found == {name} or name is None and len(found) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_or_the_answer_has_the_form(served, stream):
    """As OpenAI's servers have it where a request has both. A tool that must be called leaves the form no effect."""
    asked = {"tools": TOOLS, "temperature": 2.0, "logit_bias": no_blanks(served[0])}
    asked["response_format"], reasons = form({"enum": TEXTS}), set()
    for seed in range(8):
        content, calls, reason = told(served[1], stream, seed=seed, **asked)
        if calls:
            [(called, arguments)] = calls
            assert content == "" and arguments in ARGUMENTS[called]
        else:
            assert json.loads(content) in TEXTS
        reasons.add(reason)
    assert reasons == {"tool_calls", "stop"}
    assert told(served[1], stream, seed=0, tool_choice="required", **asked)[1]
    assert not told(served[1], stream, seed=0, tool_choice="none", **asked)[1]


def test_tools_that_may_not_be_called_are_not_shown(served):
    tokenizer, client = served
    sizes = {}
    for choice in ("none", "auto"):
        answer = client.chat.completions.create(**ASKED, tools=[tool("bc")], tool_choice=choice, max_tokens=1)
        sizes[choice] = answer.usage.prompt_tokens
    assert sizes == {"none": len(tokenizer("a<start>").input_ids), "auto": len(tokenizer("bc a<start>").input_ids)}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tool_choice": "any"}, "tool_choice='any' must be none, auto, required or .*name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice=.*allowed_tools.* must be none, auto"),
        ({"tool_choice": tool("d")}, "needs a tool that is among the tools, which are bc, age, c: pass it"),
        ({"tool_choice": "required", "tools": []}, "among the tools, which are none: pass it"),
        (
            {"tools": [tool("f", parameters={"$ref": "#/a"})]},
            "parameters of the tool 'f' have a schema that cannot",
        ),
        ({"extra_body": {"draft_loops": 1}}, "tool_choice does not go with draft_loops=1: leave one out"),
        ({"extra_body": {"chat_template_kwargs": {"thinks": True}}}, "does not read '<call>.*auto"),
        (
            {
                "tool_choice": "auto",
                "response_format": form({}),
                "extra_body": {"chat_template_kwargs": {"thinks": 1}},
            },
            "an answer that keeps to response_format could call no tool here: .*does not read.*leave it or the tools",
        ),
        (
            {"tool_choice": "auto", "response_format": form({"type": "words"})},
            "response_format has a schema that cannot be kept: Invalid type: words",
        ),
    ],
    ids=range(9),
)
@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_cannot_be_forced(served, asked, message, stream):
    asked = {"tools": TOOLS, "tool_choice": "required", **asked}
    with pytest.raises(openai.BadRequestError) as error:
        told(served[1], stream, **asked)
    assert re.search(message, error.value.body["message"])


@pytest.mark.parametrize(
    ("changed", "is_read"),
    [
        ({"open": ["<call>", "<other>"]}, True),
        ({"open": None, "open_pattern": r"\s*<call>\s*"}, True),
        ({"open": None, "open_pattern": "<call(?P<number>[0-9])>"}, False),
        ({"content": "text"}, False),
        ({"transform": {"function": {"name": "{content.name}", "arguments": "{content.parameters}"}}}, False),
    ],
    ids=range(5),
)
def test_templates_of_calls(served, changed, is_read):
    tokenizer = copy(served[0])
    calls = {name: value for name, value in {**CALLS, **changed}.items() if value is not None}
    tokenizer.response_template = {"start_anchor": "<start>", "fields": {**FIELDS, "tool_calls": calls}}
    words = grammars.words_of(served[0], len(tokenizer) + 3, (tokenizer.eos_token_id,))
    form = tool_choice.form_of_call([tool("f", parameters=AGE)["function"]], tokenizer, words)
    if is_read:
        ids = tokenizer('<call>{"name": "f"').input_ids
        assert form.matcher.deep_copy().try_consume_tokens(ids) == len(ids)
        return tool_choice.check_call_is_read(form, tokenizer, [])
    with pytest.raises(ValueError, match="the response_template of the model's tokenizer does not read"):
        tool_choice.check_call_is_read(form, tokenizer, [])
