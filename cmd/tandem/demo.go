package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"tandem/extproc/telemetry"

	"github.com/spf13/cobra"
)

// newDemo is `tandem demo`: it brings up two prefill and two decode simulators, Tandem and Envoy on this machine, sends
// real requests through them and shows what happened to each.
func newDemo() *cobra.Command {
	var envoyPath, simPath, listen, library string
	var stay bool
	c := &cobra.Command{
		Use: "demo", Short: "Bring everything up on this machine and send real requests", Args: arguments(0),
		RunE: func(c *cobra.Command, _ []string) error {
			return demo(c.Context(), envoyPath, simPath, listen, library, stay, c.OutOrStdout())
		},
	}
	f := c.Flags()
	f.StringVar(&envoyPath, "envoy", "", "Envoy `BINARY` (default: $ENVOY, envoy beside tandem or on PATH, .tools/bin/envoy)")
	f.StringVar(&simPath, "enginesim", "", "enginesim `BINARY` (default: beside tandem, or on PATH)")
	f.StringVar(&library, "inside", "", "`FOLDER` of libtandem.so (make carrier), for Tandem inside Envoy")
	f.StringVar(&listen, "listen", "127.0.0.1:0", "`ADDRESS` for clients; port 0 takes a free one")
	f.BoolVar(&stay, "stay", false, "after the requests, keep everything running until Ctrl-C")
	return c
}

func demo(ctx context.Context, envoyPath, simPath, listen, library string, stay bool, stdout io.Writer) error {
	d := &demonstration{out: stdout, group: programs{http: &http.Client{Timeout: time.Minute}}}
	if err := d.find(envoyPath, simPath, library); err != nil {
		return err
	}
	if err := free(listen); err != nil { // Envoy would only log it
		return fmt.Errorf("--listen: %w", err)
	}
	err := d.bringUp(ctx, listen)
	if err == nil {
		err = d.show(ctx)
	}
	if err == nil && stay {
		fmt.Fprintf(stdout, "\nStill running: OpenAI API at %s/v1, page and metrics at %s, logs in %s. "+
			"In another terminal:\n\n"+
			"%s\n  %s status --admin %s\n  %s replay --recording %s --advise 4\n\nCtrl-C ends everything.\n",
			d.url, d.admin, d.group.dir, curl(d.url, "", "tiny", `Hello`), d.self, strings.TrimPrefix(d.admin, "http://"),
			d.self, d.recordings())
		<-ctx.Done()
	}
	d.group.stop()
	if err != nil && ctx.Err() == nil && d.group.dir != "" {
		return fmt.Errorf("%w; all programs' logs are in %s", err, d.group.dir)
	}
	if d.group.dir != "" {
		_ = os.RemoveAll(d.group.dir)
	}
	return err
}

type demonstration struct {
	group            programs
	out              io.Writer
	self, envoy, sim string // binaries
	library          string // the folder of libtandem.so; "": Tandem runs beside Envoy
	url, admin       string
	engines          []string
}

// find locates the binaries.
func (d *demonstration) find(envoyPath, simPath, library string) (err error) {
	if d.self, err = os.Executable(); err != nil {
		return fmt.Errorf("finding this program: %w", err)
	}
	beside := filepath.Dir(d.self)
	if d.envoy, err = findEnvoy(envoyPath, beside); err != nil {
		return err
	}
	d.sim, err = findProgram("enginesim", simPath, "--enginesim", " beside tandem: run make build",
		filepath.Join(beside, "enginesim"), "enginesim")
	if err == nil && library != "" {
		d.library = library
		err = d.group.loadLibrary(library)
	}
	return err
}

