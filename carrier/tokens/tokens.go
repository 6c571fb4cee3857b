// Package tokens counts the tokens of what the client of a request inside Envoy gets: D's answer, or what is made of
// it, or the whole of what several engines wrote.
package tokens

import (
	"strings"
	"time"

	"tandem/extproc/ended"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/extproc/usage/reader"
)

// Counter counts an answer. The zero value counts none.
type Counter struct {
	Events bool // the answer is a stream of events

	reader      *reader.Reader // nil: the answer is not counted
	said        ended.Usage
	first, last time.Time // when bytes went to the client past Envoy's hooks; zero: none did
}

// Begin begins to count an answer, and reports whether the answer may have a count of tokens. Counts of an earlier
// answer to the request stay.
func (c *Counter) Begin(status, contentType string) bool {
	c.Events, c.reader = openai.IsEventStream(contentType), nil
	if status != "200" || !c.Events && !strings.HasPrefix(contentType, names.ContentTypeJSON) {
		return false
	}
	r := reader.New(c.Events)
	c.reader = &r
	return true
}

// Stop leaves the rest of the answer out.
func (c *Counter) Stop() { c.reader = nil }

// Within reports whether the next byte is not the first of a line.
func (c *Counter) Within() bool { return c.reader != nil && c.reader.Within() }

// Read reads a part of the answer, and calls set with each new count, under the keys of Envoy's metadata: the
// operator's limits and access logs may use them. -1 stands for a value that is not a number of tokens.
func (c *Counter) Read(part []byte, set func(namespace, key string, n float64)) {
	if c.reader == nil {
		return
	}
	c.reader.Feed(part)
	said, more := c.reader.Said(), false
	for i, n := range said.Counts() {
		if *n == *c.said.Counts()[i] {
			continue
		}
		more = true
		if n.Absurd {
			set(names.UsageNamespace, names.UsageKeys[i], -1)
		} else {
			set(names.UsageNamespace, names.UsageKeys[i], float64(n.Tokens))
		}
	}
	if more {
		set(names.UsageNamespace, names.UsageTotal, float64(said.Total()))
	}
	c.said = said
}

// Give is Read for a part that goes to the client now without passing Envoy's hooks.
func (c *Counter) Give(part []byte, set func(namespace, key string, n float64)) {
	if len(part) == 0 {
		return
	}
	if c.last = time.Now(); c.first.IsZero() {
		c.first = c.last
	}
	c.Read(part, set)
}

// Used returns what the answer said and when it was given, in times from began. first and last are those times as
// Envoy's hooks saw them; zero: they saw none.
func (c *Counter) Used(began, first, last time.Time) ended.Usage {
	u := c.said
	if first.IsZero() {
		first, last = c.first, c.last
	}
	if !first.IsZero() {
		u.FirstBody, u.LastByte = first.Sub(began), last.Sub(began)
	}
	return u
}
