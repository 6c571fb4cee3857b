package livemodule_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	envoyconfigs "tandem/envoy-configs"
	"tandem/envoy-configs/livemodule"
	"tandem/replica/config"
)

const chat = `
envoy: {run: inside}
pools:
- name: chat
  kvTransfer: nixl
  discovery:
    dns:
    - {name: p.llm.svc.cluster.local, port: 8000, role: prefill}
    - {name: d.llm.svc.cluster.local, port: 8000, role: decode}
`

// services are what the names in the configuration are of.
const services = `
---
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Service, metadata: {name: p, namespace: llm}, spec: {clusterIP: None}}
- {apiVersion: v1, kind: Service, metadata: {name: d, namespace: llm}, spec: {clusterIP: None}}
`

func printed(t *testing.T, text string, o envoyconfigs.ModuleOptions) string {
	t.Helper()
	c, _, err := config.Parse([]byte(text))
	require.NoError(t, err)
	o.Namespace, o.Name, o.Image = "llm", "chat", "tandem-envoy:1"
	if o.Config == nil {
		o.Config, err = config.ForPolicy([]byte(text))
		require.NoError(t, err)
	}
	o.Library = "/usr/lib/tandem/libtandem.so"
	out, err := envoyconfigs.EnvoyGatewayModule(c, o)
	require.NoError(t, err)
	return string(out) + services
}

func check(t *testing.T, text string) []string {
	t.Helper()
	all, err := livemodule.Read(strings.NewReader(text))
	require.NoError(t, err)
	return livemodule.Check(all, "llm", "chat")
}

// Nothing is wrong with what is printed, whether the configuration stands in the policy or in a file.
func TestPrinted(t *testing.T) {
	require.Empty(t, check(t, printed(t, chat, envoyconfigs.ModuleOptions{})))
	require.Empty(t, check(t, printed(t, chat, envoyconfigs.ModuleOptions{Config: []byte(chat), File: "/etc/tandem/tandem.yaml"})))
}

