"""Generation for requests, which all share the passes of the model."""

import asyncio
import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from fastapi import HTTPException
from transformers.cli.serving.utils import GenerateManager
from transformers.generation import BaseStreamer, LogitsProcessor

from modeling_looped.overrides import is_as_written
from modeling_looped.shared_passes import SharedPasses, checked_by

from .answer_parts import AnswerParts
from .asked import Asked, current_request
from .grammars import keeps_to_form
from .likelihoods import Foretold, foretold, likelihoods, parts_of_prompt
from .request_checks import check_answers, check_bias
from .stop_texts import StopsInAnswer
from .tool_choice import check_call_is_read


MOST_THREADS = 64  # requests that are generated at a time; others wait
POSITIONS = 64  # of a prompt whose logits are in memory at a time
TOO_DEEP = "the request holds lists or objects within each other, too many to read: pass fewer"
NEW_TOKENS = 1024  # default length of an answer, as in the server of transformers


class Cancelled(Exception):
    """Raised to end a generation whose client has disconnected."""


class UntilCancelled(BaseStreamer):
    """Ends a generation whose client has disconnected. Keeps what logits say of the tokens that they predict.

    likeliest: how many of the likeliest tokens are kept beside each."""

    def __init__(self, likeliest: int | None):
        self._cancelled, self.likeliest = threading.Event(), likeliest
        self.foretold: list[Foretold] = []

    def cancel(self):
        self._cancelled.set()

    def put(self, value):
        if self._cancelled.is_set():
            raise Cancelled

    def put_logits(self, tokens, logits):
        self.foretold += foretold(logits, tokens.tolist(), self.likeliest or 0)

    def end(self):
        pass


def check_client(streamer):
    """Let the streamer raise an error if the client has disconnected."""
    cancelled = getattr(streamer, "_cancelled", None)  # a field of transformers
    if cancelled is not None and cancelled.is_set():
        streamer.put(None)


class NeedsToken(LogitsProcessor):
    """Refuses a generation config that leaves no token to choose. It comes behind what forbids and biases tokens."""

    reads_rows_apart = True

    def __call__(self, input_ids, scores):
        if not (best := scores.max()).isfinite():
            raise ValueError(
                f"generation_config leaves no token to choose, since the best score is {best.item()}: leave out what "
                "forbids tokens or changes their scores, such as suppress_tokens or guidance_scale"
            )
        return scores


class WholeStream(BaseStreamer):
    """A stream of transformers that sends the parts of an answer as `AnswerParts` reads them: it is the streamer's
    decoder, which tells it no text, and is given every token of the answer."""

    def __init__(self, streamer, asked: Asked, parts: AnswerParts):
        self.streamer, self.asked, self.parts = streamer, asked, parts
        self._cancelled = streamer._cancelled
        streamer._decode_stream, streamer._parser = self, None

    def put(self, value):
        self.streamer.put(value if value is None else value.flatten())  # assisted decoding puts rows of tokens

    def put_loops(self, loops):
        self.asked.loops.extend(loops.tolist())

    def step(self, _, token: int):
        self.send(self.parts.put(token))

    def send(self, parts: list):
        for part in parts:
            self.streamer._enqueue(part)

    def end(self):
        pass  # `close` does, once the loops of all tokens are known

    def close(self):
        self.send(self.parts.end())
        self.streamer.end()


