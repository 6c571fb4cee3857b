// Command truth asks whether `tandem replay --recording` tells the truth: it records traffic through a real Envoy
// with simulated engines whose speeds Tandem's model does not have, replays it, changes the fleet to what the
// replay advises, or to what it is told, sends the same traffic again, and compares what was predicted with what
// happened.
//
//	go run ./e2e/truth -minutes 3 -then "1+3,2 load:1.5"          (make truth THEN="1+3,2 load:1.5")
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"tandem/e2e/loopback"
	"tandem/e2e/process"
)

func main() {
	minutes := flag.Float64("minutes", 3, "of traffic that each fleet gets")
	kinds := flag.String("traffic", "mixed,agents", "kinds of traffic, with commas")
	fleet := flag.String("fleet", "3+1", "engines that prefill and that decode, at first")
	then := flag.String("then", "", "fleets to measure then, with commas, as tandem replay --what-if reads them, of "+
		"engines, roles:auto and load:X (so many times the traffic); default: what the replay advises")
	speed := flag.Float64("prefill-speed", 4000, "tokens/s of an engine's prefill")
	step := flag.Duration("decode-step", 15*time.Millisecond, "of an engine")
	slow := flag.Float64("slow", 1, "everything takes so many times as long, so that a busy machine disturbs it less")
	keep := flag.String("keep", "", "folder for the recordings; default: a temporary one")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	for kind := range strings.SplitSeq(*kinds, ",") {
		t := truth{kind: kind, lasts: time.Duration(*minutes * float64(time.Minute)), speed: *speed / *slow,
			step: times(*slow, *step), slow: *slow, dir: *keep}
		if err := t.run(ctx, *fleet, strings.FieldsFunc(*then, func(r rune) bool { return r == ',' })); err != nil {
			fmt.Fprintln(os.Stderr, "truth:", err)
			os.Exit(1)
		}
	}
}

// truth is one kind of traffic.
type truth struct {
	kind  string
	lasts time.Duration
	speed float64
	step  time.Duration
	slow  float64
	dir   string
}

func times(x float64, d time.Duration) time.Duration { return time.Duration(x * float64(d)) }

// spread, result and report are parts of what `tandem replay --json` prints.
type spread struct{ Mean, P50, P95 float64 }

type result struct {
	Name              string
	Requests          int
	Kept, Cached      float64
	TTFT, TPOT, Waits spread
}

type report struct {
	Measured, Replayed result
	Rows               []result
	Run                string
	Advice             []string
}

func (t *truth) run(ctx context.Context, fleet string, then []string) error {
	before, err := t.record(ctx, fleet, then, true)
	if err != nil {
		return err
	}
	fmt.Printf("\n## %s, %s each\n\n", t.kind, t.lasts)
	compare(fleet, &before.Measured, &before.Replayed)
	fmt.Printf("\n%s\n\n", strings.Join(before.Advice, "\n"))
	if len(then) == 0 {
		then = []string{before.Run}
	}
	for _, next := range then {
		i := slices.IndexFunc(before.Rows, func(r result) bool { return r.Name == next })
		if i < 0 {
			return fmt.Errorf("the replay has no row for %q", next)
		}
		after, err := t.record(ctx, next, nil, false)
		if err != nil {
			return err
		}
		fmt.Printf("The same traffic on %s:\n\n", next)
		compare(next, &after.Measured, &before.Rows[i])
		changes(&before.Measured, &after.Measured, &before.Replayed, &before.Rows[i])
		fmt.Printf("\nWhat was measured there beside its own replay:\n\n")
		compare(next, &after.Measured, &after.Replayed)
	}
	return nil
}

type figure struct {
	name string
	of   func(*result) float64
	unit string
}

func figures() []figure {
	return []figure{
		{"promise kept", func(r *result) float64 { return 100 * r.Kept }, "%"},
		{"first token p50", func(r *result) float64 { return 1000 * r.TTFT.P50 }, "ms"},
		{"first token p95", func(r *result) float64 { return 1000 * r.TTFT.P95 }, "ms"},
		{"time per token", func(r *result) float64 { return 1000 * r.TPOT.Mean }, "ms"},
		{"cached", func(r *result) float64 { return 100 * r.Cached }, "%"},
		{"in the queue, mean", func(r *result) float64 { return 1000 * r.Waits.Mean }, "ms"},
	}
}

