package kvtransfer

import (
	"fmt"
	"slices"

	"tandem/extproc/openai"
	"tandem/kvstate/standstill"
)

// multi is vLLM's MultiConnector: all its members see the same kv_transfer_params, D loads from the first one that has
// something, and the answers of P's members are merged into one object (multi_connector.py, 0.33.0). So each leg's
// request has the union of the members' parameters. Two members with a key in common do not work in the engine either.
//
// A store among the members (shared) needs nothing. LMCacheMP answers an empty object, which hands over nothing.
type multi struct {
	oneToken
	nixl, offload bool
}

// newMulti returns the dialect of these members: nixl, offload and shared, each at most once.
func newMulti(members []string) (multi, error) {
	d := multi{oneToken: newOneToken()}
	for i, m := range members {
		switch {
		case slices.Contains(members[:i], m):
			return d, fmt.Errorf("multi: %s twice", m)
		case m == "nixl":
			d.nixl = true
		case m == "offload":
			d.offload = true
		case m != "shared":
			return d, fmt.Errorf("multi: %.40q cannot be a member: one of nixl, offload, shared", m)
		}
	}
	if len(members) == 0 {
		return d, fmt.Errorf("multi: no members: some of nixl, offload, shared")
	}
	return d, nil
}

func multiDialect(o *Options) (Dialect, error) {
	d, err := newMulti(o.Members)
	out := Dialect{
		Name: "multi", Engine: EngineAny, Engines: Engines{VLLM: true, Store: true},
		Reports: Reports{Connectors: []string{"MultiConnector"}, Alike: vllmAlike(), Release: true},
		Prefill: d.Prefill, ReadAnswer: d.ReadAnswer, DecodeMember: d.DecodeMember,
	}
	if d.offload {
		out.Ports = p2pPorts()
	}
	if d.nixl {
		out.Lease = standstill.DefaultLease
	}
	return out, err
}

func (d multi) Prefill(r *openai.Request, p *openai.Patch, pair *Pair) {
	d.plan(r, p)
	var room [288]byte
	ask := append(room[:0], '{')
	if d.nixl {
		ask = append(ask, nixlAsk...)
	}
	if d.offload {
		ask = appendRemoteDecoder(comma(ask), pair)
	}
	if len(ask) > 1 {
		p.Set("kv_transfer_params", openai.FieldKVTransferParams, append(ask, '}'))
	}
}

// comma appends a comma if the object has members already.
func comma(object []byte) []byte {
	if len(object) > 1 {
		return append(object, ',')
	}
	return object
}

// ReadAnswer reads each member's part of P's object and adds the parameters that P does not send.
func (d multi) ReadAnswer(body []byte, pair *Pair) (Answer, error) {
	a, params, err := usage(body)
	if err != nil {
		return Answer{}, fmt.Errorf("reading P's answer: %w", err)
	}
	if d.nixl && !emptyObject(params) {
		if err := a.readNIXL(params, pair); err != nil {
			return Answer{}, err
		}
	}
	if d.offload {
		union := []byte{'{'}
		if a.Params != nil {
			union = append(union[:0], a.Params[:len(a.Params)-1]...)
		}
		a.Params = append(appendRemotePrefiller(comma(union), pair), '}')
	}
	return a, nil
}

// emptyObject reports whether a valid value is {}.
func emptyObject(raw []byte) bool {
	c := cursor{b: raw}
	if !c.take('{') {
		return false
	}
	c.space()
	return c.at('}')
}

func (multi) DecodeMember(dst, params []byte) []byte { return appendKVTransferParams(dst, params) }
