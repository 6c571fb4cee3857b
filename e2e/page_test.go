package e2e

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var screenshots = flag.Bool("screenshots", false, "take docs/page.png and docs/page-phone.png anew")

// browser returns a Chromium, from $CHROMIUM or PATH; without one the test is skipped.
func browser(t *testing.T) string {
	t.Helper()
	for _, name := range []string{os.Getenv("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); name != "" && err == nil {
			return path
		}
	}
	t.Skip("no Chromium: apt-get install chromium, or set $CHROMIUM")
	return ""
}

func chromium(t *testing.T, args ...string) (stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	args = append([]string{"--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
		"--user-data-dir=" + t.TempDir(), "--enable-logging=stderr", "--virtual-time-budget=6000"}, args...)
	cmd := exec.CommandContext(ctx, browser(t), args...)
	var out, log strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &log
	require.NoError(t, cmd.Run(), log.String())
	return out.String(), log.String()
}

// The page shows a live fleet in a real browser: no error in its console, the latest decisions, and on a phone nothing
// overflows the screen.
func TestPageInChromium(t *testing.T) {
	t.Parallel()
	browser(t)
	f := start(t, options{engineArgs: []string{"--prefill-speed", "20000", "--decode-step", "8ms", "--blocks", "1000", "--max-model-len", "15000"}})
	idle, _ := chromium(t, "--dump-dom", f.admins[0]+"/")
	require.Contains(t, idle, "no request in the last minute")
	require.Equal(t, 4, strings.Count(idle, "· idle</text>"), "endpoints that serve nothing are drawn")
	for _, link := range regexp.MustCompile(`<a href="([^"]+)"`).FindAllStringSubmatch(idle, -1) {
		answer, err := http.Get(f.admins[0] + "/" + link[1])
		require.NoError(t, err)
		require.NoError(t, answer.Body.Close())
		require.Equal(t, 200, answer.StatusCode, link[1])
	}
	for i := range 60 {
		prompt := strings.Repeat(fmt.Sprintf("Prefix number %d. ", i%5), 20)
		body := strings.Replace(apis[i%2].body, "Two hops, please.", prompt, 1)
		if i%10 == 9 {
			body = strings.Replace(body, `"max_tokens":12`, `"max_tokens":12,"n":2`, 1)
		}
		f.post(apis[i%2].path, body, "x-request-id", fmt.Sprintf("request-%d", i))
	}
	require.Equal(t, 400, f.post(apis[0].path, `{"model":`).status)
	live := make(chan struct{})
	var clients sync.WaitGroup
	defer clients.Wait()
	defer close(live)
	for n := range 3 { // requests continue while the browser runs
		clients.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-live:
					return
				case <-time.After(time.Duration(20+10*(i%7)) * time.Millisecond):
				}
				body := strings.Replace(apis[i%2].body, "Two hops, please.", strings.Repeat(fmt.Sprintf("Prefix number %d. ", i%5), 20+10*(i%40)), 1)
				body = strings.Replace(body, `"max_tokens":12`, `"max_tokens":60`, 1)
				_, _ = f.try(t.Context(), http.MethodPost, apis[i%2].path, body, "x-request-id", fmt.Sprintf("live-%d-%d", n, i))
			}
		})
	}
	admin, err := url.Parse(f.admins[0])
	require.NoError(t, err)
	// The page in a frame of a phone's width: Chromium has no window as narrow. The frame's findings become the outer page's text.
	mux := http.NewServeMux()
	mux.Handle("/", httputil.NewSingleHostReverseProxy(admin))
	framed := func(path, script string) {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(w, `<!doctype html><body style="margin:0"><iframe id=f src="/" style="border:0;width:%spx;height:2700px"></iframe><pre id=found></pre><script>
const say = text => found.textContent = text;
setTimeout(() => { const w = f.contentWindow, d = w.document; %s }, 3500)</script>`, r.URL.Query().Get("width"), script)
		})
	}
	framed("/width", `say('width ' + d.documentElement.scrollWidth + ' of ' + w.innerWidth)`)
	framed("/labels", `const c = w.chart({ title: 'x', unit: String, lines: [['y', 'y', 'c-good']] }, Array.from({ length: 136 }, (_, i) => ({ n: 1e9 + i })));
d.getElementById('plots').append(c);
const at = [...c.querySelectorAll('text')].filter(e => e.textContent.includes(':')).map(e => e.getBoundingClientRect());
say(at.length + ' labels, apart ' + at.every((b, i) => !i || b.left > at[i - 1].right))`)
	// With a keyboard: Tab leads to each decision, and Enter is a click. The list moves on when none is open, and a table keeps the focus.
	framed("/keys", `const rows = [...d.querySelectorAll('#recent details')], row = rows[1].firstChild;
const another = () => fetch('/request').then(() => new Promise(drawn => setTimeout(drawn, 2500)));
let read;
row.focus(); row.click();
another().then(() => {
  read = ['summaries ' + rows.every(e => e.firstChild.matches('summary') && e.firstChild.tabIndex === 0),
    'stays ' + (row.isConnected && d.activeElement === row && rows[1].open && rows[1].innerText.includes('Took: ')), d.getElementById('held').textContent];
  row.click(); d.querySelector('#pools .table').focus();
  return another();
}).then(() => say([...read, 'moves on ' + !row.isConnected, 'focus on ' + d.activeElement.ariaLabel].join('; ')))`)
	mux.HandleFunc("/request", func(http.ResponseWriter, *http.Request) {
		_, _ = f.try(t.Context(), http.MethodPost, apis[0].path, apis[0].body)
	})
	framed("/open", `const all = [...d.querySelectorAll('#recent details')]; (all.find(e => e.querySelector('.good') && e.textContent.includes('% of the prompt')) || all[0]).open = true`)
	server := httptest.NewServer(mux)
	defer server.Close()

	dom, log := chromium(t, "--dump-dom", server.URL+"/")
	require.NotContains(t, log, "CONSOLE", "errors in the page's console")
	require.Contains(t, dom, `<span id="state" class="pill good">ready</span>`)
	for _, e := range f.engines() {
		require.Regexp(t, `<td data-label="endpoint"><span><button [^>]*>`+e.addr+"</button>", dom)
	}
	require.Regexp(t, `live-\d-\d+</span>`, dom)
	require.GreaterOrEqual(t, strings.Count(dom, `class="series`), 10, "lines of the plots")
	require.Regexp(t, `<path class="link c-decode"[^>]*><title>127\.0\.0\.1:\d+ → 127\.0\.0\.1:\d+: \d+</title>`, dom)
	require.Contains(t, dom, "to prefill")
	require.Regexp(t, `127\.0\.0\.1:\d+ computes the prompt|Decode alone on`, dom, "a decision in a sentence")
	require.Contains(t, dom, "Nothing needs attention.")
	require.Contains(t, dom, `<div class="tile "><b>0</b><small>failed / s</small>`, "a refusal is no failure")
	require.Regexp(t, `<b>(0\.\d+|[1-9]\d*)</b><small>refused / s</small>`, dom)

	for _, figure := range []string{"The last minute", "of latest 256", "cached</td>", "busy in the last minute"} {
		require.Contains(t, dom, figure, "the window of figures")
	}

	phone, _ := chromium(t, "--dump-dom", server.URL+"/width?width=390")
	require.Regexp(t, `<pre id="found">width 390 of 390</pre>`, phone)
	labels, _ := chromium(t, "--dump-dom", "--lang=en-US", server.URL+"/labels?width=390")
	require.Regexp(t, `<pre id="found">[3-5] labels, apart true</pre>`, labels, "times under a chart")
	keys, _ := chromium(t, "--virtual-time-budget=12000", "--dump-dom", server.URL+"/keys?width=1240")
	require.Contains(t, keys, `<pre id="found">summaries true; stays true; · the list stands still while one is open or has the focus; `+
		`moves on true; focus on Endpoints of pool chat</pre>`)

	// axe-core's rules of accessibility, in both colour schemes and on a phone, with a decision open.
	if axe := filepath.Join("..", ".tools", "axe.min.js"); fileThere(axe) {
		mux.HandleFunc("/axe.js", func(w http.ResponseWriter, r *http.Request) { http.ServeFile(w, r, axe) })
		mux.HandleFunc("/axe", func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(w, `<!doctype html><body><iframe id=f title=page src="/" style="width:%spx;height:1900px"></iframe><pre id=found></pre><script>
setTimeout(() => { const d = f.contentDocument, s = d.createElement('script');
  d.querySelector('details').open = true;
  s.src = '/axe.js'; s.onload = () => f.contentWindow.axe.run(d, {iframes: false}).then(
    r => found.textContent = 'passes ' + r.passes.length + ' violations ' + JSON.stringify(r.violations.map(v => [v.id, v.nodes.map(n => n.html + n.failureSummary)])));
  d.head.append(s) }, 4000)</script>`, r.URL.Query().Get("width"))
		})
		for name, args := range map[string][]string{"light": nil, "dark": {"--blink-settings=preferredColorScheme=0"}} {
			for _, width := range []string{"1240", "390"} {
				found, _ := chromium(t, append(args, "--dump-dom", server.URL+"/axe?width="+width)...)
				_, found, _ = strings.Cut(found, `<pre id="found">`)
				found, _, _ = strings.Cut(found, "</pre>")
				require.Regexp(t, `^passes [1-9]\d violations \[\]$`, found, "%s, %s pixels wide", name, width)
			}
		}
	} else {
		t.Run("axe", func(t *testing.T) {
			t.Skip("no axe-core, so accessibility is not tested: scripts/tools.sh page installs it")
		})
	}

	if *screenshots {
		docs, err := filepath.Abs("../docs")
		require.NoError(t, err)
		chromium(t, "--window-size=1240,1500", "--screenshot="+filepath.Join(docs, "page.png"), server.URL+"/open?width=1240")
		chromium(t, "--window-size=390,2700", "--screenshot="+filepath.Join(docs, "page-phone.png"), server.URL+"/open?width=390")
	}
}

