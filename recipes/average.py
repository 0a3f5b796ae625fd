"""Average the weights of saved models of one config: `looped average OUT MODEL MODEL [MODEL ...]`.

    looped average runs/long/mean runs/long/step-*               the models that training.export_every kept
    looped average runs/long/ema runs/long/step-* --decay 0.9    the last counts 1, the one before it 0.9, then 0.81
    looped average mixed runs/tuned_a runs/tuned_b               runs that began with the same weights

MODEL is a folder, a training run or a repository on the Hub, in any layout that opens. Everything but the weights is
that of the last one: config, generation config and tokenizer. OUT is a new folder: it appears when it is complete, and
nothing is overwritten. Evaluate it before you use it: a mean is of use where training went on from the same weights.
"""

import os
from pathlib import Path

from looped_recipes.common.command_line import Parser, run_command, say_result, trust_of, typed
from looped_recipes.common.files import check_writable
from looped_recipes.common.hub import check_source, model_inside


# fields of configs that may differ
LEFT_OUT = ("_name_or_path", "transformers_version", "dtype", "architectures", "auto_map", "trained_num_loops")


def parse(arguments: list[str] | None):
    parser = Parser("looped average", __doc__)
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("models", nargs="+", metavar="model", help="at least two, in the order of their training")
    parser.add_argument("--decay", type=float, default=1.0, help="how much a model counts beside the one after it")
    parser.add_trust()
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Path:
    options = parse(arguments)
    if len(options.models) < 2:
        raise ValueError(f"a mean is of two models or more, and only {options.models[0]} is named")
    if not 0 < options.decay <= 1:
        raise ValueError(f"--decay {options.decay:g}: choose a number above 0, up to 1 for a plain mean")
    average(options.out, options.models, options.decay, options.trust_remote_code)
    found = f"{options.out} is the mean of {len(options.models)} models"
    say_result(found, typed("looped chat", options.out, *trust_of(options)))
    return options.out


def average(out: Path, models: list[str], decay: float, trust_remote_code: bool):
    from modeling_looped.formats.writing import check_new, copy_tokenizer, whole_folder

    check_new(out)
    check_writable(out.parent, "as OUT")
    *earlier, last = places = [place_of(name) for name in models]
    folders = [os.path.realpath(place) for place in places]
    if twice := [place for place, folder in zip(places, folders) if folders.count(folder) > 1]:
        raise ValueError(f"{twice[0]} is named twice: it would count twice")
    model, dtype = open_model(last, trust_remote_code)
    total = share = 1.0
    for name in reversed(earlier):
        share *= decay
        total += share
        add(model, open_model(name, trust_remote_code)[0], share / total)
    model.to(dtype)

    def fill(place: Path):
        model.save_pretrained(place)
        copy_tokenizer(last, place)

    whole_folder(out, fill)


def place_of(name: str) -> str:
    from looped_recipes.common.checksums import check_folder

    place = model_inside(name)
    check_source(place)
    check_folder(place)
    return place


def open_model(place: str, trust_remote_code: bool):
    """Return a model in float32, or float64 if it is stored so, and the dtype that it is stored in."""
    import torch

    from looped_recipes.convert import stored_dtype
    from looped_recipes.engine.finite import first_nonfinite
    from modeling_looped import LoopedForCausalLM
    from modeling_looped.formats.writing import refuse_adapter, refuse_quantized

    stored = stored_dtype(place)
    dtype = torch.promote_types(stored, torch.float32)
    model, info = LoopedForCausalLM.from_pretrained(
        place, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
    )
    refuse_quantized(model)
    refuse_adapter(model)
    if others := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
        raise ValueError(
            f"{place} is not of {type(model).__name__}, where {others[0]} would be new or left out: name causal "
            "language models, and pass --trust-remote-code for those of a class of your own"
        )
    if (bad := first_nonfinite(model.named_parameters())) is not None:
        raise ValueError(f"the weight {bad} of {place} is not finite: leave that model out")
    return model, stored


def add(mean, model, share: float):
    """Move `mean` towards `model` by `share` of the way. Weights that are equal stay the same, bit for bit."""
    import torch

    check_alike(mean, model)
    with torch.no_grad():
        for ours, theirs in zip(mean.parameters(), model.parameters(), strict=True):
            ours.lerp_(theirs.to(ours.dtype), share)


def check_alike(mean, model):
    theirs, ours = shape_of(model), shape_of(mean)
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if names:
        found = "; ".join(f"{name} is {theirs.get(name)} and {ours.get(name)}" for name in names[:5])
        raise ValueError(
            f"{model.name_or_path} and {mean.name_or_path} differ in more than their weights ({found}): a mean is of "
            "models of one config"
        )


def shape_of(model) -> dict:
    """Return what must be equal: the class, the config, the shapes of weights, and what the training loop has set."""
    fields = {name: value for name, value in model.config.to_dict().items() if name not in LEFT_OUT}
    weights = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    return {"class": type(model).__name__, **fields, **weights, **{n: b.tolist() for n, b in model.named_buffers()}}


if __name__ == "__main__":
    run_command(main)
