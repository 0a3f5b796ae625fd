"""The parts of the demo, one after the other."""

import json
from collections.abc import Sequence
from pathlib import Path

import datasets
from transformers.utils import logging

from looped_recipes.common.files import write_whole
from looped_recipes.common.provenance import write_json
from looped_recipes.common.words import counted
from looped_recipes.demo import hops, text
from looped_recipes.demo.options import parse
from looped_recipes.demo.page import finding, next_commands, page, text_finding
from looped_recipes.demo.picture import picture


NUM_DOCUMENTS = 200_000


def heading(words: str):
    print(f"\n== {words}", flush=True)


def table(rows: list[list[str]]):
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths)))


def show_hops(found: dict):
    loops = list(found["accuracy"]["1"])
    head = ["hops", *(counted(loop, "loop") for loop in loops), "one-loop model", "loops with exits"]
    rows = [
        [number, *(f"{at[loop]:.2f}" for loop in loops), f"{found['control'][number]:.2f}",
         f"{found['exit_loops'][number]:.2f}"]
        for number, at in found["accuracy"].items()
    ]  # fmt: skip
    print(f"\nright answers to {found['questions']} questions of each kind, after so many loops:")
    table([head, *rows])


def show_text(found: dict):
    print("\nheld-out bits per byte, every depth from one pass:")
    for depth, value in found["bits_per_byte"].items():
        deeper = "   (deeper than trained)" if int(depth) > found["loops"] else ""
        print(f"  {counted(depth, 'loop')}  {value:.3f}{deeper}")
    for depth, sample in found["samples"].items():
        print(f"\n--- written with {counted(depth, 'loop')}:\n{sample}")


def run_demo(
    output: Path,
    settings: Sequence[str] = (),
    hops_settings: Sequence[str] = (),
    num_documents: int = NUM_DOCUMENTS,
) -> dict:
    """Train, measure and draw; return the measurements as read back from demo.json."""
    text.recipe_of(output, settings)  # report a mistake in the settings before anything is trained
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    heading(f"1 of 3: questions that take several steps, as {hops.unseen_question(hops.HOPS[-1])[0]!r}")
    print("First a looped model, then a control with one loop, on the same questions.")
    looped, control, facts = hops.train_models(output / "hops", hops_settings, num_documents)
    found = {"hops": as_json({**facts, **hops.measure(looped, control)})}
    show_hops(found["hops"])
    heading("2 of 3: text")
    trained = text.train_model(output, settings)
    found["text"] = as_json(text.measure(trained))
    show_text(found["text"])
    heading("3 of 3: what was seen")
    write_json(output / "demo.json", found, digits=6)
    found = json.loads((output / "demo.json").read_text(encoding="utf-8"))
    write_whole(output / "demo.svg", picture(found["hops"]))
    write_whole(output / "demo.html", page(found, output))
    print(finding(found["hops"]), text_finding(found["text"]), sep="\n")
    return found


def as_json(result: dict) -> dict:
    return json.loads(json.dumps(result))


def next_steps(output: Path):
    print(f"\nopen {output / 'demo.html'}, then try:")
    table_of = next_commands(output)
    width = max(len(command) for command, _ in table_of)
    for command, about in table_of:
        print(f"  {command.ljust(width)}  {about}")


def main(arguments: list[str]):
    options = parse(arguments)
    if options.ask is not None:
        return hops.ask(options.output / "hops" / "final", options.ask)
    try:
        run_demo(options.output, options.settings)
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on where it was")
        raise
    next_steps(options.output)
