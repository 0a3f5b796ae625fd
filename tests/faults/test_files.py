"""What lies on the disk: nothing in it is run, and what is damaged is said."""

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from looped_eval.common.model_folder import model_folder
from looped_recipes import export
from looped_recipes.common import checksums, files
from looped_recipes.common.files import append_line, remove_leftovers, write_whole
from looped_recipes.common.metrics import DIVERGED, MetricsLog, read_metrics
from looped_recipes.data import shards
from looped_recipes.engine import resume
from looped_recipes.engine.checkpoint import (
    MARKER,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from looped_recipes.engine.export import change_of_export, export_model
from looped_recipes.engine.publish import without_places
from looped_recipes.engine.resume import refuse_lost_run
from looped_recipes.engine.saving import CheckpointError
from looped_recipes.engine.sweep_runs import Run
from looped_recipes.engine.sweeps import outcome, train
from looped_recipes.settings.recipe import DataConfig, RecipeError, load_recipe
from modeling_looped import LoopedForCausalLM
from tests.faults.tiny_run import metrics_of
from tests.helpers import tiny_model, tiny_tokenizer, wait_until
from tests.helpers_processes import is_running, run_and_kill
from tests.test_checkpoint import ADAMW, advance, model_and_optimizers


# What is read is not run


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def seal_again(path):
    """What somebody who changes a checkpoint on purpose can do, too."""
    marker = checksums.read_sealed(path / MARKER)
    for name in marker["files"]:
        marker["files"][name] = (path / name).stat().st_size
        marker["checksums"][name] = checksums.checksum(path / name)
    (path / MARKER).write_text(checksums.sealed(marker))


@pytest.mark.parametrize("where", ["index", "inside the index", "a tensor"])
def test_a_payload_in_a_checkpoint_is_not_run(tmp_path, where):
    model, optimizers = model_and_optimizers()
    advance(model, optimizers, 0)
    path = save_checkpoint(tmp_path / "c", 1, model, optimizers, {})
    made = tmp_path / "made"
    index = path / ".metadata"
    if where == "index":
        index.write_bytes(pickle.dumps(Payload(made)))
    elif where == "inside the index":
        metadata = pickle.loads(index.read_bytes())
        metadata.planner_data = Payload(made)
        index.write_bytes(pickle.dumps(metadata))
    else:  # in place of a tensor, where its bytes are looked for
        metadata = pickle.loads(index.read_bytes())
        torch.save(Payload(made), path / "evil.distcp")
        for place in metadata.storage_data.values():
            place.relative_path, place.offset = "evil.distcp", 0
            place.length = (path / "evil.distcp").stat().st_size
        index.write_bytes(pickle.dumps(metadata))
    seal_again(path)
    with pytest.raises(CheckpointError, match="posix.mkdir|Unsupported global|WeightsUnpickler|Weights only"):
        load_checkpoint(path, model, optimizers)
    assert not made.exists()


# What is damaged


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_if_all_checkpoints_are_damaged_the_run_does_not_begin_anew(runs):
    place = runs.copy(runs.half, "all damaged")
    metrics = (place / "run" / "metrics.jsonl").read_bytes()
    for path in (place / "run" / "checkpoints").glob("step-*"):
        flip(path / "__0_0.distcp")
    for _ in range(2):  # and not at the second try either
        with pytest.raises(CheckpointError, match="no checkpoint in .* is sound .*copy one back, or, to begin anew"):
            runs.train(place)
    assert (place / "run" / "metrics.jsonl").read_bytes() == metrics
    shutil.rmtree(place / "run" / "checkpoints")
    with pytest.raises(CheckpointError, match="metrics until step 2, but no checkpoint to go on from"):
        runs.train(place)
    assert (place / "run" / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize(("in_background", "reached"), [(False, 3), (True, 7)])
def test_a_run_that_dies_before_its_first_checkpoint_is_whole_begins_anew(tmp_path, in_background, reached):
    """In the background it becomes whole while training goes on, until the next one waits for it."""
    training = {"save_every": 4, "save_in_background": in_background}
    (tmp_path / "recipe.yaml").write_text(json.dumps({"training": training}))
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(reached + 1)))
    refuse_lost_run(tmp_path)
    metrics.write_text(metrics.read_text() + f'{{"step": {reached + 1}, "loss": 1.0}}\n')
    with pytest.raises(CheckpointError, match=f"metrics until step {reached + 1}, but no checkpoint to go on from"):
        refuse_lost_run(tmp_path)


