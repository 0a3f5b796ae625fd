"""`looped`: training and evaluation by one command, which lists and runs what `python -m` runs in a clone."""

import difflib
import runpy
import sys
from pathlib import Path


COMMANDS = {
    "demo": ("recipes.demo", "train a small model, measure it at every depth, let it write"),
    "pretrain": ("recipes.pretrain", "train a model as a recipe says"),
    "prepare": ("recipes.prepare", "tokenize and pack the data of a recipe"),
    "plan": ("recipes.plan", "what a recipe or a sweep would cost"),
    "sweep": ("recipes.sweep", "many training runs from one file"),
    "convert": ("recipes.convert", "a published checkpoint to our layout, or a model to that of a release"),
    "chat": ("eval.chat", "talk to a model, or let it complete text"),
    "show": ("eval.show_loops", "a page where every token is coloured by its loops"),
    "eval": ("eval.harness", "lm-eval at every depth from one pass"),
    "budget": ("eval.budget", "models and seeds side by side over depth"),
    "core": ("eval.core", "CORE and CORE-extended"),
    "statistics": ("eval.statistics", "two models over the same questions"),
    "halting": ("eval.halting", "thresholds of early exit for a budget of perplexity"),
    "diagnose": ("eval.diagnose", "the papers' measurements on one model"),
    "optimum": ("eval.optimum", "best learning rates and their intervals"),
    "laws": ("eval.laws", "scaling laws of many runs"),
    "report": ("eval.report", "training runs on one page"),
    "readout-table": ("eval.readout_table", "perplexity and norm of the state over seeds"),
    "benchmark": ("eval.benchmark", "speed and memory as ratios"),
}


def overview() -> str:
    lines = [f"  {name:14} {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(["usage: looped COMMAND [options]", "", *lines, "", "looped COMMAND --help tells of one."])


def find_clone() -> Path | None:
    """The folder with recipes/ and eval/: that of this package, or the one where the command is given."""
    folders = (Path(__file__).resolve().parents[1], Path.cwd())
    return next((folder for folder in folders if (folder / "recipes" / "pretrain.py").is_file()), None)


def main():
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return
    name, *rest = arguments
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        advice = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(COMMANDS)}"
        raise SystemExit(f"looped: there is no command {name!r}; {advice}")
    root = find_clone()
    if root is None:
        raise SystemExit(
            "looped: training and evaluation are run from a clone, and none is here: change to its folder, or install "
            "it with `pip install -e .`"
        )
    sys.path.insert(0, str(root))
    sys.argv = [f"looped {name}", *rest]
    runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
