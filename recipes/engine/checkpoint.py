"""Checkpoints that are complete or absent.

    checkpoints/step-00000500/checkpoint.json   step, config, state of the training loop, file sizes and checksums
                              *.distcp .metadata model and optimizers, sharded (torch.distributed.checkpoint)
                              logged.jsonl       metrics.jsonl up to this step
                              tokenizer/         tokenizer of the run
    checkpoints/.saving-*     being written, or left by a run that was killed; never read, removed at the next save
    checkpoints/damaged-*     renamed because the content differs from what was written

A checkpoint is written to a temporary folder, forced to disk, marked, and only then renamed to its final name; older
ones are removed after that. It can be loaded with any number of processes, under DDP or FSDP2. All processes must see
the folder. Reading a checkpoint executes no code that is stored in it (safe_reading.py).
"""

import copy
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from transformers import PreTrainedTokenizerBase

from looped_recipes.common.checksums import checksum, difference, read_sealed, sealed
from looped_recipes.common.files import (
    nearest_existing,
    remove,
    remove_leftovers,
    save_pretrained,
    sync,
    sync_all,
    write_whole,
)
from looped_recipes.common.provenance import provenance
from looped_recipes.common.words import in_bytes

from .background import Background
from .distributed import bare, bare_optimizer, to_shards
from .resume import comparable, refuse_other_config
from .safe_reading import TensorPlanner, TensorReader
from .saving import (
    CheckpointError,
    error_of_saving,
    from_all_processes,
    is_main_process,
    on_main_process,
    process_index,
    root_cause,
)


MARKER = "checkpoint.json"
METRICS = "logged.jsonl"
TOKENIZER = "tokenizer"
DAMAGED = "damaged-"
UNREADABLE = (OSError, EOFError, ValueError, KeyError, IndexError, AttributeError, TypeError, pickle.UnpicklingError)
NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")  # .2 and so on: the same step saved again


def step_name(step: int) -> str:
    return f"step-{step:08d}"


# Saving


def save_checkpoint(
    folder: str | Path,
    step: int,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    extra: dict,
    keep_last: int = 2,
    is_best: bool = False,
    config: dict | None = None,
    metrics: Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    background: Background | None = None,
) -> Path:
    """Save a step, then remove all but the newest `keep_last` and the newest best. Every process calls it.

    extra: values that `load_checkpoint` returns, stored as JSON. config: settings that a run must share to continue
    from here; by default the model's config. metrics: a file that is stored in the checkpoint, like the tokenizer.
    background: writes a copy while the training goes on.
    """
    folder = Path(folder)
    marker = {
        "step": step,
        "is_best": is_best,
        "config": comparable(bare(model).config.to_dict() if config is None else config),
        "extra": copy.deepcopy(extra),  # the training goes on and may change it before it is written
        "generation": bare(model).generation_config.to_dict(),
        "made_by": provenance(),
    }
    if background is not None:
        background.wait()  # `begin` would remove a checkpoint that is still being written as a leftover
    name, temporary = on_main_process(lambda: begin(folder, step, model, optimizers), folder)
    path, writer = folder / name, TensorWriter(temporary)
    logged = metrics.read_bytes() if metrics is not None and metrics.exists() else None

    def finish(checksums: dict[str, str]):
        if logged is not None:
            write_whole(temporary / METRICS, logged)
        if tokenizer is not None:
            save_pretrained(tokenizer, temporary / TOKENIZER)
            sync_all(temporary / TOKENIZER)
        write_marker(temporary, marker, checksums)
        os.rename(temporary, path)
        sync(folder)
        remove_old(folder, name, keep_last)

    def write(state: dict, group: dist.ProcessGroup | None = None):
        checksums = write_tensors(state, writer, folder, group)
        on_main_process(lambda: finish(checksums), folder, group)

    state = training_state(model, optimizers)
    if background is None:
        write(state)
    else:
        state = writer.stage(state)
        background.start(lambda: write(state, background.group))
    return path


def write_tensors(
    state: dict, writer: "TensorWriter", folder: Path, group: dist.ProcessGroup | None
) -> dict[str, str]:
    """Write the tensors of `state`, and return the checksums of the files of all processes."""
    temporary = Path(writer.path)
    ignore_missing_group()
    try:
        dcp.save(state, storage_writer=writer, process_group=group, no_dist=not dist.is_initialized())
        own = lambda: {path.name: checksum(path) for path in temporary.glob(f"__{process_index()}_*")}  # noqa: E731
        parts = from_all_processes(own, folder, group)
        return {name: digest for part in parts for name, digest in part.items()}
    except (OSError, CheckpointException) as error:
        # every process gets here, with the error of the process that failed
        if is_main_process():
            shutil.rmtree(temporary, ignore_errors=True)
        raise error_of_saving(folder, root_cause(error)) from error


