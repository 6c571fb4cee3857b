package migration

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"
	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
)

var update = flag.Bool("update", false, "write testdata/*.txtar")

// TestTranscripts follows answers through the package. A file of testdata has the client's request, and then what
// happens; a file "client ..." is what the client gets of it, and is written by -update:
//
//	engine N    the next bytes of engine N's answer. In the transcript each event is one line
//	end         the answer has ended in the regular way
//	continue    the request to the next engine, or why there is none
//	finish      the end of an answer whose finish reason the client has
//	release     what was held back
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txtar")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			archive, err := txtar.ParseFile(file)
			require.NoError(t, err)
			want := string(txtar.Format(archive))
			got := string(txtar.Format(transcript(t, archive)))
			if *update {
				require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
				return
			}
			require.Equal(t, want, got)
		})
	}
}

func transcript(t *testing.T, a *txtar.Archive) *txtar.Archive {
	t.Helper()
	var r *openai.Request
	var s Stream
	out := &txtar.Archive{Comment: a.Comment}
	add := func(name string, data []byte) {
		text := strings.ReplaceAll(string(data), "\n\n", "\n")
		if text != "" && !strings.HasSuffix(text, "\n") {
			text += "\n"
		}
		out.Files = append(out.Files, txtar.File{Name: name, Data: []byte(text)})
	}
	state := func() string {
		if s.Broken() != "" {
			return ", broken: " + string(s.Broken())
		}
		if s.Reason() != "" {
			return ", cannot be continued: " + string(s.Reason())
		}
		return ""
	}
	for _, f := range a.Files {
		verb, arg, _ := strings.Cut(f.Name, " ")
		if verb == "client" || verb == "request" {
			continue
		}
		add(f.Name, f.Data)
		switch verb {
		case "chat", "completions", "messages":
			api := map[string]openai.API{"chat": openai.Chat, "completions": openai.Completions, "messages": openai.Messages}[verb]
			r = scan(t, api, string(f.Data))
			s = NewStream(r, Policy{MaxBytes: number(arg)})
			add("request", asked(r, &s))
		case "engine":
			events := strings.ReplaceAll(strings.ReplaceAll(string(f.Data), "\n", "\n\n"), "\n\ndata: {\"type\"", "\ndata: {\"type\"")
			data := s.Feed(nil, []byte(events))
			add("client gets"+state(), data)
		case "end":
			data := s.End(nil)
			add("client gets"+state(), data)
		case "continue":
			next, reason := continued(r, &s)
			if reason != "" {
				add("request none: "+string(reason), nil)
			} else {
				add("request", next)
			}
		case "finish":
			add("client gets", s.Finish(nil))
		case "release":
			add("client gets", s.Release(nil))
		default:
			require.Fail(t, "unknown", f.Name)
		}
	}
	return out
}

func number(text string) int {
	if text == "" {
		return 0
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		panic(fmt.Sprintf("%q is not a number of bytes", text))
	}
	return n
}
