package envoyconfigs

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/yaml"

	"tandem/replica/config"
)

// What is served is valid by the rules of Envoy's API, and the real Envoy takes the bootstrap.
func TestDynamic(t *testing.T) {
	for name, text := range cases(t) {
		t.Run(name, func(t *testing.T) {
			c, _, err := config.Parse([]byte(text))
			require.NoError(t, err)
			r, err := Dynamic(c)
			require.NoError(t, err)
			names := map[string]bool{}
			for kind, resource := range r.All() {
				require.NoError(t, resource.(interface{ ValidateAll() error }).ValidateAll())
				name := fmt.Sprint(kind, resource.ProtoReflect().Get(resource.ProtoReflect().Descriptor().Fields().ByNumber(1)))
				names[name] = true
			}
			bootstrap, err := DynamicBootstrap(c)
			require.NoError(t, err)
			validate(t, bootstrap)
		})
	}
}

// What an Envoy gets over xDS, every resource as typed YAML: with TLS, tracing, and two replicas. Of replicas from
// Redis only the runtime, which assigns the 16 access logs.
func TestDynamicGolden(t *testing.T) {
	const file = "testdata/dynamic.yaml"
	const text = `{envoy: {extProcs: ["10.0.0.1:9002", "10.0.0.2:9002"], replicas: REPLICAS,
extProcTls: {caFile: ca.pem, certFile: envoy.pem, keyFile: envoy.key}},
extProc: {tls: {certFile: t.pem, keyFile: t.key}}, tickets: {keyFile: k}, state: {redis: {url: "redis://redis:6379"}}, tracing: {endpoint: "otel:4317", sampleRatio: 0.1},
pools: [{name: a, kvTransfer: nixl, discovery: {kubernetes: {selector: "app=llm", ports: [8000]}}}]}`
	made := func(replicas string, living ...Replica) *Resources {
		c, _, err := config.Parse([]byte(strings.Replace(text, "REPLICAS", replicas, 1)))
		require.NoError(t, err)
		r, err := Dynamic(c, living...)
		require.NoError(t, err)
		return r
	}
	r := made("configured")
	require.Empty(t, r.Runtimes)
	r.Runtimes = made("redis", Replica{0, "10.0.0.1:9002", "10.0.0.1:9003"},
		Replica{3, "10.0.0.2:9002", "10.0.0.2:9003"}).Runtimes
	var got strings.Builder
	got.WriteString("# What an Envoy gets over xDS: written by go test ./envoy-configs -update\n")
	for kind, resource := range r.All() {
		require.NoError(t, resource.(interface{ ValidateAll() error }).ValidateAll())
		text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(resource)
		require.NoError(t, err)
		text, err = yaml.JSONToYAML(text)
		require.NoError(t, err)
		fmt.Fprintf(&got, "--- # %s\n%s", kind, text)
	}
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(got.String()), 0o644))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(want), got.String(), "run go test -update")
}

// Pools change nothing of what is served, so that replicas may read them at different times.
func TestPoolsNeedNothingNew(t *testing.T) {
	served := func(pools string) *Resources {
		c, _, err := config.Parse([]byte(pools))
		require.NoError(t, err)
		r, err := Dynamic(c)
		require.NoError(t, err)
		return r
	}
	want := served(pool)
	got := served(strings.Replace(strings.Replace(pool, "nixl", "sglang", 1), "role: decode", "role: decode, scheme: https", 1))
	require.Len(t, got.Clusters, len(want.Clusters))
	for i := range want.Clusters {
		require.True(t, proto.Equal(want.Clusters[i], got.Clusters[i]), want.Clusters[i].GetName())
	}
	for i := range want.Listeners {
		require.True(t, proto.Equal(want.Listeners[i], got.Listeners[i]), want.Listeners[i].GetName())
	}
	require.True(t, proto.Equal(want.Routes[0], got.Routes[0]))
}

// A replica that comes or goes changes no cluster whose streams would be cut.
func TestReplicasComeApart(t *testing.T) {
	served := func(extProcs string) map[string]proto.Message {
		c, _, err := config.Parse([]byte(`{envoy: {extProcs: [` + extProcs + `]}, tickets: {keyFile: k}` + flow()))
		require.NoError(t, err)
		r, err := Dynamic(c)
		require.NoError(t, err)
		out := map[string]proto.Message{}
		for _, c := range r.Clusters {
			out[c.GetName()] = c
		}
		return out
	}
	one, two := served(`"10.0.0.1:9002"`), served(`"10.0.0.2:9002", "10.0.0.1:9002"`)
	for name := range one {
		require.True(t, proto.Equal(one[name], two[name]), name)
	}
	require.Len(t, two, len(one)+1, "the log of the other replica")
}

// Replicas that come and go by themselves change endpoints and the runtime, and nothing else.
func TestLivingReplicas(t *testing.T) {
	served := func(living ...Replica) map[string]proto.Message {
		c, _, err := config.Parse([]byte(`{envoy: {replicas: redis}, state: {redis: {url: "redis://localhost"}}` + flow()))
		require.NoError(t, err)
		bootstrap, err := DynamicBootstrap(c)
		require.NoError(t, err)
		require.Contains(t, string(bootstrap), "rtds_layer")
		validate(t, bootstrap)
		r, err := Dynamic(c, living...)
		require.NoError(t, err)
		out := map[string]proto.Message{}
		for kind, resource := range r.All() {
			require.NoError(t, resource.(interface{ ValidateAll() error }).ValidateAll())
			name := fmt.Sprint(resource.ProtoReflect().Get(resource.ProtoReflect().Descriptor().Fields().ByNumber(1)))
			out[kind[strings.LastIndex(kind, ".")+1:]+" "+name] = resource
		}
		return out
	}
	a, b := Replica{0, "10.0.0.1:9002", "10.0.0.1:9003"}, Replica{2, "10.0.0.2:9002", "10.0.0.2:9003"}
	one, two := served(a), served(a, b)
	require.Len(t, two, len(one))
	changed := []string{}
	for name := range one {
		if !proto.Equal(one[name], two[name]) {
			changed = append(changed, name)
		}
	}
	require.ElementsMatch(t, []string{
		"ClusterLoadAssignment tandem-extproc", "ClusterLoadAssignment tandem-replan",
		"ClusterLoadAssignment tandem-accesslog-slot-2", "Runtime tandem",
	}, changed)
}
