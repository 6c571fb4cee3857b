package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	envoyconfigs "tandem/envoy-configs"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
	"tandem/replica/livecheck"
	"tandem/replica/proposal"
	"tandem/status/words"
)

// runner is `tandem run`: it asks engines what they are, writes the configuration that follows, and runs Tandem and
// Envoy with it.
type runner struct {
	group          programs
	stdout, stderr io.Writer

	file, envoyPath, level   string
	library                  string // folder of libtandem.so; "": Tandem is a process of its own
	prefill, decode, engines []string
	o                        proposal.Options
}

func newRun() *cobra.Command {
	r := &runner{group: programs{http: &http.Client{Timeout: 5 * time.Second}}}
	c := &cobra.Command{
		Use: "run [--prefill URL]... [--decode URL]...", Short: "Start Tandem and Envoy in front of engines that run", Args: arguments(0),
		Long: "Ask the engines what they are, write the configuration that follows, and start Tandem and Envoy with it, until\n" +
			"Ctrl-C. Without engines, the configuration is the file's.",
		Example: "  tandem run --prefill http://10.0.1.1:8000 --decode http://10.0.2.1:8000",
		RunE: func(c *cobra.Command, _ []string) error {
			r.stdout, r.stderr = c.OutOrStdout(), c.ErrOrStderr()
			return r.run(c.Context())
		},
	}
	f := c.Flags()
	f.StringArrayVar(&r.prefill, "prefill", nil, "`URL` of an engine that computes prompts; several: repeat it")
	f.StringArrayVar(&r.decode, "decode", nil, "`URL` of an engine that generates answers; several: repeat it")
	f.StringArrayVar(&r.engines, "engine", nil, "`URL` of an engine that does both, or says itself what it does")
	fileFlag(f, &r.file, "configuration `FILE` (YAML) to write; to read if no engine is named")
	f.StringVar(&r.o.Listen, "listen", "", "`ADDRESS` for clients (default: 127.0.0.1:8080, or the next port that is free)")
	f.StringVar(&r.o.KVTransfer, "kv-transfer", "", "the engines' `DIALECT` (default: as they say)")
	f.StringVar(&r.o.Split, "split", "", "`WHICH` requests are split: auto, always or never (default auto)")
	f.StringVar(&r.o.KeyFile, "api-key-file", "", "`FILE` with the engines' API key, for Tandem's own requests")
	f.StringVar(&r.envoyPath, "envoy", "", "Envoy `BINARY` (default: $ENVOY, envoy beside tandem or on PATH, .tools/bin/envoy)")
	f.StringVar(&r.library, "inside", "", "`FOLDER` of libtandem.so (make carrier), for Tandem inside Envoy (experimental)")
	f.StringVar(&r.level, "log", "warn", "lowest `LEVEL` that Tandem logs: debug, info, warn, error")
	return c
}

func (r *runner) run(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding this program: %w", err)
	}
	if _, err := logger(io.Discard, r.level, "text"); err != nil {
		return err
	}
	envoy, err := findEnvoy(r.envoyPath, filepath.Dir(self))
	if err != nil {
		return err
	}
	if r.library != "" {
		if err := r.group.loadLibrary(r.library); err != nil {
			return err
		}
		r.o.Inside = true
	}
	release, used := claim(r.file)
	defer release()
	if err := r.configure(ctx, used); err != nil {
		return err
	}
	cfg, models, err := r.check(ctx)
	if err != nil {
		return err
	}
	if r.group.dir, err = os.MkdirTemp("", "tandem-run-"); err != nil {
		return fmt.Errorf("making a folder for logs: %w", err)
	}
	defer r.group.stop()
	if err := r.startBoth(ctx, cfg, self, envoy); err != nil {
		if ctx.Err() != nil {
			return nil // it was interrupted while it started
		}
		return fmt.Errorf("%w; Envoy's log is %s", err, filepath.Join(r.group.dir, "envoy.log"))
	}
	r.say(self, cfg, models)
	return r.untilOneEnds(ctx)
}

