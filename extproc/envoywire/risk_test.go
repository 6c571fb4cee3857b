package envoywire

import (
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	logv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
)

func TestRisk(t *testing.T) {
	for _, of := range [][3]uint32{{1, 37, 0}, {1, 37, 4}, {1, 38, 2}, {1, 36, 9}} {
		require.Contains(t, Risk(of[0], of[1], of[2]), "take 1.37.5, 1.38.3, 1.39 or newer", of)
	}
	for _, of := range [][3]uint32{{1, 37, 5}, {1, 38, 3}, {1, 39, 0}, {1, 40, 0}, {2, 0, 0}} {
		require.Empty(t, Risk(of[0], of[1], of[2]), of)
	}
}

// An Envoy says its release in the first message of its access log, with all of its extensions behind; it is known for
// as long as the stream is open.
func TestRiskOfALogger(t *testing.T) {
	of := func(major, minor, patch uint32) string {
		node := &corev3.Node{Id: "edge", UserAgentName: "envoy", Extensions: []*corev3.Extension{{Name: "envoy.filters.http.router"}},
			UserAgentVersionType: &corev3.Node_UserAgentBuildVersion{UserAgentBuildVersion: &corev3.BuildVersion{
				Version: &typev3.SemanticVersion{MajorNumber: major, MinorNumber: minor, Patch: patch}}}}
		text, err := proto.Marshal(&logv3.StreamAccessLogsMessage{Identifier: &logv3.StreamAccessLogsMessage_Identifier{Node: node, LogName: "tandem"}})
		require.NoError(t, err)
		var b LogBatch
		require.NoError(t, b.Unmarshal(mem.BufferSlice{mem.SliceBuffer(text)}))
		require.Equal(t, "tandem", b.Name)
		return b.Risk
	}
	require.Contains(t, of(1, 37, 0), "Envoy 1.37.0 can crash")
	require.Empty(t, of(1, 40, 0))
	var r Risky
	require.Empty(t, r.Risk())
	first, second := r.Opened("a"), r.Opened("b")
	first()
	require.Equal(t, "b", r.Risk())
	second()
	require.Empty(t, r.Risk())
}
