package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"mime/multipart"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/enginesim/jsontext"
	"tandem/internal/budget"
)

func TestPlainPaths(t *testing.T) {
	e := startEngine(t, "-model", "big", "-model", "alias", "-max-model-len", "5000")
	require.Equal(t, 200, e.get(t, "/health").status)
	require.JSONEq(t, `{"version":"0.32.0"}`, e.get(t, "/version").String())
	models := e.get(t, "/v1/models")
	require.Equal(t, "alias", models.str("data", "1", "id"))
	require.Equal(t, 5000, models.num("data", "0", "max_model_len"))
	require.Equal(t, 404, e.get(t, "/nope").status)
	require.Equal(t, 405, e.get(t, chatPath).status)
	require.Equal(t, 3, e.post(t, "/tokenize", "", `{"prompt":"hello worl"}`).num("count"))
	back := e.post(t, "/detokenize", "", `{"tokens":`+string(jsontext.Get(e.post(t, "/tokenize", "", `{"prompt":"héllo worl"}`).body, "tokens"))+`}`)
	require.Equal(t, "héllo worl", back.str("prompt"))
	require.Equal(t, 404, e.post(t, "/tokenize", "", `{"model":"x","prompt":"hello"}`).status)
	require.Len(t, e.post(t, "/v1/embeddings", "", `{"input":["a","b"]}`).get("data"), 2)
	require.Equal(t, 200, e.post(t, chatPath, "", `{"model":"alias","messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"data:"}}]}]}`).status)
	for _, body := range []string{`{"messages":[]}`, `{"messages":"x"}`, `{"messages":[1]}`, `{}`, `{"messages":[{"role":"user","content":"x"}],"n":0}`,
		`{"messages":[{"role":"user","content":"x"}],"max_tokens":0}`, `{"messages":[{"role":"user","content":"x"}],"max_tokens":"three"}`,
		`{"messages":[{"role":"user","content":"x"}],"max_tokens":4999}`, `{"model":7,"messages":[{"role":"user","content":"x"}]}`,
		`{"messages":[{"role":"user","content":"x"}],"logprobs":true,"top_logprobs":21}`, `not json`, `[]`} {
		r := e.post(t, chatPath, "", body)
		require.Equal(t, 400, r.status, body)
		require.Equal(t, "BadRequestError", r.str("error", "type"), r)
	}
	require.Equal(t, 400, e.post(t, chatPath, "", strings.Replace(chat(strings.Repeat("long", 5001)), "tiny", "big", 1)).status)
	resp, err := client.Post(e.url+chatPath, "text/plain", strings.NewReader(chat("x")))
	require.NoError(t, err)
	resp.Body.Close()
	require.Equal(t, 400, resp.StatusCode)
	e.quiet(t)
}

func TestEveryAPI(t *testing.T) {
	tests := []struct {
		path, body string
		text       func(r reply) string
	}{
		{"/v1/completions", `{"prompt":"%s","max_tokens":12%s}`, func(r reply) string { return r.str("choices", "0", "text") }},
		{chatPath, `{"messages":[{"role":"user","content":"%s"}],"max_tokens":12%s}`, reply.content},
		{"/v1/responses", `{"input":"%s","max_output_tokens":12%s}`, func(r reply) string { return r.str("output", "0", "content", "0", "text") }},
		{"/v1/messages", `{"messages":[{"role":"user","content":"%s"}],"max_tokens":12%s}`, func(r reply) string { return r.str("content", "0", "text") }},
		{"/inference/v1/generate", `{"token_ids":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18],"sampling_params":{"max_tokens":12}%[2]s}`,
			func(r reply) string { return string(jsontext.Get(r.body, "choices")) }},
	}
	for _, test := range tests {
		t.Run(test.path, func(t *testing.T) {
			p, d := startEngine(t, "-role", "prefill"), startEngine(t, "-role", "decode")
			body := func(more string) string { return fmt.Sprintf(test.body, strings.Repeat("some words ", 20), more) }
			want := d.post(t, test.path, "w", body(`,"cache_salt":"w"`))
			require.Equal(t, 200, want.status, want)
			first := p.post(t, test.path, "r", strings.ReplaceAll(body(`,"kv_transfer_params":{"do_remote_decode":true}`), ":12", ":1"))
			require.Equal(t, 200, first.status, first)
			params := first.params()
			require.NotNil(t, params)
			got := d.post(t, test.path, "r", body(","+decodeMembers(params)))
			require.Equal(t, 200, got.status, got)
			require.NotEmpty(t, test.text(got))
			require.Equal(t, test.text(want), test.text(got))
			streamed := d.post(t, test.path, "s", body(`,"stream":true`))
			require.Equal(t, "text/event-stream; charset=utf-8", streamed.header.Get("Content-Type"))
			require.GreaterOrEqual(t, strings.Count(streamed.String(), "data: "), 12)
			for _, e := range events(streamed.String()) {
				_, data, found := strings.Cut(e, "\ndata: ")
				if !found {
					data = e
				}
				require.True(t, data == "[DONE]" || json.Valid([]byte(data)), data)
			}
			p.quiet(t)
			d.quiet(t)
		})
	}
}

