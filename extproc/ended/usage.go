package ended

import (
	"math"
	"time"

	"tandem/extproc/names"
)

// MaxTokens is the largest count of tokens in an answer that is taken as true.
const MaxTokens = 1 << 26

// Count is a number of tokens as the answer reports it.
type Count struct {
	Tokens int64
	Said   bool // the answer says it
	Absurd bool // what it says is not a number of tokens; Tokens is 0
}

// CountOf makes a count of a number in an answer.
func CountOf(n float64) Count {
	if n >= 0 && n <= MaxTokens && n == math.Trunc(n) {
		return Count{Tokens: int64(n), Said: true}
	}
	return Count{Said: true, Absurd: true}
}

// Answered is what was measured of an answer.
type Answered struct {
	FirstByte time.Duration // from start to the first byte of the endpoint's answer; 0: none came
	Body      uint64        // bytes of the answer's body that went to the client
	Continued bool          // several engines wrote it, so its times describe none of them
	Usage     Usage
}

// Usage is what is reported in addition, with the configuration's usage.
type Usage struct {
	FirstBody time.Duration // from start to the first byte of the answer's body; 0: none came
	LastByte  time.Duration // from start to the last byte of the endpoint's answer; 0: unknown
	Tenant    []byte        // the request's header
	// as the answer has them; see [names.UsageIn] and those after it
	In, Out, Cached, CacheRead, CacheWritten Count
}

// Counts returns all counts, in the order of [names.UsageKeys].
func (a *Usage) Counts() [len(names.UsageKeys)]*Count {
	return [...]*Count{&a.In, &a.Out, &a.Cached, &a.CacheRead, &a.CacheWritten}
}

// Total returns the number of tokens that counts for a limit. Anthropic's API counts cached tokens apart from those of
// the prompt.
func (a *Usage) Total() int64 {
	return a.In.Tokens + a.Out.Tokens + a.CacheRead.Tokens + a.CacheWritten.Tokens
}
