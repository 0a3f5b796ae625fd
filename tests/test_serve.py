"""The server, asked by OpenAI's own client over the loopback address: answers are those of `generate`."""

import asyncio
import gzip
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from random import Random
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StopStringCriteria

from looped_eval.serve.stop_texts import StopsInAnswer, StopTexts
from looped_recipes.common.errors import CommandError
from modeling_looped import shared_passes
from modeling_looped.row_prompts import Prompt
from modeling_looped.shared_passes import SharedPasses
from tests.helpers import tiny_model, tiny_tokenizer, wait_until
from tests.test_shared_passes import is_full


openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")
serve = pytest.importorskip("looped_eval.serve.command")
testclient = pytest.importorskip("fastapi.testclient")

TEMPLATE = "{% for turn in messages %}{{ turn['role'][0] }} {{ turn['content'] }} {% endfor %}"
TURNS = [{"role": "user", "content": "b c"}]
ALL_TOKENS = [*range(30)]
DEPTHS = [
    {},
    {"num_loops": 2},
    {"num_loops": 6, "exit_criterion": "latent_diff", "exit_threshold": 0.5},
    {"exit_criterion": "logit_margin", "exit_threshold": 0.2},
    {"draft_loops": 1},
]


@pytest.fixture(scope="module")
def served():
    fields = {"num_core_layers": 1, "num_loops": 4, "position_embedding": "learned", "max_position_embeddings": 80}
    model = tiny_model(vocab_size=30, **fields).double()  # rows share products, and no token is decided by rounding
    with serving(model, tiny_tokenizer()) as parts:
        yield parts


@contextmanager
def serving(model, tokenizer, grace: float | None = None, template: str | None = None):
    tokenizer.chat_template = template or TEMPLATE
    model.generation_config.do_sample = False
    with SharedPasses(model, max_rows=4, max_tokens=300) as passes:
        app = serve.build_app("tiny", model, tokenizer, passes, max_loops=1000)
        idle = 60  # seconds: a loaded machine may take as long between two requests of a client
        setup = {"log_level": "error", "timeout_keep_alive": idle, "timeout_graceful_shutdown": grace}
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, **setup))
        thread = threading.Thread(target=server.run)
        thread.start()
        wait_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        try:
            yield model, tokenizer, client, passes, port
        finally:
            server.should_exit = True
            thread.join()


def expected(model, tokenizer, text: str, new_tokens: int, depth: dict):
    ids = tokenizer(text, return_tensors="pt").input_ids
    mask = torch.ones_like(ids)
    settings = {"max_new_tokens": new_tokens, "return_dict_in_generate": True, **depth}
    result = model.generate(ids, attention_mask=mask, **settings)
    prompt, whole = (tokenizer.decode(each[0], skip_special_tokens=True) for each in (ids, result.sequences))
    assert whole.startswith(prompt)
    return whole[len(prompt) :], result.token_loops[0].tolist()  # with the space between the two


def complete(client, text: str, new_tokens: int, depth: dict, **options):
    return client.completions.create(model="tiny", prompt=text, max_tokens=new_tokens, extra_body=depth, **options)


def test_many_clients_at_a_time(served):
    model, tokenizer, client, passes, _ = served
    asked = [(" ".join("abcdefgh"[: 1 + i % 8]), 3 + i % 7, DEPTHS[i % len(DEPTHS)]) for i in range(15)]
    alone = [expected(model, tokenizer, *request) for request in asked]
    with ThreadPoolExecutor(8) as pool:
        with passes.turn():  # so that the first tick is of as many rows as have room
            answers = pool.map(lambda request: complete(client, *request), asked)
            wait_until(lambda: is_full(passes))
        answers = list(answers)
    for answer, (text, loops) in zip(answers, alone, strict=True):
        assert answer.choices[0].text == text and answer.token_loops == loops and answer.model == "tiny"
        assert answer.usage.completion_tokens == len(loops)
    assert passes.row_ticks > passes.ticks and not passes.decoders


@pytest.mark.parametrize("depth", DEPTHS[:4])
def test_streams(served, depth):
    model, tokenizer, client, _, _ = served
    text, loops = expected(model, tokenizer, "a b c", 6, depth)
    chunks = list(complete(client, "a b c", 6, depth, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks).split() == text.split()
    assert chunks[-1].token_loops == loops and chunks[-1].choices[0].finish_reason in ("length", "stop")


def test_a_stream_tells_its_end(served):
    for path, asked in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": TURNS})):
        body = json.dumps({**asked, "max_tokens": 2, "stream": True}).encode()
        url = f"http://127.0.0.1:{served[4]}/v1/{path}"
        lines = urlopen(Request(url, body, {"Content-Type": "application/json"})).read().decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""] and json.loads(lines[-3].removeprefix("data: "))["choices"]


def test_the_chat_of_transformers_begins(served, capsys):
    chat = pytest.importorskip("transformers.cli.chat")
    interface = chat.RichInterface("tiny", "me", f"http://127.0.0.1:{served[4]}/v1")
    interface.print_model_load("tiny")
    assert "tiny was already loaded" in capsys.readouterr().out
    with pytest.raises(Exception, match="404 .*Not Found"):
        interface.print_model_load("huge")


def test_conversations(served):
    model, tokenizer, client, _, _ = served
    turns = [{"role": "user", "content": "b c"}]
    text, loops = expected(model, tokenizer, "u b c ", 5, DEPTHS[2])
    asked = {"model": "tiny", "messages": turns, "max_tokens": 5, "extra_body": DEPTHS[2]}
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == text.removeprefix(" ")  # a text of its own
    assert answer.token_loops == loops
    stream = client.chat.completions.create(
        model="tiny", messages=turns, max_tokens=5, extra_body=DEPTHS[2], stream=True
    )
    *parts, last = stream
    assert "".join(part.choices[0].delta.content or "" for part in parts).split() == text.split()
    assert last.token_loops == loops


