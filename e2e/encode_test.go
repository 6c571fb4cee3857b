package e2e

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// show returns a chat with pictures, and some kilobytes of text.
func show(i, pictures, kilobytes int, more string) asked {
	var parts strings.Builder
	for n := range pictures {
		fmt.Fprintf(&parts, `,{"type":"image_url","image_url":{"url":"data:image/png;base64,%d/%d"}}`, i, n)
	}
	text := strings.Repeat(fmt.Sprintf("Request %d asks what that is. ", i), 1+kilobytes*1024/30)
	return asked{path: "/v1/chat/completions", id: fmt.Sprintf("shown-%d", i),
		body: fmt.Sprintf(`{"model":"tiny","messages":[{"role":"system","content":"Look."},{"role":"user","content":[{"type":"text","text":%q}%s]}],"max_tokens":%d%s}`, text, parts.String(), 5+i%9, more)}
}

// Encode, prefill, decode (EPD): a chat with media goes to an encode endpoint first, which sees only the media;
// prefill fetches the named embeddings, decode the KV. If encoding fails, prefill encodes, and every answer stays
// right.
func TestEncodeStage(t *testing.T) {
	t.Parallel()
	f := start(t, options{prefills: 2, decodes: 2, encodes: 2, engineArgs: []string{"--lease", lease, "--load-timeout", "10s"}, pool: "  encode: {timeout: 5s}\n"})
	encoders := map[string]bool{}
	for i := range 16 {
		more := ""
		if i%2 == 1 {
			more = `,"stream":true,"stream_options":{"include_usage":true}`
		}
		pictures := 1 + i%3
		a := show(i, pictures, i*i, more) // up to 225 KiB: far more than any undo may have
		got := f.post(a.path, a.body, "x-request-id", a.id)
		require.Equal(t, 200, got.status, got.body)
		require.Equal(t, f.want(a, f.decodes[0]), got.text(t), "request %d", i)
		require.NotContains(t, got.body, "peer_host")
		e := f.requests(a.id, f.encodes...)
		require.Len(t, e, 1)
		require.NotContains(t, e[0].Body, "asks what that is")
		encoders[e[0].Engine] = true
		p, d := f.hops(a.id)
		require.Equal(t, pictures, p.Encoded, "request %d", i)
		require.Zero(t, p.EncodedHere+d.Encoded+d.EncodedHere)
		require.Positive(t, d.ExternalTokens)
	}
	require.Len(t, encoders, 2, "one of them had all of it")

	a := show(30, 2, 1, `,"n":2`) // not split: decode gets the embeddings
	require.Equal(t, 200, f.post(a.path, a.body, "x-request-id", a.id).status)
	require.Empty(t, f.requests(a.id, f.prefills...))
	require.Equal(t, 2, f.requests(a.id, f.decodes...)[0].Encoded)

	require.Equal(t, 200, f.post("/v1/chat/completions", ask("tiny", 32).body, "x-request-id", "text").status)
	require.Empty(t, f.requests("text", f.encodes...))

	f.encodesOtherwise(t)

	var clients sync.WaitGroup
	for i := range 20 {
		clients.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+i*2)*time.Millisecond)
			defer cancel()
			a := show(200+i, 2, 20, "")
			_, _ = f.try(ctx, http.MethodPost, a.path, a.body, "x-request-id", a.id)
		})
	}
	clients.Wait()
}

// encodesOtherwise makes both encode endpoints fail in every way: prefill encodes.
func (f *fleet) encodesOtherwise(t *testing.T) {
	for i, rule := range []string{
		`{"mode":"status","status":500`, `{"mode":"status","status":503`, `{"mode":"status","status":429`, `{"mode":"status","status":400`,
		`{"mode":"garbage-body"`, `{"mode":"reset-before-headers"`, `{"mode":"reset-mid-body"`, `{"mode":"hang"`,
	} {
		for _, e := range f.encodes {
			require.Eventually(t, func() bool { return metric(t, f.admins[0], "tandem_endpoint_up", e.addr) == 1 }, patience, 20*time.Millisecond)
			require.Eventually(t, func() bool { return !f.full(e.addr) }, patience, 20*time.Millisecond)
			f.inject(e, rule+`,"leg":"any","count":1}`)
		}
		a := show(100+i, 2, 20, "")
		got := f.post(a.path, a.body, "x-request-id", a.id)
		require.Equal(t, 200, got.status, "%s: %s", rule, got.body)
		require.Equal(t, f.want(a, f.decodes[0]), got.text(t), rule)
		require.Len(t, f.requests(a.id, f.encodes...), 1, rule)
		p, _ := f.hops(a.id)
		require.Equal(t, []int{0, 2}, []int{p.Encoded, p.EncodedHere}, rule)
		for _, e := range f.encodes { // one of them was not asked
			f.clear(e)
		}
	}
}

// full reports whether an endpoint gets no requests for a while because it has refused one.
func (f *fleet) full(addr string) bool {
	var status struct {
		Pools []struct {
			Endpoints []struct{ Address, Full string }
		}
	}
	require.NoError(f.t, getJSON(f.admins[0]+"/status.json", &status))
	for _, e := range status.Pools[0].Endpoints {
		if e.Address == addr {
			return e.Full != ""
		}
	}
	require.Fail(f.t, "no endpoint "+addr)
	return false
}
