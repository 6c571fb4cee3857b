package main

// parseOffload reads kv_transfer_params as vLLM's OffloadingConnector with the P2P tier understands them (0.25 to 0.33).
// P parks a finished prompt's blocks under the name that it is given; D fetches them by that name, and computes what is
// not there. remote_prefiller together with another key is refused by the tier.
func parseOffload(raw []byte) (kv kvParams) {
	if isNull(raw) {
		return kv
	}
	kv.present, kv.cachedOnP, kv.missOK = true, -1, true
	keys := 0
	eachMember(raw, func(key, val []byte) {
		id := string(text(get(val, "kv_request_id")))
		switch string(key) {
		case "remote_decoder":
			keys++
			kv.remoteDecode, kv.keepAs = true, id
		case "remote_prefiller", "remote_kv_source":
			keys++
			kv.remotePrefill, kv.requestID = true, id
			kv.host = string(text(get(val, "remote_host")))
			port, ok := integer(get(val, "remote_port"))
			if kv.port = int(port); !ok || kv.host == "" {
				kv.broken = &violation{"incomplete_params", string(key) + " without remote_host or remote_port"}
			}
		default:
			return
		}
		if id == "" {
			kv.broken = &violation{"incomplete_params", string(key) + " without kv_request_id"}
		}
	})
	if kv.remotePrefill && keys > 1 {
		kv.broken = &violation{"forbidden_keys", "remote_prefiller with another key of the tier"}
	}
	return kv
}
