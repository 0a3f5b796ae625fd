"""Prepare the data of a recipe, before training or on another machine than the one that trains.

    looped prepare recipe.yaml [section.key=value ...]

Training does the same by itself if it was not done before: one process prepares, and the others wait for it. A
preparation that was stopped goes on where it was.
"""

from looped_recipes.common.command_line import Parser, run_command, say_result, typed


def main(arguments: list[str] | None = None):
    parser = Parser("looped prepare", __doc__)
    parser.add_argument("recipe", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args(arguments)
    from looped_recipes.data.shards import prepare
    from looped_recipes.settings.recipe import load_recipe

    print(describe(prepare(load_recipe(options.recipe, options.overrides).data)))
    say_result("The data are ready.", typed("looped pretrain", options.recipe, *options.overrides))


def describe(prepared) -> str:
    from looped_recipes.data.overlap import notes

    lines = cuts(prepared.manifest) + notes(prepared.manifest)
    lines += [f"{prepared.folder}", f"{'':10}  {'documents':>12}  {'tokens':>15}  {'bytes':>15}  {'rows':>12}"]
    for split in ("train", "validation"):
        counts = prepared.manifest["counts"][split]
        numbers = f"{counts['documents']:12,}  {counts['tokens']:15,}  {counts['bytes']:15,}  {counts['rows']:12,}"
        lines.append(f"{split:10}  {numbers}")
    counts = prepared.manifest["counts"]["train"]
    lines.append(f"vocabulary of {len(prepared.tokenizer):,}, {counts['bytes'] / counts['tokens']:.2f} bytes a token")
    return "\n".join(lines)


def cuts(manifest: dict) -> list[str]:
    """Return a line on the text files that were cut into several documents."""
    from looped_recipes.data.sources import MANY_TEXTS, TEXT_DOCUMENT

    source, num_files = manifest["settings"]["source"], manifest.get("text_files", 0)
    is_held_out = "fraction" in manifest["settings"]["validation"]
    splits = ("train", "validation") if is_held_out else ("train",)
    pieces = sum(manifest["counts"][split]["documents"] for split in splits)
    if not 0 < num_files < pieces or source.get("joined_by") is not None:
        return []
    size = source["text_size"]
    said = f"{num_files:,} text files were cut into {pieces:,} documents, at blank lines after {size:,} characters"
    said += ", and held out of training piece by piece" * is_held_out
    return [said + f"; {MANY_TEXTS:,} files or more stay whole" * (size == TEXT_DOCUMENT)]


if __name__ == "__main__":
    run_command(main)
