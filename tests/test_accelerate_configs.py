"""The launch configs of recipes/accelerate, as accelerate reads them."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from packaging.version import Version

from looped_recipes.engine import distributed
from looped_recipes.engine.distributed import _check_mesh, check_split, check_units, make_accelerator
from looped_recipes.engine.tensor_parallel import check_heads
from looped_recipes.engine.training import Pretraining
from looped_recipes.settings.recipe import RecipeError, load_recipe

from .distributed_worker import train
from .helpers import tiny_config, wait_until
from .helpers_processes import import_paths
from .test_tensor_parallel import free_port


ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "recipes" / "accelerate"
RUN = {"steps": [0, 2], "optimizer": {"lr": 0.01}, "model": {"loop_loss": "per_loop"}}


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_accelerate_knows_every_key(name):
    config = load_config_from_file(str(CONFIGS / name))  # refuses unknown keys
    assert config.mixed_precision == "bf16" and config.main_training_function == "main"


@pytest.mark.parametrize("name", ["fsdp2.yaml", "multi_node.yaml", "hsdp.yaml", "tensor_parallel.yaml"])
def test_fsdp_configs_are_those_that_the_recipes_take(name, monkeypatch):
    settings = yaml.safe_load((CONFIGS / name).read_text())["fsdp_config"]
    known = {key.removeprefix("fsdp_") for key in settings}
    for key, value in settings.items():
        monkeypatch.setenv(key.upper(), str(value))
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and not plugin.cpu_ram_efficient_loading and not plugin.activation_checkpointing
    assert known <= {"version", *vars(plugin), "offload_params", "state_dict_type", "auto_wrap_policy"}
    assert settings == yaml.safe_load((CONFIGS / "fsdp2.yaml").read_text())["fsdp_config"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"FSDP_VERSION": "1"}, "fsdp_version=1.*fsdp2.yaml"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "training.gradient_checkpointing"),
        ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "fsdp_cpu_ram_efficient_loading"),
    ],
)
def test_settings_that_would_be_dropped_are_refused(monkeypatch, changes, message):
    settings = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    for key, value in {**settings, **changes}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(RecipeError, match=message):
        make_accelerator(cpu=True)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["depth.sampler=poisson", "depth.per=sequence", "depth.mean=2"], "depth.per='sequence'.*NO_WRAP"),
        (["training.gradient_checkpointing=loops"], "gradient_checkpointing='loops'.*NO_WRAP"),
        ([], None),
    ],
)
def test_blocks_as_units_need_processes_that_run_alike(monkeypatch, overrides, message):
    settings = {"FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    for key, value in settings.items():
        monkeypatch.setenv(key, value)
    recipe = load_recipe(ROOT / "recipes" / "smoke" / "flt.yaml", overrides)
    for policy in ("NO_WRAP", "TRANSFORMER_BASED_WRAP"):
        monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", policy)
        accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=FullyShardedDataParallelPlugin()))
        refused = message is not None and policy != "NO_WRAP"
        with pytest.raises(RecipeError, match=message) if refused else nullcontext():
            check_units(accelerator, recipe)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="it splits no model made before")
@pytest.mark.parametrize("setting", ["compile=true", "cross_entropy=liger_kernel", "kernels=liger_kernel"])
def test_what_takes_whole_matrices_is_refused_where_they_are_split(setting):
    recipe = load_recipe(ROOT / "recipes" / "smoke" / "flt.yaml", [f"training.{setting}"])
    config = ParallelismConfig(dp_shard_size=2, tp_size=2)
    with pytest.raises(RecipeError, match=f"training.{setting.split('=')[0]}=.*parallelism_config_tp_size=2"):
        check_split(SimpleNamespace(parallelism_config=config), recipe)


def test_heads_that_cannot_be_shared_out_are_refused():
    with pytest.raises(RecipeError, match="tp_size=3 does not divide the 4 key/value heads of the core"):
        check_heads(tiny_config(num_attention_heads=4), 3)


@pytest.mark.parametrize("fsdp, shards, found", [(False, 2, "DDP and 2"), (True, 1, "FSDP2 and 1")])
def test_matrices_are_split_beside_shards_alone(monkeypatch, fsdp, shards, found):
    sizes = {"DP_SHARD": shards, "TP": 2}
    settings = {f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in sizes.items()}
    for key, value in {**settings, "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(fsdp).lower())
    with pytest.raises(RecipeError, match=f"tp_size=2 goes with.* {found}: start from .*tensor_parallel.yaml"):
        make_accelerator(cpu=True)


@pytest.mark.parametrize("name", ["SP", "CP"])
def test_a_mesh_that_would_be_dropped_is_refused(monkeypatch, name):
    settings = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    settings |= {f"PARALLELISM_CONFIG_{name}_SIZE": "2"}
    for key, value in settings.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(RecipeError, match=f"parallelism_config_{name.lower()}_size.*2.*would be dropped.*hsdp.yaml"):
        _check_mesh(ParallelismConfig(), is_fsdp=True, num_processes=2)


def test_a_mesh_of_another_size_is_refused():
    config = ParallelismConfig(dp_replicate_size=1, dp_shard_size=4, tp_size=2)
    _check_mesh(config, is_fsdp=True, num_processes=8)
    with pytest.raises(RecipeError, match="4 processes were launched, but .*dp_shard_size=4 times .*tp_size=2 is 8"):
        _check_mesh(config, is_fsdp=True, num_processes=4)


def test_processes_that_do_not_find_each_other_are_refused(monkeypatch):
    """A second machine, say, whose launcher was not told of the first."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RecipeError, match="4 processes were launched.*counts 1"):
        make_accelerator()


