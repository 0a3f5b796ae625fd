"""What OpenAI's clients may ask of the server beside one text: answers, prompts of tokens, log-probabilities."""

import math
import re

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import AddedToken, ByT5Tokenizer, PreTrainedTokenizerFast

from looped_eval.serve import shared_generation
from looped_eval.serve.answer_parts import bytes_of_token
from looped_eval.serve.asked import Asked
from looped_eval.serve.likelihoods import LEAST, foretold, likelihoods, of_chat, of_completion, parts_of_prompt
from looped_eval.serve.stop_texts import StopTexts
from modeling_looped.exit_criteria import ExitRule
from tests.helpers import tiny_model, tiny_tokenizer
from tests.test_serve import (
    byte_level_tokenizer,
    byte_tokenizer,
    complete,
    expected,
    letters_tokenizer,
    openai,
    serving,
)


EXITS = {"num_loops": 6, "exit_criterion": "latent_diff", "exit_threshold": 0.5}
AFTER = {**EXITS, "exit_selection": "after"}  # decoded by the loop of transformers


@pytest.fixture(scope="module")
def served():
    fields = {"num_core_layers": 1, "num_loops": 4, "position_embedding": "learned", "max_position_embeddings": 80}
    with serving(tiny_model(vocab_size=30, **fields).double(), tiny_tokenizer()) as parts:
        yield parts


def ask(client, **fields):
    return client.completions.create(model="tiny", **{"max_tokens": 4, **fields})


def test_every_prompt_has_an_answer_of_its_own(served):
    model, tokenizer, client, passes, _ = served
    texts = ["a b c", "d", "e f"]
    answer = ask(client, prompt=texts, extra_body=EXITS)
    for i, (choice, text) in enumerate(zip(answer.choices, texts, strict=True)):
        alone, loops = expected(model, tokenizer, text, 4, EXITS)
        assert (choice.index, choice.text, choice.token_loops) == (i, alone, loops)
    lengths = [len(tokenizer(text).input_ids) for text in texts]
    assert answer.usage.prompt_tokens == sum(lengths)
    assert answer.usage.completion_tokens == sum(len(choice.token_loops) for choice in answer.choices)
    assert not passes.decoders


def test_several_answers_to_a_prompt_are_samples_of_their_own(served):
    *_, client, _, _ = served
    asked = {"prompt": "a b", "temperature": 1.0, "seed": 5, "max_tokens": 12}
    several = ask(client, n=3, **asked)
    alone = [ask(client, **{**asked, "seed": 5 + i}) for i in range(3)]
    assert [choice.text for choice in several.choices] == [one.choices[0].text for one in alone]
    assert len({choice.text for choice in several.choices}) == 3
    assert several.usage.prompt_tokens == alone[0].usage.prompt_tokens  # once
    of_two = ask(client, n=2, **{**asked, "prompt": ["a b", "c"]})
    assert [choice.index for choice in of_two.choices] == [0, 1, 2, 3]
    assert of_two.usage.prompt_tokens == alone[0].usage.prompt_tokens + ask(client, prompt="c").usage.prompt_tokens