BAD_TO_READ = [  # refused before it matters whether an answer is streamed
    ({"num_loops": "deep"}, "num_loops"),
    ({"prompt": ["a", "b"], "num_loops": [1, 2]}, r"num_loops=\[1, 2\] must be a whole number"),
    ({"num_lops": 3}, "num_lops"),
    ({"max_tokens": 2.7}, "max_tokens=2.7 must be a whole number"),
    ({"max_tokens": True}, "max_tokens=True must be a whole number"),
    ({"temperature": "warm"}, "temperature='warm' must be a number"),
    ({"top_p": 2}, "top_p=2 is no probability"),
    ({"generation_config": {}}, "generation_config={} must be a text that holds JSON"),
    ({"prompt": 5}, "prompt=5 must be a text, the numbers of its tokens, or a list"),
    ({"prompt": []}, r"prompt=\[\] must be a text"),
    ({"prompt": ["a", 5]}, r"prompt=\['a', 5\] must be a text"),
    ({"generation_config": "nojson"}, "generation_config='nojson' must be a text that holds JSON"),
    ({"suffix": 5}, "suffix=5 is not served"),
    ({"temperature": 1e-320}, "temperature=1e-320 is next to 0: pass 0"),
    ({"temperature": -3}, "temperature=-3 is below 0: pass 0"),
    ({"n": 0}, "n=0 must be from 1 to 128"),
    ({"n": 1.5}, "n=1.5 must be a whole number"),
    ({"n": 65, "prompt": ["a", "b"]}, "130 answers are more than 128"),
    ({"best_of": 2}, "best_of=2 is not served, and would have no effect: leave it out"),
    ({"logprobs": True}, "logprobs=True must be a whole number from 0 to 20"),
    ({"logprobs": 21}, "logprobs=21 must be a whole number from 0 to 20"),
    ({"top_logprobs": 2}, "top_logprobs=2 is of conversations"),
    ({"echo": "yes"}, "echo='yes' must be true or false"),
    ({"seed": "one"}, "seed='one' is no integer"),
    ({"seed": 2**63}, "seed=9223372036854775808 is no integer of 64 bits"),
    ({"stop": [5]}, "stop=.5. must be a text or a list of texts"),
    ({"stop": "zz"}, "stop='zz' is not served: this model's tokenizer does not give 'abcdef' back"),
    ({"stop": ["zz"] * 33}, "stop has 33 texts: pass up to 32"),
    ({"stop": ["a", "z" * 257]}, "stop has a text of 257 characters: pass texts of up to 256"),
    ({"generation_config": json.dumps({"stop_strings": ["zz"] * 33})}, "stop has 33 texts: pass up to 32"),
    ({"generation_config": '{"stop_strings": [""]}'}, r"stop=\[''\] must be .* none of them empty"),
    ({"logit_bias": {"a": 5}}, "logit_bias=.* must have numbers of tokens, from 0 to 29, as names"),
    ({"logit_bias": {"3": "much"}}, "logit_bias=.* and numbers as values"),
    ({"logit_bias": {"3": 1e39}}, "logit_bias=.* from -100 to 100"),
    ({"generation_config": "[1]"}, "must hold an object"),
    ({"generation_config": '{"top_kk": 1}'}, "no argument `top_kk`; did you mean `top_k`"),
    (
        {"generation_config": '{"eos_token_id": [3, 99999999999999999999]}'},
        "eos_token_id=.* the tokens from 0 to 29",
    ),
    ({"generation_config": '{"eos_token_id": 2.5}'}, "eos_token_id=2.5: .* the tokens from 0 to 29"),
    ({"generation_config": '{"forced_eos_token_id": 30}'}, "forced_eos_token_id=30: .* the tokens from 0 to 29"),
    ({"generation_config": '{"bad_words_ids": [[3], [4, -1]]}'}, "bad_words_ids=.* the tokens from 0 to 29"),
    ({"generation_config": '{"max_length": NaN}', "max_tokens": None}, "max_length=nan must have no NaN"),
    ({"generation_config": '{"max_new_tokens": NaN}', "max_tokens": None}, "max_new_tokens=nan must have no NaN"),
    ({"generation_config": '{"sequence_bias": [[[3], 1e999]]}'}, "sequence_bias=.* and nothing infinite"),
    ({"generation_config": '{"num_beams": -1}'}, "num_beams=-1, which must be a whole number from 1 to"),
    ({"generation_config": '{"num_beams": 2.5}'}, "num_beams=2.5, which must be a whole number from 1 to"),
    ({"generation_config": '{"prefill_chunk_size": 0}'}, "prefill_chunk_size=0, which must be a whole number from 1"),
    ({"generation_config": '{"prefill_chunk_size": [1]}'}, "prefill_chunk_size=.1., which must be a whole number"),
    ({"generation_config": '{"encoder_no_repeat_ngram_size": 81}'}, "ngram_size=81, which must be .* from 0 to 80"),
    ({"generation_config": '{"max_cache_len": 81}'}, "max_cache_len=81, which must be a whole number from 1 to 80"),
    ({"generation_config": '{"temperature": 1e-300, "do_sample": true}'}, "temperature=1e-300 is next to 0"),
    ({"generation_config": '{"top_p": 7, "do_sample": true}'}, "top_p=7 is no probability"),
    ({"generation_config": '{"num_beams": 2, "length_penalty": 1e308}'}, "what fails here: .*out of range"),
    ({"generation_config": '{"is_assistant": true}'}, "generation_config has is_assistant, which is not served"),
    ({"generation_config": '{"token_healing": true}'}, "generation_config has token_healing, which is not served"),
    ({"generation_config": '{"zzqq": 1}'}, "generation_config has zzqq, which nothing reads"),
    ({"generation_config": '{"max_new_tokens": 2}'}, "max_tokens and generation_config both say how long"),
    ({"min_p": 0.5}, "min_p: put it in generation_config, a text that holds JSON: .*min_p.*: 0.5"),
    ({"max_new_tokens": 5}, "max_new_tokens has the name max_tokens in a request"),
    ({"max_tokens": 0}, "max_tokens=0 asks for nothing"),
]
BAD_TO_ANSWER = [
    ({"num_loops": 0}, "num_loops"),
    ({"num_loops": 10**7}, "more than the 1000 that this server runs"),
    ({"exit_criterion": "nonsense"}, "choose one of logit_margin"),
    ({"exit_threshold": 0.5}, "without exit_criterion"),
    ({"max_tokens": 200}, "max_position_embeddings=80"),
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": [3, 30]}, "prompt holds the token 30: this model has those from 0 to 29"),
    (
        {"logprobs": 1, "generation_config": '{"num_beams": 2}'},
        "num_beams=2 goes without logprobs|logprobs=1 comes",
    ),
    ({"seed": 1, "temperature": 1, "draft_loops": 1}, "seed=1 goes with plain .* not with draft_loops: leave one"),
    ({"logit_bias": {"30": 1}}, "vocabulary size is 30, but the following tokens were being biased: .30."),
    ({"logit_bias": {"99999999999999999999": 1}}, "vocabulary size is 30, but .* biased: .99999999999999999999."),
    ({"generation_config": '{"sequence_bias": [[[3], 1]]}'}, "sequence_bias. has to be a .* integers and float"),
    ({"generation_config": '{"sequence_bias": [[[3, 4]]]}'}, "sequence_bias=.* must be a list of pairs"),
    ({"generation_config": '{"sequence_bias": [[]]}'}, "sequence_bias=.* must be a list of pairs"),
    ({"generation_config": '{"sequence_bias": [5]}'}, "sequence_bias=.* must be a list of pairs"),
    ({"generation_config": '{"sequence_bias": [[[3, 30], 1.0]]}'}, "vocabulary size is 30, but .* biased: .30."),
    (
        {"generation_config": '{"num_return_sequences": 2, "do_sample": true}'},
        "num_return_sequences=2: say n=2 in the request",
    ),
    ({"generation_config": '{"max_length": 200}', "max_tokens": None}, "max_position_embeddings=80"),
]


