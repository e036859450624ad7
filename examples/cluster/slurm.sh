#!/bin/bash
# A run on the nodes of a SLURM job: Ray on each, the driver on the first. Give settings as to offbeat-train:
#   sbatch --nodes=4 examples/cluster/slurm.sh task=gsm8k model.path=/shared/model engine.num_ranks=16 rollout.num_replicas=16
# The folder that it is submitted from, run_dir and the environment in .venv must be seen by all nodes.
#SBATCH --job-name=offbeat
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --open-mode=append
#SBATCH --requeue
# Five minutes before the time is over: the run ends after its step, with a checkpoint, and the job is queued again.
#SBATCH --signal=B:TERM@300
set -euo pipefail

run_dir=${RUN_DIR:-$PWD/runs/slurm-$SLURM_JOB_ID}
export PATH="${VENV:-$PWD/.venv}/bin:$PATH"
# What the commands of Offbeat set for the Ray that they start themselves.
export RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 RAY_USAGE_STATS_ENABLED=0
export RAY_prestart_worker_first_driver=0 RAY_worker_niceness=0 RAY_worker_register_timeout_seconds=300
export RAY_TMPDIR=/tmp # sockets of Unix have names of 107 bytes at most

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
read -r address _ < <(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname --ip-address)
port=$((20000 + SLURM_JOB_ID % 10000))

srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --overlap \
    ray start --head --block --node-ip-address="$address" --port="$port" --include-dashboard=false &
if ((${#nodes[@]} > 1)); then
    srun --nodes=$((${#nodes[@]} - 1)) --ntasks=$((${#nodes[@]} - 1)) --exclude="${nodes[0]}" --overlap \
        ray start --block --address="$address:$port" &
fi
until ray status --address="$address:$port" >/dev/null 2>&1; do
    kill -0 "$(jobs -p | head -n 1)" # or Ray could not start, and that was said above
    sleep 2
done

# The run waits for room on the nodes, cluster.start_timeout_s at most: they may come one by one.
offbeat-train device=cuda "$@" run_dir="$run_dir" cluster.ray_address="$address:$port" resume=auto &
driver=$!
trap 'kill -TERM "$driver"' TERM
wait "$driver" || true
while kill -0 "$driver" 2>/dev/null; do # the signal ended the wait, and not yet the run
    wait "$driver" || true
done
code=0
wait "$driver" || code=$? # what it ended with
if ((code == 130)); then
    scontrol requeue "$SLURM_JOB_ID" # it goes on from its checkpoint
fi
exit "$code"
