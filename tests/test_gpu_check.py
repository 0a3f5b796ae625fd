"""The check on a GPU: what it keeps, how it goes on, and what it says; the whole of it, tiny, on the CPU."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from looped_eval.diagnose import growth as diagnose_growth
from looped_eval.diagnose.growth import residual_norm, update_size
from looped_eval.gpu import command, exits, growth, memory, real_training, tests, training_options
from looped_eval.gpu.ledger import Ended, Ledger
from looped_eval.gpu.pieces import NAMES, PIECES, Aim, Measurement, Piece, Setting
from looped_eval.gpu.verdict import verdict, write_page
from modeling_looped import LoopedConfig
from tests.helpers import wait_until
from tests.helpers_processes import is_running


ROOT = Path(__file__).parent.parent


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_the_list_needs_no_gpu(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--list"])
    assert not ended.value.code and [line.split()[0] for line in capsys.readouterr().out.splitlines()[:-1]] == NAMES


def piece_of(*measurements) -> Piece:
    piece = Piece("machine", "a piece", 1, 2)
    piece.measurements = lambda setting: iter(Measurement(name, run) for name, run in measurements)
    return piece


def broken():
    raise RuntimeError("out of order")


def test_a_line_that_was_cut_off_is_left_out(ledger):
    ledger.write_result("machine", "rates", {"peak": 1.0})
    with open(ledger.path, "a") as file:
        file.write('{"piece": "machine", "name": "pack')
    assert ledger.results("machine") == {"rates": {"peak": 1.0}}


def test_only_what_is_missing_is_measured_again(ledger, tmp_path):
    setting, asked = Setting(tmp_path, "cpu"), []

    def measured(name):
        asked.append(name)
        return {"value": len(asked)}

    first = piece_of(("a", lambda: measured("a")), ("b", broken), ("c", lambda: measured("c")))
    assert not command.run_here(first, setting, ledger)
    assert asked == ["a", "c"]
    assert ledger.results("machine")["b"] == {"broke": "RuntimeError: out of order"}
    assert command.run_here(piece_of(("a", broken), ("b", lambda: measured("b")), ("c", broken)), setting, ledger)
    assert asked == ["a", "c", "b"] and ledger.measured("machine") == {"a", "b", "c"}


def test_a_process_that_does_not_end_is_ended(tmp_path, monkeypatch):
    """With what it started, and without waiting longer than its limit and the grace."""
    monkeypatch.setattr(command, "GRACE", 6)
    script = tmp_path / "sleeper"
    script.write_text('#!/bin/sh\nsleep 300 & echo $! >"$0.pid"; trap "" TERM; wait; wait\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    ended = command.run_apart(PIECES[0], Setting(tmp_path, "cpu"), 1)
    assert ended.how == "stopped by its limit"
    child = int(Path(f"{script}.pid").read_text())
    try:
        wait_until(lambda: not is_running(child))
    finally:
        if is_running(child):
            os.kill(child, signal.SIGKILL)


def test_the_verdict(ledger, tmp_path):
    ledger.write_result("memory", "wide", {"per_loop_over_terminal": 1.05})
    ledger.write_result("memory", "narrow", {"per_loop_over_terminal": 1.2})
    ledger.write_end("memory", Ended("done", 3.0))
    ledger.write_result("exits", "batch_1", {"broke": "RuntimeError: <b>no memory</b>"})
    ledger.write_end("exits", Ended("failed", 3.0, "batch_1"))
    ledger.write_end("real", Ended("stopped by its limit", 570.0))
    said = verdict(ledger)
    assert not said.is_whole
    assert said.sentence.startswith(
        "1 of 2 aims were met. Fell short: memory of a per-loop loss (narrow: 1.2). Broke: exits/batch_1. "
        "Not run to the end: machine, tests,"
    )
    assert {"real", "speculation", "rdm"} <= set(said.not_run) and not {"memory", "exits"} & set(said.not_run)
    write_page(Setting(tmp_path, tiny=True), ledger, "python -m eval.gpu")
    page = (tmp_path / "index.html").read_text()
    assert page.index("1 of 2 aims were met") < page.index("fell short</td>") < page.index("not run")
    assert "their numbers tell nothing" in page and "<b>no" not in page
    content = json.loads((tmp_path / "check.json").read_text())
    assert content["verdict"] == said.sentence
    assert content["aims"]["memory/narrow: memory of a per-loop loss: at most 1.1"] == [1.2, False]
    assert content["pieces"]["lt_flt"]["how"] == "not run"


def test_a_check_that_met_everything_says_so(ledger):
    for piece in PIECES:
        ledger.write_end(piece.name, Ended("done", 1.0))
    ledger.write_result("training_speed", "370m", {"mfu": 0.5})
    ledger.write_result("tests", "test_numbers", {"passed": 3, "failed": 0})
    said = verdict(ledger)
    assert said.is_whole and said.sentence == "2 of 2 aims were met."
    assert ledger.measured("tests") == {"test_numbers"}


def test_pieces_that_were_not_asked_for_need_not_be_run(ledger, tmp_path, monkeypatch, capsys):
    ledger.write_result("tests", "test_numbers", {"passed": 3, "failed": 0})
    ledger.write_end("tests", Ended("done", 1.0))
    assert command.main([str(tmp_path), "--device", "cpu", "--only", "tests"]) == 0
    assert "1 of 1 aims were met.\n" in capsys.readouterr().out
    monkeypatch.setattr(command, "run_apart", lambda *args: Ended("stopped by its limit", 1.0))
    assert command.main([str(tmp_path), "--device", "cpu", "--only", "tests", "real"]) == 1
    assert "1 of 1 aims were met. Not run to the end: real.\n" in capsys.readouterr().out


def test_residual_scaling_trains_the_looped_model_alone(tmp_path, monkeypatch):
    """What diagnose gives of it, without the unshared stack beside it."""
    config = LoopedConfig.from_preset("residual_scaling", **growth.FIELDS)
    how = {"rules": ["sqrt"], "loops": [1, 2, 4], "seeds": 1, "steps": 2}
    expected = {"residual_norm": residual_norm(config, **how), "update_size": update_size(config, **how)}
    curves = {"residual_norm": "R", "update_size": "update"}
    monkeypatch.setattr(diagnose_growth, "ARRANGEMENTS", {"looped": diagnose_growth.looped})
    found = {each.name: each.run() for each in growth.measurements(Setting(tmp_path, "cpu", tiny=True))}
    assert len(found) == 6
    for name, result in expected.items():
        of_rule, measured = result["looped"]["sqrt"], found[f"{name}_sqrt"]
        assert measured["curves"] == of_rule[curves[name]] and measured["loops"] == (1, 2, 4)
        assert measured["theory"] == 0.5 and measured["last_step"] == of_rule["slope"]["last_step"]["slope"]


@pytest.mark.slow
def test_a_training_that_was_finished_is_measured_without_its_checkpoints(tmp_path, training_text, monkeypatch):
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):  # set by it for good
        monkeypatch.setenv(name, "")
    setting = Setting(tmp_path, "cpu", tiny=True, text=str(training_text / "train.jsonl"))
    first, again = real_training.train(setting), real_training.train(setting)
    assert first["steps"] == 4 and 0 < first["checkpoint_share"] < 1
    assert again["steps"] == 0 and again["last_loss"] == first["last_loss"]
    assert not any("checkpoint" in name for name in again)


def test_aims():
    assert Aim("a", "n", least=0.45).is_met(0.45) and not Aim("a", "n", least=0.45).is_met(0.449)
    assert Aim("a", "n", most=1.1).is_met(1.1) and not Aim("a", "n", most=1.1).is_met(1.11)
    assert not Aim("a", "n", least=0.45).is_met(float("nan"))


@pytest.mark.parametrize("is_tiny", [True, False], ids=["tiny", "whole"])
@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.name)
def test_every_piece_says_what_it_measures(piece, is_tiny, tmp_path):
    """Also sweeps, whose recipes are read for that."""
    setting = Setting(tmp_path, "cpu", is_tiny)
    names = [measurement.name for measurement in piece.measurements(setting)]
    assert len(set(names)) == len(names) and (names or (is_tiny and piece.name == "compiled_tests"))


MARKS = "pytest.mark.gpu", "pytestmark = pytest.mark.gpu", "pytestmark = [pytest.mark.gpu"


def test_files_with_tests_for_a_gpu_are_found(tmp_path):
    marked = {
        path.stem
        for path in (ROOT / "tests").rglob("test_*.py")
        if any(line.removeprefix("@").startswith(MARKS) for line in path.read_text().splitlines())
    }
    pieces = [piece for piece in PIECES if piece.name in ("tests", "compiled_tests")]
    found = [measurement.name for piece in pieces for measurement in piece.measurements(Setting(tmp_path, "cpu"))]
    assert sorted(found) == sorted(marked) and "test_gpu_check" not in found and len(found) > 5


@pytest.mark.slow
def test_an_option_of_training_is_measured(tmp_path):
    setting = Setting(tmp_path, "cpu", tiny=True)
    found = training_options.against_none({"gradient_checkpointing": True}, setting)
    assert found["speedup"] == found["seconds_without"] / found["seconds"] > 0
    said = training_options.against_none({"attention": "flex_attention", "compile": True}, setting)["said"]
    assert "training.attention='flex_attention' needs a GPU" in said[0]


@pytest.mark.slow
def test_a_file_of_tests_that_is_cut_off_keeps_what_ended(tmp_path, monkeypatch):
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--device')\n")
    file = tmp_path / "test_some.py"
    file.write_text(
        "import os, pytest\n\npytestmark = pytest.mark.gpu\n\n"
        "def test_good(): pass\n\ndef test_bad(): assert 0\n\n"
        "@pytest.mark.skip('for PASSED ones')\ndef test_left_out(): pass\n\n"
        "def test_end():\n    if os.environ.get('ENDS'): os._exit(3)\n"
    )
    ledger, setting = Ledger(tmp_path), Setting(tmp_path, "cpu")
    counts = {"passed": 1, "failed": 1, "skipped": 1}
    monkeypatch.setenv("ENDS", "1")
    with pytest.raises(RuntimeError, match="pytest ended with 3 after"):
        tests.run_file(file, setting, "tests")
    assert ledger.results("tests")["test_some"] == {"broke": "cut off", **counts}
    assert ledger.measured("tests") == set()
    monkeypatch.delenv("ENDS")
    result = tests.run_file(file, setting, "tests")
    assert result.pop("said") and result == {**counts, "passed": 2}


def test_every_piece_ends_within_ten_minutes_and_the_check_in_thirty():
    assert len(set(NAMES)) == len(NAMES) and all(piece.expected < piece.limit <= 590 for piece in PIECES)
    check = PIECES[: NAMES.index("compiled_tests") + 1]
    assert sum(piece.expected for piece in check) < 1800 and sum(piece.expected for piece in PIECES) < 3600


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_it_on_a_cpu(tmp_path, training_text):
    """By the script, on a machine whose packages have other names. Cut off once; the second call ends it."""
    out = tmp_path / "out"
    options = ["--device", "cpu", "--tiny", "--text", str(training_text / "train.jsonl")]
    run = ["bash", str(ROOT / "recipes" / "gpu_check.sh"), str(out), *options]
    environment = {**os.environ, "PYTHON": sys.executable, "WHEELS": str(tmp_path)}
    first = subprocess.run([*run, "--only", "machine"], env=environment, capture_output=True, text=True, timeout=300)
    assert "machine: done" in first.stdout, first.stderr
    second = subprocess.run([*run, "--minutes", "25"], env=environment, capture_output=True, text=True, timeout=1700)
    assert "machine: done" not in second.stdout
    content = json.loads((out / "check.json").read_text())
    states = {name: piece["how"] for name, piece in content["pieces"].items()}
    assert states == dict.fromkeys(NAMES, "done"), second.stdout + second.stderr
    assert "Broke" not in content["verdict"] and content["tiny"]
    real = content["pieces"]["real"]["results"]["real"]
    assert real["steps"] == 4 and real["finite"] == 1 and 0 < real["checkpoint_share"] < 1
    tests = content["pieces"]["tests"]["results"]
    assert tests["test_decoding"]["passed"] > 10 and not any(result["failed"] for result in tests.values())


def test_the_aims_are_those_that_were_set():
    aims = {f"{piece.name}: {aim.words}" for piece in PIECES for aim in piece.aims}
    assert {
        "training_speed: MFU of training: at least 0.45",
        "memory: memory of a per-loop loss: at most 1.1",
        "against_llama: speed over Llama: at least 1.0",
        "real: share of time in checkpoints: at most 0.01",
        "bandwidth: share of the bandwidth limit: at least 0.6",
        "exits: exits over what FLOPs predict: at least 0.8",
        "pages: time of a pass by pages: at most 1.0",
        "speculation: speed of self-speculation: at least 1.5",
    } <= aims


def test_an_aim_that_was_missed_makes_the_check_fail(ledger):
    for piece in PIECES:
        ledger.write_end(piece.name, Ended("failed", 1.0))
        ledger.write_end(piece.name, Ended("done", 1.0))  # the last word counts
    ledger.write_result("training_speed", "370m", {"mfu": 0.44})
    said = verdict(ledger)
    assert not (said.failed or said.not_run) and not said.is_whole


def test_ratios_of_memory_and_of_late_reads(tmp_path, monkeypatch):
    setting = Setting(tmp_path, "cpu", tiny=True)
    monkeypatch.setattr(
        memory, "peak", lambda layers, loops, width, loss, setting: {"terminal": 4, "per_loop": 5}[loss]
    )
    assert memory.ratio(1, 2, 64, setting)["per_loop_over_terminal"] == 1.25
    monkeypatch.setattr(exits, "in_turns", lambda late, each, repeats: (1.0, 4.0))
    monkeypatch.setattr(exits, "passing_threshold", lambda *_: 0.1)
    args = exits.shaped(setting, 1, 2, 64, new_tokens=2, repeats=1)
    assert exits.measure_late_reads(None, torch.zeros(1, 2), "latent_diff", args)["time_over_reading_each"] == 0.25


def test_the_share_of_checkpoints():
    """Of checkpoints of 2 seconds each: as rare as in recipes by default, and in this run of ten steps."""
    found = real_training.of_checkpoints([2.0, 2.0], 10, 0.5)
    every = real_training.TrainingConfig().save_every
    assert found["checkpoint_share"] == pytest.approx(2 / (2 + every * 0.5))
    assert found["checkpoint_share_of_this_run"] == pytest.approx(4 / (4 + 10 * 0.5))


def test_errors_of_tests_are_failures():
    ended = tests.Counter({"PASSED": 3, "FAILED": 1, "ERROR": 2, "SKIPPED": 4})
    assert tests.counts(ended) == {"passed": 3, "failed": 3, "skipped": 4}


def test_a_piece_that_failed_is_run_again(tmp_path, monkeypatch):
    """Within what is left of the time."""
    limits = []
    monkeypatch.setattr(command, "run_apart", lambda piece, setting, limit: limits.append(limit) or Ended("done", 1.0))
    Ledger(tmp_path).write_end("tests", Ended("failed", 1.0))
    options = [str(tmp_path), "--device", "cpu", "--only", "tests", "--minutes", "2"]
    command.main(options)
    command.main(options)  # done: not again
    assert len(limits) == 1 and limits[0] <= 120 - command.GRACE