def test_another_recipe_over_a_finished_run_is_refused(runs):
    place = runs.copy(runs.whole, "finished")
    with pytest.raises(CheckpointError, match="training.seed was 0, is 3"):
        runs.train(place, "training.seed=3")
    shutil.rmtree(place / "run" / "checkpoints")
    with pytest.raises(CheckpointError, match="holds a finished model in final/, but no checkpoint"):
        runs.train(place, "training.seed=3")
    assert runs.why_other(place) is None


def test_a_sweep_takes_no_result_of_another_recipe_and_no_changed_one(runs):
    place = runs.copy(runs.whole, "swept")
    settings = {"training.output_dir": f"{place}/run", "data.cache_dir": f"{place}/shards"}

    def result(**others):
        recipe = load_recipe(runs.recipe, changes=settings | others)
        run = Run("run", {}, runs.recipe, recipe)
        return run, outcome(run)

    run, found = result(**{"logging.every": 2, "training.save_every": 3})
    assert found["loss"] == read_metrics(place / "run" / "metrics.jsonl")[-1]["validation/loss"]
    for change in {"training.steps": 4}, {"optimizer.lr": 1e-5}, {"evaluation.rows": 1}, {"model.norm_penalty": 0.1}:
        with pytest.raises(RecipeError, match=rf"result of another recipe: {next(iter(change))} was .*remove"):
            result(**change)
    (place / "run" / DIVERGED).write_text("the loss of step 1 is nan")
    with pytest.raises(RecipeError, match="another recipe: optimizer.lr was 0.0003, is 1e-05"):
        result(**{"optimizer.lr": 1e-5})
    (place / "run" / DIVERGED).unlink()

    metrics = place / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"validation/loss": 4', '"validation/loss": 1'))
    assert outcome(run) is None
    train(run)  # from the last checkpoint, which has them too
    assert outcome(run)["loss"] == found["loss"]


def test_a_changed_checkpoint_is_not_exported(runs):
    place = runs.copy(runs.half, "changed")
    tensors = place / "run" / "checkpoints" / "step-00000003" / "__0_0.distcp"
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)
    with pytest.raises(ValueError, match=r"__0_0.distcp has the checksum .*; choose --step from \[2\]"):
        export.main([str(place / "run")])
    assert not (place / "run" / "step-00000003").exists()


def test_an_export_into_the_current_folder_is_refused(runs, tmp_path, monkeypatch):
    run = str((runs.whole / "run").absolute())
    monkeypatch.chdir(tmp_path)
    for out in (".", str(tmp_path)):
        with pytest.raises(ValueError, match="is the current folder, .*: name a new one in it"):
            export.main([run, out])
    assert os.listdir(tmp_path) == []


def test_an_export_overwrites_nothing_but_an_export(runs, tmp_path):
    run, out = str(runs.whole / "run"), tmp_path / "out"
    (tmp_path / "proj" / "src").mkdir(parents=True)
    (tmp_path / "proj" / "src" / "thesis.txt").write_text("the only copy")
    for config in ('{"port": 80}', '["looped"]', '{"model_type": "llama"}', "{"):
        (tmp_path / "proj" / "config.json").write_text(config)
        with pytest.raises(CheckpointError, match="proj exists and is not a saved model of this package"):
            export.main([run, str(tmp_path / "proj")])
        assert (tmp_path / "proj" / "config.json").read_text() == config
    assert (tmp_path / "proj" / "src" / "thesis.txt").read_text() == "the only copy"
    for change, reason in (
        (lambda: (out / "notes").mkdir(), "notes was added"),
        (lambda: (out / "chat_template.jinja").write_text("mine"), "chat_template.jinja was added"),
        (lambda: (out / "config.json").write_text('{"model_type": "looped"}'), "config.json has 24 bytes"),
        (lambda: (out / "README.md").write_text("mine"), "README.md has 4 bytes"),
        (lambda: (out / "modeling_looped.py").unlink(), "modeling_looped.py is missing"),
        (lambda: flip(out / "model.safetensors"), "model.safetensors has the checksum"),
        (lambda: (out / "checksums.json").unlink(), "it has no checksums.json"),
        (lambda: (out / "checksums.json").write_text("["), "checksums.json is damaged"),
    ):
        shutil.rmtree(out, ignore_errors=True)
        export.main([run, str(out)])
        export.main([run, str(out)])
        change()
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        with pytest.raises(CheckpointError, match=f"out is not as it was exported .{reason}"):
            export.main([run, str(out)])
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_full_disk_is_told_alike_by_an_export_and_a_run(runs, monkeypatch):
    """safetensors raises an error of its own, whose base is Exception."""
    place = runs.copy(runs.half, "full")

    def full(self, folder, **_):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"a part")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", full)
        for work in (lambda: export.main([str(place / "run")]), lambda: runs.train(place)):
            with pytest.raises(
                CheckpointError, match="could not write to .*: there is no space left on the disk. The"
            ):
                work()
    assert not [path.name for path in (place / "run").iterdir() if path.name.startswith((".final", ".step", "step-"))]
    runs.train(place)
    assert runs.why_other(place) is None


