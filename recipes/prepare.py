"""Prepare the data of a recipe, before training or on another machine than the one that trains.

    looped prepare recipe.yaml [section.key=value ...]

Training does the same by itself if it was not done before: one process prepares, and the others wait for it. A
preparation that was stopped goes on where it was.
"""

from looped_recipes.common.command_line import Parser, run_command, say_result, typed


def main(arguments: list[str] | None = None):
    parser = Parser("recipes.prepare", __doc__)
    parser.add_argument("recipe", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args(arguments)
    from looped_recipes.data.shards import prepare
    from looped_recipes.settings.recipe import load_recipe

    print(describe(prepare(load_recipe(options.recipe, options.overrides).data)))
    say_result("The data are ready.", typed("looped pretrain", options.recipe, *options.overrides))


def describe(prepared) -> str:
    from looped_recipes.data.overlap import notes

    lines = notes(prepared.manifest)
    lines += [f"{prepared.folder}", f"{'':10}  {'documents':>12}  {'tokens':>15}  {'bytes':>15}  {'rows':>12}"]
    for split in ("train", "validation"):
        counts = prepared.manifest["counts"][split]
        numbers = f"{counts['documents']:12,}  {counts['tokens']:15,}  {counts['bytes']:15,}  {counts['rows']:12,}"
        lines.append(f"{split:10}  {numbers}")
    counts = prepared.manifest["counts"]["train"]
    lines.append(f"vocabulary of {len(prepared.tokenizer):,}, {counts['bytes'] / counts['tokens']:.2f} bytes a token")
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
