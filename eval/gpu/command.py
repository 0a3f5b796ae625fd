"""Run the pieces of the check, each in a separate process."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from looped_recipes.common.orphans import end_with

from .ledger import Ended, Ledger
from .options import parse
from .pieces import PIECES, Piece, Setting
from .verdict import verdict, write_page


TINY_LIMIT = 480  # seconds
GRACE = 25  # seconds that a terminated training has to save a checkpoint


def main(arguments: list[str]):
    args = parse(arguments)
    setting = Setting(args.out.absolute(), args.device, args.tiny, args.text, args.named)
    setting.out.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(setting.out)
    if args.piece:
        end_with(os.getppid())  # this process has its own session, so it would otherwise outlive its parent
        return 0 if run_here(next(piece for piece in PIECES if piece.name == args.piece), setting, ledger) else 1
    end = time.monotonic() + 60 * args.minutes
    for piece in PIECES:
        ended, left = ledger.ended(piece.name), end - time.monotonic()
        if piece.name not in args.only or (ended is not None and ended.how == "done"):
            continue
        if left < GRACE + 5:
            break
        print(f"{piece.name}: {piece.what} ...", flush=True)
        ended = run_apart(piece, setting, min(TINY_LIMIT if args.tiny else piece.limit, left - GRACE))
        ledger.write_end(piece.name, ended)
        print(f"{piece.name}: {ended.how} after {ended.seconds:.0f} s {ended.said}", flush=True)
        write_page(setting, ledger, args.command)
    write_page(setting, ledger, args.command)
    said = verdict(ledger, args.only)
    print(f"{said.sentence}\nall of it: {setting.out / 'index.html'}, {setting.out / 'check.json'}")
    return 0 if said.is_whole else 1


def run_here(piece: Piece, setting: Setting, ledger: Ledger) -> bool:
    """Run the missing measurements of a piece, and return whether all of them succeeded."""
    torch.manual_seed(0)
    measured, whole = ledger.measured(piece.name), True
    for measurement in piece.measurements(setting):
        if measurement.name in measured or (setting.named and measurement.name not in setting.named):
            continue
        try:
            result = measurement.run()
        except Exception as error:  # whatever failed, the next measurement may still succeed
            result, whole = {"broke": f"{type(error).__name__}: {error}"[:500]}, False
        ledger.write_result(piece.name, measurement.name, result)
        print(measurement.name, result, flush=True)
        let_go_of_memory()
    return whole


def let_go_of_memory():
    """Free the memory of earlier models and of the code compiled for them."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def run_apart(piece: Piece, setting: Setting, limit: float) -> Ended:
    """Run a piece in a separate process group, stop it after `limit` seconds, and write its output to logs/."""
    command = [sys.executable, "-m", "looped_eval.gpu", str(setting.out), "--piece", piece.name]
    command += ["--device", setting.device, "--text", setting.text, *(["--tiny"] if setting.tiny else [])]
    command += ["--named", *setting.named] if setting.named else []
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if setting.device == "cpu" else {})}
    log, start = setting.out / "logs" / f"{piece.name}.txt", time.monotonic()
    log.parent.mkdir(exist_ok=True)
    with open(log, "ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
        try:
            status = process.wait(limit)
        except BaseException as reason:  # the limit was reached, or this command was stopped
            stop(process)
            if not isinstance(reason, subprocess.TimeoutExpired):
                raise
            return Ended("stopped by its limit", time.monotonic() - start)
    seconds = time.monotonic() - start
    if status == 0:
        return Ended("stopped after what was named" if setting.named else "done", seconds)
    return Ended("failed", seconds, last_words(log))


def stop(process: subprocess.Popen):
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE - 5)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][-300:] if lines else "without a word"
