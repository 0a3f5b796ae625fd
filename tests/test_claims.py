"""The ledger of claims: rules against intervals by hand, made-up results, measuring that resumes."""

import json
import math
import os
import random
import signal
import string
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from looped_eval.claims import (
    after_training,
    command,
    depth,
    fully_looped,
    functions,
    growth,
    laws,
    learning_rates,
    ledger,
    measuring,
    parcae,
    parcae_depths,
    parcae_laws,
    parcae_parts,
    probes,
    readout,
    readout_numbers,
    residual_scaling,
    theorems,
    trained_loops,
)
from looped_eval.claims.definition import Beyond, Claim, Measurement, Paper, Setting, each_seed, judged, load, row
from looped_eval.claims.frequencies import loss_of_frequencies
from looped_eval.claims.papers import PAPERS
from looped_eval.claims.rules import (
    AtLeast,
    AtMost,
    Differs,
    Effect,
    Estimate,
    Near,
    ratio_of_spreads,
    share,
    verdict,
)
from looped_eval.claims.slope import with_interval_of_fit
from looped_eval.claims.sweeps import shortened
from looped_eval.common.held_out import held_out_rows
from looped_eval.diagnose.growth import train_steps
from looped_eval.diagnose.readout_probes import future_signal, radial_gradient, token_norms
from looped_eval.diagnose.theorems import gaussian, of_stack
from looped_eval.halting.calibration import Measured
from looped_eval.tasks.answering import answer
from looped_recipes.common.intervals import level_of_chosen, over_seeds
from looped_recipes.common.measures import token_rms, update_parts
from looped_recipes.common.metrics import read_metrics
from looped_recipes.common.token_losses import next_token_losses
from modeling_looped import LoopedConfig, LoopedForCausalLM
from tests.helpers import run_of, tiny_model, tiny_tokenizer
from tests.helpers_processes import import_paths
from tests.helpers_recipes import RECIPES, runs_of_sweep


RESULTS = Path(__file__).parents[1] / "results"
TRAINED = readout_numbers.Trained("claims/made_up", "400", "small", frequencies=8.0)


@pytest.mark.parametrize("values", [[1.0, math.nan], [math.nan], [math.inf, math.nan, 1.0]])
def test_what_is_no_number_has_no_mean_over_seeds(values):
    with pytest.raises(ValueError, match="a mean over seeds needs numbers, got .*nan.*leave out"):
        over_seeds(values)


def test_students_interval_of_three_seeds():
    # by a table: t of 97.5 % and 2 degrees of freedom is 4.3027; the deviation of 1, 2, 3 is 1
    value, low, high, seeds = over_seeds([1.0, 2.0, 3.0])
    assert (value, seeds) == (2.0, 3)
    assert [high - value, value - low] == pytest.approx([4.3027 / 3**0.5] * 2, abs=1e-4)


@pytest.mark.parametrize(
    "rule, low, high, expected",
    [
        (Near(1.0, 0.1), 0.95, 1.05, "agrees"),
        (Near(1.0, 0.1), 0.85, 1.05, "open"),  # the band and more
        (Near(1.0, 0.1), 0.5, 0.6, "weaker"),
        (Near(1.0, 0.1), 1.2, 1.3, "disagrees"),
        (Near(1.0, 0.1), -0.2, 0.1, "disagrees"),
        (Near(-1.0, 0.1), -0.6, -0.5, "weaker"),
        (Near(0.0, 0.1), 0.2, 0.3, "disagrees"),
        (Effect(2.0), 1.0, 4.0, "agrees"),  # half and twice of the size
        (Effect(2.0), 0.9, 1.5, "sign agrees"),
        (Effect(2.0), 3.0, 4.5, "sign agrees"),
        (Effect(2.0), 4.5, 5.0, "stronger"),
        (Effect(2.0), 0.1, 0.3, "weaker"),
        (Effect(2.0), -0.1, 0.3, "not seen"),
        (Effect(2.0), -1.0, 3.0, "open"),
        (Effect(2.0), 0.0, 0.0, "not seen"),
        (Effect(2.0), -0.3, -0.1, "disagrees"),
        (Effect(), 0.1, 0.3, "agrees"),
        (Differs(), 0.1, 0.3, "agrees"),
        (Differs(), -0.3, -0.1, "agrees"),
        (Differs(), -0.1, 0.3, "open"),
        (Effect(), -0.1, 0.3, "open"),
        (Effect(), -0.3, -0.1, "disagrees"),
        (AtMost(4.0), 1.0, 4.0, "agrees"),
        (AtMost(4.0), 3.0, 5.0, "open"),
        (AtMost(4.0), 4.5, 5.0, "disagrees"),
        (AtLeast(2.0), 2.0, 3.0, "agrees"),
        (AtLeast(2.0), 1.0, 3.0, "open"),
        (AtLeast(2.0), 1.0, 1.9, "disagrees"),
    ],
)
def test_a_rule_sees_the_whole_interval(rule, low, high, expected):
    assert verdict(rule, Estimate((low + high) / 2, low, high, 3)) == expected


def test_one_seed_decides_nothing_and_seeds_without_a_number_are_left_out():
    assert verdict(Effect(), over_seeds([5.0])) == "open"
    read = each_seed(lambda content: content["of it"])
    assert read({"seeds": {"0": {"of it": 5.0}, "1": {"of it": None}}}) == Estimate(5.0, None, None, 1)
    assert read({"seeds": {"0": {"of it": None}}}) is None


@pytest.mark.parametrize(
    "values, rule, expected",
    [
        ([math.inf] * 2, Effect(), "agrees"),  # all seeds give the same
        ([math.inf] * 3, AtMost(1.0), "disagrees"),
        ([0.5, 0.6, math.inf], Effect(), "open"),  # of three, counting excludes nothing
        ([0.5, 0.6, 0.7, 0.5, 0.6, math.inf], Effect(), "agrees"),
        ([0.5, 0.6, 0.7, 0.5, 0.6, math.inf], AtMost(1.0), "open"),
        ([2.0, 3.0, 2.5, 2.0, 2.5, math.inf], AtMost(1.0), "disagrees"),
        ([0.5, 0.6, 0.7, 0.5, 0.6, -math.inf], Effect(), "open"),
        ([-math.inf] + [math.inf] * 5, Near(1.0, 0.5), "open"),
        ([math.inf], Effect(), "open"),
    ],
)
def test_a_seed_that_collapsed_counts(values, rule, expected):
    read = each_seed(lambda content: content)
    assert verdict(rule, read({"seeds": dict(enumerate([*values, math.inf - math.inf]))})) == expected


def test_runs_that_collapse_count_in_the_claims():
    """The loss of what collapsed is infinite; of what has none there is no number."""

    def seeds(*runs: dict) -> dict:
        return {"seeds": {"0": {"runs": list(runs)}}}

    lost, sound = {"loss": None, "loss_at": {"1": 9.0}}, {"loss": 3.0, "loss_at": {"1": 3.0}}
    full, windows = {"name": "full"}, {"name": "windows"}
    assert fully_looped.excess_over_full("windows")(seeds(full | sound, windows | lost)).value == math.inf
    assert fully_looped.excess_over_full("windows")(seeds(full | lost, windows | sound)).value == -100
    assert fully_looped.excess_over_full("windows")(seeds(full | lost, windows | lost)) is None

    parcae_64, plain = {"name": "parcae_64"}, {"name": "transformer_64"}
    assert parcae_laws.less_perplexity({"runs": [parcae_64 | lost, plain | sound]}, 64) == -math.inf
    assert parcae_laws.less_perplexity({"runs": [parcae_64 | sound, plain | lost]}, 64) == 100

    step, sequence = {"name": "step"}, {"name": "sequence"}
    gained = each_seed(parcae_depths.less_at(1, "sequence", "step"))
    assert gained(seeds(step | lost, sequence | sound)).value == math.inf
    assert each_seed(parcae_depths.less_of_own("sequence", "step"))(seeds(step | lost, sequence | lost)) is None

    drifts, holds = ({"model.preset": f"readout_{name}"} for name in ("per_loop_rmsnorm", "per_loop_raw"))
    content = seeds(drifts | lost | {"state_norm/loop_4": 1e9}, holds | sound | {"state_norm/loop_4": 1.0})
    systems = ("per_loop_rmsnorm", "per_loop_raw")
    assert TRAINED.over_seeds(readout_numbers.loss_more(*systems))(content).value == math.inf
    assert TRAINED.over_seeds(readout_numbers.norm_ratio(*systems))(content) is None
    assert not any(chart.is_empty for chart in readout.charts_of(TRAINED, systems)(content))

    runs = [{"model.residual_scaling": "none", "model.num_loops": n, f"residual_norm/loop_{n}": n} for n in (1, 2, 4)]
    assert residual_scaling.slope_after_steps({"runs": runs}, "none") == pytest.approx(1.0)
    runs[1].pop("residual_norm/loop_2")
    assert residual_scaling.slope_after_steps({"runs": runs}, "none") is None


