"""Convert a model between our layout and those of published looped models, tensors bit for bit.

    looped convert ByteDance/Ouro-1.4B ouro               a published checkpoint to our layout
    looped convert ouro back --to ouro                    and back
    looped convert SandyResearch/parcae-140m parcae --tokenizer SandyResearch/parcae-tokenizer
    looped convert runs/small/final llama --to llama --unroll          the Llama of its layers, pass by pass
    looped convert base_checkpoints/d12 flt --tokenizer TOKENIZER      what the Fully Looped Transformer's code saved
    looped convert outputs/my_run/last.pt readout                      and that of the readout paper

SOURCE is a folder, a training run or a repository on the Hub, in any layout that opens, or what two training codes
save. OUT is a new folder: it appears when it is complete, and nothing is overwritten. Tokenizer and generation config
go along. Published models:

    Nanbeige/Nanbeige4.2-3B
    tomg-group-umd/huginn-0125
    ByteDance/Ouro-1.4B, Ouro-1.4B-Thinking, Ouro-2.6B, Ouro-2.6B-Thinking
    SandyResearch/parcae-140m, parcae-370m, parcae-770m, parcae-1.3b
"""

from functools import reduce
from pathlib import Path

from looped_recipes.common.checksums import check_folder
from looped_recipes.common.command_line import Parser, run_command, say_result, typed
from looped_recipes.common.files import check_writable
from looped_recipes.common.hub import check_source, is_training_checkpoint, model_inside


LAYOUTS = ("ouro", "huginn", "retrofitted", "retrofitted-olmo", "parcae", "parcae-gated", "nanbeige", "llama")


def parse(arguments: list[str] | None):
    parser = Parser("looped convert", __doc__)
    parser.add_argument("source", help="a folder, a training run, or a repository on the Hub")
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--to", choices=LAYOUTS, help="the layout to write; by default our own")
    parser.add_argument("--unroll", action="store_true", help="with --to llama: a layer for every pass of one")
    parser.add_argument("--num-loops", type=int, help="depth to write; by default that of SOURCE")
    parser.add_argument("--tokenizer", help="where the tokenizer is, if not in SOURCE")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None):
    options = parse(arguments)
    if options.unroll and options.to != "llama":
        raise ValueError("--unroll is for --to llama: the other layouts loop")
    convert(options.source, options.out, options.to, options.unroll, options.tokenizer, options.num_loops)


def convert(
    source: str,
    out: Path,
    to: str | None = None,
    unroll: bool = False,
    tokenizer: str | None = None,
    num_loops: int | None = None,
):
    is_of_training = is_training_checkpoint(source)
    if not is_of_training:
        source = model_inside(str(source))
        check_source(source)
    from looped_recipes.engine.foreign_checkpoints import read_training_checkpoint
    from modeling_looped import LoopedForCausalLM
    from modeling_looped.formats.folder import TOKENIZER_FILES, find_file
    from modeling_looped.formats.writing import (
        check_new,
        copy_tokenizer,
        refuse_adapter,
        refuse_quantized,
        save_public,
        whole_folder,
    )

    check_new(Path(out))  # before much is read
    check_writable(Path(out).parent, "as OUT")
    if tokenizer is not None and all(find_file(tokenizer, name, {}) is None for name in TOKENIZER_FILES):
        raise OSError(f"there is no tokenizer in {tokenizer}: it has none of {', '.join(TOKENIZER_FILES)}")
    depth = {} if num_loops is None else {"num_loops": num_loops}
    own_tokenizer = None
    if is_of_training:
        model, own_tokenizer = read_training_checkpoint(source, **depth)
    else:
        check_folder(source)
        model = LoopedForCausalLM.from_pretrained(source, dtype=stored_dtype(source), **depth)
        refuse_quantized(model)
        refuse_adapter(model)
    tokenizer_of = tokenizer or source
    if to is not None:
        save_public(model, out, to, unroll, tokenizer_of)
    else:

        def fill(place: Path):
            model.save_pretrained(place)
            if own_tokenizer is not None and tokenizer is None:
                own_tokenizer.save_pretrained(place)
            else:
                copy_tokenizer(tokenizer_of, place)

        whole_folder(out, fill)
    count = sum(parameter.numel() for parameter in model.parameters())
    passes = f", {model.config.num_hidden_layers} layers" if unroll else ""
    found = f"{out}: {count:,} parameters of {source}{passes}, {to or 'our own'} layout"
    say_result(found, *([] if to else [typed("looped chat", out)]))


def stored_dtype(source: str):
    """Return the dtype of the stored tensors, whatever config.json says; for several, the one that holds them all."""
    import torch

    from modeling_looped.formats.folder import find_file, stored_tensors

    path = Path(source)
    if find_file(source, "config.json", {}) is None:
        places = (path, *path.parents[:2]) if path.is_dir() else ()
        if (run := next((place for place in places if (place / "checkpoints").is_dir()), None)) is not None:
            raise OSError(f"{source} holds no saved model: `{typed('looped export', run)}` makes one of a checkpoint")
        raise OSError(
            f"{source} is no folder with a config.json, and no such repository was reached on the Hub: check the name "
            "and the connection"
        )
    dtypes = {dtype for name, dtype in stored_tensors(source, {}).items() if dtype and name != "freqs_cis"}
    return reduce(torch.promote_types, sorted(dtypes, key=str)) if dtypes else torch.float32


if __name__ == "__main__":
    run_command(main)
