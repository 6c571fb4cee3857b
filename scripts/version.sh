#!/bin/sh
# Prints the version that binaries and images carry: the file VERSION, and behind it the commit unless that is the tagged release.
set -eu
cd "$(dirname "$0")/.."
version=$(cat VERSION)
commit=$(git rev-parse --short=12 HEAD 2>/dev/null) || { echo "$version-dev"; exit 0; }
if [ "$(git describe --tags --exact-match 2>/dev/null)" = "v$version" ]; then echo "$version"; else echo "$version-dev+$commit"; fi
