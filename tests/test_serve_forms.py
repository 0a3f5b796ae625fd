"""Answers of a form that the request asks for: JSON, and JSON of a schema."""

import json
from typing import Literal

import pytest
import torch
from tokenizers import normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import test_serve
from tests.helpers import tiny_model
from tests.test_serve import TURNS, byte_level_tokenizer, check_refused, serving, tiny_tokenizer


pytest.importorskip("llguidance")
grammars = pytest.importorskip("looped_eval.serve.grammars")
handlers = pytest.importorskip("looped_eval.serve.handlers")

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


def content(client, stream: bool, **asked) -> str:
    found = client.chat.completions.create(model="tiny", messages=TURNS, stream=stream, **asked)
    if stream:
        return "".join(chunk.choices[0].delta.content or "" for chunk in found)
    return found.choices[0].message.content


def tokenizer_with_end() -> PreTrainedTokenizerFast:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    return tokenizer


def no_blanks(tokenizer) -> dict[str, int]:
    """Of white space much may stand in JSON."""
    return {str(token): -100 for text in " \n\r\t" for token in tokenizer(text).input_ids}


@pytest.fixture(scope="module")
def served():
    tokenizer = tokenizer_with_end()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": len(tokenizer) + 3, "num_core_layers": 1, "num_loops": 3, "max_position_embeddings": 120}
    model = tiny_model(**sizes, **ends).double()
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


def test_the_server_reads_its_vocabulary_when_it_starts(served):
    model, tokenizer, *_ = served
    before = grammars.words_of.cache_info().misses
    with serving(model, tokenizer) as (_, _, client, *_):
        assert grammars.words_of.cache_info().misses == before + 1
        asked = {"response_format": form({"enum": WORDS})}
        assert client.completions.create(model="tiny", prompt="a", max_tokens=9, extra_body=asked).choices
    assert grammars.words_of.cache_info().misses == before + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "seed": 5}, {"extra_body": EXITS}])
def test_conversations_answer_in_the_form(served, more, stream):
    _, tokenizer, client, *_ = served
    asked = {"max_tokens": 100, "response_format": form(PERSON), "logit_bias": no_blanks(tokenizer), **more}
    person = json.loads(content(client, stream, **asked))
    assert list(person) == ["name", "age"] and person["name"] in WORDS and 10 <= person["age"] <= 99


def test_every_answer_has_a_form_of_its_own(served):
    schema = {**PERSON, "title": "read once", "x-guidance": 5}  # llguidance's own key, which is set here
    before = grammars.matcher_of_rule.cache_info().misses
    _, tokenizer, client, *_ = served
    asked = {"response_format": form(schema), "logit_bias": no_blanks(tokenizer), "temperature": 1.0, "n": 3}
    answer = client.chat.completions.create(model="tiny", messages=TURNS, max_tokens=100, **asked)
    assert all(json.loads(choice.message.content)["name"] in WORDS for choice in answer.choices)
    assert grammars.matcher_of_rule.cache_info().misses == before + 1


def test_a_model_that_repeats_white_space_does_not_fill_its_answer_with_it(served):
    one = form({"type": "array", "items": {"enum": [1]}, "minItems": 1, "maxItems": 1})
    for blank in " \n":
        bias = {str(served[1](blank).input_ids[0]): 100}
        assert json.loads(content(served[2], False, max_tokens=50, response_format=one, logit_bias=bias)) == [1]


@pytest.mark.parametrize("how", [{}, {"separators": (",", ":")}, *({"indent": size} for size in (1, 2, 4, "\t"))])
def test_json_may_be_written_in_every_usual_way(served, how):
    model, tokenizer, *_ = served
    text = json.dumps({"a": [1, {"b": []}], "c": {}}, **how)
    matcher = grammars.form_of_schema({"type": "object"}, grammars.vocabulary(tokenizer, model)).matcher.deep_copy()
    assert matcher.consume_tokens(tokenizer(text).input_ids) and matcher.is_accepting()


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
            "goes with the model's own eos_token_id=260, not with -1: leave it out",
        ),
        (
            {"response_format": form({"enum": WORDS}), "generation_config": '{"min_new_tokens": 9}', "max_tokens": 9},
            "generation_config forbids all tokens with which the answer keeps to response_format",
        ),
        ({"response_format": form({"pattern": "("})}, r"regex parse error:\n +\(\n +\^\nerror: unclosed group$"),
        ({"response_format": form({"$ref": "#"})}, "schema that cannot be kept: it refers to itself alone$"),
    ],
)
def test_forms_that_are_refused(served, body, message):
    check_refused(served, body, message)


