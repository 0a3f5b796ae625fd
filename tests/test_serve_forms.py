"""Answers of a form that the request asks for: JSON, and JSON of a schema."""

import json

import pytest
import torch

from tests.helpers import tiny_model
from tests.test_serve import TURNS, byte_level_tokenizer, check_refused, openai, serving, tiny_tokenizer


grammars = pytest.importorskip("looped_eval.serve.grammars")
pytest.importorskip("llguidance")

WORDS = ["ab", "abc", "a b", "cab"]
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": WORDS}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
EXITS = {"num_loops": 6, "exit_criterion": "latent_diff", "exit_threshold": 0.5}


def form(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def tokenizer_with_end():
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    return tokenizer


@pytest.fixture(scope="module")
def served():
    tokenizer = tokenizer_with_end()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    model = tiny_model(vocab_size=len(tokenizer) + 3, num_loops=4, max_position_embeddings=120, **ends).double()
    with serving(model, tokenizer) as parts:
        yield parts


def naive(model, tokenizer, prompt: str, texts: list[str], depth: dict) -> str:
    """Choose the best token again and again, of those with which the answer can still become one of the texts."""
    ids, answer = tokenizer(prompt, return_tensors="pt").input_ids, ""
    while answer not in texts or any(text.startswith(answer) and text != answer for text in texts):
        logits = model(ids, **depth).logits[0, -1]
        words = {token: tokenizer.decode([token]) for token in range(len(tokenizer) - 1)}
        fits = [token for token, word in words.items() if any(text.startswith(answer + word) for text in texts)]
        fits += [tokenizer.eos_token_id] if answer in texts else []
        best = max(fits, key=lambda token: logits[token])
        if best == tokenizer.eos_token_id:
            break
        ids, answer = torch.cat([ids, torch.tensor([[best]])], 1), answer + words[best]
    return answer


@pytest.mark.parametrize("depth", [{}, {"num_loops": 2}])
def test_the_answer_is_the_best_of_those_that_have_the_form(served, depth):
    model, tokenizer, client, *_ = served
    texts = [json.dumps(word) for word in WORDS]
    for prompt in ("a b", "c", "abc"):
        asked = {"response_format": form({"enum": WORDS}), **depth}
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=20, extra_body=asked)
        assert answer.choices[0].text == naive(model, tokenizer, prompt, texts, depth)
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "seed": 5}, {"extra_body": EXITS}])
def test_conversations_answer_in_the_form(served, more, stream):
    answer = served[2].chat.completions.create(
        model="tiny", messages=TURNS, max_tokens=100, response_format=form(PERSON), stream=stream, **more
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
    person = json.loads(text)
    assert list(person) == ["name", "age"] and person["name"] in WORDS and 10 <= person["age"] <= 99


def test_every_answer_has_a_form_of_its_own(served):
    answer = served[2].chat.completions.create(
        model="tiny", messages=TURNS, max_tokens=100, response_format=form(PERSON), temperature=1.0, n=3, seed=1
    )
    assert all(json.loads(choice.message.content)["name"] in WORDS for choice in answer.choices)


def test_any_object_will_do(served):
    asked = {"model": "tiny", "messages": TURNS, "max_tokens": 8, "response_format": {"type": "json_object"}}
    assert served[2].chat.completions.create(**asked).choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    "body, message",
    [
        ({"response_format": "json"}, "response_format='json' must be an object whose type is text, json_ob"),
        ({"response_format": {"type": "json_schema"}}, 'must have the form .*"json_schema": {"name"'),
        ({"response_format": form({"type": "words"})}, "schema that cannot be kept: Invalid type: words"),
        ({"response_format": form(PERSON), "draft_loops": 1}, "does not go with draft_loops=1: leave one out"),
        (
            {"response_format": form(PERSON), "generation_config": '{"num_beams": 2}'},
            "response_format does not go with beam search: leave one out",
        ),
        (
            {"response_format": form(PERSON), "generation_config": '{"prompt_lookup_num_tokens": 2}'},
            "response_format does not go with assisted generation: leave one out",
        ),
        (
            {"response_format": form(PERSON), "generation_config": '{"eos_token_id": -1}'},
            "response_format needs a token that ends the answer, and eos_token_id is -1",
        ),
    ],
)
def test_forms_that_are_refused(served, body, message):
    check_refused(served, body, message)


def test_a_tokenizer_whose_bytes_are_unknown():
    with pytest.raises(ValueError, match="response_format does not go with this model's tokenizer: can't determine"):
        grammars.words_of(tiny_tokenizer(), 30, (2,))


def test_a_server_without_the_package(served, monkeypatch):
    monkeypatch.setattr(grammars, "LLMatcher", None)
    check_refused(served, {"response_format": form(PERSON)}, "needs the package llguidance")


def test_helpers_of_openai(served):
    pydantic = pytest.importorskip("pydantic")

    class Person(pydantic.BaseModel):
        name: str
        age: int

    asked = {"model": "tiny", "messages": TURNS, "max_tokens": 100, "response_format": Person, "temperature": 1.0}
    for seed in range(20):  # a random model writes a name that has no end in most answers
        try:
            answer = served[2].chat.completions.parse(**asked, seed=seed)
        except openai.LengthFinishReasonError:
            continue
        assert isinstance(answer.choices[0].message.parsed.age, int)
        return
    pytest.fail("no answer ended")