def test_a_claim_is_not_measured_where_no_seed_has_its_number(tmp_path):
    made_up(tmp_path, [None])
    assert row(Paper("A paper"), claim_of(AtMost(1)), tmp_path).verdict == "not measured"
    for lacks, expected, counted in (("without", "not reachable here", 0), ("absent", "not seen", 1)):
        found = row(Paper("A paper"), claim_of(AtMost(1), **{lacks: "nothing to fit"}), tmp_path)
        assert found.verdict == expected and "nothing to fit" in ledger.cells(found)
        assert ledger.said([found]) == f"0 of {counted} claims that were measured agree; 1 {expected}."


def test_what_cannot_be_otherwise_is_not_counted(tmp_path):
    made_up(tmp_path, [0.5, 0.5])
    papers = [Paper("A paper", [], [claim_of(AtMost(1), by_construction=True), claim_of(Effect())])]
    rows = ledger.ledger(papers, tmp_path)
    assert [one.verdict for one in rows] == ["by construction", "agrees"]
    assert ledger.said(rows) == "1 of 1 claims that were measured agree."
    refuted = row(papers[0], claim_of(AtMost(0.1), by_construction=True), tmp_path)
    assert refuted.verdict == "disagrees"


def test_what_no_paper_claims_is_not_counted(tmp_path):
    made_up(tmp_path, [0.5, 0.5])
    ours = Paper("Ours", [], [claim_of(Effect()), claim_of(Effect())], is_published=False)
    rows = ledger.ledger([Paper("A paper", [], [claim_of(AtMost(0.1))]), ours], tmp_path)
    assert ledger.said(rows) == "0 of 1 claims that were measured agree; 1 disagree."
    assert "- Ours: 2 of 2 agree" in ledger.markdown(rows)
    assert '\n\nIt covers 1 paper: "A paper". What the papers of Huginn' in ledger.markdown(rows)


def test_the_interval_of_a_ratio_of_spreads():
    """By a table: F of 97.5 % and 5, 5 degrees of freedom is 7.146."""
    first, second = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    reach = math.log10(7.146) / 2
    assert ratio_of_spreads(first, second) == pytest.approx((1.0, 1.0 - reach, 1.0 + reach, 6), abs=1e-4)
    assert ratio_of_spreads(first, second[:1]) is None


@pytest.mark.parametrize(
    "count, of, low, high",
    [(0, 3, 0.0, 0.7076), (3, 3, 0.2924, 1.0), (0, 12, 0.0, 0.2646), (5, 10, 0.1871, 0.8129)],  # by a table
)
def test_the_interval_of_a_share(count, of, low, high):
    assert share(count, of) == pytest.approx((count / of, low, high, of), abs=1e-4)


def claim_of(rule, **more) -> Claim:
    return Claim("table 1", "it grows", "a number", "small", "claims/made_up", each_seed(lambda c: c), rule, **more)


def paper(rule=None) -> Paper:
    claims = [claim_of(rule or Effect(2.0)), Beyond("table 9", "it is large", "a thousand processors")]
    return Paper("A paper", [], claims, [])


def made_up(folder, values):
    content = {"command": "looped claims run", "commit": "abc", "seeds": dict(enumerate(values))}
    (folder / "claims").mkdir(exist_ok=True)
    (folder / "claims" / "made_up.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "values, expected, said",
    [
        ([1.9, 2.0, 2.1], "agrees", "1 of 1 claims that were measured agree; 1 not reachable here."),
        ([0.3, 0.31, 0.32], "weaker", "0 of 1 claims that were measured agree; 1 weaker, 1 not reachable here."),
        (
            [-0.3, -0.31, -0.32],
            "disagrees",
            "0 of 1 claims that were measured agree; 1 disagree, 1 not reachable here.",
        ),
        ([2.0], "open", "0 of 1 claims that were measured agree; 1 open, 1 not reachable here."),
        (None, "not measured", "0 of 0 claims that were measured agree; 1 not measured, 1 not reachable here."),
    ],
)
def test_the_ledger_of_made_up_results(tmp_path, values, expected, said):
    if values is not None:
        made_up(tmp_path, values)
    rows = ledger.ledger([paper()], tmp_path)
    assert [row.verdict for row in rows] == [expected, "not reachable here"]
    assert ledger.said(rows) == said
    for path in ledger.write_ledger([paper()], rows, tmp_path):
        text = path.read_text()
        assert said in text and expected in text and "a thousand processors" in text
        assert ("looped claims run" in text and "abc" in text) == (values is not None)


def counting(tmp_path, name: str, fails: bool = False) -> Measurement:
    """Writes a line for each time that it runs, and its number at the end."""

    def commands(setting: Setting, seed: int):
        folder = setting.of(name, seed)
        return [["counted", str(folder), str(seed), str(int(fails)), setting.text]]

    def read(folder):
        path = folder / "number.json"
        made_by = {"command": "counted", "commit": "abc", "versions": {}, "hardware": "none"}
        return {"value": json.loads(path.read_text()), "made_by": made_by} if path.is_file() else None

    return Measurement(name, commands, read)


COUNTED = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
with open(folder / "calls", "a") as file:
    file.write("called ")
if sys.argv[3] == "1":
    sys.exit(3)
(folder / "number.json").write_text(sys.argv[2])
"""


@pytest.fixture
def counted(tmp_path, monkeypatch):
    (tmp_path / "counted.py").write_text(COUNTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Setting(tmp_path / "runs", "mine/my.txt")


def test_measuring_goes_on_with_what_is_missing(tmp_path, counted, capfd):
    first, second = counting(tmp_path, "first"), counting(tmp_path, "second")
    number = tmp_path / "runs" / "first" / "seed_1" / "number.json"
    number.parent.mkdir(parents=True)
    number.write_text("7")
    assert measuring.run([first, second], counted, minutes=1) == []
    assert not (number.parent / "calls").exists()  # it was measured already
    measuring.run([first, second], counted, minutes=1)
    assert (tmp_path / "runs" / "second" / "seed_2" / "calls").read_text() == "called "
    said = [line.split(": python")[0] for line in capfd.readouterr().out.splitlines()]
    assert said == ["first, seed 0", "second, seed 0", "second, seed 1", "first, seed 2", "second, seed 2"]

    (path,) = measuring.collect([first], counted, tmp_path / "results")
    content = json.loads(path.read_text())
    assert content["seeds"] == {"0": {"value": 0}, "1": {"value": 7}, "2": {"value": 2}}
    assert content["command"] == "looped claims run runs/claims --only first --text my.txt"
    assert content["commit"] == "abc"


def test_seeds_of_an_earlier_folder_stay(tmp_path, counted):
    first, results = counting(tmp_path, "first"), tmp_path / "results"
    measuring.run([first], counted, minutes=1)
    (path,) = measuring.collect([first], counted, results)
    elsewhere = counted._replace(folder=tmp_path / "other")
    number = elsewhere.of("first", 1) / "number.json"
    number.parent.mkdir(parents=True)
    number.write_text("70")
    measuring.collect([first], elsewhere, results)
    content = json.loads(path.read_text())
    assert (
        content["seeds"] == {"0": {"value": 0}, "1": {"value": 70}, "2": {"value": 2}} and content["commit"] == "abc"
    )
    before = path.read_bytes()
    with pytest.raises(ValueError, match="holds other seeds, measured by .*--text my.txt`, not by .*--text his.txt`"):
        measuring.collect([first], elsewhere._replace(text="his.txt"), results)
    assert path.read_bytes() == before


def test_seeds_of_texts_with_other_frequencies_are_not_joined(tmp_path):
    made, path = {"command": "looped claims run", "commit": "abc"}, tmp_path / "first.json"
    first, other = ({"runs": [{"loss_of_frequencies": loss}]} for loss in (6.60627, 6.6597))
    path.write_text(json.dumps({**made, "seeds": {"0": first}}))
    with pytest.raises(ValueError, match="seeds of another text: .* is 6.6063, and 6.6597 for the new seeds"):
        measuring.joined(made, {"1": other}, path)
    joined = measuring.joined(made, {"1": {"runs": [{"loss_of_frequencies": 6.606271234}]}}, path)
    assert list(joined["seeds"]) == ["0", "1"]


def test_a_command_names_the_text_only_where_it_is_read(tmp_path, counted):
    first = counting(tmp_path, "first")._replace(commands=lambda setting, seed: [["theorem"]])
    made_by = [{"commit": "abc", "versions": {}, "hardware": "none"}]
    command = measuring.provenance_of(first, counted, made_by)["command"]
    assert command == "looped claims run runs/claims --only first"


def test_no_time_and_no_luck(tmp_path, counted):
    first = counting(tmp_path, "first")
    assert measuring.run([first], counted, minutes=0) == [f"first with seed {seed}" for seed in range(3)]
    assert measuring.collect([first], counted, tmp_path) == []
    with pytest.raises(RuntimeError, match="ended with status 3"):
        measuring.run([counting(tmp_path, "bad", fails=True)], counted, minutes=1)


def test_a_command_is_ended_with_its_time(tmp_path, counted):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    assert not measuring.run_command(["slow"], seconds=0.5)


def test_what_was_started_ends_with_the_command(tmp_path):
    """Told to end, `run` ends the training that it started, which else would go on by itself."""
    (tmp_path / "started.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    (tmp_path / "measures.py").write_text(
        "from looped_eval.claims.measuring import run_command as run\n"
        "from looped_recipes.common.command_line import run_command\n"
        "run_command(lambda arguments: run(['started'], seconds=60))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), import_paths()])}
    command = [sys.executable, "-m", "measures"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        started = int(process.stdout.readline())
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(started, 0)


def test_every_claim_reads_what_some_measurement_or_file_gives():
    names = [measurement.name for paper in PAPERS for measurement in paper.measurements]
    assert len(names) == len(set(names))
    sources = {claim.source for paper in PAPERS for claim in paper.claims if isinstance(claim, Claim)}
    earlier = {f"diagnose/{name}/lr_transfer" for name in ("transfer", "transfer_two_seeds", "factored")}
    earlier |= {
        "diagnose/theorems/theorem_1",
        "diagnose/pre_norm_block/residual_norm",
    }
    assert sources <= {f"claims/{name}" for name in names} | earlier


def test_the_ledger_in_results_is_that_of_its_json():
    rows = ledger.ledger(PAPERS, RESULTS)
    assert (RESULTS / "CLAIMS.md").read_text(encoding="utf-8") == ledger.markdown(rows)
    drawn = [(figure, load(RESULTS, figure.source)) for paper in PAPERS for figure in paper.figures]
    for figure, content in drawn:
        assert content is None or not any(chart.is_empty for chart in figure.draw(content)), figure.source


def test_an_unknown_measurement_is_refused(tmp_path):
    with pytest.raises(ValueError, match="measure needs --only and one of growth, .*, got 'core rates'"):
        command.main(["measure", str(tmp_path), "--only", "core", "rates"])
    with pytest.raises(ValueError, match="--only ratess: there is no such measurement; they are"):
        command.main(["run", str(tmp_path), "--only", "ratess"])


def test_a_ledger_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there are no measurements in .*: `looped claims run FOLDER` makes some"):
        command.main(["--results", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_seeds_that_a_measurement_does_not_have_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--only rates --seeds 7 8: it has the seeds 0 1 2"):
        command.main(["run", str(tmp_path), "--only", "rates", "--seeds", "7", "8"])


def test_a_run_of_a_sweep_is_kept_short():
    metrics = {"validation/loss_at_4": 2.0, "spectral_radius": 0.5, "tokens_per_second": 9.0, "loss": 2.5}
    line = {"name": "a", "optimizer.lr": 0.1, "loss": None, "diverged": "why", "metrics": metrics, "commit": "abc"}
    assert shortened(line) == {
        "name": "a",
        "optimizer.lr": 0.1,
        "loss": None,
        "diverged": "why",
        "loss_at": {"4": 2.0},
        "spectral_radius": 0.5,
    }


def test_published_shifts_of_the_best_rate():
    """Against the table in results/README.md."""
    content = load(RESULTS, "diagnose/transfer_two_seeds/lr_transfer")
    shift = learning_rates.moved("sqrt", (1, 1), (1, 4))(content)
    assert (round(shift.value, 2), *shift[1:]) == (-0.65, None, None, 2)  # the file has the mean curve alone


def test_a_shift_over_seeds_is_that_of_their_own_best_rates():
    """Against Student's interval of the differences between the vertices of the parabolas that numpy fits."""
    content = load(RESULTS, "diagnose/factored/lr_transfer")
    octaves = np.log2(content["result"]["rates"])
    vertices = []
    for layers in (3, 12):
        curve = learning_rates.curves_of(content, "factored", layers)["1"]["loss_of_seeds"]
        curvature, slope, _ = np.polyfit(octaves, np.array(curve), 2)
        vertices.append(-slope / (2 * curvature))
    moved = vertices[1] - vertices[0]
    reach = 4.302653 * moved.std(ddof=1) / 3**0.5
    shift = learning_rates.moved("factored", (3, 1), (12, 1))(content)
    assert shift[:3] == pytest.approx((moved.mean(), moved.mean() - reach, moved.mean() + reach)) and shift.seeds == 3


