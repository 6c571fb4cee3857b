package e2e

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// inner is a request hidden in another's body, for parsers that read the framing differently.
const inner = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-request-id: smuggled\r\ncontent-type: application/json\r\ncontent-length: 45\r\n\r\n" +
	`{"model":"tiny","prompt":"b","max_tokens": 1}`

// A request with ambiguous framing reaches no engine, or as one unambiguous request; and there is one answer.
func TestFraming(t *testing.T) {
	t.Parallel()
	f := start(t, options{})
	const body = `{"model":"tiny","prompt":"a","max_tokens":1}`
	const chunked = "Transfer-Encoding: chunked\r\n"
	length := fmt.Sprintf("Content-Length: %d\r\n", len(body))
	chunk := fmt.Sprintf("%x\r\n%s\r\n", len(body), body)
	const last = "0\r\n\r\n"
	t.Run("all", func(t *testing.T) {
		for name, tt := range map[string]struct {
			headers, body string
			status        int    // of the one answer; Envoy answers 501 to unknown encodings, as RFC 9112 demands
			note          string // x-note as engines see it
		}{
			"well-formed":            {length, body, 200, ""},
			"well-formed and chunks": {chunked, chunk + last, 200, ""},

			"length and chunks":      {chunked + fmt.Sprintf("Content-Length: %d\r\n", len(last+inner)), last + inner, 400, ""},
			"chunks and length":      {"Content-Length: 5\r\n" + chunked, last + inner, 400, ""},
			"length and true chunks": {length + chunked, chunk + last + inner, 400, ""},
			"two lengths":            {length + fmt.Sprintf("Content-Length: %d\r\n", len(body+inner)), body + inner, 400, ""},
			"two lengths in one":     {fmt.Sprintf("Content-Length: %d, %d\r\n", len(body), len(body+inner)), body + inner, 400, ""},
			"length with a sign":     {fmt.Sprintf("Content-Length: +%d\r\n", len(body)), body + inner, 400, ""},
			"length below zero":      {"Content-Length: -1\r\n", body + inner, 400, ""},
			"length in hex":          {"Content-Length: 0x2c\r\n", body + inner, 400, ""},

			"unknown encoding":      {"Transfer-Encoding: xchunked\r\n", chunk + last + inner, 501, ""},
			"unknown and length":    {length + "Transfer-Encoding: xchunked\r\n", body + inner, 400, ""},
			"identity and length":   {"Transfer-Encoding: identity\r\n" + length, body + inner, 400, ""},
			"two encodings":         {chunked + "Transfer-Encoding: identity\r\n", chunk + last + inner, 501, ""},
			"chunked is not last":   {"Transfer-Encoding: chunked, gzip\r\n", chunk + last + inner, 501, ""},
			"vertical tab":          {"Transfer-Encoding: \vchunked\r\n", chunk + last + inner, 400, ""},
			"encoding with a space": {"Transfer-Encoding : chunked\r\n" + length, chunk + last + inner, 400, ""},
			"folded encoding":       {"Transfer-Encoding:\r\n chunked\r\n" + length, chunk + last + inner, 400, ""},

			// Envoy joins lines, ends them at a bare LF, and removes a bare CR: it sends one header, or two that were
			// both checked.
			"folded header":          {length + "x-note: a\r\n x-override-port: 1\r\n", body, 200, "a x-override-port: 1"},
			"bare LF":                {length + "x-note: a\nx-override-port: 1\n", body, 200, "a"},
			"bare CR":                {length + "x-note: a\rx-override-port: 1\r\n", body, 200, "ax-override-port: 1"},
			"NUL":                    {length + "x-note: a\x00b\r\n", body, 400, ""},
			"space before the colon": {length + "x-override-port : 1\r\n", body, 400, ""},
			"no name":                {length + ": 1\r\n", body, 400, ""},
			"no colon":               {length + "x-note\r\n", body, 400, ""},

			"chunk extension":          {chunked, fmt.Sprintf("%x;a=b\r\n%s\r\n0;c\r\n\r\n", len(body), body), 200, ""},
			"extension with a bare LF": {chunked, fmt.Sprintf("%x;a\nb\r\n%s\r\n0\r\n\r\n", len(body), body), 400, ""},
			"chunk size with 0x":       {chunked, "0x" + chunk + last, 400, ""},
			"chunk size with a sign":   {chunked, "+" + chunk + last, 400, ""},
			"chunk size below zero":    {chunked, "-" + chunk + last, 400, ""},
			"chunk size of 65 bits":    {chunked, "1000000000000002c\r\n" + body + "\r\n" + last, 400, ""},
			"chunk size of no digit":   {chunked, "g\r\n" + body + "\r\n" + last, 400, ""},
			"chunk longer than said":   {chunked, "2\r\n" + body + "\r\n" + last, 400, ""},
			"trailers that steer":      {chunked, chunk + "0\r\nx-override-port: 1\r\ncontent-length: 3\r\n\r\n", 200, ""},
		} {
			for path, hops := range map[string]int{"/v1/completions": 2, "/tokenize": 1} {
				t.Run(name+path, func(t *testing.T) {
					t.Parallel() // Envoy keeps a refused connection for a second
					id := strings.NewReplacer(" ", "-", "/", "-").Replace(name + path)
					got := exchange(t, f, "POST "+path+" HTTP/1.1\r\nHost: x\r\nx-request-id: "+id+"\r\nContent-Type: application/json\r\nConnection: close\r\n"+tt.headers+"\r\n"+tt.body)
					require.Equal(t, 1, strings.Count(got, "HTTP/1.1 "), "answers: %s", got)
					require.True(t, strings.HasPrefix(got, fmt.Sprintf("HTTP/1.1 %d ", tt.status)), "%s", got)
					if tt.status != 200 {
						hops = 0
						require.Contains(t, got, `{"error":{`)
					}
					requireWhole(t, f.requests(id, f.engines()...), hops, tt.note)
				})
			}
		}
	})
	require.Empty(t, f.requests("smuggled", f.engines()...))
}