func compare(fleet string, was, is *result) {
	fmt.Printf("| %s, %d requests | measured | replayed | off |\n|---|---|---|---|\n", fleet, was.Requests)
	for _, f := range figures() {
		a, b := f.of(was), f.of(is)
		off := "-"
		if a > 0 {
			off = fmt.Sprintf("%+.0f %%", 100*(b/a-1))
		}
		fmt.Printf("| %s | %.1f %s | %.1f %s | %s |\n", f.name, a, f.unit, b, f.unit, off)
	}
}

// changes says whether what the change of the fleet did was predicted: its direction, and its size.
func changes(before, after, predictedBefore, predicted *result) {
	fmt.Print("\n| what changed | measured | predicted | direction | size |\n|---|---|---|---|---|\n")
	for _, f := range figures() {
		is, was := f.of(after), f.of(before)
		said, base := f.of(predicted), f.of(predictedBefore)
		if was <= 0 || base <= 0 {
			continue
		}
		happened, foreseen := is/was, said/base
		direction := "right"
		if math.Abs(math.Log(happened)) > .05 && (happened-1)*(foreseen-1) < 0 {
			direction = "**wrong**"
		}
		size := "within 15 %"
		if d := math.Abs(foreseen/happened - 1); d > .15 {
			size = fmt.Sprintf("**off by %.0f %%**", 100*d)
		}
		fmt.Printf("| %s | x %.2f | x %.2f | %s | %s |\n", f.name, happened, foreseen, direction, size)
	}
}

// record sends traffic to a fleet and replays its recording: on other fleets, too, and for advice.
func (t *truth) record(ctx context.Context, fleet string, whatIf []string, advise bool) (*report, error) {
	dir, err := os.MkdirTemp(t.dir, "truth-"+t.kind+"-")
	if err != nil {
		return nil, err
	}
	if t.dir == "" {
		defer os.RemoveAll(dir)
	}
	group := &process.Group{Dir: dir}
	defer group.Stop()
	fleet, load, err := loadOf(fleet)
	if err != nil {
		return nil, err
	}
	url, engines, err := t.start(ctx, group, fleet)
	if err != nil {
		return nil, err
	}
	if err := t.traffic(ctx, url, load); err != nil {
		return nil, err
	}
	group.Stop()
	profile := filepath.Join(dir, "profile.json")
	if err := t.profile(ctx, dir, profile); err != nil {
		return nil, err
	}
	args := []string{"replay", "--recording", filepath.Join(dir, "recordings"), "--json", "--profile", profile}
	if advise {
		args = append(args, "--advise", fmt.Sprint(engines))
	}
	for _, variant := range whatIf {
		args = append(args, "--what-if", variant)
	}
	text, err := exec.CommandContext(ctx, "bin/tandem", args...).Output()
	if err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		return nil, fmt.Errorf("replaying: %w", err)
	}
	r := &report{}
	return r, json.Unmarshal(text, r)
}

// profile measures a pair of engines as the fleet's are, as an operator would.
func (t *truth) profile(ctx context.Context, dir, file string) error {
	at, letGo, err := loopback.Take(4)
	if err != nil {
		return err
	}
	letGo()
	group := &process.Group{Dir: dir}
	defer group.Stop()
	for i, name := range []string{"profiled", "profiled-decode"} {
		if err := t.engine(ctx, group, name, at[2*i:], "both"); err != nil {
			return err
		}
	}
	text, err := exec.CommandContext(ctx, "bin/tandem", "profile", at[0], "--decode", at[2], "--kv-transfer", "nixl",
		"--to", file, "--longest", "8192", "--most", "16",
		"--within", times(t.slow, 30*time.Second).String()).CombinedOutput()
	if err != nil {
		return fmt.Errorf("profiling: %w: %s", err, text)
	}
	return nil
}

