package rpc

import (
	"fmt"
	"strconv"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// Header blocks without references to the peer's table, so that their order does not matter: `:status: 200` and
// `content-type: application/grpc`.
const answered = "\x88\x0f\x10\x10application/grpc"

// headers adds a header block, in as many frames as it needs.
func (o *outgoing) headers(id uint32, flags http2.Flags, block []byte) {
	kind := frameHeaders
	for {
		n := min(len(block), minFrame)
		if n == len(block) {
			flags |= http2.FlagHeadersEndHeaders
		}
		o.frame(kind, flags, id, n)
		o.tail = append(o.tail, block[:n]...)
		if block = block[n:]; len(block) == 0 {
			return
		}
		kind, flags = http2.FrameContinuation, 0
	}
}

// trailers adds the end of a stream.
func (o *outgoing) trailers(id uint32, begun bool, s *status.Status, md metadata.MD) {
	o.control += 64
	block := make([]byte, 0, 128)
	if !begun {
		block = append(block, answered...)
	}
	block = appendField(block, "grpc-status", strconv.Itoa(int(s.Code())))
	if s.Message() != "" {
		block = appendField(block, "grpc-message", escape(s.Message()))
	}
	o.headers(id, http2.FlagHeadersEndStream, appendMD(block, md))
}

// plain adds the whole answer to what is no gRPC call.
func (o *outgoing) plain(id uint32, code int) {
	o.control += 32
	o.headers(id, http2.FlagHeadersEndStream, append([]byte{0x08, 3}, strconv.Itoa(code)...))
}

func appendMD(block []byte, md metadata.MD) []byte {
	for name, values := range md {
		for _, v := range values {
			block = appendField(block, name, v)
		}
	}
	return block
}

// appendField adds a literal field that goes into no table (RFC 7541, 6.2.2).
func appendField(b []byte, name, value string) []byte {
	b = append(b, 0)
	b = append(appendLength(b, len(name)), name...)
	return append(appendLength(b, len(value)), value...)
}

// appendLength adds a string's length, an integer with a prefix of seven bits (RFC 7541, 5.1).
func appendLength(b []byte, n int) []byte {
	if n < 127 {
		return append(b, byte(n))
	}
	b, n = append(b, 127), n-127
	for ; n >= 128; n >>= 7 {
		b = append(b, byte(n)|128)
	}
	return append(b, byte(n))
}

// escape writes a status message as gRPC wants it: what is not printable ASCII, and %, as %XX.
func escape(s string) string {
	var b []byte
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '%' {
			b = fmt.Appendf(b, "%%%02X", c)
		} else {
			b = append(b, c)
		}
	}
	return string(b)
}