def test_one_process_where_several_were_asked_for_is_refused(monkeypatch):
    """With the environment that accelerate gives the process."""
    asked = ["--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "train.py"]
    options, *_ = _validate_launch_command(launch_command_parser().parse_args(asked))
    _, environment = prepare_simple_launcher_cmd_env(options)
    for name in environment.keys() - os.environ.keys():
        monkeypatch.setenv(name, environment[name])
    several = "asked for several processes, but started one.*MASTER_ADDR.*127.0.0.1"
    with pytest.raises(RecipeError, match=several) as refused:
        make_accelerator()
    named = re.search(r"start from (.*\.yaml)", str(refused.value))[1]
    assert Path(named).is_absolute() and Path(named).samefile(CONFIGS / "ddp.yaml")


def test_deepspeed_is_refused(monkeypatch):
    """On CPUs its settings would be dropped without a word."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(RecipeError, match="ACCELERATE_USE_DEEPSPEED=true.*start from .*fsdp2.yaml"):
        make_accelerator()


def test_apples_gpus_are_not_trained_on(monkeypatch):
    """They have no float64, in which losses are added up."""
    asked = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(distributed, "Accelerator", lambda **kwargs: asked.append(kwargs) or Accelerator(**kwargs))
    assert make_accelerator().device.type == "cpu" and asked[0]["cpu"]


def test_processes_of_mpi_are_counted(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(RecipeError, match="2 processes were launched.*counts 1"):
        make_accelerator()


HANGS = """
import os, signal, sys
from looped_recipes.engine.distributed import make_accelerator
from looped_recipes.engine.peers import one_message

accelerator = make_accelerator(timeout_minutes=0.05, cpu=True)
accelerator.wait_for_everyone()
if accelerator.process_index == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    with one_message():
        accelerator.wait_for_everyone()
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.mark.slow
def test_a_process_that_hangs_is_waited_for_as_long_as_the_recipe_says(tmp_path):
    """Torch would wait half an hour."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HANGS],
            env={**os.environ, **where, "PYTHONPATH": import_paths(), "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        said = processes[0].communicate(timeout=120)[1]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert processes[0].returncode == 1
    assert "PeerLost: another process of this launch has ended without a word, or hangs" in said


def test_the_time_that_a_recipe_waits_is_that_of_the_launch(monkeypatch):
    asked = []

    def stop(**kwargs):
        asked.append(kwargs)
        raise InterruptedError

    monkeypatch.setattr(distributed, "Accelerator", stop)
    with pytest.raises(InterruptedError):
        Pretraining(load_recipe(ROOT / "recipes/smoke/lt.yaml", ["training.timeout_minutes=1.5"]))
    assert asked[0]["kwargs_handlers"][1].timeout.total_seconds() == 90


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_launched_without_gpus_they_do_what_they_say(tmp_path, name):
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps([{"fsdp": None, **RUN}]))
    command = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(CONFIGS / f"{name}.yaml"),
        "--num_processes",
        "2",
    ]
    command += ["--mixed_precision", "no", "--main_process_port", "0", "-m", "tests.distributed_worker", str(tasks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = torch.load(tasks.with_suffix(".pt"))
    assert result["is_sharded"] == (name == "fsdp2")
    assert result["losses"] == pytest.approx(train(**RUN)["losses"], rel=1e-6)


def executable(path: Path, text: str):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


SRUN = """#!/bin/bash
launchers=()
trap 'kill -KILL "${launchers[@]}"; exit 137' TERM
while [[ "$1" == --* ]]; do echo "$1" >> options; shift; done
for ((i = 0; i < SLURM_NNODES; i++)); do SLURM_NODEID=$i "$@" & launchers+=($!); done
echo "${launchers[@]}" > started && mv started launchers
for launcher in "${launchers[@]}"; do wait "$launcher" || status=$?; done
exit "${status:-0}"
"""


def slurm_of_scripts(folder: Path, launcher: str, srun: str = SRUN, scontrol: str = "") -> dict:
    """How to start slurm.sh as job 7 on two machines. Told to end, srun kills the launchers, as the real one does;
    scancel reaches them. launcher: what `accelerate` does on each machine."""
    scripts = {
        "accelerate": f"#!/bin/bash\n{launcher}\n",
        "scancel": '#!/bin/sh\n[ "$*" = "--signal=TERM 7.0" ] && kill -TERM $(cat launchers)\n',
        "scontrol": f'#!/bin/sh\nif [ "$1" = requeue ]; then echo "$2" >> queued; exit; fi\n{scontrol}\n'
        "printf 'first\\nsecond\\n'\n",
        "srun": srun,
        "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
    }
    for name, text in scripts.items():
        executable(folder / name, text)
    own = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    own |= {"SLURM_CPUS_PER_TASK": "96", "PYTHONPATH": import_paths(), "PATH": f"{folder}:{os.environ['PATH']}"}
    return {"cwd": folder, "env": {**os.environ, **own}}


def slurm_job(how: dict) -> subprocess.Popen:
    return subprocess.Popen(["bash", str(CONFIGS / "slurm.sh"), "a.yaml"], **how, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("launch", [None, "ddp.yaml"])
def test_slurm_starts_one_launcher_per_machine(tmp_path, launch):
    """From any folder, with the installed launch file or the one that is named."""
    how = slurm_of_scripts(tmp_path, 'printf "%s\\n" "$@" > said.$SLURM_NODEID')
    script = ["bash", str(CONFIGS / "slurm.sh")]
    if launch is not None:
        how["env"]["LAUNCH_FILE"] = str(CONFIGS / launch)
    run = ["recipes/parcae/small.yaml", "training.output_dir=/a folder/x"]
    subprocess.run([*script, *run], **how, check=True)
    for rank in range(2):
        arguments = (tmp_path / f"said.{rank}").read_text().splitlines()
        assert arguments[-4:] == ["-m", "looped_recipes.pretrain", *run]
        options = dict(zip(arguments[1:-4:2], arguments[2:-4:2]))
        assert options["--machine_rank"] == str(rank) and options["--main_process_ip"] == "first"
        assert options["--num_machines"] == "2" and options["--num_processes"] == "8"
        assert Path(options["--config_file"]).samefile(CONFIGS / (launch or "multi_node.yaml"))
    assert "--cpus-per-task=96" in (tmp_path / "options").read_text().splitlines()
    assert subprocess.run(script, **how, capture_output=True).returncode == 2


@pytest.mark.parametrize(
    "told, status, queued",
    [
        (signal.SIGUSR1, 143, True),
        (signal.SIGUSR1, 0, False),  # the run was done by then
        (signal.SIGTERM, 143, False),  # scancel 7: Slurm tells the shell and the launchers
    ],
    ids=["stopped", "done", "cancelled"],
)
def test_a_slurm_job_that_is_told_to_end_lets_the_run_save(tmp_path, told, status, queued):
    """Before its time is up it is queued again, after scancel it is not."""
    launcher = f"trap 'sleep 0.3; touch saved.$SLURM_NODEID; exit {status}' TERM\ntouch begun.$SLURM_NODEID\n"
    # no $(...): bash 5.2 may lose a trap whose signal comes while it reads one
    how = slurm_of_scripts(tmp_path, launcher + "for ((i = 0; i < 200; i++)); do sleep 0.1; done")
    job = slurm_job(how)
    wait_until(lambda: len(list(tmp_path.glob("begun.*"))) == 2 and (tmp_path / "launchers").exists())
    job.send_signal(told)
    if told == signal.SIGTERM:
        subprocess.run(["./scancel", "--signal=TERM", "7.0"], **how, check=True)
    assert job.wait(20) == status and len(list(tmp_path.glob("saved.*"))) == 2
    assert (tmp_path / "queued").exists() == queued


@pytest.mark.parametrize("begun", [False, True], ids=["before srun", "before its step"])
def test_a_slurm_job_that_is_told_to_end_before_its_run_begins_is_queued_again(tmp_path, begun):
    told = "touch asked; until [ -e told ]; do sleep 0.02; done"
    srun = f"#!/bin/sh\n{told if begun else ''}\nexec sleep 60\n"
    job = slurm_job(slurm_of_scripts(tmp_path, "", srun, "" if begun else told))
    wait_until((tmp_path / "asked").exists)
    job.send_signal(signal.SIGUSR1)
    if not begun:
        (tmp_path / "told").touch()
    assert job.wait(30) == 143 and (tmp_path / "queued").read_text() == "7\n"
