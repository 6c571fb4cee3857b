package kvstate

import (
	"bytes"
	"encoding/json"
	"strconv"
)

// ORCAHeader is the response header in which an engine tells its load along with an answer (Open Request Cost Aggregation),
// and ORCARequestHeader what asks for it, with the value JSON or TEXT. vLLM has it since 0.13, for chat completions and
// completions (entrypoints/openai/orca_metrics.py): the use of the KV cache and the requests waiting, nothing else.
const (
	ORCAHeader        = "endpoint-load-metrics"
	ORCARequestHeader = "endpoint-load-metrics-format"
)

// ParseORCA reads such a header's value, in either format:
//
//	JSON {"named_metrics":{"kv_cache_usage_perc":0.12,"num_requests_waiting":3.0}}
//	TEXT named_metrics.kv_cache_usage_perc=0.12, named_metrics.num_requests_waiting=3.0
//
// ok is false where it tells neither figure. The time is for the caller to set.
func ParseORCA(value []byte) (s Signals, ok bool) {
	s = UnknownSignals()
	format, rest, _ := bytes.Cut(bytes.TrimSpace(value), []byte(" "))
	switch string(format) {
	case "JSON":
		var load struct {
			Named map[string]float64 `json:"named_metrics"`
		}
		if json.Unmarshal(rest, &load) != nil {
			return s, false
		}
		for name, v := range load.Named {
			s.named(name, v)
		}
	case "TEXT":
		for item := range bytes.SplitSeq(rest, []byte(",")) {
			name, text, _ := bytes.Cut(bytes.TrimSpace(item), []byte("="))
			if v, err := strconv.ParseFloat(string(text), 64); err == nil {
				s.named(string(bytes.TrimPrefix(name, []byte("named_metrics."))), v)
			}
		}
	}
	return s, s.KVUsage >= 0 || s.Waiting >= 0
}

func (g *Signals) named(name string, v float64) {
	switch {
	case name == "kv_cache_usage_perc" && v >= 0 && v <= 1:
		g.KVUsage = v
	case name == "num_requests_waiting" && v >= 0 && v < 1<<32:
		g.Waiting = int64(v)
	}
}