// requireWhole checks that hops engines saw the request, each as a whole, and that none was steered.
func requireWhole(t *testing.T, seen []seen, hops int, note string) {
	t.Helper()
	require.Len(t, seen, hops)
	for _, s := range seen {
		require.True(t, json.Valid([]byte(s.Body)), s.Body)
		require.Len(t, s.Body, s.BodyBytes)
		require.NotContains(t, s.Headers, "X-Override-Port")
		require.Equal(t, note, strings.Join(s.Headers["X-Note"], ","))
	}
}

// exchange sends bytes unchanged, and returns all output until the connection ends.
func exchange(t *testing.T, f *fleet, request string) string {
	t.Helper()
	conn := sendRaw(t, f, request)
	defer conn.Close()
	got, _ := io.ReadAll(conn) // Envoy resets a connection that it has not read completely
	return string(got)
}

// The same with HTTP/2, whose frames define the end of a message, so that contradicting headers are lies. Such a
// request is reset (PROTOCOL_ERROR), without the others.
func TestFramingHTTP2(t *testing.T) {
	t.Parallel()
	f := start(t, options{})
	const body = `{"model":"tiny","prompt":"a","max_tokens":1}`
	for name, tt := range map[string]struct {
		headers []string
		ok      bool
	}{
		"well-formed":           {[]string{"content-length", strconv.Itoa(len(body))}, true},
		"no length":             {nil, true},
		"length too short":      {[]string{"content-length", "5"}, false},
		"length too great":      {[]string{"content-length", "5000"}, false},
		"two lengths":           {[]string{"content-length", strconv.Itoa(len(body)), "content-length", "5"}, false},
		"chunked":               {[]string{"transfer-encoding", "chunked"}, false},
		"connection":            {[]string{"connection", "close"}, false},
		"keep-alive":            {[]string{"keep-alive", "timeout=5"}, false},
		"upgrade":               {[]string{"upgrade", "websocket"}, false},
		"te":                    {[]string{"te", "chunked"}, false},
		"line break in a value": {[]string{"x-note", "a\r\nx-override-port: 1"}, false},
		"line break in a name":  {[]string{"x-note: a\r\nx-override-port", "1"}, false},
		"upper case":            {[]string{"X-Note", "a"}, false},
		"space in a name":       {[]string{"x-override-port ", "1"}, false},
		"colon in a name":       {[]string{"x:y", "1"}, false},
		"path twice":            {[]string{":path", "/metrics"}, false},
		"unknown pseudo-header": {[]string{":note", "/metrics"}, false},
	} {
		for path, hops := range map[string]int{"/v1/completions": 2, "/tokenize": 1} {
			t.Run(name+path, func(t *testing.T) {
				id := strings.NewReplacer(" ", "-", "/", "-").Replace("h2-" + name + path)
				got := exchangeHTTP2(t, f, append([]string{":method", "POST", ":scheme", "http", ":authority", "x", ":path", path, "content-type", "application/json", "x-request-id", id}, tt.headers...), body)
				if tt.ok {
					require.Equal(t, "200", got)
				} else {
					hops = 0
					require.Equal(t, "reset 1", got)
				}
				requireWhole(t, f.requests(id, f.engines()...), hops, "")
			})
		}
	}
}

