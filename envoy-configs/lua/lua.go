// Package lua has the scripts that Envoy runs on answers.
package lua

import _ "embed"

// The scripts, each with a function envoy_on_response.
var (
	//go:embed inline.lua
	Inline string // makes the redirect of a short prefill answer (docs/adr/0017)
	//go:embed refusal.lua
	Refusal string // cuts KV parameters from an engine's refusal
	//go:embed unfollowed.lua
	Unfollowed string // ends redirects that Envoy could not follow
	//go:embed late.lua
	Late string // asks the server about answers that begin late (docs/adr/0050)
	//go:embed edit.lua
	Edit string // cuts KV parameters from answers, and all of a stream that Late refused
	//go:embed usage.lua
	Usage string // reads the tokens of streams (docs/adr/0069)
	//go:embed host.lua
	Host string // gives the mirrored leg's request the name of its engine as Host; it has envoy_on_request instead
)