func TestChatStreamEqualsWhole(t *testing.T) {
	e := startEngine(t)
	for i := range 20 {
		more := `"max_tokens":` + fmt.Sprint(1+7*i)
		if i%3 == 0 {
			more += `,"stop":["` + string("bdfgk"[i%5]) + `"]`
		}
		prompt := fmt.Sprint("prompt ", i)
		whole := e.post(t, chatPath, "w", chat(prompt, more))
		stream := e.post(t, chatPath, "s", chat(prompt, more, `"stream":true,"stream_options":{"include_usage":true}`))
		require.Equal(t, whole.content(), streamText(stream.String()))
		list := events(stream.String())
		last := reply{body: []byte(list[len(list)-2])}
		require.Equal(t, whole.num("usage", "completion_tokens"), last.num("usage", "completion_tokens"))
		require.Equal(t, "[DONE]", list[len(list)-1])
	}
	e.quiet(t)
}

func TestStoredResponses(t *testing.T) {
	e, other := startEngine(t), startEngine(t)
	first := e.post(t, "/v1/responses", "", `{"input":"hello","store":true}`)
	id := first.str("id")
	require.Equal(t, first.String(), e.get(t, "/v1/responses/"+id).String())
	next := `{"input":"go on","previous_response_id":"` + id + `"}`
	require.Equal(t, 200, e.post(t, "/v1/responses", "", next).status)
	require.Equal(t, 404, other.post(t, "/v1/responses", "", next).status)
	unkept := e.post(t, "/v1/responses", "", `{"input":"hello"}`)
	require.Equal(t, 404, e.get(t, "/v1/responses/"+unkept.str("id")).status)
	streamed := e.post(t, "/v1/responses", "", `{"input":"hello","store":true,"stream":true}`)
	start := reply{body: []byte(strings.SplitAfterN(events(streamed.String())[0], "data: ", 2)[1])}
	require.Equal(t, 200, e.get(t, "/v1/responses/"+start.str("response", "id")).status)
}

