package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"tandem/kvstate/scrape"
	"tandem/replay/profile"
)

// newProfile is `tandem profile`.
func newProfile() *cobra.Command {
	m := measuring{http: &http.Client{}}
	var file, key string
	c := &cobra.Command{
		Use: "profile ENGINE", Short: "Measure an idle engine, for tandem replay", Args: arguments(1, "ENGINE"),
		Long: "Measure how fast an engine computes prompts of some lengths and writes answers in batches of some sizes, and\n" +
			"how much KV memory it says it has, in about a minute. The engine must be idle, and is busy meanwhile. ENGINE is\n" +
			"host:port or a URL; it must serve POST /v1/completions. tandem replay --recording FILE --profile FILE plays\n" +
			"engines that are as fast.",
		RunE: func(c *cobra.Command, args []string) error {
			m.url = strings.TrimSuffix(args[0], "/")
			if !strings.Contains(m.url, "://") {
				m.url = "http://" + m.url
			}
			if key != "" {
				m.key = "Bearer " + key
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
	f.StringVar(&m.model, "model", "", "`MODEL` to ask for (default: the first that the engine names)")
	f.StringVar(&key, "api-key", "", "the engine's `KEY`")
	f.IntVar(&m.longest, "longest", 16384, "most `TOKENS` of a prompt")
	f.IntVar(&m.most, "most", 32, "most `ANSWERS` at a time")
	f.DurationVar(&m.within, "within", time.Minute, "most `TIME`: what is left out then is not in the profile")
	return c
}

// measuring measures an engine.
type measuring struct {
	url, model, key string
	longest, most   int
	within          time.Duration
	http            *http.Client
}

func (m *measuring) measure(ctx context.Context, progress io.Writer) (*profile.Profile, error) {
	p := &profile.Profile{Engine: m.url, Measured: time.Now().UTC().Format(time.RFC3339)}
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
	if _, err := m.ask(ctx, unknown(64), 2); err != nil { // what is loaded with the first request
		return nil, err
	}
	for n := 256; n <= m.longest && time.Now().Before(end.Add(-m.within/2)); n *= 2 {
		best := 0.0
		for i := range 3 { // the least: nothing makes it faster than it is
			a, err := m.ask(ctx, unknown(n), 1)
			if err != nil {
				if len(p.Prefill) >= 2 { // longer than its context
					n = m.longest
					break
				}
				return nil, err
			}
			if s := a[0].Seconds(); i == 0 || s < best {
				best = s
			}
		}
		if best > 0 {
			p.Prefill = append(p.Prefill, profile.Prefill{Tokens: n, Seconds: best})
			fmt.Fprintf(progress, "a prompt of %d tokens: %.3f s\n", n, best)
		}
	}
	for _, prompt := range []int{64, 2048} {
		for b := 1; b <= m.most && time.Now().Before(end); b *= 4 {
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
	return p, nil
}

// answered is when the tokens of an answer came, since it was asked for.
type answered []time.Duration

// batchTokens is how many tokens an answer in a batch has.
const batchTokens = 64

// batch measures the steps of so many answers that run at once. Their prompts are cached before, so that nothing but
// answers runs then. ok is false if they did not run at once for long enough.
func (m *measuring) batch(ctx context.Context, answers, prompt int) (s profile.Step, ok bool, err error) {
	prompts := make([][]int, answers)
	for i := range prompts {
		prompts[i] = unknown(prompt)
		if _, err := m.ask(ctx, prompts[i], 1); err != nil {
			return s, false, err
		}
	}
	got := make([]answered, answers)
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
	if err := group.Wait(); err != nil {
		return s, false, err
	}
	seconds, ok := stepOf(got)
	return profile.Step{Answers: answers, KV: float64(answers * (prompt + batchTokens/2)), Seconds: seconds}, ok, nil
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

// ask asks for an answer.
func (m *measuring) ask(ctx context.Context, prompt []int, answer int) (a answered, err error) {
	body, err := json.Marshal(map[string]any{"model": m.model, "prompt": prompt, "max_tokens": answer,
		"min_tokens": answer,
		"ignore_eos": true, "temperature": 0, "stream": true})
	if err != nil {
		return a, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, m.url+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return a, fmt.Errorf("asking the engine: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	if m.key != "" {
		req.Header.Set("Authorization", m.key)
	}
	began := time.Now()
	resp, err := m.http.Do(req)
	if err != nil {
		return a, fmt.Errorf("asking the engine: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 500))
		return a, fmt.Errorf("the engine answers %s: %s", resp.Status, text)
	}
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

func (m *measuring) get(ctx context.Context, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, m.url+path, nil)
	if err != nil {
		return nil, fmt.Errorf("asking the engine: %w", err)
	}
	if m.key != "" {
		req.Header.Set("Authorization", m.key)
	}
	resp, err := m.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("asking the engine (is it running?): %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the engine answers %s to GET %s", resp.Status, path)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return nil, fmt.Errorf("reading the engine's answer: %w", err)
	}
	return text, nil
}

func (m *measuring) firstModel(ctx context.Context) error {
	text, err := m.get(ctx, "/v1/models")
	if err != nil {
		return err
	}
	var list struct{ Data []struct{ ID string } }
	if err := json.Unmarshal(text, &list); err != nil || len(list.Data) == 0 {
		return errors.New("the engine names no model: --model")
	}
	m.model = list.Data[0].ID
	return nil
}

// memory reads the engine's metrics, if it has any.
func (m *measuring) memory(ctx context.Context, p *profile.Profile) {
	text, err := m.get(ctx, "/metrics")
	if err != nil {
		return
	}
	if _, said, ok := scrape.Read(text, ""); ok {
		p.KV, p.Host = float64(max(said.KVTokens, 0)), float64(max(said.Host.Tokens, 0))
	}
}
