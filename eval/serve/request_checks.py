"""Checks of requests. Refuses, with the reason, fields that would have no effect and values that would fail."""

import json
from collections.abc import Collection, Iterator
from inspect import signature
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, SequenceBiasLogitsProcessor

from modeling_looped.depth_options import DEPTH_FIELDS
from modeling_looped.foreign_names import GENERATION_FIELDS, refuse_foreign

from .stop_texts import LETTERS, decode


# types of fields that transformers would convert without an error: "false" to a stream, 2.7 tokens to 2
FORMS = {
    "num_loops": ((int,), "a whole number, the depth of all answers"),
    "stream": ((bool,), "true or false"),
    "max_tokens": ((int,), "a whole number"),
    "max_completion_tokens": ((int,), "a whole number"),
    "temperature": ((int, float), "a number"),
    "top_p": ((int, float), "a number"),
    "generation_config": ((str,), "a text that holds JSON"),
    "n": ((int,), "a whole number"),
    "echo": ((bool,), "true or false"),
    "parallel_tool_calls": ((bool,), "true or false"),
}
SAY_LENGTH, LENGTHS_OF_CONFIG = ("max_tokens", "max_completion_tokens"), ("max_new_tokens", "max_length")
# OpenAI's fields that are not supported, with the values that have no effect; None never has one
ASK_FOR_NOTHING = {
    "best_of": (1,),
    "suffix": ("",),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "modalities": (["text"],),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "reasoning_effort": (),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
    "moderation": (),
}
# fields of a generation config that hold numbers of tokens; transformers checks those of sequence_bias
FIELDS_OF_TOKENS = {name for name in GENERATION_FIELDS if name.endswith(("_token_id", "words_ids", "suppress_tokens"))}
# fields of a generation config that count, and their least value; transformers takes memory for some of them at once
COUNTS = {
    "max_length": 1,
    "max_new_tokens": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_cache_len": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "top_k": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "prefill_chunk_size": 1,
    "prompt_lookup_num_tokens": 1,
    "max_matching_ngram_size": 1,
}
NOT_SERVED = ("is_assistant", "token_healing")  # fields of a generation config
WITHIN_POSITIONS, MOST_COUNT = ("max_cache_len", "encoder_no_repeat_ngram_size"), 2**31 - 1
MOST_ANSWERS = 128  # per request
MOST_LIKELIEST = 20  # tokens beside each log-probability
MOST_STOPS, LONGEST_STOP = 32, 256  # stop texts, and characters of one: all are searched after every token
MOST_DIGITS = 20  # of the number of a token; Python reads no number of thousands of digits
LEAST_TEMPERATURE = 1e-6  # logits divided by less would overflow
# arguments of apply_chat_template, which the server sets; the template reads all others in chat_template_kwargs
OF_TEMPLATES = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents", "kwargs"}