def test_a_shift_of_one_seed_has_no_interval():
    content = load(RESULTS, "diagnose/transfer/lr_transfer")
    shift = learning_rates.moved("sqrt", (1, 1), (1, 4))(content)
    assert (round(shift.value, 2), *shift[1:]) == (-0.87, None, None, 1)
    assert learning_rates.moved("none", (1, 1), (1, 8))(content) is None  # no rate trained


def test_spikes_and_rates_that_train(tmp_path):
    losses = [5.0] * 15 + [5.6] + [5.0] * 15
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert parcae_depths.spikes(read_metrics(tmp_path / "metrics.jsonl")) == 1

    def run(loss, radius, injection="concat", rate=1e-3, **parts):
        run = {"model.block_norm": "pre", "model.injection": injection, "loss": loss, "spectral_radius": radius}
        return {**run, "optimizer.lr": rate, **parts}

    runs = [run(6.0, 0.9), run(6.55, 2.0), run(None, 3.0), run(6.0, 0.5, "diagonal"), run(6.1, 0.7, "diagonal")]
    runs.append(run(6.0, 0.6, "diagonal", rate=6e-3))  # not one of the five that stand for the paper's
    runs.append(run(6.0, 0.8, "diagonal", **{"model.prelude_norm": True}))
    content = {"runs": runs, "loss_of_frequencies": 6.6}
    systems = parcae.BASE, parcae.DIAGONAL, parcae.PARCAE
    assert [parcae.trained_rates(content, system) for system in systems] == [1, 2, 1]
    assert parcae.radius_beyond_one(content) == pytest.approx(1.0)
    assert parcae.radius_of_trained(content) == 0.9
    assert parcae.largest_radius(content) == 0.8


def test_the_highest_rate_that_trains():
    def run(rate, loss, injection="concat", prelude_norm=False):
        run = {"model.block_norm": "pre", "model.injection": injection, "model.prelude_norm": prelude_norm}
        return {**run, "optimizer.lr": rate, "loss": loss}

    parcaes = run(8e-3, 6.0, "diagonal", True), run(16e-3, None, "diagonal", True)
    runs = [run(1e-3, 6.0), run(2e-3, 6.1), run(8e-3, 6.6), *parcaes, run(32e-3, 6.0, "diagonal")]
    content = {"seeds": {"0": {"runs": runs, "loss_of_frequencies": 6.6}}}
    # between 8e-3 and 16e-3 over between 2e-3 and 8e-3
    assert parcae.octaves_above(content, parcae.BASE) == pytest.approx((2.0, 0.0, 3.0, 1))
    assert parcae.octaves_above(content, parcae.NORMED) is None  # no such run
    content["seeds"]["0"]["runs"] = runs[:4]  # Parcae trains at the last rate
    assert parcae.octaves_above(content, parcae.BASE) == pytest.approx((2.0, 0.0, math.inf, 1))


@pytest.mark.parametrize(
    "after_one, spikes, gain, fewer",
    [
        ((3.05, 3.04), (0, 0), None, None),  # depth is not used, nothing spikes
        ((3.50, 3.04), (0, 2), 0.46, -2.0),
        ((3.05, math.inf), (1, 0), -math.inf, 1.0),
    ],
)
def test_sampling_says_something_only_where_depth_is_used(after_one, spikes, gain, fewer):
    runs = [
        {"name": name, "loss": 3.0 if math.isfinite(loss) else None, "loss_at": {"1": loss, "8": 3.0}}
        for name, loss in zip(("step", "sequence"), after_one)
    ]
    content = {"seeds": {"0": {"runs": runs, "spikes": dict(zip(("step", "sequence"), spikes))}}}
    gained = parcae_depths.where_depth_is_used(parcae_depths.less_at(1, "sequence", "step"))
    read, less = gained(content), parcae_depths.fewer_spikes(content)
    assert read is None if gain is None else read.value == pytest.approx(gain)
    assert less is None if fewer is None else less.value == fewer


def test_runs_of_the_same_seed_are_compared():
    def run(system, loss):
        return {"model.preset": system, "model.num_loops": 12, "loss": loss}

    by_seed = ([("lt", 6.0), ("flt", 4.0)], [("flt", 4.5), ("lt", 9.0)], [("lt", None), ("flt", None)])
    content = {"seeds": {str(seed): {"runs": [run(*each) for each in runs]} for seed, runs in enumerate(by_seed)}}
    estimate = fully_looped.between(fully_looped.excess, ("lt", 12), ("flt", 12))(content)
    assert (
        estimate.value == pytest.approx(75.0) and estimate.seeds == 2
    )  # of 50 % and 100 %; both collapsed in the last


def test_seeds_without_a_system_or_a_probe_are_left_out():
    def run(system, loss):
        return {"model.preset": f"readout_{system}", "loss": loss}

    both = {"runs": [run("terminal_rmsnorm", 3.0), run("terminal_penalty", 2.5)]}
    content = {"seeds": {"0": {"runs": [run("terminal_rmsnorm", 3.0)]}, "1": both}}
    number = readout_numbers.loss_more("terminal_rmsnorm", "terminal_penalty")
    assert TRAINED.over_seeds(number)(content) == Estimate(0.5, None, None, 1)


