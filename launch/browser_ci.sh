#!/usr/bin/env bash
# A Chromium for the test that opens the report, from the system's packages: Playwright's own builds are not needed.
# Installs where it may (as root, or by sudo without a password); says so where it may not, and that test is skipped.
set -u
for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null && "$name" --version >/dev/null 2>&1; then
    exit 0
  fi
done
as_root=()
if [ "$(id -u)" != 0 ]; then
  as_root=(sudo -n)
fi
if ! command -v apt-get >/dev/null || ! "${as_root[@]}" true 2>/dev/null; then
  echo "no Chromium, and no way to install one here (apt-get as root): the browser test will be skipped" >&2
  exit 0
fi
"${as_root[@]}" apt-get update -qq >/dev/null
if ! "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; then
  echo "Chromium could not be installed (see above): the browser test will be skipped" >&2
fi