@pytest.mark.parametrize(("body", "message"), BAD_TO_READ + BAD_TO_ANSWER, ids=str)
def test_bad_requests(served, body, message):
    check_refused(served, body, message)


@pytest.mark.parametrize(("body", "message"), BAD_TO_READ[:1] + BAD_TO_ANSWER, ids=str)
def test_bad_requests_of_streams(served, body, message):
    check_refused(served, body, message, stream=True)


def check_refused(served, body: dict, message: str, **options):
    _, _, client, passes, _ = served
    with pytest.raises(openai.APIStatusError) as error:
        body = {"max_tokens": 3, "prompt": "a b", **body}
        complete(client, body.pop("prompt"), body.pop("max_tokens"), body, **options)
    assert error.value.status_code == 400 and error.value.body["type"] == "invalid_request_error"
    assert re.search(message, error.value.body["message"])
    assert complete(client, "a", 2, {}).usage.completion_tokens == 2 and not passes.decoders


@pytest.mark.parametrize(
    "config, best",
    [
        ({"suppress_tokens": ALL_TOKENS}, "-inf"),
        ({"suppress_tokens": ALL_TOKENS, "do_sample": True}, "-inf"),
        ({"suppress_tokens": ALL_TOKENS, "do_sample": True, "num_beams": 2}, "-inf"),
        ({"sequence_bias": [[[5], 1e308]], "do_sample": True}, "inf"),
        ({"repetition_penalty": 1e-300, "do_sample": True}, "inf|nan"),
    ],
    ids=str,
)
def test_a_config_that_leaves_no_token(served, config, best):
    message = f"generation_config leaves no token to choose, since the best score is ({best}):"
    check_refused(served, {"generation_config": json.dumps(config)}, message)


@pytest.mark.parametrize("depth", [900, 3000])  # the first is read, and fails later
def test_lists_within_lists(served, depth):
    config = {"generation_config": '{"sequence_bias": ' + "[" * depth + "]" * depth + "}"}
    with pytest.raises(openai.BadRequestError, match="holds lists .*within .*, too many to read"):
        complete(served[2], "a b", 3, config)


