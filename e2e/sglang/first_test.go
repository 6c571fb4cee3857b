//go:build sglang

package sglang

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// begun is when the parts of a streamed answer came, after its request.
type begun struct{ headers, first, prefill time.Duration }

// TestFirstToken prints when the first token of a stream comes through Tandem, and if the client sends both legs at once
// itself and does not wait for prefill's answer; then also when that answer came. Run it with one server of each role:
//
//	PREFILLS=1 DECODES=1 e2e/sglang/run.sh go test -tags sglang -count 1 -run TestFirstToken -v ./e2e/sglang
func TestFirstToken(t *testing.T) {
	s := newStack(t, false)
	p := prompts{rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))}
	(&suite{stack: s, prompts: p}).warm(t)
	var mu sync.Mutex
	body := func() string {
		mu.Lock()
		defer mu.Unlock()
		return fmt.Sprintf(`"model":"tiny","temperature":0,"max_tokens":16,"stream":true,"ignore_eos":true,`+
			`"messages":[{"role":"user","content":%q}]}`, p.words(250))
	}
	for _, clients := range []int{1, 4, 8} {
		ways := map[string][]begun{}
		for range 2 { // by turns: the machine's speed changes
			for name, ask := range map[string]func(string) (begun, error){"direct": s.askBoth, "tandem": s.askTandem} {
				var group sync.WaitGroup
				for range clients {
					group.Go(func() {
						for range max(4, 24/clients) {
							b, err := ask(body())
							mu.Lock()
							if ways[name] = append(ways[name], b); err != nil {
								t.Error(err)
							}
							mu.Unlock()
						}
					})
				}
				group.Wait()
			}
		}
		for _, name := range []string{"direct", "tandem"} {
			quantiles := func(of func(*begun) time.Duration) string {
				var all []time.Duration
				for i := range ways[name] {
					all = append(all, of(&ways[name][i]))
				}
				slices.Sort(all)
				return fmt.Sprintf("p50 %d, p90 %d, most %d ms", all[len(all)/2].Milliseconds(),
					all[len(all)*9/10].Milliseconds(), all[len(all)-1].Milliseconds())
			}
			t.Logf("%d clients, %s: headers %s; first event %s after them; prefill's answer %s after the first event", clients,
				name, quantiles(func(b *begun) time.Duration { return b.headers }),
				quantiles(func(b *begun) time.Duration { return b.first - b.headers }),
				quantiles(func(b *begun) time.Duration { return max(b.prefill-b.first, 0) }))
		}
	}
}

// askTandem sends a chat completion, a body without its opening brace.
func (s *stack) askTandem(body string) (begun, error) { return ask(s.front, "{"+body) }

// askBoth sends it to prefill and decode.
func (s *stack) askBoth(body string) (begun, error) {
	host, port, err := net.SplitHostPort(s.prefill[0])
	if err != nil {
		return begun{}, err
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return begun{}, err
	}
	body = fmt.Sprintf(`{"bootstrap_host":%q,"bootstrap_port":%d,"bootstrap_room":%d,`, host, n+1000, rand.Int64()) + body
	prefill := make(chan error, 1)
	began := time.Now()
	var took time.Duration
	go func() {
		_, err := ask(s.prefill[0], body)
		took = time.Since(began)
		prefill <- err
	}()
	b, err := ask(s.decode[0], body)
	if failed := <-prefill; failed != nil {
		return b, failed
	}
	b.prefill = took
	return b, err
}

func ask(addr, body string) (b begun, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+"/v1/chat/completions",
		strings.NewReader(body))
	if err != nil {
		return b, err
	}
	req.Header.Set("content-type", "application/json")
	began := time.Now()
	answer, err := http.DefaultClient.Do(req)
	if err != nil {
		return b, err
	}
	defer answer.Body.Close()
	b.headers = time.Since(began)
	in := bufio.NewReader(answer.Body)
	line, err := in.ReadString('\n')
	b.first = time.Since(began)
	if err == nil && (answer.StatusCode != http.StatusOK || !strings.HasPrefix(line, "data: ")) {
		err = fmt.Errorf("status %d: %.200s", answer.StatusCode, line)
	}
	if _, failed := io.Copy(io.Discard, in); err == nil {
		err = failed
	}
	return b, err
}
