#!/usr/bin/env bash
# Train on one or more nodes of a Slurm cluster, and queue the job again when its time is up.
#
#   sbatch --nodes 2 --gpus-per-node 8 examples/slurm.sh RECIPE [--field value ...]
#
# The run's folder is runs/RECIPE, on a file system that all nodes share.
#SBATCH --job-name=seqboat
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
recipe=${1:?usage: sbatch examples/slurm.sh RECIPE [--field value ...]}
shift
nodes=${SLURM_NNODES:-1}
gpus=${SLURM_GPUS_ON_NODE:-1}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
flag=$(mktemp)

# torchrun passes SIGTERM on to the run, which saves, but not its exit code: a file remembers to queue the job again
stop() {
    echo requeue > "$flag"
    scancel --signal=TERM "$SLURM_JOB_ID.0"
}
trap stop USR1

srun torchrun \
    --nnodes "$nodes" --nproc-per-node "$gpus" \
    --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" \
    --no-python seqboat train "$recipe" --out "runs/$recipe" --resume "$@" &
step=$!
wait "$step"
code=$?
while kill -0 "$step" 2> /dev/null; do  # `wait` returns early when the signal arrives
    wait "$step"
    code=$?
done
if [ -s "$flag" ]; then
    rm -f "$flag"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
rm -f "$flag"
exit "$code"