def readout_seed(**systems: dict) -> dict:
    """Of made-up runs: their losses over depth and their probes."""
    runs = [
        {"name": name, "model.preset": f"readout_{name}", "loss": losses["4"], "loss_at": losses}
        for name, losses in ((name, found["loss_at"]) for name, found in systems.items())
    ]
    return {"runs": runs, "probes": {name: found.get("probes", {}) for name, found in systems.items()}}


def test_a_model_that_learnt_nothing_says_nothing(tmp_path):
    """What is flat over depth because it knows no more than how often tokens come has no verdict."""

    def seed(loss: float, **more) -> dict:
        found = readout_seed(inter_loop_norm={"loss_at": {"4": loss}, "probes": {"loss_by_loop": [loss] * 8}})
        return {**found, "runs": [run | more for run in found["runs"]]}

    claim, paper = readout.of_a_norm_between_loops(TRAINED), Paper("A paper")
    made_up(tmp_path, [seed(7.95), seed(8.1)])  # of 8.0
    found = row(paper, claim, tmp_path)
    assert found.verdict == "not reachable here" and claim.without in ledger.cells(found)
    made_up(tmp_path, [seed(7.5), seed(7.4), seed(7.95)])
    assert row(paper, claim, tmp_path).estimate == Estimate(0.0, 0.0, 0.0, 2)
    made_up(tmp_path, [seed(7.5, loss_of_frequencies=7.55), seed(7.4, loss_of_frequencies=7.55)])  # what the run tells
    assert row(paper, claim, tmp_path).estimate == Estimate(0.0, None, None, 1)


def test_numbers_of_the_readout_by_hand():
    raw = {"radial_fraction": 0.2, "clamp_cost": -0.02, "clamp_norm_ratio": 0.75, "growth_per_loop": -0.5}
    raw |= {"mean_over_median_norm": 100.0, "halting": {"loops": 2.5, "perplexity_ratio": 1.02}}
    normed = {"radial_fraction": 2e-8, "radial_fraction_of_first": 2e-5, "growth_per_loop": 50.0}
    normed |= {"halting": {"loops": 1.0, "perplexity_ratio": 1.0}, "loss_by_loop": [3, 3, 3, 2.75, 3, 3, 3, 2.5]}
    content = readout_seed(
        per_loop_raw={"loss_at": {"1": 3.0, "2": 2.75, "3": 2.25, "4": 2.0}, "probes": raw},
        per_loop_rmsnorm={"loss_at": {"1": 2.5, "2": 3.0, "3": 3.0, "4": 2.75}, "probes": normed},
    )
    n, raw, normed = readout_numbers, "per_loop_raw", "per_loop_rmsnorm"
    by_hand = [
        (n.gap(raw), 1.0),
        (n.gap(raw, 2), 0.75),
        (n.loss_more(normed, raw), 0.75),
        (n.loss_more(normed, raw, 1), -0.5),
        (n.least_loss_more(normed, raw), -0.5),
        (n.probe_ratio("radial_fraction", raw, normed), 7.0),
        (n.probe_ratio("growth_per_loop", normed, raw), 2.0),
        (n.radial_fractions_of_loops(normed), 3.0),
        (n.more_halting_loops(raw, normed), 1.5),
        (n.cost_of_halting((raw, normed)), 2.0),
        (n.change_beyond_trained_depth(normed), -0.25),
    ]
    for number, expected in by_hand:
        assert number(content) == pytest.approx(expected)
    of_claims = {
        "CE(1) - CE(4), per loop raw less": 0.75,  # the normed one loses 0.25, which counts as a change
        "log10 of mean over median, per loop raw": 2.0,
        "part of the norm, per loop raw": 0.25,
        "loss with the scale held less that without, per loop raw": -0.02,
        "mean loops, per loop rmsnorm": 1.0,
    }
    claims = [*readout.about_four(TRAINED), *readout.of_halting(TRAINED)]
    for begins, expected in of_claims.items():
        (claim,) = (claim for claim in claims if claim.number.startswith(begins))
        assert claim.read({"seeds": {"0": content}}).value == pytest.approx(expected)


def test_losses_of_table_2_are_means_over_the_loops_that_have_one():
    """As the release counts them: by hand, 2.5 in the mean over four loops, beside 2.25 after the last."""
    losses = {"1": 3.0, "2": 2.75, "3": 2.0, "4": 2.25}
    content = readout_seed(per_loop_raw={"loss_at": losses}, terminal_raw={"loss_at": losses | {"4": 2.125}})
    made_up = {"command": "looped claims run", "commit": "abc", "seeds": {"0": content}}
    (claim,) = (c for c in readout.of_table_2(TRAINED) if c.says.startswith("behind a raw readout a loss at every"))
    assert claim.read(made_up).value == pytest.approx(2.5 - 2.125)
    assert claim.number.startswith("mean over loops of the loss of per loop raw less loss of terminal raw")


def test_probes_that_seeds_lack_are_not_measured(tmp_path):
    probed = {"p99_over_median_norm": 10.0, "update": 200.0}, {"p99_over_median_norm": 2.0, "update": 2.0}
    for probes_of, expected in ((({}, {}), "not measured"), (probed, "open")):
        normed, raw = ({"loss_at": {"4": 2.0}, "probes": each} for each in probes_of)
        made_up(tmp_path, [readout_seed(per_loop_rmsnorm=normed, per_loop_raw=raw)])
        rows = [row(Paper("A paper"), claim, tmp_path) for claim in readout.of_the_update(TRAINED)]
        assert [one.verdict for one in rows] == [expected] * 2
    assert [one.estimate.value for one in rows] == pytest.approx([1.0, 2.0])  # log10 of 10, and of 200 over 2


def test_claims_of_both_trainings_are_counted_at_the_longer_one():
    """And results/README.md tells how many verdicts the shorter one gives otherwise."""
    short = [
        *readout.about_four(readout.SHORT),
        *readout.about_others(readout.SHORT),
        *readout.of_halting(readout.SHORT),
    ]
    long = [
        *readout.about_four(readout.LONG),
        *readout.about_others(readout.LONG_REST),
        *readout.of_halting(readout.LONG_ROWS),
    ]
    counted = [(claim.source, claim.number) for claim in readout.READOUT.claims if isinstance(claim, Claim)]
    assert len({number for _, number in counted}) == len(counted)
    assert {(claim.source, claim.number) for claim in long} <= set(counted)
    verdicts = [[row(readout.READOUT, claim, RESULTS).verdict for claim in claims] for claims in (short, long)]
    otherwise = sum(first != second for first, second in zip(*verdicts, strict=True))
    said = " ".join((RESULTS / "README.md").read_text(encoding="utf-8").split())
    assert f"After 400 steps {otherwise} of {len(long)} verdicts are others" in said


def test_models_of_two_sweeps_of_a_seed_are_compared(tmp_path):
    """Also where only one of the sweeps was run in this folder."""
    made_by = {"command": "trained", "commit": "abc", "versions": {}, "hardware": "none"}

    def collected(sweep: str, seed: int, system: str, loss: float):
        folder = tmp_path / f"runs of {sweep}" / sweep / f"seed_{seed}"
        folder.mkdir(parents=True)
        line = {"name": system, "model.preset": f"readout_{system}", "loss": loss, "metrics": {}, **made_by}
        (folder / "results.jsonl").write_text(json.dumps(line) + "\n")
        (folder / "probes.json").write_text(json.dumps({system: {"scale_range": loss}, **made_by}))
        (folder / "frequencies.json").write_text(json.dumps({"loss": 6.0, **made_by}))
        chosen = [m for m in readout.READOUT.measurements if m.name == sweep]
        measuring.collect(chosen, Setting(folder.parents[1], "embedded"), tmp_path)

    collected("table_2_rest", 0, "per_loop_penalty", 2.5)
    collected("table_2_rest", 1, "per_loop_penalty", 2.0)
    number = TRAINED.over_seeds(readout_numbers.loss_more("per_loop_rmsnorm", "per_loop_penalty"))
    assert number(load(tmp_path, "table_2_rest")) is None  # those that it is compared to are not measured
    collected("table_2", 0, "per_loop_rmsnorm", 3.0)
    content = load(tmp_path, "table_2_rest")
    assert number(content) == Estimate(0.5, None, None, 1)
    assert readout_numbers.probe(content["seeds"]["0"], "per_loop_rmsnorm", "scale_range") == 3.0
    assert {run["loss_of_frequencies"] for run in content["seeds"]["0"]["runs"]} == {6.0}
    others = json.loads((tmp_path / "table_2.json").read_text())
    (tmp_path / "table_2.json").write_text(json.dumps({**others, "command": others["command"] + " --text my.jsonl"}))
    with pytest.raises(ValueError, match="table_2.json, but was measured on another text.*my.jsonl"):
        load(tmp_path, "table_2_rest")


