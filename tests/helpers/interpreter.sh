#!/usr/bin/env bash
# Prints the path of an interpreter that runs and has this version: interpreter.sh 3.12
# A shim of pyenv stands on the PATH even where its version is not selected, so every candidate is tried.
set -uo pipefail
candidates=$(type -ap "python$1")
if command -v pyenv >/dev/null; then
    candidates+=$'\n'$(ls -d "$(pyenv root)"/versions/"$1".*/bin/"python$1" 2>/dev/null | sort -rV)
fi
while read -r candidate; do
    if [ -n "$candidate" ] && found=$("$candidate" -c 'import sys, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) \
        && [ "$found" = "$1" ]; then
        echo "$candidate"
        exit 0
    fi
done <<<"$candidates"
if [ -n "${candidates//[[:space:]]/}" ]; then
    echo "!!! Python $1 was found, but does not run: SKIPPED ($(echo $candidates)) !!!" >&2
else
    echo "!!! Python $1 is not installed: SKIPPED !!!" >&2
fi
exit 1
