package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/kvstate/enginefacts"
	"tandem/kvstate/enginehttp"
	"tandem/kvstate/scrape"
	"tandem/replay/profile"
)

// newProfile is `tandem profile`.
func newProfile() *cobra.Command {
	var m measuring
	var file, decode, key, dialect string
	c := &cobra.Command{
		Use: "profile ENGINE", Short: "Measure an idle engine, for tandem replay", Args: arguments(1, "ENGINE"),
		Long: "Measure how fast an engine computes prompts of some lengths and writes answers in batches of some sizes, and\n" +
			"how much KV memory it says it has, in about a minute. With --decode also how long KV takes from it to another\n" +
			"engine. Engines must be idle, and are busy meanwhile. ENGINE is host:port or a URL; it must serve\n" +
			"POST /v1/completions. tandem replay --recording FILE --profile FILE plays engines that are as fast.",
		RunE: func(c *cobra.Command, args []string) error {
			m.client = enginehttp.New(0, func(*http.Transport) {})
			m.engine = engineAt(args[0], key)
			if decode != "" {
				if dialect == "" {
					return errors.New("--decode needs --kv-transfer: how the engines hand KV over")
				}
				var err error
				if m.dialect, err = kvtransfer.New(kvtransfer.Options{Name: dialect}); err != nil {
					return fmt.Errorf("--kv-transfer: %w", err)
				}
				if d := &m.dialect; !d.Speaks(openai.Completions) || d.DecodeMember == nil || d.Push != nil || d.Concurrent != nil {
					return fmt.Errorf("--kv-transfer %s: only dialects whose legs follow each other can be measured", dialect)
				}
				m.decode = engineAt(decode, key)
			}
			if err := writable(file); err != nil { // not after a minute
				return fmt.Errorf("--to: %w", err)
			}
			p, err := m.measure(c.Context(), c.ErrOrStderr())
			if err != nil {
				return err
			}
			if err := p.Write(file); err != nil {
				return err
			}
			fmt.Fprintf(c.OutOrStdout(), "written to %s\n", file)
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&file, "to", "profile.json", "write the profile to `FILE`")
	f.StringVar(&decode, "decode", "", "also measure the transfer of KV to this `ENGINE`")
	f.StringVar(&dialect, "kv-transfer", "", "of --decode: the `DIALECT`, as kvTransfer of a pool")
	f.StringVar(&m.model, "model", "", "`MODEL` to ask for (default: the first that the engine names)")
	f.StringVar(&key, "api-key-file", "", "`FILE` with the engines' API key")
	f.IntVar(&m.longest, "longest", 16384, "most `TOKENS` of a prompt")
	f.IntVar(&m.most, "most", 32, "most `ANSWERS` at a time")
	f.DurationVar(&m.within, "within", time.Minute, "most `TIME`: what is left out then is not in the profile")
	return c
}

// engineAt returns an engine at host:port or a URL.
func engineAt(text, keyFile string) *kvstate.Endpoint {
	scheme, address, ok := strings.Cut(strings.TrimSuffix(text, "/"), "://")
	if !ok {
		scheme, address = "http", scheme
	}
	return &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{Name: address, Addr: address, Scheme: scheme,
		Access: kvstate.Access{KeyFile: keyFile}}}
}

// measuring measures an engine.
type measuring struct {
	client        *enginehttp.Client
	engine        *kvstate.Endpoint
	decode        *kvstate.Endpoint // gets its KV; nil: that is not measured
	dialect       kvtransfer.Dialect
	model         string
	longest, most int
	within        time.Duration
}