def test_a_finished_run_that_is_launched_again_leaves_what_its_user_edited(runs):
    place = runs.copy(runs.whole, "edited")
    final = place / "run" / "final"
    config = json.loads((final / "config.json").read_text())
    (final / "config.json").write_text(json.dumps({**config, "num_loops": 7}))
    (final / "README.md").write_text("mine")
    (final / "chat_template.jinja").write_text("mine")
    (final / "notes").mkdir()
    (final / "notes" / "thesis.txt").write_text("the only copy")
    before = {path: path.read_bytes() for path in (place / "run").rglob("final/**/*") if path.is_file()}
    runs.train(place)
    assert {path: path.read_bytes() for path in (place / "run").rglob("final*/**/*") if path.is_file()} == before


def test_a_model_that_was_changed_is_kept_when_the_run_writes_its_own(runs):
    """Its weights, as by training it further; any file, where the run itself has been trained further."""
    place = runs.copy(runs.whole, "tuned")
    run, final = place / "run", place / "run" / "final"
    tuned = LoopedForCausalLM.from_pretrained(final)
    with torch.no_grad():
        tuned.lm_head.weight += 1
    tuned.save_pretrained(final)
    (final / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in final.iterdir()}
    said = runs.train(place)
    assert f"{final} is not as it was exported (notes.txt was added): it is kept as {final}.changed-1" in said
    assert {path.name: path.read_bytes() for path in (run / "final.changed-1").iterdir()} == before
    assert runs.why_other(place) is None
    runs.train(place)
    assert [path.name for path in sorted(run.glob("final*"))] == ["final", "final.changed-1"]
    runs.train(place, "training.steps=7")
    assert [path.name for path in sorted(run.glob("final*"))] == ["final", "final.changed-1"]
    (final / "README.md").write_text("my card")
    assert "README.md has 7 bytes" in runs.train(place, "training.steps=8")
    assert (run / "final.changed-2" / "README.md").read_text() == "my card"
    assert "step" in (final / "README.md").read_text()
    last, before = (load_file(run / name / "model.safetensors") for name in ("final", "final.changed-2"))
    assert not torch.equal(last["lm_head.weight"], before["lm_head.weight"])


def test_files_in_folders_of_an_export_are_its_own(tmp_path):
    """As several chat templates of a tokenizer."""
    model, tokenizer, out = tiny_model(), tiny_tokenizer(), tmp_path / "final"
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    export_model(out, model, tokenizer)
    template = out / "additional_chat_templates" / "tool_use.jinja"
    assert template.read_text() == "b" and change_of_export(out) is None
    (template.parent / "mine.jinja").write_text("c")
    assert change_of_export(out) == "additional_chat_templates/mine.jinja was added"
    (template.parent / "mine.jinja").unlink()
    template.write_text("bb")
    assert change_of_export(out) == "tool_use.jinja has 2 bytes, but 1 were written"


