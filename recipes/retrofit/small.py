"""A dense model that is made to loop, on a CPU: `python -m looped_recipes.retrofit.small [results.json]`.

A few minutes of one core. A Llama of six layers is trained from nothing and saved as transformers saves one;
five of its layers become two before the loop, two in it and one after; it is trained on with depths that grow. Beside
it the Llama is trained on as it was, for as many tokens. Written: held-out losses at every depth, before and after,
also to results.json. What is already trained in runs/retrofit/ is not trained again.
"""

from pathlib import Path

from looped_recipes.common.command_line import print_help, run_command
from looped_recipes.common.metrics import last_validation, read_metrics
from looped_recipes.common.provenance import write_json
from looped_recipes.convert import convert
from looped_recipes.engine.training import Pretraining
from looped_recipes.engine.validation import validate
from looped_recipes.settings.recipe import Recipe, load_recipe


TINY = Path(__file__).parent / "tiny"


def trained(recipe: Recipe) -> tuple[dict[int, float], dict[int, float]]:
    """Train a run; return its held-out losses before the first step and after the last."""
    run = Pretraining(recipe)
    before = validate(run.accelerator, run.model, run.config, recipe, run.data.validation)
    run.train()
    return last_validation([before], "loss"), last_validation(read_metrics(run.metrics.path), "loss")


def measure(overrides: list[str]) -> dict:
    dense = load_recipe(TINY / "dense.yaml", overrides)
    looped = load_recipe(TINY / "looped.yaml", overrides)
    control = load_recipe(TINY / "control.yaml", overrides)
    llama, run = Path(looped.dense.path), Path(dense.training.output_dir)
    is_made = (llama / "config.json").is_file()
    if is_made and load_recipe(run / "recipe.yaml").training.steps != dense.training.steps:
        raise ValueError(
            f"{llama} was made of another number of steps than training.steps={dense.training.steps}: remove "
            f"{run.parent} to begin anew"
        )
    _, of_dense = trained(dense)
    if not is_made:
        convert(f"{run}/final", llama, "llama", unroll=True)
    before, after = trained(looped)
    _, of_control = trained(control)
    tokens = looped.training.steps * looped.training.rows_per_step * looped.data.sequence_length
    return {
        "dense": {"loss": of_dense[1], "steps": dense.training.steps},
        "looped": {"before": before, "after": after, "steps": looped.training.steps, "tokens": tokens},
        "control": {"loss": of_control[1], "steps": control.training.steps},
    }


def main(arguments: list[str]):
    print_help(arguments, __doc__, least=0)
    outputs = [argument for argument in arguments if "=" not in argument]
    result = measure([argument for argument in arguments if "=" in argument])
    before, after = result["looped"]["before"], result["looped"]["after"]
    print(f"\nheld-out loss: the Llama {result['dense']['loss']:.4f}, trained on {result['control']['loss']:.4f}")
    print("loops    made to loop    trained on")
    for depth in before:
        print(f"{depth:5} {before[depth]:15.4f} {after[depth]:13.4f}")
    if outputs:
        write_json(outputs[0], result, digits=6)


if __name__ == "__main__":
    run_command(main)
