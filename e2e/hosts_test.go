package e2e

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// A request with an odd Host, query or other headers takes both hops, or is refused before an engine sees it. Prefill
// never works for a request that cannot continue.
func TestOddRequestsGoOnOrNotAtAll(t *testing.T) {
	t.Parallel()
	f := start(t, options{})
	const body = `{"model":"tiny","prompt":"odd","max_tokens":2}`
	many := func(n, size int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "x-more-%d: %s\r\n", i, strings.Repeat("v", size))
		}
		return b.String()
	}
	for name, tt := range map[string]struct {
		host, query, headers string
		status               int    // of the answer
		seen                 string // the Host at engines; "": as it was sent
	}{
		"plain":                  {host: "llm.example.com", status: 200},
		"underscore":             {host: "my_service:8080", status: 200},
		"underscore, no port":    {host: "my_service", status: 200},
		"IPv4":                   {host: "192.0.2.7:80", status: 200},
		"IPv6":                   {host: "[2001:db8::1]:8080", status: 200},
		"IPv6 with a zone":       {host: "[fe80::1%25eth0]:8080", status: 200},
		"upper case":             {host: "LLM.Example.COM", status: 200},
		"trailing dot":           {host: "llm.example.com.", status: 200},
		"dots":                   {host: "a..b", status: 200},
		"leading hyphen":         {host: "-a-.b-", status: 200},
		"punycode":               {host: "xn--bcher-kva.example", status: 200},
		"sub-delims":             {host: "a!$&'()*+,;=b", status: 200},
		"tilde":                  {host: "~a", status: 200},
		"percent":                {host: "a%41b", status: 200},
		"no port after a colon":  {host: "llm:", status: 200},
		"port of zeros":          {host: "llm:00080", status: 200},
		"port too large":         {host: "llm:99999", status: 200},
		"port that is a word":    {host: "llm:http", status: 200},
		"two colons":             {host: "a:b:c", status: 200},
		"longest name":           {host: strings.Repeat("a2345678.", 28) + "c:65535", status: 200},
		"1 KiB":                  {host: strings.Repeat("a", 1024), status: 200},
		"over 1 KiB":             {host: strings.Repeat("a", 1025), status: 400},
		"60 KB":                  {host: strings.Repeat("a", 60_000), status: 400},
		"user":                   {host: "user@llm", status: 400},
		"space":                  {host: "a b", status: 400},
		"slash":                  {host: "a/b", status: 400},
		"empty":                  {host: "", status: 200},
		"query":                  {host: "h", query: "?a=b&c", status: 200},
		"question marks":         {host: "h", query: "?a?b??", status: 200},
		"URL in the query":       {host: "h", query: "?to=http://a/b?c=d@e:80", status: 200},
		"query of odd bytes":     {host: "h", query: `?a="<>\^{|}'` + "`", status: 200},
		"query of UTF-8":         {host: "h", query: "?ü=€", status: 400},
		"query, broken escape":   {host: "h", query: "?%zz%", status: 200},
		"query of 2 KB":          {host: "h", query: "?" + strings.Repeat("q", 2000), status: 200},
		"query of 20 KB":         {host: "h", query: "?" + strings.Repeat("q", 20_000), status: 414},
		"80 headers":             {host: "h", headers: many(80, 10), status: 200},
		"90 headers":             {host: "h", headers: many(90, 10), status: 200},
		"130 headers":            {host: "h", headers: many(130, 10), status: 431},
		"200 headers":            {host: "h", headers: many(200, 10), status: 431},
		"40 KB of headers":       {host: "h", headers: many(5, 8_000), status: 200},
		"70 KB of headers":       {host: "h", headers: many(7, 10_000), status: 431},
		"140 KB of headers":      {host: "h", headers: many(14, 10_000), status: 431},
		"180 KB of headers":      {host: "h", headers: many(18, 10_000), status: 431},
		"x-forwarded-host":       {host: "h", headers: "x-forwarded-host: my_other\r\n", status: 200},
		"x-forwarded-proto":      {host: "h", headers: "x-forwarded-proto: ftp\r\n", status: 200},
		"another Host":           {host: "h", headers: "Host: other\r\n", status: 200, seen: "h,other"},
		"connection names Host":  {host: "h", headers: "connection: host\r\n", status: 400},
		"names a ticket as hop":  {host: "h", headers: "connection: x-tandem-ticket\r\n", status: 200},
		"te":                     {host: "h", headers: "te: trailers\r\n", status: 200},
		"content type of no use": {host: "h", headers: "x-http-method-override: GET\r\n", status: 200},
	} {
		t.Run(name, func(t *testing.T) {
			id := "odd-" + strings.NewReplacer(" ", "-", ",", "", ".", "").Replace(name)
			got := raw(t, f, fmt.Sprintf("POST /v1/completions%s HTTP/1.1\r\nHost: %s\r\nx-request-id: %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s\r\n%s",
				tt.query, tt.host, id, len(body), tt.headers, body))
			engines := f.requests(id, f.engines()...)
			require.Contains(t, got, fmt.Sprintf("HTTP/1.1 %d ", tt.status))
			if tt.status != 200 {
				require.Empty(t, engines)
				return
			}
			p, d := f.hops(id)
			require.Equal(t, "prefill", p.Leg)
			require.Equal(t, "decode", d.Leg)
			require.Positive(t, d.ExternalTokens, "decode fetched what prefill has")
			for _, s := range engines {
				require.Equal(t, cmp.Or(tt.seen, tt.host), s.Host)
				require.Equal(t, "/v1/completions"+tt.query, s.Path)
			}
		})
	}
}

