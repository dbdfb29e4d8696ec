#!/usr/bin/env bash
# Run on every node, with its number; the first node's address and a free port of it are the same everywhere:
#
#     NODE_RANK=0 NODES=2 HEAD_ADDRESS=10.0.0.1 ./torchrun.sh
#
# Where nodes reach one another by another interface than that of their host name, set GLOO_SOCKET_IFNAME and
# NCCL_SOCKET_IFNAME to it.
set -euo pipefail

exec torchrun \
    --nnodes "${NODES:?the number of nodes}" \
    --node-rank "${NODE_RANK:?the number of this node, from 0}" \
    --nproc-per-node "${RANKS_PER_NODE:-8}" \
    --master-addr "${HEAD_ADDRESS:?the address of node 0}" \
    --master-port "${HEAD_PORT:-29500}" \
    "$(dirname "$0")/train.py" --nodes "$NODES" "$@"
