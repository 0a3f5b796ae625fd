"""Loading that refuses a checkpoint which does not fit, instead of filling gaps with fresh weights."""

import re
from collections.abc import Collection
from contextvars import ContextVar
from os import PathLike
from pickle import UnpicklingError
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import PreTrainedModel
from typing_extensions import Self

from .compatibility import at_one_commit, look_up
from .depth_options import DEPTH_FIELDS
from .foreign_names import ARGUMENT_OF, UnknownNameError
from .overrides import PACKAGE
from .package_only import OF_PACKAGE


STRICTLY: ContextVar[tuple[str, str] | None] = ContextVar("path and class of what is loaded strictly", default=None)
# parameters that are filled rather than loaded, as they should be, and so are not reported as missing
FILLED: ContextVar[Collection[str]] = ContextVar("names of parameters that are filled by design", default=())


# the classes of auto_classes.py, which imports this file, by their names in config.json
OUR_CLASSES = {
    "LoopedModel",
    "LoopedForCausalLM",
    "LoopedForQuestionAnswering",
    "LoopedForSequenceClassification",
    "LoopedForTokenClassification",
}


class LoopedCheckpointError(ValueError, RuntimeError):
    """A checkpoint that does not fit the model: a `ValueError`, and also a `RuntimeError`, as transformers raises."""


def refuse_arguments_of_generate(kwargs: dict):
    found = [name for name in kwargs if name in DEPTH_FIELDS and name != "num_loops"]
    if found:
        raise UnknownNameError(
            f"from_pretrained does not take {', '.join(found)}: pass them to generate, or set them in "
            "model.generation_config. In lm-eval pass them in --gen_kwargs, or use `looped eval --model looped`, "
            "which takes them in --model_args"
        )


def misfits_of(missing, unexpected, mismatched) -> str:
    """Say which tensors of a checkpoint do not fit; "" if all do. mismatched: a name, the shapes found and wanted."""
    shapes = [f"{name} {tuple(found)} instead of {tuple(wanted)}" for name, found, wanted in mismatched]
    misfits = {"missing from it": missing, "not in the model": unexpected, "of another shape": shapes}
    return "; ".join(
        f"{what}: {', '.join(sorted(names)[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for what, names in misfits.items()
        if names
    )


def refuse_tensors_that_do_not_fit(path, model_name: str, missing, unexpected, mismatched):
    if said := misfits_of(missing, unexpected, mismatched):
        raise LoopedCheckpointError(
            f"the checkpoint {path} does not fit {model_name}. Tensors {said}. Check that "
            "config.json belongs to these weights; strict=False or ignore_mismatched_sizes=True load what fits."
        )


def refuse_layers_without_scales(model, missing):
    """Refuse layers whose shape the quantisation blocks do not divide: the quantiser would save them wrongly."""
    layers = dict(model.named_modules())
    parts = [name.rpartition(".") for name in missing] if getattr(model, "hf_quantizer", None) is not None else []
    found = {layer: layers[layer] for layer, _, part in parts if part == "weight_scale_inv" and layer in layers}
    if found:
        shown = ", ".join(f"{name} {tuple(layer.weight.shape)}" for name, layer in found.items())
        names = ["lm_head", *dict.fromkeys(name.rpartition(".")[2] for name in found)]
        raise ValueError(
            f"the blocks of quantization_config do not divide {shown}, which would be wrong once the model was saved "
            f"and opened: leave such layers as they are, with modules_to_not_convert={names} in quantization_config"
        )


def is_ours(cls: type) -> bool:
    return cls.__module__.rpartition(".")[0] == PACKAGE


