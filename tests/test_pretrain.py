"""Pretraining from end to end: every smoke recipe trains, and nothing that interrupts a run changes it."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

from modeling_looped import LoopedForCausalLM
from recipes.config import RecipeError
from recipes.metrics import read_metrics
from recipes.pretrain import Divergence, main


FOLDER = Path(__file__).parent.parent
SMOKE = FOLDER / "recipes" / "smoke"
GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in SMOKE.glob("*.yaml") if path.stem not in ("base", "ouro_gate"))


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Sentences of a small grammar, drawn from a fixed seed."""
    draw = random.Random(0)
    words = ["".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 7))) for _ in range(120)]
    folder = tmp_path_factory.mktemp("text")
    documents = [
        " ".join(words[min(int(draw.expovariate(0.05)), 119)] for _ in range(draw.randint(20, 200)))
        for _ in range(150)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return folder


def settings(text, output, *more):
    """Overrides that train a smoke recipe on `text`."""
    return [
        f"data.source={text / 'train.jsonl'}",
        f"data.cache_dir={text / 'shards'}",
        "data.tokenizer_vocab_size=400",
        f"training.output_dir={output}",
        "training.steps=6",
        "training.save_every=3",
        "evaluation.every=3",
        "logging.every=1",
        *more,
    ]


def losses(output):
    return [record["loss"] for record in read_metrics(Path(output) / "metrics.jsonl") if "loss" in record]


def in_process(recipe, arguments, **kwargs):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER)}
    return subprocess.Popen(
        [sys.executable, "-m", "recipes.pretrain", str(SMOKE / f"{recipe}.yaml"), *arguments],
        cwd=FOLDER,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **kwargs,
    )


@pytest.mark.parametrize("name", NAMES)
def test_smoke_recipe_trains(name, text, tmp_path):
    final = main([str(SMOKE / f"{name}.yaml"), *settings(text, tmp_path)])
    curve = losses(tmp_path)
    assert len(curve) == 6 and all(loss == loss for loss in curve)
    assert min(curve[3:]) < curve[0]
    model = LoopedForCausalLM.from_pretrained(final)
    prompt = torch.tensor([[5, 6, 7]])
    assert model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (1, 6)
    last = [record for record in read_metrics(tmp_path / "metrics.jsonl") if "validation/loss" in record][-1]
    for loop in range(1, model.config.num_loops + 1):
        assert last[f"validation/bits_per_byte_at_{loop}"] > 0


def test_validation_is_that_of_the_saved_model(text, tmp_path):
    """Loss and bits per byte, computed again from the logits of the exported model."""
    from recipes.config import load_recipe
    from recipes.shards import prepare

    arguments = settings(text, tmp_path)
    final = main([str(SMOKE / "parcae.yaml"), *arguments])
    data = prepare(load_recipe(SMOKE / "parcae.yaml", arguments).data)
    model = LoopedForCausalLM.from_pretrained(final)
    rows = list(range(min(8, len(data.validation))))
    batch = data.validation.batch(rows)
    with torch.no_grad():
        logits = model(batch["input_ids"], num_loops=2).logits[:, :-1].double()
    target = batch["labels"][:, 1:]
    nats = -logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    labelled = target != -100
    num_bytes = data.token_bytes[target.clamp(min=0)] * labelled
    last = [record for record in read_metrics(tmp_path / "metrics.jsonl") if "validation/loss" in record][-1]
    assert last["validation/loss_at_2"] == pytest.approx(nats[labelled].mean().item(), rel=1e-5)
    bits = nats[num_bytes > 0].sum() / num_bytes.sum() / torch.log(torch.tensor(2.0))
    assert last["validation/bits_per_byte_at_2"] == pytest.approx(bits.item(), rel=1e-5)


def test_gate_stage_trains_the_gate_alone(text, tmp_path):
    first = main([str(SMOKE / "ouro.yaml"), *settings(text, tmp_path / "one")])
    start = f"training.initialize_from={first}"
    second = main([str(SMOKE / "ouro_gate.yaml"), *settings(text, tmp_path / "two", start)])
    before, after = (LoopedForCausalLM.from_pretrained(path).state_dict() for path in (first, second))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"exit_gate.weight", "exit_gate.bias"}


def test_gradient_accumulation_and_checkpointing_change_nothing(text, tmp_path):
    curves = []
    for i, more in enumerate(([], ["training.micro_batch_size=2"], ["training.gradient_checkpointing=true"])):
        main([str(SMOKE / "parcae.yaml"), *settings(text, tmp_path / str(i), "training.steps=3", *more)])
        curves.append(torch.tensor(losses(tmp_path / str(i))))
    torch.testing.assert_close(curves[1], curves[0], rtol=2e-4, atol=0)
    torch.testing.assert_close(curves[2], curves[0], rtol=2e-4, atol=0)