def test_several_answers_in_a_conversation(served):
    _, _, client, _, _ = served
    turns = [{"role": "user", "content": "b c"}]
    answer = client.chat.completions.create(model="tiny", messages=turns, max_tokens=4, n=2, temperature=1.5, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_of_tokens(served, stream):
    model, tokenizer, client, _, _ = served
    ids = tokenizer("a b c").input_ids
    answer = ask(client, prompt=ids, extra_body=EXITS, stream=stream)
    of_text, loops = expected(model, tokenizer, "a b c", 4, EXITS)
    *parts, last = answer if stream else [answer]
    assert "".join(part.choices[0].text for part in [*parts, last]).split() == of_text.split()
    assert last.token_loops == loops and last.usage.prompt_tokens == len(ids)


def generated(model, tokenizer, text: str, depth: dict, new_tokens: int = 4):
    """Tokens, and the log-probabilities that the model gives all tokens in their places."""
    ids = tokenizer(text, return_tensors="pt").input_ids
    settings = {"max_new_tokens": new_tokens, "return_dict_in_generate": True, "output_logits": True, **depth}
    result = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return result.sequences[0, ids.shape[1] :], torch.stack(result.logits)[:, 0].double().log_softmax(-1)


@pytest.mark.parametrize("depth", [{}, EXITS, AFTER, {"draft_loops": 1}])
def test_log_probabilities_of_an_answer(served, depth):
    model, tokenizer, client, _, _ = served
    tokens, expected_values = generated(model, tokenizer, "a b c", depth)
    ids_of_prompt = tokenizer("a b c").input_ids
    choice = ask(client, prompt="a b c", logprobs=2, extra_body=depth).choices[0]
    found = choice.logprobs
    own = expected_values.gather(1, tokens[:, None])[:, 0].tolist()
    assert found.token_logprobs == pytest.approx(own, abs=1e-5)
    for k, (told, of_token, token) in enumerate(zip(found.top_logprobs, expected_values, tokens, strict=True)):
        before = tokenizer.decode([*ids_of_prompt, *tokens[:k]], skip_special_tokens=True)
        largest = {}
        for i in (*of_token.topk(2).indices.tolist(), int(token)):
            text = tokenizer.decode([*ids_of_prompt, *tokens[:k], i], skip_special_tokens=True).removeprefix(before)
            text = text or ("" if i == token else tokenizer.decode(i))  # special tokens add none
            largest[text] = max(largest.get(text, -math.inf), of_token[i].item())
        assert told == pytest.approx(largest, abs=1e-5)
    assert "a b c" + "".join(found.tokens) == tokenizer.decode([*ids_of_prompt, *tokens], skip_special_tokens=True)
    check_offsets(choice)


def check_offsets(choice):
    told = choice.logprobs
    assert all(choice.text[begin:].startswith(text) for begin, text in zip(told.text_offset, told.tokens, strict=True))
    assert "".join(told.tokens) == choice.text


def test_log_probabilities_are_the_models_own(served):
    """Not those of the distribution that was sampled."""
    model, tokenizer, client, _, _ = served
    biased = {"temperature": 0.3, "logit_bias": {"7": 100}, "logprobs": 0}
    found = ask(client, prompt="a b c", max_tokens=1, **biased).choices[0].logprobs
    _, values = generated(model, tokenizer, "a b c", {}, 1)
    assert found.token_logprobs == pytest.approx([values[0, 7].item()], abs=1e-5)
    assert [*found.top_logprobs[0]] == found.tokens  # the token itself alone


def test_log_probabilities_of_half_precision_and_of_the_impossible():
    """Taken in float32; JSON has no infinity."""
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[1, 5] = -math.inf
    first, second = likelihoods(tiny_tokenizer(), [3, 4, 5], foretold(logits, [4, 5], 0))
    assert first.logprob == pytest.approx(logits[0].double().log_softmax(-1)[4].item(), abs=1e-5)
    assert second.logprob == LEAST == -9999


def test_log_probabilities_in_a_conversation(served):
    model, tokenizer, client, _, _ = served
    tokens, values = generated(model, tokenizer, "u b c ", {}, 3)
    asked = {"messages": [{"role": "user", "content": "b c"}], "max_tokens": 3, "logprobs": True}
    found = client.chat.completions.create(model="tiny", top_logprobs=3, **asked).choices[0].logprobs.content
    assert [each.logprob for each in found] == pytest.approx(
        values.gather(1, tokens[:, None])[:, 0].tolist(), abs=1e-5
    )
    for each, of_token in zip(found, values.topk(3).values.tolist(), strict=True):
        assert [other.logprob for other in each.top_logprobs] == pytest.approx(of_token, abs=1e-5)
        assert bytes(each.bytes).decode() == each.token
    without = client.chat.completions.create(model="tiny", **asked).choices[0].logprobs.content
    assert [len(each.top_logprobs) for each in without] == [0, 0, 0]


@pytest.mark.parametrize("make", [byte_tokenizer, byte_level_tokenizer])
def test_bytes_are_those_of_each_token(make):
    """Also of alternatives, and where characters are of several tokens, the last of which is cut off."""
    tokenizer, text = make(), "ab \u5929 ac\u20ac\u00e9 a\u592f"
    own = {}
    for character in "\u5929\u20ac\u00e9\u592f":  # a token for each byte
        ids = tokenizer(character, add_special_tokens=False).input_ids
        own |= zip(ids, ([byte] for byte in character.encode()), strict=True)
    ids = tokenizer(text, add_special_tokens=False).input_ids[:-1]
    said = foretold(torch.zeros(len(ids), len(tokenizer)), ids, len(tokenizer))
    found = likelihoods(tokenizer, ids, said)
    content = of_chat(found)["content"]
    assert bytes(byte for each in content for byte in each["bytes"]) == text.encode()[:-1]
    assert "".join(each["token"] for each in content) == tokenizer.decode(ids)
    for each, told, names in zip(said, content, of_completion(found)["top_logprobs"], strict=True):
        others = dict(zip([token for token, _ in each.best], told["top_logprobs"], strict=True))
        assert {token: others[token]["bytes"] for token in own} == own
        assert len({others[token]["token"] for token in own} & {*names}) == len(own)
    begin = likelihoods(tokenizer, ids[:1], said[:1])[0].best
    assert {rf"bytes:\x{byte:02x}" for (byte,) in own.values()} <= {name for name, _, _ in begin}


def test_a_token_that_is_the_replacement_character_has_its_bytes():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"\ufffd": 0, "a": 1}, unk_token="a")))
    assert bytes_of_token(tokenizer, 0) == "\ufffd".encode()


