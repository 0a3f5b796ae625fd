"""generate() of a looped model: transformers' own, with depth, early exit, drafting and cache sharing as arguments.

Which way of decoding runs: greedy decoding and sampling under an exit criterion (or a warm start) go to
`continuous.py`, where rows of a batch exit apart; self-speculation to `speculation.py`; everything else, and what
these two do not know, to transformers' own loops, whose passes stop early by themselves (`exit_watch.py`).
"""

import copy

import torch
from transformers.generation import GenerationMixin
from transformers.utils import logging

from .cache import LoopedCache, shared_slots
from .continuous import can_decode_apart, decode_apart
from .cpu import decoding
from .depth import check_count, check_depths, from_numpy
from .exit_criteria import exit_rule
from .outputs import LoopedGenerateBeamOutput, LoopedGenerateOutput
from .speculation import check_draft, speculate


logger = logging.get_logger(__name__)

# arguments of generate and fields of generation_config.json, with their defaults
DEPTH_FIELDS = {
    "num_loops": None,
    "cache_sharing": "none",
    "exit_criterion": None,
    "exit_threshold": None,
    "min_loops": 1,
    "exit_interval": 1,
    "exit_candidates": None,
    "prompt_loops": None,
    "warm_start": False,
    "draft_loops": None,
    "draft_tokens": 4,
}


OF_CRITERION = ("exit_threshold", "exit_candidates")
OF_EXITS = (*OF_CRITERION, "min_loops", "exit_interval", "prompt_loops")


def depth_fields(generation_config) -> dict:
    """Those that are set."""
    fields = {name: getattr(generation_config, name, None) for name in DEPTH_FIELDS}
    return {name: value for name, value in fields.items() if value is not None}


def overridden(fields: dict, by: dict) -> dict:
    """`fields`, but those of `by` win. A threshold is that of one criterion: another one does not inherit it."""
    before = fields.get("exit_criterion")
    lost = ()
    if by.get("exit_criterion", before) != before:
        lost = OF_EXITS if by["exit_criterion"] is None else OF_CRITERION
    return {**{name: value for name, value in fields.items() if name not in lost}, **by}


def depth_argument(num_loops) -> int | torch.LongTensor:
    """One depth, or a tensor of one per prompt, which transformers repeats for beams as it would not repeat a list."""
    num_loops = from_numpy(num_loops)
    is_one = not isinstance(num_loops, (list, tuple)) and not (torch.is_tensor(num_loops) and num_loops.ndim > 0)
    depths = check_depths(num_loops, 1 if is_one else len(num_loops))
    return depths[0] if is_one else torch.tensor(depths, dtype=torch.long)


def check_prompt(prompt):
    """prompt: ids or embeddings; None starts from the first token."""
    if torch.is_tensor(prompt) and (prompt.ndim < 2 or 0 in prompt.shape[:2]):
        raise ValueError(
            f"the prompt has shape {tuple(prompt.shape)}, but must be [batch, length] with at least one token in each "
            "of at least one row; without a prompt, pass none, and bos_token_id begins"
        )


def deepest(config, num_loops) -> int:
    if num_loops is None:
        return config.num_loops
    return num_loops if isinstance(num_loops, int) else max(num_loops.tolist(), default=1)


