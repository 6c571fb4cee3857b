// Package memory counts bytes against one limit that several parts of a program share. A receiver counts data that has
// arrived and is not handled yet; a handler counts data that it keeps.
package memory

import (
	"context"
	"sync/atomic"
)

// Budget is a number of bytes and how many of them are held. It is safe for concurrent use.
type Budget struct {
	limit int64
	held  atomic.Int64
}

// New returns a budget of limit bytes, none of which is held.
func New(limit int64) *Budget { return &Budget{limit: limit} }

// Add counts n more bytes, or fewer if n is negative, and returns how many are held then. It never refuses: the
// caller compares with Limit, and takes back what it cannot have.
func (b *Budget) Add(n int64) int64 { return b.held.Add(n) }

// Load returns how many bytes are held.
func (b *Budget) Load() int64 { return b.held.Load() }

// Limit returns the budget's size.
func (b *Budget) Limit() int64 { return b.limit }

// Notifier is in the context of a handler whose messages are counted while they arrive.
type Notifier interface {
	// OnFull has f called, once and on a goroutine of its own, if the handler's next message does not fit the
	// budget. f answers the peer, which then ends the stream.
	OnFull(f func())
}

type key struct{}

// IsKey reports whether a context is asked for its Notifier.
func IsKey(k any) bool { return k == key{} }

// OnFull is [Notifier.OnFull] of the context's Notifier, if it has one.
func OnFull(ctx context.Context, f func()) {
	if n, ok := ctx.Value(key{}).(Notifier); ok {
		n.OnFull(f)
	}
}
