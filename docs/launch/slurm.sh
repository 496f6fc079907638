#!/bin/bash
# One process for each GPU of four nodes, found by themselves: sbatch docs/launch/slurm.sh
#SBATCH --job-name=transformer_jax
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
# Two minutes before the time is over every process gets SIGTERM: the run saves its state and ends.
#SBATCH --signal=TERM@120
# A job that was preempted comes again, and goes on from its last checkpoint.
#SBATCH --requeue

# The run folder has to be on a file system that all nodes see; so has the data, or a copy on each node.
srun transformer-jax translate \
    --recipe wmt14-en-de-big --mesh data=4,fsdp=8 --run-dir "${RUNS:?a folder that all nodes see}/wmt14-en-de-big"