def test_gradients_that_swing_and_runs_that_collapse():
    def seed(*losses: float | None) -> dict:
        runs = [{"model.preset": "lt", "model.num_loops": k, "loss": loss} for k, loss in zip((3, 6, 9, 12), losses)]
        return {"runs": runs, "loss_of_frequencies": 6.6}

    run = {"gradient_norms": {"core.0.mlp": [1e-9, 0.1, 10.0], "lm_head": [5.0, 1.0, 1.0]}}
    assert fully_looped.swing(run, "core.0.mlp") == pytest.approx(
        2.0
    )  # the first step, before the MLP learns, is left out
    content = {
        "seeds": {"0": seed(5.0, 5.0, 5.0, 6.55), "1": seed(5.0, 6.49, 5.0, 5.0), "2": seed(5.0, 5.0, 5.0, None)}
    }
    collapsed = fully_looped.share_of_runs(False, ("lt",), (3, 6, 9, 12))(content)
    assert collapsed.value == pytest.approx(2 / 12) and collapsed.seeds == 12
    # of three of three runs, by hand: the lowest share is the third root of 0.025
    assert fully_looped.share_of_runs(True, ("lt",), (3,))(content).low == pytest.approx(0.025 ** (1 / 3))


@pytest.mark.parametrize("losses, expected", [([None] * 6, "agrees"), ([5.0] * 6, "disagrees"), ([None, 5.0], "open")])
def test_an_rdm_that_diverges_in_six_seeds_is_what_table_4_says(losses, expected):
    seeds = {n: {"loss_of_frequencies": 6.0, "runs": [{"name": "rdm", "loss": loss}]} for n, loss in enumerate(losses)}
    claim = parcae_parts.part_claims()[0]
    assert judged(claim, claim.read({"seeds": seeds})) == expected


def test_runs_of_twelve_loops_that_diverge_at_once_do_not_end_the_ledger():
    content = load(RESULTS, "claims/twelve_loops")
    for system, loops in (("lt", 12), ("flt", 9), ("flt_residual", 12)):
        run = fully_looped.run_at(content["seeds"]["0"], system, loops)
        for name in [name for name in run if name.startswith(("residual_norm/", "state_norm/"))]:
            del run[name]
        run |= {"loss": None, "loss_at": {}, "gradient_norms": dict.fromkeys(fully_looped.BLOCKS, [9.0])}
    claims = [one for one in fully_looped.FULLY_LOOPED.claims if getattr(one, "source", "") == fully_looped.SYSTEMS]
    found = {one.number: one.read(content) for one in claims}
    assert found["loss after 1 loop less that after all"].seeds == 5  # of six
    assert not any(chart.is_empty for chart in fully_looped.charts(content))


def test_figure_4_has_the_systems_of_its_sweep():
    """All but FLT, which trains there: LT, whose collapse is figure 2's, LT_i and LT_ai; FLT_res is not among them."""
    presets = [run.recipe.model["preset"] for run in runs_of_sweep(RECIPES / "fully_looped/figure_4.sweep.yaml")]
    runs = [{"model.preset": preset, "loss": 6.0 if preset == "flt" else 7.0} for preset in presets]
    content = {"seeds": {"0": {"runs": runs, "loss_of_frequencies": 6.6}}}
    (claim,) = (claim for claim in fully_looped.collapse_claims() if claim.where == "figure 4")
    assert claim.read(content)[::3] == (0.0, len({*presets} - {"lt", "flt"}))


def test_what_loops_gain_where_they_are_used():
    def content(after_three: float) -> dict:
        losses = {"1": 5.5, "3": after_three, "9": 5.0, "12": 5.0}
        runs = [{"model.preset": "flt", "model.num_loops": k, "loss_at": losses} for k in (9, 12)]
        return {"seeds": {"0": {"runs": runs}, "1": {"runs": runs}}}

    pairs = {9: (3, 9), 12: (3, 12)}
    assert fully_looped.gained(pairs, 0.001)(content(5.0005)) is None
    assert fully_looped.gained(pairs, 0.001)(content(5.2)) == pytest.approx((0.2, 0.2, 0.2, 2))
    assert fully_looped.gained({9: (1, 9)})(content(5.0)).value == pytest.approx(0.5)


def test_every_cell_of_the_small_models_is_compared():
    says = [claim.says for claim in fully_looped.bits_claims()]
    assert len(says) == 2 + 8 and "at 3 loops FLT has 0.1 % more bits per byte than LT_i, small" in says
    assert all(claim.rule.published > 0 for claim in fully_looped.bits_claims())


def test_norms_of_the_state_of_two_systems():
    norms = {"lt": {1: 20.0, 3: 100.0, 12: 1000.0}, "flt": {1: 2.0, 3: 1.0, 12: 10.0}}
    runs = [
        {"model.preset": system, **{f"residual_norm/loop_{loop}": norm for loop, norm in of.items()}}
        for system, of in norms.items()
    ]
    content = {"runs": runs}
    assert fully_looped.larger_state(content, (1,)) == pytest.approx(1.0)
    assert fully_looped.larger_state(content, (1, 3, 12)) == pytest.approx(5 / 3)
    assert fully_looped.state(content, "lt", 12) - fully_looped.state(content, "lt", 3) == pytest.approx(1.0)


def four_panels(loss) -> dict:
    """Of loss(rule, layers, loops, k) at the rate 1e-3 * 2 ** k."""
    runs = [
        {
            "model.residual_scaling": rule,
            "model.num_core_layers": layers,
            "model.num_loops": loops,
            "optimizer.lr": 1e-3 * 2**k,
            "loss": loss(rule, layers, loops, k),
        }
        for rule, layers in learning_rates.PANEL.values()
        for loops in learning_rates.LOOPS
        for k in range(5)
    ]
    return {"runs": runs}


def valley(rule: str, layers: int, loops: int, k: int) -> float:
    """A parabola in log2 rate, whose lowest point is known: of 1/sqrt(N) it falls by an octave up to N = 8."""
    best = {("sqrt", 2): 2.0, ("linear", 2): 3.0, ("factored", 4): 3.0, ("factored", 8): 3.5}[rule, layers]
    return 3.0 + 0.1 * (k - best + (loops == 8) * (rule == "sqrt")) ** 2


def test_best_rates_of_the_four_panels():
    content = four_panels(valley)
    assert learning_rates.octaves(content, ("a", 1), ("a", 8)) == pytest.approx(-1.0)
    assert learning_rates.octaves(content, ("b", 1), ("b", 8)) == pytest.approx(0.0, abs=1e-6)
    assert learning_rates.octaves(content, ("b", 8), ("d", 8)) == pytest.approx(0.5)
    assert learning_rates.more_under_root(content, 8) == pytest.approx(1.0)
    assert learning_rates.less_at_8(content) == pytest.approx(0.0)


def test_a_best_rate_at_the_end_of_the_grid_bounds_the_shift():
    falling = four_panels(
        lambda rule, layers, loops, k: 4.0 - 0.1 * k if loops == 1 else valley(rule, layers, loops, k)
    )
    assert learning_rates.octaves(falling, ("b", 1), ("b", 8)) == pytest.approx(3.0 - 4.0)  # from the last, k = 4


def test_curves_that_learnt_next_to_nothing_have_no_best_rate():
    """Two rates below the line are fewer than a parabola needs."""

    def loss(rule, layers, loops, k):
        untrained = rule == "sqrt" and loops == 8 and k > 1
        return 4.4 if untrained else valley(rule, layers, loops, k)

    content = four_panels(loss)
    assert learning_rates.octaves(content, ("a", 1), ("a", 8)) is None
    assert learning_rates.more_under_root(content, 8) is None
    assert learning_rates.less_at_8(content) is None
    assert learning_rates.more_under_root(content, 4) == pytest.approx(0.0, abs=1e-6)
    assert learning_rates.narrower(content, ("a", 1), ("a", 8)) == pytest.approx(3.0)  # of k = 4 and 1
    collapsed = {"runs": [run | {"loss": None} for run in content["runs"]]}
    assert (
        learning_rates.less_at_8(collapsed) is None and learning_rates.narrower(collapsed, ("b", 1), ("d", 8)) is None
    )


def test_the_interval_of_a_fit():
    # by a table: t of 97.5 % and 5 degrees of freedom is 2.5706
    found = {"slope": 1.0, "standard_error": 0.1, "points": 7}
    assert with_interval_of_fit(found, 2) == pytest.approx((1.0, 1.0 - 0.25706, 1.0 + 0.25706, 2), abs=1e-4)
    assert with_interval_of_fit({"slope": None, "why": "a run diverged"}, 2) is None
    falls = {"unshared": {"linear": {"slope": {"last_step": found | {"slope": -1.0}}}}, "seeds": 2}
    estimate = residual_scaling.fall_of_unshared({"result": falls}, "linear")
    assert estimate == pytest.approx((1.0, 1.0 - 0.25706, 1.0 + 0.25706, 2), abs=1e-4)