def class_beside_weights(cls: type, path, kwargs: dict) -> type:
    """Return the class that the checkpoint's own code defines, if one that is not of this package saved it and the
    caller trusts it; else `cls`, which the Auto classes would open too, as it is known in this process."""
    if path is None or not kwargs.get("trust_remote_code") or not is_ours(cls):
        return cls
    config = PreTrainedConfig.get_config_dict(path, **{**kwargs, "trust_remote_code": None})[0]
    others = set(config.get("architectures") or ()) - OUR_CLASSES
    for auto_class, reference in (config.get("auto_map") or {}).items():
        if isinstance(reference, str) and reference.rpartition(".")[2] in others:
            found = get_class_from_dynamic_module(reference, path, **kwargs)
            if not issubclass(found, cls):
                raise LoopedCheckpointError(
                    f"the code beside the checkpoint {path} defines {found.__name__}, which is no {cls.__name__} of "
                    f"the installed package: open it by {auto_class} or that class, or in a process that does not "
                    "import modeling_looped"
                )
            found.register_for_auto_class(auto_class)  # so that its code is saved with it again
            return found
    return cls


def refuse_class_of_others(path, cls, architectures: list[str] | None):
    """Refuse a checkpoint of a foreign class: its forward may differ even if all its tensors fit."""
    if is_ours(cls) and architectures and not {*OUR_CLASSES, cls.__name__}.intersection(architectures):
        raise LoopedCheckpointError(
            f"the checkpoint {path} was saved by {', '.join(architectures)}, a class that is not of this package, so "
            f"{cls.__name__} may compute something else: open it by that class, or with trust_remote_code=True where "
            "its code lies beside the weights"
        )


def refuse_unset_parameters(model, missing):
    """Refuse parameters that the checkpoint lacks and no class initializes: they would hold arbitrary memory."""
    parameters = {name for name, _ in model.named_parameters()} if missing else set()
    for name in parameters & set(missing):
        module = model.get_submodule(name.rpartition(".")[0])
        if not (hasattr(module, "init_parameters") or is_filled_by_transformers(module)):
            raise LoopedCheckpointError(
                f"{name} is not in the checkpoint, and {type(module).__name__} does not say what it is in a new "
                "model: give that class a method init_parameters() that fills it, with functions of "
                "transformers.initialization"
            )


def is_filled_by_transformers(module) -> bool:
    return type(module).__module__.startswith("torch.nn.") or "Norm" in type(module).__name__