def test_an_export_of_the_same_weights_is_renewed_where_nobody_has_edited_it(tmp_path, monkeypatch):
    model, tokenizer, out = tiny_model(), tiny_tokenizer(), tmp_path / "final"
    tokenizer.chat_template = "a template"
    export_model(out, model, tokenizer, readme="a card")
    tokenizer.chat_template = "another"
    export_model(out, model, tokenizer, readme="another card")
    assert [(out / name).read_text() for name in ("README.md", "chat_template.jinja")] == ["another card", "another"]
    for name in ("README.md", "chat_template.jinja"):
        (out / name).write_text("mine")
    monkeypatch.setattr("transformers.configuration_utils.__version__", "99.0")  # which config.json names
    export_model(out, model, tokenizer, readme="another card")
    assert [(out / name).read_text() for name in ("README.md", "chat_template.jinja")] == ["mine", "mine"]
    assert os.listdir(tmp_path) == ["final"]


def test_a_bad_line_of_metrics_costs_that_line(runs, tmp_path, capsys):
    lines = (runs.whole / "run" / "metrics.jsonl").read_bytes().splitlines()
    for bad in (b"{", b"\xff\xfe", b"7", b'{"loss": 1.0}', b"null"):
        (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([lines[0], bad, *lines[2:], b'{"step": 9, "lo']))
        assert [json.dumps(record) for record in read_metrics(tmp_path / "metrics.jsonl")] == [
            json.dumps(json.loads(line)) for line in (lines[0], *lines[2:])
        ]
        assert "left out what is no record: line 2\n" in capsys.readouterr().err


def test_a_changed_model_is_found_when_it_is_evaluated_but_edited_settings_are_taken(tmp_path, logged):
    export_model(tmp_path / "final", tiny_model())
    assert model_folder(str(tmp_path)) == tmp_path / "final"
    with open(tmp_path / "final" / "config.json", "a") as file:
        file.write("\n")
    assert model_folder(str(tmp_path)) and "config.json has" in logged[-1].getMessage()
    flip(tmp_path / "final" / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors has the checksum .*: if you changed it on purpose"):
        model_folder(str(tmp_path))
    (tmp_path / "final" / "checksums.json").unlink()
    assert model_folder(str(tmp_path)) == tmp_path / "final"


def test_an_export_of_a_run_that_cannot_be_written_names_out(runs, tmp_path, monkeypatch):
    run = runs.whole / "run"
    monkeypatch.setattr(os, "access", lambda path, mode: path != run)
    with pytest.raises(PermissionError, match=f"^{run} can not be written to: .* as OUT, the second argument$"):
        export.main([str(run)])
    assert export.main([str(run), str(tmp_path / "out")]) == tmp_path / "out"


@pytest.mark.parametrize("name", ["model.safetensors", "checksums.json"])
def test_a_file_that_may_not_be_read_is_not_told_to_be_damaged(name, tmp_path, monkeypatch):
    export_model(tmp_path / "final", tiny_model())
    refused = tmp_path / "final" / name

    def open_some(path, *mode, **options):
        if Path(path) == refused:
            raise PermissionError(13, "Permission denied", str(path))
        return open(path, *mode, **options)

    monkeypatch.setattr(checksums, "open", open_some, raising=False)  # root may read all
    said = f"^{re.escape(str(refused))} can not be read \\(Permission denied\\): make it readable$"
    with pytest.raises(PermissionError, match=said):
        model_folder(str(tmp_path))


def test_leftovers_go(tmp_path):
    for name in (".saving-step-00000003", ".deleting-step-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("")
    (tmp_path / ".saving-metrics.jsonl.77").write_text("")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "x").write_text("")
    (tmp_path / ".saving-linked").symlink_to(tmp_path / "kept")
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["kept"] and os.listdir(tmp_path / "kept") == ["x"]


def test_files_of_others_are_no_leftovers(tmp_path):
    (tmp_path / "thesis.tmp").mkdir()
    (tmp_path / "results.7.tmp").write_text("")
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["results.7.tmp", "thesis.tmp"]


def test_what_a_killed_write_leaves_is_a_leftover(tmp_path):
    names = []
    write_whole(tmp_path / "metrics.jsonl", lambda file: names.extend(os.listdir(tmp_path)))
    (left,) = names
    os.rename(tmp_path / "metrics.jsonl", tmp_path / left)
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_file_is_what_was_written_if_its_size_and_all_its_bytes_are(tmp_path):
    path, content = tmp_path / "a.bin", bytes(range(256)) * 4096 + b"beyond a block"
    path.write_bytes(content)
    size, digest = len(content), xxhash.xxh3_64_hexdigest(content)
    assert checksums.checksum(path) == digest and checksums.difference(path, size, digest) is None
    path.write_bytes(content[:-1] + b"!")
    assert "a.bin has the checksum" in checksums.difference(path, size, digest)
    path.write_bytes(content + b"!")
    assert checksums.difference(path, size, None) == f"a.bin has {size + 1} bytes, but {size} were written"
    path.write_text(checksums.sealed({"step": "three"}).replace("three", "seven"))
    with pytest.raises(checksums.Damaged, match="another checksum"):
        checksums.read_sealed(path)


def test_a_line_behind_one_that_was_cut_off_is_whole(tmp_path):
    """As after a full disk: else both would be lost, and a run had another name in its trackers at every launch."""
    path = tmp_path / "provenance.jsonl"
    for text in ("", '{"step": 0, "run": "a-0"}\n'):
        path.write_text(text + '{"step": 1, "run": "a-')
        for step in (2, 3):
            append_line(path, json.dumps({"step": step, "run": "é"}))
        assert [record["step"] for record in read_metrics(path)] == [*([0] if text else []), 2, 3]
    path.unlink()
    append_line(path, "x")
    assert path.read_text() == "x\n"


def test_records_of_steps_that_are_run_again_are_dropped(tmp_path):
    """With the checksums of the run that was finished, which are of other metrics."""
    path, saved = tmp_path / "metrics.jsonl", tmp_path / "saved.jsonl"
    for step in range(5):
        append_line(path, json.dumps({"step": step}))
    shutil.copy(path, saved)
    checksums.write_checksums(tmp_path, ["metrics.jsonl"])
    MetricsLog(path, None).start(3, saved)
    assert [record["step"] for record in read_metrics(path)] == [0, 1, 2]
    assert not (tmp_path / checksums.LIST).exists()


# What has its name is on the disk


@pytest.fixture
def order(monkeypatch) -> list:
    """What is forced to the disk, as inodes, and the paths that files and folders are renamed to, in order."""
    done, fsync = [], os.fsync

    def forced(file):
        done.append(os.fstat(file).st_ino)
        fsync(file)

    def renamed(function):
        def wrapper(source, target):
            function(source, target)
            done.append(Path(target))

        return wrapper

    monkeypatch.setattr(os, "fsync", forced)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, renamed(getattr(os, name)))
    return done