class TensorWriter(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        """Raise the OSError of the disk, which torch.save hides inside a RuntimeError."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            said = error
            while said is not None and not isinstance(said, OSError):
                said = said.__cause__ or said.__context__
            raise said or error from None


def begin(folder: Path, step: int, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[str, Path]:
    """Make an empty folder to write to. Return the final name of the checkpoint, and this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    later = [path.name for path in whole_checkpoints(folder) if step_of(path) > step]
    if later:
        raise CheckpointError(
            f"{folder} holds {later[-1]} of another run, which would be taken for the newest when this one, now at "
            f"step {step}, resumes: remove it, or choose another training.output_dir"
        )
    check_space(folder, model, optimizers)
    named = [step_and_attempt(path) for path in named_checkpoints(folder)]
    attempts = [attempt for other, attempt in named if other == step]
    name = step_name(step) + (f".{max(attempts) + 1}" if attempts else "")
    temporary = folder / f".saving-{name}"
    temporary.mkdir()
    return name, temporary


def check_space(folder: str | Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]):
    """Raise an error if a checkpoint would not fit on the disk of `folder`."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in bare(model).parameters())
    for optimizer in optimizers:
        moments = 1 if any(group.get("name") == "muon" for group in optimizer.param_groups) else 2
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        size += moments * sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    free = shutil.disk_usage(nearest_existing(Path(folder).absolute())).free
    if free < size:
        raise CheckpointError(
            f"a checkpoint takes {in_bytes(size)}, but the disk of {folder} has {in_bytes(free)} left: free some, or "
            "choose another training.output_dir"
        )


def training_state(model: nn.Module, optimizers: list[torch.optim.Optimizer], as_template: bool = False) -> dict:
    """Return the state of model and optimizers under names that do not depend on how they are distributed.

    `get_state_dict` fills in the state of an optimizer that has not stepped. A template to load into needs this state;
    for saving it is removed.
    """
    to_shards(model)
    optimizers = [bare_optimizer(optimizer) for optimizer in optimizers]
    fresh = [not optimizer.state for optimizer in optimizers]
    model_state, optimizer_state = get_state_dict(model, optimizers)
    groups = iter(optimizer_state["param_groups"])
    for optimizer, is_fresh in zip(optimizers, fresh):
        names = [name for _ in optimizer.param_groups for name in next(groups)["params"]]
        if is_fresh and not as_template:
            optimizer.state.clear()
            for name in names:
                del optimizer_state["state"][name]
    if as_template:
        return {"model": model_state, "optimizers": optimizer_state}
    # tensors only: the settings of the optimizers come from the recipe and are not read back
    return {"model": model_state, "optimizers": {"state": optimizer_state["state"]}}


def write_marker(folder: Path, marker: dict, checksums: dict[str, str]):
    """Write the marker file. checksums: checksums that are known already; other files are read to compute theirs."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    checksums = {name: checksums.get(name) or checksum(folder / name) for name in files}
    write_whole(folder / MARKER, sealed({**marker, "files": files, "checksums": checksums}))


def remove_old(folder: Path, saved: str, keep_last: int):
    markers = {path: read_marker(path) for path in named_checkpoints(folder)}
    found = [path for path, marker in markers.items() if marker is not None]
    best = [path for path in found if markers[path]["is_best"]]
    kept = {saved, *(path.name for path in found[-keep_last:] + best[-1:])}
    for path in found:
        is_again = path.name != saved and step_of(path) == step_of(folder / saved)
        if path.name not in kept or is_again:
            gone = folder / f".deleting-{path.name}"
            os.rename(path, gone)  # first, so that a half-deleted folder does not have the name of a checkpoint
            remove(gone)


# Finding


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return step_and_attempt(path)[0]


def step_and_attempt(path: Path) -> tuple[int, int]:
    """Return the step and the attempt at saving it: (500, 1) for step-00000500, (500, 2) for step-00000500.2."""
    step, attempt = NAME.fullmatch(path.name).groups()
    return int(step), int(attempt or 1)


def read_marker(path: Path) -> dict | None:
    """Return the marker of a complete checkpoint; None if a file is missing or has another size than was written."""
    try:
        marker = read_sealed(path / MARKER)
        sizes = {name: (path / name).stat().st_size for name in marker["files"]}
        is_whole = sizes == marker["files"] and marker["step"] == step_of(path) and "config" in marker
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return marker if is_whole else None


def why_damaged(path: Path) -> str | None:
    """Return how a checkpoint differs from what was written; None if it does not. Reads all of its files."""
    marker = read_marker(path)
    if marker is None:
        return f"{MARKER} is damaged, or a file is missing or cut"
    checksums = marker["checksums"]
    found = (difference(path / name, size, checksums[name]) for name, size in marker["files"].items())
    return next((reason for reason in found if reason is not None), None)


