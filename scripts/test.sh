#!/bin/bash
# Runs go test with the flags given, over the packages given; `go vet` has been run before. A test that fails is run once
# more by itself, and if it passes then it is reported as FLAKY, at the end, with its output above: a bug to mend, but no
# reason to refuse a change that has nothing to do with it (docs/adr/0018). Not after a data race, a panic or a sixth
# failure: those fail at once. The ten slowest tests are named at the end.
#
# usage: test.sh PACKAGE ... -- [FLAG ...]
set -euo pipefail
cd "$(dirname "$0")/.."
packages=()
while [ "$1" != -- ]; do packages+=("$1"); shift; done
shift
gotestsum=gotest.tools/gotestsum@v1.13.0
go=${GO:-go}
if ! "$go" run "$gotestsum" --version >/dev/null 2>&1; then
  echo 'test.sh: gotestsum cannot be had: no test is run twice' >&2
  exec "$go" test -vet=off "$@" "${packages[@]}"
fi
format=pkgname
case " $* " in *" -v "*) format=standard-verbose ;; esac
report=$(mktemp) events=$(mktemp)
trap 'rm -f "$report" "$events"' EXIT
rc=0
"$go" run "$gotestsum" --format "$format" --hide-summary skipped --rerun-fails=1 --rerun-fails-max-failures=5 --rerun-fails-run-root-test \
  --rerun-fails-abort-on-data-race --rerun-fails-report "$report" --jsonfile-timing-events "$events" --packages "${packages[*]}" -- -vet=off "$@" || rc=$?
if [ -s "$report" ]; then sed "s/^/$([ $rc = 0 ] && echo FLAKY || echo 'run twice'): /" "$report"; fi
"$go" run "$gotestsum" tool slowest --num 10 --jsonfile "$events" | sed 's/^/slowest: /' || true
exit $rc