@pytest.mark.parametrize("wanted", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_run_killed_at_any_moment_goes_on_as_if_it_had_not_been(wanted, text, tmp_path):
    """kill -9, at moments that fall into steps, evaluations and checkpoints alike; losses are equal bit for bit."""
    more = [f"training.steps={6 + 6 * wanted}", "training.save_every=2"]
    main([str(SMOKE / "parcae.yaml"), *settings(text, tmp_path / "whole", *more)])
    draw = random.Random(wanted)
    arguments = settings(text, tmp_path / "killed", *more)
    kills = 0
    for _ in range(wanted + 1):
        process = in_process("parcae", arguments)
        metrics = tmp_path / "killed" / "metrics.jsonl"
        seen = len(losses(tmp_path / "killed"))
        while process.poll() is None and len(losses(tmp_path / "killed")) <= seen + draw.randint(0, 5):
            time.sleep(0.02)
        time.sleep(draw.random() * 0.2)
        if process.poll() is None and kills < wanted:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            continue
        output, _ = process.communicate()
        assert process.returncode == 0, output
        break
    assert kills == wanted
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert len(metrics.read_text().splitlines()) == len(
        (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    )


def launch(recipe, arguments, processes):
    port = 20000 + os.getpid() % 20000
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(processes)]
    command += [
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--num_cpu_threads_per_process",
        "1",
    ]
    command += ["--main_process_port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER)}
    command += ["-m", "recipes.pretrain", str(SMOKE / f"{recipe}.yaml"), *arguments]
    return subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=280)


def test_the_number_of_processes_does_not_matter(text, tmp_path):
    """1 process, then 2, then 1, against 1 throughout, with a depth per sequence."""
    main([str(SMOKE / "parcae.yaml"), *settings(text, tmp_path / "one", "training.save_every=2")])
    output = tmp_path / "changing"
    for steps, processes in ((2, 1), (4, 2), (6, 1)):
        arguments = settings(text, output, "training.save_every=2")
        if steps < 6:
            arguments.append(f"training.stop_after={steps}")
        result = launch("parcae", arguments, processes)
        assert result.returncode == 0, result.stdout + result.stderr
    torch.testing.assert_close(torch.tensor(losses(output)), torch.tensor(losses(tmp_path / "one")), rtol=2e-4, atol=0)


def test_a_loss_that_is_no_number_stops_the_run(text, tmp_path):
    main([str(SMOKE / "lt.yaml"), *settings(text, tmp_path, "optimizer.name=adamw", "training.stop_after=3")])
    broken = settings(text, tmp_path, "optimizer.name=adamw", "optimizer.lr=1e30", "optimizer.embedding_lr=1e30")
    with pytest.raises(Divergence, match=r"loss of step \d+ is (nan|inf) on training rows \["):
        main([str(SMOKE / "lt.yaml"), *broken, "optimizer.clip=null"])
    final = main([str(SMOKE / "lt.yaml"), *settings(text, tmp_path, "optimizer.name=adamw")])
    assert LoopedForCausalLM.from_pretrained(final).lm_head.weight.isfinite().all()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["model.vocab_size=100"], "tokenizer has .* entries, but the model's vocab_size is 100"),
        (["data.source=/nowhere/to/be/found.txt"], "found.txt"),
        (["training.freeze_all_but_gate=true"], "needs a model with an exit gate"),
        (["training.steps=null"], "say how long to train"),
    ],
)
def test_errors_before_training(more, message, text, tmp_path):
    with pytest.raises(RecipeError, match=message):
        main([str(SMOKE / "lt.yaml"), *settings(text, tmp_path), *more])
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_checkpoint_of_another_model_is_refused(text, tmp_path):
    main([str(SMOKE / "lt.yaml"), *settings(text, tmp_path)])
    with pytest.raises(ValueError, match="num_loops"):
        main([str(SMOKE / "lt.yaml"), *settings(text, tmp_path, "model.num_loops=2", "training.steps=9")])


def test_golden_curve(text, tmp_path):
    """The losses of a smoke run, to the last digit on the machine and versions they were recorded with."""
    main([str(SMOKE / "parcae.yaml"), *settings(text, tmp_path, "training.steps=8")])
    curve = losses(tmp_path)
    recorded = json.loads((GOLDEN / "parcae.json").read_text())
    here = {
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
    }
    if here == recorded["made_with"]:
        assert curve == recorded["losses"]
    else:  # another processor or version rounds differently
        assert curve == pytest.approx(recorded["losses"], rel=1e-3)
