package rpc

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// maxHeaderList bounds a stream's headers, as RFC 9113 counts them (6.5.2), and their block.
const maxHeaderList = 64 << 10

// headers are those of a stream that begins, while they are read.
type headers struct {
	decoder *hpack.Decoder
	block   []byte // of several frames
	ends    bool   // the stream, with its headers
	fields  []hpack.HeaderField
	size    int
	known   [4]*fieldSet // seen on the connection before: streams of one filter have the same headers, request by request
	oldest  int
}

func (h *headers) field(f hpack.HeaderField) {
	if h.size += int(f.Size()); h.size <= maxHeaderList {
		h.fields = append(h.fields, f)
	}
}

// fieldSet is what headers say, shared by all streams that have the same.
type fieldSet struct {
	fields  []hpack.HeaderField
	ctx     context.Context // with the metadata
	path    string
	timeout time.Duration // 0: none
	refuse  int           // HTTP status of what is no gRPC call; 0: it is one
	wrong   bool          // not HTTP/2
}

func (c *conn) headersFrame(flags http2.Flags, id uint32, p []byte) http2.ErrCode {
	if id == 0 || id%2 == 0 {
		return http2.ErrCodeProtocol
	}
	p, ok := unpad(flags, http2.FlagHeadersPadded, p)
	if ok && flags.Has(http2.FlagHeadersPriority) {
		if ok = len(p) >= 5; ok {
			if on := uint32(p[0]&0x7f)<<24 | uint32(p[1])<<16 | uint32(p[2])<<8 | uint32(p[3]); on == id {
				return http2.ErrCodeProtocol
			}
			p = p[5:]
		}
	}
	if !ok {
		return http2.ErrCodeProtocol
	}
	c.headers.ends = flags.Has(http2.FlagHeadersEndStream)
	if flags.Has(http2.FlagHeadersEndHeaders) {
		return c.begin(id, p)
	}
	c.continued, c.headers.block = id, append(c.headers.block[:0], p...)
	return http2.ErrCodeNo
}

func (c *conn) continuation(flags http2.Flags, id uint32, p []byte) http2.ErrCode {
	if c.continued == 0 {
		return http2.ErrCodeProtocol
	}
	if c.headers.block = append(c.headers.block, p...); len(c.headers.block) > maxHeaderList || len(p) == 0 && !flags.Has(http2.FlagContinuationEndHeaders) {
		return http2.ErrCodeEnhanceYourCalm
	}
	if !flags.Has(http2.FlagContinuationEndHeaders) {
		return http2.ErrCodeNo
	}
	c.continued = 0
	return c.begin(id, c.headers.block)
}

// begin takes in a complete header block: a new stream, or the trailers of one.
func (c *conn) begin(id uint32, block []byte) http2.ErrCode {
	h := &c.headers
	h.fields, h.size = h.fields[:0], 0
	if _, err := h.decoder.Write(block); err != nil {
		return http2.ErrCodeCompression
	}
	if h.decoder.Close() != nil {
		return http2.ErrCodeCompression
	}
	if id <= c.lastID {
		return c.trailers(id)
	}
	c.lastID = id
	if c.dead || c.leaving >= closed { // it was told; it may send this stream elsewhere
		c.out.reset(id, http2.ErrCodeRefusedStream)
		return http2.ErrCodeNo
	}
	if c.handlers >= int(c.s.o.MaxStreams) {
		c.out.reset(id, http2.ErrCodeRefusedStream)
		return http2.ErrCodeNo
	}
	set := h.set(c.base)
	if set.wrong {
		c.out.reset(id, http2.ErrCodeProtocol)
		return http2.ErrCodeNo
	}
	st := &stream{conn: c, id: id, set: set, window: c.peer.streamWindow, credit: c.s.o.StreamWindow}
	switch {
	case h.size > maxHeaderList:
		c.out.plain(id, 431)
	case set.refuse != 0:
		c.out.plain(id, set.refuse)
	default:
		st.method = c.s.methods[set.path]
		if st.method == nil {
			c.out.trailers(id, false, status.Newf(codes.Unimplemented, "unknown method %s", set.path), nil)
			break
		}
		c.streams[id] = st
		c.handlers++
		if set.timeout > 0 {
			st.deadline, st.timer = time.Now().Add(set.timeout), time.AfterFunc(set.timeout, st.expire)
		}
		if h.ends {
			st.halfClose()
		}
		if !st.method.inline {
			c.start(st)
		} else {
			c.offer(st)
		}
		return http2.ErrCodeNo
	}
	if !h.ends {
		c.out.reset(id, http2.ErrCodeNo)
	}
	return http2.ErrCodeNo
}