def test_a_stream_is_asked_for_by_true(served):
    with pytest.raises(openai.BadRequestError, match="stream='false' must be true or false"):
        complete(served[2], "a b", 3, {"stream": "false"})


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every letter; 0 is the end."""
    letters = {letter: i for i, letter in enumerate("\0abcdefghijklmnopqrstuvwxyz ")}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="\0")


def test_an_answer_ends_before_its_stop_text():
    model = tiny_model(vocab_size=28, num_loops=2, eos_token_id=None, pad_token_id=0)
    with serving(model, letters_tokenizer()) as (_, _, client, _, _):
        whole = complete(client, "abc", 9, {}).choices[0].text
        begins = [whole.index(whole[i : i + 2]) for i in range(8)]
        asked = [([whole[4:6], "zz"], begins[4], "stop"), ([whole[8] + " "], 9, "length")]
        for stop, length, reason in asked:
            choice = complete(client, "abc", 9, {}, stop=stop).choices[0]
            assert (choice.text, choice.finish_reason) == (whole[:length], reason)
            parts = [part.choices[0] for part in complete(client, "abc", 9, {}, stop=stop, stream=True)]
            assert ("".join(part.text for part in parts), parts[-1].finish_reason) == (whole[:length], reason)
        turns, ask = [{"role": "user", "content": "bc"}], client.chat.completions.create
        asked = {"model": "tiny", "messages": turns, "max_tokens": 5}
        whole = ask(**asked).choices[0].message.content
        stop, begin = whole[3:], whole.index(whole[3:])
        (choice,) = ask(**asked, stop=stop).choices
        assert (choice.message.content, choice.finish_reason) == (whole[:begin], "stop")
        parts = [part.choices[0] for part in ask(**asked, stop=stop, stream=True)]
        assert "".join(part.delta.content or "" for part in parts) == whole[:begin]
        assert parts[-1].finish_reason == "stop"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama's: spaces are parts of tokens, and what has no token is written in bytes."""
    merges = [("a", "b"), ("ab", "c"), ("\u2581", "a"), ("\u2581", "ab")]
    tokens = ["<s>", "\u2581", *"abcdef", *map("".join, merges), *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    merges = [("a", "b"), ("ab", "c"), ("\u0120", "a")]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.mark.parametrize("make", [letters_tokenizer, byte_tokenizer, byte_level_tokenizer])
def test_an_answer_ends_where_transformers_ends_it(make):
    """With the same token, and not by what is in the prompt. A space may begin the answer, and a letter of several
    bytes may stand before the stop text."""
    tokenizer, rng, ended = make(), Random(0), 0
    pieces = ["ab", "abc", " a"] + (["\n", "\u20ac", "<s>"] if make is not letters_tokenizer else [])

    def tokens(count: int) -> list[int]:
        return [i for _ in range(count) for i in tokenizer(rng.choice(pieces), add_special_tokens=False).input_ids]

    for _ in range(120):
        prompt, answer = tokens(3), tokens(6)
        whole = tokenizer.decode([*answer, *tokens(1)]) + "a"
        begin = rng.randrange(len(whole))
        stops = [whole[begin : begin + rng.randint(1, 5)], "fed"]
        theirs, ours = StopStringCriteria(tokenizer, stops), StopsInAnswer(tokenizer, stops, len(prompt))
        ends = range(1, len(answer) + 1)
        expected = next((end for end in ends if theirs(torch.tensor([answer[:end]]), None)), None)
        found = next((end for end in ends if ours(torch.tensor([prompt + answer[:end]]), None)), None)
        assert found == expected, (stops, tokenizer.convert_ids_to_tokens(answer))
        ended += found is not None
    assert 30 < ended < 120


@pytest.mark.parametrize("make", [letters_tokenizer, byte_tokenizer, byte_level_tokenizer])
def test_an_answer_that_begins_a_text_ends_where_its_text_has_a_stop(make):
    """Some tokenizers drop the first space of a text, so that no stop text begins with it."""
    tokenizer, rng, ended = make(), Random(0), 0
    pieces = [" a", " ", "ab", " abc"] + (["\n", "\u20ac"] if make is not letters_tokenizer else [])
    for _ in range(40):
        texts = [rng.choice(pieces) for _ in range(12)]
        answer = [i for text in texts for i in tokenizer(text, add_special_tokens=False).input_ids]
        stops = ["".join(texts)[: rng.randint(1, 4)], " " + rng.choice(["abc", "\n", " a"])]
        ends = range(1, len(answer) + 1)
        expected = next((end for end in ends if any(stop in tokenizer.decode(answer[:end]) for stop in stops)), None)
        criteria = StopsInAnswer(tokenizer, stops, 1, begins_a_text=True)
        assert next((end for end in ends if criteria(torch.tensor([[0, *answer[:end]]]), None)), None) == expected
        ended += expected is not None
    assert ended > 10


def test_of_several_stop_texts_the_first_in_the_answer_ends_it():
    assert StopTexts(["b", "a"]).before("xaby", is_last=True) == "x"


def test_a_stop_text_is_not_looked_for_in_the_prompt():
    model = tiny_model(vocab_size=28, num_loops=2, eos_token_id=None, pad_token_id=0)
    with serving(model, letters_tokenizer()) as (_, _, client, _, _):
        whole = complete(client, "abc", 6, {}).choices[0].text
        across = f"c{whole[0]}"
        assert across not in whole
        for depth in ({}, {"draft_loops": 1}, {"exit_criterion": "kl", "exit_threshold": 0.0}):
            for stream in (False, True):
                asked = {"stop": across, "stream": stream}
                answer = complete(client, "abc", 6, depth, **asked)
                parts = answer if stream else [answer]
                assert "".join(part.choices[0].text for part in parts) == whole


def test_a_stream_tells_stray_bytes_at_its_end():
    """As the answer does that comes at once: half of a character is written as U+FFFD."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    stray = str(alphabet.index("Ã"))  # the first of two bytes
    model = tiny_model(vocab_size=256, num_loops=2, eos_token_id=None, pad_token_id=0)
    with serving(model, PreTrainedTokenizerFast(tokenizer_object=tokenizer)) as (_, _, client, _, _):
        for count in (1, 3):
            whole = complete(client, "abc", count, {}, logit_bias={stray: 100}).choices[0].text
            parts = complete(client, "abc", count, {}, logit_bias={stray: 100}, stream=True)
            assert "".join(part.choices[0].text for part in parts) == whole == "\ufffd" * count


def test_a_text_that_ends_with_its_last_token_has_ended(served):
    model, _, client, _, _ = served
    bias = {str(model.config.eos_token_id): 100}
    assert complete(client, "a b", 1, {}, logit_bias=bias).choices[0].finish_reason == "stop"
    *_, last = complete(client, "a b", 1, {}, logit_bias=bias, stream=True)
    assert last.choices[0].finish_reason == "stop"


def test_another_model_is_not_served(served):
    with pytest.raises(openai.BadRequestError, match="pinned to 'tiny'"):
        served[2].completions.create(model="large", prompt="a")
    models = served[2].models.list().data
    assert [model.id for model in models] == ["tiny"] and models[0].num_loops == 4
    assert json.load(urlopen(f"http://127.0.0.1:{served[4]}/health")) == {"status": "ok"}
    for path in ("/health", "/v1/models"):
        answer = urlopen(Request(f"http://127.0.0.1:{served[4]}{path}", method="HEAD"))
        assert answer.status == 200 and answer.read() == b""


@contextmanager
def hanging_up(port: int, prompt: str, new_tokens: int, depth: dict, stream: bool):
    """A client that does not wait for its answer: it goes away at the end of the block."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": new_tokens, "stream": stream, **depth}
    with closing(HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        yield


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_hangs_up(served, stream):
    """Its row is free again, after a small part of the work of its answer."""
    _, _, client, passes, port = served
    before, loops, new_tokens = passes.ticks, 200, 70
    depth = {"num_loops": loops, "generation_config": '{"eos_token_id": -1}'}
    with hanging_up(port, "a b", new_tokens, depth, stream):
        wait_until(lambda: passes.ticks > before + 1.5 * loops)  # of its prompt and of a token
    wait_until(lambda: passes._tokens == 0)
    assert passes.ticks - before < loops * new_tokens / 2
    assert not passes.decoders
    assert complete(client, "a", 2, {}).usage.completion_tokens == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_that_a_stopping_server_cuts_off(stream, capsys):
    body = {"model": "tiny", "prompt": "a b", "max_tokens": 60, "num_loops": 200, "stream": stream}
    body["generation_config"] = '{"eos_token_id": -1}'

    def ask(port) -> tuple[int, str]:
        with closing(HTTPConnection("127.0.0.1", port)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode().strip().splitlines()[-1].removeprefix("data: ")

    with ThreadPoolExecutor() as pool:
        with serving(tiny_model(vocab_size=30, num_loops=4), tiny_tokenizer(), grace=0.1) as (_, _, _, passes, port):
            asked = pool.submit(ask, port)
            wait_until(lambda: passes.ticks > 300)  # of its prompt, and of a token
        status, said = asked.result()
    assert status == (200 if stream else 503)  # a stream had begun
    assert "Traceback" not in capsys.readouterr().err
    assert json.loads(said)["error"] == {
        "message": "the server is stopping and has cut this answer off: ask again",
        "type": "server_error",
        "code": 503,
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.some(1)
def test_a_client_that_hangs_up_during_its_prompt(served, stream, monkeypatch):
    """It ends between two loops."""
    _, _, client, passes, port = served
    after_loop, taken = Prompt.after_loop, []

    def slowly(prompt, state):
        taken.append(passes._tokens)
        time.sleep(0.02)
        after_loop(prompt, state)

    monkeypatch.setattr(Prompt, "after_loop", slowly)
    with hanging_up(port, "a b " * 20, 2, {"num_loops": 1000}, stream):
        wait_until(lambda: taken)
    wait_until(lambda: passes._tokens == 0)
    assert taken[0] > 0 and len(taken) < 500
    assert not passes.decoders
    assert complete(client, "a", 2, {}).usage.completion_tokens == 2


def test_a_stream_that_fails_says_why(served, monkeypatch):
    _, _, client, passes, _ = served

    def fails(*args, **kwargs):
        raise RuntimeError('no "room"\nleft')

    monkeypatch.setattr(passes, "generate", fails)
    with pytest.raises(openai.APIError) as error:
        list(complete(client, "a b", 3, {}, stream=True))
    assert error.value.message == 'no "room"\nleft' and error.value.body["type"] == "server_error"


@pytest.mark.parametrize("option", ["--max-loops", "--max-rows", "--max-tokens", "--num-loops"])
def test_what_must_be_positive(option, capsys):
    with pytest.raises(SystemExit):
        serve.parse(["folder", option, "0"])
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "expected"), [([], "sdpa"), (["--attn-implementation", "eager"], "eager")])
def test_the_attention_that_is_asked_for(asked, expected, tmp_path, monkeypatch):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    models = []
    monkeypatch.setattr(serve, "build_app", lambda name, model, *others: models.append(model))
    monkeypatch.setattr(serve.uvicorn, "run", lambda app, **where: None)
    serve.main([str(tmp_path), "--port", "0", *asked])
    assert [model.config._attn_implementation for model in models] == [expected]


def test_what_is_no_port():
    with pytest.raises(SystemExit):
        serve.parse(["folder", "--port", "99999"])


def test_a_temperature_samples(served):
    _, _, client, _, _ = served
    greedy = {complete(client, "a b", 8, {}, temperature=0).choices[0].text for _ in range(3)}
    assert len(greedy) == 1
    assert len({complete(client, "a b", 8, {}, temperature=5).choices[0].text for _ in range(3)}) > 1
    with pytest.raises(openai.BadRequestError, match="temperature"):
        complete(client, "a b", 8, {}, temperature=-1)


@pytest.mark.parametrize(
    "messages", [[], None, "hi", [5], [{"content": "a"}], [{"role": "user", "content": 5}]], ids=str
)
def test_what_is_no_conversation(served, messages):
    with pytest.raises(openai.BadRequestError, match="is no conversation"):
        served[2].chat.completions.create(model="tiny", messages=messages, max_tokens=2)


@pytest.mark.parametrize(
    "tools",
    [5, [5], [{"type": "function"}], [{"type": "function", "function": {"name": "f", "parameters": True}}]],
    ids=str,
)
def test_what_are_no_tools(served, tools):
    turns = [{"role": "user", "content": "b c"}]
    with pytest.raises(openai.BadRequestError, match="must be a list of functions"):
        served[2].chat.completions.create(model="tiny", messages=turns, tools=tools)


def test_half_of_a_character_is_refused(served):
    body = json.dumps({"prompt": "a \ud800", "max_tokens": 2}).encode()
    address = f"http://127.0.0.1:{served[4]}/v1/completions"
    with pytest.raises(HTTPError) as error:
        urlopen(Request(address, body, {"Content-Type": "application/json"}))
    assert error.value.code == 400 and "which is half of a character" in error.value.read().decode()


def test_what_a_template_is_given(served):
    """Its variables, and neither another template nor lengths, which take time and memory of all clients."""
    _, _, client, _, _ = served
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "b c"}], "max_tokens": 2}

    def ask(given):
        return client.chat.completions.create(**asked, extra_body={"chat_template_kwargs": given})

    assert ask({"enable_thinking": False}).choices
    for given in ({"chat_template": "{{ messages }}"}, {"padding": "max_length", "max_length": 10**7}):
        with pytest.raises(openai.BadRequestError, match=f"chat_template_kwargs has {min(given)}.*leave it out"):
            ask(given)
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs=5 must be an object"):
        ask(5)


