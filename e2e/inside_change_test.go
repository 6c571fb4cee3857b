package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// Envoy restarts hot: answers end in the old process, requests that come begin in the new one, and nobody notices. The
// admin port of Tandem is the old process's until that ends.
func TestInsideHotRestart(t *testing.T) {
	f := insuredFleet(t, options{prefills: 1, decodes: 2, engineArgs: []string{"--decode-step", "15ms"}})
	idFile := filepath.Join(f.dir, "base-id")
	old := f.second(nil, "--base-id-path", idFile, "--drain-time-s", "3") // meanwhile Envoy closes clients' connections after an answer
	id, err := os.ReadFile(idFile)
	require.NoError(t, err)
	load := old.wholeTraffic(4)
	load.more(t, 20)
	running := old.begin("hot", 8, 300, 5)

	next := startProcess(t, old.dir, "envoy-next", tool(t, "ENVOY", "envoy", ".tools/bin/envoy"), "-c",
		filepath.Join(old.dir, "envoy.yaml"), "-l", "warning", "--base-id", strings.TrimSpace(string(id)), "--restart-epoch", "1",
		"--parent-shutdown-time-s", "20", "--concurrency", "2")
	soon(t, "the new process serves", func() bool {
		var s struct {
			Options struct {
				Epoch int `json:"restart_epoch"`
			} `json:"command_line_options"`
		}
		return getJSON(old.envoyURL+"/server_info", &s) == nil && s.Options.Epoch == 1
	})
	load.more(t, 40)
	running.whole(old.decodes[0])
	<-old.envoy.exited
	soon(t, "Tandem's port is the new process's", func() bool { return answers(old.admins[0] + "/readyz") })
	load.more(t, 20)
	require.Positive(t, metric(t, old.admins[0], "tandem_streams_insured_total", `result="insured"`))
	old.begin("afterwards", 2, 300, 5).whole(old.decodes[0])
	load.end(t)
	next.stop(syscall.SIGTERM)
}

// dynamic takes a bootstrap's listener out of it, into a file that Envoy watches.
func dynamic(t *testing.T) func(dir string, bootstrap []byte) []byte {
	return func(dir string, bootstrap []byte) []byte {
		t.Helper()
		before, rest, found := strings.Cut(string(bootstrap), "  listeners:\n  - ")
		require.True(t, found)
		listener, after, found := strings.Cut(rest, "  clusters:\n")
		require.True(t, found)
		file := filepath.Join(dir, "lds.yaml")
		require.NoError(t, os.WriteFile(file, []byte("resources:\n  - \"@type\": type.googleapis.com/envoy.config.listener.v3.Listener\n    "+listener), 0o600))
		return fmt.Appendf(nil, "dynamic_resources: {lds_config: {path_config_source: {path: %q}}}\n%s  clusters:\n%s", file, before, after)
	}
}

// A control plane of the user's own has the listener from `tandem envoy`. It replaces it while streams run: they end
// in the old one, and both are one replica. A listener for another file is another replica; one whose file is not there is
// refused, and costs nothing.
func TestInsideListenerChanges(t *testing.T) {
	f := insuredFleet(t, options{prefills: 1, decodes: 2, engineArgs: []string{"--decode-step", "15ms"}})
	// Answers end within it however long the machine stands still; clients' connections end with the next one.
	e := f.second(dynamic(t), "--drain-time-s", "120", "--drain-strategy", "immediate")
	e.serves()
	first, err := os.ReadFile(filepath.Join(e.dir, "lds.yaml"))
	require.NoError(t, err)
	change := func(old, now string) {
		t.Helper()
		require.Contains(t, string(first), old)
		file := filepath.Join(e.dir, "lds.yaml")
		require.NoError(t, os.WriteFile(file+".new", []byte(strings.ReplaceAll(string(first), old, now)), 0o600))
		require.NoError(t, os.Rename(file+".new", file))
	}
	load := e.wholeTraffic(4)
	load.more(t, 20)
	began := metric(t, e.admins[0], "tandem_config_applied_timestamp_seconds")
	var streams []*answersUnderWay
	for i := range 3 {
		streams = append(streams, e.begin(fmt.Sprint("listener-", i), 4, 300, 5))
		change("    per_connection_buffer_limit_bytes:", fmt.Sprintf("    metadata: {filter_metadata: {n: {n: %d}}}\n    per_connection_buffer_limit_bytes:", i))
		soon(t, "it has the listener", func() bool { return e.envoyStat("listener_manager.listener_modified") == i+1 })
		load.more(t, 20)
	}
	require.InDelta(t, began, metric(t, e.admins[0], "tandem_config_applied_timestamp_seconds"), 0, "it is the same replica")

	change(e.config, e.config+".missing")
	soon(t, "it is refused", func() bool { return e.envoyStat("listener_manager.lds.update_rejected") > 0 })
	e.said(0, ".missing", 1)
	load.more(t, 20)

	admin := "http://" + ports(t, 1)[0]
	text, err := os.ReadFile(e.config)
	require.NoError(t, err)
	other := strings.Replace(string(text), strings.TrimPrefix(e.admins[0], "http://"), strings.TrimPrefix(admin, "http://"), 1)
	require.NoError(t, os.WriteFile(e.config+".other", []byte(other), 0o600))
	streams = append(streams, e.begin("another", 4, 300, 5))
	change(e.config, e.config+".other")
	soon(t, "there is another replica", func() bool { return answers(admin + "/readyz") })
	load.more(t, 40)
	for _, s := range streams {
		s.whole(e.decodes[0])
	}
	load.end(t)
	require.Positive(t, metric(t, admin, "tandem_streams_insured_total"))
}
