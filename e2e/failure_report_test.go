package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/stretchr/testify/require"
)

func (s *stage) report(args []string) {
	s.await()
	s.row(args[0])
	if len(args) > 1 && args[1] == "timed" { // stopped engines cannot be counted
		row := s.rows[len(s.rows)-1]
		row[2], row[3], row[4] = "", "", ""
		if row[1] += ", at once"; s.play.answer.took >= s.limit*9/10 {
			row[1] = strings.Replace(row[1], "at once", "after a time limit", 1)
		}
	}
}

// await waits for the answer's end. A client gives up at some time.
func (s *stage) await() {
	select {
	case <-s.play.answer.done:
	case <-time.After(s.patience):
		s.play.leave()
		<-s.play.answer.done
		if s.play.answer.status == 0 {
			s.play.answer.err = errGaveUp
		}
	}
}

var errGaveUp = errors.New("no answer")

// row writes the result of the play.
func (s *stage) row(label string) {
	s.t.Logf("%s: %v", label, s.play.answer.took.Round(time.Millisecond))
	left := s.quiet()
	s.heal()
	p := s.play
	client := p.answer.kind(s.alone())
	if errors.Is(p.answer.err, errGaveUp) {
		client = "gave up"
	}
	s.rows = append(s.rows, []string{label, client, s.describeLegs(), s.leftOut(), s.describeHandOvers(), left})
}

// alone returns a single engine's answer to the prompt.
func (s *stage) alone() string {
	for _, e := range s.f.decodes {
		if !e.running() {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		text, complete := whole(ctx, "http://"+e.addr, s.play.body)
		require.True(s.t, complete, "%s does not answer", e.addr)
		return text
	}
	return ""
}

// leg is a request that an engine recorded.
type leg struct {
	seen
	on       *engine
	name     string
	Time     time.Time `json:"time"`
	Injected string    `json:"injected"`
}

// legs returns the play's legs, in the order of arrival.
func (s *stage) legs() (out []leg) {
	for _, e := range s.f.engines() {
		var list []leg
		if !s.reachable(e) || getJSON("http://"+e.addr+"/sim/requests?id="+s.play.id, &list) != nil {
			continue
		}
		for _, l := range list {
			l.on, l.name = e, s.name(e)
			out = append(out, l)
		}
	}
	slices.SortFunc(out, func(a, b leg) int { return a.Time.Compare(b.Time) })
	return out
}

// name returns an engine's name in a row: with a number only if it matters which one it is.
func (s *stage) name(e *engine) string {
	letter := strings.ToUpper(e.role[:1])
	list := s.f.prefills
	if e.role == "decode" {
		list = s.f.decodes
	}
	if e.role != s.struck || s.all || len(list) == 1 {
		return letter
	}
	return letter + strconv.Itoa(slices.Index(list, e)+1)
}

// describeLegs joins equal legs, because the order of two failing endpoints is random.
func (s *stage) describeLegs() string {
	var order []string
	count := map[string]int{}
	for _, l := range s.legs() {
		how := strconv.Itoa(l.Status)
		if l.Outcome != "done" {
			how = l.Outcome
			if l.Status != 0 {
				how = strconv.Itoa(l.Status) + " " + l.Outcome
			}
		}
		d := fmt.Sprintf("%s %s %s", l.name, l.Leg, how)
		if count[d]++; count[d] == 1 {
			order = append(order, d)
		}
	}
	for i, d := range order {
		if strings.Contains(d, " plain ") && s.all {
			continue // so is the number of repeated tries once all endpoints have failed
		}
		if count[d] > 1 {
			order[i] = fmt.Sprintf("%s x%d", d, count[d])
		}
	}
	return or(strings.Join(order, "; "), "none")
}

func or(s, empty string) string {
	if s == "" {
		return empty
	}
	return s
}

// leftOut returns the endpoints that Tandem excluded and included again since the request began. The log shows even
// short exclusions.
func (s *stage) leftOut() string {
	names := map[string]bool{}
	for file, from := range s.play.before.log {
		text, _ := os.ReadFile(file)
		if int64(len(text)) < from {
			from = 0
		}
		for _, m := range regexp.MustCompile(`endpoint is back" endpoint=(\S+) role=\S+ cause=check`).FindAllSubmatch(text[from:], -1) {
			for _, e := range s.f.engines() {
				if e.addr == string(m[1]) {
					names[s.name(e)] = true
				}
			}
		}
	}
	return or(strings.Join(slices.Sorted(maps.Keys(names)), ", "), "-")
}

func (s *stage) handOvers(e *engine) map[string]float64 {
	out := map[string]float64{}
	for _, how := range outcomes {
		out[how] = metric(s.t, "http://"+e.addr, "enginesim_handovers_total", `outcome="`+how+`"`)
	}
	return out
}

var outcomes = []string{"given", "fetched", "released", "expired"}

func (s *stage) describeHandOvers() string {
	sum := map[string]float64{}
	for _, e := range s.f.prefills {
		if !e.running() {
			continue
		}
		for how, n := range s.handOvers(e) {
			sum[how] += n - s.play.before.given[e.process][how]
		}
	}
	var out []string
	for _, how := range outcomes {
		if sum[how] > 0 {
			out = append(out, fmt.Sprintf("%v %s", sum[how], how))
		}
	}
	return or(strings.Join(out, ", "), "-")
}

// quiet waits until nothing is booked, held or running, and returns what still is after a lease and a pause of the
// machine.
func (s *stage) quiet() string {
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		var left []string
		for i, admin := range s.f.admins {
			if s.f.tandems[i].running() {
				left = append(left, leftAt(admin, map[string]string{"tandem_reservations": "booked"})...)
			}
		}
		for _, e := range s.f.engines() {
			if e.running() {
				left = append(left, leftAt("http://"+e.addr, map[string]string{
					"enginesim_blocks_held": "blocks held", "vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting", "enginesim_violations_total": "VIOLATIONS",
				})...)
			}
		}
		if len(left) == 0 || time.Now().After(deadline) {
			return or(strings.Join(left, ", "), "nothing")
		}
	}
}

