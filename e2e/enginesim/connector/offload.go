package connector

import (
	"context"
	"net"
	"strconv"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/handover"
	"tandem/e2e/enginesim/jsontext"
)

// parseOffload reads kv_transfer_params as vLLM's OffloadingConnector with the P2P tier does (0.25 to 0.33). P stores
// a finished prompt's blocks under the given name; D fetches them by that name, and computes missing ones. The tier
// refuses remote_prefiller together with another key.
func parseOffload(raw []byte) (kv Params) {
	if jsontext.IsNull(raw) {
		return kv
	}
	kv.Present, kv.CachedOnP, kv.missOK = true, -1, true
	keys := 0
	jsontext.EachMember(raw, func(key, val []byte) {
		id := string(jsontext.Text(jsontext.Get(val, "kv_request_id")))
		switch string(key) {
		case "remote_decoder":
			keys++
			kv.RemoteDecode, kv.keepAs = true, id
		case "remote_prefiller", "remote_kv_source":
			keys++
			host := string(jsontext.Text(jsontext.Get(val, "remote_host")))
			port, ok := jsontext.Integer(jsontext.Get(val, "remote_port"))
			if !ok || host == "" {
				kv.Broken = &engine.Violation{Kind: "incomplete_params",
					Message: string(key) + " without remote_host or remote_port"}
			}
			if string(key) == "remote_kv_source" {
				kv.source = net.JoinHostPort(host, strconv.FormatInt(port, 10))
			} else {
				kv.RemotePrefill, kv.requestID, kv.host, kv.port = true, id, host, int(port)
			}
		default:
			return
		}
		if id == "" {
			kv.Broken = &engine.Violation{Kind: "incomplete_params", Message: string(key) + " without kv_request_id"}
		}
	})
	if kv.RemotePrefill && keys > 1 {
		kv.Broken = &engine.Violation{Kind: "forbidden_keys", Message: "remote_prefiller with another key of the tier"}
	}
	return kv
}

// pullPrefix fetches the parts of the prompts' beginnings that remote_kv_source still has.
func (l *Leg) pullPrefix(ctx context.Context) {
	s := l.Node
	for _, q := range l.Job.Seqs {
		ctx, cancel := context.WithTimeout(ctx, s.cfg.LoadTimeout)
		answer, err := s.peers.Ask(ctx, l.Kv.source, &handover.Question{Op: handover.OpPrefix, Want: q.P.Full})
		cancel()
		if n := answer.Blocks; err == nil && n > q.Grant.Hits {
			s.CountFetched(q, (n-q.Grant.Hits)*s.cfg.BlockSize)
			s.Pool.Write(&q.Grant, q.P, q.Grant.Hits, nil)
		}
	}
}
