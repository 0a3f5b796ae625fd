"""`--model looped` of lm-eval: every depth is scored from one pass.

At the first depth that lm-eval evaluates, a request is scored for all depths; the other depths recall the answer. So
lm-eval evaluates one depth after another as usual, but the model runs once. Texts are generated anew at each depth.
An answer is recalled only while weights, adapters, configs and tokenizer are those that gave it.

With an exit criterion, every token of a scored row, also of its context, stops at its exit, as with the `exit_rule` of
a pass: later tokens attend to the keys and values that it had there. That takes a pass for each depth. With
exit_selection="after" all tokens run all loops in the one pass, and a scored token takes its logits from the loop at
which it would have exited, or from the evaluated depth if that comes first.
"""

import logging
from bisect import bisect_left
from collections.abc import Collection
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
from accelerate.utils import gather_object
from lm_eval.api.model import hash_args
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import simple_parse_args_string

from looped_eval.common.model_folder import LONG_TEXTS, check_vocabulary, start_token
from looped_recipes.common.command_line import parse_depths
from looped_recipes.common.hub import model_inside
from modeling_looped import register_public_formats
from modeling_looped.checks import check_starts_from_noise

from .answers import open_answers, source_of, state_of
from .question import check_question, join_depths, refuse_depths_in
from .token_scorer import TokenScorer


logger = logging.getLogger(__name__)
SCORING = 3  # raised when a request gets another answer of the same model, so that kept ones are not recalled


class Loops(NamedTuple):
    loops: int  # sum over the tokens of an answer
    tokens: int


class Answer(NamedTuple):
    value: object  # as lm-eval expects it: (log-likelihood, is greedy), log-likelihood, or text
    loops: int = 0  # sum over the tokens of the answer
    tokens: int = 0


