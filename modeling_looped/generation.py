"""generate() of a looped model: transformers' own, with arguments for depth, early exit, drafting and cache sharing.

Greedy decoding and sampling with an exit criterion, a warm start or an int8 cache run in `continuous.py`, where each
row of a batch exits independently. Self-speculation runs in `speculation.py`. Plain decoding at one depth runs in
`graph_decoding.py` where passes can be CUDA graphs, and everything else, at a fixed depth, in transformers' own loops.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers.generation import (
    BaseStreamer,
    GenerationConfig,
    GenerationMixin,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.utils import logging

from .cache import LoopedCache, sharing_of
from .checks import check_mask, check_softcap
from .clients import ADAPTERS_OF_ROWS, has_prefix, warn_of_another_policy
from .compatibility import CACHE, one_cache
from .continuous import decode_continuously
from .cpu import repeated_products
from .depth import read_depth_per_row
from .depth_options import DEPTH_FIELDS, EXIT_FIELDS, DepthOptions, as_python, listed, refuse_sharing, set_fields
from .exit_criteria import ExitCriterion, ExitSelection
from .foreign_names import GENERATION_FIELDS, refuse_foreign
from .graph_decoding import decode_in_step, goes_in_step
from .outputs import AskedOutputs, LoopedGenerateBeamOutput, LoopedGenerateOutput
from .overrides import autocast_around
from .prompt_batches import generate_together, read_prompts
from .row_engine import RowEngine, obstacle_to_row_engine
from .row_view import kernels_of_single_queries
from .samplers import generator_of
from .shared_passes import room_beside, shared_passes_of, with_check
from .speculation import speculate
from .tensors import on_device


logger = logging.get_logger(__name__)


class AsSaved:
    """Default of an argument that the call leaves out: as it is saved with the model. None undoes a saved value."""

    def __repr__(self) -> str:
        return "as saved"


AS_SAVED: Any = AsSaved()

if TYPE_CHECKING:  # what the class that uses the mixin has; the protocol is last, as what it alone has is abstract
    from transformers._typing import GenerativePreTrainedModel

    class Generative(nn.Module, GenerationMixin, GenerativePreTrainedModel):
        hf_quantizer: Any
        encoder: Any
        hf_device_map: dict[str, Any]
        trained_depth: int
else:
    Generative = GenerationMixin


class LoopedGenerationMixin(Generative):
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args,
        num_loops: int | Sequence[int] | torch.Tensor | None = AS_SAVED,
        exit_criterion: ExitCriterion | None = AS_SAVED,
        exit_threshold: float | None = AS_SAVED,
        min_loops: int | None = AS_SAVED,
        exit_interval: int | None = AS_SAVED,
        exit_read_interval: int | None = AS_SAVED,
        exit_selection: ExitSelection | None = AS_SAVED,
        prompt_loops: int | None = AS_SAVED,
        state_seed: int | None = AS_SAVED,
        warm_start: bool | None = AS_SAVED,
        draft_loops: int | Literal["auto"] | None = AS_SAVED,
        draft_tokens: int | None = AS_SAVED,
        cache_sharing: str | None = AS_SAVED,
        cache_dtype: Literal["int8"] | None = AS_SAVED,
        **kwargs,
    ) -> Any:
        """Run `GenerationMixin.generate` with `max_new_tokens`, `do_sample` and all arguments of transformers, and:

        num_loops: depth of every token, or the most loops where tokens can exit; one number or one per prompt.
        exit_criterion, exit_threshold: stop a token's loops early, see `exit_criteria.py`. Only generated tokens exit.
        min_loops, exit_interval: check for exits from this loop on, and at every n-th loop after it.
        exit_read_interval: where rows decode independently, read back only every n-th check from the device, so that
            the host waits less often for a GPU. A token that has passed a check runs on until then, without effect.
            Exits, greedy tokens and samples of a single row stay the same; several sampled rows draw in another order.
        exit_selection: "stop": loops end at the exit. "after": all loops run, and the loop to read out is chosen
            afterwards, also at the prompt's end, as the release of Ouro does. "weighted": all loops run and are read
            out, each weighted by the gate's probability of an exit there (that release's `use_weighted_exit`).
        prompt_loops: depth of the prompt, by default num_loops.
        state_seed: seed of h_0 of every position where `state_init` is "normal" (Huginn's release draws h_0 without a
            seed); without it h_0 is zeros.
        warm_start: the next token's loops start from the last token's state.
        draft_loops, draft_tokens: self-speculation: after how many loops a token proposes the next one ("auto": the
            fastest number, measured during decoding), and how many tokens may run ahead of full depth.
        cache_sharing: "none", "last", "first", "average" or "cyclic-S".
        cache_dtype: "int8" keeps keys and values of past tokens in 8 bits, for greedy decoding and sampling.

        All are also fields of `generation_config`. None in a call undoes a saved value, and num_loops in a call undoes
        saved exits unless the call sets an exit field too. With return_dict_in_generate the output has `token_loops`,
        see `LoopedGenerateOutput`. A streamer with a method `put_loops` receives the loops before each `put`, except
        in assisted decoding. One with a method `put_logits` receives, where rows decode independently, each row's new
        token and its logits in place of `output_logits`, of which then none are kept.
        """
        asked = dict(locals())
        if (cache := one_cache(kwargs.pop("cache", None), kwargs.pop("past_key_values", None))) is not None:
            kwargs[CACHE] = cache
        kwargs |= {name: asked[name] for name in DEPTH_FIELDS if asked[name] is not AS_SAVED}
        prompts = (kwargs.get("inputs_embeds"), inputs, kwargs.get("input_ids"))
        prompt = next((prompt for prompt in prompts if prompt is not None), None)
        check_prompt(prompt)
        if prompt is not None:
            check_mask(kwargs.get("attention_mask"), prompt, 0 if cache is None else int(cache.get_seq_length()))
        self._check_names(kwargs, generation_config)
        if isinstance(kwargs.get("custom_generate"), str):  # its code may read none of these arguments
            self._prepare_generation_config(generation_config, **kwargs)
        with repeated_products(self):
            return super().generate(inputs, generation_config, *args, **kwargs)

    def _check_names(self, arguments: dict, passed_config: GenerationConfig | None):
        """Refuse arguments with foreign names or without use here, also in generation configs, which transformers does
        not check."""
        known = {*DEPTH_FIELDS, *GENERATION_FIELDS, *signature(super().generate).parameters}
        refuse_foreign(arguments, known | {*signature(self.forward).parameters}, "generate")
        if unreturned := [name for name in AskedOutputs._fields if arguments.get(name)]:
            raise ValueError(
                f"generate does not return {', '.join(unreturned)}: leave that out, and call the model "
                "with it on the tokens that generate returns"
            )
        if torch.is_tensor(arguments.get("initial_state")):
            raise ValueError(
                "generate does not take initial_state, which has none for new tokens: pass state_seed, which draws "
                "that of every position, or call the model"
            )
        if arguments.get("exit_rule") is not None:
            raise ValueError(
                "generate does not take exit_rule, but its parts: pass exit_criterion, exit_threshold and so on"
            )
        for config in (self.generation_config, passed_config):
            if config is not None:
                # without a generation_config.json it is made from config.json, and has the model's fields too
                others = [name for name in vars(config) if not name.startswith("_") and not hasattr(self.config, name)]
                known_here = known | {"depth_options", "cache_is_given"}
                refuse_foreign(others, known_here, "generation_config")
                if unread := [name for name in others if name not in known_here and getattr(config, name) is not None]:
                    logger.warning_once(f"generation_config has {', '.join(unread)}, which nothing reads.")

    def adjust_generation_fn(self, generation_config, *args, **kwargs):
        """Adjust a loaded generation config: num_loops of the loading call replaces saved depth and exits. Warn of
        saved exits."""
        super().adjust_generation_fn(generation_config, *args, **kwargs)
        if generation_config is not None:
            return
        self.generation_config._from_model_config = False
        exits = {name: value for name, value in set_fields(self.generation_config).items() if name in EXIT_FIELDS}
        if asked_for := getattr(self.config, "_num_loops_asked_for", False):
            for name in ("num_loops", *EXIT_FIELDS):
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

    def _prepare_generation_config_for_saving(self):
        """Clear the flag that makes loading drop depth fields, and warn if exits are saved."""
        fields = set_fields(self.generation_config)
        self.generation_config._from_model_config = False
        if "exit_criterion" in fields:
            logger.warning_once(
                f"Exits are saved with this model: {listed(fields)}. They were chosen for the weights that they were "
                "measured on; if these have been trained since, choose anew with `looped halting FOLDER "
                "--write`, or set model.generation_config.exit_criterion to None before saving."
            )

    def _extract_generation_mode_kwargs(self, custom_generate, kwargs: dict, *args, **others):
        """Leave a decoding loop of the caller's in `kwargs`, for `_prepare_generation_config`. Those that transformers
        loads from a folder or the Hub, also for its former modes such as DoLa, pass here without this `generate`."""
        if custom_generate is not None:
            kwargs["custom_generate"] = custom_generate
        return super()._extract_generation_mode_kwargs(custom_generate, kwargs, *args, **others)

    def _prepare_generation_config(self, generation_config, **kwargs):
        custom_generate = kwargs.pop("custom_generate", None)
        arguments = {name: kwargs.pop(name) for name in DEPTH_FIELDS if name in kwargs}
        options, asked = DepthOptions.merged(self.generation_config, generation_config, arguments)
        prepared: tuple[Any, dict] = super()._prepare_generation_config(generation_config, **kwargs)
        config, model_kwargs = prepared
        config.depth_options, config.cache_is_given = options, kwargs.get(CACHE) is not None
        if options.num_loops is not None:
            model_kwargs["num_loops"] = options.num_loops
        rule = options.exit_rule(self.config)
        if rule is not None and options.runs_all_loops:
            model_kwargs["exit_rule"] = rule
        if options.state_seed is not None:
            model_kwargs["initial_state"] = SeededStates(self, options.state_seed)
        if rule and self.config.loop_loss == "terminal" and self.trained_depth > 1:
            logger.warning_once(
                "This model has loop_loss='terminal': unless it was trained at depths that were drawn, its exits "
                "before the last loop are not trained."
            )
        options.check(self.config, asked)
        if custom_generate is not None:
            options.refuse_for(f"custom_generate={getattr(custom_generate, '__name__', custom_generate)}")
        if self.training:
            warn_of_another_policy(options.change_of_samples(self.config, arguments))
        self._check_beside(options, config, model_kwargs.get(CACHE))
        if torch.is_tensor(options.num_loops) or rule is not None or options.changes_decoding:
            config.disable_compile = True  # static caches turn compilation on, but which rows run depends on data
        return config, model_kwargs

    def _check_beside(self, options: DepthOptions, config: GenerationConfig, cache):
        """Refuse what does not go with looped layers, with these options, or with a prefix of PEFT. cache: the one
        that the call passes, or None."""
        if config.assistant_early_exit is not None:
            raise ValueError(
                f"assistant_early_exit={config.assistant_early_exit} drafts with the first layers, and these layers "
                "loop: pass draft_loops=k to draft with the first k loops"
            )
        options.check_cache(self.config, cache, config)
        if not config.use_cache and has_prefix(self):
            raise ValueError(
                "use_cache=False does not go with prefix tuning, whose virtual tokens come in a cache: leave it out"
            )
        if options.cache_sharing != "none" and has_prefix(self):
            raise ValueError(
                f"cache_sharing={options.cache_sharing!r} does not go with prefix tuning, whose virtual tokens come "
                "in a cache of their own: leave it out"
            )

    def _get_logits_processor(self, generation_config, *args, **kwargs):
        """Build transformers' processors. Classifier-free guidance runs the model again without the prompt: at the
        depth of the call, and from the same first states."""
        processors = super()._get_logits_processor(generation_config, *args, **kwargs)
        options = getattr(generation_config, "depth_options", None)
        if options is not None:
            states = None if options.state_seed is None else SeededStates(self, options.state_seed)
            for each in processors:
                if isinstance(each, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                    each.model = partial(self._without_prompt, options.num_loops, states)
        return processors

    def _without_prompt(self, num_loops, states: "SeededStates | None", input_ids: torch.Tensor, **kwargs):
        if torch.is_tensor(num_loops):  # one prompt may have become several rows, e.g. beams
            num_loops = num_loops.repeat_interleave(input_ids.shape[0] // len(num_loops))
        if states is not None:
            kwargs["initial_state"] = states.of_inputs({"input_ids": input_ids, **kwargs})
        return self(input_ids, num_loops=num_loops, **kwargs)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        is_given = model_kwargs.get(CACHE) is not None
        is_dynamic = generation_config.cache_implementation in (None, "dynamic")
        if is_given or not is_dynamic or generation_config.use_cache is False:
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        options = generation_config.depth_options
        cache = LoopedCache(self.config, options.cache_sharing, options.deepest(self.config))
        model_kwargs[CACHE] = cache
        if generation_config.is_assistant:
            cache.activate_past_recording()

    def _get_static_cache_init_shape(self):
        """Return None, with which transformers makes the cache in the first pass, where layers differ in heads."""
        core_heads = self.config.block_sizes("core").num_key_value_heads
        return super()._get_static_cache_init_shape() if core_heads == self.config.num_key_value_heads else None

    def prepare_inputs_for_generation(self, input_ids, *args, inputs_embeds=None, **kwargs):
        # inputs_embeds is named, because transformers reads in the signature whether a prompt may be embeddings
        inputs = super().prepare_inputs_for_generation(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        if isinstance(states := inputs.get("initial_state"), SeededStates):
            inputs["initial_state"] = states.of_inputs(inputs)
        if "prepare_inputs_for_generation" in vars(self):  # set by PEFT, which reads the older name
            inputs["past_key_values"] = inputs.get(CACHE)
        return inputs

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
        rules, options = (logits_processor, stopping_criteria, generation_config), generation_config.depth_options
        # under autocast, this thread would run passes for other calls in the autocast precision
        is_alone = not options.shares_passes or torch.is_autocast_enabled(input_ids.device.type)
        shared = None if is_alone else shared_passes_of(self)
        obstacle = obstacle_to_row_engine(self, *rules, synced_gpus, model_kwargs)
        make_engine = partial(RowEngine, self, input_ids, *rules, streamer, model_kwargs)
        with autocast_around(self):  # rows run parts of the model, and not its forward
            if shared is not None and obstacle is None:
                return shared.decode(make_engine, len(input_ids), generation_config.max_length)
            if options.changes_decoding:
                if obstacle is not None:
                    options.refuse_for(obstacle)
                decode = decode_continuously if options.draft_loops is None else speculate
                return self._by_rows(decode, make_engine, input_ids, generation_config)
            if obstacle is None and goes_in_step(self, len(input_ids), *rules, model_kwargs):
                make_engine = partial(make_engine, has_graphs=True)
                return self._by_rows(decode_in_step, make_engine, input_ids, generation_config)
        if hasattr(streamer, "put_loops"):
            streamer = StreamerOfDepths(streamer, self._depths(input_ids, model_kwargs))
        settings = {"synced_gpus": synced_gpus, "streamer": streamer, **model_kwargs}
        return self._by_passes(super()._sample, None, input_ids, *rules, **settings)

    def _by_rows(self, decode: Callable, make_engine: Callable, input_ids, generation_config):
        """Run one of the decoding loops of this package, in which rows decode independently."""
        with room_beside(self, len(input_ids), generation_config.max_length):
            engine = make_engine()  # runs the prompt
            if engine.num_rows > 1 and (part := engine.selector.batchwise_part):
                logger.warning_once(f"With {part} the rows of a batch wait for the one that runs deepest.")
            try:
                with kernels_of_single_queries(self.device):
                    return decode(engine)
            except BaseException:  # also if a client has disconnected
                engine.release()
                raise

    def _beam_search(self, *arguments, **model_kwargs):
        return self._by_passes(super()._beam_search, "beam search", *arguments, **model_kwargs)

    def _assisted_decoding(self, *arguments, **model_kwargs):
        refuse_sharing(sharing_of(model_kwargs.get(CACHE)), "assisted decoding")
        return self._by_passes(super()._assisted_decoding, "assisted decoding", *arguments, **model_kwargs)

    def _by_passes(
        self,
        decode,
        mode: str | None,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        **model_kwargs,
    ):
        """Run one of transformers' own decoding loops. Add to its output the loops of each token: those of its row."""
        if mode is not None:
            generation_config.depth_options.refuse_for(mode)
        with room_beside(self, len(input_ids), generation_config.max_length):
            criteria = with_check(stopping_criteria)
            result = decode(input_ids, logits_processor, criteria, generation_config, **model_kwargs)
        depths = self._depths(input_ids, model_kwargs)
        return with_token_loops(result, depths, input_ids.shape[1], generation_config)

    def _depths(self, input_ids, model_kwargs: dict) -> torch.Tensor:
        """Return the depth of each row, [rows]."""
        depths = read_depth_per_row(model_kwargs.get("num_loops", self.config.num_loops), len(input_ids))
        return on_device(depths, input_ids.device)

    def _get_candidate_generator(self, generation_config, *args, model_kwargs: dict, **kwargs):
        """Remove depths, exits and first states: they belong to this model, and the assistant drafts without them."""
        generation_config = copy.copy(generation_config)
        for name in ("depth_options", *set_fields(generation_config)):
            delattr(generation_config, name)
        ours = ("num_loops", "exit_rule", "initial_state")
        model_kwargs = {key: value for key, value in model_kwargs.items() if key not in ours}
        return super()._get_candidate_generator(generation_config, *args, model_kwargs=model_kwargs, **kwargs)

    def generate_batch(
        self,
        inputs,
        generation_config=None,
        continuous_batching_config=None,
        *,
        max_rows: int = 8,
        max_tokens: int | None = None,
        **kwargs,
    ):
        """Run continuous batching: that of transformers if no depth fields are set. With depth fields (num_loops,
        exit_criterion and others, in the call, the generation config or saved with the model; in the call one value or
        a list of one per prompt), rows at different loops and tokens share every pass: see `shared_passes.py`, also
        for `max_rows` and `max_tokens`. The results then have `token_loops`, and where all prompts fail by the same
        error, it is raised.
        """
        if kwargs.get("adapter_names") is not None:
            raise ValueError(
                f"{ADAPTERS_OF_ROWS} follow the places of rows in the batch, which generate_batch changes: run the "
                "rows of each adapter by themselves, or take generate at one depth"
            )
        inputs = read_prompts(inputs)
        of_batches = {*signature(super().generate_batch).parameters}
        self._check_names({name: value for name, value in kwargs.items() if name not in of_batches}, generation_config)
        given = {name: kwargs.pop(name) for name in DEPTH_FIELDS if name in kwargs}
        asked = {name: value for name, value in given.items() if value is not None}
        asked = asked or beside_defaults(generation_config)
        if continuous_batching_config is not None:  # it runs at the config's depth
            asked = beside_depth(asked, self.config.num_loops)
        saved = {name: value for name, value in beside_defaults(self.generation_config).items() if name not in given}
        saved = beside_depth(saved, self.config.num_loops)
        if kwargs.get("cache_implementation") == "paged" and asked:  # generate and this method would call each other
            raise ValueError(
                f"cache_implementation='paged' does not take {listed(asked)}: leave out cache_implementation"
            )
        kwargs["continuous_batching_config"] = continuous_batching_config
        if asked or (saved and continuous_batching_config is None):
            return generate_together(self, inputs, generation_config, given, max_rows, max_tokens, **kwargs)
        check_softcap(self.config.attention_softcap, "paged|eager")
        sizes = self.config.block_sizes("core")
        if sizes.num_key_value_heads != self.config.num_key_value_heads:
            raise ValueError(
                f"generate_batch holds equally many key/value heads of every layer, but the core has "
                f"{sizes.num_key_value_heads} and the other layers {self.config.num_key_value_heads}: use generate"
            )
        # of the arguments of generate, transformers reads only max_new_tokens
        fields = {name: kwargs.pop(name) for name in GENERATION_FIELDS & kwargs.keys() if name != "max_new_tokens"}
        if fields:
            generation_config = copy.deepcopy(generation_config or self.generation_config)
            generation_config.update(**fields, **dict.fromkeys(DEPTH_FIELDS))
        return super().generate_batch(inputs, generation_config, **kwargs)

    def init_continuous_batching(self, generation_config=None, *args, **kwargs):
        check_softcap(self.config.attention_softcap, "paged|eager")
        if generation_config not in (None, self.generation_config):
            if fields := beside_depth(beside_defaults(generation_config), self.config.num_loops):
                raise ValueError(
                    "continuous batching of transformers runs every sequence at "
                    f"config.num_loops={self.config.num_loops} and does not take {listed(fields)}: use "
                    "generate_batch, generate or SharedPasses"
                )
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


