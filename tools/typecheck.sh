#!/bin/sh
# mypy --strict on the package as it installs, and on a script of a user: a tree of links, as mypy does not follow the editable finder.
# usage: typecheck.sh PYTHON
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir "$tree/mtmd"
for part in "$root"/mtmd/*; do ln -s "$part" "$tree/mtmd/$(basename "$part")"; done
for folder in kernels clip llm web; do ln -s "$root/$folder" "$tree/mtmd/$folder"; done
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
cd "$tree" && "$python" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" -p mtmd
MYPYPATH="$tree" "$python" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" "$root/tests/typing/script.py"
