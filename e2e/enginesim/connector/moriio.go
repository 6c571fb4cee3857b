package connector

import (
	"fmt"
	"strings"

	"tandem/e2e/enginesim/jsontext"
)

// parseMoRIIO reads the members that MoRIIO's mode WRITE needs on both legs: an id that begins with tx, the other
// leg's address, and its number of ranks.
func (kv *Params) parseMoRIIO(raw []byte) {
	notify, isPort := jsontext.Integer(jsontext.Get(raw, "remote_notify_port"))
	_, isHandshake := jsontext.Integer(jsontext.Get(raw, "remote_handshake_port"))
	_, tp := jsontext.Integer(jsontext.Get(raw, "remote_tp_size"))
	_, dp := jsontext.Integer(jsontext.Get(raw, "remote_dp_size"))
	kv.port = int(notify)
	switch {
	case !kv.RemoteDecode && !kv.RemotePrefill:
	case !strings.HasPrefix(kv.transfer, "tx"):
		kv.Fatal = "AssertionError: transfer_id"
	case kv.host == "" || !isPort || !isHandshake:
		kv.Fatal = "KeyError: remote_host, remote_handshake_port or remote_notify_port"
	case !tp || !dp:
		kv.Fatal = "enginesim: without remote_tp_size and remote_dp_size every writer takes rank 0"
	case kv.RemotePrefill && (!jsontext.IsArray(jsontext.Get(raw, "remote_block_ids")) || kv.engineID == ""):
		kv.Fatal = "KeyError: remote_block_ids, remote_engine_id"
	}
}

// parseMoRIIORead reads the members of the mode READ: for P an id and D's ranks, for D P's answer.
func (kv *Params) parseMoRIIORead(raw []byte) {
	notify, isPort := jsontext.Integer(jsontext.Get(raw, "remote_notify_port"))
	_, tp := jsontext.Integer(jsontext.Get(raw, "remote_tp_size"))
	kv.port = int(notify)
	switch {
	case kv.RemoteDecode && (!strings.HasPrefix(kv.transfer, "tx") || !tp):
		kv.Fatal = "KeyError: transfer_id, remote_tp_size"
	case kv.RemotePrefill &&
		(kv.transfer == "" || kv.host == "" || !isPort || !jsontext.Truthy(jsontext.Get(raw, "remote_block_ids")) ||
			kv.engineID == ""):
		kv.Fatal = "KeyError: transfer_id, remote_host, remote_notify_port, remote_block_ids, remote_engine_id"
	}
}

// moriioHandOver returns P's answer in the mode READ.
func (s *Node) moriioHandOver(key string, blocks []int32) []byte {
	ids := strings.ReplaceAll(strings.Trim(fmt.Sprint(blocks), "[]"), " ", ",")
	return fmt.Appendf(nil,
		`{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[%s],"remote_engine_id":"%s:%d",`+
			`"remote_host":%q,`+
			`"remote_handshake_port":%d,"remote_notify_port":%d,"remote_dp_rank":0,"remote_dp_size":1,"tp_size":1,`+
			`"transfer_id":%q}`,
		ids, s.SideHost, s.SidePort, s.SideHost, s.SidePort, s.SidePort, key)
}