// engine starts an engine, which listens on the first of the addresses and has its side channel on the second.
func (t *truth) engine(ctx context.Context, group *process.Group, name string, at []string, role string) error {
	e, err := group.Start(name, nil, "bin/enginesim", "-listen", at[0], "-side-channel", at[1], "-role", role,
		"-model", "tiny", "-prefill-speed", fmt.Sprint(t.speed), "-decode-step", t.step.String(), "-chunk", "2048",
		"-blocks", "12000", "-record=false")
	if err != nil {
		return err
	}
	return e.Wait(ctx, "http://"+at[0]+"/health")
}

// start starts a fleet, Tandem and Envoy.
func (t *truth) start(ctx context.Context, group *process.Group, fleet string) (url string, engines int, err error) {
	fleet, _, auto := strings.Cut(fleet, " roles:auto")
	roles, setting := rolesOf(fleet), "fixed"
	if auto {
		setting = "auto"
	}
	at, letGo, err := loopback.Take(2*len(roles) + 6)
	if err != nil {
		return "", 0, err
	}
	letGo()
	var list bytes.Buffer
	for i, role := range roles {
		if err := t.engine(ctx, group, fmt.Sprint("engine", i), at[2*i:], role); err != nil {
			return "", 0, err
		}
		fmt.Fprintf(&list, "  - {address: %q, role: %s}\n", at[2*i], role)
	}
	at = at[2*len(roles):]
	file := filepath.Join(group.Dir, "tandem.yaml")
	text := fmt.Sprintf("extProc: {listen: %q}\nreplan: {listen: %q}\nadmin: {listen: %q}\n"+
		"envoy: {listen: %q, admin: %q}\n"+
		"usage: {}\nrecord: {folder: %q}\npools:\n- name: chat\n  kvTransfer: nixl\n  roles: %s\n"+
		"  targets: {ttft: %s, tpot: %s}\n"+
		"  endpoints:\n%s", at[0], at[1], at[2], at[3], at[4], filepath.Join(group.Dir, "recordings"), setting,
		times(t.slow, 1500*time.Millisecond), times(t.slow, 30*time.Millisecond), list.String())
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return "", 0, err
	}
	bootstrap, err := exec.CommandContext(ctx, "bin/tandem", "envoy", "-f", file).Output()
	if err != nil {
		return "", 0, fmt.Errorf("tandem envoy: %w", err)
	}
	config := filepath.Join(group.Dir, "envoy.yaml")
	if err := os.WriteFile(config, bootstrap, 0o600); err != nil {
		return "", 0, err
	}
	tandem, err := group.Start("tandem", nil, "bin/tandem", "serve", "-f", file)
	if err != nil {
		return "", 0, err
	}
	if err := tandem.Wait(ctx, "http://"+at[2]+"/readyz"); err != nil {
		return "", 0, err
	}
	envoy, err := group.Start("envoy", nil, process.Program(os.Getenv("ENVOY"), ".tools/bin/envoy", "envoy"), "-c",
		config,
		"--disable-hot-restart", "--concurrency", "1", "-l", "error")
	if err != nil {
		return "", 0, err
	}
	return "http://" + at[3], len(roles), envoy.Wait(ctx, "http://"+at[4]+"/ready")
}

func rolesOf(fleet string) (out []string) {
	var p, d int
	if n, _ := fmt.Sscanf(fleet, "%d+%d", &p, &d); n == 1 {
		p, d = 0, 0
		var both int
		_, _ = fmt.Sscan(fleet, &both)
		for range both {
			out = append(out, "both")
		}
	}
	for range p {
		out = append(out, "prefill")
	}
	for range d {
		out = append(out, "decode")
	}
	return out
}

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// loadOf takes load:X out of a fleet's description.
func loadOf(text string) (fleet string, load float64, err error) {
	load = 1
	words := strings.Fields(text)
	for i, word := range words {
		if x, ok := strings.CutPrefix(word, "load:"); ok {
			load, err = strconv.ParseFloat(x, 64)
			words[i] = ""
		}
	}
	return strings.TrimSpace(strings.Join(words, " ")), load, err
}

