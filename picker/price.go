package picker

import "tandem/kvstate"

// prefillPrice is what it costs to prefill the request on c: tokens that are waiting there, and tokens of its own prompt
// that c does not hold. The last token of a prompt is always computed, so a full hit is not free.
func prefillPrice(r *Request, c *kvstate.Candidate) int64 {
	uncached := r.PromptTokens
	if r.Blocks > 0 {
		uncached -= r.PromptTokens * int64(c.Hit) / int64(r.Blocks)
	}
	return weighed(c, c.PromptTokens+max(uncached, 1))
}

// requestTokens is what one running answer weighs beside the tokens of its prompt: each takes a place in D's batch,
// however short its prompt.
const requestTokens = 256

// decodePrice is what it costs to decode the request on c: the KV of the answers running there, and their number.
func decodePrice(r *Request, c *kvstate.Candidate) int64 {
	price := weighed(c, c.PromptTokens+c.Requests*requestTokens)
	if r.Blocks > 0 { // what c holds of the prompt needs no transfer
		price -= r.PromptTokens * int64(c.Hit) / int64(r.Blocks) / 8
	}
	return price
}

// alonePrice is what it costs to do both on c.
func alonePrice(r *Request, c *kvstate.Candidate) int64 {
	return prefillPrice(r, c) + weighed(c, c.Requests*requestTokens)
}

// weighed is what tokens cost on c, which may be taken to be slower or faster than others.
func weighed(c *kvstate.Candidate, tokens int64) int64 {
	if c.Weight == 0 || c.Weight == 100 {
		return tokens
	}
	return tokens * 100 / int64(c.Weight)
}
