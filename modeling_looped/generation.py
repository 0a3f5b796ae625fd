"""generate() of a looped model: transformers' own, with depth, early exit, drafting and cache sharing as arguments.

Which way of decoding runs: greedy decoding and sampling under an exit criterion (or a warm start) go to
`continuous.py`, where rows of a batch exit apart; self-speculation to `speculation.py`; everything else, and what
these two do not know, to transformers' own loops, whose passes stop early by themselves (`exit_watch.py`).
"""

import copy
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.utils import logging

from .cache import LoopedCache, sharing_of
from .continuous import decode_continuously
from .cpu import decoding
from .depth import check_count, check_depths
from .depth_options import DEPTH_FIELDS, EXITS, DepthOptions, refuse_sharing, set_fields
from .engine import obstacle_to_rows_apart
from .names import refuse_foreign
from .outputs import LoopedGenerateBeamOutput, LoopedGenerateOutput
from .speculation import speculate


logger = logging.get_logger(__name__)


if TYPE_CHECKING:  # what the mixin is mixed into, as transformers describes it
    from transformers._typing import GenerativePreTrainedModel

    class Generative(GenerativePreTrainedModel, GenerationMixin, nn.Module): ...
else:
    Generative = GenerationMixin


class LoopedGenerationMixin(Generative):
    def generate(self, *args, **kwargs):
        """As `GenerationMixin.generate`, and:

        num_loops: depth of every token, or the most it may take; one number or one per prompt.
        exit_criterion, exit_threshold: stop a token's loops early, see `exit_criteria.py`. Only generated tokens exit.
        min_loops, exit_interval: check for exits from this loop on, and at every n-th loop after it.
        prompt_loops: depth of the prompt, by default num_loops.
        warm_start: the next token's loops start from the last token's state.
        draft_loops, draft_tokens: self-speculation: how many loops a draft runs, and how many tokens are drafted.
        cache_sharing: "none", "last" or "cyclic-S".

        All are also fields of `generation_config`; None in a call undoes a saved one, and num_loops in a call undoes
        saved exits, unless the call names a field of them too. With return_dict_in_generate the
        output has `token_loops`; a streamer with a method `put_loops` receives them before each `put` (but not by
        assisted decoding).
        """
        names = [name for name in ("inputs_embeds", "inputs", "input_ids") if kwargs.get(name) is not None]
        check_prompt(kwargs[names[0]] if names else args[0] if args else None)
        if (count := kwargs.get("exit_candidates")) is not None:
            raise ValueError(f"exit_candidates={count} is no longer known: leave it out")
        self._check_names(kwargs)
        with decoding(self):
            return super().generate(*args, **kwargs)

    def _check_names(self, arguments: dict):
        """transformers too refuses what it does not know, but not what stands in a generation config."""
        known = {*DEPTH_FIELDS, *vars(GenerationConfig()), *signature(super().generate).parameters}
        refuse_foreign(arguments, known | {*signature(self.forward).parameters}, "generate")
        for config in (self.generation_config, arguments.get("generation_config")):
            if config is not None:
                # made of config.json, where a folder has no generation_config.json, it has the fields of that too
                others = [name for name in vars(config) if not name.startswith("_") and not hasattr(self.config, name)]
                refuse_foreign(others, known | {"depth_options", "cache_is_given"}, "generation_config")

    def adjust_generation_fn(self, generation_config, *args, **kwargs):
        """At loading, which may ask for a depth: it wins over a saved one, and over exits, which are announced."""
        super().adjust_generation_fn(generation_config, *args, **kwargs)
        if generation_config is not None:
            return
        exits = {name: value for name, value in set_fields(self.generation_config).items() if name in EXITS}
        if asked_for := getattr(self.config, "_num_loops_asked_for", False):
            for name in ("num_loops", *EXITS):
                setattr(self.generation_config, name, None)
        if "exit_criterion" in exits:
            logger.warning_once(
                f"The generation_config.json of {self.config.name_or_path or 'this model'} lets tokens exit early: "
                f"{listed(exits)}. "
                + (
                    f"num_loops={self.config.num_loops} was asked for, so generate() leaves these out."
                    if asked_for
                    else "generate() does so unless num_loops or exit_criterion=None is passed."
                )
            )

    def _keep_depth_fields(self):
        """Before saving: a generation config that came with the model is else made anew at loading, without them."""
        fields = set_fields(self.generation_config)
        if fields:
            self.generation_config._from_model_config = False
        if "exit_criterion" in fields:
            logger.warning_once(
                f"Exits are saved with this model: {listed(fields)}. They were chosen for the weights that they were "
                "measured on; if these have been trained since, choose anew with `python -m eval.halting FOLDER "
                "--write`, or set model.generation_config.exit_criterion to None before saving."
            )

    def _prepare_generation_config(self, generation_config, **kwargs):
        arguments = {name: kwargs.pop(name) for name in DEPTH_FIELDS if name in kwargs}
        if hasattr(generation_config, "depth_options"):  # as pipelines of transformers 5.17 pass it, with an old rule
            kwargs.pop("exit_rule", None)
        options, asked = DepthOptions.merged(self.generation_config, generation_config, arguments)
        prepared: tuple[Any, dict] = super()._prepare_generation_config(generation_config, **kwargs)
        config, model_kwargs = prepared
        config.depth_options, config.cache_is_given = options, kwargs.get("past_key_values") is not None
        if options.num_loops is not None:
            model_kwargs["num_loops"] = options.num_loops
        if rule := options.exit_rule(self.config):
            model_kwargs["exit_rule"] = rule
            if self.config.loop_loss == "terminal" and self.trained_depth > 1:
                logger.warning_once(
                    "This model was trained with loop_loss='terminal': its exits before the last loop are not trained."
                )
        options.check(self.config, asked)
        if config.assistant_early_exit is not None:
            raise ValueError(
                f"assistant_early_exit={config.assistant_early_exit} drafts with the first layers, and these layers "
                "loop: pass draft_loops=k to draft with the first k loops"
            )
        options.check_cache(model_kwargs.get("past_key_values"), config)
        if torch.is_tensor(options.num_loops) or options.changes_decoding:
            config.disable_compile = True  # a static cache compiles by itself, but which rows run is data
        return config, model_kwargs

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        is_given = model_kwargs.get("past_key_values") is not None
        is_dynamic = generation_config.cache_implementation in (None, "dynamic")
        if is_given or not is_dynamic or generation_config.use_cache is False:
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        options = generation_config.depth_options
        cache = LoopedCache(self.config, options.cache_sharing, options.deepest(self.config))
        model_kwargs["past_key_values"] = cache
        if generation_config.is_assistant:
            cache.activate_past_recording()

    def _sample(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        **model_kwargs,
    ):
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
        options, obstacle = generation_config.depth_options, None
        if options.changes_decoding:
            obstacle = obstacle_to_rows_apart(self, *arguments, synced_gpus, model_kwargs)
            if obstacle is None:
                mark_prompt(input_ids, generation_config, model_kwargs)
                decode = decode_continuously if options.draft_loops is None else speculate
                return decode(self, *arguments, streamer, model_kwargs)
            if len(input_ids) > 1:
                logger.warning_once(f"With {obstacle} the rows of a batch wait for the one that runs deepest.")
        settings = {"synced_gpus": synced_gpus, "streamer": streamer, **model_kwargs}
        put_loops = getattr(streamer, "put_loops", None)
        return self._by_passes(super()._sample, obstacle, *arguments, put_loops=put_loops, **settings)

    def _beam_search(self, *arguments, **model_kwargs):
        return self._by_passes(super()._beam_search, "beam search", *arguments, **model_kwargs)

    def _assisted_decoding(self, *arguments, **model_kwargs):
        refuse_sharing(sharing_of(model_kwargs.get("past_key_values")), "assisted decoding")
        return self._by_passes(super()._assisted_decoding, "assisted decoding", *arguments, **model_kwargs)

    def _by_passes(
        self,
        decode,
        mode: str | None,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        put_loops=None,
        **model_kwargs,
    ):
        """One of transformers' own loops; its output, with the loops of each token."""
        generation_config.depth_options.refuse_for(mode)
        mark_prompt(input_ids, generation_config, model_kwargs)
        depths = check_depths(model_kwargs.get("num_loops", self.config.num_loops), len(input_ids))
        record = LoopRecord(torch.tensor(depths, device=input_ids.device), put_loops)
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
        result = decode(*arguments, loop_record=record, **model_kwargs)
        return with_token_loops(result, record, input_ids, generation_config)

    def _prefill(self, input_ids, generation_config, model_kwargs, *args, **kwargs):
        outputs = super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        if generation_config.depth_options.changes_decoding and outputs.past_key_values is not None:
            held = int(outputs.past_key_values.get_seq_length())
            if held != (length := prompt_length(input_ids, generation_config, model_kwargs)):
                raise ValueError(
                    f"the cache holds {held} tokens of a prompt of {length}: virtual tokens, as prefix and prompt "
                    "tuning put before it, go with plain decoding: leave out exits, draft_loops and warm_start"
                )
        return outputs

    def prepare_inputs_for_generation(self, *args, inputs_embeds=None, loop_record=None, **kwargs):
        return super().prepare_inputs_for_generation(*args, inputs_embeds=inputs_embeds, **kwargs)

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, num_new_tokens: int = 1, **kwargs):
        if record := model_kwargs.get("loop_record"):
            record.add(getattr(outputs, "token_loops", None), num_new_tokens, model_kwargs.get("use_cache", True))
        return super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, *args, num_new_tokens=num_new_tokens, **kwargs
        )

    def _get_candidate_generator(self, generation_config, *args, model_kwargs: dict, **kwargs):
        """Depths and exits are those of this model, not of its assistant, which drafts at its own."""
        generation_config = copy.copy(generation_config)
        for name in ("depth_options", *set_fields(generation_config)):
            delattr(generation_config, name)
        ours = {"num_loops", "exit_rule", "loop_record"}
        model_kwargs = {key: value for key, value in model_kwargs.items() if key not in ours}
        return super()._get_candidate_generator(generation_config, *args, model_kwargs=model_kwargs, **kwargs)

    def generate_batch(self, inputs, generation_config=None, *args, **kwargs):
        """Continuous batching, at the saved depth or else the configured one."""
        given = {name: kwargs.pop(name) for name in DEPTH_FIELDS if name in kwargs}
        self._refuse_in_batches({name: value for name, value in given.items() if value is not None})
        sizes = self.config.block_sizes("core")
        if sizes.num_key_value_heads != self.config.num_key_value_heads:
            raise ValueError(
                f"generate_batch holds equally many key/value heads of every layer, but the core has "
                f"{sizes.num_key_value_heads} and the other layers {self.config.num_key_value_heads}: use generate"
            )
        configured, saved = self.config.num_loops, getattr(self.generation_config, "num_loops", None)
        self.config.num_loops = configured if saved is None else check_count("num_loops", saved)
        try:
            return super().generate_batch(inputs, generation_config, *args, **kwargs)
        finally:
            self.config.num_loops = configured

    def init_continuous_batching(self, generation_config=None, *args, **kwargs):
        if generation_config not in (None, self.generation_config):
            self._refuse_in_batches(beside_defaults(generation_config))
        saved = beside_defaults(self.generation_config)
        if (depth := saved.pop("num_loops", None)) not in (None, self.config.num_loops):
            raise ValueError(
                f"continuous batching runs every sequence at config.num_loops={self.config.num_loops}, but the "
                f"model's generation_config says num_loops={depth}: set model.config.num_loops to the one that is "
                "meant, and model.generation_config.num_loops to None"
            )
        if saved:
            logger.warning_once(
                f"Continuous batching runs every sequence at config.num_loops={self.config.num_loops}, whatever the "
                f"model's generation_config says: {listed(saved)}."
            )
        return super().init_continuous_batching(generation_config, *args, **kwargs)

    def _refuse_in_batches(self, fields: dict):
        if fields:
            raise ValueError(
                f"generate_batch runs every sequence at config.num_loops={self.config.num_loops} and does not take "
                f"{listed(fields)}: load the model with from_pretrained(..., num_loops=K), or use generate"
            )


