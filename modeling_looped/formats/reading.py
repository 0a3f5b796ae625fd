"""`from_pretrained` of a folder in a foreign layout."""

from transformers import AutoTokenizer
from transformers.utils import logging

from ..loading import LoopedCheckpointError, refuse_tensors_that_do_not_fit
from .conversion import leave_loading_class, loading_class
from .folder import check_indices, hub_arguments, model_place, read_json_config
from .layout import Layout
from .registry import ForeignFolder, find_layout


logger = logging.get_logger(__name__)
HEADS = ("lm_head.", "exit_gate.")  # parts of a causal LM that the trunk and models with other heads lack
# methods that quantise every matrix of a stored tensor; others of transformers take the first and lose the rest
OF_EVERY_PART = "bitsandbytes", "fp8"


class PublicFolder:
    """A folder in a foreign layout, with the methods that `StrictLoadingMixin.from_pretrained` calls."""

    def __init__(self, found: ForeignFolder, path, hub: dict):
        self.found, self.path, self.hub = found, path, hub

    def loading_class(self, model_class: type) -> type:
        return loading_class(model_class, self.found.layout)

    def finish(self, model, model_class: type, info: dict, refuses: bool):
        """Make the loaded model one of this package, or raise an error that says why it cannot be."""
        leave_loading_class(model, model_class)
        layout, generation = self.found.layout, getattr(model, "generation_config", None)
        if refuses:
            self.refuse_misfits(model, model_class, info)
        model.config.architectures = [model_class.__name__]
        if model.can_generate() and generation is not None:
            before = generation.to_dict()
            self.fill_token_ids(model, generation)
            layout.adjust_generation(generation, model.config, self.found.config)
            if generation.to_dict() != before:
                generation._from_model_config = False
        exits = getattr(generation, "exit_criterion", None)
        logger.warning(
            f"{self.path} was opened as {layout.describe(model.config)}"
            + (f"; tokens exit by {exits!r} at {getattr(generation, 'exit_threshold', None)}" if exits else "")
            + ". save_pretrained writes it in the layout of this package."
        )

    def fill_token_ids(self, model, generation):
        """Take token ids from the tokenizer if config and generation config lack the end of a text."""
        ends = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
        if all(end is not None and end < model.config.vocab_size for end in ends) and (
            model.config.eos_token_id is not None
        ):
            return
        try:
            # never run code of the folder, nor ask whether to run it; without the config transformers would read the
            # foreign one as one of its own, and warn of it
            tokenizer = AutoTokenizer.from_pretrained(
                self.path, config=model.config, trust_remote_code=False, **self.hub
            )
        except Exception as error:  # of many kinds: there may be no tokenizer, or one that needs another library
            logger.info(f"no tokenizer in {self.path}: {error}")
            logger.warning(
                f"{self.path} does not say which token ends a text, and no tokenizer there does: pass eos_token_id to "
                "generate, or set it in model.generation_config"
            )
            return
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(tokenizer, name, None)
            value = value if value is not None and value < model.config.vocab_size else None
            setattr(model.config, name, value)
            setattr(generation, name, value)

    def refuse_misfits(self, model, model_class: type, info: dict):
        """Refuse tensors that do not fit; models other than a causal LM may lack its heads, and add their own."""
        is_lm = hasattr(model, "lm_head")
        own_heads = () if is_lm else tuple(f"{name}." for name, _ in model.named_children())
        trunk = f"{model.base_model_prefix}."
        unexpected = [name for name in info["unexpected_keys"] if is_lm or not name.startswith(HEADS)]
        missing = [
            name
            for name in info["missing_keys"]
            if model.base_model is model or name.startswith(trunk) or not name.startswith(own_heads)
        ]
        refuse_tensors_that_do_not_fit(self.path, model_class.__name__, missing, unexpected, info["mismatched_keys"])
        embedding = model.get_input_embeddings()
        if is_lm and model.config.tie_word_embeddings and model.lm_head.weight is not embedding.weight:
            raise LoopedCheckpointError(
                f"{self.path} says that embedding and head are one tensor, but holds two that differ: set "
                "tie_word_embeddings (tie_embeddings) to false in its config.json if both are meant"
            )


def refuse_quantiser_of_first_parts(layout: Layout, path, settings):
    """settings: the quantization_config of from_pretrained."""
    fused = [rule.stored for rule in layout.all_rules if len(rule.ours) > 1 and rule.stored.endswith(".weight")]
    if settings is None or not fused:
        return
    given = settings if isinstance(settings, dict) else vars(settings)
    method = given.get("quant_method", "bitsandbytes")  # whose settings need not say it
    if method not in OF_EVERY_PART:
        raise ValueError(
            f"{path} stores several matrices as one tensor ({fused[0]}), of which quant_method="
            f"{getattr(method, 'value', method)!r} keeps the first alone: run `looped convert {path} OUT`, and "
            f"quantize what it writes. {' and '.join(OF_EVERY_PART)} take the folder as it is"
        )


def open_public(path, kwargs: dict) -> PublicFolder | None:
    """Return the folder if it is in a foreign layout, else None. kwargs: those of from_pretrained."""
    if kwargs.get("gguf_file") is not None:
        return None
    hub = hub_arguments(kwargs)
    place, hub_of_place = model_place(path, hub)
    config = read_json_config(place, hub_of_place)
    found = None if config is None else find_layout(config, place, hub_of_place)
    if found is None:
        return None
    refuse_quantiser_of_first_parts(found.layout, path, kwargs.get("quantization_config"))
    check_indices(place, hub_of_place, kwargs.get("variant"))
    return PublicFolder(found, path, hub)


def read_public_config(config: dict, path, kwargs: dict) -> dict:
    """Translate a config.json of any layout to that of this package."""
    found = find_layout(config, path, hub_arguments(kwargs))
    # TRL reads auto_map of every model that is not part of transformers
    return config if found is None else {**found.read_config(), "auto_map": {}}