func TestAudio(t *testing.T) {
	e := startEngine(t)
	file := make([]byte, 3<<20)
	for i := range file {
		file[i] = byte(rand.Uint32())
	}
	var body bytes.Buffer
	w := multipart.NewWriter(&body)
	require.NoError(t, w.WriteField("model", "tiny"))
	part, err := w.CreateFormFile("file", "a.wav")
	require.NoError(t, err)
	_, _ = part.Write(file)
	require.NoError(t, w.Close())
	whole := sha256.Sum256(body.Bytes())
	size := body.Len()
	resp, err := client.Post(e.url+"/v1/audio/transcriptions", w.FormDataContentType(), struct{ io.Reader }{&body}) // chunked
	require.NoError(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	r := reply{body: b}
	require.Equal(t, size, r.num("body_bytes"))
	require.Equal(t, hex.EncodeToString(whole[:]), r.str("body_sha256"))
	sum := sha256.Sum256(file)
	require.Equal(t, hex.EncodeToString(sum[:]), r.str("file_sha256"))
	require.Equal(t, "tiny", r.str("model"))
	rec := e.Records.Last(1, "")[0]
	require.Equal(t, []string{"chunked"}, rec.TransferEncoding)
}

func TestRequestIDs(t *testing.T) {
	e := startEngine(t)
	r := e.post(t, chatPath, "mine", chat("x"))
	require.Equal(t, "mine", r.header.Get("X-Request-Id"))
	require.Equal(t, "chatcmpl-mine", r.str("id"))
	r = e.post(t, chatPath, "", chat("x"))
	require.Regexp(t, "^[0-9a-f]{32}$", r.header.Get("X-Request-Id"))
}

func TestRecords(t *testing.T) {
	e := startEngine(t, "-record-count", "3", "-record-body", "64")
	body := `{"model" : "tiny","messages":[{"role":"user","content":"h\u00e9"}], "n":1, "seed":9223372036854775807,"x":1e3}`
	e.post(t, chatPath, "r0", body)
	r := e.get(t, "/sim/requests?n=1")
	sum := sha256.Sum256([]byte(body))
	require.Equal(t, hex.EncodeToString(sum[:]), r.str("0", "body_sha256"))
	require.Equal(t, body[:64], r.str("0", "body"))
	require.Equal(t, len(body), r.num("0", "body_bytes"))
	require.Equal(t, "r0", r.str("0", "request_id"))
	require.Equal(t, "r0", r.str("0", "headers", "X-Request-Id", "0"))
	require.Equal(t, 200, r.num("0", "status"))
	require.Equal(t, "plain", r.str("0", "leg"))
	require.Equal(t, "done", r.str("0", "outcome"))
	require.Positive(t, r.num("0", "completion_tokens"))

	e.post(t, chatPath, "bin", `{"messages":"`+strings.Repeat("a", 49)+"é\xff\"}")
	require.NotEmpty(t, e.get(t, "/sim/requests?id=bin").str("0", "body"), "cut before the broken character")
	e.post(t, chatPath, "bin2", "{\"\xff\":1}")
	require.NotEmpty(t, e.get(t, "/sim/requests?id=bin2").str("0", "body_base64"))
	for i := range 5 {
		e.post(t, chatPath, fmt.Sprint("n", i), body)
	}
	all := e.Records.Last(0, "")
	require.Len(t, all, 3)
	require.Equal(t, "n2", all[0].RequestID)
	require.Equal(t, 200, e.post(t, "/sim/reset", "", "").status)
	require.Empty(t, e.Records.Last(0, ""))

	off := startEngine(t, "-record=false")
	off.post(t, chatPath, "x", body)
	require.Equal(t, "[]\n", off.get(t, "/sim/requests").String())
}

// TestAborts: a client that leaves leaves nothing behind, wherever its request was.
func TestAborts(t *testing.T) {
	p := startEngine(t, "-role", "prefill")
	params := p.prefill(t, "r", longPrompt)
	writes := func(e *simulator) bool { // tokens are counted as they come, not with the answer
		return scrape(t, e)[`vllm:generation_tokens_total{engine="0",model_name="tiny"}`] > 2
	}
	tests := []struct {
		name, body string
		args       []string
		ready      func(e *simulator) bool
	}{
		{"streaming", chat("x", `"max_tokens":50000,"stream":true`), []string{"-decode-step", "1ms"}, writes},
		{"decoding", chat("x", `"max_tokens":50000`), []string{"-decode-step", "1ms"}, writes},
		{"prefilling", chat(longPrompt), []string{"-prefill-speed", "1"}, func(e *simulator) bool { return e.State().Running == 1 }},
		{"loading", chat(longPrompt, decodeMembers(edit(t, params, map[string]string{"remote_port": "1"}))), []string{"-load-timeout", "5s"}, func(e *simulator) bool { return e.State().Waiting == 1 }},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			e := startEngine(t, test.args...)
			ctx, cancel := context.WithCancel(t.Context())
			req, _ := http.NewRequestWithContext(ctx, http.MethodPost, e.url+chatPath, strings.NewReader(test.body))
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("X-Request-Id", "r")
			failed := make(chan error, 1)
			go func() {
				resp, err := client.Do(req)
				if err == nil {
					_, err = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
				failed <- err
			}()
			require.Eventually(t, func() bool { return test.ready(e) }, patience, time.Millisecond)
			require.Positive(t, e.State().BlocksUsed)
			cancel()
			require.Error(t, <-failed)
			e.quiet(t)
			require.Eventually(t, func() bool { return e.Records.Last(1, "")[0].Outcome == "aborted" }, patience, time.Millisecond)
			require.EqualValues(t, 1, e.Metrics.Aborted.Load())
		})
	}
}

// TestPrefillQueue: prompts are computed one after another, and waiting ones are counted as waiting.
func TestPrefillQueue(t *testing.T) {
	e := startEngine(t, "-prefill-speed", "1")
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i := range 4 {
		req, _ := http.NewRequestWithContext(ctx, http.MethodPost, e.url+chatPath, strings.NewReader(chat(fmt.Sprint(i))))
		req.Header.Set("Content-Type", "application/json")
		wg.Go(func() {
			if resp, err := client.Do(req); err == nil {
				t.Errorf("answered %d", resp.StatusCode)
			}
		})
	}
	require.Eventually(t, func() bool { st := e.State(); return st.Running == 1 && st.Waiting == 3 }, patience, time.Millisecond)
	cancel()
	wg.Wait()
	e.quiet(t)
}

// together runs fn n times at once and fails the test with what it returned.
func together(t *testing.T, n int, fn func(i int) error) {
	t.Helper()
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = fn(i) })
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
}

// TestWaitingForBlocks: if memory is short, work queues, and all of it is done.
func TestWaitingForBlocks(t *testing.T) {
	e := startEngine(t, "-blocks", "33", "-decode-step", "1ms")
	together(t, 12, func(i int) error {
		r, err := e.do(http.MethodPost, chatPath, "", chat(fmt.Sprint(i)+strings.Repeat("word", 200), `"max_tokens":8`))
		if err == nil && r.status != 200 {
			err = errors.New(r.String())
		}
		return err
	})
	e.quiet(t)
	require.Equal(t, 400, e.post(t, chatPath, "", chat(strings.Repeat("word", 600))).status, "can never fit")
}

