package rpc

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// settled waits, in a bubble, until all is done, and holds connections to having no handlers and no buffers left.
func (s *stand) settled(t testing.TB, conns ...*conn) {
	t.Helper()
	synctest.Wait()
	for _, c := range conns {
		c.mu.Lock()
		handlers, streams := c.handlers, len(c.streams)
		c.mu.Unlock()
		require.Zero(t, handlers, "handlers")
		require.Zero(t, streams, "streams")
	}
	s.pool.requireComplete(t)
}

// rawPeer is a client that says what it is told to, in frames.
type rawPeer struct {
	t     testing.TB
	nc    net.Conn
	fr    *http2.Framer
	block bytes.Buffer
	enc   *hpack.Encoder

	mu   sync.Mutex
	said []string // by the server
}

// newRawPeer says hello, with settings if there are any, and reads in the background what the server says.
func newRawPeer(t testing.TB, nc net.Conn) *rawPeer {
	p := &rawPeer{t: t, nc: nc, fr: http2.NewFramer(nc, nc)}
	p.enc = hpack.NewEncoder(&p.block)
	p.fr.AllowIllegalWrites = true
	_, err := nc.Write([]byte(http2.ClientPreface))
	require.NoError(t, err)
	go p.listen()
	t.Cleanup(func() { _ = nc.Close() })
	return p
}

func (p *rawPeer) listen() {
	p.fr.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	for {
		f, err := p.fr.ReadFrame()
		line := "HANGS UP"
		if err == nil {
			line = describe(f)
		}
		p.mu.Lock()
		p.said = append(p.said, line)
		p.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// heard is what the server has said since it was asked last.
func (p *rawPeer) heard() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.said
	p.said = nil
	return s
}

func describe(f http2.Frame) string {
	id, end := f.Header().StreamID, ""
	if (f.Header().Type == http2.FrameData || f.Header().Type == http2.FrameHeaders) && f.Header().Flags.Has(http2.FlagDataEndStream) {
		end = " END"
	}
	switch f := f.(type) {
	case *http2.MetaHeadersFrame:
		var fields []string
		for _, h := range f.Fields {
			if h.Name != "content-type" {
				fields = append(fields, strings.TrimPrefix(h.Name, ":")+"="+h.Value)
			}
		}
		slices.SortFunc(fields[1:], strings.Compare) // metadata has no order
		return fmt.Sprintf("HEADERS %d %s%s", id, strings.Join(fields, " "), end)
	case *http2.DataFrame:
		data, messages := f.Data(), []string(nil)
		for len(data) >= 5 && len(data) >= 5+int(binary.BigEndian.Uint32(data[1:])) && len(data) < 100 {
			n := 5 + int(binary.BigEndian.Uint32(data[1:]))
			messages, data = append(messages, string(data[5:n])), data[n:]
		}
		if len(data) > 0 {
			messages = append(messages, fmt.Sprintf("(%d bytes)", len(data)))
		}
		return fmt.Sprintf("DATA %d %s%s", id, strings.Join(messages, ","), end)
	case *http2.RSTStreamFrame:
		return fmt.Sprintf("RST %d %s", id, f.ErrCode)
	case *http2.GoAwayFrame:
		return fmt.Sprintf("GOAWAY %d %s", f.LastStreamID, f.ErrCode)
	case *http2.PingFrame:
		return fmt.Sprintf("PING %s%s", f.Data, map[bool]string{true: " ACK"}[f.IsAck()])
	case *http2.SettingsFrame:
		return "SETTINGS" + map[bool]string{true: " ACK"}[f.IsAck()]
	case *http2.WindowUpdateFrame:
		return fmt.Sprintf("WINDOW %d %d", id, f.Increment)
	}
	return f.Header().Type.String()
}

// headersOf is a header block: of a call, or of what is written as name=value.
func (p *rawPeer) headersOf(path string, more ...string) []byte {
	fields := []string{":method=POST", ":scheme=http", ":path=" + path, ":authority=t", "content-type=application/grpc", "te=trailers"}
	if path == "-" {
		fields = nil
	}
	p.block.Reset()
	for _, f := range append(fields, more...) {
		i := 1 + strings.Index(f[1:], "=")
		require.NoError(p.t, p.enc.WriteField(hpack.HeaderField{Name: f[:i], Value: f[i+1:]}))
	}
	return p.block.Bytes()
}

// message is text as it goes over the wire.
func message(s string) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(s))), s...)
}

