"""Best learning rates and their intervals, again from the losses that a measure saved:

looped optimum results/diagnose/transfer/lr_transfer.json
"""

import json
from pathlib import Path

from looped_recipes.common.command_line import Parser, run_command


def main(arguments: list[str] | None = None):
    parser = Parser("looped optimum", __doc__)
    parser.add_argument("file", help="lr_transfer.json of looped diagnose")
    path = parser.parse_args(arguments).file
    from looped_recipes.common.optimum import in_words, of_saved, shifts

    try:
        saved = json.loads(Path(path).read_text())
    except (OSError, ValueError):  # not there, a folder, or no JSON
        saved = None
    if not isinstance(saved, dict) or saved.get("measure") != "lr_transfer":
        raise ValueError(f"{path!r} holds no learning rates; `looped diagnose lr_transfer` measures them")
    result = saved["result"]
    for panel in result["panels"]:
        seeds = result.get("seeds", 1)
        found = {n: of_saved(result["rates"], curve, seeds) for n, curve in panel["curves"].items()}
        for n, moved in shifts(found).items():
            octaves, interval = moved["octaves"], moved.get("interval")
            said = "" if octaves is None else f"; octaves from the first {octaves:+.2f}"
            said += f" [{interval[0]:+.2f}, {interval[1]:+.2f}]" if interval else ""
            print(f"{panel['rule']}, {panel['layers']} layers, N = {n}: {in_words(found[n])}{said}")


if __name__ == "__main__":
    run_command(main)
