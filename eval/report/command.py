"""Training runs on one page."""

from pathlib import Path

import yaml

from looped_eval.common.page import Folded, Missing, Section, Table, to_html, to_markdown
from looped_eval.common.run_folder import RunFolder, open_runs
from looped_recipes.common.command_line import say_result, typed
from looped_recipes.common.files import write_whole

from .about import about, differences
from .measured import accuracy, diagnostics, halting
from .options import parse
from .seeds import over_seeds
from .training import gradients, headlines, norms, over_depth, training


def recipes(runs: list[RunFolder]) -> Section:
    return Section(
        "Recipes", [Folded(run.name, yaml.safe_dump(run.recipe, sort_keys=False)) for run in runs if run.recipe]
    )


def sections_of(runs: list[RunFolder], layer: int | None = None, clipped: bool = False) -> list[Section]:
    parts = [over_seeds(runs), about(runs), differences(runs), training(runs), over_depth(runs), norms(runs)]
    parts += [gradients(runs, layer, clipped), accuracy(runs), halting(runs), *diagnostics(runs), recipes(runs)]
    parts = [part for part in parts if part is not None and part.blocks]
    lacking = [part for part in parts if all(isinstance(block, Missing) for block in part.blocks)]
    found = [part for part in parts if part not in lacking]
    return [*found, Section("Not measured yet", sum((part.blocks for part in lacking), []))] if lacking else found


def title_of(runs: list[RunFolder]) -> str:
    return ("This model: " if len(runs) == 1 else "These models: ") + ", ".join(run.name for run in runs)


def place_of(folders, runs: list[RunFolder]) -> Path:
    """Return the path of the page: in the first named folder, or in the run's folder if its model was named."""
    first = Path(folders[0])
    return (first if runs[0].folder.is_relative_to(first) else runs[0].folder) / "report.html"


def main(arguments: list[str]) -> Path:
    """Write the page and return its path."""
    args = parse(arguments)
    runs = open_runs(args.runs)
    sections = sections_of(runs, args.layer, args.clipped)
    output = Path(args.output or place_of(args.runs, runs))
    write_whole(output, to_html(title_of(runs), sections, headlines(runs)))
    if args.markdown == "-":
        print(to_markdown(title_of(runs), sections, headlines(runs)))
    elif args.markdown:
        write_whole(args.markdown, to_markdown(title_of(runs), sections, headlines(runs)))
        print(f"Markdown: {args.markdown}")
    else:
        tables = [block for block in (over_seeds(runs) or about(runs)).blocks if isinstance(block, Table)]
        print("\n\n".join(table.markdown() for table in tables))
    print(f"\nthe page: {output}")
    say_result("\n".join(headlines(runs)) or "No validation was logged yet.", *next_commands(runs[0]))
    return output


def next_commands(run: RunFolder) -> list[str]:
    """Return commands for the parts that the page of this run lacks, or else the command that tries its model."""
    commands = {"diagnose": "looped diagnose all", "halting.json": "looped halting"}
    lacking = [command for name, command in commands.items() if not run.results(name).exists()]
    return [typed(command, run.folder) for command in lacking or ["looped chat"]]
