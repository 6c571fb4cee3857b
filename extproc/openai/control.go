package openai

import "slices"

// HasControl reports whether the body has members that a client must not send: they steer engines, name internal hosts
// and KV blocks, and some kill an engine ({"do_remote_prefill":true} alone does, run against vLLM 0.32.0).
//
// They are looked for in the body itself and in the two other objects from which engines read such members:
// vllm_xargs, which vLLM merges into extra_args together with kv_transfer_params (vLLM 0.10 and later,
// entrypoints/openai/*/protocol.py: to_sampling_params), and extra_args within the sampling_params of
// /inference/v1/generate, which the engine reads directly (vllm/v1/request.py).
func (r *Request) HasControl() bool { return r.control }

// Clean appends the body without those members to dst. Every other byte stays.
func (r *Request) Clean(dst []byte) []byte {
	var edits Edits
	for s := range r.members {
		edits = r.removals(edits, r.members[s])
	}
	slices.SortFunc(edits, func(a, b Edit) int { return a.Start - b.Start })
	return edits.Apply(dst, r.body)
}

func (r *Request) removals(edits Edits, members []member) Edits {
	cuts := cutter{members: members, body: r.body}
	for i := range members {
		if members[i].field.control() {
			edits = cuts.cut(edits, i)
		} else {
			cuts.keep()
		}
	}
	return edits
}