def check_body(body: dict, model_config: PreTrainedConfig):
    check_characters(body)
    check_finite(body)
    for name, harmless in ASK_FOR_NOTHING.items():
        value = body.get(name)
        if value is not None and not any(value == each and type(value) is type(each) for each in harmless):
            raise ValueError(f"{name}={value!r} is not served, and would have no effect: leave it out")
    for name, (types, form) in FORMS.items():
        value = body.get(name)
        if value is not None and type(value) not in types:
            raise ValueError(f"{name}={value!r} must be {form}")
    check_sampling(body)
    if "prompt" in body and not (is_prompt(prompt := body["prompt"]) or is_list_of_prompts(prompt)):
        raise ValueError(
            f"prompt={prompt!r} must be a text, the numbers of its tokens, or a list of texts or of these"
        )
    if (count := body.get("n")) is not None and not 1 <= count <= MOST_ANSWERS:
        raise ValueError(f"n={count} must be from 1 to {MOST_ANSWERS}")
    check_logprobs(body)
    seed, tools = body.get("seed"), body.get("tools")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63):
        raise ValueError(f"seed={seed!r} is no integer of 64 bits")
    if (bias := body.get("logit_bias")) is not None and not is_bias(bias):
        most = model_config.vocab_size - 1
        form = f"numbers of tokens, from 0 to {most}, as names, and numbers as values, from -100 to 100"
        raise ValueError(f"logit_bias={bias!r} must have {form}")
    check_template_kwargs(body.get("chat_template_kwargs"))
    if body.get("max_tokens") == 0 and not body.get("echo"):
        raise ValueError("max_tokens=0 asks for nothing: with echo=true it tells the prompt")
    if (config := body.get("generation_config")) is not None:
        try:
            check_config(config, body, model_config)
        except RecursionError:
            raise ValueError("generation_config holds lists within lists, too many to read: pass fewer") from None
    if tools is not None and not are_tools(tools):
        form = '{"type": "function", "function": {"name": ...}}, whose parameters, if it has any, are a JSON schema'
        raise ValueError(f"tools={tools!r} must be a list of functions, each {form}")


def check_logprobs(body: dict):
    """Check the number of likeliest tokens: one number in completions, two fields in conversations."""
    logprobs, top = body.get("logprobs"), body.get("top_logprobs")
    if "messages" in body and body.get("echo"):
        raise ValueError("echo=True is of completions, which have one prompt: leave it out")
    if "messages" not in body:
        if top is not None:
            raise ValueError(f"top_logprobs={top!r} is of conversations: say how many in logprobs")
        if logprobs not in (None, False) and not is_count(logprobs):
            raise ValueError(f"logprobs={logprobs!r} must be a whole number from 0 to {MOST_LIKELIEST}")
        return
    if logprobs is not None and type(logprobs) is not bool:
        raise ValueError(f"logprobs={logprobs!r} must be true or false: say how many in top_logprobs")
    if top is not None and not is_count(top):
        raise ValueError(f"top_logprobs={top!r} must be a whole number from 0 to {MOST_LIKELIEST}")
    if top and not logprobs:
        raise ValueError(f"top_logprobs={top} without logprobs=true would have no effect: pass both")


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_LIKELIEST


def check_several(body: dict, answers: int):
    """Refuse too many answers, and fields that a stream cannot return. answers: number over all prompts."""
    if answers > MOST_ANSWERS:
        raise ValueError(
            f"{answers} answers are more than {MOST_ANSWERS} to one request: send fewer prompts at a time"
        )
    if not body.get("stream"):
        return
    whole = {"logprobs": body.get("logprobs"), "echo": body.get("echo")}
    for name, value in whole.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}={value!r} comes with a whole answer: leave out stream")
    if answers > 1:
        raise ValueError(f"a stream tells one answer, and this request asks for {answers}: leave out stream")