def test_a_schema_that_is_too_large_is_not_the_fault_of_the_answer(served):
    choices = [{"type": "object", "properties": {f"a{i}": {"type": "integer"}}} for i in range(400)]
    check_refused(served, {"response_format": form({"anyOf": choices})}, "a schema too large to keep: .*max is 2000")


def test_a_tokenizer_whose_bytes_are_unknown():
    with pytest.raises(
        ValueError, match="form of the answer does not go with this model's tokenizer: can't determine"
    ):
        grammars.words_of(tiny_tokenizer(), 30, (2,))


def spaced() -> PreTrainedTokenizerFast:
    tokenizer = tokenizer_with_end()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def lowered() -> PreTrainedTokenizerFast:
    tokenizer = tokenizer_with_end()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


@pytest.mark.parametrize("make", [tokenizer_with_end, spaced, lowered])
@pytest.mark.parametrize("word", ["Abc d", " a", "<end>", "\u212b"])
def test_one_text_alone_has_the_form_whatever_the_tokenizer_makes_of_it(make, word):
    tokenizer = make()
    schema = {"type": "object", "properties": {word: {"const": word}}, "required": [word]}
    schema["additionalProperties"], ends = False, (tokenizer.eos_token_id,)
    words = grammars.words_of(tokenizer, len(tokenizer), ends)
    for seed in range(5):
        keeps = grammars.KeepsToForm(grammars.matcher_of_rule(grammars.json_rule(schema), words).deep_copy(), 0)
        ids, generator = [], torch.Generator().manual_seed(seed)
        while ids[-1:] != [*ends]:
            scores = torch.randn(1, len(tokenizer), generator=generator)
            ids.append(int(keeps(torch.tensor([ids], dtype=torch.long), scores).argmax()))
        assert json.loads(tokenizer.decode(ids, skip_special_tokens=True)) == {word: word}


CHATML = {
    "start_anchor": "<start>",
    "fields": {"thinking": {"open": "<think>", "close": "</think>"}, "content": {"close": "<end>"}},
}


@pytest.mark.parametrize("stream", [False, True])
def test_neither_ends_nor_a_template_change_the_answer(stream, monkeypatch):
    """The prompt opens the thoughts of a model that has some, and a second token may end the answer."""
    tokenizer = tokenizer_with_end()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start>", "<think>", "</think>", "<stop>"]})
    tokenizer.response_template, stop = CHATML, tokenizer.convert_tokens_to_ids("<stop>")
    ends = {"eos_token_id": [tokenizer.eos_token_id, stop], "pad_token_id": stop}
    model = tiny_model(vocab_size=len(tokenizer), num_loops=2, max_position_embeddings=120, **ends)
    monkeypatch.setattr(test_serve, "TEMPLATE", test_serve.TEMPLATE + "<start><think>")
    asked = {"max_tokens": 60, "stream": stream, "logit_bias": {str(stop): 100}}
    with serving(model, tokenizer) as (_, _, client, *_):
        for word in ("see </think><end>", "a"):
            assert json.loads(content(client, response_format=form({"const": word}), **asked)) == word


@pytest.mark.parametrize("end", ["<end>", "<stop>"])
def test_a_token_that_ends_the_answer_is_no_text(end):
    tokenizer = tokenizer_with_end()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    tokenizer.response_template, ends = CHATML, tokenizer.convert_tokens_to_ids(["<end>", "<stop>"])
    asked = handlers.Asked({}, None, has_length=False, has_config=False, end_tokens=tuple(ends))
    parts = asked.parts(tokenizer, [], handlers.ResponseParser(CHATML, prefix=""))
    assert "".join(parts.whole(tokenizer("a b" + end).input_ids)) == "a b"


def test_a_server_without_the_package(served, monkeypatch):
    monkeypatch.setattr(grammars, "LLMatcher", None)
    check_refused(served, {"response_format": form(PERSON)}, "needs the package llguidance")


def test_helpers_of_openai(served):
    pydantic = pytest.importorskip("pydantic")

    class Person(pydantic.BaseModel):  # whose fields end, else a random model would go on
        name: Literal["ab", "a b"]
        is_old: bool

    _, tokenizer, client, *_ = served
    asked = {"model": "tiny", "messages": TURNS, "logit_bias": no_blanks(tokenizer), "response_format": Person}
    parsed = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(parsed, Person) and isinstance(parsed.is_old, bool)