def check_prompt(prompt):
    """prompt: ids or embeddings; None starts from the first token."""
    if torch.is_tensor(prompt) and (prompt.ndim < 2 or 0 in prompt.shape[:2]):
        raise ValueError(
            f"the prompt has shape {tuple(prompt.shape)}, but must be [batch, length] with at least one token in each "
            "of at least one row; without a prompt, pass none, and bos_token_id begins"
        )


def beside_defaults(generation_config) -> dict:
    return {name: value for name, value in set_fields(generation_config).items() if value != DEPTH_FIELDS[name]}


def listed(fields: dict) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def prompt_length(input_ids, generation_config, model_kwargs: dict) -> int:
    """Also what a cache holds already, or what comes as embeddings. transformers drops a mask without padding."""
    mask = model_kwargs.get("attention_mask")
    length = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
    return max(input_ids.shape[1], length or 0)


def mark_prompt(input_ids, generation_config, model_kwargs: dict):
    """Tell the exit rule how many tokens are prompt."""
    if "exit_rule" in model_kwargs:
        length = prompt_length(input_ids, generation_config, model_kwargs)
        model_kwargs["exit_rule"] = model_kwargs["exit_rule"]._replace(prompt_length=length)


class LoopRecord:
    """Loops of the new tokens, pass by pass; a streamer that takes them gets them before the tokens."""

    def __init__(self, depths: torch.Tensor, put_loops):
        """depths: of rows that do not exit."""
        self.depths, self.put_loops, self.passes = depths, put_loops, []

    def add(self, loops: torch.Tensor | None, num_new_tokens: int, use_cache: bool):
        if loops is None:
            loops = self.depths[:, None].expand(-1, num_new_tokens)
        # a pass without a cache runs all new tokens again, one that verifies candidates also those it refuses
        self.passes.append(loops[:, :num_new_tokens] if use_cache else loops[:, -num_new_tokens:])
        if self.put_loops is not None:
            self.put_loops(self.passes[-1][:, -1].cpu())


def with_token_loops(result, record: LoopRecord, input_ids, generation_config):
    """transformers' output as ours, with the loops of each token; of beams, those along which the sequence grew."""
    if torch.is_tensor(result):
        return result
    loops = torch.cat(record.passes, dim=1)
    if "beam_indices" in result:
        beams = result.beam_indices
        steps = min(beams.shape[1], loops.shape[1])
        taken = loops[beams[:, :steps].clamp(min=0), torch.arange(steps, device=loops.device)]
        return LoopedGenerateBeamOutput(**result, token_loops=taken.masked_fill(beams[:, :steps] < 0, 0))
    new_tokens = result.sequences[:, input_ids.shape[1] :]
    loops = loops[:, : new_tokens.shape[1]]  # there may be a last pass that transformers took back
    if generation_config._eos_token_tensor is not None:
        is_end = torch.isin(new_tokens, generation_config._eos_token_tensor).int()
        loops = loops.masked_fill(is_end.cumsum(-1) > is_end, 0)
    return LoopedGenerateOutput(**result, token_loops=loops)