// trailers are a second header block of a stream, which can only be its end.
func (c *conn) trailers(id uint32) http2.ErrCode {
	st := c.streams[id]
	switch pseudo := slices.ContainsFunc(c.headers.fields, hpack.HeaderField.IsPseudo); {
	case st == nil && pseudo: // a request, not trailers
		return http2.ErrCodeStreamClosed
	case st == nil:
		c.out.reset(id, http2.ErrCodeStreamClosed)
	case st.halfClosed:
		c.refuse(id, http2.ErrCodeStreamClosed)
	case !c.headers.ends || pseudo:
		c.refuse(id, http2.ErrCodeProtocol)
	default:
		st.halfClose()
		c.offer(st)
	}
	return http2.ErrCodeNo
}

// set is what the headers that were just read say: the same object where the same were read before.
func (h *headers) set(base context.Context) *fieldSet {
	for _, k := range h.known {
		if k != nil && slices.Equal(k.fields, h.fields) {
			return k
		}
	}
	s := newFieldSet(base, slices.Clone(h.fields))
	h.known[h.oldest] = s
	h.oldest = (h.oldest + 1) % len(h.known)
	return s
}

// newFieldSet reads headers. Source of what a gRPC call is: PROTOCOL-HTTP2.md, Requests.
func newFieldSet(base context.Context, fields []hpack.HeaderField) *fieldSet {
	s := &fieldSet{fields: fields, refuse: 415}
	md := metadata.MD{}
	pseudo, regular, timeoutOK := map[string]string{}, false, true
	for _, f := range fields {
		regular = regular || !f.IsPseudo()
		switch {
		case f.IsPseudo():
			if _, twice := pseudo[f.Name]; twice || regular || !slices.Contains([]string{":method", ":scheme", ":path", ":authority"}, f.Name) {
				s.wrong = true
			}
			pseudo[f.Name] = f.Value
		case f.Name != strings.ToLower(f.Name), f.Name == "connection", f.Name == "keep-alive", f.Name == "proxy-connection",
			f.Name == "transfer-encoding", f.Name == "upgrade", f.Name == "te" && f.Value != "trailers":
			s.wrong = true
		case f.Name == "content-type":
			if rest, ok := strings.CutPrefix(f.Value, "application/grpc"); ok && (rest == "" || rest[0] == '+' || rest[0] == ';') {
				s.refuse = 0
			}
			md.Append(f.Name, f.Value)
		case f.Name == "grpc-timeout":
			s.timeout, timeoutOK = parseTimeout(f.Value)
		case strings.HasSuffix(f.Name, "-bin"):
			// Nobody reads such here; what they hold would have to be decoded.
		default:
			md.Append(f.Name, f.Value)
		}
	}
	if pseudo[":method"] == "" || pseudo[":path"] == "" || pseudo[":scheme"] == "" {
		s.wrong = true
	}
	switch {
	case pseudo[":method"] != "POST":
		s.refuse = 405
	case !timeoutOK && s.refuse == 0:
		s.refuse = 400
	}
	if a := pseudo[":authority"]; a != "" {
		md.Set(":authority", a)
	}
	s.path = pseudo[":path"]
	s.ctx = metadata.NewIncomingContext(base, md)
	return s
}

// parseTimeout reads grpc-timeout: at most eight digits and a unit.
func parseTimeout(text string) (time.Duration, bool) {
	if len(text) < 2 || len(text) > 9 {
		return 0, false
	}
	n, err := strconv.ParseUint(text[:len(text)-1], 10, 32)
	unit, ok := map[byte]time.Duration{'H': time.Hour, 'M': time.Minute, 'S': time.Second, 'm': time.Millisecond, 'u': time.Microsecond, 'n': time.Nanosecond}[text[len(text)-1]]
	if err != nil || !ok {
		return 0, false
	}
	if int64(n) > (1<<63-1)/int64(unit) {
		return 1<<63 - 1, true
	}
	return max(time.Duration(int64(n)*int64(unit)), 1), true
}