// configure asks the engines that were named, and writes the configuration that follows from their answers, unless it is
// used: a Tandem that runs would at once send its clients' requests to these engines.
func (r *runner) configure(ctx context.Context, used bool) error {
	var engines []proposal.Engine
	for _, named := range []struct {
		role string
		urls []string
	}{{"prefill", r.prefill}, {"decode", r.decode}, {"", r.engines}} {
		for _, url := range named.urls {
			e, err := proposal.Parse(url, named.role)
			if err != nil {
				return err
			}
			engines = append(engines, e)
		}
	}
	if len(engines) == 0 {
		if _, err := os.Stat(r.file); err != nil {
			return fmt.Errorf("name the engines (--prefill URL --decode URL, or --engine URL for those that do both), or "+
				"a configuration with -f: %w", err)
		}
		return nil
	}
	engines = proposal.Merge(engines)
	if r.o.KeyFile != "" { // the configuration may be served from another folder
		path, err := filepath.Abs(r.o.KeyFile)
		if err != nil {
			return fmt.Errorf("--api-key-file: %w", err)
		}
		r.o.KeyFile = path
	}
	if used {
		return fmt.Errorf("%s is the configuration of a Tandem that runs: end that one, or name another file to write with -f", r.file)
	}
	if err := mayWrite(r.file); err != nil {
		return err
	}
	them := "1 engine what it is"
	if n := len(engines); n > 1 {
		them = fmt.Sprintf("%d engines what they are", n)
	}
	fmt.Fprintf(r.stdout, "Asking %s.\n", them)
	if err := proposal.Ask(ctx, engines, r.o.KeyFile); err != nil {
		return err
	}
	if err := r.choosePorts(); err != nil {
		return err
	}
	text, err := proposal.Write(engines, r.o)
	if err != nil {
		return err
	}
	if err := os.WriteFile(r.file, []byte(text), 0o644); err != nil { //nolint:gosec // it has no secrets
		return fmt.Errorf("writing the configuration (-f names another file): %w", err)
	}
	return nil
}

// mayWrite returns an error if the file is there and not this command's.
func mayWrite(file string) error {
	text, err := os.ReadFile(file)
	if err != nil || strings.HasPrefix(string(text), proposal.Mark+"\n") {
		return nil //nolint:nilerr // it is not there
	}
	return fmt.Errorf("%s is yours, and is not overwritten: `tandem run -f %s` without engines starts with it, -f names "+
		"another file to write", file, file)
}

// claim marks a configuration as used until release is called or this process ends. used: another process does already.
func claim(file string) (release func(), used bool) {
	path, err := filepath.Abs(file)
	if err != nil {
		return func() {}, false
	}
	// An abstract socket ends with its process, and stays if an editor puts another file in place of this one.
	l, err := net.Listen("unix", fmt.Sprintf("@tandem/%x", sha256.Sum256([]byte(path)))) //nolint:noctx // it does not block
	if err != nil {
		return func() {}, errors.Is(err, syscall.EADDRINUSE)
	}
	return func() { _ = l.Close() }, false
}

// choosePorts fills in the addresses: the configuration's defaults, or the next ports that are free.
func (r *runner) choosePorts() error {
	ports := []struct {
		to   *string
		port int
	}{{&r.o.Listen, 8080}, {&r.o.ExtProc, 9002}, {&r.o.Replan, 9003}, {&r.o.Admin, 9090}, {&r.o.EnvoyAdmin, 9901}}
	taken := map[string]bool{}
	for _, p := range ports {
		for n := p.port; *p.to == ""; n++ {
			address := net.JoinHostPort("127.0.0.1", strconv.Itoa(n))
			switch {
			case n > p.port+100:
				return fmt.Errorf("none of the ports %d to %d of 127.0.0.1 is free", p.port, n-1)
			case !taken[address] && free(address) == nil:
				*p.to = address
			}
		}
		taken[*p.to] = true
	}
	return nil
}

// free returns an error if an address cannot be listened at.
func free(address string) error {
	l, err := net.Listen("tcp", address) //nolint:noctx // it does not block
	if err != nil {
		return err
	}
	return l.Close()
}

// check reads the configuration, and compares it with the engines, as serve --check --live does.
func (r *runner) check(ctx context.Context) (*configv1.Config, []string, error) {
	cfg, warnings, err := config.Load(r.file, checkFiles)
	if err != nil {
		return nil, nil, err
	}
	for _, w := range warnings {
		fmt.Fprintf(r.stderr, "warning: %s\n", w)
	}
	switch inside := config.Inside(cfg); {
	case inside && r.library == "":
		return nil, nil, fmt.Errorf("%s: envoy.run is inside: name the folder of libtandem.so with --inside "+
			"(docs/howto/inside-envoy.md)", r.file)
	case !inside && r.library != "":
		return nil, nil, fmt.Errorf("%s: --inside, but envoy.run is not inside", r.file)
	}
	report := livecheck.Check(ctx, cfg, true)
	report.Print(r.stdout)
	if err := report.Err(); err != nil {
		return nil, nil, fmt.Errorf("%s:\n%w\nNothing was started. With `tandem serve -f %s` it starts all the same", r.file, err, r.file)
	}
	for setting, address := range map[string]string{"envoy.listen": cfg.GetEnvoy().GetListen(), "envoy.admin": cfg.GetEnvoy().GetAdmin()} {
		if err := free(address); err != nil { // Envoy would only log it
			return nil, nil, fmt.Errorf("%s: %s: %w", r.file, setting, err)
		}
	}
	for _, p := range cfg.GetPools() {
		if len(p.GetEndpoints()) == 1 && p.GetDiscovery() == nil {
			fmt.Fprintf(r.stdout, "pool %s has one engine, so none of its requests is split\n", p.GetName())
		}
	}
	return cfg, report.Models(), nil
}

