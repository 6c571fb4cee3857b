package envoywire

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	logdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	logv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"

	"tandem/extproc/ended"
	"tandem/extproc/envoywire/wiretest"
	"tandem/extproc/names"
)

// What Envoy says of an answer's tokens is an engine's word: only numbers of tokens are taken.
func TestLogBatchReadsUsage(t *testing.T) {
	number, absurd := structpb.NewNumberValue, ended.Count{Said: true, Absurd: true}
	for name, c := range map[string]struct {
		value *structpb.Value
		want  ended.Count
	}{
		"a number":     {number(7), ended.Count{Tokens: 7, Said: true}},
		"none":         {number(0), ended.Count{Said: true}},
		"the most":     {number(ended.MaxTokens), ended.Count{Tokens: ended.MaxTokens, Said: true}},
		"too many":     {number(ended.MaxTokens + 1), absurd},
		"negative":     {number(-1), absurd},
		"half a token": {number(.5), absurd},
		"not a number": {number(math.NaN()), absurd},
		"endless":      {number(math.Inf(1)), absurd},
		"text":         {structpb.NewStringValue("7"), absurd},
		"null":         {structpb.NewNullValue(), absurd},
	} {
		t.Run(name, func(t *testing.T) {
			wire := wiretest.Marshal(t, entries(&logdatav3.HTTPAccessLogEntry{
				CommonProperties: &logdatav3.AccessLogCommon{
					TimeToLastUpstreamRxByte: durationpb.New(3 * time.Second),
					CustomTags:               map[string]string{names.TagFirstBody: "1500"},
					Metadata: &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{
						"tandem":             {Fields: map[string]*structpb.Value{names.UsageOut: number(99)}},
						names.UsageNamespace: {Fields: map[string]*structpb.Value{names.UsageOut: c.value, "other": number(1)}},
					}},
				},
				Request: &logdatav3.HTTPRequestProperties{RequestHeaders: map[string]string{"x-tenant": "a"}},
			}, &logdatav3.HTTPAccessLogEntry{}))
			b := LogBatch{Tenant: "x-tenant"}
			require.NoError(t, b.Unmarshal(split(wire, rand.New(rand.NewPCG(5, 6)))))
			require.Len(t, b.Entries, 2)
			require.Equal(t, ended.Usage{FirstBody: 1500 * time.Microsecond, LastByte: 3 * time.Second, Tenant: []byte("a"), Out: c.want},
				b.Entries[0].Ended.Usage)
			require.Zero(t, b.Entries[1].Ended.Usage)
		})
	}
}

func entries(of ...*logdatav3.HTTPAccessLogEntry) *logv3.StreamAccessLogsMessage {
	return &logv3.StreamAccessLogsMessage{LogEntries: &logv3.StreamAccessLogsMessage_HttpLogs{
		HttpLogs: &logv3.StreamAccessLogsMessage_HTTPAccessLogEntries{LogEntry: of},
	}}
}

func TestTimeOfTheFirstByte(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"": 0, "-": 0, "12": 12 * time.Microsecond, "-5": 0, "1e9": 0, "999999999999999999999": 0,
		"86400000001": 0, "86400000000": 24 * time.Hour,
	} {
		require.Equal(t, want, micros([]byte(text)), text)
	}
}