func (m *measuring) measure(ctx context.Context, progress io.Writer) (*profile.Profile, error) {
	p := &profile.Profile{Engine: m.engine.Addr, Measured: time.Now().UTC().Format(time.RFC3339)}
	ctx, cancel := context.WithTimeout(ctx, 3*m.within)
	defer cancel()
	if m.model == "" {
		if err := m.firstModel(ctx); err != nil {
			return nil, err
		}
	}
	p.Model = m.model
	m.memory(ctx, p)
	end := time.Now().Add(m.within)
	if _, err := m.ask(ctx, unknown(64), 2); err != nil { // the first request loads what later ones need
		return nil, err
	}
	if err := m.prompts(ctx, end.Add(-m.within/2), p, progress); err != nil {
		return nil, err
	}
	until := end
	if m.decode != nil {
		until = end.Add(-m.within / 4)
	}
	for _, prompt := range []int{64, 2048} {
		for b := 1; b <= m.most && time.Now().Before(until); b *= 4 {
			s, ok, err := m.batch(ctx, b, prompt)
			if err != nil {
				return nil, err
			}
			if !ok {
				fmt.Fprintf(progress, "%d answers to %d tokens did not run at once, and are left out\n", b, prompt)
				continue
			}
			p.Steps = append(p.Steps, s)
			fmt.Fprintf(progress, "%d answers to %d tokens: %.2f ms a step\n", b, prompt, 1000*s.Seconds)
		}
	}
	if len(p.Prefill) < 2 || len(p.Steps) < 2 {
		return nil, errors.New("too little was measured in this time: raise --within, or lower --longest")
	}
	if time.Now().Before(end) {
		var err error
		if p.StepTokens, err = m.chunk(ctx, p); err != nil {
			return nil, err
		}
		if p.StepTokens > 0 {
			fmt.Fprintf(progress, "%.0f tokens of a prompt in a step\n", p.StepTokens)
		}
	}
	if m.decode != nil { // last: over TCP the KV of a long prompt takes many times what its computation takes
		if err := m.transfers(ctx, end, p, progress); err != nil {
			return nil, fmt.Errorf("measuring the transfer to %s: %w", m.decode.Addr, err)
		}
	}
	return p, nil
}

// chunk returns how many tokens of a prompt the engine computes in a step: the longest prompt comes while an answer runs,
// and so many of the answer's tokens come late. It is 0 if that prompt takes one step, or delays no answer.
func (m *measuring) chunk(ctx context.Context, p *profile.Profile) (tokens float64, err error) {
	prompt, step := p.Prefill[len(p.Prefill)-1], p.Steps[0].Seconds
	late := math.MaxInt
	for range 3 { // the machine may delay some more
		var beside answered
		var group errgroup.Group
		group.Go(func() (err error) {
			beside, err = m.ask(ctx, unknown(64), batchTokens)
			return err
		})
		select { // until the answer has come so far
		case <-time.After(time.Duration(8 * step * float64(time.Second))):
		case <-ctx.Done():
		}
		_, failed := m.ask(ctx, unknown(prompt.Tokens), 1)
		if err := errors.Join(failed, group.Wait()); err != nil {
			return 0, err
		}
		if n, sum := lateOnes(beside, step); sum > prompt.Seconds/2 {
			late = min(late, n)
		}
	}
	if late < 2 || late > batchTokens/2 {
		return 0, nil
	}
	return math.Round(float64(prompt.Tokens) / float64(late)), nil
}

// lateOnes returns how many tokens of an answer came late by a chunk of a prompt: by a third of the longest such time at
// least, for the later chunks of a prompt take longer, and the last one may be small. sum is how late all were.
func lateOnes(a answered, step float64) (n int, sum float64) {
	var longest float64
	late := make([]float64, 0, len(a))
	for i := 1; i < len(a); i++ {
		x := (a[i] - a[i-1]).Seconds() - step
		late, longest = append(late, x), max(longest, x)
	}
	for _, x := range late {
		if x > longest/3 && x > step/4 {
			n, sum = n+1, sum+x
		}
	}
	return n, sum
}

// least measures times three times. The least of each counts: nothing makes an engine faster than it is.
func least(measure func() (answered, error)) (best answered, err error) {
	for range 3 {
		took, err := measure()
		if err != nil {
			return nil, err
		}
		if best == nil {
			best = took
		}
		for i := range min(len(best), len(took)) {
			best[i] = min(best[i], took[i])
		}
	}
	return best, nil
}

// prompts measures prompts of some lengths.
func (m *measuring) prompts(ctx context.Context, until time.Time, p *profile.Profile, progress io.Writer) error {
	for n := 256; n <= m.longest && time.Now().Before(until); n *= 2 {
		best, err := least(func() (answered, error) { return m.ask(ctx, unknown(n), 1) })
		switch {
		case err != nil && len(p.Prefill) >= 2: // longer than its context
			return nil
		case err != nil:
			return err
		}
		p.Prefill = append(p.Prefill, profile.Prefill{Tokens: n, Seconds: best[0].Seconds()})
		fmt.Fprintf(progress, "a prompt of %d tokens: %.3f s\n", n, best[0].Seconds())
	}
	return nil
}

