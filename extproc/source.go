package extproc

import (
	"context"
	"net"

	"google.golang.org/grpc/peer"

	"tandem/kvstate"
)

// Envoy's access log reports how a hop ended. An Envoy that is killed or stopped reports nothing any more, and the
// reservations of its requests would stay until they expire. So a reservation refers to the connection that it was
// made over, and ends with it. (If a connection ends for another reason while its requests go on, their load is
// missing as long as they run, which is the lesser evil.)

// Sources wraps the listener of a gRPC server that serves this package: with it, reservations end with the Envoy
// that they were made for. The peer's address identifies a stream's connection, which costs the stream nothing.
func Sources(l net.Listener) net.Listener { return sources{l} }

type sources struct{ net.Listener }

func (l sources) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &sourceConn{Conn: c, addr: sourceAddr{Addr: c.RemoteAddr()}}, nil
}

// sourceConn is a connection whose remote address carries its source. The gRPC server closes a connection before it
// cancels the connection's streams, so the handler of a canceled stream can tell by the source whether the
// connection still exists.
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

// sourceOf returns the connection of a stream; nil if the server's listener is not of [Sources].
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