def test_tools_that_the_template_does_not_read(served):
    tools = [{"type": "function", "function": {"name": "look"}}]
    turns = [{"role": "user", "content": "b c"}]
    with pytest.raises(openai.BadRequestError, match="tools would have no effect"):
        served[2].chat.completions.create(model="tiny", messages=turns, max_tokens=2, tools=tools)


def test_moderation_is_not_served(served):
    moderation = {"moderation": {"model": "omni-moderation-latest"}}
    with pytest.raises(openai.BadRequestError, match="moderation=.* is not served, and would have no effect"):
        served[2].chat.completions.create(model="tiny", messages=TURNS, max_tokens=2, extra_body=moderation)


def test_a_sample_is_one_of_all_tokens(served, monkeypatch):
    """Where neither the model nor the request has a `top_k`; transformers takes 50."""
    model, _, client, passes, _ = served
    configs, generate = [], passes.generate

    def recorded(*args, generation_config, **kwargs):
        configs.append(generation_config)
        return generate(*args, generation_config=generation_config, **kwargs)

    monkeypatch.setattr(passes, "generate", recorded)
    complete(client, "a b", 2, {}, temperature=1)
    complete(client, "a b", 2, {"generation_config": '{"top_k": 7}'}, temperature=1)
    assert [config.top_k for config in configs] == [0, 7]
    monkeypatch.setattr(model.generation_config, "do_sample", True)
    for saved in (None, 3):
        monkeypatch.setattr(model.generation_config, "top_k", saved)
        complete(client, "a b", 2, {"generation_config": '{"typical_p": 0.9}'})
        assert configs[-1].top_k == (saved or 0)


