#!/bin/bash
# sbatch --nodes 4 recipes/accelerate/slurm.sh recipes/parcae/small.yaml training.output_dir=/shared/runs/parcae-small
#
# One launcher per machine, one process per GPU. output_dir and data.cache_dir must lie where all machines see them.
# A job that is stopped, or requeued, goes on from the newest whole checkpoint when it is submitted again.
#SBATCH --job-name=looped
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --output=%x-%j.log
set -euo pipefail

if [ $# -lt 1 ]; then
    echo "usage: sbatch [--nodes N] $0 recipe.yaml [section.key=value ...]" >&2
    exit 2
fi

first_machine=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
gpus=${SLURM_GPUS_ON_NODE:-8}

# SLURM_NODEID differs between machines, so the launcher's arguments are put together there
export first_machine gpus
srun --kill-on-bad-exit=1 bash -c '
    accelerate launch \
        --config_file recipes/accelerate/multi_node.yaml \
        --num_machines "$SLURM_NNODES" \
        --num_processes "$((SLURM_NNODES * gpus))" \
        --machine_rank "$SLURM_NODEID" \
        --main_process_ip "$first_machine" \
        --main_process_port "${MASTER_PORT:-29500}" \
        -m recipes.pretrain "$@"
' launcher "$@"