@pytest.mark.parametrize(
    ("size", "stop", "count"), [(4, "b\ufffd", 2), (6, "\u20ac", 3), (6, "b\u20ac", 2), (8, "c", 8), (9, "\u5929", 6)]
)
def test_log_probabilities_end_before_characters_that_are_cut_off(size, stop, count):
    tokenizer = byte_level_tokenizer()
    ids = tokenizer("efb\u20ac\u5929").input_ids[:size]
    found = likelihoods(tokenizer, ids, foretold(torch.zeros(size, len(tokenizer)), ids, 0))
    asked = Asked({}, None, False, False, loops=[2] * size, likelihoods=found, stops=StopTexts(stop))
    assert asked.likelihoods_before_stop() == found[:count]


@pytest.mark.parametrize("new_tokens", [0, 1, 3])
@pytest.mark.parametrize("depth", [{}, {"num_loops": 2}, EXITS])
def test_an_echo_tells_what_foretells_the_prompt(served, depth, new_tokens):
    model, tokenizer, client, passes, _ = served
    ids = tokenizer("a b c d", return_tensors="pt").input_ids
    answer = ask(client, prompt=ids[0].tolist(), max_tokens=new_tokens, echo=True, logprobs=1, extra_body=depth)
    (choice,), told = answer.choices, answer.choices[0].logprobs
    rule = ExitRule(depth["exit_criterion"], depth["exit_threshold"]) if depth == EXITS else None
    with torch.no_grad():
        logits = model(ids, num_loops=depth.get("num_loops"), exit_rule=rule, use_cache=False).logits[0, :-1]
    values = logits.double().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    first, *others = told.token_logprobs
    assert first is None and told.top_logprobs[0] is None
    assert others[: len(values)] == pytest.approx(values, abs=1e-5) and len(others) == len(values) + new_tokens
    assert choice.text.startswith(tokenizer.decode(ids[0], skip_special_tokens=True))
    assert answer.usage.completion_tokens == new_tokens and choice.finish_reason in ("length", "stop")
    assert not passes.decoders and passes._rows == 0