class StrictLoadingMixin:
    base_model_prefix: str  # set by the class that this is mixed into

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike | None, *model_args, strict: bool = True, **kwargs
    ) -> Self:
        """Load like `PreTrainedModel.from_pretrained`, but raise an error if a tensor of the trunk is missing from the
        checkpoint or unknown to the model. Heads may differ: a causal LM's checkpoint opens as a classifier.
        `strict=False` (or `ignore_mismatched_sizes=True`) restores transformers' behaviour: a report, fresh weights.
        So does `output_loading_info=True`, because the caller then receives that report.

        `trust_remote_code=True` opens a class of your own by the code that was saved with it.
        """
        refuse_arguments_of_generate(kwargs)
        if (file := kwargs.get("gguf_file")) is not None:
            raise ValueError(
                f"gguf_file={file!r}: transformers reads no looped model from GGUF. Load the safetensors that it was "
                "made of; a dense model in GGUF opens as its own class, and from_dense makes it loop"
            )
        kwargs = at_one_commit(pretrained_model_name_or_path, kwargs)
        # a folder in a foreign layout, see formats/
        public = None
        if pretrained_model_name_or_path is not None and "public" in OF_PACKAGE:
            public = OF_PACKAGE["public"](pretrained_model_name_or_path, kwargs)
        if public is None and (own := class_beside_weights(cls, pretrained_model_name_or_path, kwargs)) is not cls:
            return own.from_pretrained(pretrained_model_name_or_path, *model_args, strict=strict, **kwargs)
        loader = cls if public is None else public.loading_class(cls)
        wants_info = kwargs.pop("output_loading_info", False)
        # without a path the caller passes a state_dict, and is responsible for it
        has_path = pretrained_model_name_or_path is not None
        refuses = strict and has_path and not wants_info and not kwargs.get("ignore_mismatched_sizes")
        if refuses:
            kwargs["ignore_mismatched_sizes"] = True  # so that the error raised below can name the sizes
        before = STRICTLY.set((str(pretrained_model_name_or_path), cls.__name__) if refuses else None)
        try:
            of_transformers: Any = super(StrictLoadingMixin, loader)  # pyrefly: ignore[invalid-argument]
            load = of_transformers.from_pretrained  # the method of PreTrainedModel, the other base class
            model, info = load(pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs)
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            name = str(error).split("'")[1]
            if hasattr(kwargs.get("config"), name):
                said = f"from_pretrained takes {name} from the config that is passed: set it there"
                raise UnknownNameError(said) from error
            advice = ARGUMENT_OF.get(name)
            raise UnknownNameError(
                f"{error}: from_pretrained takes the arguments of transformers and the fields of LoopedConfig"
                + (f"; generate has {advice}" if advice else "")
            ) from error
        except (look_up("safetensors", "SafetensorError", EOFError), EOFError) as error:
            raise ValueError(
                f"a weight file of the checkpoint {pretrained_model_name_or_path} is truncated or damaged "
                f"({error or type(error).__name__}); fetch or save it again"
            ) from error
        except UnpicklingError as error:
            raise ValueError(
                f"weights of the checkpoint {pretrained_model_name_or_path} are a pickle of more than tensors, which "
                "is not read, or no pickle at all"
            ) from error
        finally:
            STRICTLY.reset(before)
        if refuses:
            refuse_layers_without_scales(model, info["missing_keys"])
        if public is not None:
            public.finish(model, cls, info, refuses)
        elif refuses:
            refuse_class_of_others(pretrained_model_name_or_path, cls, model.config.architectures)
            cls.refuse_misfits(pretrained_model_name_or_path, model, info)
        refuse_unset_parameters(model, {*info["missing_keys"], *FILLED.get()})
        return (model, info) if wants_info else model  # pyrefly: ignore[bad-return]  typed as in transformers

    @classmethod
    def _finalize_model_loading(cls, model, *args, **kwargs):
        """Refuse early what cannot load anyway: transformers' method allocates tensors for all that did not fit, for
        which an absurd config leaves no memory, and says of tensors of another class that they can be ignored."""
        info = next((each for each in (*args, *kwargs.values()) if hasattr(each, "mismatched_keys")), None)
        if info is not None and (loaded := STRICTLY.get()):
            refuse_class_of_others(loaded[0], cls, model.config.architectures)
            sizes = {name: tensor.numel() for name, tensor in model.named_parameters()}
            missing = sum(sizes.get(name, 0) for name in info.missing_keys)
            most = info.missing_keys if missing > sum(sizes.values()) / 2 else ()
            refuse_tensors_that_do_not_fit(*loaded, most, (), info.mismatched_keys)
        model._keys_to_ignore_on_load_missing |= {f"^{re.escape(name)}$" for name in FILLED.get()}
        of_transformers: Any = super()
        return of_transformers._finalize_model_loading(model, *args, **kwargs)

    @classmethod
    def from_dense(cls, pretrained_model_name_or_path: str | PathLike | PreTrainedModel, **options) -> Self:
        """Make a looped model from a dense one (Llama, Mistral, Qwen and others), see formats/dense.py."""
        if "dense" not in OF_PACKAGE:
            raise NotImplementedError("from_dense needs the installed package: pip install modeling-looped")
        return OF_PACKAGE["dense"](cls, pretrained_model_name_or_path, **options)

    @classmethod
    def refuse_misfits(cls, path, model, info: dict):
        prefix = cls.base_model_prefix + "."
        trunk = getattr(model, cls.base_model_prefix, model)
        own_heads = {name.split(".")[0] for name, _ in model.named_parameters() if not name.startswith(prefix)}
        same_class = cls.__name__ in (model.config.architectures or [cls.__name__])

        def in_trunk(name: str) -> bool:  # a trunk that was saved alone has no prefix
            return name.startswith(prefix) or hasattr(trunk, name.split(".")[0])

        refuse_tensors_that_do_not_fit(
            path,
            cls.__name__,
            [name for name in info["missing_keys"] if same_class or in_trunk(name)],
            [
                name
                for name in info["unexpected_keys"]
                if same_class or in_trunk(name) or name.split(".")[0] in own_heads
            ],
            info["mismatched_keys"],
        )