class ModelOfRequest:
    """The model with a `generate` that shares passes with other requests and runs at the depth of this request."""

    def __init__(self, passes: SharedPasses):
        self.passes, self.asked = passes, current_request.get()
        self.until_cancelled = UntilCancelled(self.asked.likeliest)
        self.prompt_texts: list[str] = []  # of the tokens of a text that is echoed

    def __getattr__(self, name):
        return getattr(self.passes.model, name)

    def generate(self, streamer=None, **kwargs):
        config, length = kwargs["generation_config"], kwargs["input_ids"].shape[1]
        if streamer is not None:
            parts = self.asked.parts(kwargs["tokenizer"], kwargs["input_ids"][0].tolist(), streamer._parser)
            streamer = WholeStream(streamer, self.asked, parts)
        elif config.num_beams in (None, 1):  # beams take no streamer
            streamer = self.until_cancelled
        if config.stop_strings:
            begins_a_text = self.asked.prompt is None
            stops = StopsInAnswer(kwargs["tokenizer"], config.stop_strings, length, begins_a_text)
            kwargs["stopping_criteria"] = [stops]
            config.stop_strings = None
        asked, prompt = self.asked, kwargs["input_ids"]
        if config.num_beams in (None, 1) and (ends := asked.ends_with_call(kwargs["tokenizer"], prompt[0].tolist())):
            kwargs["stopping_criteria"] = [*kwargs.get("stopping_criteria", ()), ends]
        config.return_dict_in_generate, config.output_logits = True, asked.likeliest is not None
        settings = {"logits_processor": asked.processors, **kwargs, **asked.fields}
        check = partial(check_client, streamer or self.until_cancelled)
        if asked.echoes and asked.likeliest is not None:
            if isinstance(asked.prompt, str):
                self.prompt_texts = parts_of_prompt(kwargs["tokenizer"], asked.prompt)
            with checked_by(check):
                self.read_prompt(prompt)
        if asked.is_prompt_alone:
            self.note_likelihoods(kwargs["tokenizer"], prompt[0].tolist(), length)
            return prompt
        try:
            result = self.passes.generate(streamer=streamer, check=check, **settings)
        except (ValueError, TypeError, RuntimeError) as error:
            if streamer is None or streamer is self.until_cancelled:
                raise
            raise RuntimeError(json.dumps(str(error))[1:-1]) from error  # streams put the text between quotes
        asked.loops[:] = result.token_loops[0].tolist()
        ids = result.sequences[0].tolist()
        asked.note_end(ids[length:])
        if isinstance(streamer, WholeStream):
            streamer.close()
        for token, logits in zip(ids[length:], result.logits or ()):  # of a decoding loop of transformers
            self.until_cancelled.foretold += foretold(logits, [token], asked.likeliest)
        self.note_likelihoods(kwargs["tokenizer"], ids, length)
        return result.sequences

    def read_prompt(self, prompt: torch.Tensor):
        """Note what predicts all prompt tokens but the first, with the depth and exits of the answer."""
        model, options, tokens = self.passes.model, self.asked.options, prompt[0, 1:].tolist()
        rule, settings = options.exit_rule(model.config), {"num_loops": options.num_loops, "use_cache": False}
        with self.passes.beside(*prompt.shape), torch.no_grad():
            if rule is None and is_as_written(model, "forward"):  # few positions have logits at a time
                states, read = model.model(prompt, **settings).last_hidden_state[0, :-1], model.logits
            else:
                states, read = model(prompt, exit_rule=rule, **settings).logits[0, :-1], lambda logits: logits
            for begin in range(0, len(tokens), POSITIONS):
                part = slice(begin, begin + POSITIONS)
                self.until_cancelled.foretold += foretold(read(states[part]), tokens[part], self.asked.likeliest)

    def note_likelihoods(self, tokenizer, ids: list[int], length: int):
        """Store the log-probabilities of the answer, which follows a prompt of `length` tokens."""
        asked = self.asked
        if asked.likeliest is None:
            return
        begin = length if asked.prompt is None else 0  # an answer in a conversation is a text of its own
        first = [Foretold(ids[0], None, [])] if asked.echoes else []
        said = first + self.until_cancelled.foretold
        asked.likelihoods = likelihoods(tokenizer, ids[begin:], said, self.prompt_texts)


