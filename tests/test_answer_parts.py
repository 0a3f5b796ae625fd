"""Texts, thoughts and tool calls of an answer: what its tokens add to those of the prompt, whole and as a stream."""

import json
from random import Random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers import tiny_model, tiny_tokenizer
from tests.test_serve import byte_level_tokenizer, byte_tokenizer, complete, openai, serving


answer_parts = pytest.importorskip("looped_eval.serve.answer_parts")  # needs the server of transformers
handlers = pytest.importorskip("looped_eval.serve.handlers")
CONTENT_PARSERS = pytest.importorskip("transformers.utils.chat_parsing.content_parsers").CONTENT_PARSERS
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "ab"}]}
THOUGHTS = {"open": "<think>", "close": "</think>", "content": "text"}
CALLS = {"open": "<call>", "close": "</call>", "repeats": True, "content": "json"}
CALLS |= {"transform": {"type": "function", "function": "{content}"}}
PARTED = {"thinking": THOUGHTS, "tool_calls": CALLS, "content": {"close": "<end>", "content": "text"}}
FIRST, SECOND = (f'<call>{{"name": "{name}", "arguments": {{"c": "Z"}}}}</call>' for name in "fg")


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(["<unk>", "a", "b", "##a", "##b", "."])}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize("make", [byte_tokenizer, byte_level_tokenizer, word_tokenizer, tiny_tokenizer])
def test_each_token_has_the_text_that_it_adds(make):
    """To the text that tokenizers make of all tokens before it; so have those that could have come."""
    tokenizer, rng = make(), Random(0)
    pieces = ["a b", " abc", " ", "b ab"] + ["\u20ac", "\n"] * (make in (byte_tokenizer, byte_level_tokenizer))
    for _ in range(30):
        ids = [i for _ in range(8) for i in tokenizer(rng.choice(pieces), add_special_tokens=False).input_ids]
        decoded = [tokenizer.decode(ids[:end], skip_special_tokens=True) for end in range(len(ids) + 1)]
        complete_ends = [end for end, text in enumerate(decoded) if not text.endswith("\ufffd")]
        begin = rng.choice(complete_ends[:-1])
        texts, told = answer_parts.TextOfTokens(tokenizer, ids[:begin]), ""
        for end in range(begin, len(ids)):
            if {end, end + 1} <= {*complete_ends} and decoded[end] != decoded[end + 1]:
                assert decoded[end] + texts.would_add(ids[end]) == decoded[end + 1]
            told += texts.add(ids[end])
        assert decoded[begin] + told == decoded[-1]


def test_a_stray_byte_behind_a_whole_character():
    """The decoder for such bytes writes U+FFFD for all of them, also for the character that was told before."""
    tokenizer = byte_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(["<s>", "<0x0A>", "<0x98>", "a"])
    assert tokenizer.decode(ids, skip_special_tokens=True) == "\ufffd\ufffda"
    texts = answer_parts.TextOfTokens(tokenizer)
    assert [*map(texts.add, ids)] == ["", "\n", "", "\ufffda"]
    model = tiny_model(vocab_size=len(tokenizer), num_loops=2, pad_token_id=0, eos_token_id=None)
    with serving(model, tokenizer) as (_, _, client, _, _):
        echo = client.completions.create(model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=0).choices[0]
        assert echo.text == "\n\ufffda" and echo.logprobs.tokens == ["", "\n", "", "\ufffda"]
        stray = {"generation_config": config_that_writes(ids[1:])}
        for fields in ({"logprobs": 1}, {}):
            assert complete(client, "ab", 3, stray, **fields).choices[0].text == "\n\ufffda"
        stream = complete(client, "ab", 3, stray, stream=True)
        assert "".join(part.choices[0].text for part in stream) == "\n\ufffda"


def config_that_writes(ids: list[int]) -> str:
    """A generation config by which any model writes these tokens: each is likeliest behind all before it."""
    return json.dumps({"sequence_bias": [[ids[: i + 1], 100.0 + 1000 * i] for i in range(len(ids))]})


