#!/usr/bin/env bash
# Slurm's daemons and commands from Debian or Ubuntu, for tests that start them themselves. Says so
# where it cannot install them: such tests are skipped then.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
packages=(slurmctld slurmd slurm-client munge)
if command -v slurmctld && command -v slurmd && command -v munged && command -v sbatch; then exit; fi > /dev/null
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "no Slurm here, and only root can install it (apt-get): tests/slurm is skipped" >&2
  exit
fi
policy=/usr/sbin/policy-rc.d  # which says that no package may start its daemons
if [ ! -e $policy ]; then
  trap 'rm -f $policy' EXIT
  printf '#!/bin/sh\nexit 101\n' > $policy
  chmod 755 $policy
fi
export DEBIAN_FRONTEND=noninteractive
install() { apt-get install -y -q --no-install-recommends "${packages[@]}"; }
install || { apt-get update -q && install; } ||
  echo "Slurm could not be installed: tests/slurm is skipped" >&2