// With usage the page has tiles of tokens, first tokens and targets in place of headers, and a request says what it used.
func TestPageShowsTokens(t *testing.T) {
	t.Parallel()
	browser(t)
	f := start(t, options{top: "usage: {}\n", pool: "  targets: {ttft: 30s, tpot: 5s}\n",
		engineArgs: []string{"--decode-step", "5ms"}})
	stop := make(chan struct{})
	var clients sync.WaitGroup
	defer clients.Wait()
	defer close(stop)
	clients.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
			body := strings.Replace(apis[0].body, "{", `{"stream":true,"stream_options":{"include_usage":true},`, 1)
			_, _ = f.try(t.Context(), http.MethodPost, apis[0].path, body, "x-request-id", fmt.Sprintf("used-%d", i))
		}
	})
	soon(t, "tokens are counted", func() bool {
		return metric(t, f.admins[0], "tandem_tokens_total", `kind="generation"`) > 100
	})
	dom, log := chromium(t, "--dump-dom", f.admins[0]+"/")
	require.NotContains(t, log, "CONSOLE", "errors in the page's console")
	for _, tile := range []string{"first token p50", "first token p99", "answer tokens / s", "targets kept"} {
		require.Regexp(t, `<b>~?[0-9][^<]*</b><small>`+tile, dom)
	}
	require.NotContains(t, dom, "headers p50")
	require.Regexp(t, `Used: \d+ tokens of prompt \(\d+ cached\), 12 of answer, first token after`, dom)
}

