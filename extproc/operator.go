package extproc

import (
	"net/url"
	"strings"
)

// operatorPath reports whether a path is for those who run an engine, not for those who use it: it would stop, empty or
// change the engine, or tell what others do on it. Such paths end at the router; operators reach engines directly.
// Sources: the route tables of vLLM 0.33 (sleep, pause, dev mode, LoRA, profiling, elastic EP, metrics), SGLang 0.5.23
// (weights, cache, memory, profiling, experts, sessions, server info) and trtllm-serve (metrics, internals).
func operatorPath(path string) bool {
	path, _, _ = strings.Cut(path, "?")
	if strings.IndexByte(path, '%') >= 0 { // engines undo escapes before they look, whatever the data plane in front did
		if plain, err := url.PathUnescape(path); err == nil {
			path = plain
		}
	}
	for _, root := range [...]string{"/inference/v1/", "/v1/", "/"} {
		if rest, ok := strings.CutPrefix(path, root); ok {
			path = rest
			break
		}
	}
	segment, _, _ := strings.Cut(path, "/")
	switch segment {
	case "metrics", "prometheus", "load", "loads", "get_load", "server_info", "get_server_info", "cluster_info", "kv_event_sources",
		"kv_cache_events", "sleep", "wake_up", "is_sleeping", "pause", "resume", "is_paused", "collective_rpc",
		"abort_request", "abort_requests", "load_lora_adapter", "unload_lora_adapter", "scale_elastic_ep",
		"is_scaling_elastic_ep", "get_world_size", "flush_cache", "release_memory_occupation", "resume_memory_occupation",
		"configure_logging", "freeze_gc", "slow_down", "open_session", "close_session", "debug", "docs", "redoc",
		"openapi.json", "_internal", "sim":
		return true
	}
	for _, prefix := range [...]string{"reset_", "start_", "stop_", "dump_", "init_weight", "update_weight", "get_weight",
		"finish_weight", "set_internal", "get_internal"} {
		if strings.HasPrefix(segment, prefix) {
			return true
		}
	}
	return false
}
