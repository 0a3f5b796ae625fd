"""A checkpoint is whole or not there, whatever happens while it is written, and opens on any number of processes."""

import errno
import inspect
import os
import random
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from looped_recipes.common.checksums import change_of, check_folder, renew_checksum
from looped_recipes.common.metrics import MetricsLog
from looped_recipes.engine.checkpoint import (
    check_space,
    latest_checkpoint,
    load_checkpoint,
    named_checkpoints,
    save_checkpoint,
    step_and_attempt,
)
from looped_recipes.engine.export import export_model
from looped_recipes.engine.monitor import Monitor
from looped_recipes.engine.optimizers import build_optimizers
from looped_recipes.engine.run_checkpoints import Progress, RunCheckpoints
from looped_recipes.engine.saving import CheckpointError, error_of_saving, only_run
from looped_recipes.engine.tensor_parallel import can_split
from looped_recipes.settings.recipe import OptimizerConfig, load_recipe
from modeling_looped import LoopedForCausalLM

from .distributed_worker import full_disk, launch, train
from .helpers import SECTIONS, random_ids, tiny_model, tiny_tokenizer
from .helpers_pretrain import SMOKE
from .helpers_processes import run_and_kill


ADAMW = {"lr": 0.01, "weight_decay": 0.1}
MUON = {"name": "muon", "lr": 0.01, "muon_lr": 0.01, "muon_weight_decay": 0.1, "muon_weight_decay_end": 0.0}
NORMUON = {**MUON, "name": "normuon", "muon_value_gates": True}
CLIPPED = {"update_clipping": True, "clip_as_one": "attention_and_mlp"}
STABLE = {**ADAMW, **CLIPPED, "eps": 1e-6, "atan2": True, "decay_all": False}


def model_and_optimizers(optimizer: dict = ADAMW, **fields):
    model = tiny_model(**fields).train()
    return model, build_optimizers(model, OptimizerConfig(**optimizer), total_steps=10)


def advance(model, optimizers, step: int):
    """An optimizer step on gradients that are made up, which needs no autograd and so works in a forked process."""
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + step).cumsum(-1) * (-1) ** i
    for optimizer in optimizers:
        optimizer.step()


def contents(model, optimizers) -> dict:
    """Every number of a model and its optimizers."""
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for j, state in optimizer.state_dict()["state"].items():
            found.update({f"{i}.{j}.{key}": value.clone() for key, value in state.items()})
    return found


def assert_same(found: dict, expected: dict):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def folders(path) -> list[str]:
    return sorted(os.listdir(path))


# What goes in comes out


@pytest.mark.parametrize("optimizer", [ADAMW, MUON, NORMUON, STABLE], ids=["adamw", "muon", "normuon", "stable"])
@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True}, {"preset": "parcae"}], ids=str)
@pytest.mark.covering
@pytest.mark.some(2)
def test_state_comes_back_bit_for_bit(tmp_path, optimizer, fields):
    model, optimizers = model_and_optimizers(optimizer, **fields)
    for step in range(3):
        advance(model, optimizers, step)
    path = save_checkpoint(tmp_path, 3, model, optimizers, {"best": 0.1 + 0.2, "nested": {"list": [1, None]}})
    expected = contents(model, optimizers)
    other, others = model_and_optimizers(optimizer, **fields)
    advance(other, others, 17)
    extra = load_checkpoint(path, other, others)
    assert extra == {"best": 0.1 + 0.2, "nested": {"list": [1, None]}, "step": 3}
    assert_same(contents(other, others), expected)
    for group, before in zip(others[-1].param_groups, optimizers[-1].param_groups):
        assert {**group, "params": None} == {**before, "params": None}


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": ADAMW, "model": {"loop_loss": "per_loop"}},
        {"optimizer": MUON, "model": {"preset": "parcae"}, "sampler": "poisson", "backprop_loops": 2},
        {"optimizer": NORMUON, "model": {"preset": "parcae"}, "sampler": "poisson", "backprop_loops": 2},
        {"optimizer": STABLE, "model": {"preset": "rdm"}, "sampler": "poisson", "backprop_loops": 2},
    ],
    ids=["adamw", "muon", "normuon", "stable"],
)
@pytest.mark.some(2)
def test_a_resumed_run_is_the_unbroken_run(tmp_path, settings):
    unbroken = train([0, 6], **settings)
    first = train([0, 3], save=str(tmp_path), **settings)
    second = train([3, 6], load=str(latest_checkpoint(tmp_path)), **settings)
    assert first["losses"] + second["losses"] == unbroken["losses"]
    assert_same(second["weights"], unbroken["weights"])


