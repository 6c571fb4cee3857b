#!/bin/sh
# Regenerates the Go code of every protos/*/v1/*.proto, next to it. The generated code is committed, so only a change of a
# .proto needs this. protoc comes from PyPI (tools.sh dev), protoc-gen-go is built from the version in go.mod.
set -eu
cd "$(dirname "$0")/.."
./scripts/tools.sh dev
go build -o .tools/bin/protoc-gen-go google.golang.org/protobuf/cmd/protoc-gen-go
.tools/venv/bin/python -m grpc_tools.protoc \
  --plugin=protoc-gen-go=.tools/bin/protoc-gen-go \
  --proto_path=protos --go_out=protos --go_opt=paths=source_relative \
  $(cd protos && ls -- */v1/*.proto)