// bringUp starts everything and waits until it answers.
func (d *demonstration) bringUp(ctx context.Context, listen string) (err error) {
	if d.group.dir, err = os.MkdirTemp("", "tandem-demo-"); err != nil {
		return err
	}
	p, err := freePorts(13)
	if err != nil {
		return err
	}
	if strings.HasSuffix(listen, ":0") {
		listen = p[12]
	}
	d.url, d.admin = "http://"+listen, "http://"+p[10]
	var endpoints strings.Builder
	for i, role := range []string{"prefill", "prefill", "decode", "decode"} {
		d.engines = append(d.engines, p[i])
		fmt.Fprintf(&endpoints, "  - {address: %q, role: %s}\n", p[i], role)
		if err := d.group.launch("engine-"+strconv.Itoa(i), d.sim, "--listen", p[i], "--side-channel", p[i+4], "--role", role,
			"--model", "tiny", "--prefill-speed", "40000", "--decode-step", "5ms"); err != nil {
			return err
		}
	}
	cfg := filepath.Join(d.group.dir, "tandem.yaml")
	way, how, xds := "beside", "Tandem and Envoy", []string{"--xds"}
	if d.library != "" {
		way, how, xds = "inside", "and an Envoy with Tandem inside", nil
	}
	text := fmt.Sprintf("extProc: {listen: %q}\nreplan: {listen: %q}\nadmin: {listen: %q}\nenvoy: {listen: %q, admin: %q, run: %s}\n"+
		"usage: {}\nrecord: {folder: %q}\npools:\n- name: demo\n  kvTransfer: nixl\n  split: always # auto would keep prompts as short as most of these on decode\n"+
		"  decodeAlone: fallback\n  endpoints:\n%s", p[8], p[9], p[10], listen, p[11], way, d.recordings(), endpoints.String())
	if err := os.WriteFile(cfg, []byte(text), 0o600); err != nil {
		return err
	}
	if d.library == "" {
		if err := d.group.launch("tandem", d.self, "serve", "-f", cfg); err != nil {
			return err
		}
	}
	bootstrap, err := exec.CommandContext(ctx, d.self, append([]string{"envoy", "-f", cfg}, xds...)...).Output()
	if err != nil {
		return fmt.Errorf("tandem envoy: %w", err)
	}
	bootstrapFile := filepath.Join(d.group.dir, "envoy.yaml")
	if err := os.WriteFile(bootstrapFile, bootstrap, 0o600); err != nil {
		return err
	}
	if err := d.group.launch("envoy", d.envoy, "-c", bootstrapFile, "-l", "warning", "--use-dynamic-base-id", "--concurrency", "2"); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "2 prefill engines %s, 2 decode engines %s (simulated vLLM), %s.\n"+
		"The pool has split: always, so short prompts are split, too.\n",
		strings.Join(d.engines[:2], " "), strings.Join(d.engines[2:], " "), how)
	for _, url := range []string{"http://" + p[0] + "/health", "http://" + p[1] + "/health", "http://" + p[2] + "/health",
		"http://" + p[3] + "/health", d.admin + "/readyz", "http://" + p[11] + "/ready", d.url + "/v1/models"} {
		if err := d.group.wait(ctx, url); err != nil {
			return err
		}
	}
	return nil
}

// recordings is the folder in which the demo's requests are recorded.
func (d *demonstration) recordings() string { return filepath.Join(d.group.dir, "recordings") }

// demoRequest is one request that the demo sends.
type demoRequest struct{ what, path, body string }

func demoRequests() []demoRequest {
	long, _ := json.Marshal(strings.Repeat("Disaggregated serving puts prefill and decode on different machines. ", 3000))
	chat := func(content, more string) string {
		return `{"model":"tiny","messages":[{"role":"system","content":"You are brief."},{"role":"user","content":` + content + `}]` + more + `}`
	}
	return []demoRequest{
		{"chat", "/v1/chat/completions", chat(`"What does a router do?"`, `,"max_tokens":24`)},
		{"chat, streaming", "/v1/chat/completions", chat(`"And what is a KV cache?"`, `,"max_tokens":24,"stream":true`)},
		{"completion", "/v1/completions", `{"model":"tiny","prompt":"Envoy carries both hops, because","max_tokens":16}`},
		{"long prompt, 200 KB", "/v1/chat/completions", chat(string(long), `,"max_tokens":16`)},
		{"the same again", "/v1/chat/completions", chat(string(long), `,"max_tokens":16`)},
		{"two choices (not split)", "/v1/chat/completions", chat(`"Heads or tails?"`, `,"max_tokens":8,"n":2`)},
	}
}

