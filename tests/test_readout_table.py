"""Table 2 of the readout paper: every window, token after token in float64, and what is said of seeds."""

import json
import math
import re
import shutil
import statistics

import pytest
import torch
import yaml
from torch.nn import functional as F

from looped_eval.readout_table import command as readout_table
from modeling_looped import LoopedForCausalLM
from tests.helpers import run_of, save_other_tokenizer, tiny_model, tiny_tokenizer


LENGTH, STRIDE, LOOPS = 8, 4, 3
TEXT = "a b c d e f g h i j k l m n o p a c e g i k m o b d"
SYSTEMS = {
    "terminal": {"preset": "readout_terminal_raw"},
    "per_loop": {"preset": "readout_per_loop_final_only"},
    "exit_weighted": {"preset": "readout_exit_weighted"},
}


def make_run(folder, preset: str, seed: int, text: str = TEXT, **data):
    """A finished run of a tiny model whose weights differ by seed."""
    model = tiny_model(preset=preset, vocab_size=30, num_loops=LOOPS, max_position_embeddings=LENGTH)
    with torch.no_grad():
        model.model.embed_tokens.weight *= 3 + seed
    model.save_pretrained(folder / "final")
    tiny_tokenizer().save_pretrained(folder / "final")
    run_of(folder, folder / "final", text, stride=STRIDE, sequence_length=LENGTH, **data)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    source = folder.parent / "held_out.jsonl"  # that of all seeds
    shutil.copy(folder / "held_out.jsonl", source)
    shutil.copy(folder / "trained.jsonl", folder.parent / "trained.jsonl")
    recipe["data"] |= {"source": str(folder.parent / "trained.jsonl"), "validation_source": str(source)}
    recipe["data"]["tokenizer"] = str(folder.parent / "tokenizer")
    tiny_tokenizer().save_pretrained(folder.parent / "tokenizer")
    recipe |= {"model": {"preset": preset}, "training": {"steps": 1, "seed": seed, "output_dir": str(folder)}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def naive(folder, ids: list[int]) -> dict:
    """Each window by itself, each depth a pass of its own."""
    model = LoopedForCausalLM.from_pretrained(folder / "final").double().eval()
    losses, weighted, mixed, norms = [[] for _ in range(LOOPS)], [], [], []
    for start in range(0, len(ids) - LENGTH, STRIDE):
        window = torch.tensor(ids[start : start + LENGTH])
        targets = torch.tensor(ids[start + 1 : start + LENGTH + 1])
        outputs = [model(window[None], num_loops=k, output_loop_hidden_states=True) for k in range(1, LOOPS + 1)]
        of_loops = [F.cross_entropy(output.logits[0], targets, reduction="none") for output in outputs]
        for k in range(LOOPS):
            losses[k] += of_loops[k].tolist()
        state = outputs[-1].loop_hidden_states[-1][0]
        norms += state.square().sum(-1).sqrt().tolist()
        if model.exit_gate is not None:
            stay, expected, logits = 1.0, 0.0, 0.0
            for k, of_loop in enumerate(of_loops):
                leave = torch.sigmoid(model.exit_gate(outputs[-1].loop_hidden_states[k][0])[:, 0])
                p = stay if k == LOOPS - 1 else stay * leave
                expected, stay = expected + p * of_loop, stay * (1 - leave)
                logits = logits + torch.as_tensor(p)[:, None] * outputs[k].logits[0]
            weighted += expected.tolist()
            mixed += F.cross_entropy(logits, targets, reduction="none").tolist()
    means = [statistics.fmean(of_loop) for of_loop in losses]
    trained = {"terminal": means[-1], "per_loop": statistics.fmean(means)}.get(model.config.loop_loss)
    trained = statistics.fmean(weighted) if trained is None else trained
    found = {"norm": statistics.fmean(norms), "perplexity": math.exp(means[-1]), "trained": math.exp(trained)}
    if mixed:
        found["loss_mixed"] = statistics.fmean(mixed)
    return {**found, "loss_at": means, "targets": len(losses[0])}


@torch.no_grad()
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_position_of_every_window_counts(tmp_path, system):
    folder = make_run(tmp_path / "run", SYSTEMS[system]["preset"], seed=0, joined_by=" ")
    found = readout_table.main([str(folder), "--batch-size", "3", "--dtype", "float64"])["runs"]["run"]
    ids = [4 + "abcdefghijklmnopqrstuvwxyz".index(letter) for letter in TEXT.split()]
    expected = naive(folder, ids)
    assert found["windows"] == len(range(0, len(ids) - LENGTH, STRIDE)) == 5
    assert found["targets"] == expected["targets"] == 5 * LENGTH
    for name in ("norm", "perplexity", "trained", "loss_at"):
        assert found[name] == pytest.approx(expected[name], rel=1e-9), name
    assert ("loss_mixed" in found) == (system == "exit_weighted")
    assert found.get("loss_mixed", 0) == pytest.approx(expected.get("loss_mixed", 0), rel=1e-9)
    assert (found["trained"] == found["perplexity"]) == (system == "terminal")


@torch.no_grad()
@pytest.mark.parametrize(
    "loss", ["terminal", "per_loop", "last_third", "exit_weighted", "exit_weighted_logits", "gate"]
)
def test_the_trained_loss_is_the_one_of_training(tmp_path, capsys, loss):
    """In the 4 loops of training, of which 2 are the last third, though the model as it is saved takes fewer."""
    folder = make_run(tmp_path / "run", "readout_terminal_raw", seed=0, joined_by=" ")
    gate = {"exit_gate": "raw", "exit_entropy_weight": 0.0} if "exit" in loss or loss == "gate" else {}
    model = tiny_model(vocab_size=30, num_loops=4, max_position_embeddings=LENGTH + 1, loop_loss=loss, **gate)
    model.config.trained_num_loops, model.config.num_loops = 4, 3
    model.save_pretrained(folder / "final")
    model.config.num_loops = 4
    result = readout_table.main([str(folder), "--dtype", "float64"])
    found, system = result["runs"]["run"], result["systems"]["run"]
    assert len(found["loss_at"]) == 4 and len(set(found["loss_at"])) == 4 and system["seeds"] == 1
    printed = capsys.readouterr().out
    (line,) = re.findall(r"^run: norm.*$", printed, re.MULTILINE)
    assert ("trained" in line) == ("trained" in found) == ("trained" in system) == (loss != "gate")
    if loss == "gate":
        assert "| – |" in printed
        return
    ids = torch.tensor([4 + "abcdefghijklmnopqrstuvwxyz".index(letter) for letter in TEXT.split()])
    windows = torch.stack([ids[start : start + LENGTH + 1] for start in range(0, len(ids) - LENGTH, STRIDE)])
    expected = model.double().eval()(windows, labels=windows).loss.exp()
    assert found["trained"] == pytest.approx(expected.item(), rel=1e-6)
    assert (found["trained"] == found["perplexity"]) == (loss == "terminal")


def test_start_tokens_are_no_targets(tmp_path):
    """Documents that begin with a start token: it is read, and never predicted, as in training."""
    folder = make_run(tmp_path / "run", SYSTEMS["terminal"]["preset"], seed=0, text=TEXT)
    with open(folder.parent / "held_out.jsonl", "a") as file:
        file.write(json.dumps({"text": "q r s t u v"}) + "\n")
    found = readout_table.main([str(folder)])["runs"]["run"]
    stream = 1 + 26 + 1 + 1 + 6 + 1  # bos and eos
    starts = range(0, stream - LENGTH, STRIDE)
    seen = sum(start < 28 <= start + LENGTH for start in starts)  # windows with the second start token as a target
    assert found["windows"] == len(starts) and seen == 2
    assert found["targets"] == len(starts) * LENGTH - seen


def test_documents_are_apart_where_they_were_in_training(tmp_path):
    folder = make_run(tmp_path / "run", SYSTEMS["terminal"]["preset"], seed=0)
    with open(folder.parent / "held_out.jsonl", "a") as file:
        file.write(json.dumps({"text": "q r s t u v"}) + "\n")
    joined = readout_table.main([str(folder), "--dtype", "float64"])["runs"]["run"]
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["data"]["document_masking"] = True
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    found = readout_table.main([str(folder), "--dtype", "float64"])["runs"]["run"]
    model, losses = LoopedForCausalLM.from_pretrained(folder / "final").double().eval(), []
    ids = [4 + "abcdefghijklmnopqrstuvwxyz".index(letter) for letter in TEXT.split()]
    tokenizer = tiny_tokenizer()
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    stream = [bos, *ids, eos, bos, *range(20, 26), eos]
    for start in range(0, len(stream) - LENGTH, STRIDE):
        window = stream[start : start + LENGTH + 1]
        cuts = [0, *(place for place in range(1, LENGTH) if window[place] == bos), LENGTH]
        for begin, end in zip(cuts, cuts[1:]):  # each document by itself
            inputs, targets = torch.tensor(window[begin:end]), torch.tensor(window[begin + 1 : end + 1])
            with torch.no_grad():
                of_tokens = F.cross_entropy(model(inputs[None]).logits[0], targets, reduction="none")
            losses += of_tokens[targets != bos].tolist()
    assert found["targets"] == len(losses)
    assert found["loss_at"][-1] == pytest.approx(statistics.fmean(losses), rel=1e-9)
    assert found["loss_at"][-1] != pytest.approx(joined["loss_at"][-1], rel=1e-6)


def test_seeds_are_averaged(tmp_path, capsys):
    """One command on the folder of a sweep: diverged and unfinished runs are named and left out."""
    runs = tmp_path / "sweep"
    for preset, seed in (("readout_terminal_raw", 0), ("readout_terminal_raw", 1), ("readout_per_loop_raw", 0)):
        make_run(runs / f"preset={preset}_seed={seed}", preset, seed, joined_by=" ")
    for seed, left in ((2, "diverged.txt"), (3, None)):
        folder = runs / f"preset=readout_terminal_raw_seed={seed}"
        make_run(folder, "readout_terminal_raw", seed, joined_by=" ")
        shutil.rmtree(folder / "final")
        if left:
            (folder / left).write_text("the loss is nan")
    result = readout_table.main([str(runs)])
    printed = capsys.readouterr().out
    assert "left out: preset=readout_terminal_raw_seed=2 is diverged: the loss is nan" in printed
    assert "seed=3 is not finished" in printed
    saved = json.loads((runs / "readout_table.json").read_text())
    assert {"command", "commit", "hardware", "systems", "runs"} <= set(saved)
    system = saved["systems"]["preset=readout_terminal_raw"]
    assert (system["seeds"], system["diverged"]) == (2, 1)
    for name in ("norm", "perplexity", "trained"):
        values = [result["runs"][f"preset=readout_terminal_raw_seed={seed}"][name] for seed in (0, 1)]
        mean, half = sum(values) / 2, abs(values[0] - values[1]) / 2
        assert half > 0
        assert system[name]["mean"] == pytest.approx(mean, rel=1e-4)
        assert system[name]["deviation"] == pytest.approx(half * 2**0.5, rel=1e-4)  # of two, by n - 1
    assert saved["systems"]["preset=readout_per_loop_raw"]["norm"]["deviation"] is None
    table = (runs / "readout_table.md").read_text()
    assert table.splitlines()[2].startswith("| preset=readout_per_loop_raw | 1 |") and "2, 1 diverged" in table


@pytest.mark.parametrize("part", ["", "final"])
def test_seeds_in_folders_of_the_same_name_are_measured_apart(tmp_path, part):
    folders = []
    for seed in (0, 1):
        run = make_run(tmp_path / f"raw_seed={seed}", "readout_terminal_raw", seed, joined_by=" ")
        folders.append(tmp_path / "ab"[seed] / "raw")
        shutil.move(run, folders[-1])
    result = readout_table.main([*(str(folder / part) for folder in folders), "--output", str(tmp_path / "table")])
    alone = [readout_table.main([str(folder)])["runs"]["raw"]["perplexity"] for folder in folders]
    system = result["systems"]["raw"]
    assert system["seeds"] == len(result["runs"]) == 2 and alone[0] != alone[1]
    assert system["perplexity"] == {"mean": statistics.fmean(alone), "deviation": statistics.stdev(alone)}


def test_a_run_without_numbers_has_diverged(tmp_path, capsys):
    """The weights of one seed are no numbers any more, though its training logged none that is not."""
    runs = tmp_path / "sweep"
    for preset, seed in (("readout_terminal_raw", 0), ("readout_terminal_raw", 1), ("readout_per_loop_raw", 0)):
        make_run(runs / f"preset={preset}_seed={seed}", preset, seed, joined_by=" ")
    folder = runs / "preset=readout_terminal_raw_seed=1/final"
    model = LoopedForCausalLM.from_pretrained(folder)
    torch.nn.init.constant_(model.model.embed_tokens.weight, math.nan)
    model.save_pretrained(folder)
    result = readout_table.main([str(runs)])
    system = result["systems"]["preset=readout_terminal_raw"]
    assert (system["seeds"], system["diverged"], system["norm"]["deviation"]) == (1, 1, None)
    assert system["norm"]["mean"] == result["runs"]["preset=readout_terminal_raw_seed=0"]["norm"]
    assert result["systems"]["preset=readout_per_loop_raw"]["seeds"] == 1
    shutil.rmtree(runs / "preset=readout_terminal_raw_seed=0")
    readout_table.main([str(folder.parent)])
    printed = capsys.readouterr().out
    assert "| preset=readout_terminal_raw | 1, 1 diverged |" in printed
    assert "| preset=readout_terminal_raw | 0, 1 diverged | – | – | – |" in printed
    assert "every run diverged" in printed


def test_perplexities_of_different_tokens_have_no_order(tmp_path, capsys):
    first, second = (make_run(tmp_path / name / name, "readout_terminal_raw", 0, joined_by=" ") for name in "ab")
    readout_table.main([str(first), str(second)])
    assert "The least perplexity has a, " in capsys.readouterr().out
    save_other_tokenizer(tmp_path / "b/tokenizer")
    readout_table.main([str(first), str(second)])
    said = capsys.readouterr().out
    assert "least perplexity" not in said and "these runs have different tokenizers, so they do not compare" in said


def test_a_split_of_less_than_a_window_is_refused(tmp_path):
    folder = make_run(tmp_path / "run", "readout_terminal_raw", seed=0, text=" ".join("a" * LENGTH), joined_by=" ")
    words = f"holds {LENGTH} tokens, fewer than a window of {LENGTH + 1}"
    with pytest.raises(ValueError, match=words):
        readout_table.main([str(folder)])


def test_what_is_no_table_is_refused(tmp_path):
    runs = tmp_path / "sweep"
    first = make_run(runs / "raw_seed=0", "readout_terminal_raw", 0, joined_by=" ")
    other = make_run(runs / "raw_seed=1", "readout_per_loop_raw", 1, joined_by=" ")
    with pytest.raises(ValueError, match="are both 'raw', but differ in model.preset"):
        readout_table.main([str(runs)])
    shutil.rmtree(other)
    shutil.copytree(first, other)
    with pytest.raises(ValueError, match=r"'raw' has the seeds \[0, 0\]"):
        readout_table.main([str(runs)])
    shutil.rmtree(other)
    with pytest.raises(ValueError, match="--batch-size must be at least 1, got 0"):
        readout_table.main([str(runs), "--batch-size", "0"])
    shutil.rmtree(first / "final")
    with pytest.raises(ValueError, match="no run is finished: raw_seed=0 is not finished"):
        readout_table.main([str(runs)])
    with pytest.raises(ValueError, match="there is no folder"):
        readout_table.main([str(tmp_path / "nowhere")])