def test_a_penalty_of_zero_keeps_that_of_the_model(served, monkeypatch):
    """Some clients send it in every request."""
    model, _, client, *_ = served
    body = {"prompt": "a b", "max_tokens": 8, "logit_bias": {"5": 8}}
    repeated = client.completions.create(model="tiny", **body).choices[0].text
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 50.0)
    first, second = (
        client.completions.create(model="tiny", **body, **more).choices[0].text
        for more in ({}, {"frequency_penalty": 0})
    )
    assert first == second != repeated


def test_a_port_in_use_is_said_before_a_model_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(CommandError, match=f"cannot listen at --host 127.0.0.1 --port {port}: .*; choose another"):
            serve.main([str(tmp_path / "missing"), "--host", "127.0.0.1", "--port", str(port)])


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"text": "a part without its type"}, "None"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "'image_url'"),
        ({"type": "text"}, "'text'"),
    ],
)
def test_parts_that_are_no_text(served, part, kind):
    turns = [{"role": "user", "content": [{"type": "text", "text": "b c"}, part]}]
    with pytest.raises(openai.BadRequestError, match=f"a part of type {kind} is not served"):
        served[2].chat.completions.create(model="tiny", messages=turns)


def test_beams_are_told_at_their_end(served):
    beams = {"generation_config": '{"num_beams": 2}'}
    assert complete(served[2], "a b", 3, beams).usage.completion_tokens <= 3
    with pytest.raises(openai.BadRequestError, match="num_beams=2 knows its answer at the end alone"):
        complete(served[2], "a b", 3, beams, stream=True)