class SharedGenerateManager(GenerateManager):
    """Runs requests, each in its own thread; their calls share the passes of the model."""

    def __init__(self, passes: SharedPasses, max_loops: int):
        self.passes, self.max_loops, self.pool = passes, max_loops, ThreadPoolExecutor(MOST_THREADS)

    def generate_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
        self.check(processor, inputs, gen_config, streams=True)
        if (parser := kwargs.get("response_parser")) is not None:
            parser.initial_events = []  # what the prompt has begun, which a stream of transformers tells first
        return super().generate_streaming(ModelOfRequest(self.passes), processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(self, model, processor, inputs, gen_config, *args, **kwargs):
        self.check(processor, inputs, gen_config)
        model = ModelOfRequest(self.passes)
        try:
            _, length, ids = await super().generate_non_streaming(
                model, processor, inputs, gen_config, *args, **kwargs
            )
        except asyncio.CancelledError:
            model.until_cancelled.cancel()
            raise
        except (ValueError, TypeError) as error:
            raise bad_request(error) from error
        except (LookupError, ArithmeticError, AttributeError, ImportError, AssertionError) as error:
            if not current_request.get().has_config:
                raise
            raise bad_request(ValueError(f"generation_config asks for what fails here: {error}")) from error
        parts = current_request.get().parts(processor, inputs["input_ids"][0].tolist())
        return "".join(parts.whole(ids.tolist())), length, ids

    def check(self, tokenizer, inputs, gen_config, streams: bool = False):
        """Check a request before anything is computed or streamed, and set the length of its answer."""
        asked, model = current_request.get(), self.passes.model
        if isinstance(asked.prompt, list):
            put_tokens(inputs, asked.prompt, model)
        rows, length = inputs["input_ids"].shape
        try:
            if length == 0:
                raise ValueError("the prompt is empty: write at least one token")
            room = model.config.max_position_embeddings + 1 - length  # the last new token is not an input
            if not asked.has_length:
                beams = gen_config.num_beams or 1
                here = room if self.passes.max_tokens is None else self.passes.max_tokens // beams - length
                gen_config.max_new_tokens = max(1, min(gen_config.max_new_tokens or NEW_TOKENS, room, here))
            prepared, _ = model._prepare_generation_config(gen_config, **asked.fields)
            check_answers(prepared, streams, asked.likeliest is not None)
            check_bias(prepared.sequence_bias, model.config.vocab_size)
            if gen_config.max_new_tokens is None:  # generation_config has max_length, of prompt and answer
                if prepared.max_length <= length:
                    raise ValueError(
                        f"max_length={prepared.max_length} of generation_config leaves no room behind a prompt of "
                        f"{length} tokens: raise it, or say max_new_tokens"
                    )
                gen_config.max_new_tokens = prepared.max_length - length
            ends = prepared.eos_token_id
            ends = ends if isinstance(ends, list) else [ends]
            asked.end_tokens = tuple(end for end in ends if end not in (None, -1))
            asked.options = options = prepared.depth_options
            asked.full_depth = options.deepest(model.config)
            if asked.full_depth > self.max_loops:
                raise ValueError(
                    f"num_loops={asked.full_depth} is more than the {self.max_loops} that this server runs"
                )
            if asked.seed is not None and prepared.do_sample and not options.shares_passes:
                beside = {"draft_loops": options.draft_loops, "state_seed": options.state_seed}
                name = next((name for name, value in beside.items() if value is not None), "exit_selection")
                raise ValueError(
                    f"seed={asked.seed} goes with plain sampling and exits that stop, not with {name}: leave one out"
                )
            if asked.has_config:
                asked.processors.append(NeedsToken())
            if asked.form is not None:
                asked.processors.append(keeps_to_form(asked.form, model, prepared, length))
                if asked.form.may_call:
                    check_call_is_read(asked.form, tokenizer, inputs["input_ids"][0].tolist())
            new_tokens = gen_config.max_new_tokens
            if new_tokens > room:
                raise ValueError(
                    f"a prompt of {length} tokens and max_tokens={new_tokens} are more than the "
                    f"max_position_embeddings={model.config.max_position_embeddings} of this model: shorten one"
                )
            rows *= prepared.num_beams or 1
            self.passes.check_size(rows, rows * (length + new_tokens))
        except (ValueError, TypeError) as error:
            raise bad_request(error) from error
        asked.is_checked = True

    def submit(self, fn, *args, **kwargs) -> Future:
        return self.pool.submit(fn, *args, **kwargs)

    def async_submit(self, fn, *args, **kwargs) -> asyncio.Future:
        return asyncio.get_running_loop().run_in_executor(self.pool, partial(fn, *args, **kwargs))


def put_tokens(inputs, tokens: list[int], model):
    """Replace the tokens of the text in `inputs` by these."""
    if wrong := [token for token in tokens if not 0 <= token < model.config.vocab_size]:
        raise bad_request(
            ValueError(
                f"prompt holds the token {wrong[0]}: this model has those from 0 to {model.config.vocab_size - 1}"
            )
        )
    inputs.clear()
    inputs["input_ids"] = torch.tensor([tokens], dtype=torch.long, device=model.device)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])


def bad_request(error: Exception) -> HTTPException:
    return HTTPException(status_code=400, detail=TOO_DEEP if isinstance(error, RecursionError) else str(error))
