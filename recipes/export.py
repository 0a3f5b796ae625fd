"""Make a model of a checkpoint, also while its run goes on: `looped export RUN [OUT] [--step 500]`.

A checkpoint holds what training goes on from, with its optimizers, and does not open by itself. OUT is a folder that
from_pretrained and all commands open, by default RUN/step-00000500, beside final/.
"""

from pathlib import Path

from looped_recipes.common.command_line import Parser, run_command, say_result, trust_of, typed
from looped_recipes.common.files import check_writable
from looped_recipes.common.words import counted


def parse(arguments: list[str] | None):
    parser = Parser("looped export", __doc__)
    parser.add_argument("run", type=Path, help="the folder of a training run")
    parser.add_argument("out", type=Path, nargs="?", help="a new folder; default: RUN/step-... of the checkpoint")
    parser.add_argument("--step", type=int, help="after this many steps; default: the newest checkpoint")
    parser.add_trust("run the code of the run's training.model_file, a class of your own")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Path:
    options = parse(arguments)
    from looped_recipes.engine.checkpoint import named_checkpoints, step_of, whole_checkpoints, why_damaged
    from looped_recipes.engine.export import export_checkpoint

    checkpoints = whole_checkpoints(options.run / "checkpoints")
    if not checkpoints and (cut := named_checkpoints(options.run / "checkpoints")):
        raise ValueError(f"no checkpoint of {options.run} is whole; of the newest, {cut[-1]}: {why_damaged(cut[-1])}")
    if not checkpoints or not (options.run / "recipe.yaml").is_file():
        raise ValueError(
            f"{options.run} holds no checkpoint of a training run: name the folder that holds checkpoints/"
        )
    of_steps = {step_of(path): path for path in checkpoints}
    step = max(of_steps) if options.step is None else options.step
    if step not in of_steps:
        raise ValueError(f"{options.run} has no checkpoint of step {step}: choose one of {sorted(of_steps)}")
    damaged = why_damaged(of_steps[step])
    if damaged is not None:
        others = f"choose --step from {sorted(of_steps.keys() - {step})}" if len(of_steps) > 1 else "there is no other"
        raise ValueError(f"{of_steps[step]} is not what was written: {damaged}; {others}")
    out = options.out or options.run / of_steps[step].name
    check_writable(out.parent, "as OUT, the second argument")
    if out.exists() and out.samefile(Path()):
        raise ValueError(f"{out} is the current folder, and no other can take its place: name a new one in it")
    export_checkpoint(options.run, of_steps[step], out, options.trust_remote_code)
    say_result(f"{out} is the model after {counted(step, 'step')}", typed("looped chat", out, *trust_of(options)))
    return out


if __name__ == "__main__":
    run_command(main)
