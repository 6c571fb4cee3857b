package endpointpicker

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"strconv"

	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/kvstate"
)

// Rewrite replaces the request's model according to the cluster's rewrites. to is "" if it stays.
func Rewrite(r *plan.Request, state *kvstate.State) (to string, edits openai.Edits) {
	asked := r.Model()
	if asked == "" || len(r.Body()) == 0 {
		return "", nil
	}
	to = state.Rewritten(r.Pool.Spec.Name, asked, rand.Uint64())
	if to == "" || to == asked {
		return "", nil
	}
	r.Patch.Reset(&r.Request)
	r.Patch.Set("model", openai.FieldModel, strconv.AppendQuote(nil, to))
	edits = slices.Clone(r.Patch.Edits())
	for i := range edits {
		edits[i].New = bytes.Clone(edits[i].New) // the patch is used again, for the prefill
	}
	return to, edits
}

// Merge joins two lists of edits of one body in their order. They do not overlap; insertions of a come first.
func Merge(a, b openai.Edits) openai.Edits {
	if len(a) == 0 {
		return b
	}
	out := append(slices.Clone(a), b...)
	slices.SortStableFunc(out, func(a, b openai.Edit) int { return a.Start - b.Start })
	return out
}