// leftAt returns the metrics at url that are not zero, in words.
func leftAt(url string, words map[string]string) (left []string) {
	resp, err := client.Get(url + "/metrics")
	if errors.Is(err, syscall.ECONNREFUSED) {
		return nil // it is down
	}
	if err != nil {
		return []string{"no answer"}
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return []string{"no answer"}
	}
	for line := range strings.Lines(string(text)) {
		name, _, _ := strings.Cut(line, " ")
		name, _, _ = strings.Cut(name, "{")
		value := strings.TrimSpace(line[strings.LastIndexByte(line, ' ')+1:])
		if word := words[name]; word != "" && value != "0" {
			left = append(left, word) // the number is random
		}
	}
	return left
}

// anew makes a connection for each request.
var anew = &http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true}}

// answers reports whether a server answers 200 on a new connection.
func answers(url string) bool {
	resp, err := anew.Get(url)
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

func (s *stage) reachable(e *engine) bool {
	if s.stopped[e.process] {
		return false
	}
	resp, err := anew.Get("http://" + e.addr + "/ping")
	if err == nil {
		_ = resp.Body.Close()
	}
	return err == nil
}

// heal removes all failures and waits until every running endpoint is in use again.
func (s *stage) heal() {
	for _, e := range s.f.engines() {
		if !e.running() {
			continue
		}
		require.Eventually(s.t, func() bool { return s.reachable(e) }, patience, 5*time.Millisecond)
		s.f.clear(e)
	}
	require.Eventually(s.t, func() bool {
		return !slices.ContainsFunc(s.outNow(), func(addr string) bool {
			return slices.ContainsFunc(s.f.engines(), func(e *engine) bool { return e.addr == addr && e.running() })
		})
	}, patience, 5*time.Millisecond, "an endpoint does not come back")
}

// forget sends requests until every engine has served one: then Tandem holds no earlier failure against any.
func (s *stage) forget() {
	served := map[string]bool{}
	for range 200 {
		s.ask(nil)
		s.await()
		require.Equal(s.t, http.StatusOK, s.play.answer.status, s.play.answer.body.String())
		if legs := s.legs(); slices.ContainsFunc(legs, func(l leg) bool { return l.Leg == "decode" }) {
			for _, l := range legs {
				served[l.on.addr] = true
			}
		}
		if len(served) == len(s.f.engines()) {
			s.quiet()
			return
		}
	}
	require.Fail(s.t, "an engine serves nobody", "%v", served)
}

func (s *stage) table() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 1, 1, ' ', 0)
	for _, row := range append([][]string{{"", "client", "legs", "left out", "KV", "left"}}, s.rows...) {
		fmt.Fprintln(w, strings.Join(row, "\t| "))
	}
	_ = w.Flush()
	return b.String()
}