@register_model("looped")
class LoopedLM(TokenScorer):
    def __init__(
        self,
        pretrained,
        num_loops=None,
        exit_criterion: str | None = None,
        exit_threshold: float | None = None,
        min_loops: int = 1,
        exit_selection: str = "stop",
        answers: str | None = None,
        state_seed: int | None = None,
        revision: str = "main",
        device: str | None = None,
        **kwargs,
    ):
        """Take the arguments of `HFLM`, and:

        num_loops: depths, such as 4 or 1..4; by default the model's `num_loops`.
        exit_criterion, exit_threshold, min_loops, exit_selection: as in `generate`; but a scored context exits, too.
        answers: file that stores answers, one for each process, written after every batch. An answer is recalled
            only for the same weights, classes of modules, config, tokenizer and adapter, whether `pretrained` is a
            folder or a model, and the same arguments, except those in `answers.CHANGE_NO_ANSWER`.
        state_seed: seed of the initial state of every scored row and of every generated position; without it, that
            state is zeros.
        device: by default a GPU if there is one.
        """
        if isinstance(pretrained, str):
            pretrained = model_inside(pretrained)
        self.depths, self.rule = check_question(
            pretrained,
            num_loops,
            exit_criterion,
            exit_threshold,
            min_loops,
            exit_selection,
            revision,
            kwargs.get("trust_remote_code", False),
            kwargs.get("subfolder", ""),
        )
        register_public_formats()
        super().__init__(pretrained, revision=revision, device=device or "auto", **{"backend": "causal", **kwargs})
        refuse_adapters_outside_layers(self.model)
        if self.prefix_token_id is None:  # lm-eval needs one for every request
            start_token(self.tokenizer)  # refuses
        self.tokenizer.deprecation_warnings[LONG_TEXTS] = True  # no warning about long texts: lm-eval cuts them
        if state_seed is not None:
            check_starts_from_noise(self.config)
        saved = getattr(self.model.generation_config, "exit_criterion", None)
        if saved is not None and self.rule is None:
            logger.warning(f"Exits by {saved!r}, saved with this model, are not used: name exit_criterion for that")
        if hasattr(self, "accelerator"):  # HFLM splits requests between processes only with several GPUs
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        self.answers = {} if answers is None else open_answers(f"{answers}_rank{self.rank}.db")
        self._state_of_model = [] if answers is None else source_of(self, kwargs)
        self._present = None  # state of the model when it was last asked
        self._hook_of_lm_eval = self.cache_hook  # that of `use_cache`, set by `simple_evaluate`
        self.cache_hook = SimpleNamespace(add_partial=self._keep_generated)  # called by HFLM
        self.state_seed = state_seed
        self._largest_batch: int | None = None
        self._generated_loops = []  # (loops, tokens) of each row of the current batch
        self.at(self.depths[-1])

    @classmethod
    def create_from_arg_string(cls, arg_string, additional_config=None):
        return cls.create_from_arg_obj(simple_parse_args_string(join_depths(arg_string)), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict, additional_config=None):
        """Make the model for lm-eval, which then evaluates it once: at one depth."""
        depths = [] if arg_dict.get("num_loops") is None else parse_depths(arg_dict["num_loops"])
        if len(depths) > 1:
            written = "+".join(map(str, depths))
            raise ValueError(
                f"num_loops={written}: lm-eval evaluates a model that it makes by its name at one depth only. "
                "`looped eval` evaluates all, and so does, in Python, simple_evaluate(lm.at(depth), ...) for each "
                f"depth of lm = LoopedLM(..., num_loops='{written}')"
            )
        return super().create_from_arg_obj(arg_dict, additional_config)

    def __str__(self):
        return "looped"

    def _detect_batch_size(self, requests=None, pos: int = 0) -> int:
        """Search the size for texts of maximal length only once: every depth runs the same pass, to the deepest.

        Each process searches for itself: those that recall all of their answers do not search, so that nobody may
        wait for them. Nothing in a pass waits for other processes, and their batches may differ."""
        if requests is None and self._largest_batch is not None:
            return self._largest_batch
        world_size, self._world_size = self._world_size, 1  # HFLM gathers the sizes of several processes
        try:
            size = super()._detect_batch_size(requests, pos)
        finally:
            self._world_size = world_size
        if requests is None:
            self._largest_batch = size
        return size

    def _batch_scheduler(self, pos, requests):
        """Search a size for each part of the requests, of which there may be fewer than parts that were asked for."""
        asked, self.batch_schedule = self.batch_schedule, min(self.batch_schedule, len(requests))
        try:
            return super()._batch_scheduler(pos, requests)
        finally:
            self.batch_schedule = asked

    def at(self, depth: int) -> "LoopedLM":
        """Set the depth at which requests are answered from now on."""
        if depth not in self.depths:
            raise ValueError(f"depth {depth} is not among those of this model, num_loops={self.depths}")
        self.depth = depth
        self.loops: dict[str, dict[str, Loops]] = {}  # of each request of each task, at this depth
        self._loops_here = self.loops  # those of this process
        return self

    def get_model_info(self) -> dict:
        info = {**super().get_model_info(), "num_loops": self.depth}
        if self.rule is not None:
            rule = {"exit_criterion": self.rule.name, "exit_threshold": self.rule.threshold}
            rule |= {"min_loops": self.rule.min_loops, "exit_selection": self.rule.selection}
            info |= {**rule, "mean_loops": self.mean_loops}
        return info

    @property
    def mean_loops(self) -> float | None:
        """Mean number of loops of the tokens that were scored or generated at this depth."""
        return mean_of([loops for of_task in self.loops.values() for loops in of_task.values()])

    def barrier(self):  # the only call of all processes after a type of request
        super().barrier()
        if self.world_size > 1:
            self.loops = {}
            for of_process in gather_object([self._loops_here]):
                for task, of_task in of_process.items():
                    self.loops.setdefault(task, {}).update(of_task)

    def _create_tokenizer(self, pretrained, tokenizer, **kwargs):
        try:
            super()._create_tokenizer(pretrained, tokenizer, **kwargs)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"no tokenizer could be opened in {tokenizer or pretrained!r} ({error}): save one there, or name "
                "another folder with tokenizer=..."
            ) from error
        check_vocabulary(self.tokenizer, self.config)

    # answers

    def set_cache_hook(self, cache_hook):
        """Take the hook of `simple_evaluate(use_cache=...)`, which keeps answers beside those that are kept here."""
        if len(self.depths) > 1:
            raise ValueError(
                "use_cache of simple_evaluate keeps one answer to a request, whatever its depth, and num_loops is "
                f"{'+'.join(map(str, self.depths))}: name one depth, or use LoopedLM(..., answers=FILE) or "
                "`looped eval --use_cache FILE`, which keep those of all depths"
            )
        self._hook_of_lm_eval = cache_hook

    def _forget_if_changed(self):
        """Compare the model, which may have been trained on or got another adapter, with the one that was asked
        last."""
        present = hash_args("model", state_of(self))
        if present != self._present and isinstance(self.answers, dict):
            self.answers.clear()
        self._present = present

    def _key(self, kind: str, arguments, depth: int) -> str:
        model = [str(self.config._name_or_path), *self._state_of_model, self._present]
        return hash_args(kind, [SCORING, *model, depth, str(self.rule), *self._seeded(), *arguments])

    def _seeded(self) -> list:
        return [] if self.state_seed is None else [f"state_seed={self.state_seed}"]

    def _keep(self, kind: str, arguments, depth: int, answer: Answer):
        self.answers[self._key(kind, arguments, depth)] = tuple(answer)
        if depth == self.depth:
            self._hook_of_lm_eval.add_partial(kind, arguments, answer.value)

    def _write_kept(self):
        """Write to the file what was kept since the last time. One transaction for a batch is the faster way."""
        if not isinstance(self.answers, dict):
            self.answers.commit()

    def _keep_generated(self, kind: str, arguments, text: str):
        answer = Answer(text, *(self._generated_loops.pop(0) if self._generated_loops else ()))
        if self._is_sampled(arguments[1]):  # not stored: a second answer would differ
            loops, tokens = self._sampled_loops.get(name_of(arguments), (0, 0))
            self._sampled_loops[name_of(arguments)] = Loops(loops + answer.loops, tokens + answer.tokens)
        else:
            self._keep(kind, arguments, self.depth, answer)
            self._write_kept()

    def _count(self, request, loops: int, tokens: int):
        self._loops_here.setdefault(request.task_name, {})[name_of(request.args)] = Loops(loops, tokens)

    def _recall(self, kind: str, requests, score) -> list:
        """Return the answers at this depth. `score` computes and stores those that are missing."""
        self._forget_if_changed()
        keys = [self._key(kind, request.args, self.depth) for request in requests]
        asked = dict(zip(keys, requests))
        missing = [request for key, request in asked.items() if key not in self.answers]
        if missing:
            score(missing)
        found = {key: Answer(*self.answers[key]) for key in asked}
        for key, request in zip(keys, requests):
            self._count(request, found[key].loops, found[key].tokens)
        return [found[key].value for key in keys]

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        score = partial(super().loglikelihood, disable_tqdm=disable_tqdm)
        return self._recall("loglikelihood", requests, score)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        score = partial(self._score_documents, disable_tqdm=disable_tqdm)
        return self._recall("loglikelihood_rolling", requests, score)

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Recall or store greedy texts; generate sampled texts anew each time."""
        for request in requests:
            refuse_depths_in(request.args[1], f"the generation_kwargs of task {request.task_name}")
        is_sampled = [self._is_sampled(request.args[1]) for request in requests]
        greedy = [request for request, sampled in zip(requests, is_sampled) if not sampled]
        others = [request for request, sampled in zip(requests, is_sampled) if sampled]
        generate = partial(super().generate_until, disable_tqdm=disable_tqdm)
        recalled = iter(self._recall("generate_until", greedy, generate))
        self._sampled_loops: dict[str, Loops] = {}
        new = iter(generate(others) if others else ())
        for request in others:
            self._count(request, *self._sampled_loops[name_of(request.args)])
        return [next(new if sampled else recalled) for sampled in is_sampled]

    def _is_sampled(self, wishes: dict) -> bool:
        """Return whether lm-eval samples with these arguments; a temperature alone makes it sample."""
        return bool(normalize_gen_kwargs(wishes, self.max_gen_toks)["do_sample"])

    # scoring

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, override_bs: int | None = None):
        """Score each (key, context, continuation) and store the answers, which `_recall` reads."""
        return self.score_tokens(requests, disable_tqdm, self._keep_likelihoods)

    def _keep_likelihoods(self, requests, numbers, sums):
        for number in numbers:
            arguments, _, continuation = requests[number]
            for depth, (log_p, misses, loops) in zip(self.depths, sums[:, :, number].tolist()):
                answer = Answer((log_p, misses == 0), int(loops), len(continuation))
                self._keep("loglikelihood", arguments, depth, answer)
        self._write_kept()

    def _score_documents(self, requests, disable_tqdm: bool):
        documents = [self.tokens_of_document(request.args[0]) for request in requests]
        for request, document, sums in zip(requests, documents, self.score_documents(documents, disable_tqdm)):
            for depth, (log_p, _, loops) in zip(self.depths, sums.tolist()):
                answer = Answer(log_p, int(loops), len(document))
                self._keep("loglikelihood_rolling", request.args, depth, answer)
        self._write_kept()

    def _model_call(self, inps, attn_mask=None, labels=None) -> torch.Tensor:
        """Run the pass with which lm-eval searches the batch size that fits. It needs the memory of scoring, with
        more logits, and of the cache of every loop, as generation does."""
        with torch.no_grad(), self.autocast():
            return self.model.logits(self._states_of(inps, use_cache=True).last_hidden_state)

    # generation

    def _model_generate(self, context, max_length, stop, **generation_kwargs):
        # of what may be saved with the model, drafts change no text, but do not go with exits and small depths, and
        # max_new_tokens would go before max_length
        saved = {"draft_loops": None, "max_new_tokens": None}
        settings = {"num_loops": self.depth, "state_seed": self.state_seed, **saved, **generation_kwargs}
        if self.rule is None:
            return super()._model_generate(context, max_length, stop, **settings)
        exits = {"exit_criterion": self.rule.name, "exit_threshold": self.rule.threshold}
        exits |= {"min_loops": self.rule.min_loops, "exit_selection": self.rule.selection}
        exits |= {"prompt_loops": None, "exit_interval": None, "return_dict_in_generate": True}
        runs_coda_after_every_loop = self.rule.selection == "after" and self.config.num_coda_layers > 0
        with without_cache(self.model) if runs_coda_after_every_loop else nullcontext():
            outputs = super()._model_generate(context, max_length, stop, **exits, **settings)
        written = outputs.sequences[:, context.shape[1] :].tolist()
        loops = [row[: self._num_kept(tokens, stop)] for tokens, row in zip(written, outputs.token_loops)]
        self._generated_loops = [(int(row.sum()), int((row > 0).sum())) for row in loops]
        return outputs.sequences

    def _num_kept(self, tokens: list[int], stop: list[str]) -> int:
        """Count the tokens up to the one that completes the first stop string. A row continues until all rows of its
        batch have stopped; the tokens after its stop string are discarded."""

        def has_stopped(count: int) -> bool:
            text = self.tok_decode(tokens[:count], skip_special_tokens=False)
            return any(string in text for string in stop if string)

        return 1 + bisect_left(range(1, len(tokens)), True, key=has_stopped)


@contextmanager
def without_cache(model):
    """Let `generate` keep no cache, though HFLM asks for one: it has no room for a coda that runs after every loop."""
    generate = model.generate
    model.generate = lambda **arguments: generate(**{**arguments, "use_cache": False})
    try:
        yield
    finally:
        del model.generate


def name_of(arguments: tuple) -> str:
    """Return the name of a request in `LoopedLM.loops`."""
    return hash_args("", arguments)


def mean_of(answers: Collection[Loops]) -> float | None:
    """Return the mean loops of the tokens of all answers; None if there are no tokens."""
    tokens = sum(answer.tokens for answer in answers)
    return sum(answer.loops for answer in answers) / tokens if tokens else None


def refuse_adapters_outside_layers(model):
    """Refuse adapters that PeftModel.forward applies: depths are read from the decoder, which they do not reach."""
    for name, adapter in getattr(model, "peft_config", {}).items():
        by_tokens = getattr(adapter, "alora_invocation_tokens", None) is not None
        if adapter.is_prompt_learning or by_tokens or adapter.peft_type == "XLORA":
            kind = "aLoRA" if by_tokens else getattr(adapter.peft_type, "value", adapter.peft_type)
            raise ValueError(
                f"adapter {name!r} is of the kind {kind}, which is applied around the model and not in its layers: "
                "what is scored at several depths would be without it. Evaluate one depth at a time with lm-eval's "
                "own model: --model hf --model_args pretrained=...,peft=...,num_loops=4"
            )