def with_special_tokens(make) -> PreTrainedTokenizerFast:
    """One begins and one ends every text, one swallows the white space around it, and one stands alone."""
    tokenizer = make()
    swallows = AddedToken("<|end|>", lstrip=True, rstrip=True)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|user|>", swallows, "<s>"]})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A <|end|>", special_tokens=[(name, tokenizer(name).input_ids[0]) for name in ("<s>", "<|end|>")]
    )
    return tokenizer


PROMPTS = ["ab c", " ab  c ", "<|user|>\nab abc<|end|>\n <|user|>\u20ac a ", "<s><|end|><|user|>", "z<|user|> ab<s>ab"]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("make", [byte_tokenizer, byte_level_tokenizer, tiny_tokenizer])
def test_tokens_of_a_prompt_stand_where_its_text_has_them(make, prompt):
    tokenizer = with_special_tokens(make)
    parts, ids = parts_of_prompt(tokenizer, prompt), tokenizer(prompt).input_ids
    assert "".join(parts) == prompt and len(parts) == len(ids) and parts[0] == parts[-1] == ""
    begin = 0
    for name in re.findall("<s>|<[|][a-z]+[|]>", prompt):  # those that are written there, in their order
        token = tokenizer.convert_tokens_to_ids(name)
        begin = next(i for i in range(begin + 1, len(ids)) if ids[i] == token)
        assert parts[begin].strip() == name


def test_slow_tokenizers_say_where_special_tokens_stand_or_refuse():
    tokenizer = ByT5Tokenizer()
    assert parts_of_prompt(tokenizer, "a \u20ac") == ["a", " ", "", "", "\u20ac", ""]
    with serving(tiny_model(vocab_size=len(tokenizer), num_loops=2), tokenizer) as (_, _, client, _, _):
        with pytest.raises(openai.BadRequestError, match="a ByT5Tokenizer does not tell where the tokens of this"):
            ask(client, prompt="a</s>b", echo=True, logprobs=0)


def test_slow_tokenizers_stream():
    tokenizer = ByT5Tokenizer()
    with serving(tiny_model(vocab_size=len(tokenizer), num_loops=2), tokenizer) as (_, _, client, _, _):
        whole = ask(client, prompt="a b").choices[0].text
        assert "".join(chunk.choices[0].text for chunk in ask(client, prompt="a b", stream=True)) == whole


@pytest.mark.parametrize("new_tokens", [0, 3])
@pytest.mark.parametrize("prompt", ["a b c", "<s>a b </s>c zz d </s> ", "</s>a"])
def test_an_echo_counts_special_tokens_of_its_text(served, prompt, new_tokens):
    model, tokenizer, client, _, _ = served
    choice = ask(client, prompt=prompt, max_tokens=new_tokens, echo=True, logprobs=1).choices[0]
    plain = ask(client, prompt=prompt, max_tokens=3, logprobs=1).choices[0]
    check_offsets(choice)
    assert choice.text == prompt + (plain.text if new_tokens else "")
    told, count = choice.logprobs, len(tokenizer(prompt).input_ids)
    assert told.text_offset[count:] == [len(prompt) + i for i in plain.logprobs.text_offset][:new_tokens]
    assert all(text in likeliest for text, likeliest in zip(told.tokens[1:], told.top_logprobs[1:], strict=True))