def test_a_stream_of_drafts_that_transformers_takes_from_the_prompt(served):
    """It is given several tokens at a time, and their loops at its end."""
    drafts = {"generation_config": '{"prompt_lookup_num_tokens": 3}'}
    whole, stream = (
        complete(served[2], "a b a b", 8, drafts),
        list(complete(served[2], "a b a b", 8, drafts, stream=True)),
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert stream[-1].token_loops == whole.token_loops and stream[-1].usage == whole.usage


def test_too_many_beams_are_refused_before_the_prompt_is_repeated(served, monkeypatch):
    monkeypatch.setattr(served[3], "generate", lambda *args, **kwargs: pytest.fail("it begins"))
    for beams, reason in ((5, "5 sequences in one call are more than max_rows=4"), (4, "a request of 316 tokens")):
        asked = {"generation_config": json.dumps({"num_beams": beams})}
        with pytest.raises(openai.BadRequestError, match=reason):
            complete(served[2], "a b", 77, asked)


def test_the_length_of_a_generation_config(served):
    """Without one it is that of any request: here as much as there is room for."""
    _, _, client, _, _ = served

    def usage(config: str):
        return complete(client, "a b", None, {"generation_config": config}).usage

    assert usage('{"eos_token_id": -1}').completion_tokens == 79
    assert usage('{"eos_token_id": -1, "max_length": 9}').total_tokens == 9
    assert usage('{"eos_token_id": -1, "max_new_tokens": 9}').completion_tokens == 9
    with pytest.raises(openai.BadRequestError, match="max_length=2 .* no room behind a prompt of 2 tokens"):
        usage('{"max_length": 2}')
    for wrong in ([1], {}):
        with pytest.raises(openai.BadRequestError, match="generation_config asks for what fails here"):
            usage(json.dumps({"exponential_decay_length_penalty": wrong, "max_new_tokens": 1}))


def test_a_nucleus_samples(served):
    """OpenAI's temperature is 1 where a request has none."""
    _, _, client, _, _ = served
    assert len({complete(client, "a b", 8, {}, top_p=0.99).choices[0].text for _ in range(6)}) > 1


def test_the_model_by_its_name(served):
    model, _, client, _, _ = served
    assert client.models.retrieve("tiny").num_loops == model.config.num_loops
    with pytest.raises(openai.NotFoundError, match="no model 'huge' here, only 'tiny'"):
        client.models.retrieve("huge")
    with pytest.raises(openai.NotFoundError, match="nothing at /v1/responses, but at /v1/chat/completions, ") as error:
        client.responses.create(model="tiny", input="a")
    assert error.value.body["code"] == 404


def test_a_depth_that_was_saved_is_that_of_the_server():
    """It may be more than 4 times that of the config."""
    model = tiny_model(vocab_size=30, num_loops=2, eos_token_id=None)
    model.generation_config.num_loops = 9
    with SharedPasses(model) as passes:
        client = testclient.TestClient(serve.build_app("tiny", model, tiny_tokenizer(), passes), "http://localhost")
        body = {"prompt": "a", "max_tokens": 2}
        assert client.post("/v1/completions", json=body).json()["token_loops"] == [9, 9]
        refused = client.post("/v1/completions", json={**body, "num_loops": 37}).json()["error"]["message"]
        assert refused == "num_loops=37 is more than the 36 that this server runs"
        assert client.get("/v1/models/tiny").json()["num_loops"] == 9


def test_a_bias_of_tokens(served):
    _, tokenizer, client, _, _ = served
    (token,) = tokenizer("e", add_special_tokens=False).input_ids
    bias = {str(token): 100}
    assert complete(client, "a b", 3, {}, logit_bias=bias).choices[0].text.split() == ["e"] * 3
    turns = [{"role": "user", "content": "b c"}]
    answer = client.chat.completions.create(model="tiny", messages=turns, max_tokens=3, logit_bias=bias)
    assert answer.choices[0].message.content.split() == ["e"] * 3
    assert complete(client, "a b", 2, {}, logit_bias={}).usage.completion_tokens == 2
    with pytest.raises(openai.BadRequestError, match="must have numbers of tokens, from 0 to 29, as names"):
        complete(client, "a b", 2, {}, logit_bias={"9" * 5000: 1})


def test_what_asks_for_nothing(served):
    neutral = {
        "n": 1,
        "logprobs": None,
        "presence_penalty": 0,
        "user": "me",
        "best_of": 1,
        "echo": False,
        "stop": None,
    }
    assert complete(served[2], "a b", 2, neutral).usage.completion_tokens == 2
    fields = {"n": 1, "logprobs": False, "tool_choice": "auto", "response_format": {"type": "text"}, "store": False}
    turns = [{"role": "user", "content": "b c"}]
    assert served[2].chat.completions.create(model="tiny", messages=turns, max_tokens=2, extra_body=fields).choices


@pytest.mark.parametrize(
    "more",
    [{}, {"echo": True, "logprobs": 2}, {"generation_config": '{"num_beams": 2}'}],
    ids=["plain", "echo", "beams"],
)
def test_a_client_that_leaves_gives_up_its_place(served, monkeypatch, more):
    monkeypatch.setattr(shared_passes, "CHECK_SECONDS", 0.01)
    *_, passes, port = served
    with passes.room(4, 10):
        connection = HTTPConnection("127.0.0.1", port)
        body = json.dumps({"model": "tiny", "prompt": "a b", "max_tokens": 3, **more})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        wait_until(lambda: len(passes._waiting) == 1)
        connection.close()
        wait_until(lambda: not passes._waiting)


def test_an_answer_as_long_as_there_is_room(served):
    answer = served[2].completions.create(model="tiny", prompt=["a b c"])  # of 80 positions; the last token needs none
    assert len(answer.token_loops) == 80 + 1 - answer.usage.prompt_tokens or answer.choices[0].finish_reason == "stop"


def test_an_answer_as_long_as_its_rows_may_be(served, monkeypatch):
    """Without a length, where the server takes fewer tokens at a time than the model has positions."""
    _, _, client, passes, _ = served
    monkeypatch.setattr(passes, "max_tokens", 20)
    endless = {"generation_config": '{"eos_token_id": -1}'}
    assert complete(client, "a b", None, endless).usage.total_tokens == 20
    beams = {"generation_config": '{"eos_token_id": -1, "num_beams": 2}'}
    assert complete(client, "a b", None, beams).usage.total_tokens == 10
    with pytest.raises(openai.BadRequestError, match="is more than max_tokens=20"):
        complete(client, "a b", 19, endless)


def test_what_exits_save(served):
    _, _, client, _, _ = served
    answer = complete(client, "a b c", 6, DEPTHS[2])
    assert sum(answer.token_loops) < 6 * len(answer.token_loops)
    saved = pytest.approx(100 - 100 * sum(answer.token_loops) / (6 * len(answer.token_loops)), abs=0.05)
    assert answer.saved_percent == saved
    assert list(complete(client, "a b c", 6, DEPTHS[2], stream=True))[-1].saved_percent == saved
    assert complete(client, "a b c", 2, {"num_loops": 2}).saved_percent == 0


def test_a_seed_is_of_one_request(served):
    """The same sample, whatever is sampled beside it; and the process's own random numbers stay as they were."""
    _, _, client, _, _ = served
    state = torch.random.get_rng_state()

    def sample(seed: int) -> str:
        return complete(client, "a b", 8, {"seed": seed}, temperature=3).choices[0].text

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(sample, [7, 1, 2, 3, 7, 4, 5, 7])
    assert others[3] == others[6] == first and len(set(others)) > 3
    assert torch.equal(torch.random.get_rng_state(), state)


def answer_to(app, path: str, **headers: str) -> tuple[int, str]:
    """Status and body that a client gets which asks the app for `path`."""
    sent, got = [(name.encode(), value.encode()) for name, value in headers.items()], []
    scope = {"type": "http", "method": "GET", "path": path, "headers": sent, "query_string": b"", "root_path": ""}

    async def receive():
        return {"type": "http.request"}

    async def send(message):
        got.append(message)

    asyncio.run(app(scope, receive, send))
    return got[0]["status"], got[-1]["body"].decode()


def test_only_a_server_for_others_answers_to_any_host(served):
    """Else a page of any site could ask it in a browser of this machine (DNS rebinding)."""
    model, tokenizer, _, passes, _ = served
    for host in ("127.0.0.1", "localhost", "::1"):
        app = serve.build_app("tiny", model, tokenizer, passes, host=host)
        for name in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]", "[::1]:8000"):
            assert answer_to(app, "/v1/models", host=name)[0] == 200
        for name in ("evil.example", "evil.example:8000", "localhost.evil.example", "evil.example#@localhost", ""):
            status, body = answer_to(app, "/v1/models", host=name)
            assert status == 400 and f"for the host {name!r}" in json.loads(body)["error"]["message"]
    app = serve.build_app("tiny", model, tokenizer, passes, host="0.0.0.0")
    assert answer_to(app, "/v1/models", host="gpu.example:8000")[0] == 200


