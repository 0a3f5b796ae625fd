"""Perplexity and norm of the state over the whole validation split, over seeds (readout blind spot, table 2)."""

import math
import re
import statistics
from collections import Counter
from pathlib import Path

import torch

from looped_eval.common.held_out import prepared_data, run_data
from looped_eval.common.model_folder import open_config, open_model
from looped_eval.common.progress import progress
from looped_eval.common.run_folder import RunFolder, open_runs
from looped_recipes.common import replicas
from looped_recipes.common.command_line import check_counts, say_result, typed
from looped_recipes.common.files import write_whole
from looped_recipes.common.measures import token_rms
from looped_recipes.common.provenance import write_json
from looped_recipes.common.token_losses import perplexity, token_losses
from looped_recipes.data.packing import IGNORE_INDEX, PackedRows
from looped_recipes.data.shards import Prepared
from looped_recipes.data.tokenizers import tokenizer_hash
from modeling_looped.losses import exit_log_probabilities, start_of_last_third

from .options import parse


MEASURES = {"norm": "norm of H_K", "perplexity": "perplexity", "trained": "perplexity of the trained loss"}
OTHER_TOKENS = (
    "Perplexities are per token, and these runs have different tokenizers, so they do not compare: `looped budget "
    "--text FILE` compares bits per byte."
)


def windows(data: Prepared) -> PackedRows:
    """Return rows of the validation split, one token longer than the model reads, so that every token has a target."""
    rows = data.validation
    rows.sequence_length += 1
    if not len(rows):
        raise ValueError(
            f"the validation split in {data.folder} holds {rows.num_tokens} tokens, fewer than a window of "
            f"{rows.sequence_length}: hold out more (data.validation_fraction), or shorten data.sequence_length"
        )
    return rows


@torch.no_grad()
def sums_of(
    model, ids: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Return sums over all tokens of the cross-entropy and the norm after every loop, [loops] each. With an exit gate,
    also the sums of the cross-entropies weighted by the exit distribution, and of the cross-entropy of logits with
    these weights."""
    depth = model.trained_depth
    kept = {"output_loop_hidden_states": True, "output_loop_readout_states": True}
    outputs = model.model(ids, position_ids=positions, num_loops=depth, use_cache=False, **kept)
    states, exits = outputs.loop_hidden_states, None
    sums = {"losses": torch.zeros(depth, dtype=torch.float64), "norms": torch.zeros(depth, dtype=torch.float64)}
    if model.exit_gate is not None:
        last = torch.full((len(ids), 1), depth - 1, device=ids.device)
        exits = exit_log_probabilities(torch.stack([model.gate(state) for state in states]), last).exp()
        sums |= {"expected": torch.zeros((), dtype=torch.float64)}
    mixed = 0.0
    for loop, (state, readout) in enumerate(zip(states, outputs.loop_readout_states)):
        logits = model.logits_after_loop(readout, loop)
        losses = token_losses(logits, targets).double()
        sums["losses"][loop] = losses.sum()
        sums["norms"][loop] = token_rms(state).double().sum() * math.sqrt(state.shape[-1])
        if exits is not None:
            sums["expected"] += (losses * exits[loop]).sum().cpu()
            mixed = mixed + logits * exits[loop][..., None]
    if exits is not None:
        sums["mixed"] = token_losses(mixed, targets).double().sum().cpu()
    return sums


def measure(model, rows: PackedRows, batch_size: int) -> dict:
    """Measure the numbers of the table for one run, and the same numbers after every loop. There is no "trained" where
    no cross-entropy is trained."""
    device, sums, labelled, tokens = model.lm_head.weight.device, Counter(), 0, 0
    for start in progress(range(0, len(rows), batch_size), "windows"):
        batch = rows.batch(range(start, min(start + batch_size, len(rows))))
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        ids, targets = batch["input_ids"][:, :-1], batch["labels"][:, 1:]
        positions = batch["position_ids"][:, :-1] if rows.document_masking else None  # restart with every document
        for name, found in sums_of(model, ids, targets, positions).items():
            sums[name] = sums[name] + found
        labelled += (targets != IGNORE_INDEX).sum().item()
        tokens += ids.numel()
    losses, norms = (sums["losses"] / labelled).tolist(), (sums["norms"] / tokens).tolist()
    exits = {name: sums[name].item() / labelled for name in ("expected", "mixed") if name in sums}
    trained = {
        "terminal": losses[-1],
        "per_loop": statistics.fmean(losses),
        "last_third": statistics.fmean(losses[start_of_last_third(len(losses)) :]),
        "exit_weighted": exits.get("expected"),
        "exit_weighted_logits": exits.get("mixed"),
        "gate": None,  # trains no cross-entropy
    }[model.config.loop_loss]
    return {
        "norm": norms[-1],
        "perplexity": perplexity(losses[-1]),
        **({} if trained is None else {"trained": perplexity(trained)}),
        "loss_at": losses,
        "norm_at": norms,
        **{f"loss_{name}": loss for name, loss in exits.items()},
        "windows": len(rows),
        "targets": labelled,
    }


def system_of(run: RunFolder) -> str:
    """Return the name of the run's folder without its seed. Seeds of one system may be in folders of the same name."""
    name = run.folder.resolve().name
    return re.sub(r"_?seed=\d+", "", name).strip("_") or name


def systems_of(runs: list[RunFolder]) -> dict[str, list[RunFolder]]:
    """Group runs by their name without the seed; refuse groups whose runs differ in more than the seed."""
    systems: dict[str, list[RunFolder]] = {}
    for run in runs:
        systems.setdefault(system_of(run), []).append(run)
    for name, members in systems.items():
        first, settings = members[0], settings_of(members[0])
        for other in members[1:]:
            found = settings_of(other)
            different = sorted(key for key in {*settings, *found} if settings.get(key) != found.get(key))
            if different:
                raise ValueError(
                    f"{first.folder} and {other.folder} are both {name!r}, but differ in {', '.join(different)}: they "
                    "are no seeds of one system; give them names of their own"
                )
        seeds = [run.setting("training.seed") for run in members]
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"{name!r} has the seeds {seeds}: one run of each is compared")
    return systems


