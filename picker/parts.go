package picker

import "tandem/kvstate"

// Part is one summand of a price, in PriceUnit.
type Part struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
}

// PriceUnit is what prices and their parts are counted in.
const PriceUnit = "tokens"

// PrefillParts take apart what it costs to prefill the request on c. They are for people who ask, and sum up to the price.
func PrefillParts(r *Request, c *kvstate.Candidate) []Part {
	waiting := float64(c.PromptTokens)
	return []Part{{"waiting", waiting}, {"uncached", float64(prefillPrice(r, c)) - waiting}}
}

// DecodeParts take apart what it costs to decode the request on c.
func DecodeParts(r *Request, c *kvstate.Candidate) []Part {
	kv, answers := float64(c.PromptTokens), float64(c.Requests*requestTokens)
	return []Part{{"kv", kv}, {"answers", answers}, {"held", float64(decodePrice(r, c)) - kv - answers}}
}

// AloneParts take apart what it costs to do both on c.
func AloneParts(r *Request, c *kvstate.Candidate) []Part {
	return append(PrefillParts(r, c), Part{"answers", float64(c.Requests * requestTokens)})
}
