#!/bin/bash
# sbatch --nodes 4 recipes/accelerate/slurm.sh recipes/parcae/small.yaml training.output_dir=/shared/runs/parcae-small
#
# One launcher per machine, one process per GPU. output_dir and data.cache_dir must lie where all machines see them.
# LAUNCH_FILE=recipes/accelerate/ddp.yaml in front of sbatch launches as that file says, instead of multi_node.yaml.
# Five minutes before its time is up, or after `scancel --batch --signal=USR1 JOB`, the run saves the step it is at, and
# the job is queued again, until the run is done; scancel JOB ends it for good, unless it comes after that signal. A job
# submitted again goes on, too.
#SBATCH --job-name=looped
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

if [ $# -lt 1 ]; then
    echo "usage: sbatch [--nodes N] $0 recipe.yaml [section.key=value ...]" >&2
    exit 2
fi

# USR1 comes to this shell alone. The launchers get TERM from Slurm: srun, if it were told to end, would kill them
run=
stopped=
stop() {
    woken=yes stopped=yes
    [ -z "$run" ] || scancel --signal=TERM "$SLURM_JOB_ID.0" || kill "$run" 2>/dev/null || true
}
trap stop USR1
trap woken=yes TERM  # of scancel JOB, which the launchers get too

machines=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first_machine=${machines%%$'\n'*}
gpus=${SLURM_GPUS_ON_NODE:-8}
LAUNCH_FILE=${LAUNCH_FILE:-$(python -c 'import looped_recipes as r; print(*r.__path__)')/accelerate/multi_node.yaml}

# SLURM_NODEID differs between machines, so the launcher's arguments are put together there
export first_machine gpus LAUNCH_FILE
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=270  # seconds that a launcher gives its processes to save
# srun of Slurm 22.05 to 23.02 does not take the number of cores from sbatch
srun --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} bash -c '
    exec accelerate launch \
        --config_file "$LAUNCH_FILE" \
        --num_machines "$SLURM_NNODES" \
        --num_processes "$((SLURM_NNODES * gpus))" \
        --machine_rank "$SLURM_NODEID" \
        --main_process_ip "$first_machine" \
        --main_process_port "${MASTER_PORT:-29500}" \
        -m looped_recipes.pretrain "$@"
' launcher "$@" &
run=$!
[ -z "$stopped" ] || kill "$run" 2>/dev/null || true  # it came before there was a run, which has nothing to save
woken=yes
while [ -n "$woken" ]; do  # wait returns when a signal comes
    woken= status=0
    wait "$run" || status=$?
done
if [ -n "$stopped" ] && [ "$status" -ne 0 ]; then
    echo "the run was stopped before its end: the job is queued again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
