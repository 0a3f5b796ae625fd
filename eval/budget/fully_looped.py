"""Accuracies of six tasks of CORE, which table 1 of the Fully Looped Transformer reports beside CORE.

Prompts and shots are those of the bundle (table 4). lm-eval's tasks of the same names have others; they are the group
`fully_looped_six_lm_eval`.
"""

from pathlib import Path

from looped_eval.common.curves import Curves
from looped_eval.common.model_folder import start_token
from looped_eval.core.bundle import read_tasks
from looped_eval.core.scoring import Request, score
from looped_eval.harness.looped_lm import LoopedLM
from looped_recipes.common.token_losses import perplexity


SIX = ("lambada_openai", "piqa", "hellaswag", "openbook_qa", "arc_easy", "arc_challenge")


def six_curves(results: dict[int, dict]) -> Curves:
    """Return each accuracy in the results of `core_scores`, and their unweighted average."""
    curves: Curves = {}
    for depth, found in results.items():
        missing = [label for label in SIX if label not in found["tasks"]]
        if missing:
            raise ValueError(f"core.yaml of the bundle lists no {', '.join(missing)}, which table 1 reports")
        accuracies = {label: found["tasks"][label]["accuracy"] for label in SIX}
        for name, value in {**accuracies, "average of the six": sum(accuracies.values()) / len(SIX)}.items():
            curves.setdefault(name, {"": {}})[""][depth] = (value, None)
    return curves


def lambada_perplexity(lm: LoopedLM, bundle: Path | str, examples: int | None = None) -> Curves:
    """Return the perplexity over the tokens of all answers. Context and answer are tokenized separately, unlike for
    the accuracy."""
    (task,) = read_tasks(bundle, examples=examples, only=["lambada_openai"])
    start = [start_token(lm.tokenizer)]

    def tokens(text: str) -> list[int]:
        return lm.tokenizer(text, add_special_tokens=False)["input_ids"]

    requests = [Request(start + tokens(item["context"]), tokens(" " + item["continuation"])) for item in task.items]
    sizes = [len(request.asked) for request in requests]
    means = score(lm, requests)[:, 0].tolist()  # [depths][items]
    nats = [sum(mean * size for mean, size in zip(of_depth, sizes)) for of_depth in means]
    values = (perplexity(total / sum(sizes)) for total in nats)
    return {"lambada_openai perplexity": {"": {depth: (value, None) for depth, value in zip(lm.depths, values)}}}