// startBoth starts Tandem and Envoy, and waits until they answer.
func (r *runner) startBoth(ctx context.Context, cfg *configv1.Config, self, envoy string) error {
	bootstrap, err := r.bootstrap(cfg)
	if err != nil {
		return err
	}
	file := filepath.Join(r.group.dir, "envoy.yaml")
	if err := os.WriteFile(file, bootstrap, 0o600); err != nil {
		return fmt.Errorf("writing Envoy's bootstrap: %w", err)
	}
	if r.library == "" {
		log, _ := r.stderr.(*os.File) // nil: nobody reads it
		if err := r.group.launchTo("tandem", log, self, "serve", "-f", r.file, "--log", r.level); err != nil {
			return err
		}
	}
	if err := r.group.launch("envoy", envoy, "-c", file, "-l", "warning", "--disable-hot-restart"); err != nil {
		return err
	}
	for _, url := range []string{r.page(cfg) + "readyz", "http://" + config.Reached(cfg.GetEnvoy().GetAdmin()) + "/ready",
		r.url(cfg) + "/v1/models"} {
		if err := r.group.wait(ctx, url); err != nil {
			return err
		}
	}
	return nil
}

// bootstrap is Envoy's: it gets the rest from Tandem, or loads Tandem.
func (r *runner) bootstrap(cfg *configv1.Config) ([]byte, error) {
	if r.library == "" {
		return envoyconfigs.DynamicBootstrap(cfg)
	}
	file, err := filepath.Abs(r.file)
	if err != nil {
		return nil, err
	}
	return envoyconfigs.Inside(cfg, file)
}

func (r *runner) url(cfg *configv1.Config) string {
	return "http://" + config.Reached(cfg.GetEnvoy().GetListen())
}

func (r *runner) page(cfg *configv1.Config) string {
	return "http://" + config.Reached(cfg.GetAdmin().GetListen()) + "/"
}

// say tells the reader what runs, and what to do next: with this program's path, for it need not be on PATH.
func (r *runner) say(self string, cfg *configv1.Config, models []string) {
	file, err := filepath.Abs(r.file)
	if err != nil {
		file = r.file
	}
	model, also, key := "MODEL", "", cfg.GetPools()[0].GetApiKeyFile()
	if len(models) > 0 {
		model = models[0]
	}
	if len(models) > 1 {
		also = ", to " + words.Plain(model) + " (it serves " + words.Plain(strings.Join(models[1:], ", ")) + ", too)"
	}
	fmt.Fprintf(r.stdout, "\nTandem and Envoy run. OpenAI and Anthropic API: %s/v1\nPage: %s\nConfiguration: %s (changes take "+
		"effect when it is saved)\nEnvoy's bootstrap and log: %s\n\nA short request, and one with a long prompt%s:\n\n%s\n%s\n"+
		"Where they went:\n\n  %s requests -f %s\n\nCtrl-C ends both.\n", r.url(cfg), r.page(cfg), file, r.group.dir, also,
		curl(r.url(cfg), key, model, "Hello"), curl(r.url(cfg), key, model, "$(seq -s ' ' 1 1500)"), self, file)
}

// curl is a request that can be pasted into a shell. key: the file of the engines' API key, or "".
func curl(url, key, model, content string) string {
	body := fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":%q}],"max_tokens":16}`, model, content)
	quoted := "'" + body + "'"
	if strings.Contains(content, "$") {
		quoted = `"` + strings.ReplaceAll(body, `"`, `\"`) + `"`
	}
	if key != "" {
		key = fmt.Sprintf(" -H \"authorization: Bearer $(cat %q)\"", key)
	}
	return fmt.Sprintf("  curl %s/v1/chat/completions -H 'content-type: application/json'%s \\\n    -d %s\n", url, key, quoted)
}

// untilOneEnds waits for ctx, which is how this command is meant to end, or for the end of Tandem or Envoy.
func (r *runner) untilOneEnds(ctx context.Context) error {
	first, last := &r.group.started[0], &r.group.started[len(r.group.started)-1] // one and the same inside Envoy
	select {
	case <-ctx.Done():
		fmt.Fprintln(r.stdout, "\nEnding Envoy and Tandem.")
		r.group.stop()
		_ = os.RemoveAll(r.group.dir)
		return nil
	case <-last.ended:
		return fmt.Errorf("Envoy has ended (%s); so Tandem ends, too: see %s", //nolint:staticcheck // a name
			last.cmd.ProcessState, filepath.Join(r.group.dir, "envoy.log"))
	case <-first.ended:
		return errors.New("tandem serve has ended; so Envoy ends, too")
	}
}
