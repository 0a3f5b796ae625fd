"""Which tools an answer may call, and which it must."""

import pytest

from tests.helpers import tiny_model
from tests.test_serve import byte_level_tokenizer, serving


TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[-1].content }}<start>"
CALLS = {"open": "<call>", "close": "</call>", "content": "json", "transform": {"function": "{content}"}}
PARTED = {"start_anchor": "<start>", "fields": {"tool_calls": CALLS, "content": {"close": "<end>"}}}
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}


def tool(name: str, **fields) -> dict:
    return {"type": "function", "function": {"name": name, **fields}}


@pytest.fixture(scope="module")
def served():
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<end>", "additional_special_tokens": ["<call>"]})
    tokenizer.response_template = PARTED
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    model = tiny_model(vocab_size=len(tokenizer) + 3, num_loops=2, max_position_embeddings=300, **ends).double()
    with serving(model, tokenizer, template=TEMPLATE) as (_, _, client, *_):
        yield tokenizer, client


def test_tools_that_may_not_be_called_are_not_shown(served):
    tokenizer, client = served
    sizes = {}
    for choice in ("none", "auto"):
        answer = client.chat.completions.create(**ASKED, tools=[tool("bc")], tool_choice=choice, max_tokens=1)
        sizes[choice] = answer.usage.prompt_tokens
    assert sizes == {"none": len(tokenizer("a<start>").input_ids), "auto": len(tokenizer("bc a<start>").input_ids)}