func fileThere(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// A terminal shows the same.
func TestStatusInATerminal(t *testing.T) {
	t.Parallel()
	f := start(t, options{})
	require.Equal(t, 200, f.post("/v1/chat/completions", apis[0].body, "x-request-id", "seen-in-status").status)
	bin, err := binaries()
	require.NoError(t, err)
	out, err := exec.Command(filepath.Join(bin, "tandem"), "status", "-f", f.config).CombinedOutput()
	require.NoError(t, err, string(out))
	for _, e := range f.engines() {
		require.Contains(t, string(out), e.addr)
	}
	soon(t, "its request is shown", func() bool {
		out, err := exec.Command(filepath.Join(bin, "tandem"), "status", "-f", f.config).CombinedOutput()
		return err == nil && strings.Contains(string(out), "seen-in-status")
	})

	watching := startProcess(t, f.dir, "watch", filepath.Join(bin, "tandem"), "status", "-admin", strings.TrimPrefix(f.admins[0], "http://"), "--watch")
	require.Eventually(t, func() bool {
		text, err := os.ReadFile(watching.log)
		return err == nil && strings.Count(string(text), "\x1b[H\x1b[2J") >= 3
	}, patience, 50*time.Millisecond, "it is drawn again and again")
	watching.stop(os.Interrupt)
	out, err = exec.Command(filepath.Join(bin, "tandem"), "status", "-admin", "127.0.0.1:1").CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "is it running")
}