def check_characters(body: dict):
    """Refuse half of a character (a lone surrogate): JSON can hold it, but no tokenizer can encode it."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"the request holds {half!r}, which is half of a character: send whole ones") from None


def check_finite(fields: dict):
    """Refuse NaN and infinity, which Python reads in JSON: NaN is larger than no limit."""
    for name, value in fields.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise ValueError(f"{name}={value!r} must have no NaN and nothing infinite: pass finite numbers") from None


def check_sampling(fields: dict):
    temperature, top_p = fields.get("temperature"), fields.get("top_p")
    if isinstance(temperature, (int, float)) and temperature < LEAST_TEMPERATURE and temperature != 0:
        where = "below" if temperature < 0 else "next to"
        raise ValueError(f"temperature={temperature} is {where} 0: pass 0, which takes the likeliest token")
    if isinstance(top_p, (int, float)) and not 0 <= top_p <= 1:
        raise ValueError(f"top_p={top_p} is no probability: pass one from 0 to 1")


def check_config(text: str, body: dict, model_config: PreTrainedConfig):
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(f"generation_config={text!r} must be a text that holds JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"generation_config={text!r} must hold an object")
    if unread := sorted(config.keys() - GENERATION_FIELDS - DEPTH_FIELDS.keys()):
        refuse_foreign(unread, GENERATION_FIELDS | DEPTH_FIELDS.keys(), "generation_config")
        raise ValueError(f"generation_config has {', '.join(unread)}, which nothing reads: leave it out")
    if unserved := [name for name in NOT_SERVED if config.get(name)]:
        raise ValueError(f"generation_config has {', '.join(unserved)}, which is not served: leave it out")
    check_finite(config)
    check_sampling(config)
    check_counts(config, model_config.max_position_embeddings)
    vocab_size = model_config.vocab_size
    for name in sorted(config.keys() & FIELDS_OF_TOKENS):
        least = -1 if name == "eos_token_id" else 0  # -1: no token ends the answer
        if not all(type(token) is int and least <= token < vocab_size for token in numbers_in(config[name])):
            raise ValueError(
                f"generation_config has {name}={config[name]!r}: this model has the tokens from 0 to {vocab_size - 1}"
            )
    lengths = [name for name in SAY_LENGTH if body.get(name) is not None]
    if lengths and config.keys() & LENGTHS_OF_CONFIG:
        raise ValueError(f"{lengths[0]} and generation_config both say how long the answer is: leave one out")


def check_counts(config: dict, positions: int):
    for name, least in COUNTS.items():
        value, most = config.get(name), positions if name in WITHIN_POSITIONS else MOST_COUNT
        if value is not None and not (type(value) is int and least <= value <= most):
            raise ValueError(
                f"generation_config has {name}={value!r}, which must be a whole number from {least} to {most}"
            )


def numbers_in(value: Any) -> Iterator:
    """Yield what stands for tokens in a field, which may be one, or lists of them."""
    if isinstance(value, list):
        for each in value:
            yield from numbers_in(each)
    elif value is not None:
        yield value


def check_names(fields: dict, known: Collection[str]):
    """Refuse unknown fields that belong into generation_config or have another name here."""
    if unknown := sorted(set(fields) - set(known)):
        if "max_new_tokens" in unknown:
            raise ValueError("max_new_tokens has the name max_tokens in a request: write that")
        if of_generation := [name for name in unknown if name in GENERATION_FIELDS]:
            text = json.dumps({name: fields[name] for name in of_generation})
            raise ValueError(
                f"{', '.join(of_generation)}: put it in generation_config, a text that holds JSON: {json.dumps(text)}"
            )
        refuse_foreign(unknown, {*known, *DEPTH_FIELDS}, "a request")


def check_template_kwargs(given: Any):
    """Refuse arguments that the server sets: a client's template or padding could take all its time and memory."""
    if given is None:
        return
    if not isinstance(given, dict):
        raise ValueError(f"chat_template_kwargs={given!r} must be an object of names that the template reads")
    if ours := sorted(OF_TEMPLATES & given.keys()):
        raise ValueError(f"chat_template_kwargs has {', '.join(ours)}, which this server says itself: leave it out")


def check_stop(tokenizer, stop: Any):
    """Refuse stop texts, of the field `stop` or of a generation config, that cannot be searched in an answer."""
    if stop is None:
        return
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(map(is_text, texts)):
        raise ValueError(f"stop={stop!r} must be a text or a list of texts, none of them empty")
    if len(texts) > MOST_STOPS:
        raise ValueError(f"stop has {len(texts)} texts: pass up to {MOST_STOPS}")
    if (longest := max(map(len, texts), default=0)) > LONGEST_STOP:
        raise ValueError(f"stop has a text of {longest} characters: pass texts of up to {LONGEST_STOP}")
    if texts and LETTERS not in decode(tokenizer, tokenizer(LETTERS, add_special_tokens=False).input_ids):
        reason = f"this model's tokenizer does not give {LETTERS!r} back, so texts are not found in its tokens"
        raise ValueError(f"stop={stop!r} is not served: {reason}; leave it out, and cut the answer")