def test_updates_of_each_step(monkeypatch):
    """At the second of two steps the change grows as N^2, not as N. By a table, t of 97.5 % and 1 degree of freedom is
    12.706, and of 98.75 % 25.452."""

    def seed(factor: float) -> dict:
        none = [[1.0, 2.0, 4.0], [1.0, 4.0 * factor, 16.0 * factor**2]]
        linear = [[1.0, 2.0, 0.5], [1.0, 3.0, 2.0]]
        return {"loops": [1, 2, 4], "steps": 2, "rules": {"none": {"updates": none}, "linear": {"updates": linear}}}

    monkeypatch.setattr(residual_scaling, "STEPS", 2)
    of_one_step = seed(1.0) | {"steps": 1}
    of_one_step["rules"] = {rule: {"updates": found["updates"][:1]} for rule, found in of_one_step["rules"].items()}
    content = {"seeds": {"0": seed(1.0), "1": seed(2.0), "2": of_one_step}}
    assert residual_scaling.exponent_at("none", "updates", 0)(content) == pytest.approx((1.0, 1.0, 1.0, 3))
    error = 0.5  # of the mean of 2 and 3
    assert residual_scaling.farthest_step(content, "none") == pytest.approx(
        (2.5, 2.5 - 25.452 * error, 2.5 + 25.452 * error, 2), abs=1e-3
    )
    assert residual_scaling.exponent_at("none", "updates", 1)(content) == pytest.approx(
        (2.5, 2.5 - 12.706 * error, 2.5 + 12.706 * error, 2), abs=1e-3
    )
    assert residual_scaling.widest_step(content) == pytest.approx((4.0, 4.0, 4.0, 2))
    content["seeds"]["1"]["rules"]["none"]["updates"][0][0] = math.inf
    assert residual_scaling.farthest_step(content, "none") is None
    of_seed = {"loops": [1, 2, 32], "rules": {"linear": {"updates": [[0.5, 9.0, 2.0]]}}}
    assert residual_scaling.doublings_until(of_seed, 32) == 2.0


def test_cosines_are_averaged_before_the_largest_is_taken():
    """Each seed has 0.4; the averages are 0, -0.3 and 0.1."""
    seeds = (
        [[1.0, 0.4, -0.2], [0.4, 1.0, 0.4], [-0.2, 0.4, 1.0]],
        [[1.0, -0.4, -0.4], [-0.4, 1.0, -0.2], [-0.4, -0.2, 1]],
    )
    content = {"seeds": {str(i): {"unshared": {"cosine_of_every_eighth": one}} for i, one in enumerate(seeds)}}
    assert residual_scaling.largest_of_mean(content) == pytest.approx((0.3, None, None, 2))


def test_increments_after_training():
    cosine = [[1.0, 0.4, 0.6, -0.1], [0.4, 1.0, 0.2, 0.1], [0.6, 0.2, 1.0, 0.3], [-0.1, 0.1, 0.3, 1.0]]
    content = {"by_loops": {"4": {"cosine": cosine, "norm": [1.0, 6.0]}, "2": {"cosine": [], "norm": [1.0, 5.0]}}}
    assert trained_loops.before_the_last(content, 4) == pytest.approx(0.4)
    assert trained_loops.with_the_last(content, 4) == pytest.approx(0.1)
    assert trained_loops.spread_of_norms(content) == pytest.approx(1.2)


def test_perplexity_below_a_transformers():
    losses = {"parcae_64": 3.0, "transformer_64": 3.1}
    content = {"runs": [{"name": name, "loss": loss} for name, loss in losses.items()]}
    assert parcae_laws.less_perplexity(content, 64) == pytest.approx(9.516, abs=1e-3)  # 1 - exp(-0.1)


def test_forms_over_loops_and_floors_that_can_be_told():
    misfits = {"exponential": 1e-8, "power": 1e-7, "power_without_floor": 1e-4}
    content = {"misfits": misfits, "floor_percent": 0.1}
    assert parcae_laws.over_exponential(content, "power") == pytest.approx(1.0)
    assert parcae_laws.over_exponential(content, "shifted_power") is None
    assert parcae_laws.floor_percent(content) == 0.1
    assert parcae_laws.percent_of_misfit(1e-4) == pytest.approx(10.05)  # linear: 1e-3 * (0.1005 - 0.0005)
    beyond = {"misfits_beyond": {"exponential": 1e-6, "shifted_power": 1e-4}}
    assert parcae_laws.over_exponential(beyond, "shifted_power", "misfits_beyond") == pytest.approx(2.0)
    decays = {"one": {"misfit": 1.0, "misfit_beyond": 2.0}, "none": {"misfit": 10.0, "misfit_beyond": 2.0}}
    assert parcae_laws.without_mean_depth({"forms_of_decay": decays}, "misfit") == pytest.approx(1.0)
    assert parcae_laws.without_mean_depth({"forms_of_decay": decays}, "misfit_beyond") == 0
    assert parcae_laws.without_mean_depth({"forms_of_decay": {"one": decays["one"]}}, "misfit") is None
    flat = {"misfits": misfits | {"power_without_floor": 3e-7}, "floor_percent": 0.1}
    assert parcae_laws.percent_of_misfit(3e-7) == pytest.approx(0.0775, abs=1e-4)  # half of a square
    assert parcae_laws.floor_percent(flat) is None and parcae_laws.floor_percent({}) is None


def small_config(**fields) -> LoopedConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_core_layers": 2}
    return LoopedConfig.from_preset("residual_scaling", vocab_size=64, **sizes, **fields)


def test_norms_over_loops_are_those_of_a_pass():
    found = growth.growth(1, small_config(), (1, 2, 4), steps=1)
    for rule in growth.RULES:
        for loops, norm in zip(found["loops"], found["rules"][rule]["R"][0]):
            model = growth.built(growth.looped(small_config(), loops, rule), 1)
            state = growth.trace(model, {"input_ids": growth.random_tokens(model.config, 1, 32, 1)}).states[-1]
            assert norm == pytest.approx(state.square().mean(-1).sqrt().mean().item(), rel=1e-5)


def test_layers_drawn_one_by_one_are_those_of_one_stack():
    """Against the same copies in one model."""
    config = small_config()
    ids = growth.random_tokens(config, 1, 8, 0)
    states = growth.unshared_states(config, 3, 0, ids)
    stack = growth.built(growth.unshared(config, 3, "none"), 0)
    one = growth.with_fields(stack.config, num_core_layers=2)
    stack.model.embed_tokens.load_state_dict(growth.built(one, 0).model.embed_tokens.state_dict())
    for copy in range(3):
        drawn = growth.built(one, 1000 * (copy + 1))
        for layer in range(2):
            stack.model.core[2 * copy + layer].load_state_dict(drawn.model.core[layer].state_dict())
    seen = growth.trace(stack, {"input_ids": ids})
    for state, expected in zip(states, seen.stages[0][::2], strict=True):
        torch.testing.assert_close(state, expected)


class Words:
    def __call__(self, text, return_tensors=None):
        rows = [[int(word) for word in one.split()] for one in ([text] if isinstance(text, str) else text)]
        ids = torch.tensor(rows)
        return type("Encoded", (), {"input_ids": ids if return_tensors else rows[0]})()


def test_answers_of_several_words_and_where_they_stop():
    """Against the logits, word by word."""

    torch.manual_seed(0)
    model = LoopedForCausalLM(small_config(num_loops=3)).eval()
    questions = [{"text": "1 2 3", "choices": ["4 5", "6 7"], "answer": i % 2} for i in range(2)]
    model.lm_head.weight.data.mul_(500)  # sure of what it says
    found = answer(model, Words(), questions)
    for loop in range(3):
        right = []
        for words in ([4, 5], [6, 7]):
            logits = model(torch.tensor([[1, 2, 3, *words]]), num_loops=loop + 1, use_cache=False).logits[0]
            right.append(logits[2].argmax() == words[0] and logits[3].argmax() == words[1])
        assert found["accuracy"][loop] == sum(map(bool, right)) / 2
    assert 1 <= found["exit_loops"] <= 3


# the measuring functions


def held_out_run(folder: Path, model, words: int = 120, **data) -> Path:
    """A run whose model is this one, and whose held-out text has so many words of a to z."""
    model.save_pretrained(folder / "final")
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    text = " ".join(random.Random(0).choices(string.ascii_lowercase, k=words))
    return run_of(folder, folder / "tokenizer", text, document_tokens="none", **data)


def test_the_loss_of_token_frequencies(tmp_path):
    """By hand: counts of the text that was trained on, one more of each of 30 tokens; losses of what was held out."""
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    run = run_of(tmp_path, tmp_path / "tokenizer", "z z z y z z a z", document_tokens="none")
    trained, never = -math.log((100 + 1) / (400 + 30)), -math.log(1 / (400 + 30))  # 100 each of z, y, x and w
    assert loss_of_frequencies(run) == pytest.approx((7 * trained + never) / 8)


def test_the_seed_and_the_text_reach_every_command(tmp_path):
    setting = Setting(tmp_path / "runs", "mine.txt")
    (tmp_path / "runs" / "text").mkdir(parents=True)
    for measurement in (each for paper in PAPERS for each in paper.measurements):
        commands, folder = measurement.commands(setting, 5), str(setting.of(measurement.name, 5))
        assert commands
        for module, *arguments in commands:
            if module == "looped_recipes.sweep":
                assert {"training.seed=5", f"training.output_dir={folder}"} <= set(arguments)
                own = str(setting.folder / "text" / f"{measurement.name}.jsonl")
                source = own if measurement.name in depth.TRAININGS else "mine.txt"
                assert f"data.source={source}" in arguments
            elif module == "looped_eval.claims":
                assert arguments[:2] == ["measure", folder] and arguments[-2:] == ["--seed", "5"]
            else:
                assert module == "looped_eval.tasks.generate" and arguments[-1] == own_text(setting, measurement)