// transfers measures how long the KV of prompts of some lengths takes from one engine to the other: how much longer the
// first token takes there than when the prompt is asked again, and is in the cache.
func (m *measuring) transfers(ctx context.Context, until time.Time, p *profile.Profile, progress io.Writer) error {
	longest := p.Prefill[len(p.Prefill)-1].Tokens // what its context has room for
	next := time.Duration(0)                      // what the next length takes, by the one before
	for n := 256; n <= longest && (time.Now().Add(next).Before(until) || len(p.Transfers) < 2); n *= 4 {
		began := time.Now()
		best, err := least(func() (answered, error) { return m.transfer(ctx, n) })
		if err != nil {
			return err
		}
		next = 4 * time.Since(began)
		took := max((best[0] - best[1]).Seconds(), 1e-6)
		p.Transfers = append(p.Transfers, profile.Transfer{Tokens: n, Seconds: took})
		fmt.Fprintf(progress, "KV of %d tokens to %s: %.1f ms\n", n, m.decode.Addr, 1000*took)
	}
	return nil
}

// transfer makes both legs of a request, as Tandem and Envoy do, and the second one again, and returns how long the
// first token took with the transfer of KV, and without. A step is part of both: an engine may have a shorter one for a
// prompt whose KV it has.
func (m *measuring) transfer(ctx context.Context, tokens int) (answered, error) {
	pair := kvtransfer.Pair{Prefill: kvtransfer.Side{Addr: m.engine.Addr}, Decode: kvtransfer.Side{Addr: m.decode.Addr}}
	for i := range pair.Attempt {
		pair.Attempt[i] = byte(rand.Uint32())
	}
	pair.RequestID = "profile-" + hex.EncodeToString(pair.Attempt[:])
	body, err := m.body(unknown(tokens+1), 4) // so that its blocks are full but for one token, which is computed both times
	if err != nil {
		return nil, err
	}
	prefill, err := m.dialect.PrefillBody(body, &pair)
	if err != nil {
		return nil, err
	}
	resp, err := m.post(ctx, m.engine, prefill, pair.RequestID) //nolint:bodyclose // ReadAll closes it
	if err != nil {
		return nil, err
	}
	text, err := enginehttp.ReadAll(resp, maxAnswer)
	if err != nil {
		return nil, err
	}
	answer, err := m.dialect.ReadAnswer(text, &pair)
	if err != nil {
		return nil, err
	}
	if answer.Params == nil {
		return nil, errors.New("the engine keeps no KV for another one: is it a prefill engine of this dialect?")
	}
	first, err := m.answer(ctx, m.decode, m.dialect.DecodeBody(body, answer.Params), pair.RequestID)
	if err != nil {
		return nil, err
	}
	again, err := m.answer(ctx, m.decode, body, "")
	if err != nil {
		return nil, err
	}
	step := (first[len(first)-1] - first[0]) / time.Duration(max(len(first)-1, 1))
	return answered{first[0], max(again[0], step)}, nil
}

// answered is when the tokens of an answer came, since it was asked for.
type answered []time.Duration

// batchTokens is how many tokens an answer in a batch has.
const batchTokens = 64

// batch measures the engine's steps while a number of answers run at once, twice: the lesser counts, as of prompts.
// Their prompts are cached before, so that nothing but answers runs then. ok is false if they never ran at once for long
// enough.
func (m *measuring) batch(ctx context.Context, answers, prompt int) (s profile.Step, ok bool, err error) {
	prompts := make([][]int, answers)
	for i := range prompts {
		prompts[i] = unknown(prompt)
		if _, err := m.ask(ctx, prompts[i], 1); err != nil {
			return s, false, err
		}
	}
	s = profile.Step{Answers: answers, KV: float64(answers * (prompt + batchTokens/2)), Seconds: math.Inf(1)}
	for range 2 {
		got, err := m.together(ctx, prompts)
		if err != nil {
			return s, false, err
		}
		if seconds, is := stepOf(got); is {
			s.Seconds, ok = min(s.Seconds, seconds), true
		}
	}
	return s, ok, nil
}

