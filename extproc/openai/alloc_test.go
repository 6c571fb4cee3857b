package openai

import (
	"testing"

	"tandem/internal/budget"

	"github.com/stretchr/testify/require"
)

// TestAllocations: a request costs no allocation once its memory has grown, and at most two while it grows (members,
// edits and the like aside).
func TestAllocations(t *testing.T) {
	for name, body := range bodies() {
		if len(body) > 1<<20 {
			continue
		}
		var r Request
		var p Patch
		var undo Edits
		var leg []byte
		var hashes []uint64
		var reason string
		leg = make([]byte, 0, len(body)+1024)
		pass := func() {
			if err := r.Scan(Chat, body, Limits{}); err != nil {
				panic(err)
			}
			edits := prefillEdits(&p, &r)
			undo = edits.Inverse(undo[:0], body)
			leg = edits.Apply(leg[:0], body)
			hashes = r.PromptHash(hashes[:0], 512, 4096)
			reason = r.Unsplittable()
		}
		pass()
		require.Empty(t, reason)
		budget.Allocs(t, 20, 0, pass, name)
	}
}

// TestAllocationsOfGenerate does the same for the API that has its limits a level deeper.
func TestAllocationsOfGenerate(t *testing.T) {
	body := []byte(`{"model":"m","token_ids":[1,2,3],"sampling_params":{"max_tokens":50,"n":1,"extra_args":{"a":1}},"stream":true}`)
	var r Request
	var p Patch
	var edits Edits
	pass := func() {
		if err := r.Scan(Generate, body, Limits{}); err != nil {
			panic(err)
		}
		p.Reset(&r)
		p.SetSampling("max_tokens", FieldMaxTokens, []byte("1"))
		p.SetSampling("min_tokens", FieldMinTokens, []byte("1"))
		p.Set("kv_transfer_params", FieldKVTransferParams, []byte(`{"do_remote_decode":true,"do_remote_prefill":false}`))
		edits = p.Edits()
	}
	pass()
	require.Len(t, edits, 3)
	budget.Allocs(t, 20, 0, pass)
}

// TestAllocationsOfPaths checks the functions that run for every request before its body arrives.
func TestAllocationsOfPaths(t *testing.T) {
	budget.Allocs(t, 20, 0, func() {
		if Classify("POST", "/v1/chat/completions?x=y") != Chat || !RequestID("abc") || CheckHeaders("application/json", "") != nil {
			panic("wrong")
		}
	})
}

// One event of a chat costs few allocations: there are thousands per second.
func TestContinuationAllocs(t *testing.T) {
	c := newContinuation(true)
	event := []byte(`data: {"id":"y","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" b","logprobs":null,"finish_reason":null}]}`)
	out := make([]byte, 0, 4096)
	c.Event(out, event)
	budget.Allocs(t, 100, 10, func() { c.Event(out[:0], event) })
}