def own_text(setting: Setting, measurement: Measurement) -> str:
    return str(setting.folder / "text" / f"{measurement.name}.jsonl")


def test_a_task_is_generated_once_then_trained_and_asked(tmp_path):
    setting = Setting(tmp_path, "mine.txt")
    modules = [module for module, *_ in depth.commands_of("addition")(setting, 0)]
    assert modules == ["looped_eval.tasks.generate", "looped_recipes.sweep", "looped_eval.claims"]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "addition.jsonl").touch()
    train, ask = depth.commands_of("addition")(setting, 0)
    assert ask[-4:] == ["--only", "addition", "--seed", "0"]
    of_training = depth.TRAININGS["addition"]
    assert f"training.steps={of_training.steps}" in train and set(of_training.model) <= set(train)


def test_a_function_is_measured_with_the_seed_that_is_asked_for(tmp_path, monkeypatch):
    for name in ("growth", "cosines", "theorems"):
        monkeypatch.setattr(functions, name, lambda seed: {"of_seed": seed})
        command.main(["measure", str(tmp_path), "--only", name, "--seed", "3"])
        assert functions.result_of(name)(tmp_path)["of_seed"] == 3


def test_probes_are_those_of_the_diagnostics(tmp_path, monkeypatch):
    """Each number against the diagnostic that it is read from, of the first held-out rows."""
    monkeypatch.setattr(probes, "ROWS", 2)
    monkeypatch.setattr(probes, "LENGTH", 8)
    monkeypatch.setattr(probes, "FAR", 14)
    monkeypatch.setattr(probes, "halting", lambda model, run: "halted")
    model = tiny_model(preset="readout_per_loop_raw", vocab_size=30, num_loops=4)
    run = held_out_run(tmp_path, model)
    (found,) = probes.probes({"raw": run}).values()
    batch = {"input_ids": held_out_rows(run, 2, 8)[0]}
    radial, norms = radial_gradient(model, batch), token_norms(model, batch)
    assert found["radial_fraction"] == pytest.approx(radial["r"][3]) and len(radial["r"]) == 4
    assert found["radial_fraction_of_first"] == pytest.approx(radial["r"][0])
    assert found["radial_derivative"] == pytest.approx(radial["g"][3])
    assert found["mean_over_median_norm"] == pytest.approx(norms["mean"] / norms["median"])
    assert found["p99_over_median_norm"] == pytest.approx(norms["p99"] / norms["median"])
    losses = [
        next_token_losses(model(**batch, num_loops=k).logits, batch["input_ids"]).mean().item() for k in range(1, 9)
    ]
    assert found["loss_by_loop"] == pytest.approx(losses, rel=1e-4) and found["halting"] == "halted"

    states = growth.trace(model, batch, 14).states
    parts = [update_parts(*pair) for pair in zip(states[9:], states[10:])]  # loops 10 to 13
    radial, whole = (fmean(part[name].mean().item() for part in parts) for name in ("a_rad", "b"))
    grown = (token_rms(states[13]) - token_rms(states[9])).mean().item() / 4
    assert (found["growth_per_loop"], found["update"]) == pytest.approx((radial, whole), rel=1e-4)
    assert found["growth_error"] == pytest.approx(abs(radial / grown - 1), rel=1e-3)
    turns = [part["b_perp"].mean().item() / part["turn_times_scale"].mean().item() - 1 for part in parts]
    assert found["turn_error"] == pytest.approx(max(map(abs, turns)), rel=1e-3)
    signal = future_signal(model, batch, num_loops=14, horizon=1)
    logs = np.log([signal["scale"][9:13], [sizes[1] for sizes in signal["size"][9:13]]])
    assert found["future_slope"] == pytest.approx(np.polyfit(*logs, 1)[0], rel=1e-4)


def test_halting_is_measured_on_other_sequences_than_those_of_its_margin(monkeypatch):
    """By hand, of two loops and four sequences each: 1 % of perplexity lets two of the first half exit, so two of the
    second do."""
    margins = {0: [4.0, 3.0, 2.0, 1.0], 1: [5.0, 3.5, 2.4, 0.5]}  # of each sequence, after the first loop
    costs = {0: [0.004, 0.02, 0.04, 0.2], 1: [0.1, 0.3, 0.2, 0.9]}  # nats, of leaving out the second

    def measured(model, rows, loops, criteria, batch_size):
        half = int(rows[0, 0] >= 4)
        first, last = torch.tensor(costs[half])[:, None].expand(4, 8), torch.zeros(4, 8)
        scores = torch.tensor(margins[half])[:, None].expand(4, 8)
        return Measured(2 + torch.stack([first, last]), {"logit_margin": torch.stack([scores, scores])})

    def drawn(run, count, length, seed):
        assert (count, length, seed) == (8, 9, 0)  # rows as long as those of the training, and a target
        return torch.arange(8)[:, None].expand(8, 9), "a text"

    monkeypatch.setattr(probes, "measure", measured)
    monkeypatch.setattr(probes, "held_out_rows", drawn)
    monkeypatch.setattr(probes, "run_data", lambda run: SimpleNamespace(sequence_length=8))
    found = probes.halting(tiny_model(num_loops=2), Path("run"), rows=4)
    assert found["loops"] == 1.5 and found["perplexity_ratio"] == pytest.approx(math.exp((0.1 + 0.3) / 4))


def test_increments_after_training_are_those_of_each_trained_depth(tmp_path, monkeypatch):
    monkeypatch.setattr(after_training, "ROWS", 4)
    monkeypatch.setattr(after_training, "LENGTH", 8)
    runs = {}
    for loops in (2, 3):
        (tmp_path / f"{loops}").mkdir()
        model = tiny_model(preset="residual_scaling", vocab_size=30, num_loops=loops)
        runs[f"run_{loops}"] = held_out_run(tmp_path / f"{loops}", model)
    found = after_training.after_training(runs)["by_loops"]
    assert list(found) == ["2", "3"]
    batch = {"input_ids": held_out_rows(runs["run_3"], 4, 8)[0]}
    states = growth.trace(model, batch, 3).trajectory
    assert found["3"]["norm"] == pytest.approx([state.norm(dim=-1).mean().item() for state in states], rel=1e-4)
    first, last = states[1] - states[0], states[3] - states[2]
    cosine = torch.cosine_similarity(first, last, dim=-1).mean().item()
    assert found["3"]["cosine"][0][2] == pytest.approx(cosine, rel=1e-3)


def test_theorems_loop_by_loop(monkeypatch):
    """The sums of theorem 1, and the corner that both curves of theorems 3 and 6 have: most layers and most loops."""
    monkeypatch.setattr(theorems, "LAYERS", (1, 2, 3, 4))
    monkeypatch.setattr(theorems, "STACKED_LOOPS", (1, 2, 3))
    found = theorems.theorems(1, width=16, stack_width=8)
    for kind, first in found["theorem_1"].items():
        norms = []
        for loops, squared in zip(theorems.LOOPS, first["sum_squared"], strict=True):
            count = 1 if kind == "shared" else loops
            weights = gaussian(1, count, 1, 16, 16) / 4  # d = 16
            h, total = gaussian(1001, 16), 0
            for n in range(loops):
                residual = weights[n % count, 0] @ h.clamp(min=0)
                h, total = h + residual / loops, total + residual
            assert squared == pytest.approx(total.square().mean().item())
            norms.append(h.norm().item())
        logs = np.log([theorems.LOOPS, first["sum_squared"], norms])
        slopes = [np.polyfit(logs[0], of, 1)[0] for of in logs[1:]]
        assert [first["slope"], first["slope_of_R"]] == pytest.approx(slopes)
    for name, number, layers in (("theorem_3", "total_squared", 4), ("theorem_6", "C_1", 3)):
        curves = found[name]
        assert curves["over_loops"][-1] == curves["over_layers"][-1] == of_stack(1, 8, 4, 3, 1.0)[number]
        assert (len(curves["over_loops"]), len(curves["over_layers"])) == (3, layers)
        assert curves["over_loops"][0] == of_stack(1, 8, 4, 1, 1.0)[number]
        assert curves["over_layers"][-2] == of_stack(1, 8, 3, 3, 1.0)[number]


def test_updates_are_those_of_the_first_steps_of_the_seed():
    found = growth.growth(2, small_config(), (2, 3), steps=2)
    for rule in growth.RULES:
        for i, loops in enumerate((2, 3)):
            model = growth.built(growth.looped(small_config(), loops, rule), 2)
            ids = growth.random_tokens(model.config, 1, 32, 2)
            states = list(train_steps(model, ids, 2, 1e-4))
            changes = [(b - a).square().mean().sqrt().item() for a, b in zip(states, states[1:])]
            assert [step[i] for step in found["rules"][rule]["updates"]] == pytest.approx(changes, rel=1e-4)
            assert len(found["rules"][rule]["R"]) == 3