// together asks for an answer to each of the prompts at once.
func (m *measuring) together(ctx context.Context, prompts [][]int) ([]answered, error) {
	got := make([]answered, len(prompts))
	group, ctx := errgroup.WithContext(ctx)
	began := time.Now()
	for i := range got {
		group.Go(func() (err error) {
			since := time.Since(began)
			got[i], err = m.ask(ctx, prompts[i], batchTokens)
			for j := range got[i] {
				got[i][j] += since
			}
			return err
		})
	}
	return got, group.Wait()
}

// stepOf returns the mean time between two tokens while all answers run: from the last first token to the first last
// one. At least a quarter of their tokens must be in that time.
func stepOf(all []answered) (seconds float64, ok bool) {
	from, to := time.Duration(0), time.Duration(1<<62)
	for _, a := range all {
		from, to = max(from, a[0]), min(to, a[len(a)-1])
	}
	sum, gaps := time.Duration(0), 0
	for _, a := range all {
		var in []time.Duration
		for _, t := range a {
			if t >= from && t <= to {
				in = append(in, t)
			}
		}
		if len(in) > 1 {
			sum, gaps = sum+in[len(in)-1]-in[0], gaps+len(in)-1
		}
	}
	if gaps < len(all)*batchTokens/4 {
		return 0, false
	}
	return sum.Seconds() / float64(gaps), true
}

// unknown returns the token ids of a prompt that no cache has.
func unknown(tokens int) []int {
	ids := make([]int, tokens)
	for i := range ids {
		ids[i] = 100 + rand.IntN(900)
	}
	return ids
}

// body returns the request for an answer.
func (m *measuring) body(prompt []int, answer int) ([]byte, error) {
	return json.Marshal(map[string]any{"model": m.model, "prompt": prompt, "max_tokens": answer, "min_tokens": answer,
		"ignore_eos": true, "temperature": 0, "stream": true})
}

// ask asks the engine for an answer.
func (m *measuring) ask(ctx context.Context, prompt []int, answer int) (answered, error) {
	body, err := m.body(prompt, answer)
	if err != nil {
		return nil, err
	}
	return m.answer(ctx, m.engine, body, "")
}

// post sends a request, and returns an answer with status 200.
func (m *measuring) post(ctx context.Context, e *kvstate.Endpoint, body []byte, id string) (*http.Response, error) {
	header := http.Header{}
	if id != "" {
		header.Set("X-Request-Id", id)
	}
	resp, err := m.client.Post(ctx, e, "/v1/completions", body, header)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 500))
		return nil, fmt.Errorf("the engine at %s answers %s: %s", e.Addr, resp.Status, text)
	}
	return resp, nil
}

// answer sends a request whose answer is a stream, and notes when its tokens come.
func (m *measuring) answer(ctx context.Context, e *kvstate.Endpoint, body []byte, id string) (a answered, err error) {
	began := time.Now()
	resp, err := m.post(ctx, e, body, id)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data:")
		if !ok || strings.TrimSpace(data) == "[DONE]" || !strings.Contains(data, `"text"`) {
			continue
		}
		a = append(a, time.Since(began))
	}
	if err := lines.Err(); err != nil {
		return a, fmt.Errorf("reading the engine's answer: %w", err)
	}
	if len(a) == 0 {
		return a, errors.New("the engine's answer has no token")
	}
	return a, nil
}

func (m *measuring) firstModel(ctx context.Context) error {
	asking, enough := context.WithCancel(ctx)
	defer enough()
	facts := enginefacts.Read(asking, m.client, m.engine, func(*enginefacts.Info) { enough() }) // without /server_info
	switch {
	case facts.Refused != 0:
		return fmt.Errorf("the engine wants a key (status %d): --api-key-file", facts.Refused)
	case !facts.Answered:
		return fmt.Errorf("no engine answers at %s: is it running?", m.engine.Addr)
	case len(facts.Models) == 0:
		return errors.New("the engine names no model: --model")
	}
	m.model = facts.Models[0]
	return nil
}

// memory reads the engine's metrics, if it has any.
func (m *measuring) memory(ctx context.Context, p *profile.Profile) {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	status, text, err := m.client.GetAll(ctx, m.engine, "/metrics", maxAnswer)
	if err != nil || status != http.StatusOK {
		return
	}
	if _, said, ok := scrape.Read(text, ""); ok {
		p.KV, p.Host = float64(max(said.KVTokens, 0)), float64(max(said.Host.Tokens, 0))
	}
}