def check_prompt(prompt):
    """Refuse an empty prompt, and lists. prompt: ids or embeddings; None starts from bos_token_id."""
    if prompt is not None and not torch.is_tensor(prompt):
        raise TypeError(
            f"the prompt must be a tensor, got {type(prompt).__name__}: of a tokenizer pass "
            "generate(**tokenizer(texts, return_tensors='pt'))"
        )
    if torch.is_tensor(prompt) and (prompt.ndim < 2 or 0 in prompt.shape[:2]):
        raise ValueError(
            f"the prompt has shape {tuple(prompt.shape)}, but must be [batch, length] with at least one token in each "
            "of at least one row; without a prompt, pass none, and bos_token_id begins"
        )


def beside_defaults(generation_config) -> dict:
    return {name: value for name, value in set_fields(generation_config).items() if value != DEPTH_FIELDS[name]}


def beside_depth(fields: dict, num_loops: int) -> dict:
    """Return the fields without a `num_loops` that is this one."""
    return {name: value for name, value in fields.items() if name != "num_loops" or as_python(value) != num_loops}


class SeededStates:
    """Draws h_0 of a position from the seed and the position: neither the batch nor the cuts of a text change it."""

    def __init__(self, model, seed: int):
        self.model, self.seed = model, seed
        self.drawn: list[torch.Tensor] = []  # one [state] per position

    def of_inputs(self, inputs: dict) -> torch.Tensor:
        """Return h_0 of all tokens of a pass, [rows, length, state]."""
        tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
        positions = inputs.get("position_ids")
        if positions is None:
            cache = inputs.get(CACHE)
            past = 0 if cache is None else int(cache.get_seq_length())
            positions = torch.arange(past, past + tokens.shape[1])[None]
        positions = positions.to("cpu").clamp(min=0)
        for position in range(len(self.drawn), int(positions.max()) + 1):
            generator = generator_of("initial_state", self.seed, position)
            self.drawn.append(self.model.sample_initial_state(1, 1, generator)[0, 0])
        states = torch.stack([self.drawn[i] for i in positions.flatten().tolist()]).view(*positions.shape, -1)
        return states.expand(len(tokens), -1, -1).to(tokens.device)


class StreamerOfDepths(BaseStreamer):
    """Passes the loops of every token to the `put_loops` of a streamer, before the token itself."""

    def __init__(self, streamer, depths: torch.Tensor):
        self.streamer, self.depths = streamer, depths.cpu()

    def put(self, value):
        self.streamer.put_loops(self.depths)
        self.streamer.put(value)

    def end(self):
        self.streamer.end()


def with_token_loops(result, depths: torch.Tensor, prompt_length: int, generation_config):
    """Convert transformers' output to ours, with the loops of each token. depths: of rows, or of beams of all rows."""
    if torch.is_tensor(result):
        return result
    if "beam_indices" in result:
        beams = result.beam_indices
        return LoopedGenerateBeamOutput(**result, token_loops=depths[beams.clamp(min=0)].masked_fill(beams < 0, 0))
    new_tokens = result.sequences[:, prompt_length:]
    loops = depths[:, None].expand_as(new_tokens)
    if generation_config._eos_token_tensor is not None:
        is_end = torch.isin(new_tokens, generation_config._eos_token_tensor).int()
        loops = loops.masked_fill(is_end.cumsum(-1) > is_end, 0)
    return LoopedGenerateOutput(**result, token_loops=loops)
