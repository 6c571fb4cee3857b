package enginehttp

import (
	"bytes"
	"encoding/json"
	"strconv"

	"tandem/kvstate"
)

// ORCAHeader is the response header in which an engine reports its load with an answer (Open Request Cost
// Aggregation). ORCARequestHeader asks for it, with the value JSON or TEXT. vLLM supports it since 0.13 for chat
// completions and completions (entrypoints/openai/orca_metrics.py): KV cache usage and waiting requests only.
const (
	ORCAHeader        = "endpoint-load-metrics"
	ORCARequestHeader = "endpoint-load-metrics-format"
)

// ParseORCA parses the header's value, in either format:
//
//	JSON {"named_metrics":{"kv_cache_usage_perc":0.12,"num_requests_waiting":3.0}}
//	TEXT named_metrics.kv_cache_usage_perc=0.12, named_metrics.num_requests_waiting=3.0
//
// ok is false if it has neither figure. The caller sets the time.
func ParseORCA(value []byte) (s kvstate.Signals, ok bool) {
	s = kvstate.UnknownSignals()
	format, rest, _ := bytes.Cut(bytes.TrimSpace(value), []byte(" "))
	switch string(format) {
	case "JSON":
		if fast := kvstate.UnknownSignals(); readFlat(&fast, rest) {
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
			setNamed(&s, []byte(name), v)
		}
	case "TEXT":
		for item := range bytes.SplitSeq(rest, []byte(",")) {
			name, text, _ := bytes.Cut(bytes.TrimSpace(item), []byte("="))
			if v, err := strconv.ParseFloat(string(text), 64); err == nil {
				setNamed(&s, bytes.TrimPrefix(name, []byte("named_metrics.")), v)
			}
		}
	}
	return s, s.KVUsage >= 0 || s.Waiting >= 0
}

// readFlat parses vLLM's JSON without allocating, because each answer to a short prompt waits for it. It returns
// false for any other form of JSON, which may have the same content.
func readFlat(g *kvstate.Signals, text []byte) bool {
	text, ok := bytes.CutPrefix(text, []byte(`{"named_metrics":`))
	text, all := bytes.CutSuffix(text, []byte(`}}`))
	if text = bytes.TrimLeft(text, " "); !ok || !all || len(text) == 0 || text[0] != '{' {
		return false
	}
	for item := range bytes.SplitSeq(text[1:], []byte(",")) {
		name, number, _ := bytes.Cut(bytes.TrimLeft(item, " "), []byte(":"))
		number = bytes.TrimLeft(number, " ")
		if len(name) < 2 || name[0] != '"' || name[len(name)-1] != '"' ||
			!only(name[1:len(name)-1], "abcdefghijklmnopqrstuvwxyz_") || !isNumber(number) {
			return false
		}
		v, err := strconv.ParseFloat(string(number), 64)
		if err != nil || !setNamed(g, name[1:len(name)-1], v) {
			return false
		}
	}
	return true
}

// isNumber reports whether text is a JSON number without sign. Small usages have an exponent: 6.1e-05.
func isNumber(text []byte) bool {
	const digits = "0123456789"
	number, exponent, e := bytes.Cut(text, []byte("e"))
	whole, fraction, point := bytes.Cut(number, []byte("."))
	exponent = bytes.TrimPrefix(exponent, []byte("-"))
	return only(whole, digits) && (len(whole) == 1 || whole[0] != '0') &&
		(!point || only(fraction, digits)) && (!e || only(exponent, digits))
}

func only(text []byte, chars string) bool { return len(text) > 0 && len(bytes.Trim(text, chars)) == 0 }

// setNamed stores a figure if its name is known. It returns false if the value is impossible.
func setNamed(g *kvstate.Signals, name []byte, v float64) bool {
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
