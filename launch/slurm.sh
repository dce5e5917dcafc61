#!/bin/bash
@SBATCH@
# Rendered by `megarl launch slurm`; a copy of it named by `template` in your cluster's YAML must have all places.
# Python takes over this very process, so that the signals that Slurm sends to the batch shell reach it.
set -uo pipefail
cd -- @WORK_DIR@ || exit 1
@ENVIRONMENT@
unset RAY_ADDRESS  # on a shared node it may be a neighbour's
export RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1
exec @SUPERVISE@ @PLAN@