@pytest.mark.parametrize("settings", [MUON, NORMUON, STABLE], ids=["muon", "normuon", "stable"])
def test_saving_before_the_first_step_changes_nothing(tmp_path, settings):
    """torch makes a state by a step without gradients; Adam's bias correction would count it."""
    model, optimizers = model_and_optimizers(settings)
    reference, references = model_and_optimizers(settings)
    path = save_checkpoint(tmp_path, 0, model, optimizers, {})
    other, others = model_and_optimizers(settings)
    load_checkpoint(path, other, others)
    for each in (reference, references), (model, optimizers), (other, others):
        advance(*each, 0)
    assert_same(contents(model, optimizers), contents(reference, references))
    assert_same(contents(other, others), contents(reference, references))


def test_parameters_that_never_had_a_gradient(tmp_path):
    model, optimizers = model_and_optimizers(exit_gate="raw")
    advance(model, optimizers, 0)
    for parameter in model.exit_gate.parameters():
        del optimizers[0].state[parameter]
    path = save_checkpoint(tmp_path, 1, model, optimizers, {})
    other, others = model_and_optimizers(exit_gate="raw")
    load_checkpoint(path, other, others)
    assert_same(contents(other, others), contents(model, optimizers))
    assert all(parameter not in others[0].state for parameter in other.exit_gate.parameters())


# Which ones are kept