def test_an_answer_keeps_the_space_before_it():
    """Where the tokenizer drops a space at the beginning of a text: in text, echo, offsets and log-probabilities."""
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), num_loops=2, pad_token_id=0, eos_token_id=None)
    written = tokenizer.convert_tokens_to_ids(["\u2581a", "c", "\u2581ab"])
    with serving(model, tokenizer) as (_, _, client, _, _):
        depth = {"generation_config": config_that_writes(written)}
        for echo in (False, True):
            whole = complete(client, "ab", 3, depth, logprobs=2, echo=echo).choices[0]
            told = whole.logprobs
            assert whole.text == "ab" * echo + " ac ab" == "".join(told.tokens)
            assert told.tokens[-3:] == [" a", "c", " ab"] and told.text_offset[-1] == len(whole.text) - 3
            cut = complete(client, "ab", 3, depth, logprobs=0, echo=echo, stop="c").choices[0]
            assert cut.text == "ab" * echo + " a" == "".join(cut.logprobs.tokens)
        stream = complete(client, "ab", 3, depth, stream=True)
        assert "".join(part.choices[0].text for part in stream) == " ac ab"
        answer = client.chat.completions.create(**ASKED, max_tokens=3, stop=" a", extra_body=depth)  # begins a text
        assert (answer.choices[0].message.content, answer.usage.completion_tokens) == ("ac", 3)


@pytest.fixture(scope="module")
def parted():
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(['{"name": "', '", "arguments": {"c": "'])  # each token of an answer takes a pass
    tokenizer.response_template = {"start_anchor": "ab ", "fields": PARTED}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256, "num_core_layers": 1}
    model = tiny_model(num_loops=2, pad_token_id=0, eos_token_id=None, **sizes)
    with serving(model, tokenizer) as (_, tokenizer, client, _, _):
        yield tokenizer, client


def told_parts(client, is_stream: bool, **fields) -> tuple:
    answer = client.chat.completions.create(**{**ASKED, **fields}, stream=is_stream)
    choices = [part.choices[0] for part in answer] if is_stream else answer.choices
    said = [choice.delta if is_stream else choice.message for choice in choices]
    thoughts, content = (
        "".join(getattr(part, name, None) or "" for part in said) for name in ("reasoning_content", "content")
    )
    calls = "".join(call.function.name for part in said for call in part.tool_calls or ())
    return thoughts, content, calls, choices[-1].finish_reason


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("<think>so</think>I look." + FIRST + SECOND, None, ("so", "I look.", "fg", "tool_calls")),
        ("<think>so</think>I look." + FIRST[:-9], None, ("so", "I look.", "", "length")),
        ("I look." + FIRST + SECOND[:-9], None, ("", "I look.", "f", "tool_calls")),
        ("I look." + FIRST, ["Z"], ("", "I look.", "", "stop")),
        ('I<call>{"name": "f", "arguments": }</call>' + SECOND, None, ("", "I", "g", "tool_calls")),
        ('<call>{"c": "Z"}</call>I look.', None, ("", "I look.", "", "length")),
        ("<call>[5]</call>" + FIRST, None, ("", "", "f", "tool_calls")),
        ("<think>let me see</think>I", ["me"], ("let", "", "", "stop")),
        ("<think>so \u20ac", None, ("so \ufffd", "", "", "length")),
        ("I look" + FIRST + ", and", None, ("", "I look, and", "f", "tool_calls")),
        ("<think>so</think>I<think>me</think>and", None, ("some", "Iand", "", "length")),
        ('<think>so</think> <call>{"c": {"Z"}} </call>', None, ("so", '{"c": {"Z"}}', "", "length")),
        ('<call>{"c": "Z"}</call>', None, ("", '{"c": "Z"}', "", "length")),
        (FIRST[:-9], None, ("", FIRST[6:-9], "", "length")),
    ],
    ids=range(14),
)
def test_parts_of_an_answer_that_are_whole(parted, text, stop, expected, is_stream):
    tokenizer, client = parted
    ids = tokenizer(text).input_ids[: -1 if "\u20ac" in text else None]  # within the character
    written = {"generation_config": config_that_writes(ids)}
    found = told_parts(client, is_stream, max_tokens=len(ids), stop=stop, extra_body=written)
    assert found == expected


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("begun", "text", "expected"),
    [
        ("<think>\n", "so</think>I", ("so", "I")),
        ("<think>\n\n</think>\n\n", "I look.", ("", "I look.")),
        ("I ", "look.", ("", "look.")),
    ],
    ids=range(3),
)
def test_what_the_prompt_has_begun_is_no_part_of_the_answer(parted, begun, text, expected, is_stream):
    tokenizer, client = parted
    ids = tokenizer(text).input_ids
    turns = [{"role": "user", "content": f"ab {begun}"}]
    asked = {"messages": turns, "max_tokens": len(ids), "extra_body": {"generation_config": config_that_writes(ids)}}
    assert told_parts(client, is_stream, **asked)[:2] == expected