func TestH2CAndLargeBodies(t *testing.T) {
	p, d := startEngine(t, "-blocks", "140000"), startEngine(t, "-blocks", "140000", "-load-timeout", "5m")
	h2 := h2cClient()
	size := 8 << 20
	if budget.Race {
		size = 1 << 20
	}
	prompt := strings.Repeat("0123456789abcde ", size/16)
	send := func(e *simulator, body string, chunked bool) reply {
		var in io.Reader = strings.NewReader(body)
		if chunked {
			in = struct{ io.Reader }{in}
		}
		req, err := http.NewRequest(http.MethodPost, e.url+chatPath, in)
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Request-Id", "big")
		resp, err := h2.Do(req)
		require.NoError(t, err)
		defer resp.Body.Close()
		require.Equal(t, 2, resp.ProtoMajor)
		b, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.Equal(t, 200, resp.StatusCode, string(b))
		return reply{resp.StatusCode, resp.Header, b}
	}
	first := send(p, chat(prompt, prefillMembers), false)
	send(d, chat(prompt, `"max_tokens":4`, decodeMembers(first.params())), true)
	p.quiet(t)
	d.quiet(t)

	small := startEngine(t, "-max-body", "1000")
	require.Equal(t, 413, small.post(t, chatPath, "", chat(longPrompt+longPrompt)).status)
}

// TestCutBody: a body that ends early is not a request.
func TestCutBody(t *testing.T) {
	e := startEngine(t)
	conn, err := net.Dial("tcp", e.Addr())
	require.NoError(t, err)
	fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{\"mess", chatPath)
	conn.Close()
	require.Eventually(t, func() bool {
		l := e.Records.Last(0, "")
		return len(l) == 1 && l[0].Outcome == "aborted"
	}, patience, time.Millisecond)
	e.quiet(t)
}

// TestMixedLoad: everything at once, and every ledger is empty at the end.
func TestMixedLoad(t *testing.T) {
	var ps, ds []*simulator
	for range 2 {
		ps = append(ps, startEngine(t, "-role", "prefill", "-lease", "5m"))
		ds = append(ds, startEngine(t, "-role", "decode", "-load-timeout", "5m")) // a busy machine takes seconds for all of them
	}
	reference := startEngine(t)
	together(t, 200, func(i int) error {
		p, d := ps[i%2], ds[i/2%2]
		prompt := strings.Repeat(fmt.Sprintf("conversation %d ", i%20), 1+i%70)
		id := fmt.Sprint("mix-", i)
		want, err := reference.do(http.MethodPost, chatPath, id, chat(prompt, `"max_tokens":9`))
		if err != nil {
			return err
		}
		first, err := p.do(http.MethodPost, chatPath, id, chat(prompt, prefillMembers))
		if err != nil {
			return err
		}
		if i%17 == 0 { // no request comes for it
			p.Ledger.Release(first.str("kv_transfer_params", "remote_request_id"))
			return nil
		}
		more := `"max_tokens":9`
		if i%3 == 0 {
			more += `,"stream":true`
		}
		r, err := d.do(http.MethodPost, chatPath, id, chat(prompt, more, decodeMembers(first.params())))
		if err != nil {
			return err
		}
		if got := r.content() + streamText(r.String()); got != want.content() {
			return fmt.Errorf("request %d: %q, want %q: %s", i, got, want.content(), r)
		}
		return nil
	})
	for _, e := range append(ps, ds...) {
		e.quiet(t)
		require.Zero(t, e.State().FailedTransfers)
	}
}

func TestManyStreams(t *testing.T) {
	e := startEngine(t, "-decode-step", "2ms")
	together(t, 256, func(i int) error {
		r, err := e.do(http.MethodPost, chatPath, "", chat(fmt.Sprint(i), `"max_tokens":16,"stream":true`))
		if n := strings.Count(r.String(), "data: "); err == nil && n != 18 {
			err = fmt.Errorf("%d events", n)
		}
		return err
	})
	e.quiet(t)
}

// TestEventsArriveOneByOne: events are sent as they are generated. The second token of this stream never comes.
func TestEventsArriveOneByOne(t *testing.T) {
	e := startEngine(t, "-decode-step", "1h")
	req, _ := http.NewRequest(http.MethodPost, e.url+chatPath, strings.NewReader(chat("x", `"max_tokens":4,"stream":true`)))
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	require.NoError(t, err)
	in := bufio.NewScanner(resp.Body)
	found := false
	for !found && in.Scan() {
		found = strings.Contains(in.Text(), `"delta":{"content":"`)
	}
	require.True(t, found)
	require.NoError(t, in.Err())
	require.NoError(t, resp.Body.Close())
	e.quiet(t)
}
