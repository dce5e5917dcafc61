#!/usr/bin/env bash
# What the tests of launching need: Debian's Slurm, munge and network namespaces. Installs them where they are absent
# and this user may; elsewhere those tests say why they are skipped.
set -uo pipefail
wanted=(slurmctld slurmd slurm-client munge iproute2 util-linux)
command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null && command -v ip >/dev/null && exit 0
command -v apt-get >/dev/null || { echo "no apt-get: tests/slurm will be skipped"; exit 0; }
as_root=()
if [ "$(id -u)" != 0 ]; then
  sudo -n true 2>/dev/null || { echo "neither root nor passwordless sudo: tests/slurm will be skipped"; exit 0; }
  as_root=(sudo -n)
fi
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq &&
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${wanted[@]}" >/dev/null ||
  echo "Slurm could not be installed: tests/slurm will be skipped"
