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
		if fast := UnknownSignals(); fast.flat(rest) {
			s = fast
			break
		}
		var load struct {
			Named map[string]float64 `json:"named_metrics"`
		}
		if json.Unmarshal(rest, &load) != nil {
			return s, false
		}
		for name, v := range load.Named {
			s.named([]byte(name), v)
		}
	case "TEXT":
		for item := range bytes.SplitSeq(rest, []byte(",")) {
			name, text, _ := bytes.Cut(bytes.TrimSpace(item), []byte("="))
			if v, err := strconv.ParseFloat(string(text), 64); err == nil {
				s.named(bytes.TrimPrefix(name, []byte("named_metrics.")), v)
			}
		}
	}
	return s, s.KVUsage >= 0 || s.Waiting >= 0
}

// flat reads the object that vLLM writes, without memory of its own, because each answer to a short prompt waits for it. It is
// false for any other JSON, which may say the same in another way.
func (g *Signals) flat(text []byte) bool {
	text, ok := bytes.CutPrefix(text, []byte(`{"named_metrics":`))
	text, all := bytes.CutSuffix(text, []byte(`}}`))
	if text = bytes.TrimLeft(text, " "); !ok || !all || len(text) == 0 || text[0] != '{' {
		return false
	}
	for item := range bytes.SplitSeq(text[1:], []byte(",")) {
		name, number, _ := bytes.Cut(bytes.TrimLeft(item, " "), []byte(":"))
		number = bytes.TrimLeft(number, " ")
		if len(name) < 2 || name[0] != '"' || name[len(name)-1] != '"' || !only(name[1:len(name)-1], "abcdefghijklmnopqrstuvwxyz_") || !plain(number) {
			return false
		}
		v, err := strconv.ParseFloat(string(number), 64)
		if err != nil || !g.named(name[1:len(name)-1], v) {
			return false
		}
	}
	return true
}

// plain says that text is a JSON number without sign. A cache that is hardly used has an exponent: 6.1e-05.
func plain(text []byte) bool {
	const digits = "0123456789"
	number, exponent, e := bytes.Cut(text, []byte("e"))
	whole, fraction, point := bytes.Cut(number, []byte("."))
	exponent = bytes.TrimPrefix(exponent, []byte("-"))
	return only(whole, digits) && (len(whole) == 1 || whole[0] != '0') && (!point || only(fraction, digits)) && (!e || only(exponent, digits))
}

func only(text []byte, chars string) bool { return len(text) > 0 && len(bytes.Trim(text, chars)) == 0 }

// named takes a figure, if it is one of ours; false where it cannot be one.
func (g *Signals) named(name []byte, v float64) bool {
	switch string(name) {
	case "kv_cache_usage_perc":
		if v >= 0 && v <= 1 {
			g.KVUsage = v
			return true
		}
		return false
	case "num_requests_waiting":
		if v >= 0 && v < 1<<32 {
			g.Waiting = int64(v)
			return true
		}
		return false
	}
	return true
}