// say sends one line of a transcript:
//
//	HEADERS id path [name=value ...] [END]    path - : only these fields
//	BEGUN id path                              a header block that goes on
//	CONTINUATION id [name=value ...] [END]     END: of the block
//	DATA id text [END]                         one message; text*n: repeated
//	BYTES id hex [END]                         part of a message
//	RST id | PING | WINDOW id n | SETTINGS [INITIAL=n] [FRAME=n] | GOAWAY | PRIORITY id on | FRAME type flags id hex
func (p *rawPeer) say(line string) {
	w := strings.Fields(line)
	end := w[len(w)-1] == "END"
	if end {
		w = w[:len(w)-1]
	}
	number := func(i int) uint32 {
		n, err := strconv.ParseUint(w[i], 10, 32)
		require.NoError(p.t, err, line)
		return uint32(n)
	}
	binaryOf := func(i int) []byte {
		if len(w) <= i || w[i] == "-" {
			return nil
		}
		b, err := hex.DecodeString(w[i])
		require.NoError(p.t, err, line)
		return b
	}
	var err error
	switch w[0] {
	case "HEADERS":
		err = p.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: number(1), BlockFragment: p.headersOf(w[2], w[3:]...), EndHeaders: true, EndStream: end})
	case "BEGUN":
		err = p.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: number(1), BlockFragment: p.headersOf(w[2], w[3:]...), EndStream: end})
	case "CONTINUATION":
		err = p.fr.WriteContinuation(number(1), end, p.headersOf("-", w[2:]...))
	case "DATA":
		body := w[2]
		if s, n, ok := strings.Cut(body, "*"); ok {
			count, err := strconv.Atoi(n)
			require.NoError(p.t, err)
			body = strings.Repeat(s, count)
		}
		m := message(body)
		for ; len(m) > minFrame; m = m[minFrame:] {
			require.NoError(p.t, p.fr.WriteData(number(1), false, m[:minFrame]))
		}
		err = p.fr.WriteData(number(1), end, m)
	case "BYTES":
		err = p.fr.WriteData(number(1), end, binaryOf(2))
	case "PADDED":
		err = p.fr.WriteDataPadded(number(1), end, message(w[2]), make([]byte, 7))
	case "RST":
		err = p.fr.WriteRSTStream(number(1), http2.ErrCodeCancel)
	case "PING":
		err = p.fr.WritePing(false, [8]byte{'p', 'i', 'n', 'g', 'p', 'i', 'n', 'g'})
	case "ANSWER":
		err = p.fr.WritePing(true, [8]byte([]byte(w[1])))
	case "WINDOW":
		err = p.fr.WriteWindowUpdate(number(1), number(2))
	case "SETTINGS":
		var all []http2.Setting
		for i := range w[1:] {
			name, value, _ := strings.Cut(w[1+i], "=")
			v, err := strconv.ParseUint(value, 10, 32)
			require.NoError(p.t, err)
			all = append(all, http2.Setting{ID: map[string]http2.SettingID{"INITIAL": http2.SettingInitialWindowSize, "FRAME": http2.SettingMaxFrameSize,
				"PUSH": http2.SettingEnablePush, "OTHER": 0x99}[name], Val: uint32(v)})
		}
		err = p.fr.WriteSettings(all...)
	case "ACK":
		err = p.fr.WriteSettingsAck()
	case "GOAWAY":
		err = p.fr.WriteGoAway(0, http2.ErrCodeNo, nil)
	case "PRIORITY":
		err = p.fr.WritePriority(number(1), http2.PriorityParam{StreamDep: number(2)})
	case "FRAME": // of any kind
		err = p.fr.WriteRawFrame(http2.FrameType(number(1)), http2.Flags(number(2)), number(3), binaryOf(4))
	case "CLOSE":
		err = p.nc.Close()
	case "PASS":
		d, perr := time.ParseDuration(w[1])
		require.NoError(p.t, perr)
		time.Sleep(d)
		synctest.Wait()
	default:
		require.Fail(p.t, "no such line", line)
	}
	require.NoError(p.t, err, line)
}

// bytesOf are lines of a transcript as they go over the wire. The headers of a connection come from one call of it, or all from say.
func (p *rawPeer) bytesOf(lines string) []byte {
	var b bytes.Buffer
	q := &rawPeer{t: p.t, fr: http2.NewFramer(&b, nil)}
	q.enc, q.fr.AllowIllegalWrites = hpack.NewEncoder(&q.block), true
	for line := range strings.Lines(lines) {
		if strings.TrimSpace(line) != "" {
			q.say(line)
		}
	}
	return b.Bytes()
}

// play plays a transcript: what comes after all that is said is what the `<` lines after it say.
func (p *rawPeer) play(transcript string) {
	var want []string
	check := func() {
		synctest.Wait()
		if got := p.heard(); len(got)+len(want) > 0 {
			require.Equal(p.t, want, got, transcript)
		}
		want = nil
	}
	answered := false
	for line := range strings.Lines(transcript) {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		if said, ok := strings.CutPrefix(line, "< "); ok {
			want, answered = append(want, said), true
			continue
		}
		if answered {
			check()
		}
		answered = false
		p.say(line)
	}
	check()
}

// hello is how every transcript begins.
const hello = `
SETTINGS
< SETTINGS
< WINDOW 0 67043329
< SETTINGS ACK
`
