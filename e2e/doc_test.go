// Package e2e tests Tandem from outside: the real binaries, the real Envoy, strict simulated engines (cmd/enginesim),
// all as processes on 127.0.0.1. It imports nothing of Tandem's own.
//
// fleet_test.go starts and stops a test's processes; every test starts its own fleet and, when it ends, checks the
// fleet's account: no KV block left behind on an engine, no violation counted, no reservation held.
//
// Envoy is $ENVOY, else envoy on PATH, else .tools/bin/envoy (scripts/tools.sh). Without one the tests are skipped,
// unless TANDEM_REQUIRE_TOOLS is set, as `make test` does: then they fail.
package e2e
