package extproc

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"
	"github.com/stretchr/testify/require"

	"tandem/extproc/names"
	"tandem/extproc/plan"
)

// TestEncodeGolden follows chats with media through all legs: testdata/encode/*.txtar hold what the client sent and what
// the encode and the prefill endpoint answered. What each leg is sent is checked, or rewritten with -update. The files
// are also what `make e2e-oracles` has vLLM's own code read.
func TestEncodeGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/encode/*.txtar")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			archive, err := txtar.ParseFile(file)
			require.NoError(t, err)
			got := encodeLegs(t, archive)
			if *update {
				require.NoError(t, os.WriteFile(file, txtar.Format(got), 0o644))
				return
			}
			require.Equal(t, string(txtar.Format(archive)), string(txtar.Format(got)))
		})
	}
}

// encodeLegs gives the archive as it should be: its request and answers, and what every leg is sent.
func encodeLegs(t *testing.T, a *txtar.Archive) *txtar.Archive {
	has := map[string][]byte{}
	for _, f := range a.Files {
		has[f.Name] = bytes.TrimSuffix(f.Data, []byte("\n"))
	}
	got := &txtar.Archive{Comment: a.Comment}
	add := func(name string, data []byte) { got.Files = append(got.Files, txtar.File{Name: name, Data: data}) }
	s := encodeStand(t, "e1", "p1", "d1")
	q := s.newRequest("/v1/chat/completions", "r1", string(has["request"]))
	add("request", has["request"])

	require.Equal(t, plan.LegEncode, q.pass().set[names.HeaderLeg])
	l, body := q.through(s, names.RoleEncodeLeg)
	add("encode request", []byte(body))
	add("encode answer", has["encode answer"])
	l.answer(200, string(has["encode answer"]))
	l.redirected(q)

	v := q.pass()
	if prefilled := has["prefill answer"]; prefilled != nil {
		require.Equal(t, plan.LegPrefill, v.set[names.HeaderLeg])
		add("prefill request", v.body)
		add("prefill answer", prefilled)
		q.prefillLeg(engineAnswer{status: 200, body: prefilled})
		q.follow()
		v = q.pass()
	}
	require.Equal(t, plan.LegDecode, v.set[names.HeaderLeg])
	add("decode request", v.body)
	q.settled()
	return got
}
