#!/bin/sh
# Prints the version that binaries and images carry: the file VERSION, and behind it the commit unless that is the tagged release.
# "version.sh built" adds the commit, if it is not there yet, and its day (UTC): what the programs themselves say.
set -eu
cd "$(dirname "$0")/.."
version=$(cat VERSION)
if ! commit=$(git rev-parse --short=12 HEAD 2>/dev/null); then
  echo "$version-dev"
  exit 0
fi
more=
if [ "$(git describe --tags --exact-match 2>/dev/null)" = "v$version" ]; then more=" $commit"; else version=$version-dev+$commit; fi
[ "${1:-}" = built ] || { echo "$version"; exit 0; }
echo "$version$more $(TZ=UTC0 git show -s --date=format-local:%Y-%m-%d --format=%cd HEAD)"