// Each thing that is missing or wrong has a sentence that mends it.
func TestMissingOrWrong(t *testing.T) {
	good := printed(t, chat, envoyconfigs.ModuleOptions{})
	without := func(line string) string {
		var kept []string
		for l := range strings.SplitSeq(good, "\n") {
			if !strings.Contains(l, line) {
				kept = append(kept, l)
			}
		}
		return strings.Join(kept, "\n")
	}
	with := func(from, to string) string {
		require.Contains(t, good, from)
		return strings.Replace(good, from, to, 1)
	}
	for name, tt := range map[string]struct{ text, want string }{
		"no policy":                {with("kind: EnvoyExtensionPolicy\nmetadata: {name: chat,", "kind: EnvoyExtensionPolicy\nmetadata: {name: other,"), "EnvoyExtensionPolicy llm/chat is not there"},
		"no route":                 {with("kind: HTTPRoute\nmetadata: {name: chat,", "kind: HTTPRoute\nmetadata: {name: other,"), "HTTPRoute llm/chat is not there"},
		"no module in the policy":  {with("filterName: tandem", "filterName: hold"), "has no dynamicModule"},
		"a member of another name": {with("strict: true}", "strictly: true}"), "unknown field"},
		"a setting that is wrong":  {with("kvTransfer: nixl", "kvTransfer: nixel"), "config.tandem: pools[0].kvTransfer"},
		"a setting of the owner's": {with("kvTransfer: nixl", "kvTransfer: nixl\n            apiKeyFile: /etc/key"), "is not for a policy"},
		"no rule for calls":        {with("rule: 1,", "rule: 2,"), "has no rule 2"},
		"calls are not strict":     {with("spec: {type: DynamicResolver}", "spec: {endpoints: []}"), "give it a Backend of type DynamicResolver"},
		"clients choose addresses": {with("- {name: d, port: 8000}", "- {group: gateway.envoyproxy.io, kind: Backend, name: chat-calls}"), "connect to any address"},
		"no backend":               {with("kind: Backend\nmetadata: {name: chat-calls,", "kind: Backend\nmetadata: {name: other,"), "Backend llm/chat-calls, which is not there"},
		"no service":               {with("{name: d, namespace: llm}", "{name: e, namespace: llm}"), "Service llm/d, which is not there"},
		"two backends":             {with("- {name: d, port: 8000}", "- {name: d, port: 8000}\n    - {name: p, port: 8000}"), "has 2 backendRefs"},
		"not headless":             {with("{name: d, namespace: llm}, spec: {clusterIP: None}", "{name: d, namespace: llm}, spec: {clusterIP: 10.0.0.9}"), "d.llm.svc.cluster.local is one address for all engines"},
		"time limit":               {without("timeouts: {request: 0s}"), "has no timeouts"},
		"a rewrite":                {with("    timeouts: {request: 0s}", "    filters: [{type: URLRewrite}]\n    timeouts: {request: 0s}"), "pathPrefixes"},
		"no traffic policy":        {with("kind: BackendTrafficPolicy", "kind: OtherPolicy"), "has no BackendTrafficPolicy"},
		"no retry policy":          {without("  retry:"), "has no retry policy, so Envoy keeps no body"},
		"retries":                  {with("triggers: [retriable-status-codes]", "triggers: [5xx]"), "Envoy repeats at any engine"},
		"circuit breaker":          {without("circuitBreaker:"), "1,024 requests at once"},
		"idle time":                {without("streamIdleTimeout"), "silent for 5 minutes"},
		"health checks":            {with("  circuitBreaker:", "  healthCheck: {active: {}}\n  circuitBreaker:"), "leave healthCheck to Tandem"},
		"no override":              {with("{rule: 1, strict: true}", "{rule: 1}"), "endpointOverride"},
		"no Gateway":               {with("kind: Gateway\nmetadata: {name: chat,", "kind: Gateway\nmetadata: {name: other,"), "Gateway llm/chat is not there"},
		"no EnvoyProxy named":      {without("infrastructure:"), "has no EnvoyProxy"},
		"no EnvoyProxy":            {with("kind: EnvoyProxy\nmetadata: {name: chat,", "kind: EnvoyProxy\nmetadata: {name: other,"), "EnvoyProxy llm/chat is not there"},
		"another module":           {with("  dynamicModules:\n  - name: tandem", "  dynamicModules:\n  - name: other"), "does not load the module tandem"},
		"the library is closed":    {without("doNotClose"), "doNotClose"},
		"order of filters":         {without("after: envoy.filters.http.ratelimit"), "lets Tandem come before envoy.filters.http.ratelimit"},
		"drain":                    {without("drainTimeout"), "ends streams after 60 s"},
		"image":                    {without("image: tandem-envoy"), "neither an image of Envoy"},
	} {
		t.Run(name, func(t *testing.T) {
			found := check(t, tt.text)
			require.NotEmpty(t, found)
			require.LessOrEqual(t, len(found), 2, "%q", found) // of two rules, or what follows from the first
			require.Contains(t, found[0], tt.want)
		})
	}
	_, err := livemodule.Read(strings.NewReader("kind: [\n"))
	require.ErrorContains(t, err, "reading resources")
}

// What Envoy Gateway says of a resource in its status is handed on.
func TestConditions(t *testing.T) {
	good := printed(t, chat, envoyconfigs.ModuleOptions{})
	const no = "status: {conditions: [{type: Accepted, status: \"False\", reason: Invalid, message: Backend is disabled}]}\n"
	found := check(t, strings.Replace(good, "spec: {type: DynamicResolver}\n", "spec: {type: DynamicResolver}\n"+no, 1))
	require.Equal(t, []string{"Backend llm/chat-calls: Envoy Gateway says Accepted: False (Invalid): Backend is disabled"}, found)
	const parents = "status: {parents: [{conditions: [{type: ResolvedRefs, status: \"False\", reason: X, message: why}]}]}\n"
	found = check(t, strings.Replace(good, "kind: HTTPRoute\n", "kind: HTTPRoute\n"+parents, 1))
	require.Equal(t, []string{"HTTPRoute llm/chat: Envoy Gateway says ResolvedRefs: False (X): why"}, found)
}
