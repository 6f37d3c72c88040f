#!/bin/bash
# Elastic: run this on every node. If a node dies, the job continues on the others. If it returns, it joins the job again.
#   RDZV=HOST:29400 NODES=2:4 RANKS_PER_NODE=8 ROOT=/nvme/ckpt torchrun_elastic.sh examples/fashion_mnist.py --steps 1000
# HOST runs the rendezvous. The loss of HOST ends the job; run the command on other nodes to resume.
set -euo pipefail

: "${RDZV:?HOST:PORT of the rendezvous}" "${ROOT:?a directory on the own disk of this node}"
: "${NODES:=1:2}" "${RANKS_PER_NODE:=1}" "${JOB:=train}" "${RESTARTS:=10}"
# Without this, ranks use the rendezvous's store, and torchrun ends with DistStoreError a minute after the loss of a node.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# Each restart may have another number of ranks: the script loads "latest" at its start.
# last_call_timeout: seconds that the nodes wait for more nodes before they begin.
exec torchrun --nnodes "$NODES" --nproc-per-node "$RANKS_PER_NODE" --max-restarts "$RESTARTS" \
  --rdzv-backend c10d --rdzv-endpoint "$RDZV" --rdzv-id "$JOB" --rdzv-conf last_call_timeout=5 \
  "$@" --root "$ROOT"