def check_answers(generation_config, streams: bool, tells_likelihoods: bool):
    """Refuse several sequences in an answer, and beams with a stream or with log-probabilities."""
    if (count := generation_config.num_return_sequences or 1) > 1:
        raise ValueError(f"num_return_sequences={count}: say n={count} in the request")
    beams = generation_config.num_beams or 1
    if streams and beams > 1:
        raise ValueError(f"num_beams={beams} knows its answer at the end alone: leave out stream")
    if tells_likelihoods and beams > 1:
        raise ValueError(f"num_beams={beams} goes without logprobs: leave one out")


def check_bias(bias: Any, vocab_size: int):
    """Apply a sequence_bias once, so that transformers refuses it here and not with the first token of a stream."""
    if bias is None:
        return
    try:
        SequenceBiasLogitsProcessor(bias)(torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, vocab_size))
    except (IndexError, TypeError) as error:
        form = "a list of pairs of a list of tokens and a number with a point, such as [[[5, 6], 2.0]]"
        raise ValueError(f"sequence_bias={bias!r} must be {form}") from error


def check_tools(tools: Any, template: Any):
    """Refuse tools that the chat template does not read. `check_body` refuses tools of a wrong form."""
    if tools and are_tools(tools) and isinstance(template, str) and "tools" not in template:
        raise ValueError("tools would have no effect: this model's chat template does not read them; leave them out")


def check_conversation(turns: Any):
    if not is_conversation(turns):
        reason = "one turn or more, each with a role and a content that is text or a list of parts"
        raise ValueError(f"messages={turns!r} is no conversation: pass {reason}")
    parts = [part for turn in turns if isinstance(turn.get("content"), list) for part in turn["content"]]
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"a part of type {kind!r} is not served: this model reads parts of type 'text'")


def read_arguments(turns: list[dict]):
    """Read the arguments of earlier tool calls, which are texts that hold JSON; an empty one holds none."""
    for calls in (turn.get("tool_calls") or [] for turn in turns):
        functions = [call.get("function") or call for call in calls] if is_list_of(dict, calls or [{}]) else [None]
        if not all(isinstance(function, dict) and "arguments" in function for function in functions):
            raise ValueError(f"tool_calls={calls!r} must be a list of functions, each with a name and arguments")
        for function in (each for each in functions if isinstance(each["arguments"], str)):
            text = function["arguments"]
            try:
                function["arguments"] = json.loads(text or "{}")
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"arguments={text!r} of a tool call must be a text that holds JSON: {error}"
                ) from None


def is_conversation(turns: Any) -> bool:
    return (
        isinstance(turns, list)
        and bool(turns)
        and all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in turns)
        and all(isinstance(turn.get("content"), (str, list)) or turn.get("tool_calls") for turn in turns)
    )


def is_prompt(value: Any) -> bool:
    return isinstance(value, str) or is_list_of(int, value)


def is_list_of_prompts(value: Any) -> bool:
    return is_list_of(str, value) or isinstance(value, list) and bool(value) and all(is_list_of(int, v) for v in value)


def is_list_of(kind: type, value: Any) -> bool:
    """Return whether the value is a list of `kind` that is not empty."""
    return isinstance(value, list) and bool(value) and all(type(each) is kind for each in value)


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def is_bias(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(token.isascii() and token.isdecimal() and len(token) <= MOST_DIGITS for token in value)
        and all(type(each) in (int, float) and -100 <= each <= 100 for each in value.values())
    )


def are_tools(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_tool, value))


def is_tool(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    parameters = function.get("parameters") if isinstance(function, dict) else None
    return isinstance(function, dict) and is_text(function.get("name")) and isinstance(parameters, (dict, type(None)))