def assert_forced(order: list, path: Path):
    """All of it before it had its name, and then the folder that holds the name."""
    at = order.index(path)
    missing = [each for each in (path, *path.rglob("*")) if each.stat().st_ino not in order[:at]]
    assert missing == [] and path.parent.stat().st_ino in order[at:]


def test_windows_forces_what_is_open_for_writing_and_no_folders(tmp_path, monkeypatch):
    opened, forced = {}, []

    def as_windows_opens(path, flags, *arguments):
        if os.path.isdir(path):
            raise PermissionError(path)
        descriptor = os_open(path, flags, *arguments)
        opened[descriptor] = flags & os.O_ACCMODE
        return descriptor

    def as_windows_forces(descriptor):
        if opened[descriptor] == os.O_RDONLY:
            raise OSError("a descriptor that only reads")
        forced.append(descriptor)

    os_open = os.open
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").touch()
    monkeypatch.setattr(files, "ON_WINDOWS", True)
    monkeypatch.setattr(os, "open", as_windows_opens)
    monkeypatch.setattr(os, "fsync", as_windows_forces)
    files.sync_all(tmp_path)
    assert len(forced) == 1


def test_what_is_written_is_on_the_disk_before_it_has_its_name(tmp_path, order):
    write_whole(tmp_path / "file", b"x")
    assert_forced(order, tmp_path / "file")
    order.clear()
    append_line(tmp_path / "lines", "x")
    assert order == [(tmp_path / "lines").stat().st_ino]
    tokenizer, metrics = tiny_tokenizer(), tmp_path / "metrics.jsonl"
    metrics.write_text("{}")
    model, optimizers = model_and_optimizers()
    path = save_checkpoint(tmp_path / "c", 1, model, optimizers, {}, tokenizer=tokenizer, metrics=metrics)
    assert {"tokenizer", "logged.jsonl", "__0_0.distcp"} <= set(os.listdir(path))
    assert_forced(order, path)
    path = export_model(tmp_path / "final", model, tokenizer, readme="# A model")
    assert {"tokenizer.json", "README.md", "model.safetensors"} <= set(os.listdir(path))
    assert_forced(order, path)
    shards._tokenizer(tmp_path, DataConfig(tokenizer=str(path)), ())
    assert_forced(order, tmp_path / "tokenizer")


