package rpc

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// stream is one call. It implements [google.golang.org/grpc.ServerStream].
type stream struct {
	conn     *conn
	id       uint32
	set      *fieldSet
	method   *method
	inline   atomic.Bool // the leader runs it: what it sends, the leader writes
	timer    *time.Timer // of the peer's deadline
	deadline time.Time   // zero: none

	// Of conn.mu:
	running    bool          // its handler has been started
	halfClosed bool          // the peer will send no more
	begun      bool          // headers were sent
	ended      bool          // nothing is sent any more
	code       codes.Code    // with which
	credit     int32         // bytes the peer may still send
	taken      int32         // bytes that were read, and are not credited yet
	window     int64         // bytes the peer takes
	messages   []received    // and not read yet
	under      received      // the message that is under way
	prefix     [5]byte       // of it
	partial    int           // bytes of it that have come, with its prefix
	length     int           // that it is to have, without
	reader     chan struct{} // a handler waits for a message
	writer     chan struct{} // a handler waits for a window
	done       chan struct{} // of the context
	header     metadata.MD
	trailer    metadata.MD
}

// How streams end: by the peer's will, or otherwise.
const (
	canceled = codes.Canceled
	lost     = codes.Unavailable
)

// serve runs the handler.
func (st *stream) serve() {
	c, m := st.conn, st.method
	c.mu.Lock()
	ended := st.ended
	c.mu.Unlock()
	var err error
	switch {
	case ended: // before its turn came
	case m.stream != nil:
		err = m.stream(m.impl, st)
	default:
		err = st.unary()
	}
	c.mu.Lock()
	c.handlers--
	st.finish(err)
	st.forget()
	c.mu.Unlock()
	if !st.inline.Load() {
		c.flush()
	}
}

func (st *stream) unary() error {
	reply, err := st.method.unary(st.method.impl, st.Context(), st.RecvMsg, nil)
	if err != nil {
		return err
	}
	return st.SendMsg(reply)
}

// finish ends the stream with what its handler returned. conn.mu is held.
func (st *stream) finish(err error) {
	c := st.conn
	if st.ended {
		return
	}
	s, ok := status.FromError(err)
	if !ok {
		s = status.FromContextError(err)
	}
	c.out.trailers(st.id, st.begun, s, st.trailer)
	if !st.halfClosed {
		c.out.reset(st.id, http2.ErrCodeNo) // gRPC: the answer is complete, whatever more was to be asked
	}
	st.end(canceled)
	delete(c.streams, st.id)
}

// end makes everybody who waits for the stream give up. conn.mu is held.
func (st *stream) end(code codes.Code) {
	if st.ended {
		return
	}
	st.ended, st.code = true, code
	if st.timer != nil {
		st.timer.Stop()
	}
	if st.done != nil {
		close(st.done)
	}
	st.wake(&st.reader)
	st.wake(&st.writer)
	if !st.running {
		st.conn.handlers--
		st.forget()
	}
}

// expire is the peer's deadline.
func (st *stream) expire() {
	c := st.conn
	c.mu.Lock()
	if !st.ended {
		c.out.trailers(st.id, st.begun, status.New(codes.DeadlineExceeded, "the caller's deadline has passed"), nil)
		c.out.reset(st.id, http2.ErrCodeNo)
		st.end(codes.DeadlineExceeded)
		delete(c.streams, st.id)
	}
	c.mu.Unlock()
	c.flush()
}

// wake ends a wait. conn.mu is held.
func (st *stream) wake(who *chan struct{}) {
	if *who != nil {
		close(*who)
		*who = nil
	}
}

// wait waits until it is woken. conn.mu is held before and after, and not meanwhile.
func (st *stream) wait(who *chan struct{}) {
	if *who == nil {
		*who = make(chan struct{})
	}
	ch, c := *who, st.conn
	c.mu.Unlock()
	st.MayWait()
	c.flush() // what was sent before
	<-ch
	c.mu.Lock()
}

// MayWait tells the server that the handler is about to wait for something other than the stream: if it runs on the goroutine that
// reads the connection, another one reads from here on.
func (st *stream) MayWait() {
	if st.inline.CompareAndSwap(true, false) {
		c := st.conn
		c.flush()
		c.s.work(task{conn: c})
	}
}

func (st *stream) halfClose() {
	st.halfClosed = true
	if st.running {
		st.wake(&st.reader)
	}
}

// err is why the stream has ended.
func (st *stream) err() error {
	switch st.code {
	case codes.DeadlineExceeded:
		return status.FromContextError(context.DeadlineExceeded).Err()
	case lost:
		return status.Error(lost, "the connection ended")
	}
	return status.FromContextError(context.Canceled).Err()
}

// Context implements [google.golang.org/grpc.ServerStream].
func (st *stream) Context() context.Context { return (*streamContext)(st) }

// streamContext is a stream as its context.
type streamContext stream

func (x *streamContext) Deadline() (time.Time, bool) { return x.deadline, !x.deadline.IsZero() }

func (x *streamContext) Value(key any) any { return x.set.ctx.Value(key) }

func (x *streamContext) Done() <-chan struct{} {
	x.conn.mu.Lock()
	defer x.conn.mu.Unlock()
	if x.done == nil {
		x.done = make(chan struct{})
		if x.ended {
			close(x.done)
		}
	}
	return x.done
}

func (x *streamContext) Err() error {
	x.conn.mu.Lock()
	defer x.conn.mu.Unlock()
	switch {
	case !x.ended:
		return nil
	case x.code == codes.DeadlineExceeded:
		return context.DeadlineExceeded
	}
	return context.Canceled
}
