package envoywire

import (
	"math"
	"strconv"
	"time"

	"tandem/extproc/ended"
	"tandem/extproc/names"
)

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
				usage, answer = name == names.UsageNamespace, name == answerNamespace
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

// answerNamespace is where Envoy's scripts write what they have done with an answer (envoy-configs/lua); outdatedKey
// says that Tandem refused it, because its KV may have been another prompt's.
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
			e.Ended.Outdated = string(c.text(&b.arena, of)) == outdatedKey || e.Ended.Outdated
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
		var to *ended.Count
		of := c.length(end)
		for number, wire := c.field(of); number != 0; number, wire = c.field(of) {
			switch {
			case number == 1 && wire == wireBytes:
				mark := len(b.arena)
				to = countOf(&e.Ended.Usage, c.text(&b.arena, of))
				b.arena = b.arena[:mark]
			case number == 2 && wire == wireBytes && to != nil:
				*to = readCount(c, c.length(of))
			default:
				c.skip(wire, of)
			}
		}
	}
}

// countOf returns the field for a key of the usage; nil: there is none.
func countOf(a *ended.Usage, key []byte) *ended.Count {
	for i, name := range names.UsageKeys {
		if string(key) == name {
			return a.Counts()[i]
		}
	}
	return nil
}

// readCount reads Value{2: double number_value}. A value of another kind makes an absurd count.
func readCount(c *cursor, end int) ended.Count {
	out := ended.Count{Said: true, Absurd: true}
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		if number != 2 || wire != wireI64 {
			c.skip(wire, end)
			continue
		}
		out = ended.CountOf(math.Float64frombits(c.fixed64(end)))
	}
	return out
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
