package main

import (
	"context"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// plain runs h2load on a case without streaming. Its log has a line for every request: its start (microseconds), the
// status, and its duration (microseconds; -1: it failed).
func (o *options) plain(ctx context.Context, s *stand, c testCase, r *result) error {
	body, log := filepath.Join(s.Dir, "body.json"), filepath.Join(s.Dir, "h2load.log")
	if err := os.WriteFile(body, requestBody(c.Size, 16), 0o600); err != nil {
		return err
	}
	_ = os.Remove(log)
	args := []string{"--h1", "-c", strconv.Itoa(c.Clients), "-t", "1", "-D", seconds(o.time), "--warm-up-time", "1",
		"-d", body, "-H", "content-type: application/json", "--log-file", log}
	if c.Rate > 0 {
		args = append(args, "--rps", strconv.FormatFloat(max(c.Rate/float64(c.Clients), 0.1), 'f', 2, 64))
	}
	ctx, cancel := context.WithTimeout(ctx, o.time+time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, o.h2load, append(args, s.url+"/v1/chat/completions")...)
	r.Command = "h2load " + strings.Join(cmd.Args[1:], " ")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("h2load: %w: %.300s", err, out)
	}
	r.driver = cmd.ProcessState.SystemTime() + cmd.ProcessState.UserTime()
	text, err := os.ReadFile(log)
	if err != nil {
		return fmt.Errorf("h2load's log: %w", err)
	}
	return r.readLog(string(text))
}

// readLog reads h2load's log.
func (r *result) readLog(text string) error {
	var took []float64
	first, last := int64(math.MaxInt64), int64(0)
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 3 {
			continue
		}
		at, err := strconv.ParseInt(f[0], 10, 64)
		if err != nil {
			return fmt.Errorf("h2load's log: %q: %w", line, err)
		}
		us, err := strconv.ParseFloat(f[2], 64)
		if err != nil {
			return fmt.Errorf("h2load's log: %q: %w", line, err)
		}
		first, last = min(first, at), max(last, at+int64(us))
		if f[1] != "200" || us < 0 {
			r.Errors++
			continue
		}
		took = append(took, us/1000)
	}
	r.Requests = len(took)
	r.from, r.to = time.UnixMicro(first), time.UnixMicro(last)
	r.PerSecond = float64(r.Requests) / max(r.to.Sub(r.from).Seconds(), 0.001)
	slices.Sort(took)
	r.Latency = percentilesOf(took)
	if r.Requests == 0 {
		return fmt.Errorf("no request was answered (%d errors)", r.Errors)
	}
	return nil
}

func seconds(d time.Duration) string { return strconv.Itoa(max(int(d.Seconds()), 1)) }

// requestBody returns a chat completion of that many bytes.
func requestBody(bytes, tokens int) []byte {
	const form = `{"model":"tiny","max_tokens":%d,"ignore_eos":true,"messages":[{"role":"user","content":"%s"}]}`
	padding := max(bytes-len(fmt.Sprintf(form, tokens, "")), 1)
	return fmt.Appendf(nil, form, tokens, prompt(padding))
}

// prompt returns n bytes of text.
func prompt(n int) string {
	const line = "Disaggregated serving runs prefill and decode on different machines, so that neither waits for " +
		"the other. "
	return strings.Repeat(line, n/len(line)+1)[:n]
}

// percentiles of times, in milliseconds.
type percentiles struct{ P50, P90, P99, Max float64 }

func percentilesOf(sorted []float64) percentiles {
	at := func(q float64) float64 {
		if len(sorted) == 0 {
			return 0
		}
		return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
	}
	return percentiles{at(.5), at(.9), at(.99), at(1)}
}