@pytest.mark.parametrize(("is_stream", "more"), [(False, {}), (True, {}), (False, {"num_beams": 2})], ids=str)
def test_as_many_calls_as_a_request_allows(parted, is_stream, more):
    """Beams, of which several may have begun calls, are told without what is too much."""
    tokenizer, client = parted
    ids = tokenizer(FIRST + SECOND).input_ids
    config = json.dumps({**json.loads(config_that_writes(ids)), **more})
    asked = {"max_tokens": len(ids), "extra_body": {"generation_config": config}}
    none = told_parts(client, is_stream, tool_choice="none", **asked)
    assert none == ("", FIRST[6:-7] + SECOND[6:-7], "", "length")
    assert told_parts(client, is_stream, parallel_tool_calls=False, **asked) == ("", "", "f", "tool_calls")
    if not more:
        answer = client.chat.completions.create(**ASKED, parallel_tool_calls=False, **asked)
        assert answer.usage.completion_tokens == len(answer.token_loops) == len(tokenizer(FIRST).input_ids)


@pytest.mark.parametrize("strips", [{}, {"thinking": False}, {"content": False}, {"thinking": True, "content": True}])
def test_white_space_is_stripped_as_transformers_strips_it(strips):
    """In the parts of a stream and in a whole answer: around each field, unless its template keeps it."""
    tokenizer, rng = byte_level_tokenizer(), Random(0)
    told = {name: {**PARTED[name], "content_args": {"strip": strip}} for name, strip in strips.items()}
    template = {"start_anchor": "ab ", "fields": {**PARTED, **told}}
    server = handlers.OneModel("tiny", None, tokenizer)
    for _ in range(20):
        thoughts, content = ("".join(rng.choices(["\n", " ", "so", "\u20ac", "  "], k=6)) for _ in range(2))
        ids = tokenizer(f"<think>{thoughts}</think>{content}" + "<end>" * rng.randint(0, 1)).input_ids
        expected = tokenizer.parse_response(ids, template, prefix="")
        expected = tuple(expected.get(name, "") for name in ("thinking", "content"))
        parser = handlers.ResponseParser(template, prefix="")
        text = answer_parts.TextOfTokens(tokenizer, skip_special_tokens=False)
        stream = answer_parts.AnswerParts(text, handlers.StopTexts(None), parser)
        parts = [part for token in ids for part in stream.put(token)] + stream.end()
        thoughts = "".join(part for part in parts if isinstance(part, handlers.ReasoningText))
        assert (thoughts, "".join(part for part in parts if type(part) is str)) == expected
        handlers.current_request.set(handlers.Asked({}, None, has_length=False, has_config=False))
        whole = server.tokenizer.parse_response(torch.tensor(ids), template, prefix="")
        assert tuple(whole.get(name, "") for name in ("thinking", "content")) == expected


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_calls_that_a_template_writes_as_a_list(is_stream):
    if "python-call-list" not in CONTENT_PARSERS:
        pytest.skip("this transformers does not read such lists")
    tokenizer, calls = byte_level_tokenizer(), {"open": "<call>", "close": "</call>", "content": "python-call-list"}
    call = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
    calls |= {"transform_each": True, "transform": call}
    tokenizer.response_template = {"start_anchor": "ab ", "fields": {**PARTED, "tool_calls": calls}}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    model = tiny_model(num_loops=2, pad_token_id=0, eos_token_id=None, **sizes)
    ids = tokenizer('I<call>[f(c="Z"), g(c="Y")]</call>').input_ids
    with serving(model, tokenizer) as (_, _, client, _, _):
        written = {"generation_config": config_that_writes(ids)}
        found = told_parts(client, is_stream, max_tokens=len(ids), extra_body=written)
    assert found == ("", "I", "fg", "tool_calls")


