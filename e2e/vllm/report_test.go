//go:build vllm

package vllm

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// report is the results of the checks, as Markdown.
type report struct {
	versions string
	rows     []string
	aborted  int // requests of mixed that clients left
}

// row adds a check, its number of requests (0: none of its own), and the result.
func (r *report) row(check string, requests int, seen string) {
	count := ""
	if requests > 0 {
		count = fmt.Sprint(requests)
	}
	r.rows = append(r.rows, fmt.Sprintf("| %s | %s | %s |", check, count, seen))
}

// print writes the report to standard output.
func (r *report) print(t *testing.T) {
	t.Helper()
	fmt.Printf("\n%s.\n\n| Check | Requests | Seen |\n|---|---|---|\n%s\n\n", r.versions, strings.Join(r.rows, "\n"))
}

// versions returns the versions of the programs.
func (s *suite) versions(t *testing.T) string {
	t.Helper()
	answer, err := http.Get("http://" + s.reference.addr + "/version")
	require.NoError(t, err)
	defer func() { _ = answer.Body.Close() }()
	var version struct{ Version string }
	require.NoError(t, json.NewDecoder(answer.Body).Decode(&version))
	reference := "and one without KV transfer"
	if s.reference == s.prefill[0] {
		reference = "the prefill engine alone"
	}
	return fmt.Sprintf("%s: vLLM %s, kvTransfer %s, %d prefill and %d decode engines, %s as the reference",
		time.Now().UTC().Format(time.DateOnly), version.Version, dialect(), len(s.prefill), len(s.decode), reference)
}

func percentiles(d []time.Duration) string {
	slices.Sort(d)
	at := func(share float64) float64 { return float64(d[int(share*float64(len(d)-1))].Microseconds()) / 1000 }
	return fmt.Sprintf("%.1f / %.1f ms", at(0.5), at(0.95))
}