def whole_checkpoints(folder: str | Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return [path for path in named_checkpoints(Path(folder)) if read_marker(path) is not None]


def named_checkpoints(folder: Path) -> list[Path]:
    """Return all folders with the name of a checkpoint, complete or not, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if NAME.fullmatch(path.name)), key=step_and_attempt)


def sound_checkpoint(folder: str | Path, refused: dict[Path, str] | None = None) -> Path | None:
    """Return the newest undamaged checkpoint; None if there never was one. Every process calls it.

    Newer checkpoints that are damaged or in `refused` (with a reason each) are renamed, and a message is printed. If
    only damaged ones exist, an error is raised: a run does not silently start again from step 0.
    """
    folder = Path(folder)

    def look() -> Path | None:
        reasons = {}
        for path in reversed(named_checkpoints(folder)):
            reason = (refused or {}).get(path) or why_damaged(path)
            if reason is None:
                for damaged, why in reasons.items():
                    set_aside(damaged, why, path)
                return path
            reasons[path] = reason
        aside = sorted(path.name for path in folder.glob(f"{DAMAGED}*"))
        if reasons or aside:
            listed = "; ".join([f"{path.name}: {reason}" for path, reason in reasons.items()] + aside)
            raise CheckpointError(
                f"no checkpoint in {folder} is sound ({listed}): copy one back, or, to begin anew, remove "
                f"{folder.parent} or choose another training.output_dir"
            )
        return None

    return on_main_process(look, folder)


def set_aside(path: Path, why: str, instead: Path):
    """Rename a damaged checkpoint so that it is never read."""
    aside = next(
        name
        for number in range(1, 10_000)
        if not (name := path.with_name(f"{DAMAGED}{path.name}" + (f"-{number}" if number > 1 else ""))).exists()
    )
    os.rename(path, aside)
    sync(path.parent)
    print(
        f"{path} is not taken: {why}; it is set aside as {aside.name}, and {instead.name} is taken instead", flush=True
    )


def latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint; None if there is none."""
    return next(reversed(whole_checkpoints(folder)), None)


# Loading


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    config: dict | None = None,
    may_change: Callable[[str], bool] = lambda name: False,
    as_of_now: Callable[[dict], dict] = dict,
) -> dict:
    """Load model and optimizers, and return `extra` and the step. Every process calls it.

    may_change: tells for the dotted name of a config field whether it may differ from the saved value. as_of_now:
    turns a config that older code saved into the one that today's code would save. Settings of the optimizers are not
    loaded: they stay as built.
    """
    path = Path(path)
    marker = read_marker(path)
    if marker is None:
        raise CheckpointError(
            f"{path} is not a whole checkpoint; the newest whole one is {latest_checkpoint(path.parent)}"
        )
    config = comparable(bare(model).config.to_dict() if config is None else config)
    refuse_other_config(path, as_of_now(marker["config"]), config, may_change)
    saved = saved_tensors(path)
    state = training_state(model, optimizers, as_template=True)
    groups_of_template = state["optimizers"].pop("param_groups")
    moments = state["optimizers"]["state"]
    # parameters without a gradient up to the checkpoint have no saved state: the state of the template is removed
    without = {name for name in moments if not any(key.startswith(f"optimizers.state.{name}.") for key in saved)}
    state["optimizers"]["state"] = {name: moments[name] for name in moments if name not in without}
    try:
        read_tensors(path, state)
    except (*UNREADABLE, RuntimeError, CheckpointException) as error:
        reason = (str(root_cause(error)).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} does not fit this model and these optimizers: {reason}") from error
    state["optimizers"] = {"state": {**moments, **state["optimizers"]["state"]}, "param_groups": groups_of_template}
    optimizers = [bare_optimizer(optimizer) for optimizer in optimizers]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizers"])
    for group, own in zip((group for optimizer in optimizers for group in optimizer.param_groups), settings):
        group.update(own)
    for name, parameter in bare(model).named_parameters():
        if name in without:
            for optimizer in optimizers:
                optimizer.state.pop(parameter, None)
    return {**marker["extra"], "step": marker["step"]}


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the state dict of the model in a complete checkpoint, on the CPU."""
    prefix = "model."
    saved = {name: about for name, about in saved_tensors(path).items() if name.startswith(prefix)}
    state = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in saved.items()}
    read_tensors(path, state)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def saved_tensors(path: Path) -> dict:
    try:
        return TensorReader(path).read_metadata().state_dict_metadata
    except UNREADABLE as error:
        raise CheckpointError(f"{path} can not be read: {error}; remove it to go on from the one before") from error


def read_tensors(path: Path, state: dict):
    ignore_missing_group()
    no_dist = not dist.is_initialized()
    dcp.load(state, storage_reader=TensorReader(path), planner=TensorPlanner(), no_dist=no_dist)


def ignore_missing_group():
    """Silence the warning that torch.distributed is not initialized, permanently: all threads share the filters, so a
    thread that restored them could undo the changes of another thread."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
