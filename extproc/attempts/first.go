package attempts

import "sync"

// First is a value that several streams may set, of which the first one counts. Make it with [NewFirst]; it is safe for
// concurrent use.
type First[T any] struct {
	once  sync.Once
	done  chan struct{}
	value T
}

// NewFirst returns a First that is not set.
func NewFirst[T any]() *First[T] { return &First[T]{done: make(chan struct{})} }

// Set sets the value, unless it is set.
func (f *First[T]) Set(value T) {
	f.once.Do(func() {
		f.value = value
		close(f.done)
	})
}

// Done is closed when the value is set.
func (f *First[T]) Done() <-chan struct{} { return f.done }

// Value returns the value. Call it after [First.Done].
func (f *First[T]) Value() T { return f.value }
