package picker

import "tandem/kvstate"

// prefillPrice is what it costs to prefill the request on c: tokens that are waiting there, and tokens of its own prompt
// that c does not hold. The last token of a prompt is always computed, so a full hit is not free.
func prefillPrice(r *Request, c *kvstate.Candidate) int64 {
	uncached := r.PromptTokens
	if r.Blocks > 0 {
		uncached -= r.PromptTokens * int64(c.Hit) / int64(r.Blocks)
	}
	price := c.PromptTokens + max(uncached, 1)
	if c.Session&kvstate.RolePrefill != 0 {
		price -= sessionTokens
	}
	return price
}

// sessionTokens is how much more work an endpoint may have than another, and yet be taken because it served the session last.
// It is less than a prompt of a few pages: what a session really has there, its prefix, has a price already.
const sessionTokens = 512

// requestTokens is what one running answer weighs beside the tokens of its prompt: each takes a place in D's batch,
// however short its prompt.
const requestTokens = 256

// decodePrice is what it costs to decode the request on c: the KV of the answers running there, and their number.
func decodePrice(r *Request, c *kvstate.Candidate) int64 {
	price := c.PromptTokens + c.Requests*requestTokens
	if r.Blocks > 0 { // what c holds of the prompt needs no transfer
		price -= r.PromptTokens * int64(c.Hit) / int64(r.Blocks) / 8
	}
	if c.Session&kvstate.RoleDecode != 0 {
		price -= sessionTokens
	}
	return price
}

// alonePrice is what it costs to do both on c.
func alonePrice(r *Request, c *kvstate.Candidate) int64 {
	price := prefillPrice(r, c) + c.Requests*requestTokens
	if c.Session == kvstate.RoleDecode { // prefillPrice knows of the rest
		price -= sessionTokens
	}
	return price
}