@pytest.mark.parametrize(
    ("calls", "text", "reason"),
    [
        ({"transform": {"function": {"name": "{name}"}}}, FIRST, "KeyError: transform placeholder '{name}' is not"),
        ({"transform": {"function": {"name": "{content.name}"}}}, FIRST, "KeyError: arguments"),
        ({}, '<call>{"secret": </call>', "ValueError: json parser could not parse region as JSON."),
        ({"content": "int"}, "<call>secret</call>", "ValueError: invalid literal for int() with base 10: )"),
        (
            {"transform": {"function": {"name": "{content.name}"}}},
            '<call>{"secret": 1}</call>',
            "ValueError: transform placeholder '{content.name}' is missing key )",
        ),
    ],
    ids=["placeholder", "key", "answer", "number", "missing"],
)
def test_a_tool_call_that_is_left_out_is_warned_of(calls, text, reason, monkeypatch):
    """By what is wrong with the template, too, and without the text of the answer."""
    warnings, tokenizer = [], byte_level_tokenizer()
    monkeypatch.setattr(answer_parts.logger, "warning_once", warnings.append)
    template = {"start_anchor": "ab ", "fields": {**PARTED, "tool_calls": {**CALLS, **calls}}}
    reader = answer_parts.TextOfTokens(tokenizer, skip_special_tokens=False)
    parser = handlers.ResponseParser(template, prefix="")
    parts = answer_parts.AnswerParts(reader, handlers.StopTexts(None), parser).whole(tokenizer("I" + text).input_ids)
    assert parts == ["I"] and len(warnings) == 1
    assert warnings[0].startswith("A tool call was left out") and f"({reason}" in warnings[0]
    assert "secret" not in warnings[0]


@pytest.mark.parametrize("make", [byte_tokenizer, byte_level_tokenizer])
def test_tokens_without_text_are_not_decoded_again_and_again(make, monkeypatch):
    """A long run of stray bytes, and of special tokens, costs no more for each than a short one, and loses nothing."""
    tokenizer = make()
    stray = tokenizer.convert_tokens_to_ids("<0x98>") if make is byte_tokenizer else tokenizer("\u20ac").input_ids[1]
    ids = [stray] * 100 + [*tokenizer("\u20ac", add_special_tokens=False).input_ids, tokenizer.bos_token_id] * 20
    decode, expected, longest = tokenizer.decode, tokenizer.decode(ids, skip_special_tokens=True), 0

    def counted(tokens, **how):
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode(tokens, **how)

    monkeypatch.setattr(tokenizer, "decode", counted)
    texts = answer_parts.TextOfTokens(tokenizer)
    assert "".join(map(texts.add, ids)) + texts.end() == expected
    assert longest < 50


@pytest.mark.parametrize("field", ["arguments", "tool_calls", "chat_template_kwargs"])
def test_earlier_tool_calls(parted, field):
    """Their arguments may be an empty text, and what is wrong is named."""
    _, client = parted

    def ask(call, **fields):
        turns = [*ASKED["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
        return client.chat.completions.create(model="tiny", messages=turns, max_tokens=1, extra_body=fields)

    right = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    wrong = {"arguments": {"function": {"name": "f", "arguments": "{c"}}, "tool_calls": {"function": {"name": "f"}}}
    assert ask(right, chat_template_kwargs=None).choices
    if field in wrong:
        with pytest.raises(openai.BadRequestError, match=f"{field}=.*must be a"):
            ask(wrong[field])
    else:
        with pytest.raises(openai.BadRequestError, match=f"{field}=5 must be an object"):
            ask(right, chat_template_kwargs=5)
