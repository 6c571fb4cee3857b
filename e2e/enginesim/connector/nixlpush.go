package connector

import (
	"strings"

	"tandem/e2e/enginesim/fault"
	"tandem/e2e/enginesim/jsontext"
)

// parseNIXLPush checks the members that a decode leg needs to register at P.
func (kv *Params) parseNIXLPush(isPort bool, raw []byte) {
	if !kv.RemotePrefill {
		return
	}
	for name, missing := range map[string]bool{"remote_engine_id": kv.engineID == "", "remote_host": kv.host == "",
		"remote_port": !isPort,
		"tp_size":     jsontext.IsNull(jsontext.Get(raw, "tp_size")), "remote_request_id": kv.requestID == ""} {
		if missing {
			kv.Fatal = "KeyError: " + name
		}
	}
}

// pushed returns a hand-over of NIXL push, which has no expiry time.
func pushed(r *fault.Rule, pull []byte) []byte {
	s := strings.Replace(string(pull), `,"remote_blocks_expiry_time":null,"transfer_mode":"pull"`,
		`,"transfer_mode":"push"`, 1)
	params, _ := r.SpoilParams([]byte(s))
	return params
}
