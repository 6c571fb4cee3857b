package extproc

import (
	"context"
	"net"

	"google.golang.org/grpc/peer"

	"tandem/kvstate"
)

// Envoy tells by its access log how a hop ended. One that is killed, or told to end, tells nothing any more, and what was
// booked for its requests would stay booked until it expires. So a booking remembers the connection it came over, and ends
// with it. (A connection that ends for another reason while its requests go on makes them count for less than they are, for
// as long as they run; that is the lesser evil.)

// Sources makes the listener of a gRPC server that serves this package: with it, bookings end with the Envoy that asked for
// them. Which connection a stream came over is told by its peer's address, which costs the stream nothing.
func Sources(l net.Listener) net.Listener { return sources{l} }

type sources struct{ net.Listener }

func (l sources) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &sourceConn{Conn: c, addr: sourceAddr{Addr: c.RemoteAddr()}}, nil
}

// sourceConn is a connection whose remote address carries its source. The gRPC server closes a connection before it cancels the
// connection's streams, so a handler whose stream was canceled can tell by the source whether the connection is still there.
type sourceConn struct {
	net.Conn
	addr sourceAddr
}

type sourceAddr struct {
	net.Addr
	source kvstate.Source
}

func (c *sourceConn) RemoteAddr() net.Addr { return &c.addr }

func (c *sourceConn) Close() error {
	c.addr.source.Gone()
	return c.Conn.Close()
}

// sourceOf is the connection that a stream came over; nil where the server's listener is not of [Sources].
func sourceOf(ctx context.Context) *kvstate.Source {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil
	}
	if a, ok := p.Addr.(*sourceAddr); ok {
		return &a.source
	}
	return nil
}