def test_cosines_of_shared_passes_and_of_independent_ones():
    config = small_config()
    found = growth.cosines(1, config, copies=9)
    ids = growth.random_tokens(config, 1, growth.TOKENS, 1)
    shared = growth.trace(growth.built(growth.looped(config, 9, "none"), 1), {"input_ids": ids}, 9).trajectory
    for kind, states in (("looped", shared), ("unshared", growth.unshared_states(config, 9, 1, ids))):
        steps = [after - before for before, after in zip(states, states[1:])]
        cosine = torch.cosine_similarity(steps[0], steps[8], dim=-1).mean().item()
        (_, drawn), _ = found[kind]["cosine_of_every_eighth"]
        assert drawn == pytest.approx(cosine, abs=1e-4)
    assert found["looped"]["off_diagonal"]["mean"] > 0.3 > abs(found["unshared"]["off_diagonal"]["mean"])


def test_laws_are_fitted_to_the_runs_that_they_are_about(tmp_path, monkeypatch):
    """At the depth of their training, those with loops; the held-out error is that of the largest budget, which the
    fit has not seen."""
    rows, asked = {}, {}
    for flops in (1e18, 4e18, 16e18):
        for mean in (1, 2, 4):
            name, tested = f"{flops:g}_{mean}", [mean] if mean == 1 else [1, 2, 4, 8]
            run = {"run": name, "mean_depth": mean, "tokens": flops / mean, "flops": flops * (1 + mean / 100)}
            run["effective_parameters"] = 1000 * mean
            rows[name] = [{**run, "test_depth": k, "loss": 3 + 1e18 / flops + 1 / k - mean / 9} for k in tested]
            (tmp_path / name / "final").mkdir(parents=True)

    def noted(name: str, result: dict):
        def measure(*tables, restarts=None):
            asked[name] = [sorted((row["run"], row["test_depth"]) for row in table.rows) for table in tables]
            return result

        return measure

    fitted = {"converged": True, "coefficients": {"x": 0.7, "y": 0.5}, "held_out": {"mean_percent": 1.5}}
    forms = {"power": {"in_range": {"huber": 2.0}, "extrapolated": {"huber": 9.0}}, "exponential": {"formula": "f"}}
    floor = {"mean_percent": 0.3, "max_percent": 0.9}
    laws_of = {"mean_depth": {"exponent": 0.4, "prefactor": 9.0}}
    monkeypatch.setattr(laws, "collect", lambda run: rows[run.name])
    monkeypatch.setattr(laws, "isoflop", noted("isoflop", {"power_laws": laws_of}))
    monkeypatch.setattr(laws, "test_time", noted("test_time", {"forms": forms, "floor_against_loss_at_mu": floor}))

    def parametric(*tables, restarts):
        return noted(f"parametric_of_{len(tables)}", fitted)(*tables), None

    def unified(*tables, restarts):
        return noted("unified", {"held_out": {"mean_percent": 1.1}, "held_out_above_measured": {"mean_percent": 0.2}})(
            *tables
        ), None

    decays = {"one": {"huber": 2.0, "held_out_huber": 3.0}, "none": {"reason": "of no use"}}
    decays["learned"] = {"huber": 1.0, "held_out_huber": 4.0, "coefficients": {"gamma": 1.2}}
    monkeypatch.setattr(laws, "parametric", parametric)
    monkeypatch.setattr(laws, "unified", unified)
    monkeypatch.setattr(laws, "conditioning", noted("conditioning", {"forms": decays}))
    found = laws.laws(tmp_path)
    trained = {(name, of[0]["mean_depth"]) for name, of in rows.items()}
    largest = {each for each in trained if each[0].startswith("1.6e+19")}
    looped = {each for each in trained if each[1] > 1}
    assert asked["isoflop"] == [sorted(trained)] and asked["parametric_of_1"] == [sorted(looped)]
    assert asked["parametric_of_2"] == [sorted(looped - largest), sorted(looped & largest)]
    assert asked["test_time"] == [sorted((run, k) for run, _ in looped for k in (1, 2, 4, 8))]
    assert found["gains"] == pytest.approx([1 - 1 / 4 + 3 / 9] * 3)  # four loops are best
    assert {(run["run"], run["loss"]) for run in found["runs"]} == {
        (row["run"], row["loss"]) for of in rows.values() for row in of if row["test_depth"] == row["mean_depth"]
    }
    assert {run["run"]: run["loss_at"] for run in found["runs"]} == {
        name: {row["test_depth"]: row["loss"] for row in of} for name, of in rows.items()
    }
    assert found["exponents"] == {"mean_depth": 0.4} and found["law"] == {"x": 0.7, "y": 0.5}
    assert (found["held_out_percent"], found["misfits"], found["floor_percent"]) == (1.5, {"power": 2.0}, 0.3)
    assert found["misfits_beyond"] == {"power": 9.0}
    parts = (looped - largest, looped & largest)
    of_curves = [sorted((run, k) for run, _ in part for k in (1, 2, 4, 8)) for part in parts]
    assert asked["unified"] == asked["conditioning"] == of_curves
    assert found["both_depths"] == {"percent": 1.1, "percent_above_measured": 0.2}
    assert found["forms_of_decay"] == {
        "one": {"misfit": 2.0, "misfit_beyond": 3.0},
        "learned": {"misfit": 1.0, "misfit_beyond": 4.0, "power": 1.2},
    }
    fitted |= {"converged": False}
    assert laws.laws(tmp_path)["law"] is None


@torch.no_grad()
def test_questions_exit_where_every_word_is_certain():
    """Question by question: at the first loop after which each word has a probability of 0.9, else at the last."""
    torch.manual_seed(0)
    model = LoopedForCausalLM(small_config(num_loops=4, initializer_range=0.2)).eval()
    model.lm_head.weight.data.mul_(3)
    ids = torch.randint(3, 64, (24, 5), generator=torch.Generator().manual_seed(0))
    logits = torch.stack([model(ids, num_loops=k, use_cache=False).logits[:, 2:-1] for k in range(1, 5)])
    said, certain = logits.argmax(-1), logits.softmax(-1).amax(-1).amin(-1) >= 0.9
    ids[::2, 3:] = said[1, ::2]  # every other question is answered after the second loop
    logits = torch.stack([model(ids, num_loops=k, use_cache=False).logits[:, 2:-1] for k in range(1, 5)])
    said, certain = logits.argmax(-1), logits.softmax(-1).amax(-1).amin(-1) >= 0.9
    exits = [next((k for k in range(3) if certain[k, i]), 3) for i in range(24)]
    right = (said == ids[:, 3:]).all(-1)
    questions = [{"text": words(row[:3]), "choices": [words(row[3:])], "answer": 0} for row in ids]
    found = answer(model, Words(), questions)
    assert len(set(exits)) > 1 and found["exit_loops"] == pytest.approx(fmean(exits) + 1)
    assert found["accuracy"] == pytest.approx(right.double().mean(1).tolist())
    assert found["exit_accuracy"] == pytest.approx(fmean(right[k, i].item() for i, k in enumerate(exits)))


def words(ids: torch.Tensor) -> str:
    return " ".join(map(str, ids.tolist()))


def test_spreads_of_unequal_numbers_of_seeds():
    """By a table: F of 97.5 % is 39.298 for 5 and 2 degrees of freedom, and 8.4336 for 2 and 5."""
    first, second = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 0.1, 0.2]
    value, low, high, seeds = ratio_of_spreads(first, second)
    assert value == pytest.approx(math.log10(3.5**0.5 / 0.1)) and seeds == 3
    assert [value - low, high - value] == pytest.approx([math.log10(39.298) / 2, math.log10(8.4336) / 2], abs=1e-4)


def test_five_seeds_of_which_one_collapsed_bound_nothing():
    assert over_seeds([0.5, 0.6, 0.7, 0.5, math.inf]) == (0.6, -math.inf, math.inf, 5)  # 1 - 2^-4 is less than 95 %


def test_the_interval_of_a_median_that_was_chosen_among_ten():
    """Six seeds hold it with 1 - 2^-5: enough for 95 %, but not for the 99.5 % that ten candidates need."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0, math.inf]
    assert over_seeds(values) == (3.0, 1.0, math.inf, 6)
    assert over_seeds(values, level_of_chosen(10)) == (3.0, -math.inf, math.inf, 6)


def test_a_loss_that_rises_with_loops_is_a_change():
    runs = [{"model.preset": "flt", "model.num_loops": 9, "loss_at": {"3": 4.9, "9": 5.0}}]
    assert fully_looped.gained({9: (3, 9)}, 0.001)({"seeds": {"0": {"runs": runs}}}).value == pytest.approx(-0.1)


def test_the_last_change_is_that_of_the_second_half():
    of_steps = [(9.0, 1.0), (9.0, 1.0), (1.0, 4.0), (3.0, 4.0)]
    records = [{"state_change": change, "residual_norm": state} for change, state in of_steps]
    assert parcae_depths.last_change(records) == 0.5


def test_norms_of_a_run_are_kept():
    metrics = {"state_norm/loop_4": 7.0, "residual_norm/loop_1": 2.0, "gradient_norm/lm_head": 3.0}
    kept = shortened({"name": "a", "loss": 2.0, "metrics": metrics})
    assert kept == {"name": "a", "loss": 2.0, "loss_at": {}, "state_norm/loop_4": 7.0, "residual_norm/loop_1": 2.0}