// A request with trailers after its body: Envoy (1.40) would send an engine the body twice, where it is streamed through
// Tandem on a route with retries or redirects. It is refused before an engine works, in every mode and for every number
// of hops. A body that does not come to Tandem goes on, once.
func TestTrailers(t *testing.T) {
	t.Parallel()
	for mode, fields := range map[string]string{"default": "", "auto": ", bodyMode: auto", "duplex": ", bodyMode: duplex", "buffered": ", bodyMode: buffered"} {
		for dialect, pool := range map[string]string{"nixl": "", "sglang": "", "none": ""} {
			t.Run(mode+" "+dialect, func(t *testing.T) {
				f := start(t, options{dialect: dialect, pool: pool, envoyFields: fields, prefills: 1, decodes: 1})
				for name, tt := range map[string]struct {
					path, kind, body string
					hops             int
				}{
					"short":   {"/v1/chat/completions", "application/json", `{"model":"tiny","messages":[{"role":"user","content":"a"}],"max_tokens":1}`, 0},
					"long":    {"/v1/completions", "application/json", `{"model":"tiny","prompt":"` + strings.Repeat("a b ", 25_000) + `","max_tokens":1}`, 0},
					"other":   {"/tokenize", "application/json", `{"model":"tiny","prompt":"a"}`, 0},
					"upload":  {"/v1/audio/transcriptions", "multipart/form-data; boundary=x", "--x\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\ntiny\r\n--x--\r\n", 1},
					"nothing": {"/v1/chat/completions", "application/json", "", 0},
				} {
					for _, length := range []bool{true, false} {
						id := fmt.Sprintf("trailers-%s-%v", name, length)
						headers := []string{":method", "POST", ":scheme", "http", ":authority", "x", ":path", tt.path, "content-type", tt.kind, "x-request-id", id}
						if length {
							headers = append(headers, "content-length", strconv.Itoa(len(tt.body)))
						}
						got := exchangeHTTP2(t, f, headers, tt.body, "x-checksum", "abc", "x-override-port", "1")
						seen := f.requests(id, f.engines()...)
						require.Len(t, seen, tt.hops, name)
						if tt.hops == 0 {
							require.Equal(t, "400", got, name)
							continue
						}
						require.Equal(t, len(tt.body), seen[0].BodyBytes, name)
						require.NotContains(t, seen[0].Headers, "X-Override-Port")
					}
				}
			})
		}
	}
}

// HTTP/2's frames, as far as they are needed here (RFC 9113, 6; RFC 7541, appendix A).
const (
	frameData, frameHeaders, frameReset, frameSettings, frameGoAway = 0, 1, 3, 4, 7
	flagEndStream, flagEndHeaders                                   = 1, 4
)

func frame(kind, flags byte, stream uint32, payload []byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(len(payload))<<8|uint32(kind))
	b = binary.BigEndian.AppendUint32(append(b, flags), stream)
	return append(b, payload...)
}

// exchangeHTTP2 sends one request, and returns its result: "200", "400", another answer's first byte, or the refusal.
func exchangeHTTP2(t *testing.T, f *fleet, headers []string, body string, trailers ...string) string {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
	encode := func(headers []string) (block []byte) {
		for pair := range slices.Chunk(headers, 2) { // literals, never indexed, without Huffman's code
			block = append(append(append(block, 0x10, byte(len(pair[0]))), pair[0]...), byte(len(pair[1])))
			block = append(block, pair[1]...)
		}
		return block
	}
	out := append([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), frame(frameSettings, 0, 0, nil)...)
	out = append(out, frame(frameHeaders, flagEndHeaders, 1, encode(headers))...)
	const largest = 16_000
	for rest := body; len(trailers) == 0 || rest != ""; {
		n := min(len(rest), largest)
		end := byte(0)
		if n == len(rest) && len(trailers) == 0 {
			end = flagEndStream
		}
		out = append(out, frame(frameData, end, 1, []byte(rest[:n]))...)
		if rest = rest[n:]; rest == "" {
			break
		}
	}
	if len(trailers) > 0 {
		out = append(out, frame(frameHeaders, flagEndHeaders|flagEndStream, 1, encode(trailers))...)
	}
	go func() { _, _ = conn.Write(out) }() // Envoy's window is larger; a refusal may come before the end
	answer := "none"
	for head := make([]byte, 9); ; {
		_, err := io.ReadFull(conn, head)
		require.NoError(t, err)
		kind, flags := head[3], head[4]
		payload := make([]byte, binary.BigEndian.Uint32(head)>>8)
		_, err = io.ReadFull(conn, payload)
		require.NoError(t, err)
		switch kind {
		case frameReset:
			return fmt.Sprint("reset ", binary.BigEndian.Uint32(payload))
		case frameGoAway:
			return fmt.Sprintf("goaway %q", payload)
		case frameHeaders:
			payload = bytes.TrimLeft(payload, "\x20\x21\x3f")       // sizes of the dynamic table
			switch answer = fmt.Sprintf("%x", payload[0]); answer { // indices of the static table
			case "88":
				answer = "200"
			case "8c":
				answer = "400"
			}
		}
		if (kind == frameHeaders || kind == frameData) && flags&flagEndStream != 0 {
			return answer
		}
	}
}