def test_the_newest_and_the_best_are_kept(tmp_path):
    model, optimizers = model_and_optimizers()
    for step, is_best in ((1, True), (2, True), (3, False), (4, False), (5, False)):
        save_checkpoint(tmp_path, step, model, optimizers, {}, keep_last=2, is_best=is_best)
    assert folders(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    assert latest_checkpoint(tmp_path).name == "step-00000005"


@pytest.mark.parametrize(("keep_best", "kept"), [(True, [1, 2]), (False, [2])])
def test_a_run_goes_on_with_its_counts_its_monitor_and_its_best(tmp_path, keep_best, kept):
    output = [f"training.output_dir={tmp_path}", "training.keep_last=1", f"training.keep_best={keep_best}"]
    recipe = load_recipe(SMOKE / "lt.yaml", output)
    accelerator = SimpleNamespace(trackers=[], print=print)
    metrics = MetricsLog(tmp_path / "metrics.jsonl", accelerator)
    compared = {"precision": "no", "rows_of_dropout": None, "validation": {}}

    def checkpoints(monitor) -> RunCheckpoints:
        return RunCheckpoints(recipe, accelerator, *model_and_optimizers(), monitor, metrics, None, compared)

    monitor, new_monitor, progress = Monitor(), Monitor(), Progress(num_skipped=4, total_steps=9)
    assert monitor.warnings({"spectral_radius": 2.0})
    for step in (1, 2):
        progress.step = progress.evaluated_at = step
        progress.last_validation = 1.0 + step
        checkpoints(monitor).save(progress)
    assert folders(tmp_path / "checkpoints") == [f"step-{step:08d}" for step in kept]
    found, path = checkpoints(new_monitor).start()
    assert (path.name, found) == ("step-00000002", Progress(step=2, num_skipped=4, best=2.0, total_steps=9))
    assert new_monitor.history == {"spectral_radius": [2.0]}
    assert not new_monitor.warnings({"spectral_radius": 2.0})  # said once


def test_one_run_at_a_time(tmp_path):
    with only_run(tmp_path / "run"):
        with pytest.raises(CheckpointError, match="another process is training in .*run: wait for it"):
            with only_run(tmp_path / "run"):
                pass
    with only_run(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()


def test_another_process_does_not_look_into_a_folder_that_the_first_removes(tmp_path, monkeypatch):
    """It would end with the error of a folder that is gone, instead of the run's own."""
    with pytest.raises(KeyError, match="the run's own"), only_run(tmp_path / "run"):
        monkeypatch.setattr("looped_recipes.engine.saving.is_main_process", lambda: False)
        monkeypatch.setattr("pathlib.Path.iterdir", lambda folder: folder.parent.joinpath("gone").stat())
        raise KeyError("the run's own")


def test_a_link_to_a_folder_hides_no_error_of_the_run(tmp_path):
    """It can not be removed as a folder, as others can not whose parent may not be written to."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with pytest.raises(KeyError, match="the run's own"), only_run(tmp_path / "run"):
        raise KeyError("the run's own")


def test_no_checkpoint_is_none(tmp_path):
    assert latest_checkpoint(tmp_path / "missing") is None


def test_the_same_step_again_replaces_it(tmp_path):
    model, optimizers = model_and_optimizers()
    save_checkpoint(tmp_path, 1, model, optimizers, {"try": 1})
    advance(model, optimizers, 0)
    path = save_checkpoint(tmp_path, 1, model, optimizers, {"try": 2})
    assert folders(tmp_path) == [path.name] and latest_checkpoint(tmp_path) == path
    other, others = model_and_optimizers()
    assert load_checkpoint(path, other, others)["try"] == 2
    assert_same(contents(other, others), contents(model, optimizers))


def test_attempts_at_a_step_have_new_names_and_are_ordered_by_number(tmp_path):
    model, optimizers = model_and_optimizers()
    for name in ("", ".2", ".3"):
        assert save_checkpoint(tmp_path, 1, model, optimizers, {}).name == f"step-00000001{name}"
        assert folders(tmp_path) == [f"step-00000001{name}"]  # the one before is removed
    names = [f"step-00000001{name}" for name in ("", ".2", ".10")] + ["step-00000002"]
    for name in reversed(names):
        (tmp_path / "more" / name).mkdir(parents=True)
    found = named_checkpoints(tmp_path / "more")
    assert [path.name for path in found] == names
    assert [step_and_attempt(path) for path in found] == [(1, 1), (1, 2), (1, 10), (2, 1)]


def test_a_checkpoint_under_the_name_of_another_step_is_not_taken(tmp_path):
    path = save_checkpoint(tmp_path, 1, *model_and_optimizers(), {})
    path.rename(tmp_path / "step-00000009")
    assert latest_checkpoint(tmp_path) is None


def test_a_folder_with_the_later_steps_of_another_run_is_refused(tmp_path):
    model, optimizers = model_and_optimizers()
    save_checkpoint(tmp_path, 50, model, optimizers, {})
    with pytest.raises(CheckpointError, match="step-00000050.*step 10.*output_dir"):
        save_checkpoint(tmp_path, 10, model, optimizers, {})
    assert folders(tmp_path) == ["step-00000050"]


@pytest.mark.parametrize("damage", ["marker", "half a marker", "a file", "half a file"])
def test_what_is_not_whole_is_passed_over(tmp_path, damage):
    model, optimizers = model_and_optimizers()
    good = save_checkpoint(tmp_path, 1, model, optimizers, {})
    bad = save_checkpoint(tmp_path, 2, model, optimizers, {})
    victim = bad / "checkpoint.json" if "marker" in damage else next(bad.glob("*.distcp"))
    if "half" in damage:
        os.truncate(victim, victim.stat().st_size // 2)
    else:
        victim.unlink()
    assert latest_checkpoint(tmp_path) == good
    with pytest.raises(CheckpointError, match="step-00000002 is not a whole checkpoint.*step-00000001"):
        load_checkpoint(bad, model, optimizers)


# Another config


def test_a_checkpoint_of_another_model_is_refused_with_the_differences(tmp_path):
    model, optimizers = model_and_optimizers()
    path = save_checkpoint(tmp_path, 1, model, optimizers, {})
    other, others = model_and_optimizers(injection="add", rms_norm_eps=1e-5)
    before = contents(other, others)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, other, others)
    assert "injection was 'none', is 'add'; rms_norm_eps was 1e-06, is 1e-05." in str(error.value)
    assert_same(contents(other, others), before)


def test_a_config_of_sections_is_compared_by_its_fields(tmp_path):
    model, optimizers = model_and_optimizers()
    config = {"optimizer": {"lr": 0.1, "betas": (0.9, 0.95)}, "data": {"source": "a"}}
    path = save_checkpoint(tmp_path, 1, model, optimizers, {}, config=config)
    load_checkpoint(path, model, optimizers, config={"data": {"source": "a"}, "optimizer": dict(config["optimizer"])})
    with pytest.raises(CheckpointError, match=r"optimizer.clip was None, is 1; optimizer.lr was 0.1, is 0.2\."):
        load_checkpoint(
            path, model, optimizers, config={**config, "optimizer": {**config["optimizer"], "lr": 0.2, "clip": 1}}
        )


def test_fields_that_may_change_change(tmp_path):
    """The optimizers keep the settings they were built with, and take over what they have learned."""
    model, optimizers = model_and_optimizers()
    advance(model, optimizers, 0)
    path = save_checkpoint(tmp_path, 1, model, optimizers, {}, config={"lr": 0.01, "decay": 0.1, "kind": "a"})
    other, others = model_and_optimizers({"lr": 0.5, "weight_decay": 0.3})
    new = {"lr": 0.5, "decay": 0.3, "kind": "a"}
    with pytest.raises(CheckpointError, match=r"config: decay was 0.1, is 0.3\. Go back"):
        load_checkpoint(path, other, others, new, may_change=lambda name: name == "lr")
    load_checkpoint(path, other, others, new, may_change=lambda name: name in ("lr", "decay"))
    assert_same(contents(other, others), contents(model, optimizers))
    assert {group["lr"] for group in others[0].param_groups} == {0.5}
    assert 0.3 in {group["weight_decay"] for group in others[0].param_groups}


def test_other_optimizers_are_refused(tmp_path):
    model, optimizers = model_and_optimizers(ADAMW)
    advance(model, optimizers, 0)
    path = save_checkpoint(tmp_path, 1, model, optimizers, {})
    with pytest.raises(CheckpointError, match="does not fit.*momentum_buffer"):
        load_checkpoint(path, *model_and_optimizers(MUON))


# Kills


CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def kill_at(moment: int, folder):
    """From now on, die just before change number `moment` to files under `folder`."""
    seen = 0

    def hook(event: str, arguments: tuple):
        nonlocal seen
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES or is_write:
            if str(folder) in str(arguments[0]) or event in ("os.remove", "os.rmdir"):  # rmtree names files in folders
                if seen == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

    sys.addaudithook(hook)


@pytest.mark.slow
def test_a_kill_at_every_change_to_the_disk_loses_nothing(tmp_path):
    """Steps 1 and 2 are whole; step 3 is being saved, after which step 1 goes."""
    model, optimizers = model_and_optimizers(MUON)
    states = {}
    start = tmp_path / "start"
    for step in (1, 2, 3):
        advance(model, optimizers, step)
        states[step] = contents(model, optimizers)
        if step < 3:
            save_checkpoint(start, step, model, optimizers, {})

    outcomes = []
    for moment in range(100):
        folder = tmp_path / f"moment-{moment}"
        shutil.copytree(start, folder)

        def work(moment=moment, folder=folder):
            kill_at(moment, folder)
            save_checkpoint(folder, 3, model, optimizers, {})

        ended = run_and_kill(work)
        other, others = model_and_optimizers(MUON)
        step = load_checkpoint(latest_checkpoint(folder), other, others)["step"]
        assert_same(contents(other, others), states[step])
        outcomes.append(step)
        # and the next save leaves nothing behind of the one that was killed
        save_checkpoint(folder, 4, model, optimizers, {})
        assert folders(folder) == [f"step-{step:08d}", "step-00000004"]
        if ended:
            break
    assert ended and step == 3 and outcomes == sorted(outcomes)
    assert outcomes.count(2) >= 4 and outcomes.count(3) >= 3  # kills before and after the rename


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(tmp_path):
    """A process that saves step after step, killed some time later, each time going on from what is there."""
    model, optimizers = model_and_optimizers()
    moments = random.Random(0)
    said = tmp_path / "reached"
    said.write_text("0")

    def work():
        start = 0
        if (found := latest_checkpoint(tmp_path)) is not None:
            start = load_checkpoint(found, model, optimizers)["step"]
        for step in range(start + 1, 100_000):
            mark(model, optimizers, step)
            save_checkpoint(tmp_path, step, model, optimizers, {})
            (tmp_path / "saying").write_text(str(step))
            os.replace(tmp_path / "saying", said)

    for _ in range(8):
        before, wait = int(said.read_text()), moments.uniform(0, 0.1)

        def is_time(before=before, wait=wait):
            """Some time after it has saved a step, in the middle of another."""
            return int(said.read_text()) > before and time.sleep(wait) is None

        run_and_kill(work, is_time)
        reached = int(said.read_text())
        assert reached > before
        step = load_checkpoint(latest_checkpoint(tmp_path), model, optimizers)["step"]
        assert step >= reached
        expected = model_and_optimizers()
        mark(*expected, step)
        assert_same(contents(model, optimizers), contents(*expected))


def mark(model, optimizers, step: int):
    """A model and optimizers in which every number says which step it is of."""
    if not optimizers[0].state:
        advance(model, optimizers, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
            for moment in optimizers[0].state[parameter].values():
                moment.fill_(step)


# No space


@pytest.mark.parametrize("room", [0, 20_000])
def test_a_disk_that_fills_up_leaves_the_checkpoint_before(tmp_path, room):
    model, optimizers = model_and_optimizers()
    advance(model, optimizers, 0)
    good = save_checkpoint(tmp_path, 1, model, optimizers, {})
    expected = contents(model, optimizers)
    advance(model, optimizers, 1)
    with full_disk(room), pytest.raises(CheckpointError, match="no space left.*intact"):
        save_checkpoint(tmp_path, 2, model, optimizers, {}, keep_last=1)
    assert folders(tmp_path) == [good.name]
    save_checkpoint(tmp_path, 2, model, optimizers, {}, keep_last=2)  # space again: goes on
    assert folders(tmp_path) == ["step-00000001", "step-00000002"]
    load_checkpoint(good, model, optimizers)
    assert_same(contents(model, optimizers), expected)


@pytest.mark.parametrize("place", [".", "checkpoints", "metrics.jsonl", "final"])
def test_checkpoints_before_are_called_intact_where_there_are_any(tmp_path, place):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    (tmp_path / "step-00000001").mkdir()  # a model of training.export_every
    assert "checkpoints before" not in str(error_of_saving(tmp_path / place, full))
    save_checkpoint(tmp_path / "checkpoints", 1, *model_and_optimizers(), {})
    assert str(error_of_saving(tmp_path / place, full)).endswith("The checkpoints before it are intact.")


def test_a_disk_that_fills_up_at_the_marker(tmp_path, monkeypatch):
    model, optimizers = model_and_optimizers()
    good = save_checkpoint(tmp_path, 1, model, optimizers, {})

    def write_whole(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="no space left"):
        patch.setattr("looped_recipes.engine.checkpoint.write_whole", write_whole)
        save_checkpoint(tmp_path, 2, model, optimizers, {})

    def save_pretrained(folder):
        raise Exception("No space left on device (os error 28)")  # as the Rust library does

    tokenizer = SimpleNamespace(save_pretrained=save_pretrained)
    with pytest.raises(CheckpointError, match="no space left"):
        save_checkpoint(tmp_path, 2, model, optimizers, {}, tokenizer=tokenizer)
    assert latest_checkpoint(tmp_path) == good


def test_too_little_space_is_found_before_writing(tmp_path, monkeypatch):
    model, optimizers = model_and_optimizers()
    good = save_checkpoint(tmp_path, 1, model, optimizers, {})
    size = sum(4 * parameter.numel() for parameter in model.parameters()) * 3  # weights and two moments
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size))
    check_space(tmp_path / "not" / "yet" / "there", model, optimizers)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size - 1))
    with pytest.raises(CheckpointError, match="a checkpoint takes 0.29 MB, but .* has 0.29 MB left"):
        check_space(tmp_path / "not" / "yet" / "there", model, optimizers)
    with pytest.raises(CheckpointError, match="a checkpoint takes"):
        save_checkpoint(tmp_path, 2, model, optimizers, {})
    assert folders(tmp_path) == [good.name]


def test_muon_needs_space_for_one_moment(tmp_path, monkeypatch):
    model, optimizers = model_and_optimizers(MUON)
    muon, adamw = (sum(p.numel() for group in each.param_groups for p in group["params"]) for each in optimizers)
    size, usage = 4 * (2 * muon + 3 * adamw), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size))
    check_space(tmp_path, model, optimizers)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size - 1))
    with pytest.raises(CheckpointError, match="a checkpoint takes"):
        check_space(tmp_path, model, optimizers)


# Export


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True}, {"preset": "parcae"}], ids=str)
def test_an_export_opens_with_from_pretrained(tmp_path, fields):
    model = tiny_model(**fields)
    model.generation_config.max_new_tokens = 7
    export_model(tmp_path / "final", model, tiny_tokenizer(), readme="# A model")
    opened = LoopedForCausalLM.from_pretrained(tmp_path / "final")
    ids = random_ids(2, 10)
    assert torch.equal(opened(ids).logits, model(ids).logits)
    assert opened.generation_config.max_new_tokens == 7
    assert {"tokenizer.json", "README.md", "model.safetensors"} <= set(folders(tmp_path / "final"))
    assert folders(tmp_path) == ["final"]


@pytest.mark.skipif(
    "was_modified" not in inspect.getsource(GenerationConfig.save_pretrained),
    reason="this version of transformers refuses to save such settings of any model",
)
def test_odd_settings_of_generation_that_a_model_came_with_do_not_stop_its_export(tmp_path):
    """transformers only warns of them when it loads a model, and refuses to save what looks as if it had changed."""
    tiny_model().save_pretrained(tmp_path / "start")
    (tmp_path / "start" / "generation_config.json").write_text('{"temperature": 0.6}')
    model = LoopedForCausalLM.from_pretrained(tmp_path / "start", num_loops=2)
    path = export_model(tmp_path / "final", model)
    assert LoopedForCausalLM.from_pretrained(path).generation_config.temperature == 0.6


def test_an_export_replaces_the_one_before_and_nothing_else(tmp_path):
    model = tiny_model()
    path = export_model(tmp_path / "final", model, tiny_tokenizer())
    for leftover in (".final.saving", ".final.replaced"):  # of an export that was killed
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "tokenizer.json").write_text("")
    export_model(path, model.to(torch.bfloat16))
    assert LoopedForCausalLM.from_pretrained(path).dtype == torch.bfloat16
    assert "tokenizer.json" not in folders(path) and folders(tmp_path) == ["final"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="mine exists and is not a saved model"):
        export_model(tmp_path / "mine", model)
    assert folders(tmp_path / "mine") == ["notes.txt"]


def test_an_export_has_the_depth_of_training_also_where_the_model_was_run_deeper(tmp_path):
    model = tiny_model(num_loops=3)
    model.config.num_loops = 5
    opened = LoopedForCausalLM.from_pretrained(export_model(tmp_path / "final", model))
    assert (opened.config.num_loops, opened.trained_depth) == (5, 3)


def test_an_export_of_the_same_weights_keeps_the_exits_that_were_found_for_them(tmp_path):
    model = tiny_model()
    path = export_model(tmp_path / "final", model)
    saved = LoopedForCausalLM.from_pretrained(path).generation_config
    saved.exit_criterion, saved.exit_threshold = "kl", 0.25
    saved.save_pretrained(path)
    export_model(path, model)
    assert LoopedForCausalLM.from_pretrained(path).generation_config.exit_threshold == 0.25
    check_folder(path)
    assert change_of(path / "generation_config.json") is None
    with torch.no_grad():
        model.lm_head.weight += 1
    export_model(path, model)
    assert not hasattr(LoopedForCausalLM.from_pretrained(path).generation_config, "exit_threshold")


def test_exits_outlive_an_export_that_is_killed_between_its_renames(tmp_path, monkeypatch):
    model, rename = tiny_model(), os.rename
    path = export_model(tmp_path / "final", model)
    saved = LoopedForCausalLM.from_pretrained(path).generation_config
    saved.exit_criterion, saved.exit_threshold = "kl", 0.25
    saved.save_pretrained(path)
    renew_checksum(path, "generation_config.json")
    model.config.bos_token_id = 7

    def killed(source, target):
        if target == path:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", killed)
        export_model(path, model)
    assert folders(tmp_path) == [".final.replaced", ".final.saving"]
    export_model(path, model)
    assert folders(tmp_path) == ["final"]
    assert LoopedForCausalLM.from_pretrained(path).config.bos_token_id == 7
    assert LoopedForCausalLM.from_pretrained(path).generation_config.exit_threshold == 0.25


# Several processes


PER_LOOP = {"optimizer": ADAMW, "model": {"loop_loss": "per_loop"}}
# sums in another order change a gradient by 1e-7; where it is nearly zero, AdamW divides it by its own size, and with
# the usual eps makes that 1e-5 in a weight
ROUNDED = {**PER_LOOP, "optimizer": {**ADAMW, "eps": 1e-3}}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """The same run under DDP and FSDP2, and where they saved."""
    folder = tmp_path_factory.mktemp("two-processes")
    names = {fsdp: str(folder / ("fsdp2" if fsdp else "ddp")) for fsdp in (False, True)}
    how = {"steps": [0, 3], **ROUNDED}
    tasks = [
        {"fsdp": fsdp, "save": names[fsdp], "in_background": fsdp, "export": names[fsdp] + "-export", **how}
        for fsdp in (False, True)
    ]
    return names, dict(zip((False, True), launch(folder, tasks)))


@pytest.fixture(scope="module")
def one_process():
    return {"first": train([0, 3], **ROUNDED), "all": train([0, 5], **ROUNDED)}


def assert_close(found: list[float], expected: list[float], relative: float):
    assert len(found) == len(expected)
    assert found == pytest.approx(expected, rel=relative)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_give_the_losses_of_one(two_processes, one_process, fsdp):
    _, runs = two_processes
    assert_close(runs[fsdp]["losses"], one_process["first"]["losses"], 1e-6)
    for name, weight in one_process["first"]["weights"].items():
        assert torch.allclose(runs[fsdp]["weights"][name], weight, rtol=0, atol=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_one_process_goes_on_from_two(two_processes, one_process, fsdp):
    names, runs = two_processes
    path = latest_checkpoint(names[fsdp])
    model, optimizers = model_and_optimizers(ADAMW, loop_loss="per_loop")
    load_checkpoint(path, model, optimizers)
    assert_same({name: p.detach() for name, p in model.named_parameters()}, runs[fsdp]["weights"])
    resumed = train([3, 5], load=str(path), **ROUNDED)
    assert_close(resumed["losses"], one_process["all"]["losses"][3:], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_an_export_of_two_processes_opens(two_processes, fsdp):
    names, runs = two_processes
    opened = LoopedForCausalLM.from_pretrained(names[fsdp] + "-export")
    assert type(opened).__name__ == opened.config.architectures[0] == "LoopedForCausalLM"
    assert_same({name: p.detach() for name, p in opened.named_parameters()}, runs[fsdp]["weights"])


@pytest.mark.slow
def test_units_of_accelerate_give_the_losses_of_one_process(tmp_path):
    """Trainers shard a model as accelerate does: every block, and the head with its norm, is a unit of its own."""
    settings = [
        PER_LOOP,
        {"optimizer": ADAMW, "model": {"loop_loss": "per_loop", "tie_word_embeddings": True, "num_coda_layers": 1}},
        {"optimizer": MUON, "model": {"preset": "ouro"}},
    ]
    tasks = [{"steps": [0, 3], "fsdp": True, "units_of_accelerate": True, **each} for each in settings]
    for result, each in zip(launch(tmp_path, tasks), settings):
        relative = 1e-4 if each["optimizer"] is MUON else 1e-6
        assert_close(result["losses"], train([0, 3], **each)["losses"], relative)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_processes, mesh", [(2, None), (4, (2, 2))], ids=["fsdp2", "hsdp"])
def test_blocks_as_units_give_the_losses_of_one_process(num_processes, mesh, tmp_path):
    """Gathered in every loop; also as two replicas of two shards each. Muon shares its matrices out."""
    parcae = {"preset": "parcae", "num_prelude_layers": 1, "num_coda_layers": 1}
    muon, normuon = ({"optimizer": each, "model": parcae} for each in (MUON, NORMUON))
    settings = [PER_LOOP, {**muon, "micro_batches": 2}, normuon]
    tasks = [
        {"steps": [0, 3], "fsdp": True, "blocks_as_units": units, "mesh": mesh, **each}
        for each in settings
        for units in (True, False)
    ]
    results = iter(launch(tmp_path, tasks, num_processes, timeout=480))
    for each in settings:
        expected = train([0, 3], **each)["losses"]
        for _ in range(2):
            assert_close(next(results)["losses"], expected, rounding(each))


OF_OWN_HEADS = {"qk_norm": "learned", "value_embeddings": True, "num_key_value_heads": 2, **SECTIONS}
SPLIT = {
    "per_loop": PER_LOOP,
    # gradients that each process knows in part, added up once for all micro batches
    "own_heads": {"optimizer": ADAMW, "model": OF_OWN_HEADS, "micro_batches": 2},
    "tied": {"optimizer": STABLE, "model": {"tie_word_embeddings": True, "loop_lora_rank": 2}},
    "parcae": {
        "optimizer": MUON,
        "model": {"preset": "parcae", **SECTIONS},
        "sampler": "poisson",
        "backprop_loops": 2,
    },
    "ouro": {"optimizer": NORMUON, "model": {"preset": "ouro"}, "blocks_as_units": True},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not can_split(), reason="this transformers cannot split a model that is already made")
@pytest.mark.parametrize("num_processes, mesh", [(4, (1, 2, 2)), (8, (2, 2, 2))], ids=["shards", "replicas"])
def test_split_matrices_give_the_losses_of_one_process(num_processes, mesh, tmp_path):
    """Two shards of two halves, once or twice. One process goes on from where they stopped."""
    how = {name: {**each, "model": {"vocab_size": 100, **each["model"]}} for name, each in SPLIT.items()}
    tasks = [
        {"steps": [0, 3], "fsdp": True, "mesh": mesh, "save": str(tmp_path / name), **each}
        for name, each in how.items()
    ]
    tasks[0]["export"] = str(tmp_path / "export")
    results = dict(zip(how, launch(tmp_path, tasks, num_processes, timeout=480)))
    for name, each in how.items():
        alone = {key: value for key, value in each.items() if key != "blocks_as_units"}
        expected = train([0, 4], **alone)["losses"]
        assert_close(results[name]["losses"], expected[:3], rounding(each))
        path = latest_checkpoint(tmp_path / name)
        assert_close(train([3, 4], load=str(path), **alone)["losses"], expected[3:], rounding(each))
    opened = LoopedForCausalLM.from_pretrained(tmp_path / "export")
    assert_same({name: p.detach() for name, p in opened.named_parameters()}, results["per_loop"]["weights"])


VARIANTS = {
    # depths and gradient windows that differ between the processes, and accumulation
    "parcae": {
        "optimizer": MUON,
        "model": {"preset": "parcae", "num_prelude_layers": 1, "num_coda_layers": 1},
        "sampler": "poisson",
        "backprop_loops": 2,
        "micro_batches": 2,
    },
    "normuon": {
        "optimizer": NORMUON,
        "model": {"preset": "parcae", "num_prelude_layers": 1, "num_coda_layers": 1},
        "sampler": "poisson",
        "backprop_loops": 2,
    },
    "stable": {
        "optimizer": STABLE,
        "model": {"preset": "parcae", "num_prelude_layers": 1, "num_coda_layers": 1},
        "sampler": "poisson",
        "backprop_loops": 2,
    },
    # the embedding is beyond the window in some rows, damping is not used at depth 1, the gate never
    "gradients missing": {
        "optimizer": ADAMW,
        "model": {"loop_damping": True, "exit_gate": "raw"},
        "sampler": "poisson",
        "backprop_loops": 1,
    },
    "ouro": {"optimizer": MUON, "model": {"preset": "ouro"}, "sampler": "uniform"},
    # raw readouts of a shaken model: too far from convergence for the rounding of Muon
    "norm penalty": {
        "optimizer": ADAMW,
        "model": {"norm_penalty": 0.01, "loop_loss": "per_loop", "readout_norm": "none"},
    },
}


@pytest.mark.slow
def test_every_kind_of_run_gives_the_losses_of_one_process(tmp_path):
    tasks = [{"steps": [0, 4], "fsdp": fsdp, **VARIANTS[name]} for name in VARIANTS for fsdp in (False, True)]
    results = iter(launch(tmp_path, tasks))
    for settings in VARIANTS.values():
        expected = train([0, 4], **settings)
        for fsdp in (False, True):
            result = next(results)
            assert_close(result["losses"], expected["losses"], rounding(settings))
            assert result["gathers"] == (4 if fsdp else 0)  # once in a step, also with micro batches


def rounding(settings: dict) -> float:
    """Of losses: both kinds of Muon iterate in bf16."""
    return 1e-4 if settings["optimizer"] in (MUON, NORMUON) else 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["parcae", "normuon", "stable"])
def test_a_run_moves_between_process_counts(tmp_path, variant):
    """FSDP2 -> one process -> FSDP2 -> DDP, with Muon and AdamW, against one process all along."""
    settings = VARIANTS[variant]
    folder = str(tmp_path / "checkpoints")

    def part(first: int, **arguments) -> dict:
        load = {} if first == 0 else {"load": f"{folder}/step-{first:08d}"}
        return {"steps": [first, first + 2], "save": folder, **load, **arguments, **settings}

    losses = launch(tmp_path, [part(0, fsdp=True)])[0]["losses"]
    losses += train(**part(2))["losses"]
    losses += [loss for result in launch(tmp_path, [part(4, fsdp=True), part(6)]) for loss in result["losses"]]
    assert_close(losses, train([0, 8], **settings)["losses"], rounding(settings))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_process_stops_all(tmp_path, rank):
    good = str(tmp_path / "checkpoints")
    tasks = [
        {"steps": [0, 1], "save": good, **PER_LOOP},
        {"steps": [1, 2], "load": f"{good}/step-00000001", "save": good, "disk_full_on": rank, **PER_LOOP},
    ]
    errors = launch(tmp_path, tasks)[1]["errors"]
    assert len(errors) == 2 and all("no space left" in error for error in errors)
    assert latest_checkpoint(good).name == "step-00000001"
