package envoywire

import (
	"math"
	"strconv"
	"time"
)

// Of dynamic metadata, the namespace with what Envoy read of an answer's usage, and its keys. They are those of
// envoy-configs/usage.
const (
	UsageNamespace    = "tandem.usage"
	UsageIn           = "in"          // tokens of the prompt
	UsageOut          = "out"         // of the answer
	UsageCached       = "cached"      // of the prompt, found in a cache
	UsageCacheRead    = "cache_read"  // likewise, which "in" does not count (Anthropic's form)
	UsageCacheWritten = "cache_write" // of the prompt, written to a cache, which "in" does not count
	UsageTotal        = "total"       // all of them, for limits ([Usage.Total])
)

// TagFirstBody tags an entry with the time from its start to the first byte of the answer's body, in microseconds.
const TagFirstBody = "first_body"

// MaxTokens is the largest number of tokens that is believed of one answer.
const MaxTokens = 1 << 26

// Count is a number of tokens as an answer says it.
type Count struct {
	Tokens int64
	Said   bool // the answer says it
	Absurd bool // what it says is not a number of tokens; Tokens is 0
}

// Answered is what Envoy measured of an answer.
type Answered struct {
	FirstByte time.Duration // from start to the first byte of the endpoint's answer; 0: none came
	Body      uint64        // bytes of the answer's body that went to the client
	Usage     Usage
}

// Usage is what Envoy reports in addition, with the configuration's usage.
type Usage struct {
	FirstBody time.Duration // from start to the first byte of the answer's body; 0: none came
	LastByte  time.Duration // from start to the last byte of the endpoint's answer; 0: unknown
	Tenant    []byte        // the request's header; its name is LogBatch's
	// as the answer has them; see Usage...
	In, Out, Cached, CacheRead, CacheWritten Count
}

// readFilterMetadata reads Metadata{1: map<string, Struct> filter_metadata}.
func (b *LogBatch) readFilterMetadata(c *cursor, end int, e *LogEntry) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		if number != 1 || wire != wireBytes {
			c.skip(wire, end)
			continue
		}
		usage, answer, of := false, false, c.length(end)
		for number, wire := c.field(of); number != 0; number, wire = c.field(of) {
			switch {
			case number == 1 && wire == wireBytes:
				mark := len(b.arena)
				name := string(c.text(&b.arena, of))
				b.arena = b.arena[:mark]
				usage, answer = name == UsageNamespace, name == answerNamespace
			case number == 2 && wire == wireBytes && usage:
				b.readUsage(c, c.length(of), e)
			case number == 2 && wire == wireBytes && answer:
				b.readAnswer(c, c.length(of), e)
			default:
				c.skip(wire, of)
			}
		}
	}
}

// answerNamespace is where Envoy's scripts write what they have done with an answer (envoy-configs/lua); outdatedKey says
// that Tandem refused it, because its KV may have been another prompt's.
const (
	answerNamespace = "tandem.answer"
	outdatedKey     = "refused"
)

// readAnswer reads Struct{1: map<string, Value> fields} for its keys.
func (b *LogBatch) readAnswer(c *cursor, end int, e *LogEntry) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		if number != 1 || wire != wireBytes {
			c.skip(wire, end)
			continue
		}
		of := c.length(end)
		for number, wire := c.field(of); number != 0; number, wire = c.field(of) {
			if number != 1 || wire != wireBytes {
				c.skip(wire, of)
				continue
			}
			mark := len(b.arena)
			e.Outdated = string(c.text(&b.arena, of)) == outdatedKey || e.Outdated
			b.arena = b.arena[:mark]
		}
	}
}

// readUsage reads Struct{1: map<string, Value> fields}.
func (b *LogBatch) readUsage(c *cursor, end int, e *LogEntry) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		if number != 1 || wire != wireBytes {
			c.skip(wire, end)
			continue
		}
		var to *Count
		of := c.length(end)
		for number, wire := c.field(of); number != 0; number, wire = c.field(of) {
			switch {
			case number == 1 && wire == wireBytes:
				mark := len(b.arena)
				to = e.Usage.count(c.text(&b.arena, of))
				b.arena = b.arena[:mark]
			case number == 2 && wire == wireBytes && to != nil:
				*to = readCount(c, c.length(of))
			default:
				c.skip(wire, of)
			}
		}
	}
}

// UsageKeys are the keys of the counts that [Usage.Counts] returns.
var UsageKeys = [...]string{UsageIn, UsageOut, UsageCached, UsageCacheRead, UsageCacheWritten}

// Counts returns all counts, in the order of [UsageKeys].
func (a *Usage) Counts() [len(UsageKeys)]*Count {
	return [...]*Count{&a.In, &a.Out, &a.Cached, &a.CacheRead, &a.CacheWritten}
}

// Total returns the tokens that a limit counts. Anthropic's form has the tokens of a cache beside those of the prompt.
func (a *Usage) Total() int64 {
	return a.In.Tokens + a.Out.Tokens + a.CacheRead.Tokens + a.CacheWritten.Tokens
}

// count returns the field for a key of the usage; nil: there is none.
func (a *Usage) count(key []byte) *Count {
	for i, name := range UsageKeys {
		if string(key) == name {
			return a.Counts()[i]
		}
	}
	return nil
}

// readCount reads Value{2: double number_value}. A value of another kind is absurd.
func readCount(c *cursor, end int) Count {
	out := Count{Said: true, Absurd: true}
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		if number != 2 || wire != wireI64 {
			c.skip(wire, end)
			continue
		}
		out = CountOf(math.Float64frombits(c.fixed64(end)))
	}
	return out
}

// CountOf returns the count that a number of an answer is.
func CountOf(n float64) Count {
	if n >= 0 && n <= MaxTokens && n == math.Trunc(n) {
		return Count{Tokens: int64(n), Said: true}
	}
	return Count{Said: true, Absurd: true}
}

// fixed64 reads 8 bytes, the least significant first; on failure it returns 0 and sets err.
func (c *cursor) fixed64(limit int) (v uint64) {
	if c.pos+8 > limit {
		c.fail()
	}
	for shift := 0; shift < 64 && c.err == nil; shift += 8 {
		if len(c.cur) == 0 && !c.fill() {
			return 0
		}
		v |= uint64(c.cur[0]) << shift
		c.cur = c.cur[1:]
		c.pos++
	}
	return v
}

// micros reads a number of microseconds that Envoy wrote; 0: it is none. The longest is a day.
func micros(text []byte) time.Duration {
	n, err := strconv.ParseUint(string(text), 10, 64)
	if err != nil || n > uint64(24*time.Hour/time.Microsecond) {
		return 0
	}
	return time.Duration(n) * time.Microsecond
}
