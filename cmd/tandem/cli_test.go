package main

import (
	"context"
	"flag"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/stretchr/testify/require"

	"tandem/e2e/loopback"
)

// TestMain makes the program itself a command of the scripts.
func TestMain(m *testing.M) { testscript.Main(m, map[string]func(){"tandem": main}) }

// The scripts run the program as its users do: testdata/cli/*.txtar.
func TestCommandLine(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:           "testdata/cli",
		UpdateScripts: *update,
		Setup: func(e *testscript.Env) error {
			addrs, letGo, err := loopback.Take(3)
			if err != nil {
				return err
			}
			e.Defer(letGo)
			e.Setenv("EXTPROC", addrs[0])
			e.Setenv("REPLAN", addrs[1])
			e.Setenv("ADMIN", addrs[2])
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			// await URL: until it answers 200.
			"await": func(ts *testscript.TestScript, _ bool, args []string) {
				for deadline := time.Now().Add(time.Minute); ; <-time.After(20 * time.Millisecond) {
					if resp, err := http.Get(args[0]); err == nil {
						_ = resp.Body.Close()
						if resp.StatusCode == http.StatusOK {
							return
						}
					}
					if time.Now().After(deadline) {
						ts.Fatalf("%s does not answer", args[0])
					}
				}
			},
			// expand FILE: replaces $NAME in it.
			"expand": func(ts *testscript.TestScript, _ bool, args []string) {
				text := os.Expand(ts.ReadFile(args[0]), ts.Getenv)
				ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(text), 0o600))
			},
		},
	})
}

// Every command explains itself with status 0 and refuses flags and arguments that it does not know.
func TestEveryCommand(t *testing.T) {
	names := regexp.MustCompile(`(?m)^  (\w+) `).FindAllStringSubmatch(printed(t, "--help"), -1)
	require.GreaterOrEqual(t, len(names), 12)
	for _, n := range names {
		name := n[1]
		if name == "tandem" {
			continue
		}
		require.Contains(t, printed(t, name, "--help"), "Usage:", name)
		if name == "help" || name == "completion" { // those are of cobra
			continue
		}
		var out strings.Builder
		require.ErrorContains(t, run(t.Context(), []string{name, "--no-such-flag"}, &out, &out), "no-such-flag", name)
		require.Error(t, run(t.Context(), []string{name, "one", "two", "three", "four"}, &out, &out), name)
	}
}

func printed(t *testing.T, args ...string) string {
	t.Helper()
	var out, errs strings.Builder
	require.NoError(t, run(context.WithoutCancel(t.Context()), args, &out, &errs), args)
	require.Empty(t, errs.String(), args)
	return out.String()
}

// The units of deploy/systemd call commands and flags that exist.
func TestSystemdUnits(t *testing.T) {
	for _, unit := range []string{"tandem.service", "tandem-envoy.service"} {
		text, err := os.ReadFile("../../deploy/systemd/" + unit)
		require.NoError(t, err)
		calls := regexp.MustCompile(`(?m)^Exec\w+=.*/usr/local/bin/tandem ([^>'\n]+)`).FindAllStringSubmatch(string(text), -1)
		require.NotEmpty(t, calls)
		for _, call := range calls {
			printed(t, append(strings.Fields(call[1]), "--help")...)
		}
	}
}

var update = flag.Bool("update", false, "rewrite docs/cli.md, docs/metrics.md and what the scripts compare")

// docs/cli.md has the help of every command.
func TestCommandReference(t *testing.T) {
	want := "# Commands\n\nWritten by `go test ./cmd/tandem -run TestCommandReference -update` from what `tandem COMMAND --help` prints.\n" +
		"[Columns and notes](operations.md#columns-and-notes) explains what status, requests and explain show.\n\n" +
		"Commands that ask a replica have these flags, which are left out below:\n\n```text\n"
	asking := regexp.MustCompile(`(?m)^ +(?:-\w, )?--(?:admin ADDRESS|file FILE +configuration FILE \(YAML\), for|output FORMAT +FORMAT: table|token-file) .*\n`)
	want += strings.Join(asking.FindAllString(printed(t, "explain", "--help"), -1), "") + "```\n"
	help := regexp.MustCompile(`(?m)^  -h, --help +help for .*\n`)
	for _, name := range []string{"run", "serve", "envoy", "status", "requests", "explain", "drain", "pause", "resume", "weights", "record", "demo", "replay", "profile"} {
		text := help.ReplaceAllString(asking.ReplaceAllString(printed(t, name, "--help"), ""), "")
		want += "\n## tandem " + name + "\n\n```text\n" + strings.TrimSuffix(text, "\nFlags:\n") + "```\n"
	}
	want += "\n`tandem version` prints the version, `tandem schema` the JSON Schema of the configuration, `tandem completion SHELL` the completions of a shell.\n"
	if *update {
		require.NoError(t, os.WriteFile("../../docs/cli.md", []byte(want), 0o600))
	}
	got, err := os.ReadFile("../../docs/cli.md")
	require.NoError(t, err)
	require.Equal(t, want, string(got), "run go test ./cmd/tandem -run TestCommandReference -update")
}

func TestColoured(t *testing.T) {
	require.Equal(t, "x", coloured(&strings.Builder{}, "x"), "not a terminal")
}
