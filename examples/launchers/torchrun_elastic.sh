#!/bin/bash
# Elastic: run this on every node. The job goes on with what is left when a node dies, and takes it back when it returns.
#   RDZV=HOST:29400 NODES=2:4 RANKS_PER_NODE=8 ROOT=/nvme/ckpt torchrun_elastic.sh examples/fashion_mnist.py --steps 1000
# HOST runs the rendezvous: the loss of that one node ends the job, and the same command anywhere resumes it.
set -euo pipefail

: "${RDZV:?HOST:PORT of the rendezvous}" "${ROOT:?a directory on the own disk of this node}"
: "${NODES:=1:2}" "${RANKS_PER_NODE:=1}" "${JOB:=train}" "${RESTARTS:=10}"
# Else the ranks use the store of the rendezvous, and torchrun ends with DistStoreError a minute after a node was lost.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# Each restart is a new world: the script loads "latest" at its start, which works on any number of ranks.
# last_call_timeout: how long those who are there wait for more before they begin.
exec torchrun --nnodes "$NODES" --nproc-per-node "$RANKS_PER_NODE" --max-restarts "$RESTARTS" \
  --rdzv-backend c10d --rdzv-endpoint "$RDZV" --rdzv-id "$JOB" --rdzv-conf last_call_timeout=5 \
  "$@" --root "$ROOT"
