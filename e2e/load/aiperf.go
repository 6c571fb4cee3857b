package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// streamTokens is the length of streamed answers, and distinctPrompts the number of prompts.
const (
	streamTokens    = 64
	distinctPrompts = 64
)

// aiperf runs aiperf on a case with streaming.
func (o *options) aiperf(ctx context.Context, s *stand, c testCase, r *result) error {
	dir := filepath.Join(s.Dir, "aiperf")
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	tokenizer := filepath.Join(dir, "tokenizer")
	if out, err := exec.CommandContext(ctx, filepath.Join(filepath.Dir(o.python), "python"),
		"e2e/load/make_tokenizer.py", tokenizer).CombinedOutput(); err != nil {
		return fmt.Errorf("making a tokenizer: %w: %.300s", err, out)
	}
	var prompts strings.Builder
	for i := range distinctPrompts {
		fmt.Fprintf(&prompts, "{\"text\":\"%d %s\"}\n", i, prompt(max(c.Size-120, 1)))
	}
	input := filepath.Join(dir, "prompts.jsonl")
	if err := os.WriteFile(input, []byte(prompts.String()), 0o600); err != nil {
		return err
	}
	// A closed loop answers each client in about 0.4 s here.
	requests := max(int(o.time.Seconds()*2.5)*c.Clients, 2*c.Clients)
	args := []string{"profile", "-m", "tiny", "--url", s.url, "--endpoint-type", "chat", "--streaming", "--input-file",
		input,
		"--custom-dataset-type", "single_turn", "--tokenizer", tokenizer, "--use-server-token-count",
		"--extra-inputs", "max_tokens:" + strconv.Itoa(streamTokens), "--extra-inputs", "ignore_eos:true",
		"--request-count", strconv.Itoa(requests), "--ui", "none", "--artifact-dir", filepath.Join(dir, "out")}
	if c.Rate > 0 {
		args = append(args, "--request-rate", strconv.FormatFloat(c.Rate, 'f', 2, 64))
	} else {
		args = append(args, "--concurrency", strconv.Itoa(c.Clients))
	}
	cmd := exec.CommandContext(ctx, o.python, args...)
	cmd.Env = append(os.Environ(), "TZ=UTC") // its times have no zone
	r.Command = "aiperf " + strings.Join(args, " ")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("aiperf: %w: %.500s", err, out[max(0, len(out)-500):])
	}
	r.driver = cmd.ProcessState.SystemTime() + cmd.ProcessState.UserTime()
	return r.readExport(filepath.Join(dir, "out"))
}

// readExport reads aiperf's summary (profile_export_aiperf.json). Times are in milliseconds.
func (r *result) readExport(dir string) error {
	file := ""
	_ = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, _ error) error {
		if filepath.Base(path) == "profile_export_aiperf.json" {
			file = path
		}
		return nil
	})
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("aiperf's export: %w", err)
	}
	type metric struct{ Avg, P50, P90, P99, Max float64 }
	var e struct {
		Start         string `json:"start_time"`
		End           string `json:"end_time"`
		RequestCount  metric `json:"request_count"`
		ErrorCount    metric `json:"error_request_count"`
		Throughput    metric `json:"request_throughput"`
		Latency       metric `json:"request_latency"`
		FirstToken    metric `json:"time_to_first_token"`
		BetweenTokens metric `json:"inter_token_latency"`
	}
	if err := json.Unmarshal(text, &e); err != nil {
		return fmt.Errorf("aiperf's export: %w", err)
	}
	of := func(m metric) percentiles { return percentiles{m.P50, m.P90, m.P99, m.Max} }
	r.Requests, r.Errors, r.PerSecond = int(e.RequestCount.Avg), int(e.ErrorCount.Avg), e.Throughput.Avg
	r.Latency, r.FirstToken, r.BetweenTokens = of(e.Latency), of(e.FirstToken), of(e.BetweenTokens)
	for _, at := range []struct {
		text string
		into *time.Time
	}{{e.Start, &r.from}, {e.End, &r.to}} {
		if *at.into, err = time.Parse("2006-01-02T15:04:05.999999999", strings.TrimSuffix(at.text, "Z")); err != nil {
			return fmt.Errorf("aiperf's export: %w", err)
		}
	}
	if r.Requests == 0 {
		return fmt.Errorf("no request was answered (%d errors)", r.Errors)
	}
	return nil
}
