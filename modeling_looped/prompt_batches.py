"""Many prompts in one call of `generate_batch`, each with its own depth and exits: they share passes."""

import copy
import reprlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from numbers import Integral
from typing import Any

import torch
from transformers.utils import logging

from .depth_options import DepthOptions, as_python, listed, set_fields
from .foreign_names import GENERATION_FIELDS
from .shared_passes import SharedPasses


logger = logging.get_logger(__name__)

# arguments of generate_batch that belong to the continuous batching of transformers
ONLY_IN_TRANSFORMERS = ("continuous_batching_config", "record_timestamps", "progress_bar", "persistent_manager")


def read_prompts(inputs) -> list[list[int]]:
    """Return the ids of each prompt of `generate_batch`. A tensor of all prompts is refused: it may hold padding."""
    prompts = list(map(as_python, inputs)) if isinstance(inputs, Sequence) else [inputs]
    is_list = not any(isinstance(prompt, str) or not isinstance(prompt, Sequence) for prompt in prompts)
    if not is_list or not all(is_whole(token) for prompt in prompts for token in prompt):
        raise TypeError(
            f"inputs must be one list of token ids per prompt, got {type(inputs).__name__} {reprlib.repr(inputs)}: "
            "of a tokenizer pass tokenizer(texts).input_ids"
        )
    return [list(map(int, prompt)) for prompt in prompts]


def is_whole(token) -> bool:
    return isinstance(token, Integral) and not isinstance(token, bool)


def generate_together(model, inputs, generation_config, fields: dict, max_rows: int, max_tokens, **kwargs) -> dict:
    """Run `generate_batch` with depth arguments, each with one value or a list of one per prompt."""
    from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

    kwargs.pop("warmup", None)  # records graphs of transformers' batching
    config = generation_config or model.generation_config
    refuse_for_batches(model, config, fields, kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in ONLY_IN_TRANSFORMERS}
    fields_of_prompts = split_by_prompt(fields, len(inputs))
    # invalid fields are an error of the call, not of every prompt
    for of_prompt in {tuple(each.items()) for each in fields_of_prompts}:
        options, asked = DepthOptions.merged(model.generation_config, generation_config, dict(of_prompt))
        options.exit_rule(model.config)
        options.check(model.config, asked)

    first_error: list[Exception] = []
    device = "cpu" if model.device.type == "meta" else model.device  # "meta" where the embedding is offloaded

    def generate(i: int) -> GenerationOutput:
        prompt = torch.tensor([inputs[i]], device=device)
        settings: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), **kwargs, **fields_of_prompts[i]}
        settings["return_dict_in_generate"] = True
        output = GenerationOutput(f"req_{i}", prompt_ids=list(inputs[i]))
        vars(output)["token_loops"] = []
        try:
            result = passes.generate(prompt, generation_config=copy.deepcopy(generation_config), **settings)
        except Exception as error:
            output.status, output.error = RequestStatus.FAILED, str(error)
            if not first_error:
                first_error.append(error)
            logger.warning(f"prompt {i} of generate_batch has no answer: {error}")
            return output
        output.generated_tokens = result.sequences[0, prompt.shape[1] :].tolist()
        vars(output)["token_loops"] = result.token_loops[0].tolist()
        output.status = RequestStatus.FINISHED
        return output

    with SharedPasses(model, max_rows, max_tokens) as passes, ThreadPoolExecutor(max_rows) as pool:
        outputs = {output.request_id: output for output in pool.map(generate, range(len(inputs)))}
    if first_error and len({output.error for output in outputs.values()}) == 1:  # the call's, not a prompt's
        raise first_error[0]
    return outputs


def refuse_for_batches(model, generation_config, fields: dict, kwargs: dict):
    """Refuse arguments of `generate_batch` that do not go with these depth fields, or with single prompts."""
    if others := [name for name in ONLY_IN_TRANSFORMERS if kwargs.get(name) not in (None, False)]:
        asked = listed({**set_fields(generation_config), **fields})
        raise ValueError(
            f"{', '.join(others)}: leave out, since rows of different depths are batched otherwise; "
            f"or leave out {asked}"
        )
    of_pass = signature(model.forward).parameters.keys() - GENERATION_FIELDS
    if inputs_of_pass := [name for name in kwargs if name in of_pass and kwargs[name] is not None]:
        raise ValueError(f"{', '.join(inputs_of_pass)}: leave out, since generate_batch makes each prompt's inputs")
    count = {**generation_config.to_dict(), **kwargs}.get("num_return_sequences") or 1
    if count > 1:
        raise ValueError(f"num_return_sequences={count}: batches give one answer to each prompt, so pass it so often")


def split_by_prompt(fields: dict, num_prompts: int) -> list[dict]:
    """Return the fields of each prompt: of a list the prompt's own value, else the one of all prompts."""
    fields = {name: as_python(value) for name, value in fields.items()}
    lists = {name: value for name, value in fields.items() if isinstance(value, (list, tuple))}
    for name, values in lists.items():
        if len(values) != num_prompts:
            raise ValueError(
                f"{name} has {len(values)} values for {num_prompts} prompts: pass one value, or one per prompt"
            )
        if any(isinstance(value, (list, tuple)) for value in values):
            raise ValueError(f"{name}={reprlib.repr(values)} holds lists: pass one value, or one per prompt")
    return [{**fields, **{name: values[i] for name, values in lists.items()}} for i in range(num_prompts)]