// traffic sends requests until the time is over, and waits for their answers.
func (t *truth) traffic(ctx context.Context, url string, load float64) error {
	ctx, cancel := context.WithTimeout(ctx, t.lasts+times(t.slow, 2*time.Minute))
	defer cancel()
	end := time.Now().Add(t.lasts)
	var clients sync.WaitGroup
	defer clients.Wait()
	failed := make(chan error, 1)
	ask := func(m []message, tokens int) string {
		text, err := ask(ctx, url, m, tokens)
		if err != nil {
			select {
			case failed <- err:
			default:
			}
		}
		return text
	}
	if t.kind == "agents" {
		for i := range int(10 * load) {
			clients.Go(func() { agent(ctx, i, end, t.slow, ask) })
		}
		clients.Wait()
	} else {
		mixed(ctx, end, t.slow, load, &clients, ask)
	}
	clients.Wait()
	select {
	case err := <-failed:
		return err
	default:
		return ctx.Err()
	}
}

// text returns words that nobody else says, of so many tokens: the simulator counts four bytes a token.
func text(random *rand.Rand, tokens int) string {
	var b strings.Builder
	for b.Len() < 4*tokens {
		fmt.Fprintf(&b, "w%x ", random.Uint32())
	}
	return b.String()
}

// mixed: chats that ask once, some of them long, of three applications with a system prompt each.
func mixed(ctx context.Context, end time.Time, slow, load float64, clients *sync.WaitGroup,
	ask func([]message, int) string) {
	random := rand.New(rand.NewPCG(7, 1))
	var systems []string
	for range 3 {
		systems = append(systems, text(random, 600))
	}
	for time.Now().Before(end) && ctx.Err() == nil {
		length := 200.0 * math.Exp(random.NormFloat64()*.8)
		if random.IntN(6) == 0 {
			length = 2500 + 3500*random.Float64()
		}
		m := []message{{"system", systems[random.IntN(3)]}, {"user", text(random, int(min(length, 6000)))}}
		tokens := 30 + random.IntN(170)
		clients.Go(func() { ask(m, tokens) })
		wait(ctx, times(slow/load, time.Duration(random.ExpFloat64()*400)*time.Millisecond))
	}
}

// agent has conversations that grow with each turn.
func agent(ctx context.Context, number int, end time.Time, slow float64, ask func([]message, int) string) {
	random := rand.New(rand.NewPCG(11, uint64(number)))
	tools := text(rand.New(rand.NewPCG(3, 3)), 1500)
	wait(ctx, times(slow, time.Duration(random.Float64()*5000)*time.Millisecond))
	for time.Now().Before(end) && ctx.Err() == nil {
		m := []message{{"system", tools}, {"user", text(random, 500+random.IntN(1500))}}
		for range 6 + random.IntN(8) {
			m = append(m, message{"assistant", ask(m, 40+random.IntN(120))})
			wait(ctx, times(slow, time.Duration(1000+random.ExpFloat64()*2500)*time.Millisecond))
			if time.Now().After(end) || ctx.Err() != nil {
				return
			}
			m = append(m, message{"user", text(random, 200+random.IntN(1200))})
		}
	}
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// ask asks for a streamed answer, and returns its text.
func ask(ctx context.Context, url string, m []message, tokens int) (string, error) {
	body, err := json.Marshal(map[string]any{"model": "tiny", "messages": m, "max_tokens": tokens, "ignore_eos": true,
		"stream": true, "stream_options": map[string]bool{"include_usage": true}})
	if err != nil {
		return "", err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		why, _ := io.ReadAll(io.LimitReader(resp.Body, 300))
		return "", fmt.Errorf("%s: %s", resp.Status, why)
	}
	var out strings.Builder
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var chunk struct {
			Choices []struct{ Delta struct{ Content string } }
		}
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if ok && json.Unmarshal([]byte(data), &chunk) == nil && len(chunk.Choices) > 0 {
			out.WriteString(chunk.Choices[0].Delta.Content)
		}
	}
	return out.String(), lines.Err()
}