class LoopedGenerationMixin(GenerationMixin):
    def generate(self, *args, **kwargs):
        """As `GenerationMixin.generate`, and:

        num_loops: depth of every token, or the most it may take; one number or one per prompt.
        exit_criterion, exit_threshold: stop a token's loops early, see `exit_criteria.py`. Only generated tokens exit.
        min_loops, exit_interval: check for exits from this loop on, and at every so manieth loop after it.
        exit_candidates: after a token's first check, look at so many of the vocabulary before looking at all of it.
        prompt_loops: depth of the prompt, by default num_loops.
        warm_start: the next token's loops start from the last token's state.
        draft_loops, draft_tokens: self-speculation; so many tokens are drafted at so few loops, and verified.
        cache_sharing: "none", "last" or "cyclic-S".

        All are also fields of `generation_config`; None in a call undoes a saved one. With return_dict_in_generate the
        output has `token_loops`; a streamer with a method `put_loops` is told them before each `put` (but not by
        assisted decoding).
        """
        names = [name for name in ("inputs_embeds", "inputs", "input_ids") if kwargs.get(name) is not None]
        check_prompt(kwargs[names[0]] if names else args[0] if args else None)
        with decoding(self):
            return super().generate(*args, **kwargs)

    def adjust_generation_fn(self, generation_config, *args, **kwargs):
        """At loading, which may ask for a depth: it wins over a saved one."""
        super().adjust_generation_fn(generation_config, *args, **kwargs)
        if generation_config is None and getattr(self.config, "_num_loops_asked_for", False):
            self.generation_config.num_loops = None

    def _keep_depth_fields(self):
        """Before saving: a generation config that came with the model is else made anew at loading, without them."""
        if any(getattr(self.generation_config, name, None) is not None for name in DEPTH_FIELDS):
            self.generation_config._from_model_config = False

    def _prepare_generation_config(self, generation_config, **kwargs):
        arguments = {name: from_numpy(kwargs.pop(name)) for name in DEPTH_FIELDS if name in kwargs}
        given = overridden(depth_fields(generation_config), arguments)
        fields = overridden(depth_fields(self.generation_config), given)
        config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        for name, default in DEPTH_FIELDS.items():
            value = fields.get(name)
            setattr(config, name, default if value is None else value)
        if config.num_loops is not None:
            config.num_loops = model_kwargs["num_loops"] = depth_argument(config.num_loops)
        depth = deepest(self.config, config.num_loops)
        if config.exit_criterion is not None:
            model_kwargs["exit_rule"] = self._exit_rule(config, depth)
        elif alone := [name for name in OF_EXITS if given.get(name) not in (None, DEPTH_FIELDS[name])]:
            raise ValueError(f"{', '.join(alone)} without exit_criterion: name the criterion, e.g. 'logit_margin'")
        check_draft(self.config, config, depth)
        if given.get("draft_tokens") is not None and config.draft_loops is None:
            raise ValueError(f"draft_tokens={config.draft_tokens} without draft_loops: say at how many loops to draft")
        if config.assistant_early_exit is not None:
            raise ValueError(
                f"assistant_early_exit={config.assistant_early_exit} drafts with the first layers, and these layers "
                "loop: pass draft_loops=k to draft with the first k loops"
            )
        self._check_warm_start(config)
        self._check_sharing(config, model_kwargs.get("past_key_values"))
        config._cache_is_given = kwargs.get("past_key_values") is not None
        if torch.is_tensor(config.num_loops) or self._decodes_otherwise(config):
            config.disable_compile = True  # a static cache compiles by itself, but which rows run is data
        return config, model_kwargs

    @staticmethod
    def _decodes_otherwise(config) -> bool:
        return config.exit_criterion is not None or config.draft_loops is not None or config.warm_start

    def _exit_rule(self, config, depth: int):
        if self.config.loop_loss == "terminal" and self.config.num_loops > 1:
            logger.warning_once(
                "This model was trained with loop_loss='terminal': its exits before the last loop are not trained."
            )
        rule = exit_rule(
            self.config,
            config.exit_criterion,
            config.exit_threshold,
            config.min_loops,
            config.exit_interval,
            depth,
            config.exit_candidates,
        )
        prompt_loops = config.prompt_loops
        if prompt_loops is not None and check_count("prompt_loops", prompt_loops) > depth:
            raise ValueError(f"prompt_loops={prompt_loops} must be between 1 and num_loops={depth}")
        return rule._replace(prompt_loops=prompt_loops)

    def _check_warm_start(self, config):
        if not isinstance(config.warm_start, bool):
            raise TypeError(f"warm_start must be True or False, got {config.warm_start!r}")
        if not config.warm_start:
            return
        reasons = {
            "cannot be drafted: leave out draft_loops": config.draft_loops is not None,
            "needs one num_loops for all rows": torch.is_tensor(config.num_loops),
            "needs a state that does not begin as the input: this model has state_init='embedding'": (
                self.config.state_init == "embedding"
            ),
        }
        for reason, stands in reasons.items():
            if stands:
                raise ValueError(f"warm_start {reason}")

    def _check_sharing(self, config, cache):
        """cache: the one that was passed, or None."""
        of_cache = getattr(cache, "sharing", "none")
        sharing = of_cache if config.cache_sharing == "none" else config.cache_sharing
        if shared_slots(sharing) is None:
            return
        contradictions = {
            "past_key_values": cache is not None and of_cache != sharing,
            f"cache_implementation={config.cache_implementation!r}": config.cache_implementation is not None,
            "use_cache=False": config.use_cache is False,
        }
        for name, contradicts in contradictions.items():
            if contradicts:
                raise ValueError(
                    f"cache_sharing={sharing!r} makes its own cache, which {name} contradicts: leave one out"
                )
        if config.draft_loops is not None:
            refuse_sharing(sharing, f"draft_loops={config.draft_loops}")

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        is_given = model_kwargs.get("past_key_values") is not None
        is_dynamic = generation_config.cache_implementation in (None, "dynamic")
        if is_given or not is_dynamic or generation_config.use_cache is False:
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        depth = deepest(self.config, generation_config.num_loops)
        cache = model_kwargs["past_key_values"] = LoopedCache(self.config, generation_config.cache_sharing, depth)
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
        mark_prompt(input_ids, generation_config, model_kwargs)
        if self._decodes_otherwise(generation_config):
            lacks = can_decode_apart(self, *arguments, synced_gpus, model_kwargs)
            if lacks is None:
                decode = speculate if generation_config.draft_loops is not None else decode_apart
                return decode(self, *arguments, streamer, model_kwargs)
            self._refuse_otherwise(generation_config, lacks)
            if len(input_ids) > 1:
                logger.warning_once(f"With {lacks} the rows of a batch wait for the one that runs deepest.")
        record = model_kwargs["loop_record"] = self._loop_record(input_ids, model_kwargs, streamer)
        result = super()._sample(*arguments, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs)
        return with_token_loops(result, record, input_ids, generation_config)

    def _beam_search(self, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        self._refuse_otherwise(generation_config, "beam search")
        mark_prompt(input_ids, generation_config, model_kwargs)
        record = model_kwargs["loop_record"] = self._loop_record(input_ids, model_kwargs)
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
        return with_token_loops(super()._beam_search(*arguments, **model_kwargs), record, input_ids, generation_config)

    def _assisted_decoding(self, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        self._refuse_otherwise(generation_config, "assisted decoding")
        refuse_sharing(getattr(model_kwargs.get("past_key_values"), "sharing", "none"), "assisted decoding")
        mark_prompt(input_ids, generation_config, model_kwargs)
        record = model_kwargs["loop_record"] = self._loop_record(input_ids, model_kwargs)
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
        result = super()._assisted_decoding(*arguments, **model_kwargs)
        return with_token_loops(result, record, input_ids, generation_config)

    @staticmethod
    def _refuse_otherwise(config, mode: str):
        for name, value in (("draft_loops", config.draft_loops), ("warm_start", config.warm_start or None)):
            if value is not None:
                raise ValueError(
                    f"{name}={value} goes with greedy decoding and sampling, and not with {mode}: leave one out, or "
                    f"pass {name}=None"
                )

    def _prefill(self, input_ids, generation_config, model_kwargs, *args, **kwargs):
        outputs = super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        if self._decodes_otherwise(generation_config) and outputs.past_key_values is not None:
            held = int(outputs.past_key_values.get_seq_length())
            if held != (length := prompt_length(input_ids, generation_config, model_kwargs)):
                raise ValueError(
                    f"the cache holds {held} tokens of a prompt of {length}: virtual tokens, as prefix and prompt "
                    "tuning put before it, go with plain decoding: leave out exits, draft_loops and warm_start"
                )
        return outputs

    def _loop_record(self, input_ids, model_kwargs: dict, streamer=None) -> "LoopRecord":
        depths = check_depths(model_kwargs.get("num_loops", self.config.num_loops), len(input_ids))
        return LoopRecord(torch.tensor(depths, device=input_ids.device), streamer)

    def prepare_inputs_for_generation(self, *args, inputs_embeds=None, loop_record=None, **kwargs):
        return super().prepare_inputs_for_generation(*args, inputs_embeds=inputs_embeds, **kwargs)

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, num_new_tokens: int = 1, **kwargs):
        record = model_kwargs.get("loop_record")
        if record is not None:
            loops = getattr(outputs, "token_loops", None)
            # a pass without a cache runs all new tokens again, one that verifies candidates also those it refuses
            new = slice(num_new_tokens) if model_kwargs.get("use_cache", True) else slice(-num_new_tokens, None)
            record.append(record.depths[:, None].expand(-1, num_new_tokens) if loops is None else loops[:, new])
        return super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, *args, num_new_tokens=num_new_tokens, **kwargs
        )

    def _get_candidate_generator(self, generation_config, *args, model_kwargs: dict, **kwargs):
        """Depths and exits are those of this model, not of its assistant, which drafts at its own."""
        generation_config = copy.copy(generation_config)
        for name in DEPTH_FIELDS:
            delattr(generation_config, name)
        ours = {"num_loops", "exit_rule", "loop_record"}
        model_kwargs = {key: value for key, value in model_kwargs.items() if key not in ours}
        return super()._get_candidate_generator(generation_config, *args, model_kwargs=model_kwargs, **kwargs)

    def generate_batch(self, inputs, generation_config=None, *args, **kwargs):
        """Continuous batching, at the configured depth."""
        given = {name: kwargs.pop(name) for name in DEPTH_FIELDS if name in kwargs}
        self._refuse_in_batches({name: value for name, value in given.items() if value is not None})
        sizes = self.config.block_sizes("core")
        if sizes.num_key_value_heads != self.config.num_key_value_heads:
            raise ValueError(
                f"generate_batch holds equally many key/value heads of every layer, but the core has "
                f"{sizes.num_key_value_heads} and the other layers {self.config.num_key_value_heads}: use generate"
            )
        return super().generate_batch(inputs, generation_config, *args, **kwargs)

    def init_continuous_batching(self, generation_config=None, *args, **kwargs):
        if generation_config not in (None, self.generation_config):
            self._refuse_in_batches(beside_defaults(generation_config))
        if saved := beside_defaults(self.generation_config):
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


def beside_defaults(generation_config) -> dict:
    return {name: value for name, value in depth_fields(generation_config).items() if value != DEPTH_FIELDS[name]}


def listed(fields: dict) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def refuse_sharing(sharing: str, mode: str):
    if sharing != "none":
        raise ValueError(
            f"cache_sharing={sharing!r} makes a token's cache depend on how the sequence was cut into passes, and "
            f"{mode} cuts it otherwise: use one of the two"
        )


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


class LoopRecord(list):
    """Loops of the new tokens, pass by pass; a streamer that wants them is told before the tokens come."""

    def __init__(self, depths: torch.Tensor, streamer=None):
        """depths: of rows that do not exit."""
        super().__init__()
        self.depths = depths
        self.tell = getattr(streamer, "put_loops", None)

    def append(self, token_loops: torch.Tensor):
        super().append(token_loops)
        if self.tell is not None:
            self.tell(token_loops[:, -1].cpu())


def with_token_loops(result, record: LoopRecord, input_ids, generation_config):
    """transformers' output as ours, with the loops of each token; of beams, those along which the sequence grew."""
    if torch.is_tensor(result):
        return result
    loops = torch.cat(record, dim=1)
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