// show sends the requests and prints a line for each, then the engines' ledgers.
func (d *demonstration) show(ctx context.Context) error {
	fmt.Fprintf(d.out, "\n%-24s %7s  %-15s %-15s %9s %9s %8s %8s  %s\n", "request", "bytes", "prefill", "decode", "hop 1", "hop 2", "prompt", "cached", "answer")
	for i, r := range demoRequests() {
		id := fmt.Sprintf("demo-%d-%d", os.Getpid(), i)
		answer, err := d.send(ctx, id, r)
		if err != nil {
			return fmt.Errorf("%s: %w", r.what, err)
		}
		t, err := d.trace(ctx, id)
		if err != nil {
			return fmt.Errorf("%s: %w", r.what, err)
		}
		prefill, hop1, cached := "-", "-", "-"
		if t.Prefill != "" {
			prefill, hop1 = t.Prefill, millis(t.PrefillTime)
		}
		if t.CachedTokens >= 0 {
			cached = strconv.FormatInt(t.CachedTokens, 10)
		}
		fmt.Fprintf(d.out, "%-24s %7d  %-15s %-15s %9s %9s %8d %8s  %s\n", r.what, len(r.body), prefill, t.Decode, hop1, millis(t.DecodeTime), t.PromptTokens, cached, answer)
	}
	return d.ledgers(ctx)
}

func millis(t time.Duration) string { return fmt.Sprintf("%.1f ms", float64(t.Microseconds())/1000) }

// send posts a request and summarizes the answer.
func (d *demonstration) send(ctx context.Context, id string, r demoRequest) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, d.url+r.path, strings.NewReader(r.body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", id)
	resp, err := d.group.http.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", err
	}
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("status %d: %.300s", resp.StatusCode, body)
	}
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		return fmt.Sprintf("%d events", strings.Count(string(body), "data: ")), nil
	}
	var a struct {
		Choices []struct {
			Text    string
			Message struct{ Content string }
		}
	}
	if err := json.Unmarshal(body, &a); err != nil || len(a.Choices) == 0 {
		return "", fmt.Errorf("not an answer: %.300s", body)
	}
	text := a.Choices[0].Text + a.Choices[0].Message.Content
	return fmt.Sprintf("%.24q", text), nil
}

// trace waits for Tandem to have seen the end of a request.
func (d *demonstration) trace(ctx context.Context, id string) (telemetry.Trace, error) {
	deadline := time.Now().Add(30 * time.Second)
	for {
		body, _, err := d.group.get(ctx, d.admin+"/debug/requests?n=20")
		if err != nil {
			return telemetry.Trace{}, err
		}
		var all []telemetry.Trace
		if err := json.Unmarshal(body, &all); err != nil {
			return telemetry.Trace{}, fmt.Errorf("reading Tandem's traces: %w", err)
		}
		for _, t := range all {
			if t.RequestID == id && t.Status != 0 {
				return t, nil
			}
		}
		if time.Now().After(deadline) {
			return telemetry.Trace{}, errors.New("Tandem did not see the request end") //nolint:staticcheck // a name
		}
		select {
		case <-ctx.Done():
			return telemetry.Trace{}, ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// ledgers prints what the engines' books say; anything but balance is an error.
func (d *demonstration) ledgers(ctx context.Context) error {
	fmt.Fprintf(d.out, "\n%-15s %12s %12s %12s %12s\n", "engine", "given", "fetched", "blocks held", "violations")
	for _, e := range d.engines {
		text, _, err := d.group.get(ctx, "http://"+e+"/metrics")
		if err != nil {
			return err
		}
		held, violations := sample(text, "enginesim_blocks_held"), sample(text, "enginesim_violations_total")
		fmt.Fprintf(d.out, "%-15s %12.0f %12.0f %12.0f %12.0f\n", e, sample(text, "enginesim_handovers_total", `outcome="given"`),
			sample(text, "enginesim_handovers_total", `outcome="fetched"`), held, violations)
		if held != 0 || violations != 0 {
			return fmt.Errorf("the ledger of %s does not balance", e)
		}
	}
	text, _, err := d.group.get(ctx, d.admin+"/metrics")
	if err != nil {
		return err
	}
	left := sample(text, "tandem_reservations")
	fmt.Fprintf(d.out, "Tandem's reservations left: %.0f\n", left)
	if left != 0 {
		return errors.New("reservations are left")
	}
	fmt.Fprintln(d.out, "All ledgers balance.")
	return nil
}

// sample sums the samples of a metric in a Prometheus text, with a label where one is given.
func sample(text []byte, name string, label ...string) (sum float64) {
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, name) && (len(label) == 0 || strings.Contains(line, label[0])) {
			v, _ := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndexByte(line, ' ')+1:]), 64)
			sum += v
		}
	}
	return sum
}