# What goes on elsewhere


def test_another_precision_is_refused_and_other_versions_are_said(runs):
    place = runs.copy(runs.half, "precision")
    path = latest_checkpoint(place / "run" / "checkpoints")
    marker = checksums.read_sealed(path / MARKER)
    marker["made_by"]["versions"]["torch"] = "1.0"
    (path / MARKER).write_text(checksums.sealed(marker))
    assert "was made with torch 1.0 (here " in runs.train(place, "training.stop_after=3")
    marker["config"]["precision"] = "bf16"
    (path / MARKER).write_text(checksums.sealed(marker))
    with pytest.raises(CheckpointError, match="precision was 'bf16', is 'no'"):
        runs.train(place)


@pytest.mark.parametrize(
    "there,here,said",
    [("unknown", "abc", "commit unknown (here abc)"), ("abc", "unknown", "commit abc (here unknown)"),
     ("abc", "def", "commit abc (here def)"), ("abc", "abc", ""), ("unknown", "unknown", ""), (None, "abc", "")],
)  # fmt: skip
def test_a_commit_that_only_one_side_knows_is_said(there, here, said, monkeypatch):
    monkeypatch.setattr(resume, "commit", lambda: here)
    made_by = {} if there is None else {"commit": there, "versions": resume.versions()}
    assert resume.other_versions(made_by) == said


@pytest.mark.slow
def test_a_tracker_is_told_every_step_once_whatever_interrupts(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    place = runs.copy(runs.nothing, "tracked")
    shutil.copytree(runs.half / "shards", place / "shards")
    more = ["logging.trackers=[tensorboard]"]

    def is_time():
        logged = place / "run" / "metrics.jsonl"
        return logged.exists() and '"step": 2' in logged.read_text()

    run_and_kill(lambda: runs.train(place, *more, "training.save_every=2"), is_time)
    time.sleep(1.1)  # names of event files are seconds
    runs.train(place, *more)
    folder = {path.parent for path in place.rglob("events.out.tfevents.*") if path.parent.name == "looped"}.pop()
    events = EventAccumulator(str(folder)).Reload()
    written = [(record["step"], record["loss"]) for record in metrics_of(place) if "loss" in record]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (step, pytest.approx(loss)) for step, loss in written
    ]


def test_a_model_card_names_no_place_on_this_machine(runs):
    card = (runs.whole / "run" / "final" / "README.md").read_text()
    assert str(runs.folder) not in card and "source.jsonl" in card
    places = {"data": {"source": "~/texts/a.txt", "tokenizer": "owner/name"}, "training": {"initialize_from": None}}
    expected = {"data": {"source": "a.txt", "tokenizer": "owner/name"}, "training": {"initialize_from": None}}
    assert without_places(places) == expected


def test_an_orphan_ends():
    """A process whose parent is killed does not go on."""
    child = """
import os, time
from recipes.common.orphans import end_with
end_with(os.getppid())
print(os.getpid(), flush=True)
time.sleep(300)
"""
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    number = int(process.stdout.readline())  # by then it looks after its parent
    process.kill()
    process.wait()
    try:
        wait_until(lambda: not is_running(number))
    finally:
        if is_running(number):
            os.kill(number, signal.SIGKILL)


def test_settings_of_a_checkpoint_are_tensors_and_json(tmp_path):
    """No pickle of Python objects is written but the index of the tensors."""
    model, optimizers = model_and_optimizers(ADAMW)
    advance(model, optimizers, 0)
    path = save_checkpoint(tmp_path, 1, model, optimizers, {})
    kinds = {type(entry).__name__ for entry in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.values()}
    assert kinds == {"TensorStorageMetadata"}
