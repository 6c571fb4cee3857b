package kvtransfer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"tandem/extproc/openai"
)

// nixlPush is vLLM's NixlPushConnector: D registers with P's side channel, P computes and writes the blocks into D's
// memory. D's request has to name P's engine id and side channel before P has answered, so they come from an earlier
// answer of P; the first request to an unknown P goes one leg after the other, with P's object verbatim, which push
// understands too.
//
// P finds D's registration by its own request id without the random tail, which consists of x-request-id and the path:
// so both legs carry one x-request-id, which no other attempt has.
//
// Read from vllm/distributed/kv_transfer/kv_connector/v1/nixl/push_scheduler.py and
// docs/design/nixl_kv_push_connector.md of vLLM 0.24.0 to 0.33.0; run against vLLM 0.32.0.
type nixlPush struct{ nixl nixl }

func newNIXLPush() nixlPush { return nixlPush{newNIXL(false)} }

// nixlPushDialect is nixl for a P that is not known yet. It does not cancel P's leg, for mooncake's reason: 488 of 511
// blocks stayed allocated for good after 10 aborts (0.32.0). If P failed but is alive, sending the same leg again with
// the same x-request-id frees them.
func nixlPushDialect(*Options) (Dialect, error) {
	d := newNIXLPush()
	out := d.nixl.dialect()
	out.Name, out.Inline = "nixl-push", false
	out.Reports.Connectors = []string{"NixlPushConnector"}
	out.Concurrent = &Concurrent{DecodesAlone: true, Unpairable: d.Unpairable, Plan: d.Plan, ReadAnswer: d.ReadAnswer,
		Peers: &PeerSource{}}
	return out, nil
}

// Unpairable refuses responses that name their own request_id: the engine takes its id from there, and it has to be
// the attempt's own.
func (nixlPush) Unpairable(r *openai.Request) string {
	if r.API() == openai.Responses && r.Has(openai.FieldRequestID) {
		return "own_request_id"
	}
	return vllmUnpairable(r)
}

// Plan gives P nixl's parameters, and D the location of P. D needs every member: without remote_engine_id,
// remote_host, remote_port, tp_size or remote_request_id the engine dies of a KeyError (0.32.0); remote_request_id may
// be any text.
func (d nixlPush) Plan(r *openai.Request, p *openai.Patch, l *Legs) (PairPlan, error) {
	rank, ok := l.rank()
	if !ok {
		return PairPlan{}, ErrUnknownPeer
	}
	strings := [2][]byte{}
	for i, text := range [...]string{rank.EngineID, rank.Host} {
		var err error
		if strings[i], err = json.Marshal(text); err != nil {
			return PairPlan{}, fmt.Errorf("what %s said of itself: %w", l.Prefill.Addr, err)
		}
	}
	id := l.RequestID + transferID(".", l.ID)
	d.nixl.Prefill(r, p, nil)
	var own []byte
	if r.API() == openai.Responses { // vLLM: ResponsesRequest.request_id, random if the body has none
		name := strconv.AppendQuote(nil, transferID("resp_", l.ID))
		p.Set("request_id", openai.FieldRequestID, name)
		own = append(append([]byte(`"request_id":`), name...), ',')
	}
	return PairPlan{
		Decode: fmt.Appendf(own,
			`"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":%s,`+
				`"remote_host":%s,"remote_port":%d,`+
				`"tp_size":%d,"pp_size":%d,"remote_request_id":%q,"remote_block_ids":[]}`, strings[0], strings[1],
			rank.Port, max(rank.TP, 1), max(rank.PP, 1), id),
		RequestID: id, PrefillRank: l.rankHeader(),
	}, nil
}

// ReadAnswer learns P's identity. If it is not the one in D's request, P was restarted in between, and D waits for an
// engine that is gone.
func (nixlPush) ReadAnswer(body, sent []byte) (Answer, Peer, error) {
	scanned, err := openai.ScanAnswer(body)
	if err != nil {
		return Answer{}, Peer{}, errors.Join(ErrParams, err)
	}
	if why := brokenOff(body); why != "" {
		return Answer{}, Peer{}, fmt.Errorf("%w: P finished for %q, so D gets no KV", ErrParams, why)
	}
	a := counts(&scanned)
	peer, engine := readPushPeer(scanned.Params)
	if sent != nil && engine != nil && !bytes.Contains(sent, append([]byte(`"remote_engine_id":`), engine...)) {
		return Answer{}, peer,
			fmt.Errorf("%w: P is the engine %s, which is not the one that D was told of", ErrParams, engine)
	}
	if sent != nil && engine == nil {
		return Answer{}, peer, fmt.Errorf("%w: P keeps no blocks for this request", ErrParams)
	}
	return a, peer, nil
}

// readPushPeer reads from P's parameters its engine id (as JSON text too, nil if absent), side channel and sizes. The
// id's tail has the data-parallel rank (vllm/v1/engine/core.py: <id>_dp<rank>).
func readPushPeer(params []byte) (peer Peer, engine []byte) {
	var reported struct {
		EngineID json.RawMessage `json:"remote_engine_id"`
		Host     string          `json:"remote_host"`
		Port     int             `json:"remote_port"`
		TP       int             `json:"tp_size"`
		PP       int             `json:"pp_size"`
	}
	var id string
	if json.Unmarshal(params, &reported) != nil || json.Unmarshal(reported.EngineID, &id) != nil || id == "" ||
		reported.Host == "" || reported.Port < 1 || reported.Port > 65535 {
		return Peer{}, nil
	}
	rank := 0
	if i := strings.LastIndex(id, "_dp"); i >= 0 {
		if n, err := strconv.Atoi(id[i+len("_dp"):]); err == nil && n >= 0 && n < maxRanks {
			rank = n
		}
	}
	canonical, err := json.Marshal(id)
	if err != nil {
		return Peer{}, nil
	}
	return Peer{}.with(rank,
		Rank{EngineID: id, Host: reported.Host, Port: reported.Port, TP: reported.TP, PP: reported.PP}), canonical
}
