// Package memory counts bytes against one limit that several parts of a program share. A receiver counts data that has
// arrived and is not handled yet; a handler counts data that it keeps.
package memory

import (
	"context"
	"sync/atomic"
)

// Budget is a limit in bytes and the number of bytes in use. It is safe for concurrent use.
type Budget struct {
	limit int64
	held  atomic.Int64
}

// New returns an unused budget of limit bytes.
func New(limit int64) *Budget { return &Budget{limit: limit} }

// Add counts n more bytes, or fewer if n is negative, and returns the number in use. It never refuses: the caller
// compares with Limit, and subtracts again if there is too much.
func (b *Budget) Add(n int64) int64 { return b.held.Add(n) }

// smallShare is the fraction of a budget that a holder may always have, although others have used it up.
const smallShare = 1024

// Replace counts n bytes of a holder in place of those in held, and reports whether there is room for them. A small
// share has room up to twice the limit. Bytes without room are counted too: the holder must give them back.
func (b *Budget) Replace(held *int64, n int64) bool {
	total := b.held.Add(n - *held)
	*held = n
	return total <= b.limit || n <= b.limit/smallShare && total <= 2*b.limit
}

// Load returns the number of bytes in use.
func (b *Budget) Load() int64 { return b.held.Load() }

// Limit returns the budget's size.
func (b *Budget) Limit() int64 { return b.limit }

// Notifier is in the context of a handler whose messages are counted while they arrive.
type Notifier interface {
	// OnFull registers f. It is called once, on its own goroutine, if the handler's next message does not fit the
	// budget. f answers the peer, which then ends the stream.
	OnFull(f func())
}

type key struct{}

// IsKey reports whether k is the context key of the Notifier.
func IsKey(k any) bool { return k == key{} }

// OnFull calls [Notifier.OnFull] of the context's Notifier, if it has one.
func OnFull(ctx context.Context, f func()) {
	if n, ok := ctx.Value(key{}).(Notifier); ok {
		n.OnFull(f)
	}
}