def settings_of(run: RunFolder) -> dict:
    """Return the settings of a run, without those that may differ between seeds."""
    free = ("training.seed", "training.stop_after", "data.cache_dir", "evaluation.", "logging.")
    return {key: value for key, value in replicas.settings_of(run.recipe).items() if not key.startswith(free)}


def of_system(members: list[RunFolder], measured: dict[str, dict]) -> dict:
    """Return means over seeds. A seed with measures that are not finite counts as diverged, whatever its training
    logged."""
    found = [measured[run.name] for run in members if run.name in measured]
    sound = [values for values in found if all(math.isfinite(values[key]) for key in MEASURES if key in values)]
    diverged = sum(run.status.startswith("diverged") for run in members) + len(found) - len(sound)
    means = {key: summary([values[key] for values in sound]) for key in MEASURES if sound and key in sound[0]}
    return {"seeds": len(sound), "diverged": diverged, **means}


def summary(values: list[float]) -> dict:
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "deviation": deviation}


def table(systems: dict[str, dict]) -> str:
    lines = ["| system | seeds | " + " | ".join(MEASURES.values()) + " |", "|---|---|" + "---:|" * len(MEASURES)]
    for name, found in systems.items():
        cells = [name, str(found["seeds"]) + (f", {found['diverged']} diverged" if found["diverged"] else "")]
        lines.append("| " + " | ".join([*cells, *(cell(found.get(measure)) for measure in MEASURES)]) + " |")
    return "\n".join(lines)


def cell(value: dict | None) -> str:
    if value is None:
        return "–"
    if abs(value["mean"]) >= 1e6:
        return f"{value['mean']:.3g}" + ("" if value["deviation"] is None else f" ± {value['deviation']:.3g}")
    digits = 0 if abs(value["mean"]) >= 1000 else 1 if abs(value["mean"]) >= 100 else 2
    deviation = "" if value["deviation"] is None else f" ± {value['deviation']:,.{digits}f}"
    return f"{value['mean']:,.{digits}f}{deviation}"


def least_perplexity(systems: dict[str, dict]) -> str:
    """Say which two systems have the least perplexities, each with its deviation over seeds."""
    found = sorted((s["perplexity"]["mean"], name) for name, s in systems.items() if "perplexity" in s)
    if not found:
        return "No system has a perplexity: every run diverged."
    said = [f"{name}, {cell(systems[name]['perplexity'])}" for _, name in found[:2]]
    return f"The least perplexity has {'; then comes '.join(said)}."


def main(arguments: list[str] | None = None) -> dict:
    args = parse(arguments)
    check_counts(args, ["batch_size"])
    runs = open_runs(args.folders)
    systems, measured = systems_of(runs), {}
    if not any(run.status == "finished" for run in runs):
        raise ValueError(f"no run is finished: {'; '.join(f'{run.name} is {run.status}' for run in runs)}")
    for run in runs:
        if run.status != "finished":
            print(f"left out: {run.name} is {run.status}")
            continue
        folder, config = open_config(str(run.folder / "final"))
        model = open_model(folder, args, dtype=getattr(torch, args.dtype))
        data = prepared_data(run.folder, run_data(run.folder))
        found = measure(model, windows(data), args.batch_size)
        print(f"{run.name}: " + ", ".join(f"{name} {found[name]:.4g}" for name in MEASURES if name in found))
        about = {"num_loops": config.trained_depth, "loop_loss": config.loop_loss}
        measured[run.name] = {**found, **about, "tokenizer": tokenizer_hash(data.tokenizer)}
    of_systems = {name: of_system(members, measured) for name, members in systems.items()}
    print("", table(of_systems), sep="\n")
    output = args.output or Path(args.folders[0])
    result = {"dtype": args.dtype, "systems": of_systems, "runs": measured}
    write_json(output / "readout_table.json", result, args.command, digits=6)
    write_whole(output / "readout_table.md", table(of_systems) + "\n")
    print(f"written: {output / 'readout_table.md'} and readout_table.json")
    several = len({values["tokenizer"] for values in measured.values()}) > 1
    said = OTHER_TOKENS if several else least_perplexity(of_systems)
    say_result(said, typed("looped report", *(run.folder for run in runs[:4])))
    return result