@pytest.mark.parametrize("depth", [{}, EXITS])
def test_a_long_echo(served, depth, monkeypatch):
    """Its logits are read part by part: those of a whole prompt would need more memory than the model."""
    model, _, client, _, _ = served
    ids = torch.randint(3, 30, (1, 79), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        rule = ExitRule(depth["exit_criterion"], depth["exit_threshold"]) if depth else None
        logits = model(ids, num_loops=depth.get("num_loops"), exit_rule=rule, use_cache=False).logits[0, :-1]
    expected = logits.double().log_softmax(-1)
    monkeypatch.setattr(shared_generation, "POSITIONS", 5)
    sizes, head = [], model.logits
    monkeypatch.setattr(model, "logits", lambda states: sizes.append(states.shape[-2]) or head(states))
    answer = ask(client, prompt=ids[0].tolist(), max_tokens=0, echo=True, logprobs=3, extra_body=depth)
    told = answer.choices[0].logprobs
    own = expected.gather(1, ids[0, 1:, None])[:, 0].tolist()
    assert told.token_logprobs[1:] == pytest.approx(own, abs=1e-5)
    for found, of_token in zip(told.top_logprobs[1:], expected.topk(3).values.tolist(), strict=True):
        assert sorted(found.values())[-3:] == pytest.approx(of_token[::-1], abs=1e-5)
    assert sizes == [79] if depth else sum(sizes) == 78 and max(sizes) == 5


def test_an_echo_without_log_probabilities(served):
    _, _, client, _, _ = served
    plain, echo = (ask(client, prompt="a b c", echo=echo).choices[0].text for echo in (False, True))
    assert echo == "a b c" + plain
    with pytest.raises(openai.BadRequestError, match="max_tokens=0 asks for nothing: with echo=true"):
        ask(client, prompt="a b c", max_tokens=0)


def test_log_probabilities_end_with_the_text():
    """Before a text at which the answer stops."""
    model = tiny_model(vocab_size=28, num_loops=2, eos_token_id=None, pad_token_id=0)
    with serving(model, letters_tokenizer()) as (_, _, client, _, _):
        whole = ask(client, prompt="abc", max_tokens=9, logprobs=0).choices[0]
        stop = whole.text[4:6]
        for echo in (False, True):
            cut = ask(client, prompt="abc", max_tokens=9, logprobs=0, stop=stop, echo=echo).choices[0]
            assert cut.text == "abc" * echo + whole.text[: whole.text.index(stop)]
            assert "".join(cut.logprobs.tokens) == cut.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 2}, "a stream tells one answer, and this request asks for 2"),
        ({"prompt": ["a", "b"]}, "this request asks for 2"),
        ({"logprobs": 0}, "logprobs=0 comes with a whole answer"),
        ({"echo": True}, "echo=True comes with a whole answer"),
    ],
)
def test_what_no_stream_tells(served, fields, message):
    _, _, client, _, _ = served
    with pytest.raises(openai.BadRequestError, match=message):
        ask(client, **{"prompt": "a", "stream": True, **fields})


def test_one_bad_prompt_ends_the_request(served):
    _, _, client, passes, _ = served
    with pytest.raises(openai.BadRequestError, match="the token 99"):
        ask(client, prompt=[[3, 4], [99]])
    assert complete(client, "a b", 3, {}).choices[0].text  # others go on
    assert not passes.decoders


def test_lm_eval_measures_a_server_as_the_model_itself(served, tmp_path):
    """Its client for servers sends tokens, and reads what foretells them."""
    pytest.importorskip("tenacity")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model, tokenizer, _, _, port = served
    tokenizer.save_pretrained(tmp_path)
    url = f"http://127.0.0.1:{port}/v1/completions"
    lm = LocalCompletionsAPI(model="tiny", base_url=url, tokenizer=str(tmp_path), batch_size=3, num_concurrent=1)
    pairs = [("a b", " c"), ("a b", " d e"), ("f", " g h a"), ("b c d", " a")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    for (context, rest), (total, is_greedy) in zip(pairs, lm.loglikelihood(requests), strict=True):
        ids, start = tokenizer(context + rest, return_tensors="pt").input_ids, len(tokenizer(context).input_ids)
        with torch.no_grad():
            values = model(ids).logits[0, start - 1 : -1].double().log_softmax(-1)
        own = values.gather(1, ids[0, start:, None])[:, 0]
        assert math.isclose(total, own.sum().item(), abs_tol=1e-4)
        assert is_greedy == bool((values.argmax(-1) == ids[0, start:]).all())
