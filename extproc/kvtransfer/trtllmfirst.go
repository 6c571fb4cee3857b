package kvtransfer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
)

// trtllmFirst is TensorRT-LLM's disaggregated_params, generation first (schedule_style 1): both servers get the
// request with one id. D reserves memory and contacts P's info endpoint, P computes once D is there, and writes. P
// waits for D in its scheduler, so D's leg must not wait for P's. P's GET /server_info names the info endpoint; a P
// without one (the C++ transceiver, older releases) goes one leg after the other, as trtllm.
//
// If P's answer ends early, D's blocks are written all the same, and D finds the end by itself [by reading].
//
// Read from tensorrt_llm/serve/openai_disagg_service.py (_get_gen_request), tensorrt_llm/disaggregated_params.py
// (DisaggScheduleStyle) and the Python transceiver's get_disaggregated_params (2026), and AIBrix pd/engine/trtllm.go.
type trtllmFirst struct{ no []byte }

func newTRTLLMFirst() trtllmFirst { return trtllmFirst{[]byte("false")} }

// trtllmFirstDialect is trtllm for a P without an info endpoint. It cancels P's leg: a P whose D does not come keeps
// its blocks, and its place in the scheduler, until its transfer timeout.
func trtllmFirstDialect(o *Options) (Dialect, error) {
	d := newTRTLLMFirst()
	out, err := trtllmDialect(o)
	out.Name = "trtllm-generation-first"
	out.Concurrent = &Concurrent{
		DecodesAlone: true, CancelsPrefill: true, Unpairable: d.Unpairable, Plan: d.Plan, ReadAnswer: d.ReadAnswer,
		Peers: &PeerSource{Ask: queryServerInfo},
	}
	return out, err
}

// Unpairable accepts the two APIs that have disaggregated_params, with one choice.
func (trtllmFirst) Unpairable(r *openai.Request) string {
	if a := r.API(); a != openai.Chat && a != openai.Completions {
		return "api_not_spoken"
	}
	return r.Unsplittable()
}

// Plan gives both legs the id, and D P's info endpoint. ctx_dp_rank is left out if P reports none (attention data
// parallelism): D then asks all of P's ranks.
func (d trtllmFirst) Plan(r *openai.Request, p *openai.Patch, l *Legs) (PairPlan, error) {
	rank, ok := l.rank()
	if !ok {
		return PairPlan{}, ErrUnknownPeer
	}
	endpoint, err := json.Marshal(rank.EngineID)
	if err != nil {
		return PairPlan{}, fmt.Errorf("the info endpoint of %s: %w", l.Prefill.Addr, err)
	}
	id := disaggRequestID(l.ID)
	if r.True(openai.FieldStream) {
		p.Set("stream", openai.FieldStream, d.no)
	}
	p.Delete(openai.FieldStreamOptions)
	p.Set("disaggregated_params", openai.FieldDisaggregatedParams,
		fmt.Appendf(nil, `{"request_type":"context_only","disagg_request_id":%d,"schedule_style":1}`, id))
	decode := fmt.Appendf(nil,
		`"disaggregated_params":{"request_type":"generation_only","disagg_request_id":%d,"ctx_request_id":%d,`+
			`"schedule_style":1,"ctx_info_endpoint":%s`, id, id, endpoint)
	if rank.Port >= 0 {
		decode = fmt.Appendf(decode, `,"ctx_dp_rank":%d`, rank.Port)
	}
	return PairPlan{Decode: append(decode, '}')}, nil
}

// ReadAnswer reads no parameters: P's answer confirms that it has sent.
func (trtllmFirst) ReadAnswer(body, _ []byte) (Answer, Peer, error) {
	a, _, err := usage(body)
	if err != nil {
		return Answer{}, Peer{}, errors.Join(ErrParams, err)
	}
	var c contextAnswer
	if err := c.read(body); err != nil {
		return Answer{}, Peer{}, errors.Join(ErrParams, err)
	}
	return a, Peer{}, nil
}

// contextServers asks for /server_info, with the engine's key and name.
var contextServers = enginehttp.New(askTimeout, func(t *http.Transport) { t.DisableKeepAlives = true })

// queryServerInfo asks P for its info endpoint. A P without one yields a zero Peer.
func queryServerInfo(ctx context.Context, e *kvstate.Endpoint) (Peer, error) {
	status, body, err := contextServers.GetAll(ctx, e, "/server_info", maxPeerBytes)
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("GET /server_info of %s: status %d", e.Addr, status)
	}
	if err != nil {
		return Peer{}, err
	}
	return readServerInfo(body)
}

// readServerInfo reads {"disaggregated_params":{"ctx_dp_rank":0,"ctx_info_endpoint":["tcp://..."]}}; the endpoint may
// also be a single string, and either may be null.
func readServerInfo(body []byte) (Peer, error) {
	var reported struct {
		Params *struct {
			Rank     *int            `json:"ctx_dp_rank"`
			Endpoint json.RawMessage `json:"ctx_info_endpoint"`
		} `json:"disaggregated_params"`
	}
	if err := json.Unmarshal(body, &reported); err != nil {
		return Peer{}, fmt.Errorf("a context server's /server_info: %w", err)
	}
	if reported.Params == nil {
		return Peer{}, nil
	}
	var endpoints []string
	var endpoint string
	if json.Unmarshal(reported.Params.Endpoint, &endpoints) == nil && len(endpoints) > 0 {
		endpoint = endpoints[0]
	} else {
		_ = json.Unmarshal(reported.Params.Endpoint, &endpoint) // null, or of an unknown type: none
	}
	if endpoint == "" || len(endpoint) > 1024 {
		return Peer{}, nil
	}
	rank := Rank{EngineID: endpoint, Port: -1}
	if r := reported.Params.Rank; r != nil && *r >= 0 && *r < maxRanks {
		rank.Port = *r
	}
	return Peer{[]Rank{rank}}, nil
}