// HTTP/2's :authority is a Host with another name.
func TestOddAuthorities(t *testing.T) {
	t.Parallel()
	f := start(t, options{})
	const body = `{"model":"tiny","prompt":"odd","max_tokens":2}`
	for name, tt := range map[string]struct {
		authority string
		status    string
	}{
		"an underscore and a port": {"my_service:8080", "200"},
		"an IPv6 zone":             {"[fe80::1%25eth0]:8080", "200"},
		"a percent":                {"a%41b", "200"},
		"a port that is none":      {"llm:http", "200"},
		"the longest":              {strings.Repeat("a", 1024), "200"},
		"too long":                 {strings.Repeat("a", 1025), "400"},
		"a user":                   {"user@llm", "400"},
		"a space":                  {"a b", "400"},
		"a slash":                  {"a/b", "400"},
	} {
		t.Run(name, func(t *testing.T) {
			id := "authority-" + strings.ReplaceAll(name, " ", "-")
			status := overHTTP2(t, f, [][2]string{
				{":method", "POST"}, {":scheme", "http"}, {":path", "/v1/completions"}, {":authority", tt.authority},
				{"content-type", "application/json"}, {"x-request-id", id}, {"content-length", strconv.Itoa(len(body))},
			}, body)
			if tt.status != "200" {
				require.NotEqual(t, "200", status)
				require.Empty(t, f.requests(id, f.engines()...))
				return
			}
			require.Equal(t, "200", status)
			_, d := f.hops(id)
			require.Positive(t, d.ExternalTokens, "decode fetched what prefill has")
			require.Equal(t, tt.authority, d.Host)
		})
	}
}

// overHTTP2 sends one request as it is, and returns the status of the answer; "reset" if there is none.
func overHTTP2(t *testing.T, f *fleet, headers [][2]string, body string) string {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
	_, err = io.WriteString(conn, http2.ClientPreface)
	require.NoError(t, err)
	framer := http2.NewFramer(conn, conn)
	framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	require.NoError(t, framer.WriteSettings())
	var block bytes.Buffer
	e := hpack.NewEncoder(&block)
	for _, h := range headers {
		require.NoError(t, e.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]}))
	}
	require.NoError(t, framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true}))
	require.NoError(t, framer.WriteData(1, true, []byte(body)))
	for {
		frame, err := framer.ReadFrame()
		if err != nil {
			return "reset"
		}
		switch frame := frame.(type) {
		case *http2.MetaHeadersFrame:
			return frame.PseudoValue("status")
		case *http2.RSTStreamFrame, *http2.GoAwayFrame:
			return "reset"
		}
	}
}
