//go:build foreign

// Package foreign runs Tandem and Envoy in front of engines that other projects wrote to test their own routers: the
// simulator of llm-d (kvTransfer nixl) and AIBrix's mock (kvTransfer trtllm). They accept more than a real engine, and
// know nothing of what Tandem's authors believe.
//
// install.sh builds them from the projects' repositories. It needs the build tag foreign, bin/tandem, and an Envoy
// ($ENVOY, PATH, or .tools/bin/envoy): make e2e-foreign. Like all of e2e it imports no package of ours.
package foreign
