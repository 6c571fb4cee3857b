package attempts

import "sync"

// First is something that several streams may tell: the first one is believed. Make it with [NewFirst]; it is safe for
// concurrent use.
type First[T any] struct {
	once  sync.Once
	told  chan struct{}
	value T
}

// NewFirst returns a First that nobody has told yet.
func NewFirst[T any]() *First[T] { return &First[T]{told: make(chan struct{})} }

// Tell tells the value, unless one is told.
func (f *First[T]) Tell(value T) {
	f.once.Do(func() {
		f.value = value
		close(f.told)
	})
}

// Told is closed when the value is told.
func (f *First[T]) Told() <-chan struct{} { return f.told }

// Value returns the value, once it is told.
func (f *First[T]) Value() T { return f.value }