def test_an_api_key(served):
    model, tokenizer, _, passes, _ = served
    app = serve.build_app("tiny", model, tokenizer, passes, api_key="sésame")
    host = {"host": "localhost"}
    for sent in ({}, {"authorization": "Bearer sesame"}, {"authorization": "sésame"}, {"authorization": "Bearer "}):
        status, body = answer_to(app, "/v1/models", **host, **sent)
        assert status == 401 and "send the header Authorization: Bearer KEY" in json.loads(body)["error"]["message"]
    assert answer_to(app, "/v1/models", **host, authorization="Bearer sésame")[0] == 200
    assert answer_to(app, "/health", **host)[0] == 200


def test_the_command_says_where_it_listens_and_the_key(tmp_path, monkeypatch):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    apps = []
    monkeypatch.setenv("LOOPED_API_KEY", "sesame")
    monkeypatch.setattr(serve.uvicorn, "run", lambda app, **where: apps.append(app))
    for host in ("127.0.0.1", "0.0.0.0"):
        serve.main([str(tmp_path), "--host", host, "--port", "0"])
    key = {"authorization": "Bearer sesame"}
    assert [answer_to(app, "/v1/models", host="evil.example", **key)[0] for app in apps] == [400, 200]
    assert [answer_to(app, "/v1/models", host="localhost")[0] for app in apps] == [401, 401]


def test_requests_of_any_other_form(served):
    """What is no JSON, what is too large, and what fails by itself: always in the form that clients read."""
    _, _, client, passes, port = served

    def post(body: bytes, kind: str = "application/json") -> tuple[int, dict]:
        request = Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": kind})
        with pytest.raises(HTTPError) as error:
            urlopen(request)
        return error.value.code, json.load(error.value)["error"]

    code, told = post(b"{no json")
    assert code == told["code"] == 400 and "JSON" in told["message"]
    code, told = post(b"[]")
    assert code == 400 and "dictionary" in told["message"]
    code, told = post(b'{"prompt": "a", "temperature": NaN, "stream": true}')
    assert code == 400 and told["message"].startswith("temperature=nan must have no NaN and nothing infinite")
    code, told = post(b'{"prompt": "a"}', "application/x-www-form-urlencoded")  # as curl sends it by itself
    assert code == 400 and told["message"].endswith("urlencoded: send the header Content-Type: application/json")
    code, told = post(gzip.compress(b'{"prompt": "a"}'))
    assert code == 400 and told["message"] == "the body is not UTF-8: send JSON in UTF-8, and not compressed"
    code, told = post(b'{"prompt": ' + b"[" * 30_000 + b"]" * 30_000 + b"}")
    assert code == 400 and told["message"].startswith("the request holds lists or objects within each other")
    code, told = post(json.dumps({"prompt": "a " * 2**21}).encode())
    assert code == 413 and "this server takes up to 65536" in told["message"] and not passes.decoders


@pytest.mark.parametrize("count, status", [(1, 200), (9, 413)])
def test_a_body_in_chunks_is_counted_as_it_comes(served, count, status):
    chunks = [b'{"prompt": "a", "max_tokens": 2', *[b" " * 2**13] * count, b"}"]
    with closing(HTTPConnection("127.0.0.1", served[4])) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", iter(chunks), headers, encode_chunked=True)
        response = connection.getresponse()
        assert response.status == status and (b"takes up to 65536" in response.read()) == (status == 413)


def test_a_body_without_an_end(served, monkeypatch):
    """The chunks of a body may be longer than its Content-Length says, and a client may never stop to send them."""
    monkeypatch.setattr("looped_eval.serve.http.MOST_DISCARDED", 2**18 - 2**16)
    with closing(HTTPConnection("127.0.0.1", served[4], timeout=30)) as connection:
        connection.putrequest("POST", "/v1/completions")
        for name, value in {"Content-Type": "application/json", "Content-Length": "5"}.items():
            connection.putheader(name, value)
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        for _ in range(16):
            connection.send(b"4000\r\n" + b" " * 2**14 + b"\r\n")
        response = connection.getresponse()
        assert response.status == 400 and "Transfer-Encoding: send one" in json.load(response)["error"]["message"]
        assert response.headers["Connection"] == "close"


def test_a_request_that_fails_says_why(served, monkeypatch):
    def is_missing(*args, **kwargs):
        raise AssertionError("Torch not compiled with CUDA enabled")  # e.g. by an offloaded cache

    monkeypatch.setattr(served[3], "generate", is_missing)
    with pytest.raises(openai.BadRequestError, match="generation_config asks for what fails here: Torch not compiled"):
        complete(served[2], "a b", 3, {"generation_config": "{}"})

    def fails(*args, **kwargs):
        raise RuntimeError("no room left")

    monkeypatch.setattr(served[3], "generate", fails)
    with pytest.raises(openai.InternalServerError, match="no room left") as error:
        complete(served[2], "a b", 3, {})
    assert error.value.response.headers["Connection"] == "close"  # as uvicorn does: no other request takes it


@pytest.mark.slow
def test_a_thousand_requests(served):
    _, _, client, passes, _ = served
    with ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda i: complete(client, "a b", 1 + i % 5, DEPTHS[i % len(DEPTHS)]), range(1000))
        assert [len(answer.token_loops) for answer in answers] == [1 + i % 5 for i in range(1000)]
    assert not passes.decoders and passes._rows == passes._tokens == 0


def test_transformers_serve_opens_no_looped_folder(tmp_path):
    """As docs/serve.md and docs/trouble.md say; if this fails, the sentences can go."""
    manager = pytest.importorskip("transformers.cli.serving.model_manager").ModelManager("cpu", trust_remote_code=True)
    tiny_model(vocab_size=30).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(AttributeError, match="module transformers has no attribute LoopedForCausalLM"):
        manager.load_model_and_processor(f"{tmp_path}@main")
